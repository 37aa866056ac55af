//! The memory that the process may use for data, and who has it.
//!
//! ```text
//!   budget ┬─ reserved   metadata caches, read-ahead, buffers kept for reuse: set aside beforehand
//!          ├─ pages      of disks in memory: taken when they are written, else ENOSPC
//!          └─ requests   data of requests in flight and of replies that nobody has read yet
//!               ├─ one half: an equal part for each disk, which no other disk can take
//!               └─ the other half: for whoever needs more; disks take turns
//! ```
//!
//! Where there is none for a request, its client waits. A client that keeps memory because it does
//! not send what it announced, or does not read what it asked for, is disconnected once others have
//! to wait for it. So no client costs another disk its requests, and none ends the process.
//!
//! The common half goes to the disk that has least of it, and among those with as much (nothing, as
//! a rule) to the one that had some longest ago. So a disk waits for one client of another that
//! keeps memory until it is pushed out, not for all that are in the queue behind that one.
//!
//! A request is charged its payload. What it takes beside that while it is carried out (tables,
//! blocks that were not aligned, ciphertext) is not counted: a fifth of the machine is left for it.

use std::sync::{
    Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};

use event_listener::Event;

use crate::{reactor, seldom::Seldom};

/// What requests have at least, in bytes: in each half of it, one of the largest fits.
pub const LEAST_REQUESTS: u64 = 64 << 20;
/// What they have at most: memory that waits for clients helps nobody.
const MOST_REQUESTS: u64 = 1 << 30;

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
    pub(crate) fn why(&self) -> String {
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
    /// Of requests in flight and unread replies.
    pub requests: u64,
    /// The most that `requests` may be.
    pub most_requests: u64,
    /// Requests that wait for memory now.
    pub waiting: u64,
}

/// Memory that is set aside until this is dropped.
#[derive(Debug)]
pub(crate) struct Aside {
    budget: Arc<Budget>,
    what: &'static str,
    bytes: u64,
}

impl Aside {
    /// So many bytes for `what`.
    ///
    /// # Errors
    /// [`NotEnough`].
    pub(crate) fn new(budget: &Arc<Budget>, what: &'static str, bytes: u64) -> Result<Self, NotEnough> {
        budget.reserve(what, 0, bytes)?;
        Ok(Self { budget: budget.clone(), what, bytes })
    }

    /// So many bytes from now on.
    ///
    /// # Errors
    /// [`NotEnough`]; it is what it was.
    pub(crate) fn change(&mut self, bytes: u64) -> Result<(), NotEnough> {
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

/// A budget.
#[derive(Debug)]
pub struct Budget {
    total: AtomicU64,
    pages: AtomicU64,
    /// What each account may always use.
    part: AtomicU64,
    /// Somebody is in the queue.
    is_awaited: AtomicBool,
    state: Mutex<State>,
    log: Seldom,
}

#[derive(Debug, Default)]
struct State {
    reserved: u64,
    /// What each account uses.
    accounts: Vec<Arc<Used>>,
    /// How often somebody has had more than its part.
    turns: u64,
    queue: Vec<Arc<Waiter>>,
    clients: Vec<Weak<dyn Holder>>,
}

/// What an account uses.
#[derive(Debug, Default)]
struct Used {
    /// Of requests in flight and unread replies.
    bytes: AtomicU64,
    /// The turn in which it last had more than its part; 0 before it has. Changed under the lock.
    turn: AtomicU64,
}

impl Used {
    fn bytes(&self) -> u64 {
        self.bytes.load(SeqCst)
    }
}

/// Somebody who may keep memory for as long as a client likes.
pub trait Holder: std::fmt::Debug + Send + Sync {
    /// Whether it has been waiting for its client for longer than is reasonable.
    fn is_overdue(&self) -> bool;
    /// Ends it, so that the memory comes back, now or in a moment. Called once.
    fn push_out(&self);
}

#[derive(Debug)]
struct Waiter {
    /// What its account uses.
    used: Arc<Used>,
    bytes: u64,
    granted: AtomicBool,
    news: Event,
}

static PROCESS: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(u64::MAX));

impl Budget {
    /// A budget of so many bytes; `u64::MAX` is as much as there is.
    pub fn new(total: u64) -> Arc<Self> {
        Arc::new(Self {
            total: AtomicU64::new(total),
            pages: AtomicU64::new(0),
            part: AtomicU64::new(MOST_REQUESTS / 2),
            is_awaited: AtomicBool::new(false),
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
        self.divide(&self.lock());
    }

    /// Who has how much now.
    pub fn usage(&self) -> Usage {
        let state = self.lock();
        Usage {
            total: self.total(),
            reserved: state.reserved,
            pages: self.pages.load(SeqCst),
            requests: state.accounts.iter().map(|used| used.bytes()).sum(),
            most_requests: self.most_requests(state.reserved),
            waiting: state.queue.len() as u64,
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
    pub(crate) fn free(&self) -> u64 {
        self.left(self.lock().reserved)
    }

    /// What may be had beside requests, for good.
    fn left(&self, reserved: u64) -> u64 {
        let others = reserved + self.pages.load(SeqCst) + self.most_requests(reserved);
        self.total().saturating_sub(others)
    }

    /// Gives each account its part of what requests may have.
    fn divide(&self, state: &State) {
        let accounts = state.accounts.len().max(1) as u64;
        self.part.store(self.most_requests(state.reserved) / 2 / accounts, SeqCst);
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
        self.divide(&state);
        Ok(())
    }

    /// Takes a page for a disk in memory; false where there is none.
    pub(crate) fn take_page(&self, bytes: u64) -> bool {
        let total = self.total();
        if total == u64::MAX {
            self.pages.fetch_add(bytes, SeqCst);
            return true;
        }
        let state = self.lock();
        let fits = bytes <= self.left(state.reserved);
        if fits {
            self.pages.fetch_add(bytes, SeqCst);
        }
        fits
    }

    /// Gives pages back.
    pub(crate) fn give_back_pages(&self, bytes: u64) {
        self.pages.fetch_sub(bytes, SeqCst);
    }

    /// Has `client` ended when others wait for what it keeps.
    pub fn watch(&self, client: Weak<dyn Holder>) {
        let mut state = self.lock();
        state.clients.retain(|client| client.strong_count() > 0);
        state.clients.push(client);
    }

    /// Ends those that keep others waiting. Once each: an end takes a moment, and meanwhile all
    /// that wait ask for it.
    fn push_out(&self) {
        let clients: Vec<_> = self.lock().clients.iter().filter_map(Weak::upgrade).collect();
        for client in clients.iter().filter(|client| client.is_overdue()) {
            if !self.forget(client) {
                continue;
            }
            client.push_out();
            if let Some(left_out) = self.log.line(reactor::recently()) {
                tracing::warn!(left_out, "a client was disconnected: it kept memory that others wait for");
            }
        }
    }

    /// Watches a client no more; false if it was not watched.
    fn forget(&self, client: &Arc<dyn Holder>) -> bool {
        let mut state = self.lock();
        let is_it = |other: &Weak<dyn Holder>| std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(client));
        let place = state.clients.iter().position(is_it);
        place.is_some_and(|place| {
            state.clients.swap_remove(place);
            true
        })
    }

    /// Lets in who may go now: whoever stays within its part, and then whose disk has least beyond
    /// it, in turn. Nobody overtakes that one to the common half.
    fn serve(&self, state: &mut State) {
        loop {
            let part = self.part.load(SeqCst);
            let within = state.queue.iter().position(|waiter| waiter.used.bytes() + waiter.bytes <= part);
            let standing = |&place: &usize| {
                let used = &state.queue[place].used;
                // Not what it has of its part: another disk, whose clients have nothing whenever
                // one of them was pushed out, would come before one with any request in flight.
                (used.bytes().saturating_sub(part), used.turn.load(SeqCst))
            };
            let next = (0..state.queue.len()).min_by_key(standing);
            let may = |&place: &usize| self.may(state, &state.queue[place].used, state.queue[place].bytes);
            let Some(place) = within.or(next.filter(may)) else { break };
            let waiter = state.queue.remove(place);
            self.charge(state, &waiter.used, waiter.bytes);
            waiter.granted.store(true, SeqCst);
            waiter.news.notify(usize::MAX);
        }
        self.is_awaited.store(!state.queue.is_empty(), SeqCst);
    }

    /// Charges an account. Where that is more than its part it was its turn.
    fn charge(&self, state: &mut State, account: &Used, bytes: u64) {
        if account.bytes.fetch_add(bytes, SeqCst) + bytes > self.part.load(SeqCst) {
            state.turns += 1;
            account.turn.store(state.turns, SeqCst);
        }
    }

    /// Whether an account may have more: of its own part, or of the common half. Of that nobody has
    /// more than is still free, except by one request: what waits long for its limits would
    /// otherwise keep all of it.
    fn may(&self, state: &State, account: &Arc<Used>, bytes: u64) -> bool {
        let part = self.part.load(SeqCst);
        let over = |used: u64| used.saturating_sub(part);
        let used = account.bytes();
        let others = state.accounts.iter().filter(|other| !Arc::ptr_eq(other, account));
        let others: u64 = others.map(|used| over(used.bytes())).sum();
        let common = self.most_requests(state.reserved) - part * state.accounts.len() as u64;
        let wanted = over(used + bytes);
        let Some(free) = common.checked_sub(others + wanted) else { return wanted == 0 };
        over(used) == 0 || wanted <= free
    }
}

/// What the requests of one disk have of a budget.
#[derive(Debug)]
pub struct Account {
    budget: Arc<Budget>,
    used: Arc<Used>,
    reserved: AtomicU64,
}

impl Account {
    /// An account of its own in `budget`.
    pub fn new(budget: &Arc<Budget>) -> Arc<Self> {
        let used: Arc<Used> = Arc::default();
        let mut state = budget.lock();
        state.accounts.push(Arc::clone(&used));
        budget.divide(&state);
        drop(state);
        Arc::new(Self { budget: Arc::clone(budget), used, reserved: AtomicU64::new(0) })
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
        let part = self.budget.part.load(SeqCst);
        let within = |used: u64| used.checked_add(bytes).filter(|&used| used <= part);
        if self.used.bytes.fetch_update(SeqCst, SeqCst, within).is_ok() {
            return true;
        }
        let mut state = self.budget.lock();
        let free = state.queue.is_empty() && self.budget.may(&state, &self.used, bytes);
        if free {
            self.budget.charge(&mut state, &self.used, bytes);
        }
        free
    }

    /// The same, and waits for it. Whoever gives up waiting has taken nothing.
    ///
    /// `bytes` is at most half of [`LEAST_REQUESTS`].
    pub async fn take(&self, bytes: u64) {
        if self.try_take(bytes) {
            return;
        }
        let waiter = Arc::new(Waiter {
            used: Arc::clone(&self.used),
            bytes,
            granted: AtomicBool::new(false),
            news: Event::new(),
        });
        let mut place = Place { budget: &self.budget, waiter: &waiter, is_kept: false };
        let mut news = waiter.news.listen();
        {
            let mut state = self.budget.lock();
            state.queue.push(Arc::clone(&waiter));
            self.budget.is_awaited.store(true, SeqCst);
            // Once more: what came back before the store was given to nobody.
            self.budget.serve(&mut state);
        }
        while !waiter.granted.load(SeqCst) {
            if reactor::timeout(PATIENCE, news).await.is_err() {
                self.budget.push_out();
            }
            news = waiter.news.listen();
        }
        place.is_kept = true;
    }

    /// Whether it uses more than what no other can take.
    pub fn is_over_its_part(&self) -> bool {
        self.used() > self.budget.part.load(SeqCst)
    }

    /// Gives back what was taken.
    pub fn give_back(&self, bytes: u64) {
        self.used.bytes.fetch_sub(bytes, SeqCst);
        if self.budget.is_awaited.load(SeqCst) {
            self.budget.serve(&mut self.budget.lock());
        }
    }
}

/// Who waits looks so often for clients that keep it waiting.
const PATIENCE: policy::time::Duration = policy::time::Duration::from_secs(1);

impl Drop for Account {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.reserved -= *self.reserved.get_mut();
        state.accounts.retain(|used| !Arc::ptr_eq(used, &self.used));
        self.budget.divide(&state);
        self.budget.serve(&mut state);
    }
}

/// A place in the queue, or what was granted to somebody who then went.
struct Place<'a> {
    budget: &'a Budget,
    waiter: &'a Arc<Waiter>,
    is_kept: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let mut state = self.budget.lock();
        state.queue.retain(|waiter| !Arc::ptr_eq(waiter, self.waiter));
        if self.waiter.granted.load(SeqCst) {
            self.waiter.used.bytes.fetch_sub(self.waiter.bytes, SeqCst);
        }
        self.budget.serve(&mut state);
    }
}

#[cfg(test)]
mod tests;
