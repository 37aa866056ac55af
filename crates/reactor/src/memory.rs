//! The memory that the process may use for data, and who has it.
//!
//! ```text
//!   budget ┬─ reserved   metadata caches, read-ahead, buffers kept for reuse: set aside beforehand
//!          ├─ pages      of disks in memory: taken when they are written, else ENOSPC
//!          ├─ connections  of clients of NBD: buffers and state of each, else the client waits
//!          └─ requests   data of requests in flight and of replies that nobody has read yet
//!               ├─ one half: an equal part for each disk, which no other disk can take
//!               └─ the other half: for whoever needs more; disks take turns
//! ```
//!
//! A request that finds no memory waits. Waiting requests are served in an order that is fair
//! between disks ([`requests`]) and between the clients of a disk ([`queue`]). While requests
//! wait, clients that hold memory without progress are disconnected, the sooner the more requests
//! wait ([`holders`]). So a client delays neither other disks nor other clients of its disk for
//! long, and no client ends the process.
//!
//! One waiting request, the watchman, looks for clients without progress. All others sleep until
//! they are served. Taking and returning memory within a disk's part is one atomic operation, also
//! while requests of other disks wait. All else is O(log n) in disks, clients and waiting requests.
//!
//! A request is charged its payload. What it takes beside that while it is carried out (tables,
//! blocks that were not aligned, ciphertext) is not counted: a fifth of the machine is left for it.

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
    queue::{Place, Waiter},
    requests::{Requests, Used},
};
pub use self::{
    holders::{GRACE, Holder, Listing, SHORTEST_GRACE, SLOWEST_BPS},
    queue::MemoryFlow,
};
use crate::seldom::Seldom;

/// What requests have at least, in bytes: in each half of it, one of the largest fits.
pub const LEAST_REQUESTS: u64 = 64 << 20;
/// What they have at most: memory that waits for clients helps nobody.
const MOST_REQUESTS: u64 = 1 << 30;
/// Most bytes that connections can have beyond the budget: a hundred clients with TLS. Otherwise no
/// client could connect to any disk after a guest has filled a disk in memory.
const MOST_KEPT_FOR_CONNECTIONS: u64 = 16 << 20;

/// A budget that is not enough for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} (allow more with --memory, or make caches and read-ahead smaller)", self.why())]
pub struct NotEnough {
    /// What it was for.
    pub what: &'static str,
    /// Bytes.
    pub asked: u64,
    /// Bytes that could have been had.
    pub left: u64,
    /// The whole budget, in bytes.
    pub total: u64,
}

impl NotEnough {
    /// Without what helps.
    pub fn why(&self) -> String {
        let Self { what, asked, left, total } = self;
        format!(
            "{what} would need {} MiB, and {} MiB are left of the {} MiB of memory that weir may use",
            mib(*asked),
            mib(*left),
            mib(*total)
        )
    }
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Who has how much of a budget, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All that may be used.
    pub total: u64,
    /// Set aside for metadata caches, bitmaps, read-ahead and buffers kept for reuse.
    pub reserved: u64,
    /// Of disks in memory.
    pub pages: u64,
    /// Connected NBD clients, without their requests.
    pub connections: u64,
    /// Of requests in flight and unread replies.
    pub requests: u64,
    /// The most that `requests` may be.
    pub most_requests: u64,
    /// Requests that wait for memory now.
    pub waiting: u64,
}

/// Memory that is set aside until this is dropped.
#[derive(Debug)]
pub struct Aside {
    budget: Arc<Budget>,
    what: &'static str,
    bytes: u64,
}

impl Aside {
    /// So many bytes for `what`.
    ///
    /// # Errors
    /// [`NotEnough`].
    pub fn new(budget: &Arc<Budget>, what: &'static str, bytes: u64) -> Result<Self, NotEnough> {
        budget.reserve(what, 0, bytes)?;
        Ok(Self { budget: budget.clone(), what, bytes })
    }

    /// So many bytes from now on.
    ///
    /// # Errors
    /// [`NotEnough`]; it is what it was.
    pub fn change(&mut self, bytes: u64) -> Result<(), NotEnough> {
        self.budget.reserve(self.what, self.bytes, bytes)?;
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // Less is never refused.
        let _ = self.change(0);
    }
}

/// Memory of a client's connection beside its requests, until this is dropped.
#[derive(Debug)]
pub struct ConnectionMemory {
    budget: Arc<Budget>,
    bytes: u64,
}

impl ConnectionMemory {
    /// Charges `bytes` to `budget`; `None` if the budget has no room for them. All connections
    /// together can have 1/64 of the budget, up to [`MOST_KEPT_FOR_CONNECTIONS`], even where
    /// nothing is left.
    pub fn new(budget: &Arc<Budget>, bytes: u64) -> Option<Self> {
        let least = budget.total() / 64;
        let fits = budget.take_beside(&budget.connections, bytes, least.min(MOST_KEPT_FOR_CONNECTIONS));
        fits.then(|| Self { budget: Arc::clone(budget), bytes })
    }

    /// Charges `bytes` for a client of the old process, beyond the limit if necessary.
    pub fn taken_over(budget: &Arc<Budget>, bytes: u64) -> Self {
        budget.connections.fetch_add(bytes, SeqCst);
        Self { budget: Arc::clone(budget), bytes }
    }
}

impl Drop for ConnectionMemory {
    fn drop(&mut self) {
        self.budget.connections.fetch_sub(self.bytes, SeqCst);
    }
}

/// A budget.
#[derive(Debug)]
pub struct Budget {
    total: AtomicU64,
    pages: AtomicU64,
    connections: AtomicU64,
    /// What each account may always use.
    part: AtomicU64,
    state: Mutex<State>,
    log: Seldom,
}

#[derive(Debug, Default)]
struct State {
    reserved: u64,
    requests: Requests,
    /// Time of the watchman's next check for clients without progress.
    next_look: Instant,
}

static PROCESS: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(u64::MAX));

impl Budget {
    /// A budget of so many bytes; `u64::MAX` is as much as there is.
    pub fn new(total: u64) -> Arc<Self> {
        Arc::new(Self {
            total: AtomicU64::new(total),
            pages: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            part: AtomicU64::new(MOST_REQUESTS / 2),
            state: Mutex::default(),
            log: Seldom::default(),
        })
    }

    /// The budget of this process. Without limit until it is [set](Budget::set_total).
    pub fn process() -> &'static Arc<Self> {
        &PROCESS
    }

    /// Sets how many bytes may be used. Not for a budget in use: what is there stays.
    pub fn set_total(&self, bytes: u64) {
        self.total.store(bytes, SeqCst);
        self.divide(&mut self.lock());
    }

    /// Who has how much now.
    pub fn usage(&self) -> Usage {
        let state = self.lock();
        Usage {
            total: self.total(),
            reserved: state.reserved,
            pages: self.pages.load(SeqCst),
            connections: self.connections.load(SeqCst),
            requests: state.requests.sum(),
            most_requests: self.most_requests(state.reserved),
            waiting: state.requests.waiting(),
        }
    }

    fn total(&self) -> u64 {
        self.total.load(SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of it is complete before anything could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn most_requests(&self, reserved: u64) -> u64 {
        ((self.total() - reserved.min(self.total())) / 4).clamp(LEAST_REQUESTS, MOST_REQUESTS)
    }

    /// Bytes that may still be [set aside](Budget::reserve).
    pub fn free(&self) -> u64 {
        self.left(self.lock().reserved)
    }

    /// What may be had beside requests, for good.
    fn left(&self, reserved: u64) -> u64 {
        let taken = self.pages.load(SeqCst) + self.connections.load(SeqCst);
        let others = reserved + taken + self.most_requests(reserved);
        self.total().saturating_sub(others)
    }

    /// Gives each account its part of what requests may have.
    fn divide(&self, state: &mut State) {
        let part = state.requests.divide(self.most_requests(state.reserved));
        self.part.store(part, SeqCst);
        state.requests.divided();
    }

    /// Sets aside `bytes` instead of `before` for `what`.
    ///
    /// # Errors
    /// [`NotEnough`]; nothing has changed.
    pub fn reserve(&self, what: &'static str, before: u64, bytes: u64) -> Result<(), NotEnough> {
        let mut state = self.lock();
        let rest = state.reserved - before;
        let left = self.left(rest);
        if bytes > before && bytes > left {
            return Err(NotEnough { what, asked: bytes, left, total: self.total() });
        }
        state.reserved = rest + bytes;
        self.divide(&mut state);
        Ok(())
    }

    /// Takes a page for a disk in memory; false where there is none.
    pub fn take_page(&self, bytes: u64) -> bool {
        self.take_beside(&self.pages, bytes, 0)
    }

    /// Returns pages to the budget.
    pub fn give_back_pages(&self, bytes: u64) {
        self.pages.fetch_sub(bytes, SeqCst);
    }

    /// Adds `bytes` to one of the sums that grow beside requests, if they are left or if the sum
    /// is at most `least` afterwards.
    fn take_beside(&self, sum: &AtomicU64, bytes: u64, least: u64) -> bool {
        let total = self.total();
        if total == u64::MAX {
            sum.fetch_add(bytes, SeqCst);
            return true;
        }
        let state = self.lock();
        let fits = bytes <= self.left(state.reserved) || sum.load(SeqCst) + bytes <= least;
        if fits {
            sum.fetch_add(bytes, SeqCst);
        }
        fits
    }

    /// Disconnects clients without progress, at most one for each waiting request, and sets the
    /// time of the next look.
    fn look(&self, now: Instant) {
        let (mut overdue, mut seen) = (Vec::new(), Vec::new());
        let waiting = {
            let mut state = self.lock();
            let waiting = state.requests.waiting();
            let grace = grace(waiting);
            let latest = now.as_nanos().checked_sub(grace.as_nanos() as u64);
            let mut next = now + LOOK;
            state.requests.for_holders_over_part(|holders| {
                let due = holders.take_overdue(latest, waiting as usize, &mut overdue, &mut seen);
                next = next.min(due.map_or(next, |due| due + grace));
            });
            // Clients that are overdue and were not disconnected yet.
            state.next_look = if next > now { next.max(now + LEAST_WAIT) } else { now + LOOK };
            waiting
        };
        for holder in &overdue {
            holder.push_out();
            if let Some(left_out) = self.log.line(crate::recently()) {
                tracing::warn!(
                    waiting,
                    left_out,
                    "a client was disconnected: it held memory without progress while requests waited"
                );
            }
        }
    }
}

/// What the requests of one disk have of a budget.
#[derive(Debug)]
pub struct Account {
    budget: Arc<Budget>,
    number: u64,
    used: Arc<Used>,
    reserved: AtomicU64,
}

impl Account {
    /// An account of its own in `budget`.
    pub fn new(budget: &Arc<Budget>) -> Arc<Self> {
        let used: Arc<Used> = Arc::default();
        let number = {
            let mut state = budget.lock();
            let number = state.requests.add(&used);
            budget.divide(&mut state);
            number
        };
        Arc::new(Self { budget: Arc::clone(budget), number, used, reserved: AtomicU64::new(0) })
    }

    /// The budget that it is in.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Bytes of requests in flight and unread replies.
    pub fn used(&self) -> u64 {
        self.used.bytes()
    }

    /// Bytes set aside.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(SeqCst)
    }

    /// Sets aside so many bytes for `what`, instead of those before.
    ///
    /// # Errors
    /// [`NotEnough`]; those before stay.
    pub fn reserve(&self, what: &'static str, bytes: u64) -> Result<(), NotEnough> {
        self.budget.reserve(what, self.reserved(), bytes)?;
        self.reserved.store(bytes, SeqCst);
        Ok(())
    }

    /// Takes memory for a request if nobody has to wait for it. To be [given
    /// back](Account::give_back).
    pub fn try_take(&self, bytes: u64) -> bool {
        if let Some(sum) = self.used.add_within(bytes, self.part()) {
            // The part may have shrunk in between, and the sum is recorded as within it.
            if sum > self.part() {
                self.budget.lock().requests.came_back(self.number);
            }
            return true;
        }
        self.budget.lock().requests.try_charge(self.number, bytes)
    }

    /// Takes memory for a request of the client that `flow` belongs to, and waits for it if
    /// necessary. A caller that gives up waiting has taken nothing.
    ///
    /// `bytes` is at most half of [`LEAST_REQUESTS`].
    pub async fn take(&self, flow: &MemoryFlow, bytes: u64) {
        if self.try_take(bytes) {
            return;
        }
        let waiter = Waiter::new(bytes);
        let mut news = waiter.news.listen();
        let Some(place) = self.wait(flow, &waiter) else { return };
        let mut queued = Queued { account: self, place, waiter: &waiter, is_kept: false };
        while !waiter.is_granted.load(SeqCst) {
            if waiter.is_watchman.load(SeqCst) {
                let next_look = self.budget.lock().next_look;
                if crate::timeout(next_look - crate::now(), news).await.is_err() {
                    self.budget.look(crate::now());
                }
            } else {
                news.await;
            }
            news = waiter.news.listen();
        }
        queued.is_kept = true;
    }

    fn wait(&self, flow: &MemoryFlow, waiter: &Arc<Waiter>) -> Option<Place> {
        let mut state = self.budget.lock();
        if state.requests.waiting() == 0 {
            state.next_look = crate::now() + LOOK;
        }
        state.requests.wait(self.number, flow, waiter)
    }

    /// Gives back what was taken.
    pub fn give_back(&self, bytes: u64) {
        if self.used.subtract(bytes) {
            self.budget.lock().requests.came_back(self.number);
        }
    }

    /// Lists a client whose transfer has started, so that it can be disconnected if it holds
    /// memory without progress. To be called after [`Holder::due`] has changed; costs two atomic
    /// operations while the client is listed.
    pub fn watch(&self, holder: &Arc<impl Holder + 'static>) {
        if !holder.listing().is_done() {
            let holder: Arc<dyn Holder> = Arc::clone(holder) as _;
            if let Some(list) = self.budget.lock().requests.holders(self.number) {
                list.add(&holder);
            }
        }
    }

    /// Removes a client that has gone from the list of [`Account::watch`].
    pub fn forget(&self, listing: &Listing) {
        if listing.is_listed()
            && let Some(list) = self.budget.lock().requests.holders(self.number)
        {
            list.remove(listing);
        }
    }

    fn part(&self) -> u64 {
        self.budget.part.load(SeqCst)
    }
}

/// Longest time between two looks for clients without progress, while requests wait.
const LOOK: Duration = Duration::from_secs(1);
/// Shortest time between two looks: clients whose times end within it are disconnected together.
const LEAST_WAIT: Duration = Duration::from_millis(1);

impl Drop for Account {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.reserved -= *self.reserved.get_mut();
        state.requests.remove(self.number);
        self.budget.divide(&mut state);
    }
}

/// A queued request, or one that was served. Unless it is kept, its memory is returned.
struct Queued<'a> {
    account: &'a Account,
    place: Place,
    waiter: &'a Arc<Waiter>,
    is_kept: bool,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        if self.is_kept {
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
