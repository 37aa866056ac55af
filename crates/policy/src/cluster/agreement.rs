//! Leadership without the store: one host leads by agreement of all hosts that could lead.
//!
//! ```text
//!            ask (nonce, all hosts that A asks)            report
//!      A  ──────────────────────────────────►  B, C   ──────────────►  A
//!      │  ◄──────────────────────────────────          ◄──────────────
//!      │   confirmed: "I do not reach the store and       grant
//!      │   lead nothing; for one term lease I lead
//!      ▼   nothing and confirm no other host"
//!     leads while the promises of all of them are in force, by its own clock
//! ```
//!
//! The store elects a leader with a key; an agreement elects one with promises. Everything else is
//! the same: a [`QuotaLeader`](super::QuotaLeader) of this term answers reports with grants, which
//! travel between the hosts directly. The rules of [`cluster`](super) remain true if at no instant
//! two leaders act, which these rules ensure:
//!
//! 1. A host asks all hosts that it knows, and leads only while **all** of them have confirmed. One
//!    refusal or one silent host ends the leadership.
//! 2. A host confirms only while it cannot reach the store and leads nothing itself. It then
//!    confirms no other host and does not campaign ([`PeerAgreement::may_campaign`]) for one
//!    [`Timing::term_lease`]; the asking host counts the promise from the *sending* of its request,
//!    and shorter by the clock margin.
//! 3. The store holds, for each host that takes part, the hosts that it asks. A host may campaign
//!    in the store only if **every other host's list names it**. Each leader of the store is
//!    therefore asked by every host, and its refusal prevents an agreement. A host that joins
//!    while others are cut off cannot lead.
//! 4. A host asks more hosts at once, but fewer only after the store's list of this host has been
//!    shortened ([`PeerAgreement::set_members`]). A new run takes no part before the store has a
//!    list of it: that of an earlier run may name more hosts.
//! 5. A new run confirms nothing and does not campaign for one term lease: an earlier run may have
//!    made a promise. The same applies after the store has lost data
//!    ([`PeerAgreement::hold_back`]): its former leader may act for one term lease.
//!
//! All hosts have to confirm, so one candidate suffices: the first by name.
//!
//! Never does I/O, never reads a clock.

use super::{Term, Timing};
use crate::time::Instant;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

/// Maximum number of hosts of an agreement. Each is asked three times in a term lease.
pub const MAX_AGREEING_HOSTS: usize = 256;

/// Hosts by name; true for one that can be asked, because its address is known.
pub type PeerSet = BTreeMap<String, bool>;

/// Request of a candidate or leader to each other host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreementRequest {
    /// Identifies the candidacy; the nonce of its term.
    pub nonce: u64,
    /// Number of the request; rises with each.
    pub number: u64,
    /// Hosts that are asked, including the sender.
    pub members: BTreeSet<String>,
    /// True if all of them have confirmed: the receiver follows this leader.
    pub leads: bool,
}

/// Answer to an [`AgreementRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreementAnswer {
    /// Candidacy that is answered.
    pub nonce: u64,
    /// Number of the request that is answered.
    pub number: u64,
    /// Reason why the host does not confirm; `None` if it does.
    pub refusal: Option<AgreementRefusal>,
}

/// Reason why a host does not confirm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgreementRefusal {
    /// It reaches the store, or leads.
    ReachesStore,
    /// It has confirmed another host, or started less than a term lease ago.
    Promised,
    /// It does not know the sender as a host of the cluster, or the store has no list of this run
    /// yet.
    UnknownSender,
    /// It knows hosts that the sender does not ask.
    MoreHosts(PeerSet),
}

/// Message that the program has to send to all other members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgreementMessage {
    /// Ask them.
    Request(AgreementRequest),
    /// Their promises to the candidacy with this nonce may end: it is over.
    Release(u64),
}

#[derive(Clone, Debug)]
struct PeerPromise {
    to: String,
    nonce: u64,
    until: Instant,
}

#[derive(Clone, Debug)]
struct Candidacy {
    nonce: u64,
    /// Requests sent, with their instants.
    sent: Vec<(u64, Instant)>,
    /// For each host, when the latest request that it confirmed was sent.
    confirmed: BTreeMap<String, Instant>,
    next: Instant,
    has_led: bool,
}

/// A host's part in agreements: it confirms other hosts, and may be the candidate.
///
/// # Protocol
///
/// 1. Call [`PeerAgreement::add_members`] with every host of which the program learns, and
///    [`PeerAgreement::set_members`] when the store holds a new list of this host.
/// 2. Call [`PeerAgreement::tick`] at [`PeerAgreement::next`], and send the messages that it
///    returns.
/// 3. While [`PeerAgreement::term`] returns a term, run a leader of this term for each group; as
///    soon as it returns none, drop it.
/// 4. Campaign in the store, and accept the election, only if [`PeerAgreement::may_campaign`].
#[derive(Clone, Debug)]
pub struct PeerAgreement {
    name: String,
    timing: Timing,
    /// Hosts to ask, including this one; empty until the store has been read in this run.
    members: PeerSet,
    /// True once the store has a list of this run.
    has_stored_list: bool,
    promise: Option<PeerPromise>,
    /// End of promises that an earlier run may have made.
    earlier_until: Instant,
    candidacy: Option<Candidacy>,
    /// Earliest instant of the next candidacy.
    retry_at: Instant,
    next: Instant,
    number: u64,
    released: Option<u64>,
    /// Hosts that refused the last candidacy, with the reason.
    refusals: BTreeMap<String, AgreementRefusal>,
}

impl PeerAgreement {
    /// State of a run that starts `now`.
    pub fn new(name: &str, timing: Timing, now: Instant) -> Self {
        Self {
            name: String::from(name),
            timing,
            members: PeerSet::new(),
            has_stored_list: false,
            promise: None,
            earlier_until: now + timing.term_lease() + timing.clock_margin(),
            candidacy: None,
            retry_at: now,
            next: now,
            number: 0,
            released: None,
            refusals: BTreeMap::new(),
        }
    }

    /// Hosts that this one asks, including itself. Empty until it has read the store.
    pub const fn members(&self) -> &PeerSet {
        &self.members
    }

    /// True if this is the nonce of this host's candidacy.
    pub fn is_current(&self, nonce: u64) -> bool {
        self.candidacy.as_ref().is_some_and(|one| one.nonce == nonce)
    }

    /// Adds hosts, or updates whether they can be asked.
    pub fn add_members(&mut self, members: impl IntoIterator<Item = (String, bool)>) {
        self.members.extend(members);
    }

    /// Replaces the hosts that are asked. The store's list of this host must already be no longer
    /// than this, and no host that is missing from it may lead at the moment.
    pub fn set_members(&mut self, members: PeerSet) {
        self.members = members;
        self.has_stored_list = true;
    }

    /// Begins another wait of one term lease, as after a start. Call it when the store has lost
    /// data, since a leader of the lost data may still act, and when an earlier run of this host
    /// may still have acted.
    pub fn hold_back(&mut self, now: Instant) {
        self.earlier_until = now + self.timing.term_lease() + self.timing.clock_margin();
    }

    /// True if this host may become leader through the store: no promise of it is in force, and it
    /// does not lead by agreement.
    pub fn may_campaign(&self, now: Instant) -> bool {
        now >= self.earlier_until && self.candidacy.is_none() && !self.has_promised(now)
    }

    fn has_promised(&self, now: Instant) -> bool {
        self.promise.as_ref().is_some_and(|promise| now < promise.until)
    }

    /// Answers a request. `is_free` is true while this host neither reaches the store nor leads
    /// through it. If the answer confirms a request that has `leads`, follow the leader.
    pub fn on_request(
        &mut self,
        from: &str,
        request: &AgreementRequest,
        is_free: bool,
        now: Instant,
    ) -> AgreementAnswer {
        let refusal = self.refusal(from, request, is_free, now);
        if refusal.is_none() {
            let until = now + self.timing.term_lease();
            self.promise = Some(PeerPromise { to: String::from(from), nonce: request.nonce, until });
        }
        AgreementAnswer { nonce: request.nonce, number: request.number, refusal }
    }

    /// True if this host would confirm the request, were it to reach neither the store nor lead.
    pub fn would_confirm(&self, from: &str, request: &AgreementRequest, now: Instant) -> bool {
        self.refusal(from, request, true, now).is_none()
    }

    fn refusal(
        &self,
        from: &str,
        request: &AgreementRequest,
        is_free: bool,
        now: Instant,
    ) -> Option<AgreementRefusal> {
        if !self.has_stored_list || !self.members.contains_key(from) || !request.members.contains(&self.name)
        {
            return Some(AgreementRefusal::UnknownSender);
        }
        if !is_free {
            return Some(AgreementRefusal::ReachesStore);
        }
        let more: PeerSet = self
            .members
            .iter()
            .filter(|(name, _)| !request.members.contains(*name))
            .map(|(name, can_confirm)| (name.clone(), *can_confirm))
            .collect();
        if !more.is_empty() {
            return Some(AgreementRefusal::MoreHosts(more));
        }
        let is_same = |promise: &PeerPromise| promise.to == from && promise.nonce == request.nonce;
        let is_bound = now < self.earlier_until
            || self.candidacy.is_some()
            || (self.has_promised(now) && !self.promise.as_ref().is_some_and(is_same));
        is_bound.then_some(AgreementRefusal::Promised)
    }

    /// Ends the promise to a candidacy that is over.
    pub fn on_release(&mut self, from: &str, nonce: u64) {
        self.promise.take_if(|promise| promise.to == from && promise.nonce == nonce);
    }

    /// Records an answer. Ignores those to earlier candidacies and unknown requests.
    pub fn on_answer(&mut self, from: &str, answer: AgreementAnswer, now: Instant) {
        let Some(candidacy) = self.candidacy.as_mut().filter(|one| one.nonce == answer.nonce) else { return };
        let Some(refusal) = answer.refusal else {
            self.refusals.remove(from);
            if let Some((_, sent)) = candidacy.sent.iter().find(|(number, _)| *number == answer.number) {
                let latest = candidacy.confirmed.entry(String::from(from)).or_insert(*sent);
                *latest = (*latest).max(*sent);
            }
            return;
        };
        if let AgreementRefusal::MoreHosts(more) = &refusal {
            let unknown = more.iter().filter(|(name, _)| !self.members.contains_key(*name));
            let unknown: Vec<_> = unknown.map(|(name, can_confirm)| (name.clone(), *can_confirm)).collect();
            let room = MAX_AGREEING_HOSTS.saturating_sub(self.members.len());
            self.members.extend(unknown.into_iter().take(room));
        }
        if self.members.contains_key(from) {
            self.refusals.insert(String::from(from), refusal);
        }
        self.give_up(now);
    }

    /// Ends this host's leadership or candidacy.
    pub fn resign(&mut self, now: Instant) {
        self.give_up(now);
    }

    fn give_up(&mut self, now: Instant) {
        if let Some(candidacy) = self.candidacy.take() {
            (self.released, self.next) = (Some(candidacy.nonce), now);
            self.retry_at = now + self.interval();
        }
    }

    /// Interval between requests.
    fn interval(&self) -> crate::time::Duration {
        self.timing.term_lease() / 3
    }

    /// The term that this host leads by agreement at `now`, and the instant from which its lease
    /// counts, as for [`QuotaLeader::on_key_renewed`](super::QuotaLeader::on_key_renewed).
    pub fn term(&self, now: Instant) -> Option<(Term, Instant)> {
        let candidacy = self.candidacy.as_ref()?;
        let mut since = candidacy.sent.last()?.1;
        for name in self.members.keys().filter(|name| **name != self.name) {
            since = since.min(*candidacy.confirmed.get(name)?);
        }
        let until = since + self.timing.term_lease().saturating_sub(self.timing.clock_margin());
        // Revisions of the store begin at 1.
        (now < until).then_some((Term { revision: 0, nonce: candidacy.nonce }, since))
    }

    /// True if this host is the one that asks the others.
    pub fn is_candidate(&self) -> bool {
        let mut can_confirm = self.members.iter().filter(|(_, can_confirm)| **can_confirm);
        can_confirm.next().is_some_and(|(name, _)| *name == self.name)
    }

    /// Hosts without whose confirmation there is no agreement, with the reason if one is known. For
    /// messages.
    pub fn missing(&self, now: Instant) -> BTreeMap<String, Option<AgreementRefusal>> {
        let is_agreed = self.term(now).is_some();
        let is_missing = |name: &&String| {
            let confirmed = self.candidacy.as_ref().is_some_and(|one| one.confirmed.contains_key(*name));
            **name != self.name && !is_agreed && !confirmed
        };
        let names = self.members.keys().filter(is_missing);
        names.map(|name| (name.clone(), self.refusals.get(name).cloned())).collect()
    }

    /// Time of the next call of [`PeerAgreement::tick`].
    pub const fn next(&self) -> Instant {
        self.next
    }

    /// Messages to send now. `is_free` as for [`PeerAgreement::on_request`]; `nonce` is a random
    /// number for a new candidacy.
    pub fn tick(&mut self, is_free: bool, nonce: u64, now: Instant) -> Vec<AgreementMessage> {
        let is_agreed = self.term(now).is_some();
        let has_lost = self.candidacy.as_ref().is_some_and(|one| one.has_led && !is_agreed);
        let may_ask = is_free
            && self.has_stored_list
            && self.is_candidate()
            && self.members.values().all(|can_confirm| *can_confirm);
        if has_lost || !may_ask {
            self.give_up(now);
        }
        let mut messages: Vec<_> = self.released.take().map(AgreementMessage::Release).into_iter().collect();
        self.next = now + self.timing.tick;
        if !may_ask || self.members.len() > MAX_AGREEING_HOSTS {
            return messages;
        }
        if self.candidacy.is_none() {
            if now < self.retry_at || !self.may_campaign(now) {
                return messages;
            }
            self.candidacy = Some(Candidacy {
                nonce,
                sent: Vec::new(),
                confirmed: BTreeMap::new(),
                next: now,
                has_led: false,
            });
        }
        let (interval, members) = (self.interval(), self.members.keys().cloned().collect());
        let term_lease = self.timing.term_lease();
        if let Some(candidacy) = &mut self.candidacy {
            // The request that announces the leadership is not delayed.
            let is_new = is_agreed && !candidacy.has_led;
            candidacy.has_led |= is_agreed;
            if is_new || now >= candidacy.next {
                self.number += 1;
                candidacy.sent.retain(|(_, sent)| now < *sent + term_lease);
                candidacy.sent.push((self.number, now));
                candidacy.next = now + interval;
                messages.push(AgreementMessage::Request(AgreementRequest {
                    nonce: candidacy.nonce,
                    number: self.number,
                    members,
                    leads: is_agreed,
                }));
            }
            self.next = candidacy.next;
        }
        messages
    }
}
