//! Requests of the HTTP thread to the main thread, and the cache of its answers.
//!
//! Clients within [`FRESH`] of each other share an answer, so the load does not grow with the
//! number of clients. Never waits for the main thread longer than [`ANSWER_TIMEOUT`].

use std::{sync::Arc, time::Duration};

use serde_json::{Map, Value};
use simulator::limit_preview::{PreviewDisk, PreviewGroup};
use tokio::{
    sync::{Mutex, oneshot},
    time::timeout,
};

use super::snapshot::DaemonSnapshot;

/// Maximum age of figures, unless the caller chooses another.
pub(super) const FRESH: Duration = Duration::from_millis(250);
/// Timeout of a request: half of Prometheus's scrape timeout.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason for a missing answer; follows `weir: ` in messages.
pub(crate) type NoAnswer = &'static str;

/// Request to the main thread, with the sender for its answer.
#[derive(Debug)]
pub(super) enum MainRequest {
    Figures(oneshot::Sender<DaemonSnapshot>),
    Change(SettingsRequest, oneshot::Sender<Result<(), ChangeError>>),
    /// Settings after a change that is not made.
    PreviewInput(SettingsRequest, oneshot::Sender<Result<PreviewInput, ChangeError>>),
}

/// Requested settings of a disk or a group.
#[derive(Debug)]
pub(super) struct SettingsRequest {
    pub(super) kind: ObjectKind,
    pub(super) name: String,
    /// Settings in the form of `x-weir-set`.
    pub(super) settings: Map<String, Value>,
    /// Client, for the log.
    pub(super) client: String,
}

/// Kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectKind {
    Disk,
    Group,
}

/// Settings after a change, of all objects that share limits with the changed one.
#[derive(Debug)]
pub(super) struct PreviewInput {
    pub(super) groups: Vec<PreviewGroup>,
    /// Disks; their recorded requests are filled in later.
    pub(super) disks: Vec<PreviewDisk>,
    /// Indexes of the disks to report.
    pub(super) of: Vec<usize>,
}

/// Reason why a change was rejected.
#[derive(Debug)]
pub(super) enum ChangeError {
    /// No object has this name.
    Unknown(String),
    Rejected(String),
}

/// Access to the main thread.
#[derive(Debug)]
pub(super) struct MainThread {
    requests: async_channel::Sender<MainRequest>,
    cached: Mutex<Option<Arc<DaemonSnapshot>>>,
}

impl MainThread {
    pub(super) fn new(requests: async_channel::Sender<MainRequest>) -> Arc<Self> {
        Arc::new(Self { requests, cached: Mutex::default() })
    }

    /// Figures that are no older than `age`.
    pub(super) async fn figures(&self, age: Duration) -> Result<Arc<DaemonSnapshot>, NoAnswer> {
        // The lock is held while the main thread answers: clients that wait for it share the
        // result.
        let mut cached = self.cached.lock().await;
        if let Some(snapshot) = &*cached
            && snapshot.taken.elapsed() < age
        {
            return Ok(Arc::clone(snapshot));
        }
        let snapshot = self.request(MainRequest::Figures).await?;
        Ok(Arc::clone(cached.insert(Arc::new(snapshot))))
    }

    /// Performs a change, all or nothing.
    pub(super) async fn change(
        &self,
        settings: SettingsRequest,
    ) -> Result<Result<(), ChangeError>, NoAnswer> {
        self.request(|reply| MainRequest::Change(settings, reply)).await
    }

    /// Settings after that change, without making it.
    pub(super) async fn preview_input(
        &self,
        settings: SettingsRequest,
    ) -> Result<Result<PreviewInput, ChangeError>, NoAnswer> {
        self.request(|reply| MainRequest::PreviewInput(settings, reply)).await
    }

    async fn request<T>(
        &self,
        make_request: impl FnOnce(oneshot::Sender<T>) -> MainRequest,
    ) -> Result<T, NoAnswer> {
        let (sender, receiver) = oneshot::channel();
        let reply = async {
            // Sending waits as well, while the main thread is busy with an earlier request.
            self.requests.send(make_request(sender)).await.ok()?;
            receiver.await.ok()
        };
        let answered = timeout(ANSWER_TIMEOUT, reply).await.map_err(|_| "the daemon is busy (try again)")?;
        answered.ok_or("the daemon is ending")
    }
}
