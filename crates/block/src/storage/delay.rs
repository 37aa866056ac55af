//! A slower storage: a latency for each kind of request, and a bound on how many requests the
//! device works on at once.
//!
//! `read=5ms,write=1ms,parallel=4` is a disk that takes 5 ms for a read, 1 ms for a write, and
//! works on four requests at a time. Others wait in order, as in a device's queue. Delays pass on
//! the reactor's clock, so simulations may use them.

use std::str::FromStr;

use policy::time::Duration;

use super::{
    BlockSize, Durability, Extent, InvalidOption, Storage, ZeroOptions, options::pairs, spec::parse_duration,
};
use crate::{
    buffer::{Buffer, Segments},
    error::Result,
    reactor::{now, sleep_until},
};

/// Most requests that `parallel` can allow at once; more is no bound at all.
const MOST_PARALLEL: usize = 65_536;

/// Latencies by kind of request, zero for none, and the parallelism.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayOptions {
    /// Added to each read.
    pub read: Duration,
    /// Added to each write.
    pub write: Duration,
    /// Added to zeroing and discarding; as for writes unless given.
    pub zero: Duration,
    /// Added to each flush.
    pub flush: Duration,
    /// Most requests at the device at once, if bounded.
    pub parallel: Option<usize>,
}

impl FromStr for DelayOptions {
    type Err = InvalidOption;
    /// `read=5ms,write=1ms,zero=1ms,flush=10ms,parallel=4`, each optional.
    fn from_str(text: &str) -> std::result::Result<Self, InvalidOption> {
        let mut options = Self::default();
        let mut zero = None;
        for pair in pairs("delay", text)? {
            match pair.key {
                "read" => options.read = pair.with(parse_duration)?,
                "write" => options.write = pair.with(parse_duration)?,
                "zero" => zero = Some(pair.with(parse_duration)?),
                "flush" => options.flush = pair.with(parse_duration)?,
                "parallel" => {
                    let parallel: usize = pair.number(1)?;
                    if parallel > MOST_PARALLEL {
                        return Err(pair.error(format!("is above {MOST_PARALLEL}")));
                    }
                    options.parallel = Some(parallel);
                }
                _ => return Err(pair.unknown("read, write, zero, flush, parallel")),
            }
        }
        options.zero = zero.unwrap_or(options.write);
        Ok(options)
    }
}

/// A storage with latency added.
#[derive(Debug)]
pub struct Delay {
    inner: Storage,
    options: DelayOptions,
    /// A channel with one message for each request that may be at the device.
    permits: Option<Permits>,
}

#[derive(Debug)]
struct Permits {
    give: async_channel::Sender<()>,
    take: async_channel::Receiver<()>,
}

impl Permits {
    fn new(count: usize) -> Self {
        let (give, take) = async_channel::bounded(count);
        for _ in 0..count {
            give.try_send(()).expect("the channel holds as many");
        }
        Self { give, take }
    }

    async fn acquire(&self) -> Permit<'_> {
        self.take.recv().await.expect("both ends live in self");
        Permit(self)
    }
}

struct Permit<'a>(&'a Permits);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.give.try_send(()).expect("there are never more permits than at the start");
    }
}

impl Delay {
    /// Slows `inner` down.
    pub fn new(inner: Storage, options: DelayOptions) -> Self {
        Self { inner, permits: options.parallel.map(Permits::new), options }
    }

    /// What is wrapped.
    pub fn inner(&self) -> &Storage {
        &self.inner
    }

    /// Waits for a place at the device and for the latency; the place is held until the result is dropped.
    async fn enter(&self, latency: Duration) -> Option<Permit<'_>> {
        let permit = match &self.permits {
            Some(permits) => Some(permits.acquire().await),
            None => None,
        };
        if !latency.is_zero() {
            sleep_until(now() + latency).await;
        }
        permit
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    pub(super) fn refresh_size(&self) -> Result<u64> {
        self.inner.refresh_size()
    }

    pub(super) fn description(&self) -> String {
        format!("{}, delayed", self.inner.description())
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

    pub(super) async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer> {
        let _place = self.enter(self.options.read).await;
        Box::pin(self.inner.read(offset, buffer)).await
    }

    pub(super) async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let _place = self.enter(self.options.write).await;
        Box::pin(self.inner.write(offset, data, durability)).await
    }

    pub(super) async fn flush(&self) -> Result<()> {
        let _place = self.enter(self.options.flush).await;
        Box::pin(self.inner.flush()).await
    }

    pub(super) async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let _place = self.enter(self.options.zero).await;
        Box::pin(self.inner.write_zeroes(offset, length, options)).await
    }

    pub(super) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let _place = self.enter(self.options.zero).await;
        Box::pin(self.inner.discard(offset, length)).await
    }

    pub(super) async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        Box::pin(self.inner.block_status(offset, length)).await
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::{
        reactor::{sim, spawn_joinable},
        storage::null::Null,
    };

    fn delayed(options: &str) -> Rc<Delay> {
        Rc::new(Delay::new(Storage::Null(Null::new(1 << 20)), options.parse().expect("valid")))
    }

    #[test]
    fn ten_reads_four_at_a_time_take_three_latencies() {
        sim::run(1, async {
            let delay = delayed("read=5ms,parallel=4");
            let reads: Vec<_> = (0..10)
                .map(|_| {
                    let delay = Rc::clone(&delay);
                    spawn_joinable(async move { delay.read(0, Buffer::new(512)).await.map(drop) })
                })
                .collect();
            for read in reads {
                assert_eq!(read.await, Ok(()));
            }
            assert_eq!(now().as_nanos(), 15_000_000);
        });
    }

    #[test]
    fn each_kind_has_its_own_latency() {
        sim::run(1, async {
            let delay = delayed("write=1ms,flush=10ms");
            delay.flush().await.expect("null");
            assert_eq!(now().as_nanos(), 10_000_000);
            delay.discard(0, 1).await.expect("null");
            assert_eq!(now().as_nanos(), 11_000_000, "as a write");
            delay.read(0, Buffer::new(1)).await.expect("null");
            assert_eq!(now().as_nanos(), 11_000_000);
        });
    }

    #[test]
    fn errors_name_key_value_and_rule() {
        for (text, message) in [
            ("read=5", "delay: read=5: is not a duration (a number with ns, us, ms or s: 100us, 2.5ms, 1s)"),
            ("parallel=0", "delay: parallel=0: is not a whole number of at least 1"),
            ("parallel=99999999999", "delay: parallel=99999999999: is above 65536"),
            ("speed=1", "delay: speed=1: no such key (there are read, write, zero, flush, parallel)"),
            ("read=1ms,read=2ms", "delay: read=2ms: is given twice"),
            ("", "delay: =: is not of the form key=value"),
        ] {
            let error = text.parse::<DelayOptions>().expect_err(text);
            assert_eq!(error.to_string(), message);
        }
    }
}
