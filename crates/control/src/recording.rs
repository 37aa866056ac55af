//! Recordings: what disks are asked and how long it takes, kept while the daemon runs.
//!
//! ```text
//!   workers ─► block::recorder ─► engine, a thread of its own ─► sink: a file, in blocks
//!                                        ▲
//!              names of disks and limits ┘ from the main thread
//! ```
//!
//! A file is that of a client of the control socket, or one after the other in a directory that the
//! daemon was given.
//!
//! Nothing here is on the way of a request: what a sink does not take in time is lost, counted and
//! said. Without a sink there is no thread, and disks tell nobody anything.

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
use directory::Directory;
use engine::{Engine, Output};
use limits::LimitsInForce;
use names::Numbers;
use recent::Keeping;
pub use recent::Recent;
use recording::LimitOwner;
use settings::RecordingConfig;
pub(crate) use sink::Progress;
use sink::Sink;

use super::change::Change;

/// A recording that runs.
pub struct Running {
    /// Disks and groups that were asked for; all if empty.
    pub(crate) of: Vec<String>,
    /// Where its files are, if it is the daemon's own.
    pub directory: Option<PathBuf>,
    /// Whether somebody wants it for its own sake; else it is the page's.
    is_listed: bool,
    /// Counters of the recording.
    pub progress: Arc<Progress>,
    /// Closed once it has ended.
    ended: async_channel::Receiver<Infallible>,
}

/// Whether this daemon, with the rights that it has now, can record there, and no other does. `own`
/// is where this one records, or one that it takes over from. Leaves nothing.
///
/// # Errors
/// With what to do about it.
pub fn check(record: &RecordingConfig, own: Option<&RecordingConfig>) -> anyhow::Result<()> {
    let cannot = || cannot_be_kept(record);
    directory::check(&record.directory).with_context(cannot)?;
    let own = own.map(|own| &*own.directory);
    ensure!(
        directory::is_free(&record.directory, own).with_context(cannot)?,
        "record: {}: another daemon records there (give each a directory of its own)",
        record.directory.display()
    );
    Ok(())
}

/// To follow a name and precede a reason.
pub fn cannot_be_kept(record: &RecordingConfig) -> String {
    let directory = record.directory.display();
    format!("record: {directory}: no recording can be kept there (name a directory that weir may write to)")
}

/// Lookup of a disk by its name.
type FindDisk = dyn Fn(&str) -> Option<Arc<Disk>>;

/// All of them. Belongs to the main thread.
pub struct Recordings {
    /// All there are.
    disks: Box<dyn Fn() -> Vec<Arc<Disk>>>,
    /// One of them by its name.
    disk: Box<FindDisk>,
    /// True if there is a group of this name.
    has_group: Box<dyn Fn(&str) -> bool>,
    /// While there is something for it to do.
    engine: RefCell<Option<Engine>>,
    running: RefCell<BTreeMap<u64, Rc<Running>>>,
    next: Cell<u64>,
    numbers: RefCell<Numbers>,
}

impl Recordings {
    /// Creates the set without recordings. `disks` returns all disks, `disk` one by its name, and
    /// `has_group` whether there is a group of a name.
    pub(crate) fn of(
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

    /// Records these disks, and those of these groups, to a file that was opened to be written,
    /// until [`Recordings::end`] or until it takes no more. All disks where none is named, and
    /// those that come later. Every request that comes once this has returned is in it, or lost.
    ///
    /// # Errors
    /// No thread to be had.
    pub(crate) async fn begin(self: &Rc<Self>, of: Vec<String>, file: OwnedFd) -> anyhow::Result<u64> {
        let progress = Arc::default();
        let sink = Sink::new(file, reactor::now(), Arc::clone(&progress));
        let sink = sink.context("the recording cannot be begun")?;
        let id = self.add(Box::new(sink), |ended| Running {
            of,
            directory: None,
            is_listed: true,
            progress,
            ended,
        })?;
        let (told, heard) = async_channel::bounded(1);
        self.send(|engine| engine.hear(told));
        // Nothing is ever sent.
        let _ = heard.recv().await;
        Ok(id)
    }

    /// Records all disks for good, in this directory, which was [looked at](check) before.
    ///
    /// # Errors
    /// No thread to be had.
    pub fn keep(self: &Rc<Self>, record: &RecordingConfig) -> anyhow::Result<()> {
        let path = record.directory.clone();
        let directory = Directory::new(record.clone());
        let progress = Arc::clone(directory.progress());
        let running = |ended| Running {
            of: Vec::new(),
            directory: Some(path.clone()),
            is_listed: true,
            progress,
            ended,
        };
        self.add(Box::new(directory), running).map(drop)
    }

    /// Has what all disks were asked lately in memory for good.
    ///
    /// # Errors
    /// No thread to be had.
    pub fn remember(self: &Rc<Self>) -> anyhow::Result<Arc<Recent>> {
        let recent = Arc::<Recent>::default();
        let keeping = Keeping::new(Arc::clone(&recent), reactor::real_time());
        let running = |ended| Running {
            of: Vec::new(),
            directory: None,
            is_listed: false,
            progress: Arc::default(),
            ended,
        };
        self.add(Box::new(keeping), running).map(|_| recent)
    }

    fn add(
        self: &Rc<Self>,
        output: Box<dyn Output>,
        running: impl FnOnce(async_channel::Receiver<Infallible>) -> Running,
    ) -> anyhow::Result<u64> {
        if self.engine.borrow().is_none() {
            *self.engine.borrow_mut() = Some(Engine::start().context("no thread can be started")?);
        }
        let id = self.next.replace(self.next.get() + 1);
        let (told, ended) = async_channel::bounded(1);
        self.send(|engine| engine.add(id, output, told));
        let running = running(ended.clone());
        if running.is_listed {
            tracing::info!(id, of = running.of.join(" "), "a recording has begun");
        }
        self.running.borrow_mut().insert(id, Rc::new(running));
        self.name(&(self.disks)());
        let this = Rc::downgrade(self);
        reactor::spawn(async move {
            // Nothing is ever sent.
            let _ = ended.recv().await;
            if let Some(this) = this.upgrade() {
                this.forget(id);
            }
        });
        Ok(id)
    }

    /// Records all disks in this directory from now on, or in none, and no longer where it did: see
    /// [`Recordings::keep`].
    pub(crate) async fn keep_instead(self: &Rc<Self>, record: Option<&RecordingConfig>) {
        for (id, _) in self.running().iter().filter(|(_, running)| running.directory.is_some()) {
            self.end(*id).await;
        }
        if let Some(Err(error)) = record.map(|record| self.keep(record)) {
            tracing::error!("{error:#}");
        }
    }

    /// Those that run, for somebody.
    pub fn running(&self) -> Vec<(u64, Rc<Running>)> {
        let running = self.running.borrow();
        let listed = running.iter().filter(|(_, running)| running.is_listed);
        listed.map(|(id, running)| (*id, Rc::clone(running))).collect()
    }

    /// Ends one; returns when its file is whole, or takes no more. `None` where there is none.
    pub(crate) async fn end(&self, id: u64) -> Option<Rc<Running>> {
        let running = self.running.borrow().get(&id).cloned()?;
        self.send(|engine| engine.end(id));
        let _ = running.ended.recv().await;
        self.forget(id);
        Some(running)
    }

    /// Ends all.
    pub async fn end_all(&self) {
        let all: Vec<_> = self.running.borrow().keys().copied().collect();
        for id in all {
            self.end(id).await;
        }
    }

    /// Once it has ended; more than once is well, too.
    fn forget(&self, id: u64) {
        let Some(running) = self.running.borrow_mut().remove(&id) else { return };
        let progress = &running.progress;
        let (requests, lost, bytes) = (progress.requests(), progress.lost(), progress.bytes());
        match progress.error() {
            _ if !running.is_listed => {}
            None => tracing::info!(id, requests, lost, bytes, "a recording has ended"),
            Some(error) => tracing::warn!(id, requests, lost, bytes, "a recording has ended: {error}"),
        }
        self.name(&(self.disks)());
        if self.running.borrow().is_empty() {
            self.engine.take();
        }
    }

    /// Disks and groups come, go and change.
    pub(crate) fn follow(&self, change: &Change) {
        let (Change::Listed { name } | Change::SettingsChanged { name }) = change else { return };
        if self.engine.borrow().is_none() {
            return;
        }
        match (self.disk)(name) {
            Some(disk) => self.name(&[disk]),
            // A group may have moved, with all that are below it.
            None => {
                let now = reactor::now();
                let remove = |owner| self.send(|engine| engine.remove((owner, name.as_str().into()), now));
                remove(LimitOwner::Disk);
                if !(self.has_group)(name) {
                    remove(LimitOwner::Group);
                }
                self.name(&(self.disks)());
            }
        }
    }

    /// Records the limits of a group whose part of a cluster's limits may have changed, which is no
    /// [`Change`].
    pub(crate) fn follow_quota(&self, group: &ThrottleGroup) {
        // The engine skips unchanged limits.
        let now = reactor::now();
        self.send(|engine| engine.change_limits(LimitsInForce::of_group(group), now));
    }

    fn send(&self, what: impl FnOnce(&Engine)) {
        if let Some(engine) = &*self.engine.borrow() {
            what(engine);
        }
    }

    /// Tells disks as what they are recorded, and the engine who they are and for which sinks.
    fn name(&self, disks: &[Arc<Disk>]) {
        let running = self.running.borrow();
        let mut numbers = self.numbers.borrow_mut();
        let known = disks.iter().map(|disk| {
            let named = numbers.name(disk);
            let sinks = running.iter().filter(|(_, running)| named.is_one_of(&running.of));
            let sinks: Vec<u64> = sinks.map(|(id, _)| *id).collect();
            disk.recording().set((!sinks.is_empty()).then_some(named.number));
            (named, sinks)
        });
        let known = known.collect();
        let now = reactor::now();
        self.send(|engine| engine.know(known, now));
    }
}
