//! Decides if a thread that waits for completions polls or sleeps, by measuring both.
//!
//! ```text
//!   sleep │ poll │ sleep │ poll │ verdict ─► stays as decided for a while ─► sleep │ poll │ …
//! ```
//!
//! Sleeping between completions is cheapest, but the scheduler of the kernel decides where a woken
//! thread runs: it may put a server and its client on one processor, where they alternate while
//! another processor is idle. A thread that polls is not moved. The better choice depends on
//! kernel, hypervisor and client and cannot be derived, so the thread polls for some milliseconds
//! now and then and compares. The longer a verdict has been confirmed, the longer the next one is
//! valid.
//!
//! Independent of what completes. Never decides how long a thread polls before it sleeps.

use crate::time::{Duration, Instant, NANOS_PER_SECOND};

/// Duration of a measurement: several hundred completions at the lowest rate that is tried.
const WINDOW: Duration = Duration::from_millis(16);
/// Time before a measurement. The kernel moves threads apart at its ticks, every 1 to 10 ms.
const SETTLE_TIME: Duration = Duration::from_millis(12);
/// Measurements in a trial, alternately sleeping and polling.
const WINDOWS: u8 = 4;
/// Interval at which a polling thread checks that polling is still worth its cost.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Duration of a verdict: this at first, doubled each time it is confirmed.
const MIN_VERDICT: Duration = Duration::from_millis(500);
const MAX_VERDICT: Duration = Duration::from_secs(8);
/// Completions per second below which polling is not tried: too few would share its cost.
const MIN_RATE: u64 = 20_000;
/// Minimum rate while polling, in percent of the rate while sleeping.
const MIN_RATE_PERCENT: u64 = 115;
/// Allowed increase of processor time for a completion, in percent for each percent of the rate.
const COST_PERCENT_PER_RATE_PERCENT: u64 = 3;
/// A thread that waits for a processor for more than this fraction (1 / n) of the time competes
/// with other threads; polling would make that worse.
const CONTENTION_FRACTION: u64 = 8;

/// Cumulative counters of a thread, from any start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadCounters {
    /// Completed operations.
    pub completions: u64,
    /// Processor time used, in nanoseconds.
    pub processor_ns: u64,
    /// Time that the thread was runnable but did not run, in nanoseconds.
    pub starved_ns: u64,
}

impl ThreadCounters {
    fn since(self, earlier: Self) -> Self {
        Self {
            completions: self.completions.saturating_sub(earlier.completions),
            processor_ns: self.processor_ns.saturating_sub(earlier.processor_ns),
            starved_ns: self.starved_ns.saturating_sub(earlier.starved_ns),
        }
    }
}

/// Work in an interval.
#[derive(Clone, Copy, Debug, Default)]
struct PollingSample {
    work: ThreadCounters,
    elapsed_ns: u64,
}

impl PollingSample {
    fn add(&mut self, other: Self) {
        self.work.completions += other.work.completions;
        self.work.processor_ns += other.work.processor_ns;
        self.work.starved_ns += other.work.starved_ns;
        self.elapsed_ns += other.elapsed_ns;
    }

    /// Completions per second.
    fn rate(&self) -> u64 {
        let rate = u128::from(self.work.completions) * u128::from(NANOS_PER_SECOND);
        u64::try_from(rate / u128::from(self.elapsed_ns.max(1))).unwrap_or(u64::MAX)
    }

    /// Processor time of a completion, in picoseconds.
    fn cost(&self) -> u64 {
        self.work.processor_ns.saturating_mul(1000) / self.work.completions.max(1)
    }

    fn is_contended(&self) -> bool {
        self.work.starved_ns.saturating_mul(CONTENTION_FRACTION) > self.elapsed_ns
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PollingStage {
    /// Before a measurement of a trial. This time is not counted.
    Settling(u8),
    Window(u8),
    /// A verdict holds until then.
    Decided(Instant),
}

/// The decision for one thread. Call [`PollingDecision::advance`] at
/// [`PollingDecision::next_check`] or any time after it: a sleeping thread need not be woken for
/// that.
#[derive(Clone, Debug)]
pub struct PollingDecision {
    is_polling: bool,
    stage: PollingStage,
    ends: Instant,
    began: Instant,
    before: ThreadCounters,
    sleeping_sample: PollingSample,
    polling_sample: PollingSample,
    /// The last verdict, and its duration.
    verdict: bool,
    verdict_duration: Duration,
}

impl Default for PollingDecision {
    fn default() -> Self {
        let (began, before) = (Instant::ZERO, ThreadCounters::default());
        let (sleeping_sample, polling_sample) = (PollingSample::default(), PollingSample::default());
        let stage = PollingStage::Decided(Instant::ZERO);
        let (verdict, stood) = (false, Duration::ZERO);
        Self {
            is_polling: false,
            stage,
            ends: began,
            began,
            before,
            sleeping_sample,
            polling_sample,
            verdict,
            verdict_duration: stood,
        }
    }
}

impl PollingDecision {
    /// True if the thread should poll instead of sleeping.
    pub fn polls(&self) -> bool {
        self.is_polling
    }

    /// Time of the next call of [`PollingDecision::advance`].
    pub fn next_check(&self) -> Instant {
        self.ends
    }

    /// Advances the trial; `work` are the current counters of the thread.
    pub fn advance(&mut self, now: Instant, work: ThreadCounters) {
        let measured =
            PollingSample { work: work.since(self.before), elapsed_ns: now.nanos_since(self.began) };
        (self.began, self.before) = (now, work);
        match self.stage {
            PollingStage::Settling(window) => self.enter(PollingStage::Window(window), now + WINDOW),
            PollingStage::Window(window) => self.finish_window(window, measured, now),
            PollingStage::Decided(until) if now >= until => self.start_trial(now),
            PollingStage::Decided(until) => self.check_benefit(until, measured, now),
        }
    }

    fn enter(&mut self, stage: PollingStage, ends: Instant) {
        (self.stage, self.ends) = (stage, ends);
    }

    fn start_trial(&mut self, now: Instant) {
        (self.sleeping_sample, self.polling_sample) = (PollingSample::default(), PollingSample::default());
        self.is_polling = false;
        self.enter(PollingStage::Settling(0), now + SETTLE_TIME);
    }

    fn finish_window(&mut self, window: u8, measured: PollingSample, now: Instant) {
        if measured.rate() < MIN_RATE {
            return self.set_verdict(false, MIN_VERDICT, now);
        }
        if self.is_polling {
            self.polling_sample.add(measured);
        } else {
            self.sleeping_sample.add(measured);
        }
        // Contention ends the trial early: its remaining windows would slow other threads down.
        if self.is_polling && measured.is_contended() {
            return self.finish_trial(false, now);
        }
        if window + 1 == WINDOWS {
            return self.finish_trial(self.pays(), now);
        }
        // Alternating, so that a drift of the load affects both averages.
        self.is_polling = !self.is_polling;
        self.enter(PollingStage::Settling(window + 1), now + SETTLE_TIME);
    }

    fn pays(&self) -> bool {
        let percent = |polling: u64, sleeping: u64| polling.saturating_mul(100) / sleeping.max(1);
        let rate = percent(self.polling_sample.rate(), self.sleeping_sample.rate());
        let cost = percent(self.polling_sample.cost(), self.sleeping_sample.cost());
        // The gain must be noticeable, and each percent of it may cost
        // `COST_PERCENT_PER_RATE_PERCENT` percent per completion.
        rate >= MIN_RATE_PERCENT && cost <= 100 + COST_PERCENT_PER_RATE_PERCENT * (rate - 100)
    }

    fn check_benefit(&mut self, until: Instant, measured: PollingSample, now: Instant) {
        if self.is_polling && (measured.is_contended() || measured.rate() < MIN_RATE) {
            return self.set_verdict(false, MIN_VERDICT, now);
        }
        self.enter(
            PollingStage::Decided(until),
            if self.is_polling { until.min(now + CHECK_INTERVAL) } else { until },
        );
    }

    fn finish_trial(&mut self, polls: bool, now: Instant) {
        let is_confirmed = self.verdict == polls;
        let duration = if is_confirmed {
            (self.verdict_duration * 2).clamp(MIN_VERDICT, MAX_VERDICT)
        } else {
            MIN_VERDICT
        };
        self.set_verdict(polls, duration, now);
    }

    fn set_verdict(&mut self, polls: bool, duration: Duration, now: Instant) {
        (self.is_polling, self.verdict, self.verdict_duration) = (polls, polls, duration);
        // A sleeping thread keeps its verdict to the end. A polling one is checked in between.
        let until = now + duration;
        self.enter(PollingStage::Decided(until), if polls { until.min(now + CHECK_INTERVAL) } else { until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread under load: its rates and costs while sleeping and while polling.
    #[derive(Clone, Copy)]
    struct SimulatedThread {
        rates: [u64; 2],
        /// Processor time of a completion, in nanoseconds.
        costs: [u64; 2],
        /// Nanoseconds per second in which the thread is runnable and does not run.
        starved_ns: [u64; 2],
    }

    const APART: SimulatedThread =
        SimulatedThread { rates: [43_000, 63_000], costs: [7_000, 13_600], starved_ns: [0, 0] };
    const NO_GAIN: SimulatedThread =
        SimulatedThread { rates: [61_000, 61_500], costs: [7_000, 13_600], starved_ns: [0, 0] };
    const IDLE: SimulatedThread =
        SimulatedThread { rates: [100, 100], costs: [30_000, 60_000], starved_ns: [0, 0] };
    const STEP: Duration = Duration::from_micros(250);

    struct PollingBench {
        polling: PollingDecision,
        now: Instant,
        done: f64,
        work: ThreadCounters,
    }

    impl PollingBench {
        fn new() -> Self {
            let (polling, work) = (PollingDecision::default(), ThreadCounters::default());
            Self { polling, now: Instant::from_nanos(5), done: 0.0, work }
        }

        /// Runs for `time` and returns the time spent polling.
        fn run(&mut self, machine: SimulatedThread, time: Duration) -> Duration {
            let (end, mut polling_time) = (self.now + time, Duration::ZERO);
            while self.now < end {
                self.now += STEP;
                let is_awake = self.polling.polls();
                let index = usize::from(is_awake);
                let step_s = STEP.as_secs_f64();
                self.done += machine.rates[index] as f64 * step_s;
                self.work.completions = self.done as u64;
                self.work.processor_ns +=
                    (machine.rates[index] as f64 * step_s * machine.costs[index] as f64) as u64;
                self.work.starved_ns += (machine.starved_ns[index] as f64 * step_s) as u64;
                polling_time += if is_awake { STEP } else { Duration::ZERO };
                if self.now >= self.polling.next_check() {
                    self.polling.advance(self.now, self.work);
                }
            }
            polling_time
        }

        fn polling_share(&mut self, machine: SimulatedThread, time: Duration) -> f64 {
            self.run(machine, time).as_secs_f64() / time.as_secs_f64()
        }
    }

    #[test]
    fn beneficial_polling_continues() {
        let mut worker = PollingBench::new();
        worker.run(APART, Duration::from_millis(500));
        assert!(worker.polling.polls());
        let share = worker.polling_share(APART, Duration::from_secs(60));
        assert!(share > 0.98, "{share}");
    }

    #[test]
    fn unprofitable_polling_is_retried_less_often() {
        let mut worker = PollingBench::new();
        let share = worker.polling_share(NO_GAIN, Duration::from_secs(4));
        assert!(share > 0.0 && share < 0.08, "{share}");
        let share = worker.polling_share(NO_GAIN, Duration::from_secs(60));
        assert!(share < 0.01, "{share}");
    }

    #[test]
    fn gain_at_too_high_a_cost_is_rejected() {
        let expensive = SimulatedThread { costs: [7_000, 15_500], ..APART };
        let fast = SimulatedThread { rates: [43_000, 51_000], ..expensive };
        let mut worker = PollingBench::new();
        worker.run(expensive, Duration::from_secs(1));
        assert!(worker.polling.polls(), "46 % more for 121 %");
        let mut worker = PollingBench::new();
        worker.run(fast, Duration::from_secs(1));
        assert!(!worker.polling.polls(), "18 % more for 121 %");
    }

    #[test]
    fn a_thread_with_little_to_do_sleeps() {
        let mut worker = PollingBench::new();
        assert_eq!(worker.run(IDLE, Duration::from_secs(10)), Duration::ZERO);
        worker.run(APART, Duration::from_secs(1));
        assert!(worker.polling.polls(), "it has come to have much to do");
        let polling_time = worker.run(IDLE, Duration::from_secs(10));
        assert!(polling_time <= CHECK_INTERVAL * 2, "{polling_time:?}");
    }

    #[test]
    fn contended_thread_stops_polling() {
        let contended = SimulatedThread { starved_ns: [0, 200_000_000], ..APART };
        let mut worker = PollingBench::new();
        let share = worker.polling_share(contended, Duration::from_secs(10));
        assert!(share > 0.0 && share < 0.02, "{share}");
        // Contention that begins after the verdict.
        let mut worker = PollingBench::new();
        worker.run(APART, Duration::from_secs(1));
        assert!(worker.polling.polls());
        worker.run(contended, CHECK_INTERVAL * 2);
        assert!(!worker.polling.polls());
    }

    #[test]
    fn interrupted_trial_restarts() {
        let mut worker = PollingBench::new();
        worker.run(APART, SETTLE_TIME + WINDOW + SETTLE_TIME + STEP);
        worker.now += Duration::from_secs(3600);
        worker.polling.advance(worker.now, worker.work);
        worker.now += Duration::from_secs(3600);
        worker.polling.advance(worker.now, worker.work);
        assert!(!worker.polling.polls());
        worker.run(APART, Duration::from_secs(1));
        assert!(worker.polling.polls());
    }
}
