//! A slower storage: a latency for each kind of request, and a limit on the number of requests that
//! the device processes at once.
//!
//! `read=5ms,write=1ms,parallel=4` is a disk that needs 5 ms for a read and 1 ms for a write, and
//! processes four requests at a time. Further requests wait in order, as in a device's queue.
//! Delays elapse on the reactor's clock, so simulations may use them.

use std::{
    collections::VecDeque,
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use policy::time::Duration;

use super::{
    InvalidOption,
    options::pairs,
    spec::{parse_duration, show_duration},
};
use reactor::{now, sleep_until};

/// Maximum of `parallel`; a larger number would be no bound at all.
const MAX_PARALLEL: usize = 65_536;

/// Latency of each kind of request, zero for none, and the parallelism.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayOptions {
    /// Added to each read.
    pub read: Duration,
    /// Added to each write.
    pub write: Duration,
    /// Added to zeroing and discarding; the latency of writes unless given.
    pub zero: Duration,
    /// Added to each flush.
    pub flush: Duration,
    /// Maximum number of requests at the device at once; `None` is unlimited.
    pub parallel: Option<usize>,
}

impl FromStr for DelayOptions {
    type Err = InvalidOption;
    /// Parses `read=5ms,write=1ms,zero=1ms,flush=10ms,parallel=4`, each optional.
    fn from_str(text: &str) -> Result<Self, InvalidOption> {
        let mut options = Self::default();
        let mut zero = None;
        for pair in pairs("delay", text)? {
            match pair.key {
                "read" => options.read = pair.parse(parse_duration)?,
                "write" => options.write = pair.parse(parse_duration)?,
                "zero" => zero = Some(pair.parse(parse_duration)?),
                "flush" => options.flush = pair.parse(parse_duration)?,
                "parallel" => {
                    let parallel: usize = pair.number(1)?;
                    if parallel > MAX_PARALLEL {
                        return Err(pair.error(format!("is above {MAX_PARALLEL}")));
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

/// Formats the options so that [`FromStr`] reads them.
impl fmt::Display for DelayOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { read, write, zero, flush, parallel } = *self;
        let [read, write, zero, flush] = [read, write, zero, flush].map(show_duration);
        write!(f, "read={read},write={write},zero={zero},flush={flush}")?;
        parallel.map_or(Ok(()), |parallel| write!(f, ",parallel={parallel}"))
    }
}

/// A slow device.
#[derive(Debug)]
pub(super) struct Delay {
    pub(super) options: DelayOptions,
    permits: Option<Arc<DelaySemaphore>>,
}

/// Semaphore of the requests at the device; further requests wait in order.
#[derive(Debug)]
struct DelaySemaphore(Mutex<DelayQueue>);

#[derive(Debug)]
struct DelayQueue {
    free: usize,
    waiting: VecDeque<async_channel::Sender<DelayPermit>>,
}

impl DelaySemaphore {
    fn new(count: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(DelayQueue { free: count, waiting: VecDeque::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, DelayQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn acquire(self: &Arc<Self>) -> DelayPermit {
        let permit = {
            let mut state = self.lock();
            if state.free > 0 {
                state.free -= 1;
                return DelayPermit(Arc::clone(self));
            }
            // A free permit goes to the oldest waiter, never to a caller that arrives later.
            let (sender, permit) = async_channel::bounded(1);
            state.waiting.push_back(sender);
            permit
        };
        permit.recv().await.expect("the sender stays in the queue until it has sent")
    }
}

pub(super) struct DelayPermit(Arc<DelaySemaphore>);

impl fmt::Debug for DelayPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Permit")
    }
}

impl Drop for DelayPermit {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let Some(next) = state.waiting.pop_front() else {
            state.free += 1;
            return;
        };
        // Unlocked first: if the waiter was cancelled, the permit is dropped below, which locks
        // again.
        drop(state);
        // If the waiter has been cancelled, dropping the permit passes it to the next one.
        drop(next.try_send(DelayPermit(Arc::clone(&self.0))));
    }
}

impl Delay {
    pub(super) fn new(options: DelayOptions) -> Self {
        Self { permits: options.parallel.map(DelaySemaphore::new), options }
    }

    /// Waits for a permit of the device and for the latency; the permit is held until the result is
    /// dropped.
    pub(super) async fn acquire(&self, latency: Duration) -> Option<DelayPermit> {
        let permit = match &self.permits {
            Some(permits) => Some(permits.acquire().await),
            None => None,
        };
        if !latency.is_zero() {
            sleep_until(now() + latency).await;
        }
        permit
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::{Storage, null::NullStorage};
    use reactor::{buffer::IoBuffer, sim, spawn_joinable};

    fn delayed(options: &str) -> Rc<Storage> {
        Rc::new(Storage::Null(NullStorage::new(1 << 20)).delayed(options.parse().expect("valid")))
    }

    #[test]
    fn ten_reads_four_at_a_time_take_three_latencies() {
        sim::run(1, async {
            let delay = delayed("read=5ms,parallel=4");
            let reads: Vec<_> = (0..10)
                .map(|_| {
                    let delay = Rc::clone(&delay);
                    spawn_joinable(async move { delay.read(0, IoBuffer::new(512)).await.map(drop) })
                })
                .collect();
            for read in reads {
                assert_eq!(read.await, Ok(()));
            }
            assert_eq!(now().as_nanos(), 15_000_000);
        });
    }

    #[test]
    fn new_requests_wait_behind_queued_ones() {
        sim::run(1, async {
            let delay = delayed("read=5ms,parallel=2");
            let readers: Vec<_> = (0..6)
                .map(|_| {
                    let delay = Rc::clone(&delay);
                    spawn_joinable(async move {
                        for _ in 0..10 {
                            delay.read(0, IoBuffer::new(512)).await.unwrap();
                        }
                        now().as_nanos()
                    })
                })
                .collect();
            for reader in readers {
                assert!(reader.await >= 140_000_000, "60 reads take 150 ms, and all have as many");
            }
        });
    }

    #[test]
    fn cancelled_waiter_passes_its_permit_on() {
        sim::run(1, async {
            let delay = delayed("read=5ms,parallel=1");
            let read = || {
                let delay = Rc::clone(&delay);
                spawn_joinable(async move { delay.read(0, IoBuffer::new(512)).await.map(drop) })
            };
            let first = read();
            sleep_until(now() + Duration::from_millis(1)).await;
            let cancelled = read();
            sleep_until(now() + Duration::from_millis(1)).await;
            drop(cancelled);
            let last = read();
            assert_eq!((first.await, last.await), (Ok(()), Ok(())));
            assert_eq!(now().as_nanos(), 10_000_000);
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
            delay.read(0, IoBuffer::new(1)).await.expect("null");
            assert_eq!(now().as_nanos(), 11_000_000);
        });
    }

    #[test]
    fn errors_name_key_value_and_rule() {
        for (text, message) in [
            ("read=5", "delay: read=5: has no unit (write 5s for seconds, or 5ms)"),
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
