//! Congestion control: limits read-ahead in flight and queues streams for it.
//!
//! Read-ahead in flight delays the guests' own requests in the device's queue. Its response time is
//! therefore compared with the best recent one for the same size. If it is several times longer,
//! and longer than the queue of a fast device justifies, the limit is lowered; otherwise raised.
//! Delay indicates congestion as in TCP Vegas; steps down are larger than steps up.
//!
//! A stream without cached data that is refused read-ahead waits in a queue. Capacity is reserved
//! for the streams that have waited longest; otherwise a stream that has just got data would be the
//! first to ask again.

use super::ahead::{CHUNK_MAX_BYTES, StreamId};
use alloc::collections::VecDeque;

/// Ratio of smoothed to best response time above which a device is congested. Requests of a window
/// queue up to four deep...
const CONGESTED: u64 = 4;
/// ... and it must exceed this time: a flash device has a multiple of its throughput at the queue
/// depth that takes this long.
const TOLERATED_NS: u64 = 2_000_000;
/// Initial and lowest limit of bytes in flight.
const ALLOWED_AT_FIRST: u64 = 2 << 20;
const LEAST_ALLOWED: u64 = 512 << 10;
/// Share of one stream in bytes while others wait.
const SHARE: u64 = LEAST_ALLOWED / 2;
/// Smallest useful request in bytes.
const LEAST_WORTH: u64 = 32 << 10;
/// A waiting stream is forgotten if it does not ask again within this many requests of other
/// streams, plus four for each waiting one.
const REMEMBERED: u64 = 64;
/// Classes of request sizes: powers of two.
const SIZES: usize = CHUNK_MAX_BYTES.ilog2() as usize + 1;

#[derive(Debug)]
pub(super) struct Congestion {
    paces: [Pace; SIZES],
    is_congested: bool,
    /// Bytes in flight, and their limit.
    on_its_way: u64,
    allowed: u64,
    most_allowed: u64,
    /// Refused streams without data, with the value of `questions` at their last request.
    waiting: VecDeque<(StreamId, u64)>,
    questions: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    best_ns: u64,
    smoothed_ns: u64,
}

impl Congestion {
    pub(super) fn new(memory_bytes: u64) -> Self {
        Self {
            paces: [Pace::default(); SIZES],
            is_congested: false,
            on_its_way: 0,
            allowed: ALLOWED_AT_FIRST,
            most_allowed: memory_bytes.max(LEAST_ALLOWED),
            waiting: VecDeque::new(),
            questions: 0,
        }
    }

    pub(super) fn resize(&mut self, memory_bytes: u64) {
        self.most_allowed = memory_bytes.max(LEAST_ALLOWED);
        self.allowed = self.allowed.min(self.most_allowed);
    }

    /// Number of bytes, up to `wanted`, that the stream may read ahead now; 0 if less than a useful
    /// request. At most a quarter of the limit, so that large windows do not displace small ones.
    pub(super) fn room(&mut self, stream: StreamId, wanted: u64, has_data: bool) -> u64 {
        self.forget_those_who_left();
        let place = self.waiting.iter().position(|(waiting, _)| *waiting == stream);
        let before = place.unwrap_or(self.waiting.len()) as u64;
        // Each stream that waits before this one has a share reserved.
        let free = self.allowed.saturating_sub(self.on_its_way).saturating_sub(before * SHARE);
        let is_alone = self.waiting.len() == usize::from(place.is_some());
        let most = if is_alone { (self.allowed / 4).max(SHARE) } else { SHARE };
        let room = wanted.min(free).min(most);
        if room >= wanted.min(LEAST_WORTH) {
            place.map(|place| self.waiting.remove(place));
            return room;
        }
        if !has_data {
            self.questions += 1;
            match place {
                Some(place) => self.waiting[place].1 = self.questions,
                None => self.waiting.push_back((stream, self.questions)),
            }
        }
        0
    }

    fn forget_those_who_left(&mut self) {
        let patience = REMEMBERED + 4 * self.waiting.len() as u64;
        while self.waiting.front().is_some_and(|(_, asked)| self.questions - asked > patience) {
            self.waiting.pop_front();
        }
    }

    pub(super) fn begun(&mut self, bytes: u64) {
        self.on_its_way += bytes;
    }

    pub(super) fn ended(&mut self, bytes: u64) {
        self.on_its_way -= bytes;
    }

    pub(super) fn took(&mut self, bytes: u64, took_ns: u64) {
        let pace = &mut self.paces[(bytes.max(1).ilog2() as usize).min(SIZES - 1)];
        let took_ns = took_ns.max(1);
        // The first request of this size is its own reference.
        if pace.best_ns == 0 {
            *pace = Pace { best_ns: took_ns, smoothed_ns: took_ns };
        }
        // The best time ages because devices change: it doubles after some hundred requests.
        pace.best_ns = took_ns.min(pace.best_ns.saturating_add(pace.best_ns / 512 + 1));
        pace.smoothed_ns = pace.smoothed_ns - pace.smoothed_ns / 8 + took_ns / 8;
        let bound_ns = pace.best_ns.saturating_mul(CONGESTED).max(TOLERATED_NS);
        self.is_congested = pace.smoothed_ns > bound_ns;
        self.allowed = if took_ns > bound_ns {
            (self.allowed - self.allowed / 8).max(LEAST_ALLOWED)
        } else {
            (self.allowed + bytes / 8).min(self.most_allowed)
        };
    }

    pub(super) const fn is_congested(&self) -> bool {
        self.is_congested
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefetch::streams::{Step, Streams};
    use crate::prefetch::window::Window;

    const WINDOW: u64 = 128 << 10;

    #[test]
    fn a_device_that_takes_ten_times_as_long_is_congested_until_it_is_as_fast_again() {
        let mut congestion = Congestion::new(0);
        for _ in 0..50 {
            congestion.took(WINDOW, 500_000);
        }
        assert!(!congestion.is_congested());
        for _ in 0..50 {
            congestion.took(WINDOW, 8_000_000);
        }
        assert!(congestion.is_congested());
        for _ in 0..50 {
            congestion.took(WINDOW, 600_000);
        }
        assert!(!congestion.is_congested());
    }

    #[test]
    fn on_a_congested_device_less_is_on_its_way_and_who_has_waited_longest_comes_first() {
        let mut streams = Streams::new(3);
        let window = Window::new(WINDOW, 1 << 20);
        let [one, other, third] =
            [1, 2, 3].map(|place: u64| streams.join(Step::Forward, place << 30, 4096, window));
        let mut congestion = Congestion::new(64 << 20);
        congestion.begun(1 << 20);
        assert_eq!(congestion.room(one, 1 << 20, true), 512 << 10, "a quarter");
        for _ in 0..1000 {
            congestion.took(WINDOW, 500_000);
        }
        assert_eq!(congestion.room(one, 1 << 20, true), 1 << 20, "nothing takes longer than it should");
        for _ in 0..100 {
            congestion.took(WINDOW, 20_000_000);
        }
        assert_eq!(congestion.room(other, WINDOW, false), 0);
        assert_eq!(congestion.room(third, WINDOW, false), 0);
        congestion.ended(1 << 20);
        congestion.begun(SHARE);
        assert_eq!(congestion.room(one, WINDOW, true), 0, "others have waited");
        assert_eq!(congestion.room(third, WINDOW, false), 0, "one of them longer");
        assert_eq!(congestion.room(other, 1 << 20, false), SHARE, "as much as everybody, while others wait");
        assert_eq!(congestion.room(third, 1 << 20, false), SHARE);
        congestion.begun(SHARE);
        assert_eq!(congestion.room(other, 1 << 20, false), 0);
        for _ in 0..=REMEMBERED + 8 {
            congestion.room(third, WINDOW, false);
        }
        congestion.ended(SHARE);
        assert_eq!(congestion.room(third, 1 << 20, false), SHARE, "the other has not come again");
    }
}
