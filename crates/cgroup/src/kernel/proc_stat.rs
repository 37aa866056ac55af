//! Name, state, start time and I/O wait of a task: /proc/PID[/task/TID]/stat.
//!
//! ```text
//!   2301 (kworker/u8:2-ev) I 2 0 …
//!   17 (a) (b) S 1 …                  a name may contain any character: it ends at the last parenthesis
//! ```
//!
//! Source: proc_pid_stat(5), whose field numbers are used here.

use std::time::Duration;

use super::{UnknownFormat, count};

const FILE: &str = "/proc/PID/stat";
/// USER_HZ is 100 on every architecture of Rust on Linux (include/uapi/asm-generic/param.h).
pub(crate) const TICK: Duration = Duration::from_millis(10);
const START: usize = 22;
const BLKIO_DELAY: usize = 42;
/// The field after the state.
const PARENT: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskStat {
    pub(crate) pid: i32,
    /// Up to 15 bytes, longer for kernel workers; newlines and backslashes appear as `\n` and `\\`.
    pub(crate) name: String,
    /// `R` runnable, `S` sleeping, `D` in uninterruptible sleep (mostly I/O), and others.
    pub(crate) state: char,
    /// Parent's pid; 0 if it has no parent in this namespace.
    pub(crate) parent: i32,
    /// Start time in ticks (`_SC_CLK_TCK`) since boot; with the pid it identifies a task uniquely.
    pub(crate) start_ticks: u64,
    /// I/O wait in ticks; 0 if delay accounting is off (`kernel.task_delayacct`), the default since
    /// Linux 5.14.
    pub(crate) blkio_delay_ticks: u64,
}

pub(crate) fn parse(text: &str) -> Result<TaskStat, UnknownFormat> {
    parse_text(text).ok_or_else(|| UnknownFormat::new(FILE, text))
}

fn parse_text(text: &str) -> Option<TaskStat> {
    let (pid, rest) = text.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = count(fields.next()?)?;
    // `nth` counts the fields skipped since the last one that was read.
    let start_ticks = count(fields.nth(START - PARENT - 1)?)?;
    let blkio_delay_ticks = count(fields.nth(BLKIO_DELAY - START - 1)?)?;
    let mut state = state.chars();
    Some(TaskStat {
        pid: count(pid)?,
        name: name.to_owned(),
        state: state.next().filter(|_| state.next().is_none())?,
        parent,
        start_ticks,
        blkio_delay_ticks,
    })
}
