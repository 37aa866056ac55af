//! A client that waits for its answers: a fixed number of requests in flight, the next when one is
//! answered.
//!
//! Requests of a trace come when the trace says, however late those before them were answered. A
//! program that copies a file does not behave so; a client does.

use super::request::{Op, Request};

/// Nanoseconds until the next request where an answer took no time at all, as with no limit on no
/// device: somebody who never needs any time would send without end at one instant. As long as a
/// fast device takes.
const LEAST_NS: u64 = 10_000;

/// Where a client's requests go.
#[derive(Clone, Debug)]
pub(crate) struct ClientSpec {
    pub(crate) disk: usize,
    pub(crate) op: Op,
    /// Bytes of a request; not 0.
    pub(crate) length: u64,
    /// Where its requests are: one behind the other, from the first byte to the last, and again; or
    /// at random places there. At least `length` apart.
    pub(crate) region: std::ops::Range<u64>,
    /// Draws places at random.
    pub(crate) random: Option<u64>,
    /// Requests at a time; not 0.
    pub(crate) depth: u32,
    /// Nanoseconds between an answer and the next request.
    pub(crate) think_ns: u64,
    /// Requests in all; `None` until the end.
    pub(crate) count: Option<u64>,
    /// When it begins, and from when on it sends no more, in nanoseconds.
    pub(crate) time: std::ops::Range<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(super) spec: ClientSpec,
    random: Option<fastrand::Rng>,
    next: u64,
    sent: u64,
}

impl Client {
    pub(crate) fn new(spec: ClientSpec) -> Self {
        let random = spec.random.map(fastrand::Rng::with_seed);
        Self { next: spec.region.start, random, sent: 0, spec }
    }

    /// One of its requests was answered, at once or not: when to send another.
    pub(super) fn answered(&self, now: u64, at_once: bool) -> Option<u64> {
        let least_ns = if at_once { LEAST_NS } else { 0 };
        let at = now.saturating_add(self.spec.think_ns.max(least_ns));
        self.goes_on(at).then_some(at)
    }

    /// Its next request, which it sends now.
    pub(super) fn next(&mut self, now: u64) -> Option<Request> {
        if !self.goes_on(now) {
            return None;
        }
        self.sent += 1;
        let ClientSpec { disk, op, length, ref region, .. } = self.spec;
        let offset = match &mut self.random {
            Some(random) => {
                let places = (region.end - region.start) / length;
                region.start + random.u64(..places.max(1)) * length
            }
            None => {
                if self.next + length > region.end {
                    self.next = region.start;
                }
                let offset = self.next;
                self.next += length;
                offset
            }
        };
        Some(Request { at_ns: now, disk, op, offset, length })
    }

    fn goes_on(&self, at: u64) -> bool {
        at < self.spec.time.end && self.spec.count.is_none_or(|count| self.sent < count)
    }
}
