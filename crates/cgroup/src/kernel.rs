//! What the kernel's files say: one parser a format, text in, values out.
//!
//! ```text
//!   cgroup v2   io_stat   io_max   io_latency   weight    nested.rs: the form that io.* files share
//!               pressure   memory_stat
//!   cgroup v1   blkio
//!   processes   proc_cgroup   proc_io   proc_stat
//!   mounts      mountinfo
//! ```
//!
//! Unknown keys are skipped, as cgroup-v2.rst, "Conventions", asks. A line of an undocumented form
//! is [`Unknown`]: guessed figures would become limits. `samples/` holds what kernels from 2.6.32
//! to 6.18 print. Never opens a file and never panics: whoever makes a cgroup or names a process
//! influences these texts.

pub(crate) mod blkio;
pub(crate) mod io_latency;
pub(crate) mod io_max;
pub(crate) mod io_stat;
pub(crate) mod memory_stat;
pub(crate) mod mountinfo;
mod nested;
pub(crate) mod pressure;
pub(crate) mod proc_cgroup;
pub(crate) mod proc_io;
pub(crate) mod proc_stat;
pub(crate) mod weight;

#[doc(hidden)]
pub mod fuzzing;
#[cfg(test)]
mod tests;

use block::device::Number;

const MAX_LINE_CHARS: usize = 120;

/// A line that no known kernel prints.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: a line of unknown form: {line:?} (weir does not know this kernel's {what})")]
pub(crate) struct Unknown {
    pub(crate) what: &'static str,
    /// Cut after [`MAX_LINE_CHARS`].
    pub(crate) line: String,
}

impl Unknown {
    pub(crate) fn new(what: &'static str, line: &str) -> Self {
        let mut kept: String = line.chars().take(MAX_LINE_CHARS).collect();
        if kept.len() < line.len() {
            kept.push('…');
        }
        Self { what, line: kept }
    }
}

/// As the kernel writes it, `8:0`, and in no other way.
pub(crate) fn number(text: &str) -> Option<Number> {
    let (major, minor) = text.split_once(':')?;
    Some(Number { major: count(major)?, minor: count(minor)? })
}

/// Digits alone: `str::parse` would take a sign, which no kernel writes.
fn count<T: std::str::FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}
