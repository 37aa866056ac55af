//! Recordings of the requests of disks and their latencies, made while the daemon runs.
//!
//! ```text
//!   workers ─► block::recorder ─► engine, a dedicated thread ─► sink: a file, in blocks
//!                                        ▲
//!              names of disks and limits ┘ from the main thread
//! ```
//!
//! A recording goes to a file of a client of the control socket, or to a series of files in the
//! daemon's recording directory.
//!
//! Never delays a request: records that a sink does not accept in time are dropped, counted and
//! reported. Without a sink there is no thread, and disks produce no records.

mod directory;
mod engine;
mod limits;
mod names;
mod recent;
mod sink;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    convert::Infallible,
    os::fd::OwnedFd,
    path::PathBuf,
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use block::{disk::Disk, layer::throttle::ThrottleGroup};
use directory::RecordingDirectory;
use engine::{RecordingEngine, RecordingOutput};
use limits::OwnerLimits;
use names::RecordingNumbers;
use recent::RecentOutput;
pub use recent::RecentRequests;
use recording::LimitOwner;
use settings::RecordingConfig;
pub(crate) use sink::RecordingProgress;
use sink::RecordingSink;

use super::change::RegistryChange;

/// Recording in progress.
pub struct RunningRecording {
    /// Recorded disks and groups; all if empty.
    pub(crate) names: Vec<String>,
    /// Directory of its files, for the daemon's own recording.
    pub directory: Option<PathBuf>,
    /// False for the internal recording of the web page.
    is_listed: bool,
    /// Counters of the recording.
    pub progress: Arc<RecordingProgress>,
    /// Closed after the recording has ended.
    end_signal: async_channel::Receiver<Infallible>,
}

/// Checks that this daemon, with its current rights, can record in the directory, and that no other
/// daemon does. `own` is the current directory of this daemon or of the old process. Leaves no
/// file.
///
/// # Errors
/// The directory is unusable, with a remedy.
pub fn check_directory(record: &RecordingConfig, own: Option<&RecordingConfig>) -> anyhow::Result<()> {
    let unusable = || unusable_directory(record);
    directory::check(&record.directory).with_context(unusable)?;
    let own = own.map(|own| &*own.directory);
    ensure!(
        directory::is_free(&record.directory, own).with_context(unusable)?,
        "record: {}: another daemon records there (give each a directory of its own)",
        record.directory.display()
    );
    Ok(())
}

/// Text of an error; follows a name and precedes a reason.
pub fn unusable_directory(record: &RecordingConfig) -> String {
    let directory = record.directory.display();
    format!(
        "record: {directory}: recordings cannot be written there (use a directory that weir can write to)"
    )
}

/// Lookup of a disk by its name.
type DiskLookup = dyn Fn(&str) -> Option<Arc<Disk>>;

/// All recordings of the daemon. Belongs to the main thread.
pub struct Recordings {
    /// Returns all disks.
    disks: Box<dyn Fn() -> Vec<Arc<Disk>>>,
    /// Returns a disk by its name.
    disk: Box<DiskLookup>,
    /// True if there is a group of this name.
    has_group: Box<dyn Fn(&str) -> bool>,
    /// `None` while there are no recordings.
    engine: RefCell<Option<RecordingEngine>>,
    running: RefCell<BTreeMap<u64, Rc<RunningRecording>>>,
    next: Cell<u64>,
    numbers: RefCell<RecordingNumbers>,
}

impl Recordings {
    /// Creates the set without recordings. `disks` returns all disks, `disk` one by its name, and
    /// `has_group` whether a group of a name exists.
    pub(crate) fn new(
        disks: impl Fn() -> Vec<Arc<Disk>> + 'static,
        disk: impl Fn(&str) -> Option<Arc<Disk>> + 'static,
        has_group: impl Fn(&str) -> bool + 'static,
    ) -> Rc<Self> {
        Rc::new(Self {
            disks: Box::new(disks),
            disk: Box::new(disk),
            has_group: Box::new(has_group),
            engine: RefCell::default(),
            running: RefCell::default(),
            next: Cell::default(),
            numbers: RefCell::default(),
        })
    }

    /// Records these disks and the disks of these groups to an open file, until
    /// [`Recordings::end`] or a write error. An empty list selects all current and later disks.
    /// Every request that arrives after the return is recorded or counted as dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) async fn begin(self: &Rc<Self>, targets: Vec<String>, file: OwnedFd) -> anyhow::Result<u64> {
        let progress = Arc::default();
        let sink = RecordingSink::new(file, reactor::now(), Arc::clone(&progress));
        let sink = sink.context("the recording cannot be begun")?;
        let id = self.add(Box::new(sink), |signal| RunningRecording {
            names: targets,
            directory: None,
            is_listed: true,
            progress,
            end_signal: signal,
        })?;
        let (sender, receiver) = async_channel::bounded(1);
        // Earlier messages assign the disks, so no request is missed once the engine has
        // handled this one.
        self.with_engine(|engine| engine.confirm(sender));
        // Completes when the engine drops the sender; no value is ever sent.
        let _ = receiver.recv().await;
        Ok(id)
    }

    /// Records all disks permanently in a directory that [`check_directory`] accepted.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn record_permanently(self: &Rc<Self>, record: &RecordingConfig) -> anyhow::Result<()> {
        let path = record.directory.clone();
        let directory = RecordingDirectory::new(record.clone());
        let progress = Arc::clone(directory.progress());
        let running = |signal| RunningRecording {
            names: Vec::new(),
            directory: Some(path.clone()),
            is_listed: true,
            progress,
            end_signal: signal,
        };
        self.add(Box::new(directory), running).map(drop)
    }

    /// Keeps the recent requests of all disks in memory, permanently.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn record_recent(self: &Rc<Self>) -> anyhow::Result<Arc<RecentRequests>> {
        let recent = Arc::<RecentRequests>::default();
        let output = RecentOutput::new(Arc::clone(&recent), reactor::real_time());
        let running = |signal| RunningRecording {
            names: Vec::new(),
            directory: None,
            is_listed: false,
            progress: Arc::default(),
            end_signal: signal,
        };
        self.add(Box::new(output), running).map(|_| recent)
    }

    fn add(
        self: &Rc<Self>,
        output: Box<dyn RecordingOutput>,
        running: impl FnOnce(async_channel::Receiver<Infallible>) -> RunningRecording,
    ) -> anyhow::Result<u64> {
        if self.engine.borrow().is_none() {
            *self.engine.borrow_mut() = Some(RecordingEngine::start().context("no thread can be started")?);
        }
        let id = self.next.replace(self.next.get() + 1);
        let (sender, receiver) = async_channel::bounded(1);
        self.with_engine(|engine| engine.add(id, output, sender));
        let running = running(receiver.clone());
        if running.is_listed {
            tracing::info!(id, of = running.names.join(" "), "a recording has begun");
        }
        self.running.borrow_mut().insert(id, Rc::new(running));
        self.update_disks(&(self.disks)());
        let this = Rc::downgrade(self);
        reactor::spawn(async move {
            // Completes when the output is dropped; no value is ever sent.
            let _ = receiver.recv().await;
            if let Some(this) = this.upgrade() {
                this.remove_ended(id);
            }
        });
        Ok(id)
    }

    /// Changes the recording directory; `None` ends the permanent recording. See
    /// [`Recordings::record_permanently`].
    pub(crate) async fn change_directory(self: &Rc<Self>, record: Option<&RecordingConfig>) {
        for (id, _) in self.running().iter().filter(|(_, running)| running.directory.is_some()) {
            self.end(*id).await;
        }
        if let Some(Err(error)) = record.map(|record| self.record_permanently(record)) {
            tracing::error!("{error:#}");
        }
    }

    /// Listed recordings in progress.
    pub fn running(&self) -> Vec<(u64, Rc<RunningRecording>)> {
        let running = self.running.borrow();
        let listed = running.iter().filter(|(_, running)| running.is_listed);
        listed.map(|(id, running)| (*id, Rc::clone(running))).collect()
    }

    /// Ends a recording; returns once its file is complete or failed. `None` if there is no such
    /// recording.
    pub(crate) async fn end(&self, id: u64) -> Option<Rc<RunningRecording>> {
        let running = self.running.borrow().get(&id).cloned()?;
        self.with_engine(|engine| engine.end(id));
        // Returns an error when the engine drops the sender, which is the signal.
        let _ = running.end_signal.recv().await;
        self.remove_ended(id);
        Some(running)
    }

    /// Ends all recordings.
    pub async fn end_all(&self) {
        let all: Vec<_> = self.running.borrow().keys().copied().collect();
        for id in all {
            self.end(id).await;
        }
    }

    /// Removes an ended recording. Idempotent: `end` and the background task both call it.
    fn remove_ended(&self, id: u64) {
        let Some(running) = self.running.borrow_mut().remove(&id) else { return };
        let progress = &running.progress;
        let (requests, lost, bytes) = (progress.requests(), progress.dropped(), progress.bytes());
        match progress.error() {
            _ if !running.is_listed => {}
            None => tracing::info!(id, requests, lost, bytes, "a recording has ended"),
            Some(error) => tracing::warn!(id, requests, lost, bytes, "a recording has ended: {error}"),
        }
        self.update_disks(&(self.disks)());
        // Dropping the engine stops its thread; disks record nothing without it.
        if self.running.borrow().is_empty() {
            self.engine.take();
        }
    }

    /// Updates names, numbers and limits after a change of disks or groups.
    pub(crate) fn handle_change(&self, change: &RegistryChange) {
        let (RegistryChange::Listed { name } | RegistryChange::SettingsChanged { name }) = change else {
            return;
        };
        if self.engine.borrow().is_none() {
            return;
        }
        match (self.disk)(name) {
            Some(disk) => self.update_disks(&[disk]),
            // A group may have moved, together with its descendants.
            None => {
                let now = reactor::now();
                let remove =
                    |owner| self.with_engine(|engine| engine.remove((owner, name.as_str().into()), now));
                remove(LimitOwner::Disk);
                if !(self.has_group)(name) {
                    remove(LimitOwner::Group);
                }
                self.update_disks(&(self.disks)());
            }
        }
    }

    /// Records the limits of a group whose quota may have changed. A new quota causes no
    /// [`RegistryChange`].
    pub(crate) fn handle_quota_change(&self, group: &ThrottleGroup) {
        // The engine skips unchanged limits.
        let now = reactor::now();
        self.with_engine(|engine| engine.change_limits(OwnerLimits::of_group(group), now));
    }

    fn with_engine(&self, action: impl FnOnce(&RecordingEngine)) {
        if let Some(engine) = &*self.engine.borrow() {
            action(engine);
        }
    }

    /// Assigns recording numbers to disks, and sends the engine their names, limits and sinks.
    fn update_disks(&self, disks: &[Arc<Disk>]) {
        let running = self.running.borrow();
        let mut numbers = self.numbers.borrow_mut();
        let known = disks.iter().map(|disk| {
            let named = numbers.describe(disk);
            let sinks = running.iter().filter(|(_, running)| named.is_recorded_by(&running.names));
            let sinks: Vec<u64> = sinks.map(|(id, _)| *id).collect();
            // Enables recording on the workers at once, possibly before the engine knows the
            // number: see `EngineMessage::UpdateDisks`.
            disk.recording().set((!sinks.is_empty()).then_some(named.number));
            (named, sinks)
        });
        let known = known.collect();
        let now = reactor::now();
        self.with_engine(|engine| engine.update_disks(known, now));
    }
}
