//! The division of request memory among disks, and the order in which waiting requests are served.
//!
//! ```text
//!   account within its part ──► a waiting request that fits there is served at once
//!   common half ──► the account with the least beyond its part ──► its queue's next request
//! ```
//!
//! Each account's amount beyond its part is recorded here together with the sum over all accounts,
//! so that no operation visits all accounts or all waiters. An account within its part changes
//! [`AccountUse::bytes`] without the lock; the record is corrected by the next operation under the
//! lock.
//!
//! Never waits, and never grants more than the limit: see [`RequestMemory::charge`].

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use super::{
    holders::HolderList,
    queue::{FairQueue, FairQueueFlow, MemoryWaiter, QueuePosition},
};

/// The part of an account that is accessed without the lock.
#[derive(Debug, Default)]
pub(super) struct AccountUse {
    /// Bytes of requests in flight and unread replies.
    bytes: AtomicU64,
    /// The recorded amount beyond the account's part. Written under the lock.
    beyond: AtomicU64,
    /// True while requests of this account wait. Written under the lock.
    is_awaited: AtomicBool,
}

impl AccountUse {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(SeqCst)
    }

    /// Adds `bytes` if the sum is at most `limit`; returns the sum.
    pub(super) fn add_within(&self, bytes: u64, limit: u64) -> Option<u64> {
        let sum = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
        self.bytes.fetch_update(SeqCst, SeqCst, sum).ok().map(|before| before + bytes)
    }

    /// Subtracts `bytes`; returns true if [`RequestMemory::on_release`] must be called.
    pub(super) fn subtract(&self, bytes: u64) -> bool {
        self.bytes.fetch_sub(bytes, SeqCst);
        self.beyond.load(SeqCst) > 0 || self.is_awaited.load(SeqCst)
    }

    /// Records the amount beyond `part`, and returns it.
    fn record_beyond(&self, part: u64) -> u64 {
        loop {
            let beyond = self.bytes().saturating_sub(part);
            self.beyond.store(beyond, SeqCst);
            // `subtract` writes `bytes` before it reads `beyond`, so either it sees this store, or
            // its own change is seen here.
            if self.bytes().saturating_sub(part) == beyond {
                return beyond;
            }
        }
    }
}

#[derive(Debug, Default)]
struct AccountRecord {
    used: Arc<AccountUse>,
    /// Recorded amount beyond the part; equal to that in `used`.
    beyond: u64,
    /// Number of the grant that last brought the account beyond its part; 0 if there was none.
    last_grant: u64,
    queue: FairQueue,
    holders: HolderList,
}

impl AccountRecord {
    fn rank(&self, number: u64) -> AccountRank {
        (self.beyond, self.last_grant, number)
    }
}

/// The order of accounts that wait for the common half: bytes beyond the part, number of the last
/// grant beyond it, number of the account.
///
/// Bytes within the part do not count: otherwise a disk whose clients were all just disconnected
/// would precede a disk with any request in flight.
type AccountRank = (u64, u64, u64);

/// Requests of all accounts: see the [module](self).
#[derive(Debug, Default)]
pub(super) struct RequestMemory {
    /// Limit of the sum over all accounts.
    limit: u64,
    /// Bytes that each account can always use.
    part: u64,
    accounts: BTreeMap<u64, AccountRecord>,
    next_number: u64,
    /// Sum of [`AccountRecord::beyond`].
    beyond: u64,
    /// Accounts that use more than their part.
    accounts_over_part: BTreeSet<u64>,
    /// True if the part has changed since the amounts beyond it were recorded.
    is_stale: bool,
    /// Number of grants that brought an account beyond its part.
    grants: u64,
    /// Accounts with waiting requests.
    order: BTreeSet<AccountRank>,
    waiting: u64,
    /// The request that checks for clients without progress, if any request waits.
    stall_checker: Option<Arc<MemoryWaiter>>,
}

impl RequestMemory {
    /// Adds an account and returns its number.
    pub(super) fn add(&mut self, used: &Arc<AccountUse>) -> u64 {
        self.next_number += 1;
        let account = AccountRecord { used: Arc::clone(used), ..AccountRecord::default() };
        self.accounts.insert(self.next_number, account);
        self.next_number
    }

    /// Removes an account without waiting requests.
    pub(super) fn remove(&mut self, number: u64) {
        if let Some(account) = self.accounts.remove(&number) {
            self.beyond -= account.beyond;
            self.accounts_over_part.remove(&number);
        }
    }

    /// Sets the limit of the sum; returns the part of each account.
    pub(super) fn divide(&mut self, limit: u64) -> u64 {
        self.limit = limit;
        self.part = limit / 2 / (self.accounts.len() as u64).max(1);
        self.is_stale = true;
        self.part
    }

    /// Serves requests that fit after [`RequestMemory::divide`], once the new part is in force.
    pub(super) fn serve_after_divide(&mut self) {
        if self.waiting == 0 {
            return;
        }
        self.refresh_stale();
        let waiting: Vec<u64> = self.order.iter().map(|(.., number)| *number).collect();
        waiting.into_iter().for_each(|number| self.serve_part(number));
        self.serve_common();
    }

    pub(super) fn waiting(&self) -> u64 {
        self.waiting
    }

    pub(super) fn sum(&self) -> u64 {
        self.accounts.values().map(|account| account.used.bytes()).sum()
    }

    pub(super) fn holders(&mut self, number: u64) -> Option<&mut HolderList> {
        self.accounts.get_mut(&number).map(|account| &mut account.holders)
    }

    /// Visits the clients of each account that uses more than its part.
    pub(super) fn for_holders_over_part(&mut self, mut visit: impl FnMut(&mut HolderList)) {
        self.refresh_stale();
        for number in &self.accounts_over_part {
            if let Some(account) = self.accounts.get_mut(number) {
                visit(&mut account.holders);
            }
        }
    }

    /// Charges `bytes` to an account unless a request must wait for them.
    pub(super) fn try_charge(&mut self, number: u64, bytes: u64) -> bool {
        self.refresh_stale();
        self.update_beyond(number);
        self.waiting == 0 && self.charge(number, bytes)
    }

    /// Queues a request of `flow`, and serves requests that fit.
    pub(super) fn wait(
        &mut self,
        number: u64,
        flow: &FairQueueFlow,
        waiter: &Arc<MemoryWaiter>,
    ) -> Option<QueuePosition> {
        let position = self.update_account(number, |account| account.queue.push(flow, waiter))?;
        self.waiting += 1;
        if self.stall_checker.is_none() {
            self.set_stall_checker(Arc::clone(waiter));
        }
        if let Some(account) = self.accounts.get(&number) {
            account.used.is_awaited.store(true, SeqCst);
        }
        // Memory that was returned before `is_awaited` was set has served no waiting request.
        self.on_release(number);
        Some(position)
    }

    /// Removes a request that no longer waits, unless it was served.
    pub(super) fn leave(&mut self, number: u64, place: QueuePosition) {
        if let Some(Some(waiter)) = self.update_account(number, |account| account.queue.remove(place)) {
            self.on_left_queue(number, &waiter);
        }
        self.on_release(number);
    }

    /// Serves requests that fit after an account has returned memory.
    pub(super) fn on_release(&mut self, number: u64) {
        self.refresh_stale();
        self.update_beyond(number);
        self.serve_part(number);
        self.serve_common();
    }

    fn refresh_stale(&mut self) {
        if std::mem::take(&mut self.is_stale) {
            let numbers: Vec<u64> = self.accounts.keys().copied().collect();
            numbers.into_iter().for_each(|number| self.update_beyond(number));
        }
    }

    /// Changes an account and updates its rank in `order`.
    fn update_account<T>(&mut self, number: u64, change: impl FnOnce(&mut AccountRecord) -> T) -> Option<T> {
        let account = self.accounts.get_mut(&number)?;
        let before = (!account.queue.is_empty()).then(|| account.rank(number));
        let result = change(account);
        let after = (!account.queue.is_empty()).then(|| account.rank(number));
        if before != after {
            if let Some(before) = before {
                self.order.remove(&before);
            }
            self.order.extend(after);
        }
        Some(result)
    }

    /// Updates the recorded amount beyond an account's part.
    fn update_beyond(&mut self, number: u64) {
        let Some(account) = self.accounts.get(&number) else { return };
        let (before, beyond) = (account.beyond, account.used.record_beyond(self.part));
        if beyond == before {
            return;
        }
        self.beyond = self.beyond - before + beyond;
        if beyond > 0 {
            self.accounts_over_part.insert(number);
        } else {
            self.accounts_over_part.remove(&number);
        }
        self.update_account(number, |account| account.beyond = beyond);
    }

    /// Charges `bytes` to an account if permitted. A grant beyond the account's part is numbered,
    /// so that accounts with equal amounts alternate.
    fn charge(&mut self, number: u64, bytes: u64) -> bool {
        let Some(account) = self.accounts.get(&number) else { return false };
        loop {
            let used = account.used.bytes();
            if !self.may_charge(account, used, bytes) {
                return false;
            }
            // Fails, and is repeated, if the account has changed its use without the lock
            // meanwhile.
            let sum = used + bytes;
            if account.used.bytes.compare_exchange(used, sum, SeqCst, SeqCst).is_ok() {
                if sum > self.part {
                    self.grants += 1;
                    let grant_number = self.grants;
                    self.update_account(number, |account| account.last_grant = grant_number);
                    self.update_beyond(number);
                }
                return true;
            }
        }
    }

    /// True if an account may use `bytes` more of its part, or of the common half. An account gets
    /// at most as much of the common half as remains free, except for one request. Otherwise a disk
    /// whose requests wait long for its limits would occupy all of it.
    fn may_charge(&self, account: &AccountRecord, used: u64, bytes: u64) -> bool {
        let over = |used: u64| used.saturating_sub(self.part);
        let used_by_others = self.beyond - account.beyond;
        let common = self.limit - self.part * self.accounts.len() as u64;
        let requested = over(used + bytes);
        let Some(free) = common.checked_sub(used_by_others + requested) else { return requested == 0 };
        over(used) == 0 || requested <= free
    }

    /// Serves requests that fit into their account's part.
    fn serve_part(&mut self, number: u64) {
        while let Some(account) = self.accounts.get(&number)
            && let Some(room) = self.part.checked_sub(account.used.bytes())
            && let Some((place, bytes)) = account.queue.fitting(room)
        {
            // If the account has used the room without the lock, the next iteration sees it.
            if account.used.add_within(bytes, self.part).is_some() {
                self.grant(number, place);
            }
        }
    }

    /// Serves the common half in the order of the accounts. No request overtakes the first.
    fn serve_common(&mut self) {
        while let Some(&(.., number)) = self.order.first()
            && let Some((place, waiter)) =
                self.accounts.get(&number).and_then(|account| account.queue.first())
        {
            let bytes = waiter.bytes;
            if !self.charge(number, bytes) {
                break;
            }
            self.grant(number, place);
        }
    }

    fn grant(&mut self, number: u64, place: QueuePosition) {
        if let Some(Some(waiter)) = self.update_account(number, |account| account.queue.serve(place)) {
            waiter.is_granted.store(true, SeqCst);
            waiter.changed.notify(usize::MAX);
            self.on_left_queue(number, &waiter);
        }
    }

    /// Updates the counters after a request has left its queue.
    fn on_left_queue(&mut self, number: u64, waiter: &Arc<MemoryWaiter>) {
        self.waiting -= 1;
        if let Some(account) = self.accounts.get(&number)
            && account.queue.is_empty()
        {
            account.used.is_awaited.store(false, SeqCst);
        }
        if self.stall_checker.as_ref().is_some_and(|stall_checker| Arc::ptr_eq(stall_checker, waiter)) {
            self.stall_checker = None;
            // The request that is served last can check for the longest time.
            let next = self.order.last().and_then(|(.., number)| self.accounts.get(number));
            if let Some(next) = next.and_then(|account| account.queue.last()) {
                self.set_stall_checker(Arc::clone(next));
            }
        }
    }

    fn set_stall_checker(&mut self, waiter: Arc<MemoryWaiter>) {
        waiter.checks_for_stalls.store(true, SeqCst);
        waiter.changed.notify(usize::MAX);
        self.stall_checker = Some(waiter);
    }
}
