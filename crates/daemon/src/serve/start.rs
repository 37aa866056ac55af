//! Starts a daemon from its desired state.
//!
//! ```text
//!   open ─► bind ─► reconcile ─► sandbox ─► late disks ─► take over ─► clients ─► ready
//!   └──────────── a failure here leaves everything unchanged ─────┘
//! ```
//!
//! Accepts no client before everything is ready, and never fails after an old process has handed
//! over its state.

use std::{
    collections::BTreeSet,
    path::{self, Path, PathBuf},
    rc::{Rc, Weak},
};

use anyhow::{Context as _, anyhow};
use cluster::{self, ClusterMembership};
use console::{figures, signals::BlockedSignals};
use control::{
    assemble,
    events::{self, Kind, NewEvent},
    listen::InheritedSockets,
    loaded_config::LoadedConfig,
    migration,
    qmp::{self, ControlSockets},
    reconcile::{
        PlanDifference, ReconcileReason, Reconciliation,
        source::{FreshStart, StartSource},
    },
    recording,
    registry::Registry,
    schedules,
    upgrade::{
        given_up::AbandonedUpgrade,
        new_process::{NewProcess, OldProcess},
    },
    watch,
};
use export::{fuse, nbd};
use image::Image;
use reactor::ReactorWorker;
use sandbox;
use serde_json::{Map, Value};
use settings::{
    ConfigWithOrigins, DaemonConfig, DesiredState, ExportSpec, ExportTarget, state::CapacityStore,
};
use storage::{OpenError, OwnMount, PassedFiles, rate::RateBudgets};

use super::{
    Daemon, DaemonEvent, DaemonEvents,
    bind::{BoundAddresses, bind, export_ids, uris_beyond},
    memory,
    qemu_options::QemuSteps,
    ready::announce,
    shutdown::{flush_and_close, until_signal},
    watchdog,
};
use crate::{
    on_event::EventRunner,
    pid_file::{ClaimedPidFile, PidFile},
};

/// Goal of the first part of the start; logged if a signal ends the start before it.
const DISKS_OPEN: &str = "all disks are open";

/// Inputs of a start.
pub(super) struct DaemonStart {
    pub(super) plan: DesiredState,
    pub(super) steps: QemuSteps,
    /// The config file, and the options of the command line beside it.
    pub(super) file: Option<(PathBuf, ConfigWithOrigins<DaemonConfig>)>,
    pub(super) inherited: InheritedSockets,
    /// The process to take over from, in an upgrade.
    pub(super) old: Option<NewProcess>,
    pub(super) signals: BlockedSignals,
    pub(super) runner: Option<EventRunner>,
}

impl Daemon {
    /// Starts the daemon; `None` if a signal ended it before it was ready.
    pub(super) async fn start(start: DaemonStart) -> anyhow::Result<Option<Self>> {
        let DaemonStart { mut plan, steps, file, inherited, mut old, signals, runner } = start;
        let events = event_channel(signals)?;
        let registry = empty_registry(file.as_ref().map(|(file, _)| &**file), &plan, &events)?;
        // Held during the start: no other change runs, so no unavailable disk is listed meanwhile.
        let guard = registry.lifecycle.structure_lock.try_lock();
        let is_upgrade = old.is_some();
        let mut given_up = AbandonedUpgrade::observe(old.as_ref())?;
        let claimed = claim(&plan, is_upgrade)?;
        // Cheap checks come before anything that another process could notice.
        sandbox::check(&plan)?;
        join_cluster(&mut plan, &registry).await?;
        let plan = Rc::new(plan);
        // Files that the old process still serves over FUSE: no image may be stored on one of them.
        let _fuse_files = is_upgrade.then(|| files_over_fuse(&plan));
        let mut fresh = FreshStart;
        let source: &mut dyn StartSource = match &mut old {
            Some(old) => old,
            None => &mut fresh,
        };
        let tls = assemble::read_tls_credentials(&plan.process.tls)?;
        let budgets = RateBudgets::default();
        let opening = StartWithImages::open(&plan, &registry, tls.clone(), budgets.clone(), source);
        let opening = given_up.run_unless_abandoned(opening);
        // Interruptible: deriving a key takes seconds, and a pipe may never deliver its passphrase.
        let Some(opened) = until_signal(opening, DISKS_OPEN, &events.1).await else { return Ok(None) };
        let opened = opened?;
        // After the images: an address must not accept connections for a disk that cannot be
        // opened.
        let bound = bind(&plan, &registry, tls.as_ref(), inherited, &mut *source)?;
        let cgroups = start_cgroups(&plan, &registry, is_upgrade)?;
        let completing = async {
            let source: &mut dyn StartSource = match &mut old {
                Some(old) => old,
                None => &mut fresh,
            };
            let complete = opened.complete(steps, source, &bound.workers, is_upgrade, &events).await?;
            match (&mut old, complete) {
                (Some(old), Some(complete)) => {
                    add_runtime_objects(old, complete, &plan, &registry, &bound).await
                }
                (_, complete) => Ok(complete),
            }
        };
        let complete = match given_up.run_unless_abandoned(completing).await {
            Ok(Some(complete)) => complete,
            incomplete => return incomplete.and(abandon(&registry).await).map(|()| None),
        };
        // The point of no return: on success the old process has handed over, and will end.
        let replaced = take_over(old, &registry, &bound.workers).await?;
        let loaded =
            |(file, options)| LoadedConfig { file, options, inherited: bound.inherited, plan, tls, budgets };
        let loaded = file.map(|file| Rc::new(loaded(file)));
        let registry = Rc::clone(&registry);
        let prepared =
            PreparedDaemon { registry, events, bound, complete, claimed, cgroups, replaced, runner, loaded };
        let started = prepared.serve().await;
        drop(guard);
        started.map(Some)
    }
}

/// A daemon that is ready to accept clients.
struct PreparedDaemon {
    registry: Rc<Registry>,
    events: DaemonEvents,
    bound: BoundAddresses,
    complete: CompletedStart,
    /// The pid file of the old process.
    claimed: Option<ClaimedPidFile>,
    cgroups: Option<cgroup::watch::CgroupWatchThread>,
    /// The old process, after an upgrade.
    replaced: Option<ReplacedProcess>,
    runner: Option<EventRunner>,
    loaded: Option<Rc<LoadedConfig>>,
}

impl PreparedDaemon {
    /// Accepts clients, and announces that. After an upgrade nothing here may fail: no other
    /// process serves.
    async fn serve(self) -> anyhow::Result<Daemon> {
        let Self { registry, events, mut bound, complete, claimed, cgroups, replaced, runner, loaded } = self;
        let http = start_http(&mut bound, &registry, cgroups.as_ref(), replaced.is_some())?;
        let control = Rc::new(ControlSockets::start(&registry, bound.control));
        // Before the first event.
        let mut watching = vec![events::log_events(&registry.events)];
        watching.extend(runner.and_then(|runner| runner.deliver(&registry)));
        // Logging of events is attached, so no event of a client is lost.
        registry.accept_clients();
        let (in_use, taken) = end_old(replaced, &registry).await;
        let pid_file = match claimed {
            Some(claimed) => claimed.lock_and_write().await,
            None => complete.pid_file,
        };
        warn_of_missing(bound.missing.as_ref());
        announce(&complete.uris, &registry);
        registry.loaded.replace(loaded);
        watching.push(watch::watch_registry(&registry, in_use));
        watching.push(schedules::follow_schedules(&registry));
        taken.into_iter().for_each(|taken| registry.events.record(taken));
        let cluster = start_cluster(&registry);
        watching.extend(migration::receive_disks(&registry));
        registry.book_when_possible();
        registry.report_unavailable_disks();
        let watchdog =
            registry.lifecycle.watchdog.get().map(|allowed| watchdog::start(allowed, &bound.workers));
        Ok(Daemon {
            registry,
            control,
            _watching: watching,
            _watchdog: watchdog,
            _http: http,
            _cluster: cluster,
            _pid_file: pid_file,
            _cgroups: cgroups,
            events,
        })
    }
}

/// Creates the channel of the daemon's events; signals are sent to it from now on.
fn event_channel(signals: BlockedSignals) -> anyhow::Result<DaemonEvents> {
    let events = async_channel::unbounded();
    let sender = events.0.clone();
    let mut signals = signals.stream().context("signals cannot be waited for")?;
    reactor::spawn(async move {
        // The channel is closed only when the process ends.
        while let Ok(request) = signals.next().await {
            let _ = sender.try_send(DaemonEvent::Signal(request));
        }
    });
    Ok(events)
}

/// A registry without disks that accepts no client.
fn empty_registry(
    file: Option<&Path>,
    plan: &DesiredState,
    events: &DaemonEvents,
) -> anyhow::Result<Rc<Registry>> {
    let sender = events.0.clone();
    // The channel is closed only when the process ends.
    let ender = Rc::new(move |end| drop(sender.try_send(DaemonEvent::End(end))));
    // Absolute, because clients may have another working directory.
    let registry = Registry::new(file.map(path::absolute).transpose()?, ender);
    registry.delay_clients();
    registry.lifecycle.ends_when_idle.set(plan.process.exit_when_idle);
    registry.read_capacities(plan.process.state.as_deref());
    open_quotas(&registry, plan);
    Ok(registry)
}

/// Reads the counts of quotas by volume, whose file has the name of the config file, of the control
/// socket, or of the first disk. Its directory is created at every start: a client may set a quota
/// later.
fn open_quotas(registry: &Registry, plan: &DesiredState) {
    // One file has one count, whichever link leads to it. A socket may not exist yet.
    let config = registry.config.as_deref();
    let config = config.map(|path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()));
    let socket = || plan.process.qmp.first().and_then(|path| path::absolute(path).ok());
    let daemon = config.or_else(socket).map(|path| path.display().to_string());
    let of_disk = || plan.disks.first().map(|disk| format!("{} {}", disk.name, disk.image));
    let daemon = daemon.or_else(of_disk).unwrap_or_default();
    let has_quota = plan.disks.iter().any(|disk| !disk.settings.quota.is_none())
        || plan.groups.iter().any(|group| !group.settings.quota.is_none());
    let user = plan.process.user.as_ref();
    let create = |directory: &Path| sandbox::create_state_directory(directory, user);
    registry.quotas.open(plan.process.state.as_deref(), &daemon, has_quota, create);
}

/// Checks the pid file before anything is changed. It is written once clients can connect; in an
/// upgrade, the file of the old process is opened.
fn claim(plan: &DesiredState, is_upgrade: bool) -> anyhow::Result<Option<ClaimedPidFile>> {
    let claim = |path| match is_upgrade {
        true => ClaimedPidFile::open(path).map(Some),
        false => PidFile::check(path).map(|()| None),
    };
    Ok(plan.process.pid_file.as_deref().map(claim).transpose()?.flatten())
}

/// Registers the files where the config exports disks over FUSE as served by weir, while the
/// returned values exist.
fn files_over_fuse(plan: &DesiredState) -> Vec<OwnMount> {
    let files = plan.exports.iter().filter_map(|export| match &export.target {
        ExportTarget::Fuse(fuse) => Some(&fuse.file),
        _ => None,
    });
    files.filter_map(|file| fuse::served_at(file)).collect()
}

/// Joins the cluster, if there is one; disks that were migrated to another host are removed from
/// `plan`.
async fn join_cluster(plan: &mut DesiredState, registry: &Registry) -> anyhow::Result<()> {
    let Some(cluster) = ClusterMembership::prepare(plan).await? else { return Ok(()) };
    let moved = cluster.moved();
    for (disk, host) in &moved {
        tracing::warn!(
            "disk {disk}: it has moved to host {host}, and is not served here (move [disk.{disk}] \
             from the config file here to that of {host}; to bring the disk back, run `weir disk \
             move {disk} --to {}` there, or `weir reload` here if {host} does not have it any more)",
            cluster.host()
        );
    }
    plan.remove_disks(|disk| moved.contains_key(disk));
    registry.set_cluster(cluster);
    Ok(())
}

/// Extends an error about a locked image if etcd did not answer whether the disk was migrated to
/// another host.
fn with_migration_hint(error: anyhow::Error, registry: &Registry) -> anyhow::Error {
    let is_locked = |cause: &OpenError| cause.why.contains("locked");
    let is_locked_by_another = error.chain().any(|cause| cause.downcast_ref().is_some_and(is_locked));
    match registry.cluster().and_then(|cluster| cluster.start_failure()).filter(|_| is_locked_by_another) {
        Some(why) => anyhow!(
            "{error:#}; the disk may have moved to another host of the cluster, but etcd could not be \
             read: {why} (if it has moved, remove it from the config file here)"
        ),
        None => error,
    }
}

/// A start with open images, except for those that are opened in the sandbox.
struct StartWithImages<'a> {
    plan: &'a Rc<DesiredState>,
    registry: &'a Rc<Registry>,
    work: Reconciliation<'a>,
    difference: PlanDifference,
    images: Vec<(usize, Image)>,
    late: PlanDifference,
}

/// Start that is complete except for accepting clients.
struct CompletedStart {
    pid_file: Option<PidFile>,
    uris: Vec<String>,
}

impl<'a> StartWithImages<'a> {
    async fn open(
        plan: &'a Rc<DesiredState>,
        registry: &'a Rc<Registry>,
        tls: Option<nbd::NbdServerTls>,
        budgets: RateBudgets,
        source: &dyn StartSource,
    ) -> anyhow::Result<Self> {
        assemble::prepare(plan, registry).await?;
        assemble::log_remarks(plan);
        let (difference, late) =
            PlanDifference::from_empty(registry, plan, assemble::opens_in_sandbox).await?;
        let work = Reconciliation::new(ReconcileReason::Start, registry, plan, tls, budgets);
        let mut work = work.with_source_files(source);
        let images = work.open(&difference, source).await;
        let images = images.map_err(|error| with_migration_hint(error, registry))?;
        memory::warn_of_disks(&plan.disks);
        Ok(Self { plan, registry, work, difference, images, late })
    }

    /// Reconciles the empty registry with the desired state. In between, the daemon runs the steps
    /// of its command line, and enters its sandbox. `None` if a signal ended it before.
    async fn complete(
        self,
        steps: QemuSteps,
        source: &mut dyn StartSource,
        workers: &Rc<Vec<ReactorWorker>>,
        is_upgrade: bool,
        (_, events): &DaemonEvents,
    ) -> anyhow::Result<Option<CompletedStart>> {
        let Self { plan, registry, mut work, difference, images, late } = self;
        work.apply(&difference, images, source).await?;
        work.retry_later(plan);
        registry.follow_devices();
        let mut uris = work.take_uris();
        let before = export_ids(registry);
        let Some(done) =
            until_signal(steps.run(registry), "the steps of the command line are done", events).await
        else {
            return Ok(None);
        };
        done?;
        let is_late =
            |name: &str| plan.disks.iter().any(|disk| disk.name == name && assemble::opens_in_sandbox(disk));
        source.check_config(registry, &is_late)?;
        let pid_file = enter_sandbox(plan, registry, workers, is_upgrade).await?;
        uris.extend(uris_beyond(&before, registry, &plan.process.tls));
        if late.has_new_disks() {
            let Some(opened) = until_signal(work.open(&late, source), DISKS_OPEN, events).await else {
                return Ok(None);
            };
            work.apply(&late, opened?, source).await?;
            work.retry_later(plan);
            uris.extend(work.take_uris());
        }
        Ok(Some(CompletedStart { pid_file, uris }))
    }
}

/// Abandons a start. A ublk device that was taken over stays orphaned, for the next process.
async fn abandon(registry: &Registry) -> anyhow::Result<()> {
    for endpoint in registry.exports.own_endpoints() {
        endpoint.close_or_hand_over();
        endpoint.stop().await;
    }
    flush_and_close(&registry.disks.all()).await
}

fn start_cgroups(
    plan: &DesiredState,
    registry: &Registry,
    is_upgrade: bool,
) -> anyhow::Result<Option<cgroup::watch::CgroupWatchThread>> {
    let Some(path) = plan.process.cgroup_limits.as_deref() else { return Ok(None) };
    let store = CapacityStore::new(plan.process.state.as_deref());
    let lending = registry.cluster().and_then(|cluster| cluster.cgroup_leases());
    match is_upgrade {
        true => cgroup::watch::CgroupWatchThread::start_after_another(path, store, lending),
        false => cgroup::watch::CgroupWatchThread::start(path, store, lending),
    }
    .map(Some)
}

/// Performs the last operations that need rights, and enters the sandbox. In an upgrade the old
/// process keeps the pid file and its recording until it ends.
async fn enter_sandbox(
    plan: &DesiredState,
    registry: &Registry,
    workers: &[ReactorWorker],
    is_upgrade: bool,
) -> anyhow::Result<Option<PidFile>> {
    let pid_file =
        plan.process.pid_file.as_deref().filter(|_| !is_upgrade).map(PidFile::write).transpose()?;
    let awaited = registry.exports.awaited_endpoints.borrow().values().cloned().collect::<Vec<_>>();
    let comes_later = |disk: &settings::DiskWithOrigins| {
        assemble::opens_in_sandbox(disk) || registry.disks.is_unavailable(&disk.name)
    };
    let is_of_later = |export: &&ExportSpec| comes_later(&plan.disks[export.disk]);
    let later_targets = plan.exports.iter().filter(is_of_later).map(|export| export.target.clone());
    let running = registry.disks.all();
    let running_images: Vec<_> = running.iter().map(|disk| disk.config().image.clone()).collect();
    let remotes = running_images.iter().chain(plan.disks.iter().map(|disk| &disk.image));
    let served = sandbox::ServedResources {
        images: running_images.iter().filter_map(|image| image.path().map(Path::to_owned)).collect(),
        endpoints: registry.exports.servers().iter().map(|serving| serving.endpoint.clone()).collect(),
        remotes: remotes.filter_map(|image| image.remote().cloned()).collect(),
        export_targets: registry
            .exports
            .all()
            .iter()
            .filter_map(|export| export.endpoint_config.clone())
            .chain(later_targets)
            .chain(awaited)
            .collect(),
        cluster: plan.disks.iter().any(assemble::opens_in_sandbox)
            || running_images.iter().any(settings::ImageLocation::is_rbd),
        etcd_ports: plan.process.cluster.as_ref().map(cluster::ports).unwrap_or_default(),
        own_directories: (plan.process.cluster.as_ref())
            .and_then(|known| cluster::directory(plan.process.state.as_deref(), known))
            .into_iter()
            .chain(registry.quotas.directory())
            .collect(),
    };
    if let Some(entered) = sandbox::enter(plan, registry.config.as_deref(), &served, workers).await? {
        registry.set_sandbox(entered);
    }
    // Checked by the final user with the remaining rights.
    if let Some(record) = &plan.process.record {
        recording::check_directory(record, is_upgrade.then_some(record))?;
        registry.recordings.record_permanently(record)?;
    }
    Ok(pid_file)
}

/// Adds objects that clients have added to the old process at run time.
///
/// # Errors
/// Fails if the old process has something that cannot be recreated here.
async fn add_runtime_objects(
    old: &mut NewProcess,
    mut complete: CompletedStart,
    plan: &DesiredState,
    registry: &Rc<Registry>,
    bound: &BoundAddresses,
) -> anyhow::Result<Option<CompletedStart>> {
    let before = export_ids(registry);
    let perform = async |command: &str, arguments: Map<String, Value>| {
        qmp::execute_json(registry, command, arguments).await
    };
    let add_disk = async |nodes: &[Map<String, Value>], files: PassedFiles| {
        qmp::add_transferred_disk(registry, nodes, files).await
    };
    let added = old.add_transferred(registry, &bound.workers, perform, add_disk).await?;
    if !added.is_empty() {
        let added = added.join(", ");
        tracing::info!(%added, "transferred although no config has it (`--save` adds it)");
    }
    old.check_complete(registry)?;
    complete.uris.extend(uris_beyond(&before, registry, &plan.process.tls));
    Ok(Some(complete))
}

/// The old process after it has handed over its state.
struct ReplacedProcess {
    version: String,
    process: OldProcess,
}

/// Takes over from the old process, if there is one.
///
/// # Errors
/// Fails if the old process does not hand over; it then continues unchanged.
async fn take_over(
    old: Option<NewProcess>,
    registry: &Rc<Registry>,
    workers: &[ReactorWorker],
) -> anyhow::Result<Option<ReplacedProcess>> {
    let Some(old) = old else { return Ok(None) };
    let version = old.version().to_owned();
    match old.take_over(registry, workers).await {
        Ok(process) => Ok(Some(ReplacedProcess { version, process })),
        Err(error) => {
            flush_and_close(&registry.disks.all()).await?;
            Err(error)
        }
    }
}

/// Starts the HTTP thread, with the rights that the sandbox leaves.
///
/// # Errors
/// Fails if it cannot be started. After an upgrade that is only logged, because no other process
/// serves.
fn start_http(
    bound: &mut BoundAddresses,
    registry: &Rc<Registry>,
    cgroups: Option<&cgroup::watch::CgroupWatchThread>,
    is_upgrade: bool,
) -> anyhow::Result<Option<weir_http::HttpServer>> {
    let Some(endpoints) = bound.http.take().filter(|endpoints| !endpoints.is_empty()) else {
        return Ok(None);
    };
    let figures = cgroups.and_then(cgroup::watch::CgroupWatchThread::figures);
    match weir_http::HttpServer::start(endpoints, registry, &bound.workers, figures) {
        Err(error) if is_upgrade => {
            tracing::error!("{error:#}: metrics and the page are not served (restart weir)");
            Ok(None)
        }
        started => started.map(Some),
    }
}

/// Waits for the end of the old process. Returns the exports with transferred clients, and an event
/// about the upgrade.
async fn end_old(
    replaced: Option<ReplacedProcess>,
    registry: &Rc<Registry>,
) -> (BTreeSet<String>, Option<NewEvent>) {
    let Some(ReplacedProcess { version, process }) = replaced else { return Default::default() };
    let clients = process.clients();
    let in_use = process.until_ended(registry).await;
    let message = format!(
        "this daemon has taken over from one of version {version}, with {}",
        figures::counted(clients as u64, "client")
    );
    let event = NewEvent::new(Kind::TakenOver, message).with("version", version).with("clients", clients);
    (in_use, Some(event))
}

fn warn_of_missing(missing: Option<&anyhow::Error>) {
    if let Some(error) = missing {
        tracing::warn!(
            "{error:#}; `weir status` and others will not find this daemon (name a control socket of its \
             own with --qmp unix:PATH, or use --qmp none)"
        );
    }
}

fn start_cluster(registry: &Rc<Registry>) -> Option<cluster::AgentHandle> {
    let around: Weak<Registry> = Rc::downgrade(registry);
    let started = registry.cluster().map(|cluster| cluster.start(around)).transpose();
    started.unwrap_or_else(|error| {
        tracing::error!("{error:#}: the fallback share applies (restart weir)");
        None
    })
}
