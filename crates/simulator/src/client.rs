//! A client with a fixed number of requests in flight: it sends the next one when one completes.
//!
//! A program that copies a file behaves like this; requests of a trace arrive regardless of
//! completions. A [`RequestChain`] is such a client, reconstructed from a recording.

use super::request::{RequestOp, SimulatedRequest};

// Delay after a completion that took no time; otherwise a client would send forever at one
// instant.
const MIN_NS: u64 = 10_000;

/// Parameters of a client.
#[derive(Clone, Debug)]
pub struct ClientSpec {
    /// Index of its disk.
    pub disk: usize,
    /// Operation of all its requests.
    pub op: RequestOp,
    /// Length of each request in bytes.
    pub length: u64,
    /// Range of its requests, sequential with wrap-around or random; at least `length` bytes.
    pub region: std::ops::Range<u64>,
    /// Seed of random offsets; `None` for sequential ones.
    pub random: Option<u64>,
    /// Number of requests in flight.
    pub depth: u32,
    /// Nanoseconds between a completion and the next request.
    pub think_ns: u64,
    /// Number of requests; `None` for no limit.
    pub count: Option<u64>,
    /// Time of the first request, and end of sending, in nanoseconds.
    pub time: std::ops::Range<u64>,
}

/// A client and its state.
#[derive(Clone, Debug)]
pub struct ClosedLoopClient {
    pub(super) spec: ClientSpec,
    random: Option<fastrand::Rng>,
    next: u64,
    sent: u64,
}

impl ClosedLoopClient {
    /// Creates a client before its first request.
    pub fn new(spec: ClientSpec) -> Self {
        let random = spec.random.map(fastrand::Rng::with_seed);
        Self { next: spec.region.start, random, sent: 0, spec }
    }

    pub(super) fn next_send_ns(&self, now: u64, took_no_time: bool) -> Option<u64> {
        let min_ns = if took_no_time { MIN_NS } else { 0 };
        let at = now.saturating_add(self.spec.think_ns.max(min_ns));
        self.is_active(at).then_some(at)
    }

    pub(super) fn next(&mut self, now: u64) -> Option<SimulatedRequest> {
        if !self.is_active(now) {
            return None;
        }
        self.sent += 1;
        let ClientSpec { disk, op, length, ref region, .. } = self.spec;
        let offset = match &mut self.random {
            Some(random) => {
                let positions = (region.end - region.start) / length;
                // Aligned to the length of a request, as benchmarks such as fio do it.
                region.start + random.u64(..positions.max(1)) * length
            }
            None => {
                // A rest that is shorter than a request is skipped.
                if self.next + length > region.end {
                    self.next = region.start;
                }
                let offset = self.next;
                self.next += length;
                offset
            }
        };
        Some(SimulatedRequest { at_ns: now, disk, op, offset, length })
    }

    fn is_active(&self, at: u64) -> bool {
        at < self.spec.time.end && self.spec.count.is_none_or(|count| self.sent < count)
    }
}

// Number of requests of a chain that may start at one instant, before `MIN_NS` limits its rate: if
// completions take no time, the recorder has recorded a whole batch with one timestamp.
const BATCH: usize = 256;

/// A client with one request in flight that repeats recorded requests endlessly, each after the
/// recorded delay since the previous completion.
///
/// If completions take no time, its mean rate is limited to one request per [`MIN_NS`], or to
/// the recorded rate if that is higher.
#[derive(Clone, Debug)]
pub(crate) struct RequestChain {
    disk: usize,
    links: Vec<ChainRequest>,
    next: usize,
    /// Delay from the start of the recording to the first request.
    begins_ns: u64,
    /// Minimum mean time per request.
    min_ns: u64,
    /// Time of the last repetition of the first request.
    round_began_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct ChainRequest {
    /// Delay since the previous completion.
    think_ns: u64,
    op: RequestOp,
    length: u64,
    service_ns: u64,
}

impl RequestChain {
    pub(crate) fn new(disk: usize) -> Self {
        Self { disk, links: Vec::new(), next: 0, begins_ns: 0, min_ns: MIN_NS, round_began_ns: 0 }
    }

    /// Appends a request; for the first one, `think_ns` counts from the start of the recording.
    pub(crate) fn add(&mut self, think_ns: u64, op: RequestOp, length: u64, service_ns: u64) {
        self.links.push(ChainRequest { think_ns, op, length, service_ns });
    }

    /// Sets the delay before a repetition: from the last completion to the end of the recording,
    /// and from its start to the first request. The recording lasted `duration_ns`.
    ///
    /// A delay that is no longer than two requests exists only because the recording was cut: a
    /// client that always has a request in flight was waiting for a completion then.
    pub(crate) fn with_repetition(mut self, tail_ns: u64, longest_ns: u64, duration_ns: u64) -> Self {
        self.min_ns = MIN_NS.min(duration_ns / self.links.len().max(1) as u64).max(1);
        let second_ns = self.links.get(1).map(|second| second.think_ns);
        if let Some(first) = self.links.first_mut() {
            self.begins_ns = first.think_ns;
            let between_ns = first.think_ns.saturating_add(tail_ns);
            let is_cut = between_ns <= longest_ns.saturating_mul(2);
            first.think_ns = second_ns.filter(|_| is_cut).unwrap_or(between_ns);
        }
        self
    }

    /// Time of the first request; `None` if there are no requests.
    pub(super) fn start_ns(&self) -> Option<u64> {
        self.links.first().map(|_| self.begins_ns)
    }

    pub(super) fn next_send_ns(&self, now: u64) -> u64 {
        let at = now.saturating_add(self.links[self.next].think_ns);
        // The first request follows the last one.
        let position = if self.next == 0 { self.links.len() } else { self.next };
        let batch_ns = self.min_ns.saturating_mul(position.saturating_sub(BATCH) as u64);
        // A round that is shorter than a batch must take some time as well.
        let round_ns = if self.next == 0 { self.min_ns } else { 0 };
        at.max(self.round_began_ns.saturating_add(batch_ns.max(round_ns)))
    }

    /// Returns the next request and its recorded service time.
    pub(super) fn next(&mut self, now: u64) -> (SimulatedRequest, u64) {
        if self.next == 0 {
            self.round_began_ns = now;
        }
        let ChainRequest { op, length, service_ns, .. } = self.links[self.next];
        self.next = (self.next + 1) % self.links.len();
        (SimulatedRequest { at_ns: now, disk: self.disk, op, offset: 0, length }, service_ns)
    }
}
