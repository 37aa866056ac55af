//! A storage with the bandwidth of a slower device.
//!
//! `bytes=22M,iops=500` is a disk that moves 22 MiB and starts 500 requests a second, whatever is
//! below. Each figure has a **line**: the instant until which the device has work. A request is put
//! at the end of every line that applies to it. It takes its bytes (or one operation) divided by
//! the rate there, and completes when it has passed on all lines:
//!
//! ```text
//!   line  ████████████████▒▒▒▒▒▒│ request completes here
//!         other requests   ours
//! ```
//!
//! An idle line may be caught up by [`CATCH_UP`]: timers fire late and clients take time to answer,
//! and without it a client with one request at a time would get less than the rate. It bounds how
//! much more may pass after a pause.
//!
//! The lines are a **budget**. Storages with the same `shared=NAME`, in one [`Budgets`], share the
//! same lines: they are partitions of one imitated device, which a watermark then looks at.
//!
//! It is not a throttle for guests: it has no bursts and no groups, and cannot be changed while it
//! runs. Those are the `layer`'s.

use std::{
    collections::HashMap,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use policy::{
    request::Direction,
    time::{Duration, Instant, NANOS_PER_SECOND},
};

use super::{
    BlockSize, Durability, Extent, InvalidOption, Storage, ZeroOptions,
    options::{Pair, pairs},
    spec::parse_size,
};
use crate::{
    buffer::{Buffer, Segments},
    error::Result,
    reactor::{now, sleep_until},
};

/// How far behind the present a line may be and still be worked off: some timers' lateness, at 22 MiB/s 230 KiB.
const CATCH_UP: Duration = Duration::from_millis(10);

/// Longest name of a budget, in bytes: it is shown in a status and a log line.
const MAX_NAME_BYTES: usize = 64;

/// Rates a second; `None` is unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateOptions {
    /// Bytes a second, reads and writes together.
    pub bytes: Option<u64>,
    /// Requests a second, of any kind but flushes.
    pub iops: Option<u64>,
    /// Bytes read a second.
    pub read: Option<u64>,
    /// Bytes written a second.
    pub write: Option<u64>,
    /// The name of the budget, for whoever else says it; `None` has it alone.
    pub shared: Option<Arc<str>>,
}

impl FromStr for RateOptions {
    type Err = InvalidOption;
    /// `bytes=22M,iops=500,read=30M,write=10M,shared=NAME`, each optional.
    fn from_str(text: &str) -> std::result::Result<Self, InvalidOption> {
        fn rate(pair: &Pair<'_>) -> std::result::Result<Option<u64>, InvalidOption> {
            match pair.with(parse_size)? {
                0 => Err(pair.error("is no rate at all (leave it out for no limit)")),
                rate => Ok(Some(rate)),
            }
        }
        fn name(pair: &Pair<'_>) -> std::result::Result<Arc<str>, InvalidOption> {
            let printable = !pair.value.chars().any(char::is_control);
            if pair.value.len() > MAX_NAME_BYTES || !printable {
                return Err(pair.error("is no name (64 bytes at most, and no control characters)"));
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

/// The time line of one figure.
#[derive(Debug)]
struct Line {
    rate: u64,
    queue: Mutex<Queue>,
}

#[derive(Debug)]
struct Queue {
    end: Instant,
    /// What of a nanosecond the division has left over, in units / rate. Without it many small requests would add up to an error.
    left_over: u64,
    /// The time of all that was ever put into the line.
    work: Duration,
}

impl Line {
    fn new(rate: u64) -> Self {
        Self { rate, queue: Mutex::new(Queue { end: Instant::ZERO, left_over: 0, work: Duration::ZERO }) }
    }

    /// Puts `units` at the end of the line; returns when they will have passed.
    fn append(&self, units: u64, now: Instant) -> Instant {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = Instant::from_nanos(now.as_nanos().saturating_sub(CATCH_UP.as_nanos() as u64));
        let (start, left_over) =
            if queue.end < earliest { (earliest, 0) } else { (queue.end, queue.left_over) };
        let scaled = u128::from(units) * u128::from(NANOS_PER_SECOND) + u128::from(left_over);
        let rate = u128::from(self.rate);
        let cost = Duration::from_nanos(u64::try_from(scaled / rate).unwrap_or(u64::MAX));
        queue.left_over = (scaled % rate) as u64;
        queue.end = start + cost;
        queue.work = queue.work.saturating_add(cost);
        queue.end
    }

    /// How long the line has worked by now, since it was made.
    fn worked(&self, now: Instant) -> Duration {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.work.saturating_sub(Duration::from_nanos(queue.end.nanos_since(now)))
    }
}

/// The lines of an imitated device.
#[derive(Debug)]
pub struct Budget {
    options: RateOptions,
    bytes: Option<Line>,
    iops: Option<Line>,
    /// Read, write.
    by_direction: [Option<Line>; 2],
}

impl Budget {
    /// A device of these rates. A rate of zero is no limit.
    pub fn new(options: RateOptions) -> Self {
        let line = |rate: Option<u64>| rate.filter(|&rate| rate > 0).map(Line::new);
        Self {
            bytes: line(options.bytes),
            iops: line(options.iops),
            by_direction: [line(options.read), line(options.write)],
            options,
        }
    }

    /// What it was made of.
    pub fn options(&self) -> &RateOptions {
        &self.options
    }

    /// How long the device has worked by `now`: its busiest line's time since it was made. At full use it grows as the clock does.
    pub fn worked(&self, now: Instant) -> Duration {
        let [read, write] = &self.by_direction;
        let lines = [&self.bytes, &self.iops, read, write];
        lines.into_iter().flatten().map(|line| line.worked(now)).max().unwrap_or(Duration::ZERO)
    }

    /// When a request that moves `bytes` will be done.
    fn charge(&self, direction: Direction, bytes: u64) -> Instant {
        let now = now();
        let lines = [(&self.iops, 1), (&self.bytes, bytes), (&self.by_direction[direction.index()], bytes)];
        lines
            .into_iter()
            .filter_map(|(line, units)| Some(line.as_ref()?.append(units, now)))
            .fold(Instant::ZERO, Instant::max)
    }
}

/// The budgets that have a name, as long as somebody has them. A copy is the same budgets.
#[derive(Clone, Debug, Default)]
pub struct Budgets(Arc<Mutex<HashMap<Arc<str>, Weak<Budget>>>>);

/// Two storages give one device different rates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rate: shared={0}: has other rates where it is named first (give it the same everywhere)")]
pub struct RatesDiffer(pub Arc<str>);

impl Budgets {
    /// The budget that `options` name, or a new one where they name none or the first does.
    ///
    /// # Errors
    /// If the budget of that name has other rates.
    pub fn get(&self, options: &RateOptions) -> std::result::Result<Arc<Budget>, RatesDiffer> {
        let Some(name) = &options.shared else { return Ok(Arc::new(Budget::new(options.clone()))) };
        let mut budgets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(budget) = budgets.get(name).and_then(Weak::upgrade) {
            return if budget.options == *options { Ok(budget) } else { Err(RatesDiffer(Arc::clone(name))) };
        }
        budgets.retain(|_, budget| budget.strong_count() > 0);
        let budget = Arc::new(Budget::new(options.clone()));
        budgets.insert(Arc::clone(name), Arc::downgrade(&budget));
        Ok(budget)
    }
}

/// A storage with its bandwidth bounded.
#[derive(Debug)]
pub struct Rate {
    inner: Storage,
    budget: Arc<Budget>,
}

impl Rate {
    /// Bounds the bandwidth of `inner` by a budget, which others may have too.
    pub fn new(inner: Storage, budget: Arc<Budget>) -> Self {
        Self { inner, budget }
    }

    /// What is wrapped.
    pub fn inner(&self) -> &Storage {
        &self.inner
    }

    /// What bounds it.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    pub(super) fn refresh_size(&self) -> Result<u64> {
        self.inner.refresh_size()
    }

    pub(super) fn description(&self) -> String {
        format!("{}, rate limited", self.inner.description())
    }

    pub(super) fn read_only(&self) -> bool {
        self.inner.read_only()
    }

    pub(super) fn block_size(&self) -> BlockSize {
        self.inner.block_size()
    }

    pub(super) fn can_zero_fast(&self) -> bool {
        self.inner.can_zero_fast()
    }

    // The request below runs first and its time counts as part of the line's, so a slower storage adds nothing.

    pub(super) async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer> {
        let done = self.budget.charge(Direction::Read, buffer.len() as u64);
        let result = Box::pin(self.inner.read(offset, buffer)).await;
        sleep_until(done).await;
        result
    }

    pub(super) async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let done = self.budget.charge(Direction::Write, data.len() as u64);
        let result = Box::pin(self.inner.write(offset, data, durability)).await;
        sleep_until(done).await;
        result
    }

    pub(super) async fn flush(&self) -> Result<()> {
        Box::pin(self.inner.flush()).await
    }

    /// Costs a request but no bytes: a device is told what to zero, it is not sent the zeroes.
    pub(super) async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let done = self.budget.charge(Direction::Write, 0);
        let result = Box::pin(self.inner.write_zeroes(offset, length, options)).await;
        sleep_until(done).await;
        result
    }

    pub(super) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let done = self.budget.charge(Direction::Write, 0);
        let result = Box::pin(self.inner.discard(offset, length)).await;
        sleep_until(done).await;
        result
    }

    pub(super) async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        Box::pin(self.inner.block_status(offset, length)).await
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use super::*;
    use crate::{
        reactor::{sim, spawn_joinable},
        storage::null::Null,
    };

    fn imitated(options: &RateOptions) -> Rate {
        let budget = Budgets::default().get(options).expect("the first");
        Rate::new(Storage::Null(Null::new(1 << 30)), budget)
    }

    /// Reads done in `seconds` by `clients` that take `think` between two reads.
    fn reads(options: &str, clients: u32, size: usize, think: Duration, seconds: u64) -> u64 {
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
                            rate.read(0, Buffer::new(size)).await.expect("null");
                            done.set(done.get() + u64::from(now() <= end));
                            sleep_until(now() + think).await;
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
    fn bandwidth_is_what_was_asked_for() {
        let expected = 10.0 * f64::from(22 << 20);
        for (clients, size) in [(1, 4096), (32, 4096), (1, 1 << 20), (8, 1 << 20)] {
            let count = reads("bytes=22M", clients, size, Duration::ZERO, 10);
            // The last request of a megabyte may end past the ten seconds.
            assert_near(count, expected / size as f64);
        }
    }

    #[test]
    fn a_client_that_is_slow_to_ask_still_gets_the_rate() {
        assert_near(
            reads("bytes=22M", 1, 65536, Duration::from_micros(200), 10),
            f64::from(22 << 20) / 6553.6,
        );
        assert_near(reads("iops=500", 1, 512, Duration::from_millis(1), 10), 5000.0);
    }

    #[test]
    fn fractions_of_a_nanosecond_add_up() {
        // Three a nanosecond: each alone would cost nothing.
        let line = Line::new(3 * NANOS_PER_SECOND);
        let mut end = Instant::ZERO;
        for _ in 0..3_000_000 {
            end = line.append(1, Instant::ZERO);
        }
        assert_eq!(end.as_nanos(), 1_000_000);
    }

    #[test]
    fn the_slowest_line_decides_and_writes_have_their_own() {
        sim::run(1, async {
            let options: RateOptions = "bytes=1M,write=512K,iops=1000".parse().expect("valid");
            let rate = imitated(&options);
            sleep_until(Instant::from_nanos(NANOS_PER_SECOND)).await;
            let began = now();
            let data = Buffer::zeroed(1 << 20);
            rate.write(0, data.into(), Durability::Cached).await.expect("null");
            assert_eq!(now() - began, Duration::from_secs(2) - CATCH_UP);
        });
    }

    #[test]
    fn errors_name_key_value_and_rule() {
        for (text, message) in [
            ("bytes=0", "rate: bytes=0: is no rate at all (leave it out for no limit)"),
            ("burst=1", "rate: burst=1: no such key (there are bytes, iops, read, write, shared)"),
        ] {
            assert_eq!(text.parse::<RateOptions>().expect_err(text).to_string(), message);
        }
        assert!("bytes=fast".parse::<RateOptions>().is_err());
    }

    #[test]
    fn who_shares_a_name_shares_the_lines_and_must_agree_on_the_rates() {
        let budgets = Budgets::default();
        let get = |text: &str| budgets.get(&text.parse().expect("valid"));
        let one = get("bytes=1M,shared=slow").expect("the first");
        assert!(Arc::ptr_eq(&one, &get("shared=slow,bytes=1M").expect("the same")));
        assert!(!Arc::ptr_eq(&one, &get("bytes=1M,shared=other").expect("another name")));
        assert!(!Arc::ptr_eq(&get("bytes=1M").expect("alone"), &get("bytes=1M").expect("alone")));
        let message =
            "rate: shared=slow: has other rates where it is named first (give it the same everywhere)";
        assert_eq!(get("bytes=2M,shared=slow").expect_err("differs").to_string(), message);
        drop(one);
        assert!(get("bytes=2M,shared=slow").is_ok(), "a name that nobody has any more is free");
    }

    #[test]
    fn a_budget_knows_how_long_it_has_worked() {
        sim::run(1, async {
            let rate = imitated(&"bytes=1M,shared=x".parse().expect("valid"));
            let at = |ms| Instant::ZERO + Duration::from_millis(ms);
            sleep_until(at(1000)).await;
            assert_eq!(rate.budget().worked(now()), Duration::ZERO);
            let read = spawn_joinable({
                let budget = Arc::clone(rate.budget());
                async move {
                    Rate::new(Storage::Null(Null::new(1 << 30)), budget).read(0, Buffer::new(1 << 19)).await
                }
            });
            sleep_until(at(1240)).await;
            // It began before it was asked: the line was caught up.
            assert_eq!(rate.budget().worked(now()), Duration::from_millis(250));
            read.await.expect("null");
            sleep_until(at(9000)).await;
            assert_eq!(rate.budget().worked(now()), Duration::from_millis(500), "idle time is no work");
        });
    }
}
