//! `weir serve`: from what was said to a running daemon, and back to nothing.
//!
//! ```text
//!   main thread     accepts, hears signals, sees to the end
//!   worker threads  a reactor each; every connection lives on one of them
//!   signals         waits for SIGTERM, SIGINT, SIGHUP and tells the main thread
//! ```
//!
//! Everything that can be wrong with a plan shows before the first client is let in: images are opened and locked, keys
//! are read and addresses bound first. Then the log says `ready`, the service manager is told, and the pid file is written.
//!
//! Never leaves what it acknowledged unwritten: at the end every disk is flushed, and a flush that fails is a failure.

mod assemble;

use std::{rc::Rc, sync::Arc};

use anyhow::{Context as _, anyhow};
use block::{
    disk::{Disk, Totals},
    export::nbd::Server,
    reactor::{self, JoinHandle, Polling, Worker},
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use policy::throttle::Limits;
use sd_notify::NotifyState;

use crate::{
    Failure,
    cli::ServeArgs,
    config,
    listen::{self, Inherited, SocketFile},
    logging,
    pid_file::PidFile,
    plan::{Draft, Plan, Service},
    signals::{Request, Signals},
};

/// URIs in the line that says `ready`.
const MOST_URIS_SHOWN: usize = 16;

/// Serves until a signal ends it.
///
/// # Errors
/// [`Failure::Usage`] where the command line contradicts itself, [`Failure::Failed`] for everything else.
pub(crate) fn run(arguments: ServeArgs) -> Result<(), Failure> {
    let inherited = Inherited::take();
    let plan = plan(arguments, inherited.count())?;
    logging::start(&plan.service.log);
    let signals = Signals::block().context("signals cannot be blocked")?;
    raise_descriptor_limit();
    let daemon = async move { Daemon::start(&plan, inherited, signals)?.run().await };
    reactor::run(Polling::OFF, daemon)
        .context("io_uring cannot be used (see kernel.io_uring_disabled)")??;
    Ok(())
}

fn plan(arguments: ServeArgs, inherited: usize) -> Result<Plan, Failure> {
    let config = arguments.config.clone();
    let said = arguments.into_draft().map_err(|wrong| Failure::Usage(wrong.into()))?;
    match config {
        None => Plan::new(said, inherited).map_err(|wrong| Failure::Usage(wrong.into())),
        Some(path) => {
            let file = config::load(&path)?;
            let draft = Draft { service: said.service.or(file.service), ..file };
            Ok(Plan::new(draft, inherited)?)
        }
    }
}

/// As many descriptors as the administrator allows: a socket or two and a file for each disk add up. The usual soft
/// limit of 1024 is for programs that use select(2).
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
}

/// What the main thread hears of.
enum Event {
    Signal(Request),
    /// A server can accept no more.
    Broken(anyhow::Error),
    /// Every connection has ended and every disk is flushed, or could not be.
    Finished(anyhow::Result<()>),
}

/// A daemon that serves.
struct Daemon {
    disks: Vec<Arc<Disk>>,
    servers: Vec<Arc<Server>>,
    /// Dropping one ends the accepting.
    accepting: Vec<JoinHandle<()>>,
    /// The threads end once this and the accepting tasks are gone.
    workers: Rc<Vec<Worker>>,
    /// Removed when dropped.
    socket_files: Vec<SocketFile>,
    _pid_file: Option<PidFile>,
    events: (async_channel::Sender<Event>, async_channel::Receiver<Event>),
}

impl Daemon {
    /// Opens, binds and starts everything, and says so.
    fn start(plan: &Plan, inherited: Inherited, signals: Signals) -> anyhow::Result<Self> {
        let events = async_channel::unbounded();
        let sender = events.0.clone();
        signals
            .forward(move |request| sender.try_send(Event::Signal(request)).is_ok())
            .context("the thread that waits for signals")?;
        let disks = assemble::disks(plan)?;
        let servers = assemble::servers(plan, &disks)?;
        let mut daemon = Self {
            disks,
            servers: Vec::new(),
            accepting: Vec::new(),
            workers: Rc::new(start_workers(&plan.service)?),
            socket_files: Vec::new(),
            _pid_file: None,
            events,
        };
        let uris = daemon.listen(plan, servers, inherited)?;
        daemon._pid_file = plan.service.pid_file.as_deref().map(PidFile::write).transpose()?;
        announce(&uris);
        Ok(daemon)
    }

    /// Lets clients in; returns where they find what.
    fn listen(
        &mut self,
        plan: &Plan,
        servers: Vec<Arc<Server>>,
        inherited: Inherited,
    ) -> anyhow::Result<Vec<String>> {
        let mut bound = Vec::new();
        let mut inherited = Some(inherited);
        for (planned, server) in plan.servers.iter().zip(servers) {
            // All addresses first: where one cannot be had, no client should have seen the others.
            bound.push((planned, Arc::clone(&server), listen::open(&planned.endpoint, &mut inherited)?));
            self.servers.push(server);
        }
        let mut uris = Vec::new();
        for (planned, server, listeners) in bound {
            for listener in listeners {
                let of_export =
                    |export: &crate::plan::Export| listener.authority().uri(&export.name, &plan.service.tls);
                uris.extend(planned.exports.iter().map(of_export));
                let (socket, file) = listener.into_parts();
                self.socket_files.extend(file);
                self.accept(Arc::clone(&server), socket);
            }
        }
        // A host name may stand for two addresses, which are one for those who use the name.
        uris.dedup();
        Ok(uris)
    }

    fn accept(&mut self, server: Arc<Server>, socket: std::os::fd::OwnedFd) {
        let workers = Rc::clone(&self.workers);
        let events = self.events.0.clone();
        self.accepting.push(reactor::spawn_joinable(async move {
            if let Err(error) = server.listen(socket.into(), workers).await {
                let error = anyhow!("connections cannot be accepted any more: {error} (restart weir)");
                // Nobody listens only when all ends anyway.
                let _ = events.try_send(Event::Broken(error));
            }
        }));
    }

    /// Waits for the end, and sees to it that it is orderly.
    async fn run(mut self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let mut ending = false;
        loop {
            // The daemon itself holds a sender, so there is always a next event.
            match self.events.1.recv().await.context("the daemon's events ended")? {
                Event::Signal(Request::HangUp) => {
                    tracing::info!("SIGHUP ignored: there is nothing to reload");
                }
                Event::Signal(Request::End(signal)) if ending => {
                    return Err(anyhow!(
                        "{signal}: ended at once, as asked twice (check what was being written)"
                    ));
                }
                Event::Signal(Request::End(signal)) => {
                    tracing::info!(signal, connections = self.connections(), "stopping");
                    ending = true;
                    self.finish();
                }
                Event::Broken(error) if !ending => {
                    tracing::error!("{error:#}");
                    outcome = Err(error);
                    ending = true;
                    self.finish();
                }
                Event::Broken(_) => {}
                Event::Finished(result) => {
                    self.sum_up();
                    tracing::info!("stopped");
                    return outcome.and(result);
                }
            }
        }
    }

    /// Logs what each disk has done, for those that did anything.
    fn sum_up(&self) {
        for disk in &self.disks {
            let totals = disk.totals();
            if totals == Totals::default() {
                continue;
            }
            tracing::info!(
                disk = %disk.name(),
                reads = totals.reads,
                read_bytes = totals.read_bytes,
                writes = totals.writes,
                written_bytes = totals.written_bytes,
                merged_requests = totals.merged_requests,
                "served"
            );
        }
    }

    fn connections(&self) -> usize {
        self.servers.iter().map(|server| server.connections()).sum()
    }

    /// Starts the end: no more clients, what is in flight completes, disks are flushed.
    fn finish(&mut self) {
        notify(&[NotifyState::Stopping]);
        self.accepting.clear();
        // Gone with the listeners, so that the next daemon need not wonder.
        self.socket_files.clear();
        let servers = self.servers.clone();
        let disks = self.disks.clone();
        let events = self.events.0.clone();
        for disk in &disks {
            // What is in flight is to be finished, and a limit could hold it for hours. QEMU's drain lifts limits too.
            if let Err(error) = disk.group().set_limits(Limits::default()) {
                tracing::warn!(disk = %disk.name(), %error, "the limits stay in force");
            }
        }
        reactor::spawn(async move {
            for server in servers {
                server.stop().await;
            }
            let result = flush(&disks).await;
            let _ = events.try_send(Event::Finished(result));
        });
    }
}

/// Flushes every disk, also those after one that fails, and reports the first failure.
async fn flush(disks: &[Arc<Disk>]) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    for disk in disks {
        if let Err(error) = disk.flush().await {
            tracing::error!(disk = %disk.name(), %error, "the last flush failed");
            let name = disk.name();
            outcome = outcome.and(Err(anyhow!(
                "disk {name}: the last flush failed: {error} (what was written since the one before may be lost)"
            )));
        }
    }
    outcome
}

fn start_workers(service: &Service) -> anyhow::Result<Vec<Worker>> {
    let polling = Polling { limit: service.poll };
    let start = |number: usize| Worker::start(&format!("worker {number}"), polling);
    let workers: std::io::Result<_> = (0..service.workers).map(start).collect();
    workers.context("a worker cannot be started (is kernel.io_uring_disabled set, or memory locked scarce?)")
}

fn announce(uris: &[String]) {
    let shown = uris[..uris.len().min(MOST_URIS_SHOWN)].join(" ");
    match uris.len().saturating_sub(MOST_URIS_SHOWN) {
        0 => tracing::info!(exports = %shown, "ready"),
        more => tracing::info!(exports = %shown, more, "ready"),
    }
    notify(&[NotifyState::Ready]);
}

/// Tells the service manager, if there is one.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager at NOTIFY_SOCKET cannot be told");
    }
}
