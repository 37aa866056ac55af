//! Tasks that submitted requests to a disk, and time that the worker was throttled, from the
//! kernel's tracepoints. Uses a separate trace instance, which is removed when dropped.
//!
//! ```text
//!   block:block_bio_queue            a request enters the disk's queue. The task that submits it shows its path:
//!        the writer                    not throttled
//!        kworker/u8:2                  a writeback worker (unbound workers have a `u` in their names)
//!        kworker/1:0                   blk-throttle's worker: the request was throttled
//!        jbd2/vda-8                    a journal's thread
//!   writeback:balance_dirty_pages    a writer is throttled because of too many dirty pages
//! ```
//!
//! A throttled request is submitted by another thread (`blk_throtl_dispatch_work_fn` in
//! block/blk-throttle.c). Source: Documentation/trace/ftrace.rst, "Instances";
//! Documentation/core-api/workqueue.rst for the names.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use block::device::DeviceNumber;
use serde::Serialize;

const LEFT_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct TraceTotals {
    #[serde(rename = "sent-by-process-bytes")]
    pub(super) by_process: u64,
    /// Submitted by blk-throttle after waiting for the limit.
    #[serde(rename = "sent-by-throttle-bytes")]
    pub(super) by_throttle: u64,
    #[serde(rename = "sent-by-writeback-bytes")]
    pub(super) by_writeback: u64,
    /// Submitted by other threads, such as a journal's.
    #[serde(rename = "sent-by-others-bytes")]
    pub(super) by_others: u64,
    /// Milliseconds that the worker waited in `balance_dirty_pages`.
    #[serde(rename = "held-in-balance-dirty-pages-ms")]
    pub(super) held_ms: u64,
}

#[derive(Debug)]
pub(super) struct TraceInstance {
    directory: PathBuf,
}

impl TraceInstance {
    pub(super) fn begin(tracefs: &Path, name: &str, disk: DeviceNumber) -> io::Result<Self> {
        // A separate instance leaves the machine's main trace untouched (ftrace.rst,
        // "Instances").
        let directory = tracefs.join("instances").join(name);
        fs::create_dir(&directory)?;
        let trace = Self { directory };
        // dev_t in the kernel's internal layout (include/linux/kdev_t.h), not that of stat(2).
        let dev = disk.major << 20 | disk.minor;
        // The filter precedes enabling, so that no event of another disk is recorded.
        trace.write("events/block/block_bio_queue/filter", &format!("dev == {dev}"))?;
        trace.write("events/block/block_bio_queue/enable", "1")?;
        trace.write("events/writeback/balance_dirty_pages/enable", "1")?;
        Ok(trace)
    }

    /// Returns a closure that removes the trace, for the signal handler.
    pub(super) fn removal(&self) -> impl Fn() + Send + 'static + use<> {
        let directory = self.directory.clone();
        move || remove(&directory)
    }

    pub(super) fn clear(&self) -> io::Result<()> {
        // Any write truncates the trace (ftrace.rst, "trace").
        self.write("trace", "\n")
    }

    pub(super) fn read(&self, process: u32) -> io::Result<TraceTotals> {
        let text = fs::read(self.directory.join("trace"))?;
        Ok(parse(&String::from_utf8_lossy(&text), process))
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.directory.join(file), text)
    }
}

impl Drop for TraceInstance {
    fn drop(&mut self) {
        remove(&self.directory);
    }
}

/// Removes a trace with its events. The kernel returns EBUSY while another thread has a file of it
/// open, which lasts tens of milliseconds.
fn remove(directory: &Path) {
    let begin = Instant::now();
    while let Err(error) = fs::remove_dir(directory) {
        if error.kind() != io::ErrorKind::ResourceBusy || begin.elapsed() > LEFT_WITHIN {
            return;
        }
        thread::yield_now();
    }
}

/// Sums up the lines of both tracepoints; other lines are skipped.
fn parse(text: &str, process: u32) -> TraceTotals {
    let mut traced = TraceTotals::default();
    for line in text.lines() {
        let Some((task, event, arguments)) = split(line) else {
            continue;
        };
        match event {
            "block_bio_queue" => {
                if let Some(bytes) = bytes(arguments) {
                    *counter_of_task(&mut traced, task, process) += bytes;
                }
            }
            // Negative if the kernel computed no pause: does not parse as unsigned, so it counts as
            // 0.
            "balance_dirty_pages" if pid(task) == Some(process) => {
                traced.held_ms +=
                    field(arguments, "pause=").and_then(|pause| pause.parse().ok()).unwrap_or(0);
            }
            _ => {}
        }
    }
    traced
}

/// Splits `dd-1234  [000] ..... 12.3: block_bio_queue: 254,0 WS 8 + 8 [dd]` into task, event and
/// arguments.
fn split(line: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = line.split_once(": ")?;
    let (event, arguments) = rest.split_once(": ")?;
    let (task, _) = before.split_once(" [")?;
    Some((task.trim(), event, arguments))
}

fn pid(task: &str) -> Option<u32> {
    // With the option `record-tgid`, the thread group's id follows in brackets.
    task.split_once(" (").map_or(task, |(name, _)| name).trim().rsplit_once('-')?.1.parse().ok()
}

fn counter_of_task<'a>(traced: &'a mut TraceTotals, task: &str, process: u32) -> &'a mut u64 {
    if pid(task) == Some(process) {
        &mut traced.by_process
    // Unbound workers, which also match the prefix of the next branch.
    } else if task.starts_with("kworker/u") || task.starts_with("writeback-") {
        &mut traced.by_writeback
    } else if task.starts_with("kworker/") || task.starts_with("kthrotld") {
        &mut traced.by_throttle
    } else {
        &mut traced.by_others
    }
}

/// Bytes of `254,0 WS 1260299776 + 1024 [x]`, which counts sectors of 512 bytes.
fn bytes(arguments: &str) -> Option<u64> {
    let sectors = arguments.split_once(" + ")?.1.split(' ').next()?;
    sectors.parse::<u64>().ok()?.checked_mul(512)
}

fn field<'a>(arguments: &'a str, name: &str) -> Option<&'a str> {
    arguments.split(' ').find_map(|argument| argument.strip_prefix(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of 6.18; `kthrotld` is the dedicated thread of older kernels.
    const TEXT: &str = "\
# tracer: nop
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
     kworker/1:0-323     [001] ..... 10929.540355: block_bio_queue: 254,0 WS 1260299776 + 1024 [kworker/1:0]
        kthrotld-77      [001] ..... 10929.640390: block_bio_queue: 254,0 WS 1260300800 + 1024 [kthrotld]
            weir-4711    [000] ..... 10929.700000: block_bio_queue: 254,0 WS 8 + 128 [weir]
            weir-4712    [000] ..... 10929.700000: block_bio_queue: 254,0 WS 8 + 8 [weir]
    kworker/u8:2-99      [000] ..... 10929.800000: block_bio_queue: 254,0 W 8 + 2048 [kworker/u8:2]
     jbd2/vda-8-120      [000] ..... 10929.900000: block_bio_queue: 254,0 FWS 0 + 0 []
            weir-4711    [000] ..... 10930.000000: balance_dirty_pages: bdi 254:0: limit=1 setpoint=2 dirty=3 paused=0 pause=48 period=48 think=0 cgroup_ino=71
            weir-4711    [000] ..... 10930.100000: balance_dirty_pages: bdi 254:0: limit=1 paused=48 pause=-4 period=0 think=9 cgroup_ino=71
             dd-5        [000] ..... 10930.100000: balance_dirty_pages: bdi 254:0: limit=1 paused=0 pause=100 period=0 think=9 cgroup_ino=71
garbage: block_bio_queue: + x
";

    #[test]
    fn task_names_show_the_path_of_requests() {
        let expect = TraceTotals {
            by_process: 128 * 512,
            by_throttle: 2048 * 512,
            by_writeback: 2048 * 512,
            by_others: 8 * 512,
            held_ms: 48,
        };
        assert_eq!(parse(TEXT, 4711), expect);
        assert_eq!(parse("", 1), TraceTotals::default());
    }

    #[test]
    fn a_thread_group_may_follow_the_pid() {
        let line = "weir-4711  ( 4711) [000] ..... 1.0: block_bio_queue: 254,0 R 8 + 8 [weir]";
        assert_eq!(parse(line, 4711).by_process, 4096);
    }
}
