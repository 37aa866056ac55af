//! The memory budget of the process for data, and its division.
//!
//! ```text
//!   budget ┬─ reserved     metadata caches, read-ahead, pooled buffers: reserved in advance
//!          ├─ pages        of disks in memory: allocated by writes, else ENOSPC
//!          ├─ connections  of NBD clients: buffers and state of each, else the client waits
//!          └─ requests     data of requests in flight and of unread replies
//!               ├─ one half: an equal part for each disk, not available to other disks
//!               └─ the other half: shared; disks with less of it are served first
//! ```
//!
//! A request that finds no memory waits. Waiting requests are served in an order that is fair
//! between disks ([`requests`]) and between the clients of a disk ([`queue`]). While requests wait,
//! clients that hold memory without progress are disconnected, the sooner the more requests wait
//! ([`holders`]). A client therefore delays neither other disks nor other clients of its disk for
//! long, and cannot exhaust the memory of the process.
//!
//! One of the waiting requests also checks for clients without progress. All others sleep until
//! they are served. Charging and returning memory within a disk's part is one atomic operation,
//! even while requests of other disks wait. All other operations are O(log n) in disks, clients and
//! waiting requests.
//!
//! A request is charged its payload. Memory for its execution (tables, bounce buffers, ciphertext)
//! is not counted; a fifth of the machine's memory is left for it.

mod holders;
mod queue;
mod requests;

use std::sync::{
    Arc, LazyLock, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use policy::time::{Duration, Instant};

use self::{
    holders::grace,
    queue::{MemoryWaiter, QueuePosition},
    requests::{AccountUse, RequestMemory},
};
pub use self::{
    holders::{GRACE, HolderEntry, MIN_GRACE, MIN_TRANSFER_BPS, MemoryHolder},
    queue::FairQueueFlow,
};
use crate::log_rate_limit::LogRateLimit;

/// Minimum for requests in bytes: one of the largest requests fits into each half.
pub const MIN_REQUEST_BYTES: u64 = 64 << 20;
/// Maximum for requests in bytes: more would only hold data for slow clients.
const MAX_REQUEST_BYTES: u64 = 1 << 30;
/// Maximum that connections can use beyond the budget, in bytes: a hundred clients with TLS.
/// Otherwise no client could connect to any disk after a guest has filled a disk in memory.
const MAX_CONNECTION_RESERVE: u64 = 16 << 20;

/// Error: the budget is exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} (raise --memory, or make caches and read-ahead smaller)", self.describe())]
pub struct OutOfBudget {
    /// Purpose of the memory.
    pub purpose: &'static str,
    /// Bytes requested.
    pub requested: u64,
    /// Bytes available.
    pub available: u64,
    /// Total budget in bytes.
    pub total: u64,
}

impl OutOfBudget {
    /// The message without the remedy.
    pub fn describe(&self) -> String {
        let Self { purpose: what, requested: asked, available: left, total } = self;
        format!(
            "{what}: {} MiB are required, and {} MiB are free of the {} MiB of the memory budget",
            mib(*asked),
            mib(*left),
            mib(*total)
        )
    }
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Use of a budget in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetUsage {
    /// Total budget.
    pub total: u64,
    /// Reserved for metadata caches, bitmaps, read-ahead and pooled buffers.
    pub reserved: u64,
    /// Pages of disks in memory.
    pub pages: u64,
    /// Connected NBD clients, without their requests.
    pub connections: u64,
    /// Requests in flight and unread replies.
    pub requests: u64,
    /// Upper bound of `requests`.
    pub max_requests: u64,
    /// Number of requests that wait for memory.
    pub waiting: u64,
}

/// A reservation of memory, released on drop.
#[derive(Debug)]
pub struct MemoryReservation {
    budget: Arc<MemoryBudget>,
    purpose: &'static str,
    bytes: u64,
}

impl MemoryReservation {
    /// Reserves `bytes` for `purpose`.
    ///
    /// # Errors
    /// [`OutOfBudget`] if the budget is exhausted.
    pub fn new(budget: &Arc<MemoryBudget>, purpose: &'static str, bytes: u64) -> Result<Self, OutOfBudget> {
        budget.reserve(purpose, 0, bytes)?;
        Ok(Self { budget: budget.clone(), purpose, bytes })
    }

    /// Changes the size of the reservation.
    ///
    /// # Errors
    /// [`OutOfBudget`]; the reservation is unchanged.
    pub fn change(&mut self, bytes: u64) -> Result<(), OutOfBudget> {
        self.budget.reserve(self.purpose, self.bytes, bytes)?;
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        // A reduction cannot fail.
        let _ = self.change(0);
    }
}

/// Memory of a client's connection without its requests, returned on drop.
#[derive(Debug)]
pub struct ConnectionMemory {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl ConnectionMemory {
    /// Charges `bytes` to `budget`; `None` if they do not fit. All connections together can use
    /// 1/64 of the budget, up to [`MAX_CONNECTION_RESERVE`], even if the budget is exhausted.
    pub fn new(budget: &Arc<MemoryBudget>, bytes: u64) -> Option<Self> {
        let reserve = budget.total() / 64;
        let fits = budget.charge_other(&budget.connections, bytes, reserve.min(MAX_CONNECTION_RESERVE));
        fits.then(|| Self { budget: Arc::clone(budget), bytes })
    }

    /// Charges `bytes` for a client that the previous process has handed over in an upgrade, beyond
    /// the limit if necessary.
    pub fn transferred(budget: &Arc<MemoryBudget>, bytes: u64) -> Self {
        budget.connections.fetch_add(bytes, SeqCst);
        Self { budget: Arc::clone(budget), bytes }
    }
}

impl Drop for ConnectionMemory {
    fn drop(&mut self) {
        self.budget.connections.fetch_sub(self.bytes, SeqCst);
    }
}

/// A memory budget.
#[derive(Debug)]
pub struct MemoryBudget {
    total: AtomicU64,
    pages: AtomicU64,
    connections: AtomicU64,
    /// Bytes that each account can always use.
    account_part: AtomicU64,
    state: Mutex<BudgetState>,
    log: LogRateLimit,
}

#[derive(Debug, Default)]
struct BudgetState {
    reserved: u64,
    requests: RequestMemory,
    /// Time of the next check for clients without progress.
    next_check: Instant,
}

static PROCESS: LazyLock<Arc<MemoryBudget>> = LazyLock::new(|| MemoryBudget::new(u64::MAX));

impl MemoryBudget {
    /// A budget of `total` bytes; `u64::MAX` is unlimited.
    pub fn new(total: u64) -> Arc<Self> {
        Arc::new(Self {
            total: AtomicU64::new(total),
            pages: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            account_part: AtomicU64::new(MAX_REQUEST_BYTES / 2),
            state: Mutex::default(),
            log: LogRateLimit::default(),
        })
    }

    /// The budget of this process. Unlimited until [`MemoryBudget::set_total`].
    pub fn process() -> &'static Arc<Self> {
        &PROCESS
    }

    /// Sets the total. Call it before the budget is used: memory in use is not reclaimed.
    pub fn set_total(&self, bytes: u64) {
        self.total.store(bytes, SeqCst);
        self.update_parts(&mut self.lock());
    }

    /// Current use.
    pub fn usage(&self) -> BudgetUsage {
        let state = self.lock();
        BudgetUsage {
            total: self.total(),
            reserved: state.reserved,
            pages: self.pages.load(SeqCst),
            connections: self.connections.load(SeqCst),
            requests: state.requests.sum(),
            max_requests: self.max_request_bytes(state.reserved),
            waiting: state.requests.waiting(),
        }
    }

    fn total(&self) -> u64 {
        self.total.load(SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, BudgetState> {
        // Every change of the state is complete before anything could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn max_request_bytes(&self, reserved: u64) -> u64 {
        ((self.total() - reserved.min(self.total())) / 4).clamp(MIN_REQUEST_BYTES, MAX_REQUEST_BYTES)
    }

    /// Bytes that can still be [reserved](MemoryBudget::reserve).
    pub fn free(&self) -> u64 {
        self.available(self.lock().reserved)
    }

    /// Bytes available for purposes other than requests.
    fn available(&self, reserved: u64) -> u64 {
        let taken = self.pages.load(SeqCst) + self.connections.load(SeqCst);
        let used_by_others = reserved + taken + self.max_request_bytes(reserved);
        self.total().saturating_sub(used_by_others)
    }

    /// Recomputes the part of each account.
    fn update_parts(&self, state: &mut BudgetState) {
        let part = state.requests.divide(self.max_request_bytes(state.reserved));
        self.account_part.store(part, SeqCst);
        state.requests.serve_after_divide();
    }

    /// Changes the reservation for `purpose` from `before` to `bytes`.
    ///
    /// # Errors
    /// [`OutOfBudget`]; nothing is changed.
    pub fn reserve(&self, purpose: &'static str, before: u64, bytes: u64) -> Result<(), OutOfBudget> {
        let mut state = self.lock();
        let reserved_by_others = state.reserved - before;
        let available = self.available(reserved_by_others);
        if bytes > before && bytes > available {
            return Err(OutOfBudget { purpose, requested: bytes, available, total: self.total() });
        }
        state.reserved = reserved_by_others + bytes;
        self.update_parts(&mut state);
        Ok(())
    }

    /// Charges a page of a disk in memory; returns false if it does not fit.
    pub fn charge_page(&self, bytes: u64) -> bool {
        self.charge_other(&self.pages, bytes, 0)
    }

    /// Returns pages to the budget.
    pub fn release_pages(&self, bytes: u64) {
        self.pages.fetch_sub(bytes, SeqCst);
    }

    /// Adds `bytes` to a sum other than that of requests, if they are available or the sum is at
    /// most `min_bytes` afterwards.
    fn charge_other(&self, sum: &AtomicU64, bytes: u64, min_bytes: u64) -> bool {
        let total = self.total();
        if total == u64::MAX {
            sum.fetch_add(bytes, SeqCst);
            return true;
        }
        let state = self.lock();
        let fits = bytes <= self.available(state.reserved) || sum.load(SeqCst) + bytes <= min_bytes;
        if fits {
            sum.fetch_add(bytes, SeqCst);
        }
        fits
    }

    /// Disconnects clients without progress, at most one for each waiting request, and schedules
    /// the next check.
    fn disconnect_overdue(&self, now: Instant) {
        // Clients are collected under the lock and disconnected without it: `disconnect` may take
        // other locks, and dropping a client takes this one (`MemoryAccount::forget`).
        let (mut overdue, mut seen) = (Vec::new(), Vec::new());
        let waiting = {
            let mut state = self.lock();
            let waiting = state.requests.waiting();
            let grace = grace(waiting);
            let latest = now.as_nanos().checked_sub(grace.as_nanos() as u64);
            let mut next = now + CHECK_INTERVAL;
            state.requests.for_holders_over_part(|holders| {
                let due = holders.take_overdue(latest, waiting as usize, &mut overdue, &mut seen);
                next = next.min(due.map_or(next, |due| due + grace));
            });
            // `next` is past if overdue clients remain, because more are overdue than requests
            // wait.
            state.next_check =
                if next > now { next.max(now + MIN_CHECK_INTERVAL) } else { now + CHECK_INTERVAL };
            waiting
        };
        for holder in &overdue {
            holder.disconnect();
            if let Some(suppressed) = self.log.try_log(crate::coarse_now()) {
                tracing::warn!(
                    waiting,
                    suppressed,
                    "a client was disconnected: it held memory without progress while requests waited"
                );
            }
        }
    }
}

/// The memory of one disk's requests, a part of a budget.
#[derive(Debug)]
pub struct MemoryAccount {
    budget: Arc<MemoryBudget>,
    number: u64,
    used: Arc<AccountUse>,
    reserved: AtomicU64,
}

impl MemoryAccount {
    /// A new account in `budget`.
    pub fn new(budget: &Arc<MemoryBudget>) -> Arc<Self> {
        let used: Arc<AccountUse> = Arc::default();
        let number = {
            let mut state = budget.lock();
            let number = state.requests.add(&used);
            budget.update_parts(&mut state);
            number
        };
        Arc::new(Self { budget: Arc::clone(budget), number, used, reserved: AtomicU64::new(0) })
    }

    /// The budget that contains the account.
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    /// Bytes of requests in flight and unread replies.
    pub fn used(&self) -> u64 {
        self.used.bytes()
    }

    /// Bytes reserved.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(SeqCst)
    }

    /// Replaces the account's reservation by one of `bytes` for `purpose`.
    ///
    /// # Errors
    /// [`OutOfBudget`]; the previous reservation is unchanged.
    pub fn reserve(&self, purpose: &'static str, bytes: u64) -> Result<(), OutOfBudget> {
        self.budget.reserve(purpose, self.reserved(), bytes)?;
        self.reserved.store(bytes, SeqCst);
        Ok(())
    }

    /// Charges memory for a request if that needs no waiting. Return it by
    /// [`MemoryAccount::release`].
    pub fn try_acquire(&self, bytes: u64) -> bool {
        if let Some(sum) = self.used.add_within(bytes, self.part()) {
            // The part may have shrunk meanwhile, while the sum is recorded as within it.
            if sum > self.part() {
                self.budget.lock().requests.on_release(self.number);
            }
            return true;
        }
        self.budget.lock().requests.try_charge(self.number, bytes)
    }

    /// Charges memory for a request of the client with this `flow`, and waits for it if necessary.
    /// Dropping the future charges nothing.
    ///
    /// `bytes` must be at most half of [`MIN_REQUEST_BYTES`].
    pub async fn acquire(&self, flow: &FairQueueFlow, bytes: u64) {
        if self.try_acquire(bytes) {
            return;
        }
        let waiter = MemoryWaiter::new(bytes);
        let mut change = waiter.changed.listen();
        let Some(place) = self.wait(flow, &waiter) else { return };
        let mut guard = QueuedRequestGuard { account: self, place, waiter: &waiter, is_granted: false };
        while !waiter.is_granted.load(SeqCst) {
            if waiter.checks_for_stalls.load(SeqCst) {
                let next_check = self.budget.lock().next_check;
                if crate::timeout(next_check - crate::now(), change).await.is_err() {
                    self.budget.disconnect_overdue(crate::now());
                }
            } else {
                change.await;
            }
            change = waiter.changed.listen();
        }
        guard.is_granted = true;
    }

    fn wait(&self, flow: &FairQueueFlow, waiter: &Arc<MemoryWaiter>) -> Option<QueuePosition> {
        let mut state = self.budget.lock();
        if state.requests.waiting() == 0 {
            state.next_check = crate::now() + CHECK_INTERVAL;
        }
        state.requests.wait(self.number, flow, waiter)
    }

    /// Returns charged memory.
    pub fn release(&self, bytes: u64) {
        if self.used.subtract(bytes) {
            self.budget.lock().requests.on_release(self.number);
        }
    }

    /// Lists a client whose transfer has started, so that it can be disconnected if it holds memory
    /// without progress. Call it after [`MemoryHolder::on_schedule_until`] has changed; it takes
    /// two atomic operations while the client is listed.
    pub fn watch(&self, holder: &Arc<impl MemoryHolder + 'static>) {
        if !holder.listing().is_done() {
            let holder: Arc<dyn MemoryHolder> = Arc::clone(holder) as _;
            if let Some(list) = self.budget.lock().requests.holders(self.number) {
                list.add(&holder);
            }
        }
    }

    /// Removes a client that has disconnected from the list of [`MemoryAccount::watch`].
    pub fn forget(&self, listing: &HolderEntry) {
        if listing.is_listed()
            && let Some(list) = self.budget.lock().requests.holders(self.number)
        {
            list.remove(listing);
        }
    }

    fn part(&self) -> u64 {
        self.budget.account_part.load(SeqCst)
    }
}

/// Longest time between two checks for clients without progress, while requests wait.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time between two checks: clients that are due within it are disconnected together.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(1);

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.reserved -= *self.reserved.get_mut();
        state.requests.remove(self.number);
        self.budget.update_parts(&mut state);
    }
}

/// A request that is queued or was just served. On drop, its memory is returned unless it is kept.
struct QueuedRequestGuard<'a> {
    account: &'a MemoryAccount,
    place: QueuePosition,
    waiter: &'a Arc<MemoryWaiter>,
    is_granted: bool,
}

impl Drop for QueuedRequestGuard<'_> {
    fn drop(&mut self) {
        if self.is_granted {
            return;
        }
        let mut state = self.account.budget.lock();
        if self.waiter.is_granted.load(SeqCst) {
            self.account.used.subtract(self.waiter.bytes);
        }
        state.requests.leave(self.account.number, self.place);
    }
}

#[cfg(test)]
mod tests;
