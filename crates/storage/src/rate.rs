//! A storage with the bandwidth of a slower device.
//!
//! `bytes=22M,iops=500` is a disk that moves 22 MiB and starts 500 requests a second, whatever lies
//! below. `policy::device_model` decides when each request completes.
//!
//! The device is a **budget**. With `shared=NAME`, all storages with the same name in one
//! [`RateBudgets`] share it: they are partitions of one imitated device, whose utilization a
//! watermark observes.
//!
//! It is not a throttle for guests: it has no bursts and no groups, and cannot be changed while it
//! runs. The throttle `layer` does that.

use std::{
    collections::HashMap,
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use policy::{
    device_model::{DeviceRates, SimulatedDevice},
    request::Direction,
    time::{Duration, Instant},
};

use super::{
    InvalidOption,
    options::{OptionPair, pairs},
    spec::parse_size,
};
use reactor::now;

/// Maximum length of a budget's name, in bytes: it appears in the status and in log lines.
const MAX_NAME_BYTES: usize = 64;

/// Rates per second; `None` is unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateOptions {
    /// Bytes per second, reads and writes together.
    pub bytes: Option<u64>,
    /// Requests per second, of any kind but flushes.
    pub iops: Option<u64>,
    /// Bytes read per second.
    pub read: Option<u64>,
    /// Bytes written per second.
    pub write: Option<u64>,
    /// Name of the budget, shared by all storages with the same name; `None` is a private budget.
    pub shared: Option<Arc<str>>,
}

impl FromStr for RateOptions {
    type Err = InvalidOption;
    /// Parses `bytes=22M,iops=500,read=30M,write=10M,shared=NAME`, each optional.
    fn from_str(text: &str) -> Result<Self, InvalidOption> {
        fn rate(pair: &OptionPair<'_>) -> Result<Option<u64>, InvalidOption> {
            match pair.parse(parse_size)? {
                0 => Err(pair.error("must not be 0 (omit it for no limit)")),
                rate => Ok(Some(rate)),
            }
        }
        fn name(pair: &OptionPair<'_>) -> Result<Arc<str>, InvalidOption> {
            let printable = !pair.value.chars().any(char::is_control);
            if pair.value.len() > MAX_NAME_BYTES || !printable {
                return Err(pair.error("is not a name (at most 64 bytes, without control characters)"));
            }
            Ok(pair.value.into())
        }
        let mut options = Self::default();
        for pair in pairs("rate", text)? {
            match pair.key {
                "bytes" => options.bytes = rate(&pair)?,
                "iops" => options.iops = rate(&pair)?,
                "read" => options.read = rate(&pair)?,
                "write" => options.write = rate(&pair)?,
                "shared" => options.shared = Some(name(&pair)?),
                _ => return Err(pair.unknown("bytes, iops, read, write, shared")),
            }
        }
        Ok(options)
    }
}

/// Formats the options so that [`FromStr`] reads them.
impl fmt::Display for RateOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, iops, read, write, shared } = self;
        let rates = [("bytes", bytes), ("iops", iops), ("read", read), ("write", write)];
        let rates = rates.into_iter().filter_map(|(key, rate)| Some(format!("{key}={}", (*rate)?)));
        let shared = shared.iter().map(|name| format!("shared={name}"));
        f.write_str(&rates.chain(shared).collect::<Vec<_>>().join(","))
    }
}

/// An imitated device, which several storages may share.
#[derive(Debug)]
pub struct RateBudget {
    options: RateOptions,
    state: Mutex<RateBudgetState>,
}

#[derive(Debug)]
struct RateBudgetState {
    lines: SimulatedDevice,
    completed: Completed,
}

/// Counters of an imitated device, since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    /// Completed requests, by direction.
    pub requests: [u64; 2],
    /// Bytes moved, by direction.
    pub bytes: [u64; 2],
    /// Sum of the times for which requests were in flight.
    pub in_flight: Duration,
}

impl RateBudget {
    /// Creates a device of these rates. A rate of zero is unlimited.
    pub fn new(options: RateOptions) -> Self {
        let RateOptions { bytes, iops, read, write, .. } = options;
        let lines = SimulatedDevice::new(DeviceRates { bytes, iops, read, write });
        Self { state: Mutex::new(RateBudgetState { lines, completed: Completed::default() }), options }
    }

    /// Options that it was created with.
    pub fn options(&self) -> &RateOptions {
        &self.options
    }

    /// Busy time of the device by `now`, since it was created. At full utilization it grows as the
    /// clock does.
    pub fn busy_time(&self, now: Instant) -> Duration {
        self.state().lines.worked(now)
    }

    /// Counters so far.
    pub fn completed(&self) -> Completed {
        self.state().completed
    }

    /// Charges a request that moves `bytes` and returns the instant at which it completes.
    pub(super) fn charge(&self, direction: Direction, bytes: u64) -> Instant {
        self.state().lines.charge(direction, bytes, now())
    }

    /// Counts a completed request.
    pub(super) fn count(&self, direction: Direction, bytes: u64, elapsed: Duration) {
        let Completed { requests, bytes: all, in_flight } = &mut self.state().completed;
        requests[direction.index()] += 1;
        all[direction.index()] += bytes;
        *in_flight = in_flight.saturating_add(elapsed);
    }

    fn state(&self) -> MutexGuard<'_, RateBudgetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Named budgets, each as long as a storage uses it. Clones share the registry.
#[derive(Clone, Debug, Default)]
pub struct RateBudgets(Arc<Mutex<HashMap<Arc<str>, Weak<RateBudget>>>>);

/// Error: two storages give one device different rates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rate: shared={0}: its rates differ from those of its first use (give the same rates everywhere)")]
pub struct RatesDiffer(pub Arc<str>);

impl RateBudgets {
    /// The budget that `options` name; a new one if they have no name, or the name is new.
    ///
    /// # Errors
    /// The budget of that name has other rates.
    pub fn get(&self, options: &RateOptions) -> Result<Arc<RateBudget>, RatesDiffer> {
        let Some(name) = &options.shared else { return Ok(Arc::new(RateBudget::new(options.clone()))) };
        let mut budgets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(budget) = budgets.get(name).and_then(Weak::upgrade) {
            return if budget.options == *options { Ok(budget) } else { Err(RatesDiffer(Arc::clone(name))) };
        }
        budgets.retain(|_, budget| budget.strong_count() > 0);
        let budget = Arc::new(RateBudget::new(options.clone()));
        budgets.insert(Arc::clone(name), Arc::downgrade(&budget));
        Ok(budget)
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use policy::{device_model::IDLE_CREDIT_NS, time::NANOS_PER_SECOND};

    use super::*;
    use crate::{Durability, Storage, null::NullStorage};
    use reactor::{buffer::IoBuffer, sim, sleep_until, spawn_joinable};

    fn imitated(options: &RateOptions) -> Storage {
        Storage::Null(NullStorage::new(1 << 30)).with_rate(Arc::new(RateBudget::new(options.clone())))
    }

    /// Number of reads completed in `seconds` by `clients` that pause for `think_time` between two
    /// reads.
    fn reads(options: &str, clients: u32, size: usize, think_time: Duration, seconds: u64) -> u64 {
        let options: RateOptions = options.parse().expect("valid");
        sim::run(1, async move {
            let rate = Rc::new(imitated(&options));
            let done = Rc::new(Cell::new(0));
            let end = now() + Duration::from_secs(seconds);
            let tasks: Vec<_> = (0..clients)
                .map(|_| {
                    let (rate, done) = (Rc::clone(&rate), Rc::clone(&done));
                    spawn_joinable(async move {
                        while now() < end {
                            rate.read(0, IoBuffer::new(size)).await.expect("null");
                            done.set(done.get() + u64::from(now() <= end));
                            sleep_until(now() + think_time).await;
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            done.get()
        })
    }

    fn assert_near(measured: u64, expected: f64) {
        let error = (measured as f64 / expected - 1.0).abs();
        assert!(error < 0.01, "{measured} is not within 1 % of {expected}");
    }

    #[test]
    fn bandwidth_matches_the_configured_rate() {
        let expected = 10.0 * f64::from(22 << 20);
        for (clients, size) in [(1, 4096), (32, 4096), (1, 1 << 20), (8, 1 << 20)] {
            let count = reads("bytes=22M", clients, size, Duration::ZERO, 10);
            // The last request of a megabyte may end after the ten seconds.
            assert_near(count, expected / size as f64);
        }
    }

    #[test]
    fn a_client_with_think_time_reaches_the_rate() {
        assert_near(
            reads("bytes=22M", 1, 65536, Duration::from_micros(200), 10),
            f64::from(22 << 20) / 6553.6,
        );
        assert_near(reads("iops=500", 1, 512, Duration::from_millis(1), 10), 5000.0);
    }

    #[test]
    fn the_slowest_line_decides_and_writes_have_their_own() {
        sim::run(1, async {
            let options: RateOptions = "bytes=1M,write=512K,iops=1000".parse().expect("valid");
            let rate = imitated(&options);
            sleep_until(Instant::from_nanos(NANOS_PER_SECOND)).await;
            let began = now();
            let data = IoBuffer::zeroed(1 << 20);
            rate.write(0, data.into(), Durability::Cached).await.expect("null");
            assert_eq!(now() - began, Duration::from_secs(2) - Duration::from_nanos(IDLE_CREDIT_NS));
        });
    }

    #[test]
    fn errors_name_key_value_and_rule() {
        for (text, message) in [
            ("bytes=0", "rate: bytes=0: must not be 0 (omit it for no limit)"),
            ("burst=1", "rate: burst=1: no such key (there are bytes, iops, read, write, shared)"),
        ] {
            assert_eq!(text.parse::<RateOptions>().expect_err(text).to_string(), message);
        }
        assert!("bytes=fast".parse::<RateOptions>().is_err());
    }

    #[test]
    fn a_shared_name_requires_equal_rates() {
        let budgets = RateBudgets::default();
        let get = |text: &str| budgets.get(&text.parse().expect("valid"));
        let one = get("bytes=1M,shared=slow").expect("the first");
        assert!(Arc::ptr_eq(&one, &get("shared=slow,bytes=1M").expect("the same")));
        assert!(!Arc::ptr_eq(&one, &get("bytes=1M,shared=other").expect("another name")));
        assert!(!Arc::ptr_eq(&get("bytes=1M").expect("alone"), &get("bytes=1M").expect("alone")));
        let message = "rate: shared=slow: its rates differ from those of its first use (give the \
                       same rates everywhere)";
        assert_eq!(get("bytes=2M,shared=slow").expect_err("differs").to_string(), message);
        drop(one);
        assert!(get("bytes=2M,shared=slow").is_ok(), "an unused name is free");
    }

    #[test]
    fn budget_reports_its_busy_time() {
        sim::run(1, async {
            let budget = Arc::new(RateBudget::new("bytes=1M,shared=x".parse().expect("valid")));
            let rate = Storage::Null(NullStorage::new(1 << 30)).with_rate(Arc::clone(&budget));
            let at = |ms| Instant::ZERO + Duration::from_millis(ms);
            sleep_until(at(1000)).await;
            assert_eq!(budget.busy_time(now()), Duration::ZERO);
            let read = spawn_joinable(async move { rate.read(0, IoBuffer::new(1 << 19)).await });
            sleep_until(at(1240)).await;
            // The device's work begins before the request, since an idle line may start in the past
            // (`IDLE_CREDIT_NS` of `policy::device_model`).
            assert_eq!(budget.busy_time(now()), Duration::from_millis(250));
            read.await.expect("null");
            sleep_until(at(9000)).await;
            assert_eq!(budget.busy_time(now()), Duration::from_millis(500), "idle time is no work");
        });
    }
}
