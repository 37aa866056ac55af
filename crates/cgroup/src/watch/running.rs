//! A watch beside a daemon, or beside a command that has its limits only as long as it runs.

use std::{
    path::Path,
    sync::mpsc::{self, RecvTimeoutError, TryRecvError},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use settings::state::Store;

use super::{Ended, Lending, Watch, check};
use crate::{
    figures::{Known, Reader},
    hierarchy::{Hierarchy, Roots},
};

/// How often who stands by looks whether a watch has ended.
const STAND_BY: Duration = Duration::from_millis(500);

/// A watch in a thread of its own; dropping this ends it, with all limits settled.
#[derive(Debug)]
pub struct Running {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    figures: Option<Reader>,
}

impl Running {
    /// Watches the limits in this file, and those that a cluster lends. What devices can do is in
    /// the store.
    pub fn start(path: &Path, store: Store, lending: Option<Lending>) -> anyhow::Result<Self> {
        let mut watch = Watch::claim(Hierarchy::discover(Roots::default())?, path, store)?;
        if let Some(lending) = lending {
            watch.begin_to_lend(lending)?;
        }
        let figures = Reader::new(path, Roots::default(), watch.known.clone());
        let mut running = Self::run(move |stopped| watch.until(stopped).map(drop))?;
        running.figures = Some(figures);
        Ok(running)
    }

    /// The same for a daemon that takes another's place: it steers once that one does no more.
    ///
    /// # Errors
    /// If there are no control groups that can be limited.
    pub fn start_after_another(path: &Path, store: Store, lending: Option<Lending>) -> anyhow::Result<Self> {
        let hierarchy = Hierarchy::discover(Roots::default())?;
        check(&hierarchy)?;
        let path = path.to_owned();
        let known = Known::default();
        let figures = Reader::new(&path, Roots::default(), known.clone());
        let mut running = Self::run(move |stopped| {
            loop {
                if let Some(watch) = Watch::claim_soon(&hierarchy, &path, &store)? {
                    let mut watch = Watch { known, ..watch };
                    lending.map_or(Ok(()), |lending| watch.begin_to_lend(lending))?;
                    return watch.until(stopped).map(drop);
                }
                // The other may take its time to end; what it was last told is nobody's to change.
                match stopped.try_recv() {
                    Err(TryRecvError::Empty) => {}
                    Ok(()) | Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
        })?;
        running.figures = Some(figures);
        Ok(running)
    }

    /// Reads what the control groups do; `None` where it stands by.
    pub fn figures(&self) -> Option<Reader> {
        self.figures.clone()
    }

    /// The same for one command: it steers while nobody else does, and makes way for who claims to.
    ///
    /// # Errors
    /// As [`start`](Self::start), except that somebody else may watch already.
    pub fn start_or_stand_by(path: &Path, store: Store) -> anyhow::Result<Self> {
        let hierarchy = Hierarchy::discover(Roots::default())?;
        let path = path.to_owned();
        let mut watch = Watch::stand_in(&hierarchy, &path, &store)?;
        let mut said = None;
        Self::run(move |stopped| {
            loop {
                let ended = watch.take().map_or(Ok(Ended::MadeWay), |watch| watch.until(stopped));
                if let Ok(Ended::AsAsked) = ended {
                    return Ok(());
                }
                match stopped.recv_timeout(STAND_BY) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return ended.map(drop),
                }
                let next = ended.and_then(|_| Watch::stand_in(&hierarchy, &path, &store));
                watch = next.unwrap_or_else(|error| {
                    let text = format!("limits of control groups: {error:#}");
                    if said.replace(text.clone()).as_ref() != Some(&text) {
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

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has said what went wrong; if it could not settle, the guard has.
            let _ = thread.join();
        }
    }
}
