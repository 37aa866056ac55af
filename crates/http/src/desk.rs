//! What this thread asks the main one for, and how long an answer is good.
//!
//! Whoever asks within [`FRESH`] of another has the same answer, so that neither thread has much to
//! do however many ask. Never waits for the main thread longer than [`PATIENCE`].

use std::{sync::Arc, time::Duration};

use serde_json::{Map, Value};
use simulator::preview::{DiskThen, GroupThen};
use tokio::{
    sync::{Mutex, oneshot},
    time::timeout,
};

use super::snapshot::Snapshot;

/// How old figures may be for who does not say.
pub(super) const FRESH: Duration = Duration::from_millis(250);
/// Half of what Prometheus waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why nothing was answered; to follow `weir: `.
pub(crate) type Silent = &'static str;

/// What the main thread is asked, with where it answers.
#[derive(Debug)]
pub(super) enum Asked {
    Figures(oneshot::Sender<Snapshot>),
    Change(Wanted, oneshot::Sender<Result<(), Refused>>),
    /// What would be changed, and nothing is.
    Foresee(Wanted, oneshot::Sender<Result<Then, Refused>>),
}

/// Other settings of a disk or a group.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) of: Of,
    pub(super) name: String,
    /// As `x-weir-set` takes them.
    pub(super) settings: Map<String, Value>,
    /// For the log.
    pub(super) who: String,
}

/// What is changed, and what a figure is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    Disk,
    Group,
}

/// Settings of all that share limits with what would be changed, as they would be.
#[derive(Debug)]
pub(super) struct Then {
    pub(super) groups: Vec<GroupThen>,
    /// Nothing is known yet of what they were asked.
    pub(super) disks: Vec<DiskThen>,
    /// Places of those that are asked about.
    pub(super) of: Vec<usize>,
}

/// Why nothing was changed.
#[derive(Debug)]
pub(super) enum Refused {
    /// There is none of this name.
    Unknown(String),
    Rule(String),
}

/// Reaches the main thread.
#[derive(Debug)]
pub(super) struct Desk {
    ask: async_channel::Sender<Asked>,
    kept: Mutex<Option<Arc<Snapshot>>>,
}

impl Desk {
    pub(super) fn new(ask: async_channel::Sender<Asked>) -> Arc<Self> {
        Arc::new(Self { ask, kept: Mutex::default() })
    }

    /// All figures, no older than that.
    pub(super) async fn figures(&self, age: Duration) -> Result<Arc<Snapshot>, Silent> {
        let mut kept = self.kept.lock().await;
        if let Some(snapshot) = &*kept
            && snapshot.taken.elapsed() < age
        {
            return Ok(Arc::clone(snapshot));
        }
        let snapshot = self.answer(Asked::Figures).await?;
        Ok(Arc::clone(kept.insert(Arc::new(snapshot))))
    }

    /// Changes something, or nothing.
    pub(super) async fn change(&self, wanted: Wanted) -> Result<Result<(), Refused>, Silent> {
        self.answer(|answer| Asked::Change(wanted, answer)).await
    }

    /// What there would be after that change.
    pub(super) async fn foresee(&self, wanted: Wanted) -> Result<Result<Then, Refused>, Silent> {
        self.answer(|answer| Asked::Foresee(wanted, answer)).await
    }

    async fn answer<T>(&self, asked: impl FnOnce(oneshot::Sender<T>) -> Asked) -> Result<T, Silent> {
        let (answer, answered) = oneshot::channel();
        let answer = async {
            self.ask.send(asked(answer)).await.ok()?;
            answered.await.ok()
        };
        let answered = timeout(PATIENCE, answer).await.map_err(|_| "the daemon is busy (try again)")?;
        answered.ok_or("the daemon is ending")
    }
}
