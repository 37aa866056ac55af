//! A storage with the bandwidth of a slower device.
//!
//! `bytes=22M,iops=500` is a disk that moves 22 MiB and starts 500 requests a second, whatever lies below. Each figure has a **line**:
//! the instant until which the device has work. A request is put at the end of every line that applies to it, takes
//! its bytes (or one) divided by the rate there, and completes no earlier than it has passed on all of them:
//!
//! ```text
//!   line  ████████████████▒▒▒▒▒▒│ request completes here
//!         other requests   ours
//! ```
//!
//! An idle line may be caught up by [`CATCH_UP`]: timers fire late and clients take time to answer, and without it
//! a client with one request at a time would get less than the rate. It bounds what may pass too much after a pause.
//!
//! Not a throttle for guests: no bursts, no groups, nothing to change while it runs. That is `layer`'s.

use std::{
    str::FromStr,
    sync::{Mutex, PoisonError},
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

/// Rates a second; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateOptions {
    /// Bytes a second, reads and writes together.
    pub bytes: Option<u64>,
    /// Requests a second, of any kind but flushes.
    pub iops: Option<u64>,
    /// Bytes read a second.
    pub read: Option<u64>,
    /// Bytes written a second.
    pub write: Option<u64>,
}

impl FromStr for RateOptions {
    type Err = InvalidOption;
    /// `bytes=22M,iops=500,read=30M,write=10M`, each optional.
    fn from_str(text: &str) -> std::result::Result<Self, InvalidOption> {
        fn rate(pair: &Pair<'_>) -> std::result::Result<Option<u64>, InvalidOption> {
            match pair.with(parse_size)? {
                0 => Err(pair.error("is no rate at all (leave it out for no limit)")),
                rate => Ok(Some(rate)),
            }
        }
        let mut options = Self::default();
        for pair in pairs("rate", text)? {
            match pair.key {
                "bytes" => options.bytes = rate(&pair)?,
                "iops" => options.iops = rate(&pair)?,
                "read" => options.read = rate(&pair)?,
                "write" => options.write = rate(&pair)?,
                _ => return Err(pair.unknown("bytes, iops, read, write")),
            }
        }
        Ok(options)
    }
}

/// The time line of one figure.
#[derive(Debug)]
struct Line {
    rate: u64,
    /// The line's end, and what of a nanosecond the division has left over, in units / rate. Without it many small
    /// requests would add up to an error.
    end: Mutex<(Instant, u64)>,
}

impl Line {
    fn new(rate: u64) -> Self {
        Self { rate, end: Mutex::new((Instant::ZERO, 0)) }
    }

    /// Puts `units` at the end of the line; returns when they will have passed.
    fn append(&self, units: u64, now: Instant) -> Instant {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, left_over) = *end;
        let earliest = Instant::from_nanos(now.as_nanos().saturating_sub(CATCH_UP.as_nanos() as u64));
        let (start, left_over) = if at < earliest { (earliest, 0) } else { (at, left_over) };
        let scaled = u128::from(units) * u128::from(NANOS_PER_SECOND) + u128::from(left_over);
        let rate = u128::from(self.rate);
        let cost = u64::try_from(scaled / rate).unwrap_or(u64::MAX);
        *end = (start + Duration::from_nanos(cost), (scaled % rate) as u64);
        end.0
    }
}

/// A storage with its bandwidth bounded.
#[derive(Debug)]
pub struct Rate {
    inner: Storage,
    bytes: Option<Line>,
    iops: Option<Line>,
    /// Read, write.
    by_direction: [Option<Line>; 2],
}

impl Rate {
    /// Bounds the bandwidth of `inner`. A rate of zero is no limit.
    pub fn new(inner: Storage, options: RateOptions) -> Self {
        let line = |rate: Option<u64>| rate.filter(|&rate| rate > 0).map(Line::new);
        Self {
            inner,
            bytes: line(options.bytes),
            iops: line(options.iops),
            by_direction: [line(options.read), line(options.write)],
        }
    }

    /// What is wrapped.
    pub fn inner(&self) -> &Storage {
        &self.inner
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
        let done = self.charge(Direction::Read, buffer.len() as u64);
        let result = Box::pin(self.inner.read(offset, buffer)).await;
        sleep_until(done).await;
        result
    }

    pub(super) async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let done = self.charge(Direction::Write, data.len() as u64);
        let result = Box::pin(self.inner.write(offset, data, durability)).await;
        sleep_until(done).await;
        result
    }

    pub(super) async fn flush(&self) -> Result<()> {
        Box::pin(self.inner.flush()).await
    }

    /// Costs a request but no bytes: a device is told what to zero, it is not sent the zeroes.
    pub(super) async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let done = self.charge(Direction::Write, 0);
        let result = Box::pin(self.inner.write_zeroes(offset, length, options)).await;
        sleep_until(done).await;
        result
    }

    pub(super) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let done = self.charge(Direction::Write, 0);
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

    /// Reads done in `seconds` by `clients` that take `think` between two reads.
    fn reads(options: &str, clients: u32, size: usize, think: Duration, seconds: u64) -> u64 {
        let options: RateOptions = options.parse().expect("valid");
        sim::run(1, async move {
            let rate = Rc::new(Rate::new(Storage::Null(Null::new(1 << 30)), options));
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
            let options = "bytes=1M,write=512K,iops=1000".parse().expect("valid");
            let rate = Rate::new(Storage::Null(Null::new(1 << 30)), options);
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
            ("burst=1", "rate: burst=1: no such key (there are bytes, iops, read, write)"),
        ] {
            assert_eq!(text.parse::<RateOptions>().expect_err(text).to_string(), message);
        }
        assert!("bytes=fast".parse::<RateOptions>().is_err());
    }
}
