//! A device as recorded requests show it: how many requests it serves at a time, and the time that
//! each takes without its wait for the others.
//!
//! ```text
//!   admitted ─────────────► begun ─────────────► completed
//!            others in service     service time
//! ```
//!
//! A recorded time from admission to completion contains the load of that moment. A preview in
//! which other disks are throttled needs the part that the request itself takes. The device is
//! assumed to serve requests in the order of admission. Its number of servers is the smallest with
//! which hardly a request completes before it could have begun: with fewer servers, requests would
//! have been faster than possible.
//!
//! Never extrapolates: a device that was never busy looks as if it could serve no more than it did.

use std::{cmp::Reverse, collections::BinaryHeap};

/// Numbers of servers that are tried.
const SERVERS: [usize; 17] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128];
/// Share of requests that may complete before they could have begun, as devices reorder requests. A
/// device that reorders more has too many servers in the model, and throttling others has less
/// effect there than in reality. A much larger share would accept too few servers.
const MAX_CONTRADICTIONS: f64 = 0.001;
/// Time by which a request may complete before it could have begun: completions are recorded with a
/// delay.
const DELAY_NS: u64 = 10_000;

/// Times of a recorded request, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RecordedTimes {
    pub(super) admitted_ns: u64,
    pub(super) completed_ns: u64,
}

impl RecordedTimes {
    const fn latency_ns(&self) -> u64 {
        self.completed_ns.saturating_sub(self.admitted_ns)
    }
}

/// The model.
#[derive(Debug)]
pub(super) struct RecordedDevice {
    /// Number of servers; `None` if requests hardly delay each other.
    pub(super) parallel: Option<usize>,
    /// Time that each request occupies a server, in the order of the requests.
    pub(super) service_ns: Vec<u64>,
}

impl RecordedDevice {
    /// The model of a device with these requests, which are in any order.
    pub(super) fn of(requests: &[RecordedTimes]) -> Self {
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by_key(|&index| requests[index]);
        let mut service_ns = vec![0; requests.len()];
        for servers in SERVERS {
            let contradictions = serve(requests, &order, servers, &mut service_ns);
            if contradictions as f64 <= requests.len() as f64 * MAX_CONTRADICTIONS {
                return Self { parallel: Some(servers), service_ns };
            }
        }
        Self { parallel: None, service_ns: requests.iter().map(RecordedTimes::latency_ns).collect() }
    }
}

/// Fills in the service times with this number of servers. Returns the number of requests that
/// completed before they could have begun.
fn serve(requests: &[RecordedTimes], order: &[usize], servers: usize, service_ns: &mut [u64]) -> usize {
    let mut free: BinaryHeap<Reverse<u64>> = std::iter::repeat_n(Reverse(0), servers).collect();
    let mut contradictions = 0;
    for &index in order {
        let request = requests[index];
        let Some(mut first) = free.peek_mut() else { break };
        let begun_ns = request.admitted_ns.max(first.0);
        contradictions += usize::from(begun_ns > request.completed_ns.saturating_add(DELAY_NS));
        service_ns[index] = request.completed_ns.saturating_sub(begun_ns);
        *first = Reverse(begun_ns.max(request.completed_ns));
    }
    contradictions
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of a client that keeps `depth` in flight at a device with this many servers, with
    /// service times between 0.5 ms and 1.5 ms.
    fn recorded(servers: usize, depth: usize, seed: u64) -> (Vec<RecordedTimes>, Vec<u64>) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut free: BinaryHeap<Reverse<u64>> = std::iter::repeat_n(Reverse(0), servers).collect();
        let mut ready: BinaryHeap<Reverse<u64>> = std::iter::repeat_n(Reverse(0), depth).collect();
        let mut all = (Vec::new(), Vec::new());
        for _ in 0..5000 {
            let (Reverse(admitted_ns), Reverse(free_ns)) = (ready.pop().unwrap(), free.pop().unwrap());
            let service_ns = random.u64(500_000..1_500_000);
            let completed_ns = admitted_ns.max(free_ns) + service_ns;
            free.push(Reverse(completed_ns));
            ready.push(Reverse(completed_ns));
            all.0.push(RecordedTimes { admitted_ns, completed_ns });
            all.1.push(service_ns);
        }
        all
    }

    #[test]
    fn servers_of_a_busy_device_are_found() {
        for servers in [1, 2, 3, 4] {
            let (requests, service_ns) = recorded(servers, 5 * servers, servers as u64);
            let device = RecordedDevice::of(&requests);
            assert_eq!(device.parallel, Some(servers));
            let differing = device.service_ns.iter().zip(&service_ns).filter(|(one, other)| one != other);
            // Requests that are admitted at the same instant may be exchanged.
            assert!(differing.count() < 100, "{servers}");
        }
        // Many servers resemble somewhat fewer that are faster.
        for servers in [8, 16] {
            let (requests, _) = recorded(servers, 5 * servers, servers as u64);
            let found = RecordedDevice::of(&requests).parallel;
            assert!(found.is_some_and(|found| (servers * 2 / 3..=servers).contains(&found)), "{found:?}");
        }
    }

    #[test]
    fn device_that_was_never_busy_serves_what_it_served() {
        let (requests, service_ns) = recorded(8, 2, 1);
        let device = RecordedDevice::of(&requests);
        assert_eq!((device.parallel, device.service_ns), (Some(2), service_ns));
    }

    #[test]
    fn requests_that_delay_none_have_no_servers() {
        // Each is overtaken by all that follow.
        let reversed =
            |number: u64| RecordedTimes { admitted_ns: number, completed_ns: 3_000_000 - 100 * number };
        let requests: Vec<_> = (0..10_000).map(reversed).collect();
        let device = RecordedDevice::of(&requests);
        assert_eq!((device.parallel, device.service_ns[7]), (None, 2_999_293));
        assert!(RecordedDevice::of(&[]).service_ns.is_empty());
    }
}
