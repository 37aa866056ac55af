//! What the daemon gives up once all is open, so that whoever takes it over has little.
//!
//! ```text
//!   root ─► open images, bind sockets, read keys ─► enter ─► let clients in
//!                                                     │
//!     user     --user: another user, no capability    │  the whole process
//!     files    landlock: places, not all files        │  each thread by itself
//!     calls    seccomp: a list of system calls        │  all threads at once
//! ```
//!
//! The process that hands events on has what `runner` leaves it. Rings have lists of their own,
//! from their making on (`reactor`). A daemon that steers what belongs to the host (devices,
//! files over FUSE, control groups) has to mount, start programs and look at other processes: it
//! keeps its files and loses only what no such work needs. `docs/security.md` has the table.
//!
//! Never gives anything back: rules are fixed once made.

mod calls;
mod files;
pub mod runner;
mod user;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use console::{descriptors, logging};
use nbd::{client::Endpoint as Server, uri::Uri};
use policy::time::Duration;
use reactor::{Worker, op};
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use settings::{Address, Door, Endpoint, Plan, Sandbox, Service, SocketAccess};

use files::Files;
pub use files::directory_of;
pub use user::ids;

/// What runs decides how much has to be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Needs {
    /// It steers what belongs to the host.
    host: bool,
    /// A file over FUSE is mounted by a set-uid program, because the user is not root.
    helper: bool,
    /// It listens at TCP, or calls there.
    tcp: bool,
    /// It calls a virtual machine that listens, an NBD server, or etcd.
    calls: bool,
    /// Its sockets have another owner or mode than such files have.
    gives: bool,
    /// Images in a Ceph cluster: librbd connects, also later.
    cluster: bool,
    /// How many virtual machines may come.
    machines: u64,
    /// Queues of all of them.
    queues: usize,
}

/// Descriptors of a queue that a machine uses: a kick, a call, and one for errors.
const OF_A_QUEUE: u64 = 3;
/// Of a machine beside its queues, with one region of memory.
const OF_A_MACHINE: u64 = 5;

/// What the daemon serves as it enters the sandbox.
#[derive(Debug, Default)]
pub struct Served {
    /// Paths of images.
    pub images: Vec<PathBuf>,
    /// Where it listens.
    pub endpoints: Vec<Endpoint>,
    /// Doors of disks' own.
    pub doors: Vec<Door>,
    /// Some of its disks are images of a Ceph cluster.
    pub cluster: bool,
    /// Images at NBD servers.
    pub remotes: Vec<Uri>,
    /// Of TCP, where it calls etcd: on any machine.
    pub etcd_ports: Vec<u16>,
    /// Directories of its own files: made, written anew and removed there.
    pub own: Vec<PathBuf>,
}

impl Needs {
    fn of(served: &Served, service: &Service) -> Self {
        let is_unix = |endpoint: &Endpoint| matches!(endpoint, Endpoint::Address(Address::Unix(_)));
        let mut needs = Self {
            host: service.cgroup_limits.is_some(),
            gives: service.sockets != SocketAccess { owner: service.user.clone(), ..SocketAccess::default() },
            // What the service manager passed may be of any kind.
            tcp: !served.endpoints.iter().all(is_unix),
            cluster: served.cluster,
            ..Self::default()
        };
        // To connect again after a break.
        needs.calls = !served.remotes.is_empty() || !served.etcd_ports.is_empty();
        needs.tcp |= !called_ports(served).is_empty();
        for door in &served.doors {
            match door {
                Door::VhostUserBlk(machine) => {
                    needs.calls |= machine.client;
                    needs.machines += 1;
                    needs.queues += usize::from(machine.queues);
                }
                Door::Fuse(_) => {
                    needs.host = true;
                    needs.helper = !user::is_root();
                }
                Door::Ublk(_) | Door::NbdDevice(_) => needs.host = true,
            }
        }
        needs
    }
}

/// The ports at others that the daemon may call later: all that landlock can tell of a call.
fn called_ports(served: &Served) -> Vec<u16> {
    let servers = served.remotes.iter().filter_map(|uri| uri.server.port());
    servers.chain(served.etcd_ports.iter().copied()).collect()
}

/// Whether the daemon is in the sandbox, and what it was let keep.
#[derive(Debug)]
pub struct Entered {
    needs: Needs,
    /// Where images may be opened; none: anywhere.
    places: Option<Vec<PathBuf>>,
    /// Directories where sockets may be made; none: anywhere.
    sockets: Option<Vec<PathBuf>>,
    /// Where NBD servers may be called.
    servers: Vec<Server>,
}

/// Time that the file system of an image has to resolve its path.
const TO_RESOLVE: Duration = Duration::from_secs(8);
const REMEDY: &str = "or start it with --sandbox off";

/// Whether the daemon can still make devices and files of this host. As another user than root it
/// makes files alone, by a set-uid program.
pub fn makes_devices(entered: Option<&Entered>) -> bool {
    let is_able = || {
        let kept =
            thread::capabilities(None).is_ok_and(|kept| kept.effective.contains(CapabilitySet::SYS_ADMIN));
        kept || !user::is_root() && thread::no_new_privs().is_ok_and(|no_new_privs| !no_new_privs)
    };
    entered.is_none_or(|entered| entered.needs.host) && is_able()
}

impl Entered {
    /// Fails where the sandbox would not let the image be opened.
    pub async fn check_image(&self, path: &Path) -> anyhow::Result<()> {
        let Some(places) = &self.places else { return Ok(()) };
        let of_call = path.to_owned();
        let real = reactor::timeout(TO_RESOLVE, reactor::blocking(move || of_call.canonicalize())).await;
        // A missing or unresponsive file is reported with a better message when it is opened.
        let Ok(Ok(real)) = real else { return Ok(()) };
        if places.iter().any(|place| real.starts_with(place)) {
            return Ok(());
        }
        bail!(
            "{}: the sandbox lets the daemon open no image there, only in {} (put it there, pass it with QMP's `add-fd`, start weir with --image-root or with a disk beside it, {REMEDY})",
            path.display(),
            shown(places)
        )
    }

    /// Fails where the sandbox keeps librbd from connecting.
    pub fn check_cluster(&self) -> anyhow::Result<()> {
        ensure!(
            self.needs.cluster || self.needs.host,
            "the sandbox lets this daemon connect to no Ceph cluster (start it with such a disk, {REMEDY})"
        );
        Ok(())
    }

    /// Fails where the sandbox would not let the server be called.
    pub fn check_remote(&self, uri: &Uri) -> anyhow::Result<()> {
        // Of a TCP server the name is looked up before the sandbox is entered, too.
        let is_unix = uri.server.port().is_none();
        let is_there = self.needs.host
            || self.servers.iter().any(|server| server == &uri.server || is_unix && server.port().is_none());
        ensure!(
            is_there,
            "{uri}: the sandbox lets the daemon call no NBD server but those that it began with (start it with such a disk, {REMEDY})"
        );
        Ok(())
    }

    /// Fails where the sandbox lets nobody make a socket of this path.
    pub fn check_socket(&self, path: &Path) -> anyhow::Result<()> {
        let Some(places) = &self.sockets else { return Ok(()) };
        // What is not there has a better message of its own.
        let Ok(directory) = directory_of(path).canonicalize() else { return Ok(()) };
        ensure!(
            places.iter().any(|place| directory.starts_with(place)),
            "unix:{}: the sandbox lets the daemon make no socket there, only in {} (choose one of these, start weir with a socket beside it, {REMEDY})",
            path.display(),
            shown(places)
        );
        Ok(())
    }

    /// Fails where the sandbox lacks what this door needs.
    pub fn check_door(&self, door: &Door) -> anyhow::Result<()> {
        let (what, there, else_by) = match door {
            Door::VhostUserBlk(machine) if machine.client => ("call a virtual machine", self.needs.calls, ""),
            Door::VhostUserBlk(_) => return Ok(()),
            Door::Ublk(_) | Door::Fuse(_) | Door::NbdDevice(_) => (
                "make devices and mounts of this host",
                self.needs.host,
                "; `weir attach` makes devices without a daemon",
            ),
        };
        ensure!(
            there,
            "the sandbox does not let this daemon {what} (start it with such an export, {REMEDY}{else_by})"
        );
        Ok(())
    }

    /// Fails where the sandbox lets nobody listen at such an address.
    pub fn check_address(&self, address: &Address) -> anyhow::Result<()> {
        if let Address::Unix(path) = address {
            return self.check_socket(path);
        }
        ensure!(
            self.needs.tcp || self.needs.host,
            "{address}: the sandbox makes no TCP sockets for a daemon that had none (start it with --nbd HOST:PORT, {REMEDY})"
        );
        Ok(())
    }
}

/// What of the plan contradicts who the daemon is to be.
///
/// # Errors
/// With what to do about it.
pub fn check(plan: &Plan) -> anyhow::Result<()> {
    let Some(owner) = &plan.service.user else { return Ok(()) };
    user::find(owner)?;
    let host = plan.doors.iter().find(|export| !matches!(export.door, Door::VhostUserBlk(_)));
    if let Some(export) = host {
        bail!("user: {} needs root until the end (leave one of them out)", export.door.address());
    }
    ensure!(
        plan.service.cgroup_limits.is_none(),
        "user: cgroup-limits needs root until the end (leave one of them out)"
    );
    Ok(())
}

/// Whether there is room for the descriptors that are set aside for virtual machines, as far as is
/// known before workers and sockets have theirs.
///
/// # Errors
/// How many are enough.
pub fn check_room(plan: &Plan) -> anyhow::Result<()> {
    let doors = plan.doors.iter().map(|export| export.door.clone()).collect();
    let needs = Needs::of(&Served { doors, ..Served::default() }, &plan.service);
    // Whoever has a helper gives nothing up, and sets nothing aside.
    match plan.service.sandbox {
        Sandbox::Off => Ok(()),
        _ if needs.helper => Ok(()),
        _ => check_descriptors(needs),
    }
}

/// Gives up what is asked for and what this daemon does not need. To be called once all is open and
/// before a client is served; `config` is the file it may read again.
///
/// # Errors
/// Where `--user` cannot be, and where the sandbox is required and cannot be had: nothing serves
/// then. None with `--sandbox off`.
pub async fn enter(
    plan: &Plan,
    config: Option<&Path>,
    served: &Served,
    workers: &[Worker],
) -> anyhow::Result<Option<Entered>> {
    let service = &plan.service;
    let needs = Needs::of(served, service);
    // Made by who can look everywhere.
    let is_confined = service.sandbox != Sandbox::Off && !needs.host;
    let files = is_confined.then(|| Files::new(plan, config, served)).transpose()?;
    if let Some(owner) = &service.user {
        ensure!(!needs.host, "user: devices of this host need root until the end (leave one of them out)");
        user::find(owner)?.become_it()?;
    }
    if service.sandbox == Sandbox::Off {
        reactor::threads_may_stay();
        return Ok(None);
    }
    let (mut entered, missing) = give_up(needs, files, workers).await?;
    entered.servers = served.remotes.iter().map(|uri| uri.server.clone()).collect();
    if service.sandbox == Sandbox::Require && !missing.is_empty() {
        bail!("sandbox: {} (mend it, or start weir with --sandbox on)", missing.join("; "));
    }
    for why in &missing {
        tracing::warn!("sandbox: {why}");
    }
    let images = entered.places.as_deref().map_or_else(|| "anywhere".to_owned(), shown);
    tracing::info!(kind = if needs.host { "host" } else { "disks" }, %images, "sandboxed");
    Ok(Some(entered))
}

fn shown(places: &[PathBuf]) -> String {
    places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(" ")
}

/// Also says what could not be given up, and why.
async fn give_up(
    needs: Needs,
    files: Option<Result<Files, String>>,
    workers: &[Worker],
) -> anyhow::Result<(Entered, Vec<String>)> {
    let mut missing = Vec::new();
    let (mut places, mut sockets, mut ruleset) = (None, None, None);
    match files {
        Some(Ok(files)) => {
            (places, sockets, ruleset) = (Some(files.images), Some(files.sockets), Some(files.ruleset));
        }
        Some(Err(why)) => missing.push(why),
        None => {}
    }
    if needs.helper {
        missing.push(
            "a file over FUSE needs root, or else fusermount3, which is set-uid: nothing is given up".into(),
        );
        reactor::threads_may_stay();
        return Ok((Entered { needs, places: None, sockets: None, servers: Vec::new() }, missing));
    }
    // The last rings that can be made.
    check_descriptors(needs)?;
    reactor::set_notifiers_aside(needs.queues).context("rings for virtual machines cannot be made")?;
    let kept = capabilities(needs);
    on_each_thread(workers, Part { ruleset, kept }).await.context("sandbox")?;
    missing.extend(calls::restrict(needs).err());
    // Only now: a thread has the rights that its creator had, and one that stays keeps them.
    reactor::threads_may_stay();
    // Control groups have a thread of their own.
    if !needs.host
        && let Some(others) = other_threads(workers.len())
    {
        missing.push(others);
    }
    Ok((Entered { needs, places, sockets, servers: Vec::new() }, missing))
}

/// Fails where the process may not have as many descriptors as are set aside for machines.
fn check_descriptors(Needs { machines, queues, .. }: Needs) -> anyhow::Result<()> {
    let (aside, free) = (reactor::notifiers_set_aside_for(queues) as u64, op::free_descriptors());
    // Without a queue the error of what cannot be made says more.
    if aside < free || queues == 0 {
        return Ok(());
    }
    let limit = descriptors::limit();
    let of_machines = (queues as u64) * OF_A_QUEUE + machines * OF_A_MACHINE;
    let enough = limit - free + aside + of_machines + op::DESCRIPTORS_LEFT;
    bail!(
        "descriptors: {aside} are set aside for virtual machines with {queues} queues, and of the {limit} that this process may have {free} are left (with all machines there it needs {enough} or more: raise LimitNOFILE= of its service, or `ulimit -Hn`; or give the exports fewer queues)"
    );
}

/// What root keeps.
fn capabilities(needs: Needs) -> CapabilitySet {
    // Images of other users, and ports below 1024.
    let mut kept =
        CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::NET_BIND_SERVICE;
    if needs.gives {
        kept |= CapabilitySet::CHOWN | CapabilitySet::FOWNER;
    }
    if needs.host {
        // Drivers, mounts, the kernel's NBD client; who uses a device; to serve what others write
        // memory to (PR_SET_IO_FLUSHER); ending what unmounts, and what guards a device.
        kept |= CapabilitySet::SYS_ADMIN
            | CapabilitySet::NET_ADMIN
            | CapabilitySet::SYS_PTRACE
            | CapabilitySet::SYS_RESOURCE
            | CapabilitySet::KILL;
    }
    kept
}

/// What a thread does by itself.
struct Part {
    ruleset: Option<landlock::RulesetCreated>,
    kept: CapabilitySet,
}

impl Part {
    fn try_clone(&self) -> anyhow::Result<Self> {
        let ruleset = self.ruleset.as_ref().map(landlock::RulesetCreated::try_clone).transpose()?;
        Ok(Self { ruleset, kept: self.kept })
    }

    fn take(self) -> anyhow::Result<()> {
        thread::set_no_new_privs(true).context("no_new_privs")?;
        let now = thread::capabilities(None).context("capabilities")?;
        // A service manager may forbid the call to those that have none.
        if !(now.permitted - self.kept).is_empty() {
            let kept = CapabilitySets {
                effective: now.effective & self.kept,
                permitted: now.permitted & self.kept,
                inheritable: CapabilitySet::empty(),
            };
            thread::set_capabilities(None, kept).context("capabilities")?;
        }
        if let Some(ruleset) = self.ruleset {
            ruleset.restrict_self().context("landlock")?;
        }
        Ok(())
    }
}

/// On this thread and on each worker; those that start later have it from these.
async fn on_each_thread(workers: &[Worker], part: Part) -> anyhow::Result<()> {
    let (done, heard) = async_channel::bounded(workers.len().max(1));
    for worker in workers {
        let (part, done) = (part.try_clone()?, done.clone());
        // It has room for all.
        worker.spawn(move || async move { drop(done.try_send(part.take())) });
    }
    part.take()?;
    for _ in workers {
        heard.recv().await.context("a worker has ended")??;
    }
    Ok(())
}

/// Says so if there are others than this one and the workers: they have kept what they had.
fn other_threads(workers: usize) -> Option<String> {
    // A writer of the log that starts from now on has the rights of a thread that is confined.
    let has_no_log = logging::flush();
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
    // The kernel's own for rings run nothing of ours.
    let names: Vec<_> = threads
        .map(name)
        .filter(|name| !name.starts_with("iou-"))
        .filter(|name| !(has_no_log && name.trim_end() == logging::THREAD))
        .collect();
    let others = names.len().saturating_sub(workers + 1);
    (others > 0).then(|| format!("threads that weir knows nothing of keep their rights: {others}"))
}

#[cfg(test)]
mod tests;
