//! A watch inside a daemon, or inside `weir cgroup run` for the duration of its command.

use std::{
    path::Path,
    sync::mpsc::{self, RecvTimeoutError, TryRecvError},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use settings::state::CapacityStore;

use super::{CgroupLeases, CgroupWatch, WatchEnd, check};
use crate::{
    cgroup_counters::{CgroupFiguresReader, KnownEnforcement},
    hierarchy::{CgroupHierarchy, KernelRoots},
};

/// Interval at which a standby checks whether another watch has ended.
const STANDBY_INTERVAL: Duration = Duration::from_millis(500);

/// A watch in a separate thread; dropping it settles all limits and ends the thread.
#[derive(Debug)]
pub struct CgroupWatchThread {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    figures: Option<CgroupFiguresReader>,
}

impl CgroupWatchThread {
    /// Watches the limits in this file, and quota that a cluster leases. The store has the
    /// capacities of devices.
    pub fn start(path: &Path, store: CapacityStore, leases: Option<CgroupLeases>) -> anyhow::Result<Self> {
        let mut watch = CgroupWatch::claim(CgroupHierarchy::discover(KernelRoots::default())?, path, store)?;
        if let Some(leases) = leases {
            watch.begin_leasing(leases)?;
        }
        // Before the watch moves to its thread; both share `known`.
        let figures = CgroupFiguresReader::new(path, KernelRoots::default(), watch.known.clone());
        let mut running = Self::run(move |stopped| watch.run_until(stopped).map(drop))?;
        running.figures = Some(figures);
        Ok(running)
    }

    /// Starts a watch in a daemon that replaces another: it steers once the old process has
    /// stopped.
    ///
    /// # Errors
    /// Fails if this machine has no control groups that can be limited.
    pub fn start_after_another(
        path: &Path,
        store: CapacityStore,
        leases: Option<CgroupLeases>,
    ) -> anyhow::Result<Self> {
        let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
        check(&hierarchy)?;
        let path = path.to_owned();
        let known = KnownEnforcement::default();
        let figures = CgroupFiguresReader::new(&path, KernelRoots::default(), known.clone());
        let mut running = Self::run(move |stopped| {
            loop {
                if let Some(watch) = CgroupWatch::try_claim(&hierarchy, &path, &store)? {
                    // Figures handed out before refer to this `known`.
                    let mut watch = CgroupWatch { known, ..watch };
                    leases.map_or(Ok(()), |leases| watch.begin_leasing(leases))?;
                    return watch.run_until(stopped).map(drop);
                }
                // The old process may take long to end; its limits must not be changed meanwhile.
                match stopped.try_recv() {
                    Err(TryRecvError::Empty) => {}
                    Ok(()) | Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
        })?;
        running.figures = Some(figures);
        Ok(running)
    }

    /// Reader of the control groups' figures; `None` for a standby.
    pub fn figures(&self) -> Option<CgroupFiguresReader> {
        self.figures.clone()
    }

    /// Starts a watch for one command: it steers while no other process does, and gives way to a
    /// process that claims the limits.
    ///
    /// # Errors
    /// As [`start`](Self::start), except that another watch may be running.
    pub fn start_or_stand_by(path: &Path, store: CapacityStore) -> anyhow::Result<Self> {
        let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
        let path = path.to_owned();
        let mut watch = CgroupWatch::stand_by(&hierarchy, &path, &store)?;
        let mut logged = None;
        Self::run(move |stopped| {
            loop {
                let result = watch.take().map_or(Ok(WatchEnd::GaveWay), |watch| watch.run_until(stopped));
                if let Ok(WatchEnd::Stopped) = result {
                    return Ok(());
                }
                match stopped.recv_timeout(STANDBY_INTERVAL) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return result.map(drop),
                }
                // After an error it stands by again, because the error may be temporary.
                let next = result.and_then(|_| CgroupWatch::stand_by(&hierarchy, &path, &store));
                watch = next.unwrap_or_else(|error| {
                    let text = format!("limits of control groups: {error:#}");
                    // Logged once, not at each attempt.
                    if logged.replace(text.clone()).as_ref() != Some(&text) {
                        tracing::error!("{text}");
                    }
                    None
                });
            }
        })
    }

    fn run(
        watch: impl FnOnce(&mpsc::Receiver<()>) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let body = move || {
            if let Err(error) = watch(&stopped) {
                tracing::error!("limits of control groups: {error:#}");
            }
        };
        let thread = thread::Builder::new().name("cgroups".to_owned()).spawn(body);
        let thread = thread.context("the thread that watches control groups")?;
        Ok(Self { stop: Some(stop), thread: Some(thread), figures: None })
    }
}

impl Drop for CgroupWatchThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Errors have been logged; if it could not settle the limits, the guard has.
            let _ = thread.join();
        }
    }
}
