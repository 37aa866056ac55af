//! Space that a file system has allocated to a file, counted on demand.
//!
//! Attributes of files, status and metrics report it, so it is needed often and by many clients at
//! once. They share one count at a time. A file system that has not answered in time delays only
//! the first of them: until it answers, all receive the last known value at once.

use std::sync::{
    Arc,
    atomic::{
        AtomicU8, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use event_listener::Event;
use policy::time::Instant;

use super::{FileStorage, calls};

/// No count is in progress.
const IDLE: u8 = 0;
/// A count is in progress, within the time of its callers.
const COUNTING: u8 = 1;
/// A count is in progress and has exceeded the time of a caller.
const LATE: u8 = 2;

/// Space of one file, as last counted.
#[derive(Debug)]
pub(super) struct SpaceCount {
    bytes: AtomicU64,
    /// One of the states above, in one variable so that the late mark cannot outlive its count:
    ///
    /// - The state is [`COUNTING`] or [`LATE`] exactly while a [`SpaceQuery`] exists; dropping it,
    ///   as a cancelled task does too, makes the state [`IDLE`].
    /// - The state becomes [`LATE`] from [`COUNTING`] only, in one step. A caller whose time ends
    ///   after the count has ended changes nothing.
    state: AtomicU8,
    counted: Event,
}

/// A count in progress.
#[derive(Debug)]
struct SpaceQuery(Arc<SpaceCount>);

impl Drop for SpaceQuery {
    fn drop(&mut self) {
        self.0.state.store(IDLE, SeqCst);
        self.0.counted.notify(usize::MAX);
    }
}

impl SpaceCount {
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes: AtomicU64::new(bytes), state: AtomicU8::new(IDLE), counted: Event::new() })
    }

    /// Last known value, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub(super) fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Relaxed);
    }

    /// Begins a count, unless one is in progress.
    fn begin(self: &Arc<Self>) -> Option<SpaceQuery> {
        let previous = self.state.compare_exchange(IDLE, COUNTING, SeqCst, SeqCst);
        previous.is_ok().then(|| SpaceQuery(Arc::clone(self)))
    }

    /// Marks the count in progress as late; does nothing if there is none.
    fn mark_late(&self) {
        let _ = self.state.compare_exchange(COUNTING, LATE, SeqCst, SeqCst);
    }

    fn is_late(&self) -> bool {
        self.state.load(SeqCst) == LATE
    }
}

impl FileStorage {
    /// See [`Storage::allocated_bytes_before`](crate::Storage::allocated_bytes_before).
    // At most one count runs, so a file system that hangs occupies one call slot.
    pub(crate) async fn allocated_bytes_before(&self, deadline: Instant) -> u64 {
        let space = &self.space;
        // A count in progress may have begun before the caller's writes; the next one has not.
        for _ in 0..2 {
            let counted = space.counted.listen();
            if space.is_late() {
                break;
            }
            let query = space.begin();
            let is_first = query.is_some();
            if let Some(count) = query {
                let (fd, isolation) = (self.buffered.clone(), Arc::clone(&self.isolation));
                reactor::spawn(async move {
                    match isolation.call(&fd, |fd| calls::allocated_bytes(fd)).await {
                        Ok(bytes) => count.0.set(bytes),
                        Err(error) => tracing::debug!(%error, "the allocated size of a file cannot be read"),
                    }
                });
            }
            if reactor::timeout(deadline - reactor::now(), counted).await.is_err() {
                space.mark_late();
                break;
            }
            if is_first {
                break;
            }
        }
        space.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_mark_never_outlives_its_query() {
        for timeouts_before_the_end in 0..3 {
            let space = SpaceCount::new(0);
            let count = space.begin().expect("no count is in progress");
            for _ in 0..timeouts_before_the_end {
                space.mark_late();
                assert!(space.is_late() && space.begin().is_none());
            }
            drop(count);
            // Another caller's timeout, after the count has ended.
            space.mark_late();
            assert!(!space.is_late());
            assert!(space.begin().is_some(), "the next count begins");
        }
    }
}
