//! Clients that do not take their replies: they never come to rest, and so would keep everybody
//! else from another process that goes on.
//!
//! ```text
//!   a message is being sent ──► is it still the same one, and has the client read nothing since?
//!                                 for so long ──► the client is disconnected, and named
//! ```
//!
//! Told by what a connection says of its sender and by the kernel's count of unread bytes, so that
//! nothing is done for it on the way of a request. Whoever reads, however slowly, is left alone.

use std::collections::HashMap;

use policy::time::{Duration, Instant};

use super::server::Server;

/// How often it is looked.
const LOOK: Duration = Duration::from_millis(10);

/// A client that may take no replies: who, what it was seen with, and since when.
struct Suspect {
    seen: (u64, usize),
    since: Instant,
}

/// Those that were seen so at the last look, by their numbers.
#[derive(Default)]
struct Suspects(HashMap<u64, Suspect>);

impl Suspects {
    /// Looks at all that are in the middle of a message: `(number, what each is seen with)`.
    /// Returns the numbers of those with which nothing has moved for so long.
    fn look(
        &mut self,
        sending: impl Iterator<Item = (u64, (u64, usize))>,
        now: Instant,
        patience: Duration,
    ) -> Vec<u64> {
        let mut before = std::mem::take(&mut self.0);
        let mut stuck = Vec::new();
        for (number, seen) in sending {
            let suspect = before.remove(&number).filter(|suspect| suspect.seen == seen);
            let suspect = suspect.unwrap_or(Suspect { seen, since: now });
            if now - suspect.since >= patience {
                stuck.push(number);
            } else {
                self.0.insert(number, suspect);
            }
        }
        stuck
    }
}

impl Server {
    /// Disconnects clients that have not taken a byte of a reply for `patience`; returns once there
    /// is no client that may be one, with those that were disconnected, for people.
    pub async fn push_out_unread(&self, patience: Duration) -> Vec<String> {
        let (mut suspects, mut gone) = (Suspects::default(), Vec::new());
        loop {
            gone.extend(self.push_out_stuck(&mut suspects, patience));
            if suspects.0.is_empty() {
                return gone;
            }
            reactor::sleep_until(reactor::now() + LOOK).await;
        }
    }

    /// The same until this is dropped, for while the server [comes to rest](Server::come_to_rest):
    /// nothing more is sent to those that have, so it ends by itself for the others. Each is told
    /// to `told`.
    pub async fn keep_pushing_out_unread(&self, patience: Duration, told: impl Fn(String)) {
        let mut suspects = Suspects::default();
        loop {
            self.push_out_stuck(&mut suspects, patience).into_iter().for_each(&told);
            reactor::sleep_until(reactor::now() + LOOK).await;
        }
    }

    fn push_out_stuck(&self, suspects: &mut Suspects, patience: Duration) -> Vec<String> {
        let stuck = suspects.look(self.in_a_message().into_iter(), reactor::now(), patience);
        let push_out = |number| {
            // Before its worker has forgotten whose it was.
            let client = self.called(number);
            self.holding(number)?.push_out_now();
            Some(client)
        };
        stuck.into_iter().filter_map(push_out).collect()
    }

    /// A client that has not come to rest, for people; none where all have.
    pub fn restless(&self) -> Option<String> {
        let restless = {
            let (live, rested) = (self.holders(), self.rest.rested());
            live.into_iter().filter(|number| !rested.contains_key(number)).min()
        };
        restless.map(|number| self.called(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whoever_takes_nothing_for_so_long_is_found() {
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let patience = Duration::from_millis(100);
        let mut suspects = Suspects::default();
        // 1 takes nothing; 2 takes some of a long message; 3 is always in another one.
        let seen = |ms: u64| [(1, (7, 4096)), (2, (7, 9000 - ms as usize)), (3, (ms, 4096))];
        for ms in (0..100).step_by(10) {
            assert_eq!(suspects.look(seen(ms).into_iter(), at(ms), patience), [0; 0]);
        }
        assert_eq!(suspects.look(seen(100).into_iter(), at(100), patience), [1]);
        // What it was sent in between ends the suspicion.
        suspects.look(std::iter::empty(), at(110), patience);
        assert!(suspects.0.is_empty());
        assert_eq!(suspects.look(seen(200).into_iter().take(1), at(200), patience), [0; 0]);
    }
}
