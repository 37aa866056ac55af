//! From a plan to a daemon that serves.
//!
//! ```text
//!   images, keys ─► addresses ─► rights go ─► what another daemon has ─► clients ─► ready
//!   └───────────── what fails here leaves everything as it was ──────┘
//! ```
//!
//! Lets no client in before everything is there, and never fails once another daemon has given up
//! what it had.

use std::{
    collections::BTreeSet,
    path::{self, Path, PathBuf},
    rc::{Rc, Weak},
};

use anyhow::{Context as _, anyhow};
use cluster::{self, Cluster};
use console::{figures, signals::Signals};
use control::{
    assemble::{self, Late},
    events::{self, Kind, News},
    listen::Inherited,
    loaded::Loaded,
    moving, notify,
    qmp::{self, Control},
    recording,
    registry::Registry,
    takeover::newcomer::{Before, Newcomer},
    watch,
};
use export::fuse;
use policy::throttle::{Limits, Setting};
use reactor::{Worker, error::what_gives_descriptors};
use sandbox;
use sd_notify::NotifyState;
use serde_json::{Map, Value};
use settings::{Door, DoorExport, Plan, Record, Service, ServiceDraft, state::Store};
use storage::{OpenError, OwnMount, Passed};

use super::{
    Daemon, Event,
    addresses::{control_sockets, export_ids, is_awaited, late_ones, listen, told, uris_beyond},
    ending::{flush_and_close, until_ended},
    memory,
    steps::Steps,
    watchdog,
};
use crate::{
    on_event::Runner,
    pid_file::{Claimed, PidFile},
};

/// URIs in the line that says `ready`.
const MOST_URIS_SHOWN: usize = 16;
/// Largest number of disks and groups whose limits that line shows.
const MOST_LIMITS_SHOWN: usize = 16;
/// What a signal may come before.
const DISKS_OPEN: &str = "all disks are open";

impl Daemon {
    /// None where a signal ended it before it was ready.
    pub(super) async fn start(
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
        let registry = Registry::new(config, ender);
        registry.keep_clients_out();
        // Nothing comes up in between.
        let turn = registry.turns.try_take();
        // Written once clients can come; whether it may be is known before anything is touched.
        let claim = |path| match newcomer {
            Some(_) => Claimed::open(path).map(Some),
            None => PidFile::check(path).map(|()| None),
        };
        let claimed = plan.service.pid_file.as_deref().map(claim).transpose()?.flatten();
        sandbox::check(&plan)?;
        join_cluster(&mut plan, &registry).await?;
        let plan = Rc::new(plan);
        let files = newcomer.as_ref().map(|newcomer| newcomer.passed().clone());
        // Files that the old process still serves: no image may lie on one.
        let _own = newcomer.as_ref().map(|_| files_over_fuse(&plan));
        // A key takes seconds to derive, and a pipe may never say its passphrase.
        let is_awaited = is_awaited(&plan, &registry, newcomer.as_ref());
        let opened = assemble::disks(&plan, &registry, files, is_awaited);
        let opened = until_ended(opened, DISKS_OPEN, &events.1).await;
        let Some(opened) = opened else {
            flush_and_close(&registry.disks()).await?;
            return Ok(None);
        };
        let mut late = opened.map_err(|error| may_have_moved(error, &registry))?;
        memory::warn_of_disks(&plan.disks);
        registry.look_at_devices(plan.service.state.as_deref())?;
        let tls = assemble::credentials(&plan.service.tls)?;
        let workers = Rc::new(start_workers(&plan.service)?);
        // Bound before anything is served, and heard once everything is.
        let (sockets, missing) = control_sockets(&plan.service, newcomer.as_mut())?;
        let cgroups = plan.service.cgroup_limits.as_deref();
        let state = plan.service.state.as_deref();
        let lending = registry.cluster().and_then(|cluster| cluster.lending());
        let steer = match newcomer {
            Some(_) => cgroup::watch::Running::start_after_another,
            None => cgroup::watch::Running::start,
        };
        let cgroups = cgroups.map(|path| steer(path, Store::new(state), lending)).transpose()?;
        registry.ends_when_idle.set(plan.service.exit_when_idle);
        registry.watchdog.set(sd_notify::watchdog_enabled().or_else(|| newcomer.as_ref()?.watchdog()));
        let passed = newcomer.as_ref().map_or_else(|| inherited.count(), Newcomer::inherited);
        let told = told(&plan.service, newcomer.as_mut(), tls.as_ref(), &registry)?;
        let mut uris = listen(&plan, inherited, newcomer.as_mut(), tls.clone(), &workers, &registry).await?;
        let is_alone = claimed.is_none();
        let others = (steps, &mut late, newcomer.as_mut());
        let completed = complete(&plan, &registry, &workers, others, is_alone, &events.1).await;
        let budgets = late.into_budgets();
        let pid_file = match completed {
            Ok(Some((pid_file, more))) => {
                uris.extend(more);
                pid_file
            }
            not => {
                for entrance in registry.entrances() {
                    // A device that was taken over, and is in use, waits on.
                    entrance.leave();
                    entrance.stop().await;
                }
                let closed = flush_and_close(&registry.disks()).await;
                return not.and(closed).map(|()| None);
            }
        };
        let version = newcomer.as_ref().map(|newcomer| newcomer.version().to_owned());
        let before = match newcomer {
            Some(newcomer) => match newcomer.finish(&registry, &workers).await {
                Ok(before) => Some(before),
                Err(error) => {
                    // Of what is the other's nothing is touched.
                    flush_and_close(&registry.disks()).await?;
                    return Err(error);
                }
            },
            None => None,
        };
        // From here on nothing may fail: nobody else serves.
        // A thread that starts now has what rights are left.
        let of_cgroups = cgroups.as_ref().and_then(cgroup::watch::Running::figures);
        let http = (!told.is_empty())
            .then(|| weir_http::Http::start(told, &registry, &workers, of_cgroups))
            .transpose();
        let http = match http {
            Err(error) if before.is_some() => {
                tracing::error!("{error:#}: nothing can be had over HTTP");
                None
            }
            http => http?,
        };
        let control = Rc::new(Control::start(&registry, sockets));
        // Before anything happens that is to be told.
        let mut watching = vec![events::log(&registry.events)];
        watching.extend(runner.and_then(|runner| runner.deliver(&registry)));
        registry.let_clients_in();
        let taken_from = version.zip(before.as_ref().map(Before::clients));
        let in_use = match before {
            Some(before) => before.end(&registry).await,
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
        announce(&uris, &registry);
        registry.loaded.replace(
            file.map(|(file, said)| Rc::new(Loaded { file, said, inherited: passed, plan, tls, budgets })),
        );
        watching.push(watch::watch(&registry, in_use));
        if let Some((version, clients)) = taken_from {
            let message = format!(
                "this daemon goes on where one of version {version} stood, with {}",
                figures::counted(clients as u64, "client")
            );
            let news = News::new(Kind::TakenOver, message).with("version", version).with("clients", clients);
            registry.events.tell(news);
        }
        let around: Weak<Registry> = Rc::downgrade(&registry);
        let cluster = registry.cluster().map(|cluster| cluster.start(around)).transpose();
        let cluster = cluster.unwrap_or_else(|error| {
            tracing::error!("{error:#}: the cluster's safe share holds (restart weir)");
            None
        });
        watching.extend(moving::receive(&registry));
        registry.promise_once_there_is_room();
        registry.tell_unopened();
        drop(turn);
        let watched = registry.watchdog.get().map(|allowed| watchdog::start(allowed, &workers));
        let (_watching, _watchdog) = (watching, watched);
        let (_pid_file, _cgroups, _http, _cluster) = (pid_file, cgroups, http, cluster);
        Ok(Some(Self {
            registry,
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
}

/// Takes part in the cluster, if there is one; what has moved to another host is left out.
/// File systems at the places where the plan shows disks over FUSE, as long as the value lives.
fn files_over_fuse(plan: &Plan) -> Vec<OwnMount> {
    let files = plan.doors.iter().filter_map(|export| match &export.door {
        Door::Fuse(fuse) => Some(&fuse.file),
        _ => None,
    });
    files.filter_map(|file| fuse::served_at(file)).collect()
}

async fn join_cluster(plan: &mut Plan, registry: &Registry) -> anyhow::Result<()> {
    let Some(cluster) = Cluster::prepare(plan).await? else { return Ok(()) };
    let moved = cluster.moved();
    for (disk, host) in &moved {
        tracing::warn!(
            "disk {disk}: it has moved to host {host}, and is not served here (take [disk.{disk}] out of the config file here, and have it in that of {host}; `weir disk move {disk} --to {}` there brings it back, and if {host} has it no more `weir reload` here does)",
            cluster.host()
        );
    }
    plan.leave_out(|disk| moved.contains_key(disk));
    registry.join(cluster);
    Ok(())
}

/// Where an image is another's, and nobody could be asked whether its disk has gone there.
fn may_have_moved(error: anyhow::Error, registry: &Registry) -> anyhow::Error {
    let is_locked = |cause: &OpenError| cause.why.contains("locked");
    let is_anothers = error.chain().any(|cause| cause.downcast_ref().is_some_and(is_locked));
    match registry.cluster().and_then(|cluster| cluster.unasked()).filter(|_| is_anothers) {
        Some(why) => anyhow!(
            "{error:#}; or the disk has moved to another host of the cluster, which could not be asked: {why} (then take it out of the config file here)"
        ),
        None => error,
    }
}

fn start_workers(service: &Service) -> anyhow::Result<Vec<Worker>> {
    let start = |number: usize| Worker::start(&format!("worker {number}"), service.poll);
    let workers: std::io::Result<_> = (0..service.workers).map(start).collect();
    workers.map_err(|error| {
        let may_be = match what_gives_descriptors(&error) {
            Some(_) => "",
            None => " (is kernel.io_uring_disabled set, or memory locked scarce?)",
        };
        anyhow::Error::new(error).context(format!("a worker cannot be started{may_be}"))
    })
}

/// Has the rest run: what steps say, disks that are opened late, and what only another daemon has;
/// in between the rights go that nothing else needs. Returns the pid file, and the URIs of exports
/// that have come; none where a signal ended the daemon before.
async fn complete(
    plan: &Rc<Plan>,
    registry: &Rc<Registry>,
    workers: &Rc<Vec<Worker>>,
    (steps, late, mut newcomer): (Steps, &mut Late, Option<&mut Newcomer>),
    is_alone: bool,
    events: &async_channel::Receiver<Event>,
) -> anyhow::Result<Option<(Option<PidFile>, Vec<String>)>> {
    let before = export_ids(registry);
    let Some(done) = until_ended(steps.run(registry), "all is done that was told", events).await else {
        return Ok(None);
    };
    done?;
    if let Some(newcomer) = &newcomer {
        let is_late = |name: &str| plan.disks.iter().any(|disk| disk.name == name && assemble::is_late(disk));
        newcomer.check_config(registry, is_late)?;
    }
    // Who is taken over from records until it ends.
    let own = plan.service.record.as_ref().filter(|_| newcomer.is_some());
    let pid_file = settle(plan, registry, workers, (is_alone, own)).await?;
    let mut uris = uris_beyond(&before, registry, &plan.service.tls);
    let late_ones = late_ones(plan, registry, newcomer.as_deref(), late);
    let Some(more) = until_ended(late_ones, DISKS_OPEN, events).await else {
        return Ok(None);
    };
    uris.extend(more?);
    if let Some(newcomer) = &mut newcomer {
        let before = export_ids(registry);
        take_along(newcomer, registry, workers).await?;
        uris.extend(uris_beyond(&before, registry, &plan.service.tls));
    }
    Ok(Some((pid_file, uris)))
}

/// The last that takes rights, and then without them. `own` is what is recorded already by who is
/// taken over from.
async fn settle(
    plan: &Plan,
    registry: &Registry,
    workers: &[Worker],
    (is_alone, own): (bool, Option<&Record>),
) -> anyhow::Result<Option<PidFile>> {
    let pid_file = plan.service.pid_file.as_deref().filter(|_| is_alone).map(PidFile::write).transpose()?;
    let awaited = registry.awaited.borrow().values().cloned().collect::<Vec<_>>();
    let comes_later =
        |disk: &settings::PlacedDisk| assemble::is_late(disk) || registry.is_unopened(&disk.name);
    let is_of_later = |export: &&DoorExport| comes_later(&plan.disks[export.disk]);
    let doors_of_later = plan.doors.iter().filter(is_of_later).map(|export| export.door.clone());
    let running = registry.disks();
    let remotes =
        running.iter().map(|disk| &disk.config.image).chain(plan.disks.iter().map(|disk| &disk.image));
    let served = sandbox::Served {
        images: registry
            .disks()
            .iter()
            .filter_map(|disk| disk.config.image.path().map(Path::to_owned))
            .collect(),
        endpoints: registry.servers().iter().map(|serving| serving.endpoint.clone()).collect(),
        remotes: remotes.filter_map(|image| image.remote().cloned()).collect(),
        doors: registry
            .exports()
            .iter()
            .filter_map(|export| export.said.clone())
            .chain(doors_of_later)
            .chain(awaited)
            .collect(),
        cluster: plan.disks.iter().any(assemble::is_late)
            || registry.disks().iter().any(|disk| disk.config.image.is_rbd()),
        etcd_ports: plan.service.cluster.as_ref().map(cluster::ports).unwrap_or_default(),
        own: (plan.service.cluster.as_ref())
            .and_then(|known| cluster::directory(plan.service.state.as_deref(), known))
            .into_iter()
            .collect(),
    };
    if let Some(entered) = sandbox::enter(plan, registry.config.as_deref(), &served, workers).await? {
        registry.enter(entered);
    }
    // By who it is now, with the rights that are left.
    if let Some(record) = &plan.service.record {
        recording::check(record, own)?;
        registry.recordings.keep(record)?;
    }
    Ok(pid_file)
}

/// Has what only the other has, and looks whether anything is left that it has.
async fn take_along(
    newcomer: &mut Newcomer,
    registry: &Rc<Registry>,
    workers: &Rc<Vec<Worker>>,
) -> anyhow::Result<()> {
    let perform = async |command: &str, arguments: Map<String, Value>| {
        qmp::perform_sent(registry, command, arguments).await
    };
    let add_disk =
        async |nodes: &[Map<String, Value>], files: Passed| qmp::add_again(registry, nodes, files).await;
    let added = newcomer.have_added(registry, workers, perform, add_disk).await?;
    if !added.is_empty() {
        let added = added.join(", ");
        tracing::info!(%added, "comes along, though no config has it (`--save` is for that)");
    }
    newcomer.check(registry)
}

/// Limits of groups and disks, of the first that have some: `gold: iops 2000; vm1: bps 10M`.
fn limits(registry: &Registry) -> Option<String> {
    let groups = registry.groups();
    let groups = groups.iter().map(|group| (group.name().to_owned(), group.settings().limits));
    let disks = registry.disks();
    let disks = disks
        .iter()
        .map(|running| (running.disk.name().to_string(), running.disk.throttle().settings().limits));
    let limited = groups.chain(disks).filter(|(_, limits)| !limits.is_unlimited());
    let shown = |(name, limits): (String, Limits)| format!("{name}: {}", figures::limits(&by_name(&limits)));
    let all: Vec<_> = limited.collect();
    let more = all.len().saturating_sub(MOST_LIMITS_SHOWN);
    let mut lines: Vec<_> = all.into_iter().take(MOST_LIMITS_SHOWN).map(shown).collect();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    (!lines.is_empty()).then(|| lines.join("; "))
}

fn by_name(limits: &Limits) -> figures::Limits {
    let set = Setting::ALL.iter().map(|&setting| (setting.name().to_owned(), limits.get(setting)));
    set.filter(|(_, value)| *value != 0).collect()
}

fn announce(uris: &[String], registry: &Registry) {
    let shown = uris[..uris.len().min(MOST_URIS_SHOWN)].join(" ");
    let limits = limits(registry);
    let limits = limits.as_deref();
    match uris.len().saturating_sub(MOST_URIS_SHOWN) {
        0 => tracing::info!(limits, exports = %shown, "ready"),
        more => tracing::info!(limits, more, exports = %shown, "ready"),
    }
    notify::tell(&[NotifyState::Ready]);
}
