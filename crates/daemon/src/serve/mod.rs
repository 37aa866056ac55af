//! `weir serve`: from what was said to a running daemon, and back to nothing.
//!
//! ```text
//!   main thread     accepts, hears signals, sees to the end
//!   worker threads  a reactor each; every connection lives on one of them
//!   signals         waits for SIGTERM, SIGINT, SIGHUP and tells the main thread
//! ```
//!
//! Images are opened, keys read and addresses bound before the first client is let in; then the log
//! says `ready`. At the end every disk is flushed, and a flush that fails is a failure.

mod arguments;
mod assemble;
mod memory;
mod steps;
mod watchdog;

use std::{
    future::poll_fn,
    path::{self, PathBuf},
    pin::pin,
    rc::Rc,
    task::Poll,
};

use anyhow::{Context as _, anyhow};
pub use arguments::{EXAMPLES, ServeArgs};
use block::{
    disk::Totals,
    reactor::{self, Worker},
};
use console::{
    Failure, descriptors, logging, on_reactor,
    signals::{Request, Signals},
};
use export::nbd;
use sd_notify::NotifyState;
use settings::{
    Door, DoorExport, Draft, Plan, Said, Service, Socket, Standard, VhostUserBlk, config,
    control::ControlSocket, state::Store,
};
use steps::Steps;

use crate::{
    control::{
        bitmaps, held_back,
        inventory::{End, Inventory, NewExport, RunningDisk},
        qmp::{Control, Ending},
        serving::Serving,
    },
    listen,
    listen::{Inherited, Listener},
    pid_file::PidFile,
};

/// URIs in the line that says `ready`.
const MOST_URIS_SHOWN: usize = 16;

/// Serves until a signal ends it. Calls `ready` once clients are let in.
///
/// # Errors
/// [`Failure::Usage`] where the command line contradicts itself, else [`Failure::Failed`].
pub fn run(mut arguments: ServeArgs, ready: impl FnOnce() + 'static) -> Result<(), Failure> {
    let inherited = Inherited::take();
    // Clients may be in another directory.
    let config = arguments.config.as_deref().map(path::absolute).transpose()?;
    let mut steps = std::mem::take(&mut arguments.steps);
    let monitors = steps.take_monitors().map_err(|wrong| Failure::Usage(wrong.into()))?;
    let plan = plan(arguments, monitors, inherited.count())?;
    logging::start(&plan.service.log);
    let signals = Signals::block_for_daemon().context("signals cannot be blocked")?;
    descriptors::raise_limit();
    memory::set_aside(&plan.service)?;
    on_reactor(async move {
        match Daemon::start(&plan, steps, config, inherited, signals).await? {
            Some(daemon) => {
                ready();
                Ok(daemon.run().await?)
            }
            None => Ok(()),
        }
    })
}

fn plan(arguments: ServeArgs, monitors: Vec<Said<PathBuf>>, inherited: usize) -> Result<Plan, Failure> {
    let config = arguments.config.clone();
    let mut said = arguments.into_draft().map_err(|wrong| Failure::Usage(wrong.into()))?;
    said.service.qmp.extend(monitors);
    match config {
        // Only steps are left to have been told.
        None if said.disks.is_empty() => {
            Plan::without_disks(said).map_err(|wrong| Failure::Usage(wrong.into()))
        }
        None => Plan::new(said, inherited).map_err(|wrong| Failure::Usage(wrong.into())),
        Some(path) => {
            let file = config::load(&path)?;
            let draft = Draft { service: said.service.or(file.service), ..file };
            Ok(Plan::new(draft, inherited)?)
        }
    }
}

enum Event {
    Signal(Request),
    End(End),
    /// Every connection has ended and every disk is flushed, or could not be.
    Finished(anyhow::Result<()>),
}

struct Daemon {
    inventory: Rc<Inventory>,
    control: Rc<Control>,
    _held_back: reactor::JoinHandle<()>,
    _watchdog: Option<reactor::JoinHandle<()>>,
    _pid_file: Option<PidFile>,
    /// Steers limits of control groups; at the end they hold as they are configured.
    _cgroups: Option<cgroup::watch::Running>,
    events: (async_channel::Sender<Event>, async_channel::Receiver<Event>),
}

impl Daemon {
    /// None where a signal ended it before it was ready.
    async fn start(
        plan: &Plan,
        steps: Steps,
        config: Option<PathBuf>,
        inherited: Inherited,
        signals: Signals,
    ) -> anyhow::Result<Option<Self>> {
        let events = async_channel::unbounded();
        let sender = events.0.clone();
        signals
            .forward(move |request| sender.try_send(Event::Signal(request)).is_ok())
            .context("the thread that waits for signals")?;
        let sender = events.0.clone();
        // Nobody listens only when all ends anyway.
        let ender = Rc::new(move |end| drop(sender.try_send(Event::End(end))));
        let inventory = Inventory::new(config, ender);
        // Written once clients can come; whether it may be is known before anything is touched.
        plan.service.pid_file.as_deref().map(PidFile::check).transpose()?;
        // A key takes seconds to derive, and a pipe may never say its passphrase.
        match until_ended(assemble::disks(plan, &inventory), &events.1).await {
            Ok(opened) => opened?,
            Err(signal) => {
                tracing::info!(signal, "stopping before all disks are open");
                flush_and_close(&inventory.disks()).await?;
                return Ok(None);
            }
        }
        memory::warn_of_disks(&plan.disks);
        inventory.look_at_devices(plan.service.state.as_deref())?;
        let tls = assemble::credentials(&plan.service.tls)?;
        let workers = Rc::new(start_workers(&plan.service)?);
        // Bound before anything is served, and heard once everything is.
        let mut sockets = control_sockets(&plan.service)?;
        let cgroups = plan.service.cgroup_limits.as_deref();
        let state = plan.service.state.as_deref();
        let cgroups =
            cgroups.map(|path| cgroup::watch::Running::start(path, Store::new(state))).transpose()?;
        inventory.ends_when_idle.set(plan.service.exit_when_idle);
        let uris = listen(plan, inherited, tls, &workers, &inventory).await?;
        let done = match until_ended(steps.run(&inventory), &events.1).await {
            Ok(done) => done.map(|()| true),
            Err(signal) => {
                tracing::info!(signal, "stopping before all is done that was told");
                Ok(false)
            }
        };
        if !matches!(done, Ok(true)) {
            for entrance in inventory.entrances() {
                entrance.stop().await;
            }
            let closed = flush_and_close(&inventory.disks()).await;
            return done.and(closed).map(|()| None);
        }
        sockets.extend(standard_socket(&plan.service)?);
        let control = Rc::new(Control::start(&inventory, sockets));
        let pid_file = plan.service.pid_file.as_deref().map(PidFile::write).transpose()?;
        announce(&uris);
        let held_back = held_back::watch(&inventory);
        let (_held_back, _watchdog) = (held_back, watchdog::start(&workers));
        let (_pid_file, _cgroups) = (pid_file, cgroups);
        Ok(Some(Self { inventory, control, _held_back, _watchdog, _pid_file, _cgroups, events }))
    }

    async fn run(self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let mut ending = false;
        loop {
            // The daemon itself holds a sender, so there is always a next event.
            match self.events.1.recv().await.context("the daemon's events ended")? {
                Event::Signal(request @ (Request::HangUp | Request::Meaningless(_))) => ignore(request),
                Event::Signal(Request::EndAtOnce(signal)) => {
                    return Err(anyhow!(
                        "{signal}: ended at once, as asked twice (check what was being written)"
                    ));
                }
                // It may only repeat what a client has asked for with `quit`.
                Event::Signal(Request::End(_)) | Event::End(_) if ending => {}
                Event::Signal(Request::End(signal)) => {
                    ending = true;
                    self.finish(signal, Ending::Signal);
                }
                Event::End(End::Asked) => {
                    ending = true;
                    self.finish("quit", Ending::Quit);
                }
                Event::End(End::Idle) => {
                    ending = true;
                    self.finish("idle", Ending::Quit);
                }
                Event::End(End::Broken(error)) => {
                    tracing::error!("{error:#}");
                    outcome = Err(error);
                    ending = true;
                    self.finish("broken", Ending::Failure);
                }
                Event::Finished(result) => {
                    self.sum_up();
                    tracing::info!("stopped");
                    return outcome.and(result);
                }
            }
        }
    }

    fn sum_up(&self) {
        for RunningDisk { disk, .. } in self.inventory.disks().iter().map(AsRef::as_ref) {
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

    /// Starts the end; `signal` is a signal's name, or another word that says why.
    fn finish(&self, signal: &str, ending: Ending) {
        tracing::info!(signal, connections = self.inventory.connections(), "stopping");
        notify(&[NotifyState::Stopping]);
        let servers = self.inventory.servers();
        for serving in &servers {
            serving.close();
        }
        let entrances = self.inventory.entrances();
        entrances.iter().for_each(|entrance| entrance.leave());
        let disks = self.inventory.disks();
        for RunningDisk { disk, .. } in disks.iter().map(AsRef::as_ref) {
            // A limit could hold what is in flight for hours. QEMU's drain lifts limits too.
            disk.throttle().lift();
            // And an error could hold it until somebody comes.
            disk.failures().lift();
        }
        let control = Rc::clone(&self.control);
        let control = reactor::spawn_joinable(async move { control.stop(ending).await });
        let events = self.events.0.clone();
        reactor::spawn(async move {
            for serving in servers {
                serving.stop().await;
            }
            for entrance in entrances {
                entrance.stop().await;
            }
            control.await;
            let result = flush_and_close(&disks).await;
            let _ = events.try_send(Event::Finished(result));
        });
    }
}

fn control_sockets(service: &Service) -> anyhow::Result<Vec<Listener>> {
    let named = |path: &PathBuf| listen::control(&ControlSocket::at(path.clone()));
    service.qmp.iter().map(named).collect()
}

/// The control socket that nobody named. A daemon does without it, unless it must not: it may be
/// the second on this machine.
fn standard_socket(service: &Service) -> anyhow::Result<Option<Listener>> {
    if service.control == Standard::Off {
        return Ok(None);
    }
    let place = ControlSocket::of_daemon().map_err(|rule| anyhow!("control socket: {rule}"));
    match place.and_then(|place| listen::control(&place)) {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if service.control == Standard::Must => Err(error),
        Err(error) => {
            tracing::warn!(
                "{error:#}; `weir status` and others will not find this daemon (name a socket of its own with \
                 --qmp unix:PATH, or say --no-control)"
            );
            Ok(None)
        }
    }
}

fn ignore(request: Request) {
    match request {
        Request::HangUp => tracing::info!("SIGHUP ignored: there is nothing to reload"),
        Request::Meaningless(signal) => tracing::info!("{signal} ignored: it means nothing to weir"),
        Request::End(_) | Request::EndAtOnce(_) => {}
    }
}

/// What `work` comes to, or the signal that ended the daemon before.
async fn until_ended<T>(
    work: impl Future<Output = T>,
    events: &async_channel::Receiver<Event>,
) -> Result<T, &'static str> {
    let mut work = pin!(work);
    let mut ended = pin!(async {
        loop {
            match events.recv().await {
                Ok(Event::Signal(Request::End(signal) | Request::EndAtOnce(signal))) => return signal,
                Ok(Event::Signal(request)) => ignore(request),
                // Nothing else happens before the daemon serves.
                Ok(_) => {}
                Err(_) => std::future::pending::<()>().await,
            }
        }
    });
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending => ended.as_mut().poll(context).map(Err),
    })
    .await
}

/// Binds every address, then lets clients in; returns the exports' URIs.
async fn listen(
    plan: &Plan,
    mut inherited: Inherited,
    tls: Option<nbd::Tls>,
    workers: &Rc<Vec<Worker>>,
    inventory: &Rc<Inventory>,
) -> anyhow::Result<Vec<String>> {
    for DoorExport { door, .. } in &plan.doors {
        door.passed().map(|name| inherited.keep(name)).transpose()?;
    }
    // All addresses first: where one fails, no client should have seen the others.
    let open =
        |server: &settings::Server| listen::open(&server.endpoint, &plan.service.sockets, &mut inherited);
    let listeners: Vec<_> = plan.servers.iter().map(open).collect::<Result<_, _>>()?;
    let mut uris = Vec::new();
    for (planned, listeners) in plan.servers.iter().zip(listeners) {
        let server = nbd::Server::new(tls.clone(), assemble::terms(&plan.service));
        let serving = Serving::new(server, listeners, workers);
        inventory.add_server(&serving);
        for export in &planned.exports {
            uris.extend(serving.uris(&export.name, &plan.service.tls));
            add_export(plan, export, &serving, inventory).await?;
        }
    }
    inventory.let_doors(workers, &plan.service.sockets, inherited);
    for DoorExport { door, disk: index } in &plan.doors {
        let disk = inventory.disk(&plan.disks[*index].name)?;
        let name = disk.disk.name();
        let id = match inventory.export(name) {
            Ok(_) => format!("{name}@{}", door.address()),
            Err(_) => name.to_string(),
        };
        let address = inventory.add_door(id, disk, plan.disks[*index].read_only, door).await?;
        uris.push(match door {
            // Where the machine listens, only weir is to connect.
            Door::VhostUserBlk(machine) if machine.client => format!("{address},client"),
            Door::VhostUserBlk(VhostUserBlk { socket: Socket::Path(path), .. }) => {
                format!("vhost-user:{}", path::absolute(path)?.display())
            }
            _ => address,
        });
    }
    // Who comes first finds everything: bitmaps are read for an export to be added.
    for serving in inventory.servers() {
        let ender = Rc::clone(&inventory.ender);
        serving.accept(move |error| ender(End::Broken(error)));
    }
    Ok(uris)
}

async fn add_export(
    plan: &Plan,
    export: &settings::Export,
    serving: &Rc<Serving>,
    inventory: &Inventory,
) -> anyhow::Result<()> {
    let disk = &plan.disks[export.disk];
    // The name is the id, unless it is empty, or a disk has the same name at several servers.
    let name = if export.name.is_empty() { &disk.name } else { &export.name };
    let id = match inventory.export(name) {
        Ok(_) => format!("{name}@{}", serving.address()),
        Err(_) => name.clone(),
    };
    let new = NewExport {
        id,
        name: export.name.clone(),
        description: disk.description.clone(),
        disk: disk.name.clone(),
        read_only: disk.read_only,
        bitmaps: bitmaps::of_image(&*inventory.disk(&disk.name)?, &disk.qcow2.bitmaps).await?,
    };
    Ok(inventory.add_export(serving, new)?)
}

/// Also those after one that fails; reports the first failure.
async fn flush_and_close(disks: &[Rc<RunningDisk>]) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    for RunningDisk { disk, .. } in disks.iter().map(AsRef::as_ref) {
        if let Err(error) = disk.flush().await {
            tracing::error!(disk = %disk.name(), %error, "the last flush failed");
            let name = disk.name();
            outcome = outcome.and(Err(anyhow!(
                "disk {name}: the last flush failed: {error} (what was written since the one before may be lost)"
            )));
            continue;
        }
        if let Err(error) = disk.close().await {
            tracing::error!(disk = %disk.name(), %error, "closing the image failed");
            let name = disk.name();
            outcome = outcome.and(Err(anyhow!(
                "disk {name}: its image could not be closed: {error} (`weir image check` tells what is left to mend)"
            )));
        }
    }
    outcome
}

fn start_workers(service: &Service) -> anyhow::Result<Vec<Worker>> {
    let start = |number: usize| Worker::start(&format!("worker {number}"), service.poll);
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

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager at NOTIFY_SOCKET cannot be told");
    }
}
