//! A disk whose image passes between processes: the two ends of a live migration, on one host or
//! with storage that both reach.
//!
//! ```text
//!   opened ─► let go ◄───────────── the last holder lets go: all written, nobody inside, locks freed
//!                │                                                 ▲
//!                └─ the first one holds: locks, tables read again ─► held
//! ```
//!
//! The image's locks decide who has it, so there are never two writers. While it is let go no
//! request reaches it: whoever asks without holding it gets an error, and nothing is written at the
//! end.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use policy::time::{Duration, Instant};

use super::Disk;
use reactor::error::{Error, Result};
use storage::{OpenError, RangeGuard, RangeLocks};

/// How often it is looked again whether the image is free. The kernel tells nobody.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// After which the log says for whom it waits.
const PATIENT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Handover {
    /// The locks are held, and what is in memory holds. Changes while nobody is inside.
    held: AtomicBool,
    inside: RangeLocks,
    /// One at a time takes it or lets go.
    turn: RangeLocks,
    holders: Mutex<usize>,
}

/// Why a disk is not to be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotHeld {
    /// Another has the image, or what it left cannot be used.
    #[error(transparent)]
    Image(#[from] OpenError),
    /// Whoever wanted it gave up.
    #[error("nobody waits for it any more")]
    GivenUp,
}

impl Handover {
    /// A request begins, and has ended when this is dropped.
    pub(super) async fn enter(&self) -> Result<RangeGuard<'_>> {
        let inside = self.inside.shared(0..1).await;
        if self.held.load(SeqCst) { Ok(inside) } else { Err(Error::SHUTDOWN) }
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.load(SeqCst)
    }

    fn change_holders(&self, change: impl FnOnce(&mut usize)) -> usize {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut holders);
        *holders
    }
}

impl Disk {
    /// Whether its image was opened for [handover](storage::OpenOptions::handover), so that
    /// it has to be [held](Disk::hold).
    pub fn is_handed_over(&self) -> bool {
        self.handover.is_some()
    }

    /// Takes the image, if this disk is handed over: for who is about to send requests, as often as
    /// it calls [`Disk::let_go`]. Waits for whoever has it, for so long at most, and no longer than
    /// `wanted` says so. Not to be dropped before its end.
    ///
    /// # Errors
    /// [`NotHeld`].
    pub async fn hold(
        &self,
        patience: Duration,
        wanted: impl Fn() -> bool,
    ) -> std::result::Result<(), NotHeld> {
        let Some(handover) = &self.handover else { return Ok(()) };
        let began = reactor::now();
        let _turn = handover.turn.exclusive(0..1).await;
        if !handover.is_held() {
            self.take_locks(began, patience, wanted).await?;
            let taken = {
                let _inside = handover.inside.exclusive(0..1).await;
                let taken = self.prefetch.change(0, u64::MAX, self.image.take_over(&[])).await;
                handover.held.store(taken.is_ok(), SeqCst);
                taken
            };
            if let Err(error) = taken {
                self.let_others_have_it().await;
                return Err(error.into());
            }
            // A guest can have this done as often as it resets its disk.
            tracing::debug!(disk = %self.name, "the image was taken over");
        }
        handover.change_holders(|holders| *holders += 1);
        Ok(())
    }

    async fn take_locks(
        &self,
        began: Instant,
        patience: Duration,
        wanted: impl Fn() -> bool,
    ) -> std::result::Result<(), NotHeld> {
        let mut is_said = false;
        loop {
            let waited: Duration = reactor::now() - began;
            let (image, last) = (Arc::clone(&self.image), waited >= patience);
            if reactor::blocking(move || image.take_locks(last)).await? {
                return Ok(());
            }
            if !wanted() {
                return Err(NotHeld::GivenUp);
            }
            if waited >= PATIENT && !std::mem::replace(&mut is_said, true) {
                tracing::info!(disk = %self.name, "another process has the image; waiting until it is handed over");
            }
            reactor::sleep_until(reactor::now() + LOOK_AGAIN).await;
        }
    }

    /// Ends what [`Disk::hold`] began. With the last, everything is written and the image free for
    /// others when this returns; unless that failed, and then it stays held, and the log says so.
    pub async fn let_go(&self) {
        let Some(handover) = &self.handover else { return };
        let _turn = handover.turn.exclusive(0..1).await;
        if handover.change_holders(|holders| *holders -= 1) > 0 {
            return;
        }
        let _inside = handover.inside.exclusive(0..1).await;
        if let Err(error) = self.image.hand_over().await {
            tracing::error!(disk = %self.name, %error, "the image is not handed over: it cannot be written");
            return;
        }
        handover.held.store(false, SeqCst);
        self.let_others_have_it().await;
        tracing::debug!(disk = %self.name, "the image is free for another process");
    }

    /// Holds the image if somebody does, so that it stays here when those have let it go. False if
    /// nobody does, or nobody has to.
    pub async fn keep_held(&self) -> bool {
        let Some(handover) = self.handover.as_ref().filter(|handover| handover.is_held()) else {
            return false;
        };
        // Whoever lets it go now is through first.
        let _turn = handover.turn.exclusive(0..1).await;
        let is_held = handover.is_held();
        if is_held {
            handover.change_holders(|holders| *holders += 1);
        }
        is_held
    }

    /// The image has come with its locks from a process that held it, if it is handed over and not
    /// held here.
    pub(super) fn come_held(&self) {
        if let Some(handover) = self.handover.as_ref().filter(|handover| !handover.is_held()) {
            handover.change_holders(|holders| *holders += 1);
            handover.held.store(true, SeqCst);
        }
    }

    async fn let_others_have_it(&self) {
        // What nobody waited for may still be on its way. It ends soon, and tells nobody.
        while self.image.is_busy() {
            reactor::sleep_until(reactor::now() + LOOK_AGAIN).await;
        }
        let image = Arc::clone(&self.image);
        reactor::blocking(move || image.release_locks()).await;
    }

    /// A request begins; `None` where nobody has to know.
    pub(super) async fn enter(&self) -> Result<Option<RangeGuard<'_>>> {
        match &self.handover {
            None => Ok(None),
            Some(handover) => handover.enter().await.map(Some),
        }
    }

    /// Whether another process may have the image.
    pub fn is_let_go(&self) -> bool {
        self.handover.as_ref().is_some_and(|handover| !handover.is_held())
    }
}

#[cfg(test)]
#[path = "handover_tests.rs"]
mod tests;
