//! Detection of clients that do not read their replies. They never quiesce, so they would keep all
//! other clients from being transferred in an upgrade.
//!
//! ```text
//!   a message is being sent ──► is it still the same one, and has the client read nothing since?
//!                                 for longer than the timeout ──► disconnect and report the client
//! ```
//!
//! The check uses the state of each connection's sender and the kernel's count of unread bytes, so
//! it costs requests nothing. Never disconnects a client that reads, however slowly.

use std::collections::HashMap;

use policy::time::{Duration, Instant};

use super::server::NbdServer;

/// Interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A client that may have stopped reading: the observed state and its first observation.
struct StalledReader {
    state: (u64, usize),
    since: Instant,
}

/// Suspects of the last check, by number of client.
#[derive(Default)]
struct StalledReaders(HashMap<u64, StalledReader>);

impl StalledReaders {
    /// Examines all clients to which a message is being sent: `(number, state)`. Returns the
    /// numbers of those whose state has not changed for `timeout`.
    fn find_stalled(
        &mut self,
        sending: impl Iterator<Item = (u64, (u64, usize))>,
        now: Instant,
        timeout: Duration,
    ) -> Vec<u64> {
        let mut previous = std::mem::take(&mut self.0);
        let mut stalled = Vec::new();
        for (number, seen) in sending {
            let suspect = previous.remove(&number).filter(|suspect| suspect.state == seen);
            let suspect = suspect.unwrap_or(StalledReader { state: seen, since: now });
            if now - suspect.since >= timeout {
                stalled.push(number);
            } else {
                self.0.insert(number, suspect);
            }
        }
        stalled
    }
}

impl NbdServer {
    /// Disconnects clients that have not read a byte of a reply for `timeout`. Returns descriptions
    /// of the disconnected clients once no suspect is left.
    pub async fn disconnect_stalled(&self, timeout: Duration) -> Vec<String> {
        let (mut suspects, mut disconnected) = (StalledReaders::default(), Vec::new());
        loop {
            disconnected.extend(self.disconnect_stalled_now(&mut suspects, timeout));
            if suspects.0.is_empty() {
                return disconnected;
            }
            reactor::sleep_until(reactor::now() + CHECK_INTERVAL).await;
        }
    }

    /// Disconnects clients that do not read their replies until this future is dropped, while the
    /// server [quiesces](NbdServer::quiesce). No message is sent to quiesced connections, so these
    /// are not affected. Reports a description of each disconnected client.
    pub async fn disconnect_stalled_until_dropped(&self, timeout: Duration, report: impl Fn(String)) {
        let mut suspects = StalledReaders::default();
        loop {
            self.disconnect_stalled_now(&mut suspects, timeout).into_iter().for_each(&report);
            reactor::sleep_until(reactor::now() + CHECK_INTERVAL).await;
        }
    }

    fn disconnect_stalled_now(&self, suspects: &mut StalledReaders, timeout: Duration) -> Vec<String> {
        let stalled = suspects.find_stalled(self.sending_states().into_iter(), reactor::now(), timeout);
        let disconnect = |number| {
            // Read before the disconnect: its worker then removes the client from the tables.
            let client = self.describe_client(number);
            self.transfers(number)?.disconnect();
            Some(client)
        };
        stalled.into_iter().filter_map(disconnect).collect()
    }

    /// Description of a client that has not quiesced; `None` if all have.
    pub fn unquiesced_client(&self) -> Option<String> {
        let unquiesced = {
            let (live, quiesced) = (self.client_numbers(), self.quiesce_state.lock_quiesced_states());
            live.into_iter().filter(|number| !quiesced.contains_key(number)).min()
        };
        unquiesced.map(|number| self.describe_client(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_readers_stalled_for_the_timeout_are_found() {
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let timeout = Duration::from_millis(100);
        let mut suspects = StalledReaders::default();
        // 1 reads nothing; 2 reads slowly from a long message; 3 is always sent another message.
        let states = |ms: u64| [(1, (7, 4096)), (2, (7, 9000 - ms as usize)), (3, (ms, 4096))];
        for ms in (0..100).step_by(10) {
            assert_eq!(suspects.find_stalled(states(ms).into_iter(), at(ms), timeout), [0; 0]);
        }
        assert_eq!(suspects.find_stalled(states(100).into_iter(), at(100), timeout), [1]);
        // A check without a message in between ends the suspicion.
        suspects.find_stalled(std::iter::empty(), at(110), timeout);
        assert!(suspects.0.is_empty());
        assert_eq!(suspects.find_stalled(states(200).into_iter().take(1), at(200), timeout), [0; 0]);
    }
}
