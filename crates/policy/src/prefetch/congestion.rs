//! Congestion control: limits read-ahead in flight and queues streams for it.
//!
//! Read-ahead in flight delays the guests' own requests in the device's queue. The response time of
//! each read-ahead request is therefore compared with the best recent one for the same request
//! size. If it is several times longer, and longer than the queue of a fast device justifies, the
//! limit is lowered; otherwise it is raised. Delay indicates congestion as in TCP Vegas; steps down
//! are larger than steps up.
//!
//! A stream without cached data whose read-ahead is refused waits in a queue. Each stream in the
//! queue has a share reserved that streams behind it cannot use; otherwise a stream that has just
//! received data would be the first to request more.

use super::read_ahead::{CHUNK_MAX_BYTES, StreamId};
use alloc::collections::VecDeque;

/// Ratio to the best response time above which a response lowers the limit, and above which the
/// smoothed time means congestion; both only above [`MIN_CONGESTED_NS`]. The ratio is 4 because the
/// requests of a single window already queue up to four deep.
const CONGESTION_RATIO: u64 = 4;
/// Response time below which a device is never congested. A flash device reaches several times the
/// throughput of single requests only with a queue, whose delay may approach this time.
const MIN_CONGESTED_NS: u64 = 2_000_000;
/// Initial limit of bytes in flight.
const INITIAL_IN_FLIGHT_LIMIT: u64 = 2 << 20;
/// Lowest limit of bytes in flight.
const MIN_IN_FLIGHT_LIMIT: u64 = 512 << 10;
/// Bytes that one stream may read ahead at a time while others wait.
const WAITING_SHARE_BYTES: u64 = MIN_IN_FLIGHT_LIMIT / 2;
/// A grant below this size is refused, unless the stream requested less.
const MIN_REQUEST_BYTES: u64 = 32 << 10;
/// A waiting stream is forgotten if it does not request again during this number of refusals of
/// other streams, plus four for each stream that waits.
const FORGET_AFTER_REFUSALS: u64 = 64;
/// Number of size classes of requests, one for each power of two up to a chunk.
const SIZE_CLASSES: usize = CHUNK_MAX_BYTES.ilog2() as usize + 1;

#[derive(Debug)]
pub(super) struct CongestionControl {
    response_times: [ResponseTime; SIZE_CLASSES],
    is_congested: bool,
    /// Bytes of read-ahead in flight. No more are admitted once they reach `in_flight_limit`, which
    /// may be lowered below them.
    in_flight_bytes: u64,
    in_flight_limit: u64,
    max_in_flight_limit: u64,
    /// Refused streams without data in the order of their first refusal, each with the value of
    /// `refused_requests` at its latest refusal.
    waiting: VecDeque<(StreamId, u64)>,
    refused_requests: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct ResponseTime {
    best_ns: u64,
    smoothed_ns: u64,
}

impl CongestionControl {
    pub(super) fn new(memory_bytes: u64) -> Self {
        Self {
            response_times: [ResponseTime::default(); SIZE_CLASSES],
            is_congested: false,
            in_flight_bytes: 0,
            in_flight_limit: INITIAL_IN_FLIGHT_LIMIT,
            max_in_flight_limit: memory_bytes.max(MIN_IN_FLIGHT_LIMIT),
            waiting: VecDeque::new(),
            refused_requests: 0,
        }
    }

    pub(super) fn resize(&mut self, memory_bytes: u64) {
        self.max_in_flight_limit = memory_bytes.max(MIN_IN_FLIGHT_LIMIT);
        self.in_flight_limit = self.in_flight_limit.min(self.max_in_flight_limit);
    }

    /// Number of bytes, up to `requested_bytes`, that the stream may read ahead now; 0 if less than
    /// a useful request. At most [`WAITING_SHARE_BYTES`] while other streams wait, else a quarter
    /// of the limit, so that large windows do not displace small ones. A refused stream waits in
    /// the queue unless `has_data`.
    pub(super) fn allowed_bytes(&mut self, stream: StreamId, requested_bytes: u64, has_data: bool) -> u64 {
        self.forget_stale();
        let position = self.waiting.iter().position(|(waiting, _)| *waiting == stream);
        let ahead_count = position.unwrap_or(self.waiting.len()) as u64;
        // Each stream that waits before this one has a share reserved.
        let available_bytes = self
            .in_flight_limit
            .saturating_sub(self.in_flight_bytes)
            .saturating_sub(ahead_count * WAITING_SHARE_BYTES);
        let is_alone = self.waiting.len() == usize::from(position.is_some());
        let max_bytes =
            if is_alone { (self.in_flight_limit / 4).max(WAITING_SHARE_BYTES) } else { WAITING_SHARE_BYTES };
        let granted = requested_bytes.min(available_bytes).min(max_bytes);
        if granted >= requested_bytes.min(MIN_REQUEST_BYTES) {
            position.map(|place| self.waiting.remove(place));
            return granted;
        }
        if !has_data {
            self.refused_requests += 1;
            match position {
                Some(place) => self.waiting[place].1 = self.refused_requests,
                None => self.waiting.push_back((stream, self.refused_requests)),
            }
        }
        0
    }

    fn forget_stale(&mut self) {
        let max_age = FORGET_AFTER_REFUSALS + 4 * self.waiting.len() as u64;
        while self.waiting.front().is_some_and(|(_, refused_at)| self.refused_requests - refused_at > max_age)
        {
            self.waiting.pop_front();
        }
    }

    pub(super) fn add_in_flight(&mut self, bytes: u64) {
        self.in_flight_bytes += bytes;
    }

    pub(super) fn remove_in_flight(&mut self, bytes: u64) {
        self.in_flight_bytes -= bytes;
    }

    pub(super) fn record_response(&mut self, bytes: u64, response_ns: u64) {
        let response = &mut self.response_times[(bytes.max(1).ilog2() as usize).min(SIZE_CLASSES - 1)];
        let response_ns = response_ns.max(1);
        // The first request of this size is its own reference.
        if response.best_ns == 0 {
            *response = ResponseTime { best_ns: response_ns, smoothed_ns: response_ns };
        }
        // The best time ages because devices change: without a shorter one it doubles in about 360
        // requests.
        response.best_ns = response_ns.min(response.best_ns.saturating_add(response.best_ns / 512 + 1));
        response.smoothed_ns = response.smoothed_ns - response.smoothed_ns / 8 + response_ns / 8;
        let bound_ns = response.best_ns.saturating_mul(CONGESTION_RATIO).max(MIN_CONGESTED_NS);
        self.is_congested = response.smoothed_ns > bound_ns;
        self.in_flight_limit = if response_ns > bound_ns {
            (self.in_flight_limit - self.in_flight_limit / 8).max(MIN_IN_FLIGHT_LIMIT)
        } else {
            (self.in_flight_limit + bytes / 8).min(self.max_in_flight_limit)
        };
    }

    pub(super) const fn is_congested(&self) -> bool {
        self.is_congested
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefetch::streams::{ScanStep, StreamTable};
    use crate::prefetch::window::ReadAheadWindow;

    const WINDOW: u64 = 128 << 10;

    #[test]
    fn tenfold_response_time_is_congestion() {
        let mut congestion = CongestionControl::new(0);
        for _ in 0..50 {
            congestion.record_response(WINDOW, 500_000);
        }
        assert!(!congestion.is_congested());
        for _ in 0..50 {
            congestion.record_response(WINDOW, 8_000_000);
        }
        assert!(congestion.is_congested());
        for _ in 0..50 {
            congestion.record_response(WINDOW, 600_000);
        }
        assert!(!congestion.is_congested());
    }

    #[test]
    fn congestion_lowers_the_limit_and_serves_longest_waiting_stream() {
        let mut streams = StreamTable::new(3);
        let window = ReadAheadWindow::new(WINDOW, 1 << 20);
        let [first, second, third] =
            [1, 2, 3].map(|place: u64| streams.find_or_add(ScanStep::Forward, place << 30, 4096, window));
        let mut congestion = CongestionControl::new(64 << 20);
        congestion.add_in_flight(1 << 20);
        assert_eq!(congestion.allowed_bytes(first, 1 << 20, true), 512 << 10, "a quarter of the limit");
        for _ in 0..1000 {
            congestion.record_response(WINDOW, 500_000);
        }
        assert_eq!(
            congestion.allowed_bytes(first, 1 << 20, true),
            1 << 20,
            "no request takes longer than the best response time"
        );
        for _ in 0..100 {
            congestion.record_response(WINDOW, 20_000_000);
        }
        assert_eq!(congestion.allowed_bytes(second, WINDOW, false), 0);
        assert_eq!(congestion.allowed_bytes(third, WINDOW, false), 0);
        congestion.remove_in_flight(1 << 20);
        congestion.add_in_flight(WAITING_SHARE_BYTES);
        assert_eq!(congestion.allowed_bytes(first, WINDOW, true), 0, "other streams have waited");
        assert_eq!(congestion.allowed_bytes(third, WINDOW, false), 0, "`second` has waited longer");
        assert_eq!(
            congestion.allowed_bytes(second, 1 << 20, false),
            WAITING_SHARE_BYTES,
            "an equal share while other streams wait"
        );
        assert_eq!(congestion.allowed_bytes(third, 1 << 20, false), WAITING_SHARE_BYTES);
        congestion.add_in_flight(WAITING_SHARE_BYTES);
        assert_eq!(congestion.allowed_bytes(second, 1 << 20, false), 0);
        for _ in 0..=FORGET_AFTER_REFUSALS + 8 {
            congestion.allowed_bytes(third, WINDOW, false);
        }
        congestion.remove_in_flight(WAITING_SHARE_BYTES);
        assert_eq!(
            congestion.allowed_bytes(third, 1 << 20, false),
            WAITING_SHARE_BYTES,
            "the second stream has not requested read-ahead again"
        );
    }
}
