//! Parsers of the kernel's files, one for each format: text in, values out.
//!
//! ```text
//!   cgroup v2   io_stat   io_max   io_latency   weight    nested.rs: the format that io.* files share
//!               pressure   memory_stat
//!   cgroup v1   blkio
//!   processes   proc_cgroup   proc_io   proc_stat
//!   mounts      mountinfo
//! ```
//!
//! Unknown keys are skipped, as cgroup-v2.rst, "Conventions", demands. A line of an undocumented
//! format is [`UnknownFormat`]: guessed values would become limits. `samples/` has the output of
//! kernels from 2.6.32 to 6.18. Never opens a file and never panics: the names of cgroups and
//! processes in these texts are chosen by users.

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

use block::device::DeviceNumber;

const MAX_LINE_CHARS: usize = 120;

/// A line in a format that no known kernel prints.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: unknown line format: {line:?} (this kernel's {what} is not supported)")]
pub(crate) struct UnknownFormat {
    pub(crate) what: &'static str,
    /// Truncated to [`MAX_LINE_CHARS`].
    pub(crate) line: String,
}

impl UnknownFormat {
    pub(crate) fn new(file: &'static str, line: &str) -> Self {
        let mut truncated: String = line.chars().take(MAX_LINE_CHARS).collect();
        if truncated.len() < line.len() {
            truncated.push('…');
        }
        Self { what: file, line: truncated }
    }
}

/// Parses a device number in the kernel's format, `8:0`.
pub(crate) fn number(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.split_once(':')?;
    Some(DeviceNumber { major: count(major)?, minor: count(minor)? })
}

/// Parses digits only: `str::parse` would accept a sign, which the kernel never prints.
fn count<T: std::str::FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}
