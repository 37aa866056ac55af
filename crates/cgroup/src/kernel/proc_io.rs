//! I/O counters of a process or a task: /proc/PID/io and /proc/PID/task/TID/io.
//!
//! ```text
//!   rchar: 323934931      bytes requested by read(2) and similar calls, including page cache hits
//!   syscr: 632687         number of read(2) and similar calls
//!   read_bytes: 65536     bytes fetched from storage
//!   write_bytes: 4096     bytes sent to storage; a buffered write counts when it dirties the page
//! ```
//!
//! Source: proc_pid_io(5).

use super::{UnknownFormat, count};

const FILE: &str = "/proc/PID/io";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TaskIo {
    pub(crate) rchar: u64,
    pub(crate) wchar: u64,
    pub(crate) syscr: u64,
    pub(crate) syscw: u64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    /// Bytes of dirty pages that were truncated before writeback.
    pub(crate) cancelled_write_bytes: u64,
}

/// Parses all keys; a key that the kernel lacks is 0. An empty file is an error.
pub(crate) fn parse(text: &str) -> Result<TaskIo, UnknownFormat> {
    let mut io = TaskIo::default();
    if text.trim().is_empty() {
        return Err(UnknownFormat::new(FILE, text));
    }
    for line in text.lines() {
        set(&mut io, line).ok_or_else(|| UnknownFormat::new(FILE, line))?;
    }
    Ok(io)
}

fn set(io: &mut TaskIo, line: &str) -> Option<()> {
    let (key, value) = line.split_once(':')?;
    let total = match key {
        "rchar" => &mut io.rchar,
        "wchar" => &mut io.wchar,
        "syscr" => &mut io.syscr,
        "syscw" => &mut io.syscw,
        "read_bytes" => &mut io.read_bytes,
        "write_bytes" => &mut io.write_bytes,
        "cancelled_write_bytes" => &mut io.cancelled_write_bytes,
        _ => return Some(()),
    };
    *total = count(value.trim())?;
    Some(())
}
