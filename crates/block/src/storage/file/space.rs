//! Space that a file system has allocated to a file, counted on demand.
//!
//! Attributes of files, status and metrics report it, so it is needed often and by many clients at
//! once. They share one count at a time. A file system that has not answered in time delays only
//! the first of them: until it answers, all receive the last known value at once.

use std::sync::{
    Arc,
    atomic::{
        AtomicBool, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use event_listener::Event;
use policy::time::Duration;

use super::{File, calls};
use crate::reactor;

/// Space of one file, as last counted.
#[derive(Debug)]
pub(super) struct Space {
    bytes: AtomicU64,
    is_counting: AtomicBool,
    /// A count has exceeded the time of its caller and has not ended.
    is_late: AtomicBool,
    counted: Event,
}

impl Space {
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes: AtomicU64::new(bytes),
            is_counting: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            counted: Event::new(),
        })
    }

    /// Last known value, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub(super) fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Relaxed);
    }
}

impl File {
    /// See [`Storage::allocated_bytes_within`](crate::storage::Storage::allocated_bytes_within).
    pub(in crate::storage) async fn allocated_bytes_within(&self, timeout: Duration) -> u64 {
        let space = &self.space;
        // A count that is in progress may have begun too early, the next one has not.
        for _ in 0..2 {
            let counted = space.counted.listen();
            if space.is_late.load(SeqCst) {
                break;
            }
            let is_first = !space.is_counting.swap(true, SeqCst);
            if is_first {
                let (space, fd, lane) = (Arc::clone(space), self.buffered.clone(), Arc::clone(&self.lane));
                reactor::spawn(async move {
                    match lane.call(&fd, |fd| calls::allocated_bytes(fd)).await {
                        Ok(bytes) => space.set(bytes),
                        Err(error) => tracing::debug!(%error, "the space of a file cannot be counted"),
                    }
                    space.is_counting.store(false, SeqCst);
                    space.is_late.store(false, SeqCst);
                    space.counted.notify(usize::MAX);
                });
            }
            if reactor::timeout(timeout, counted).await.is_err() {
                if space.is_counting.load(SeqCst) {
                    space.is_late.store(true, SeqCst);
                }
                break;
            }
            if is_first {
                break;
            }
        }
        space.bytes()
    }
}
