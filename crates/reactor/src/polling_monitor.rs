//! Measurements for a thread's decision to poll: completed operations, processor time, and time
//! spent waiting for a processor.
//!
//! Never decides: [`policy::polling`] does.

use std::{fs::File, os::unix::fs::FileExt};

use nix::time::{ClockId, clock_gettime};
use policy::{
    polling::{PollingDecision, ThreadCounters},
    time::{Instant, NANOS_PER_SECOND},
};

pub(super) struct PollingMonitor {
    polling: PollingDecision,
    completions: u64,
    /// `None` if the kernel does not provide it.
    schedstat: Option<File>,
}

impl PollingMonitor {
    /// Measurements of the calling thread.
    pub(super) fn new() -> Self {
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        Self { polling: PollingDecision::default(), completions: 0, schedstat }
    }

    pub(super) fn count(&mut self, completions: usize) {
        self.completions += completions as u64;
    }

    /// True if the thread should poll instead of sleeping.
    pub(super) fn should_poll(&mut self, now: Instant) -> bool {
        if now >= self.polling.next_check() {
            self.polling.advance(now, self.counters());
        }
        self.polling.polls()
    }

    fn counters(&self) -> ThreadCounters {
        ThreadCounters {
            completions: self.completions,
            processor_ns: processor_ns(),
            starved_ns: self.schedstat.as_ref().and_then(run_delay_ns).unwrap_or(0),
        }
    }
}

fn processor_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_or(0, |time| time.tv_sec().cast_unsigned() * NANOS_PER_SECOND + time.tv_nsec().cast_unsigned())
}

/// The second number of `/proc/PID/schedstat` (the kernel's `Documentation/scheduler/sched-stats`):
/// time spent runnable without running.
fn run_delay_ns(schedstat: &File) -> Option<u64> {
    let mut text = [0; 128];
    let length = schedstat.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..length]).ok()?.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_reports_both_times_of_this_thread() {
        let mut monitor = PollingMonitor::new();
        monitor.count(3);
        let before = monitor.counters();
        assert_eq!(before.completions, 3);
        while monitor.counters().processor_ns == before.processor_ns {}
        assert!(run_delay_ns(monitor.schedstat.as_ref().expect("a kernel with schedstat")).is_some());
    }
}
