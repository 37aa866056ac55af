//! A client with a fixed number of requests in flight: it sends the next when one is answered.
//!
//! A program that copies a file behaves so; the requests of a trace come regardless of answers. A
//! [`Chain`] is such a client that was recorded.

use super::request::{Op, Request};

/// Delay after an answer that took no time, or a client would send forever at one instant.
const LEAST_NS: u64 = 10_000;

/// A client with a fixed number of requests in flight.
#[derive(Clone, Debug)]
pub struct ClientSpec {
    /// Index of its disk.
    pub disk: usize,
    /// Operation of all its requests.
    pub op: Op,
    /// Bytes of each request.
    pub length: u64,
    /// Where requests are, in sequence and wrapping around, or at random; at least `length` long.
    pub region: std::ops::Range<u64>,
    /// The seed of random places.
    pub random: Option<u64>,
    /// Requests in flight.
    pub depth: u32,
    /// Between an answer and the next request.
    pub think_ns: u64,
    /// `None` has no end.
    pub count: Option<u64>,
    /// Nanoseconds from the first request to the end of sending.
    pub time: std::ops::Range<u64>,
}

/// A client and its position.
#[derive(Clone, Debug)]
pub struct Client {
    pub(super) spec: ClientSpec,
    random: Option<fastrand::Rng>,
    next: u64,
    sent: u64,
}

impl Client {
    /// A client before its first request.
    pub fn new(spec: ClientSpec) -> Self {
        let random = spec.random.map(fastrand::Rng::with_seed);
        Self { next: spec.region.start, random, sent: 0, spec }
    }

    pub(super) fn answered(&self, now: u64, at_once: bool) -> Option<u64> {
        let least_ns = if at_once { LEAST_NS } else { 0 };
        let at = now.saturating_add(self.spec.think_ns.max(least_ns));
        self.goes_on(at).then_some(at)
    }

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

/// What a chain may ask before it is held to [`LEAST_NS`]: a batch comes at one instant where its
/// answers take no time, as a recorder sees them.
const BATCH: usize = 256;

/// A client with one request in flight that asks again what it was recorded to ask, each as long
/// after the answer to the one before as it was; over and over.
///
/// Where answers take no time it is never faster than one in [`LEAST_NS`], or than it was recorded
/// to be.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    disk: usize,
    links: Vec<Link>,
    next: usize,
    /// From the beginning of what was recorded to the first request.
    begins_ns: u64,
    /// Of a request, at least, in the mean.
    least_ns: u64,
    /// When the first was asked last.
    began_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    /// Since the answer to the one before.
    think_ns: u64,
    op: Op,
    length: u64,
    service_ns: u64,
}

impl Chain {
    pub(crate) fn new(disk: usize) -> Self {
        Self { disk, links: Vec::new(), next: 0, begins_ns: 0, least_ns: LEAST_NS, began_ns: 0 }
    }

    /// One more; the first is so long after the beginning of what was recorded.
    pub(crate) fn add(&mut self, think_ns: u64, op: Op, length: u64, service_ns: u64) {
        self.links.push(Link { think_ns, op, length, service_ns });
    }

    /// All begins anew, so long after the last answer as it was to the end of what was recorded and
    /// from there to the first request. All of it took `whole_ns`.
    ///
    /// No longer than between two requests that is only where the recording was cut: whoever asks
    /// always has been waiting for an answer then.
    pub(crate) fn again_after(mut self, rest_ns: u64, longest_ns: u64, whole_ns: u64) -> Self {
        self.least_ns = LEAST_NS.min(whole_ns / self.links.len().max(1) as u64).max(1);
        let second_ns = self.links.get(1).map(|second| second.think_ns);
        if let Some(first) = self.links.first_mut() {
            self.begins_ns = first.think_ns;
            let between_ns = first.think_ns.saturating_add(rest_ns);
            let is_cut = between_ns <= longest_ns.saturating_mul(2);
            first.think_ns = second_ns.filter(|_| is_cut).unwrap_or(between_ns);
        }
        self
    }

    /// When the first comes; none where there is nothing to ask.
    pub(super) fn begins_ns(&self) -> Option<u64> {
        self.links.first().map(|_| self.begins_ns)
    }

    pub(super) fn answered(&self, now: u64) -> u64 {
        let at = now.saturating_add(self.links[self.next].think_ns);
        // The first of all follows the last.
        let asked = if self.next == 0 { self.links.len() } else { self.next };
        let least_ns = self.least_ns.saturating_mul(asked.saturating_sub(BATCH) as u64);
        // A round that is no longer than a batch still takes some time.
        let round_ns = if self.next == 0 { self.least_ns } else { 0 };
        at.max(self.began_ns.saturating_add(least_ns.max(round_ns)))
    }

    /// The next request, and how long its device takes.
    pub(super) fn next(&mut self, now: u64) -> (Request, u64) {
        if self.next == 0 {
            self.began_ns = now;
        }
        let Link { op, length, service_ns, .. } = self.links[self.next];
        self.next = (self.next + 1) % self.links.len();
        (Request { at_ns: now, disk: self.disk, op, offset: 0, length }, service_ns)
    }
}
