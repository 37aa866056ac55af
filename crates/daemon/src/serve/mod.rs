//! `weir serve`: from what was said to a running daemon, and back to nothing.
//!
//! ```text
//!   main thread     accepts, hears signals, sees to the end
//!   worker threads  a reactor each; every connection lives on one of them
//! ```
//!
//! Images are opened, keys read and addresses bound before the first client is let in; then rights
//! are given up that nothing of it needs any more, and the log says `ready`. At the end every disk
//! is flushed, and a flush that fails is a failure.

mod arguments;
mod check;
mod memory;
mod steps;
mod watchdog;

use std::{
    collections::{BTreeSet, HashSet},
    future::poll_fn,
    path::{self, Path, PathBuf},
    pin::pin,
    rc::{Rc, Weak},
    task::Poll,
};

use anyhow::{Context as _, anyhow};
pub use arguments::{EXAMPLES, ServeArgs};
use block::{
    disk::Totals,
    reactor::{self, Worker, op::Fd},
    storage::{OpenError, Passed},
};
pub use check::{CHECK_EXAMPLES, CheckArgs, check_config};
use console::{
    Failure, descriptors, figures, logging, on_reactor,
    signals::{Request, Signals},
};
use export::nbd;
use policy::time::Duration;
use sd_notify::NotifyState;
use serde_json::{Map, Value};
use settings::{
    Address, DoorExport, Draft, Endpoint, Place, Plan, Said, Service, ServiceDraft, Standard, Tls, config,
    control::ControlSocket, state::Store,
};
use steps::Steps;

use crate::{
    cluster::{self, Cluster},
    control::{
        assemble::{self, Late},
        held_back,
        inventory::{End, Inventory, RunningDisk},
        loaded::Loaded,
        moving,
        qmp::{self, Control, Ending},
        recording,
        reload::reload,
        serving::Serving,
        takeover::{
            newcomer::{Before, Newcomer},
            told_name,
        },
        wanted::{self, Wanted},
        watch,
    },
    events::{self, Kind, News, actor::Actor},
    http, listen,
    listen::{Inherited, Listener},
    notify,
    on_event::Runner,
    pid_file::{Claimed, PidFile},
    sandbox,
};

/// How often it is looked again whether another daemon still wants to take over.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// How long what a stopped disk holds may take to go back to who asked, at the end.
const TO_GO_BACK: Duration = Duration::from_secs(2);
/// URIs in the line that says `ready`.
const MOST_URIS_SHOWN: usize = 16;

/// Serves until a signal ends it. Calls `ready` once clients are let in.
///
/// # Errors
/// [`Failure::Usage`] where the command line contradicts itself, else [`Failure::Failed`].
pub fn run(mut arguments: ServeArgs, ready: impl FnOnce() + 'static) -> Result<(), Failure> {
    let inherited = Inherited::take();
    let mut steps = std::mem::take(&mut arguments.steps);
    let monitors = steps.take_monitors().map_err(|wrong| Failure::Usage(wrong.into()))?;
    let file = arguments.config.clone();
    let is_checked = arguments.check;
    let takeover = arguments.takeover.take();
    let Start { said, draft } = Start::read(arguments, monitors)?;
    let before = takeover.map(|control| newcomer(control, &draft)).transpose()?;
    let regrets = before.as_ref().map(Newcomer::regrets).transpose()?;
    let passed = before.as_ref().map_or_else(|| inherited.count(), Newcomer::inherited);
    let plan = plan(&draft, file.is_some(), passed)?;
    if is_checked {
        let name = file.map_or_else(|| "weir serve".to_owned(), |path| path.display().to_string());
        return check::check(draft, plan, &name);
    }
    logging::start(&plan.service.log);
    let runner = plan.service.on_event.as_ref().map(|target| Runner::start(target, &plan.service));
    let runner = runner.transpose()?;
    let signals = Signals::block_for_daemon().context("signals cannot be blocked")?;
    descriptors::raise_limit();
    notify::open();
    reactor::threads_must_end();
    memory::set_aside(&plan.service)?;
    on_reactor(async move {
        let file = file.map(|file| (file, said));
        let started = Daemon::start(plan, steps, file, inherited, before, (signals, runner)).await;
        if let (Err(error), Some(regrets)) = (&started, regrets) {
            regrets.tell(error);
        }
        match started? {
            Some(daemon) => {
                ready();
                Ok(daemon.run().await?)
            }
            None => Ok(()),
        }
    })
}

/// Asks the daemon that is to be taken over from: at this control socket, or the one that is to be
/// opened, or where commands find it.
fn newcomer(control: Option<PathBuf>, draft: &Draft) -> Result<Newcomer, Failure> {
    descriptors::raise_limit();
    let user = draft.service.user.as_ref().and_then(|said| said.value.user.as_deref());
    if let Some(control) = control {
        return Ok(Newcomer::ask(&control, user)?);
    }
    for disk in &draft.disks {
        let address = disk.image.value.path().and_then(Path::to_str).filter(|path| path.starts_with("unix:"));
        if let Some(address) = address {
            let place = Place::option("takeover", address);
            let rule = format!("is taken for an image (write --takeover={address})");
            return Err(Failure::Usage(place.wrong(rule).into()));
        }
    }
    let control = match draft.service.qmp.first() {
        Some(said) => said.value.clone(),
        None => ControlSocket::of_commands().map_err(|rule| anyhow!("control socket: {rule}"))?.path,
    };
    Ok(Newcomer::ask(&control, user)?)
}

struct Start {
    /// On the command line.
    said: ServiceDraft,
    /// In all.
    draft: Draft,
}

impl Start {
    fn read(arguments: ServeArgs, monitors: Vec<Said<PathBuf>>) -> Result<Self, Failure> {
        let config = arguments.config.clone();
        let mut draft = arguments.into_draft().map_err(|wrong| Failure::Usage(wrong.into()))?;
        draft.service.qmp.extend(monitors);
        let said = draft.service.clone();
        let draft = match config {
            None => draft,
            Some(path) => {
                let file = config::load(&path)?;
                Draft { service: draft.service.or(file.service), ..file }
            }
        };
        Ok(Self { said, draft })
    }
}

/// What is to run, with so many sockets that were passed.
fn plan(draft: &Draft, is_of_a_file: bool, inherited: usize) -> Result<Plan, Failure> {
    // Without either only steps have been told.
    let plan = match draft.disks.is_empty() && !is_of_a_file {
        true => Plan::without_disks(draft.clone()),
        false => Plan::new(draft.clone(), inherited),
    };
    plan.map_err(|wrong| if is_of_a_file { Failure::from(wrong) } else { Failure::Usage(wrong.into()) })
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
    /// What they look after is told while they are held.
    _watching: Vec<reactor::JoinHandle<()>>,
    _watchdog: Option<reactor::JoinHandle<()>>,
    _http: Option<http::Http>,
    /// Steers limits of control groups; at the end they hold as they are configured: before the
    /// cluster hears that their part is free.
    _cgroups: Option<cgroup::watch::Running>,
    /// Its end leaves the cluster: nothing but the safe share is in force here any more.
    _cluster: Option<cluster::Running>,
    _pid_file: Option<PidFile>,
    events: (async_channel::Sender<Event>, async_channel::Receiver<Event>),
}

impl Daemon {
    /// None where a signal ended it before it was ready.
    async fn start(
        mut plan: Plan,
        steps: Steps,
        file: Option<(PathBuf, ServiceDraft)>,
        inherited: Inherited,
        mut newcomer: Option<Newcomer>,
        (signals, runner): (Signals, Option<Runner>),
    ) -> anyhow::Result<Option<Self>> {
        let events = async_channel::unbounded();
        let sender = events.0.clone();
        let mut signals = signals.hear().context("signals cannot be waited for")?;
        reactor::spawn(async move {
            // Nobody listens only when all ends anyway.
            while let Ok(request) = signals.next().await {
                let _ = sender.try_send(Event::Signal(request));
            }
        });
        let sender = events.0.clone();
        // Nobody listens only when all ends anyway.
        let ender = Rc::new(move |end| drop(sender.try_send(Event::End(end))));
        // Clients may be in another directory.
        let config = file.as_ref().map(|(file, _)| path::absolute(file)).transpose()?;
        let inventory = Inventory::new(config, ender);
        inventory.keep_clients_out();
        // Written once clients can come; whether it may be is known before anything is touched.
        let claim = |path| match newcomer {
            Some(_) => Claimed::open(path).map(Some),
            None => PidFile::check(path).map(|()| None),
        };
        let claimed = plan.service.pid_file.as_deref().map(claim).transpose()?.flatten();
        sandbox::check(&plan)?;
        if let Some(cluster) = Cluster::prepare(&plan).await? {
            let moved = cluster.moved();
            for (disk, host) in &moved {
                tracing::warn!(
                    "disk {disk}: it has moved to host {host}, and is not served here (take [disk.{disk}] out of the config file here, and have it in that of {host}; `weir disk move {disk} --to {}` there brings it back, and if {host} has it no more `weir reload` here does)",
                    cluster.host()
                );
            }
            plan.leave_out(|disk| moved.contains_key(disk));
            inventory.join(cluster);
        }
        let files = newcomer.as_ref().map(|newcomer| newcomer.passed().clone());
        // A key takes seconds to derive, and a pipe may never say its passphrase.
        let mut late = match until_ended(assemble::disks(&plan, &inventory, files), &events.1).await {
            Ok(opened) => opened.map_err(|error| may_have_moved(error, &inventory))?,
            Err(signal) => {
                tracing::info!(signal, "stopping before all disks are open");
                flush_and_close(&inventory.disks()).await?;
                return Ok(None);
            }
        };
        memory::warn_of_disks(&plan.disks);
        inventory.look_at_devices(plan.service.state.as_deref())?;
        let tls = assemble::credentials(&plan.service.tls)?;
        let workers = Rc::new(start_workers(&plan.service)?);
        // Bound before anything is served, and heard once everything is.
        let (sockets, missing) = control_sockets(&plan.service, newcomer.as_mut())?;
        let cgroups = plan.service.cgroup_limits.as_deref();
        let state = plan.service.state.as_deref();
        let lending = inventory.cluster().and_then(|cluster| cluster.lending());
        let steer = match newcomer {
            Some(_) => cgroup::watch::Running::start_after_another,
            None => cgroup::watch::Running::start,
        };
        let cgroups = cgroups.map(|path| steer(path, Store::new(state), lending)).transpose()?;
        inventory.ends_when_idle.set(plan.service.exit_when_idle);
        inventory.watchdog.set(sd_notify::watchdog_enabled().or_else(|| newcomer.as_ref()?.watchdog()));
        let passed = newcomer.as_ref().map_or_else(|| inherited.count(), Newcomer::inherited);
        let told = told(&plan.service, newcomer.as_mut(), tls.as_ref(), &inventory)?;
        let uris = listen(&plan, inherited, newcomer.as_mut(), tls.clone(), &workers, &inventory).await?;
        let before = export_ids(&inventory);
        let done = match until_ended(steps.run(&inventory), &events.1).await {
            Ok(done) => done.map(|()| true),
            Err(signal) => {
                tracing::info!(signal, "stopping before all is done that was told");
                Ok(false)
            }
        };
        let done = match (done, &newcomer) {
            (Ok(true), Some(newcomer)) => newcomer.check_config(&inventory).map(|()| true),
            (done, _) => done,
        };
        let settled = match done {
            Ok(true) => settle(&plan, &inventory, &workers, claimed.is_none()).await.map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        let mut uris = uris;
        uris.extend(uris_beyond(&before, &inventory, &plan.service.tls));
        let settled = match settled {
            Ok(Some(settled)) => {
                match until_ended(late_ones(&plan, &inventory, &mut late), &events.1).await {
                    Ok(Ok(more)) => {
                        uris.extend(more);
                        Ok(Some(settled))
                    }
                    Ok(Err(error)) => Err(error),
                    Err(signal) => {
                        tracing::info!(signal, "stopping before all disks are open");
                        Ok(None)
                    }
                }
            }
            other => other,
        };
        let settled = match (settled, &mut newcomer) {
            (Ok(Some(settled)), Some(newcomer)) => {
                let before = export_ids(&inventory);
                let taken = take_along(newcomer, &inventory, &workers).await;
                uris.extend(uris_beyond(&before, &inventory, &plan.service.tls));
                taken.map(|()| Some(settled))
            }
            (settled, _) => settled,
        };
        let budgets = late.into_budgets();
        let Ok(Some(pid_file)) = settled else {
            for entrance in inventory.entrances() {
                entrance.stop().await;
            }
            let closed = flush_and_close(&inventory.disks()).await;
            return settled.and(closed).map(|()| None);
        };
        let version = newcomer.as_ref().map(|newcomer| newcomer.version().to_owned());
        let before = match newcomer {
            Some(newcomer) => match newcomer.finish(&inventory, &workers).await {
                Ok(before) => Some(before),
                Err(error) => {
                    // Of what is the other's nothing is touched.
                    flush_and_close(&inventory.disks()).await?;
                    return Err(error);
                }
            },
            None => None,
        };
        // From here on nothing may fail: nobody else serves.
        // A thread that starts now has what rights are left.
        let of_cgroups = cgroups.as_ref().and_then(cgroup::watch::Running::figures);
        let http =
            (!told.is_empty()).then(|| http::Http::start(told, &inventory, &workers, of_cgroups)).transpose();
        let http = match http {
            Err(error) if before.is_some() => {
                tracing::error!("{error:#}: nothing can be had over HTTP");
                None
            }
            http => http?,
        };
        let control = Rc::new(Control::start(&inventory, sockets));
        // Before anything happens that is to be told.
        let mut watching = vec![events::log(&inventory.events)];
        watching.extend(runner.and_then(|runner| runner.deliver(&inventory)));
        inventory.let_clients_in();
        let taken_from = version.zip(before.as_ref().map(Before::clients));
        let in_use = match before {
            Some(before) => before.end(&inventory).await,
            None => BTreeSet::new(),
        };
        let pid_file = match claimed {
            Some(claimed) => claimed.take().await,
            None => pid_file,
        };
        if let Some(error) = missing {
            tracing::warn!(
                "{error:#}; `weir status` and others will not find this daemon (name a control socket of its \
                 own with --qmp unix:PATH, or say --no-control)"
            );
        }
        announce(&uris);
        inventory.loaded.replace(
            file.map(|(file, said)| Rc::new(Loaded { file, said, inherited: passed, plan, tls, budgets })),
        );
        watching.extend([held_back::watch(&inventory), watch::watch(&inventory, in_use)]);
        if let Some((version, clients)) = taken_from {
            let message = format!(
                "this daemon goes on where one of version {version} stood, with {}",
                figures::counted(clients as u64, "client")
            );
            let news = News::new(Kind::TakenOver, message).with("version", version).with("clients", clients);
            inventory.events.tell(news);
        }
        let around: Weak<Inventory> = Rc::downgrade(&inventory);
        let cluster = inventory.cluster().map(|cluster| cluster.start(around)).transpose();
        let cluster = cluster.unwrap_or_else(|error| {
            tracing::error!("{error:#}: the cluster's safe share holds (restart weir)");
            None
        });
        watching.extend(moving::receive(&inventory));
        let watched = inventory.watchdog.get().map(|allowed| watchdog::start(allowed, &workers));
        let (_watching, _watchdog) = (watching, watched);
        let (_pid_file, _cgroups, _http, _cluster) = (pid_file, cgroups, http, cluster);
        Ok(Some(Self {
            inventory,
            control,
            _watching,
            _watchdog,
            _http,
            _cluster,
            _pid_file,
            _cgroups,
            events,
        }))
    }

    async fn run(self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let mut ending = false;
        loop {
            // The daemon itself holds a sender, so there is always a next event.
            match self.events.1.recv().await.context("the daemon's events ended")? {
                Event::Signal(request @ Request::Meaningless(_)) => ignore(request),
                // What is about to end is not changed any more.
                Event::Signal(Request::HangUp) if ending => {}
                Event::Signal(Request::HangUp) => {
                    let inventory = Rc::clone(&self.inventory);
                    reactor::spawn(async move { hang_up(&inventory).await });
                }
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
        self.inventory.ending.set(true);
        notify::tell(&[NotifyState::Stopping]);
        let servers = self.inventory.servers();
        for serving in &servers {
            serving.close();
        }
        let entrances = self.inventory.entrances();
        entrances.iter().for_each(|entrance| entrance.leave());
        let disks = self.inventory.disks();
        let mut stopped = Vec::new();
        for running in &disks {
            // A limit could hold what is in flight for hours. QEMU's drain lifts limits too.
            running.disk.throttle().lift();
            // And an error could hold it until somebody comes.
            match running.disk.failures().stopped_by() {
                Some(_) => stopped.push(Rc::clone(running)),
                None => running.disk.failures().lift(),
            }
        }
        let control = Rc::clone(&self.control);
        let control = reactor::spawn_joinable(async move { control.stop(ending).await });
        let (events, inventory) = (self.events.0.clone(), Rc::clone(&self.inventory));
        reactor::spawn(async move {
            // Images that were laid down for another are taken up before they are closed.
            while inventory.leaving.get() {
                reactor::sleep_until(reactor::now() + LOOK_AGAIN).await;
            }
            if !stopped.is_empty() {
                // What they hold goes back into rings and to devices, for who serves these next.
                let all_gone = async {
                    for entrance in &entrances {
                        entrance.until_unused().await;
                    }
                };
                let _ = reactor::timeout(TO_GO_BACK, all_gone).await;
                // What cannot go back is answered with the error that stopped its disk.
                stopped.iter().for_each(|running| running.disk.failures().lift());
            }
            for serving in servers {
                serving.stop().await;
            }
            for entrance in entrances {
                entrance.stop().await;
            }
            control.await;
            let result = flush_and_close(&disks).await;
            inventory.recordings.end_all().await;
            let _ = events.try_send(Event::Finished(result));
        });
    }
}

/// Where an image is another's, and nobody could be asked whether its disk has gone there.
fn may_have_moved(error: anyhow::Error, inventory: &Inventory) -> anyhow::Error {
    let is_locked = |cause: &OpenError| cause.why.contains("locked");
    let is_anothers = error.chain().any(|cause| cause.downcast_ref().is_some_and(is_locked));
    match inventory.cluster().and_then(|cluster| cluster.unasked()).filter(|_| is_anothers) {
        Some(why) => anyhow!(
            "{error:#}; or the disk has moved to another host of the cluster, which could not be asked: {why} (then take it out of the config file here)"
        ),
        None => error,
    }
}

/// Those that were named, and the one that nobody named, or why that cannot be had. A daemon does
/// without that one, unless it must not: it may be the second on this machine.
fn control_sockets(
    service: &Service,
    mut newcomer: Option<&mut Newcomer>,
) -> anyhow::Result<(Vec<Listener>, Option<anyhow::Error>)> {
    let owner = service.user.as_ref();
    let mut open = |place: ControlSocket| {
        let taken = newcomer.as_mut().map(|newcomer| newcomer.control(&place.path)).transpose()?;
        taken.flatten().map_or_else(|| listen::control(&place, owner), Ok)
    };
    let named = |path: &PathBuf| open(ControlSocket::at(path.clone()));
    let mut sockets: Vec<_> = service.qmp.iter().map(named).collect::<anyhow::Result<_>>()?;
    if service.control == Standard::Off {
        return Ok((sockets, None));
    }
    let place = ControlSocket::of_daemon().map_err(|rule| anyhow!("control socket: {rule}"));
    match place.and_then(open) {
        Ok(listener) => sockets.push(listener),
        Err(error) if service.control == Standard::Must => return Err(error),
        Err(error) => return Ok((sockets, Some(error))),
    }
    Ok((sockets, None))
}

/// Where figures are asked for over HTTP: bound, or another daemon's. The inventory knows it too,
/// for the next one.
fn told(
    service: &Service,
    mut newcomer: Option<&mut Newcomer>,
    tls: Option<&nbd::Tls>,
    inventory: &Inventory,
) -> anyhow::Result<http::Doors> {
    let mut open = |what: &'static str, address: &Address| -> anyhow::Result<Vec<Listener>> {
        let taken = newcomer.as_mut().map(|newcomer| newcomer.told(what, address)).transpose()?;
        let bind = || http::bind(what, address, &service.sockets);
        let listeners = taken.flatten().map_or_else(bind, Ok)?;
        let known = listeners.iter().map(|listener| -> std::io::Result<_> {
            let path = listener.file.as_ref().map(|file| file.path().to_owned());
            Ok((Fd::from(listener.socket.try_clone()?), path))
        });
        let known = known.collect::<Result<_, _>>().context(what)?;
        inventory.told.borrow_mut().push((told_name(what, address), known));
        Ok(listeners)
    };
    let metrics = service.metrics.as_ref().map(|address| open("metrics", address)).transpose()?;
    let page = |page: &settings::Http| -> anyhow::Result<_> {
        let token = page.token_file.as_deref().map(http::Token::read).transpose()?;
        let is_encrypted = page.is_encrypted(&service.tls);
        if !is_encrypted && !page.is_local() {
            tracing::warn!(
                at = %page.address,
                "http: everybody on the way reads the names of disks and what they do (set tls-certificates, or use an address of this host alone)"
            );
        }
        let keys = tls.filter(|_| is_encrypted).map(|tls| tls.keys.clone());
        let listeners = open("http", &page.address)?;
        Ok(http::Page { listeners, names: page.names.clone(), token, keys })
    };
    Ok(http::Doors { metrics, page: service.http.as_ref().map(page).transpose()? })
}

/// SIGHUP: the config file is read again, and the log says what came of it.
async fn hang_up(inventory: &Rc<Inventory>) {
    // For `Type=notify-reload`, also where there is nothing to do: see sd_notify(3).
    let mut began = vec![NotifyState::Reloading];
    began.extend(NotifyState::monotonic_usec_now().ok());
    notify::tell(&began);
    match Actor::Signal.run(reload(inventory)).await {
        Ok(changes) => {
            for change in &changes {
                tracing::info!(%change, "SIGHUP: reloaded");
            }
            tracing::info!(changes = changes.len(), "SIGHUP: the config file was read again");
        }
        Err(error) => tracing::error!("SIGHUP: nothing has changed: {error:#}"),
    }
    notify::tell(&[NotifyState::Ready]);
}

fn ignore(request: Request) {
    match request {
        Request::HangUp => tracing::info!("SIGHUP ignored: weir is starting"),
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

/// Binds every address, or takes it over, and lets nobody in yet; returns the exports' URIs.
async fn listen(
    plan: &Plan,
    mut inherited: Inherited,
    mut newcomer: Option<&mut Newcomer>,
    tls: Option<nbd::Tls>,
    workers: &Rc<Vec<Worker>>,
    inventory: &Rc<Inventory>,
) -> anyhow::Result<Vec<String>> {
    if let Some(newcomer) = &mut newcomer {
        newcomer.pass_machines(&mut inherited)?;
    }
    for DoorExport { door, .. } in &plan.doors {
        door.passed().map(|name| inherited.keep(name)).transpose()?;
    }
    for settings::Server { endpoint, .. } in &plan.servers {
        let is_others = newcomer.as_ref().is_some_and(|newcomer| newcomer.has_server(endpoint));
        if let (Endpoint::Passed(name), false) = (endpoint, is_others) {
            inherited.keep(name)?;
        }
    }
    // All addresses first: where one fails, no client should have seen the others.
    let open = |server: &settings::Server| {
        let taken = newcomer.as_mut().map(|newcomer| newcomer.listeners(&server.endpoint)).transpose()?;
        match taken.flatten() {
            Some(listeners) => Ok(listeners),
            None => listen::open(&server.endpoint, &plan.service.sockets, &mut inherited),
        }
    };
    let listeners: Vec<_> = plan.servers.iter().map(open).collect::<anyhow::Result<_>>()?;
    for (planned, listeners) in plan.servers.iter().zip(listeners) {
        let server = nbd::Server::new(tls.clone(), assemble::terms(&plan.service, &inventory.events));
        inventory.add_server(&Serving::new(server, planned.endpoint.clone(), listeners, workers));
    }
    let terms = assemble::terms(&plan.service, &inventory.events);
    inventory.let_doors(workers, &plan.service.sockets, terms, inherited);
    exports(plan, inventory, newcomer.as_deref(), |disk| !assemble::is_late(disk)).await
}

/// Has the exports of these disks run; returns their URIs.
async fn exports(
    plan: &Plan,
    inventory: &Rc<Inventory>,
    newcomer: Option<&Newcomer>,
    which: impl Fn(&settings::Disk) -> bool,
) -> anyhow::Result<Vec<String>> {
    let names: HashSet<_> = plan.disks.iter().filter(|disk| which(disk)).map(|disk| &disk.name).collect();
    let mut uris = Vec::new();
    for wanted in Wanted::all(plan).iter().filter(|wanted| names.contains(&wanted.disk)) {
        if newcomer.as_ref().is_some_and(|newcomer| newcomer.puts_off(wanted, inventory)) {
            uris.push(wanted.told(inventory).1);
            continue;
        }
        let export = wanted.add(inventory).await?;
        uris.extend(wanted::uris(&export, &plan.service.tls));
    }
    Ok(uris)
}

/// Opens what is opened in the sandbox, with its exports; returns their URIs.
async fn late_ones(plan: &Plan, inventory: &Rc<Inventory>, late: &mut Late) -> anyhow::Result<Vec<String>> {
    late.open(plan, inventory, assemble::is_late).await?;
    exports(plan, inventory, None, assemble::is_late).await
}

/// Of exports that there are, or are to be.
fn export_ids(inventory: &Inventory) -> HashSet<String> {
    let running = inventory.exports().into_iter().map(|export| export.id.clone());
    running.chain(inventory.awaited.borrow().keys().cloned()).collect()
}

/// How clients call those exports that have come since there were these.
fn uris_beyond(before: &HashSet<String>, inventory: &Inventory, tls: &Tls) -> Vec<String> {
    let running = inventory.exports();
    let running = running.iter().filter(|export| !before.contains(&export.id));
    let awaited = inventory.awaited.borrow();
    let awaited = awaited.iter().filter(|(id, _)| !before.contains(*id)).map(|(_, door)| door.address());
    running.flat_map(|export| wanted::uris(export, tls)).chain(awaited).collect()
}

/// Has what only the other has, and looks whether anything is left that it has.
async fn take_along(
    newcomer: &mut Newcomer,
    inventory: &Rc<Inventory>,
    workers: &Rc<Vec<Worker>>,
) -> anyhow::Result<()> {
    let perform = async |command: &str, arguments: Map<String, Value>| {
        qmp::perform_sent(inventory, command, arguments).await
    };
    let add_disk =
        async |nodes: &[Map<String, Value>], files: Passed| qmp::add_again(inventory, nodes, files).await;
    let added = newcomer.have_added(inventory, workers, perform, add_disk).await?;
    if !added.is_empty() {
        let added = added.join(", ");
        tracing::info!(%added, "comes along, though no config has it (`--save` is for that)");
    }
    newcomer.check(inventory)
}

/// The last that takes rights, and then without them.
async fn settle(
    plan: &Plan,
    inventory: &Inventory,
    workers: &[Worker],
    is_alone: bool,
) -> anyhow::Result<Option<PidFile>> {
    let pid_file = plan.service.pid_file.as_deref().filter(|_| is_alone).map(PidFile::write).transpose()?;
    let awaited = inventory.awaited.borrow().values().cloned().collect::<Vec<_>>();
    let is_of_late = |export: &&DoorExport| assemble::is_late(&plan.disks[export.disk]);
    let doors_of_late = plan.doors.iter().filter(is_of_late).map(|export| export.door.clone());
    let served = sandbox::Served {
        images: inventory.disks().iter().filter_map(|disk| disk.image.path().map(Path::to_owned)).collect(),
        endpoints: inventory.servers().iter().map(|serving| serving.endpoint.clone()).collect(),
        remotes: inventory.disks().iter().filter_map(|disk| disk.image.remote().cloned()).collect(),
        doors: inventory
            .exports()
            .iter()
            .filter_map(|export| export.said.clone())
            .chain(doors_of_late)
            .chain(awaited)
            .collect(),
        cluster: plan.disks.iter().any(assemble::is_late)
            || inventory.disks().iter().any(|disk| disk.image.is_rbd()),
        etcd_ports: plan.service.cluster.as_ref().map(cluster::ports).unwrap_or_default(),
        own: (plan.service.cluster.as_ref())
            .and_then(|known| cluster::directory(plan.service.state.as_deref(), known))
            .into_iter()
            .collect(),
    };
    if let Some(entered) = sandbox::enter(plan, inventory.config.as_deref(), &served, workers).await? {
        inventory.enter(entered);
    }
    // By who it is now, with the rights that are left.
    if let Some(record) = &plan.service.record {
        recording::check(record)?;
        inventory.recordings.keep(record)?;
    }
    Ok(pid_file)
}

/// Also those beside one that fails; reports the first failure.
async fn flush_and_close(disks: &[Rc<RunningDisk>]) -> anyhow::Result<()> {
    // All at once: one whose storage stands still keeps no other from being flushed.
    let tasks: Vec<_> =
        disks.iter().cloned().map(|disk| reactor::spawn_joinable(flush_and_close_one(disk))).collect();
    let mut outcome = Ok(());
    for task in tasks {
        outcome = outcome.and(task.await);
    }
    outcome
}

async fn flush_and_close_one(running: Rc<RunningDisk>) -> anyhow::Result<()> {
    let RunningDisk { disk, .. } = &*running;
    if disk.is_anothers() {
        return Ok(());
    }
    let name = disk.name();
    if let Err(error) = disk.flush().await {
        tracing::error!(disk = %name, %error, "the last flush failed");
        return Err(anyhow!(
            "disk {name}: the last flush failed: {error} (what was written since the one before may be lost)"
        ));
    }
    if let Err(error) = disk.close().await {
        tracing::error!(disk = %name, %error, "closing the image failed");
        return Err(anyhow!(
            "disk {name}: its image could not be closed: {error} (`weir image check` tells what is left to mend)"
        ));
    }
    Ok(())
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
    notify::tell(&[NotifyState::Ready]);
}
