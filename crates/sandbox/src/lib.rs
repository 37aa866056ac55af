//! Rights that the daemon drops once everything is open, so that an attacker in the process
//! gains little.
//!
//! ```text
//!   root ─► open images, bind sockets, read keys ─► enter ─► accept clients
//!                                                     │
//!     user     --user: another user, no capability    │  the whole process
//!     files    landlock: some directories and files   │  each thread by itself
//!     calls    seccomp: a list of system calls        │  all threads at once
//! ```
//!
//! The process that runs the command of `--on-event` is confined by `runner`. Each io_uring is
//! restricted when it is created (`reactor`). A daemon that controls resources of the host
//! (devices, files over FUSE, cgroups) has to mount, start programs and examine other processes: it
//! keeps its access to files and drops only calls that none of this work needs. `docs/security.md`
//! has the table.
//!
//! Never restores a right: the kernel does not relax rules that are in force.

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
use nbd::{client::NbdEndpoint as Server, uri::Uri};
use policy::time::Duration;
use reactor::{ReactorWorker, operation};
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use settings::{
    DesiredState, ExportTarget, ListenAddress, ListenEndpoint, ProcessSpec, SandboxMode, SocketAccess,
};

use files::LandlockFiles;
pub use files::directory_of;
pub use user::{create_state_directory, ids};

/// Rights that have to be kept for the running exports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SandboxNeeds {
    /// True if an export controls resources of the host.
    host: bool,
    /// True if a file over FUSE is mounted by a set-uid program, because the user is not root.
    helper: bool,
    /// True if the daemon listens or connects over TCP.
    tcp: bool,
    /// True if the daemon connects to a virtual machine that listens, an NBD server, or etcd.
    connects: bool,
    /// True if the sockets of the daemon have another owner or mode than new files have.
    changes_ownership: bool,
    /// True if images are in a Ceph cluster: librbd connects to it at any time.
    cluster: bool,
    /// Number of virtual machines.
    machines: u64,
    /// Number of queues of all of them.
    queues: usize,
}

/// Descriptors of a queue in use: kick, call and error events.
const DESCRIPTORS_PER_QUEUE: u64 = 3;
/// Descriptors of a machine beside its queues, with one region of memory.
const DESCRIPTORS_PER_MACHINE: u64 = 5;

/// State of the daemon as it enters the sandbox.
#[derive(Debug, Default)]
pub struct ServedResources {
    /// Paths of images.
    pub images: Vec<PathBuf>,
    /// Addresses of NBD listeners.
    pub endpoints: Vec<ListenEndpoint>,
    /// Targets of exports that show a single disk.
    pub export_targets: Vec<ExportTarget>,
    /// True if some disks are images of a Ceph cluster.
    pub cluster: bool,
    /// URIs of images at NBD servers.
    pub remotes: Vec<Uri>,
    /// TCP ports of etcd, on any host.
    pub etcd_ports: Vec<u16>,
    /// Directories in which the daemon creates, rewrites and removes its own files.
    pub own_directories: Vec<PathBuf>,
}

impl SandboxNeeds {
    fn of(served: &ServedResources, service: &ProcessSpec) -> Self {
        let is_unix =
            |endpoint: &ListenEndpoint| matches!(endpoint, ListenEndpoint::Address(ListenAddress::Unix(_)));
        let mut needs = Self {
            host: service.cgroup_limits.is_some(),
            changes_ownership: service.sockets
                != SocketAccess { owner: service.user.clone(), ..SocketAccess::default() },
            // A socket from the service manager may be of any kind.
            tcp: !served.endpoints.iter().all(is_unix),
            cluster: served.cluster,
            ..Self::default()
        };
        // Connections are made again after they break.
        needs.connects = !served.remotes.is_empty() || !served.etcd_ports.is_empty();
        needs.tcp |= !called_ports(served).is_empty();
        for target in &served.export_targets {
            match target {
                ExportTarget::VhostUserBlk(machine) => {
                    needs.connects |= machine.client;
                    needs.machines += 1;
                    needs.queues += usize::from(machine.queues);
                }
                ExportTarget::Fuse(_) => {
                    needs.host = true;
                    needs.helper = !user::is_root();
                }
                ExportTarget::Ublk(_) | ExportTarget::NbdDevice(_) => needs.host = true,
            }
        }
        needs
    }
}

/// Remote ports that the daemon may connect to later; landlock can only distinguish ports.
fn called_ports(served: &ServedResources) -> Vec<u16> {
    let servers = served.remotes.iter().filter_map(|uri| uri.server.port());
    servers.chain(served.etcd_ports.iter().copied()).collect()
}

/// Result of entering the sandbox: the rights that were kept.
#[derive(Debug)]
pub struct EnteredSandbox {
    needs: SandboxNeeds,
    /// Directories and files that may be opened as images; `None` for any.
    images: Option<Vec<PathBuf>>,
    /// Directories where sockets may be created; `None` for anywhere.
    sockets: Option<Vec<PathBuf>>,
    /// NBD servers to which connections may be made.
    servers: Vec<Server>,
}

/// Time for the file system of an image to resolve its path.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(8);
const REMEDY: &str = "or start it with --sandbox off";

/// True if the daemon can still create devices and FUSE files on this host. As a user other than
/// root it can only create files, by a set-uid program.
pub fn makes_devices(entered: Option<&EnteredSandbox>) -> bool {
    let is_able = || {
        let is_admin =
            thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        is_admin || !user::is_root() && thread::no_new_privs().is_ok_and(|no_new_privs| !no_new_privs)
    };
    entered.is_none_or(|entered| entered.needs.host) && is_able()
}

impl EnteredSandbox {
    /// Fails if the sandbox prevents opening the image.
    pub async fn check_image(&self, path: &Path) -> anyhow::Result<()> {
        let Some(places) = &self.images else { return Ok(()) };
        let owned_path = path.to_owned();
        let resolved =
            reactor::timeout(RESOLVE_TIMEOUT, reactor::run_blocking(move || owned_path.canonicalize())).await;
        // A missing or unresponsive file is reported with a better message when it is opened.
        let Ok(Ok(resolved)) = resolved else { return Ok(()) };
        if places.iter().any(|place| resolved.starts_with(place)) {
            return Ok(());
        }
        bail!(
            "{}: the sandbox allows images only in {} (put it there, pass it with QMP's `add-fd`, \
             start weir with --image-root or with a disk beside it, {REMEDY})",
            path.display(),
            joined_paths(places)
        )
    }

    /// Fails if the sandbox keeps librbd from connecting.
    pub fn check_cluster(&self) -> anyhow::Result<()> {
        ensure!(
            self.needs.cluster || self.needs.host,
            "the sandbox does not allow connections to a Ceph cluster (start the daemon with such \
             a disk, {REMEDY})"
        );
        Ok(())
    }

    /// Fails if the sandbox prevents connecting to the server.
    pub fn check_remote(&self, uri: &Uri) -> anyhow::Result<()> {
        // TCP servers are matched by name, because names are resolved before the sandbox is
        // entered.
        let is_unix = uri.server.port().is_none();
        let is_allowed = self.needs.host
            || self.servers.iter().any(|server| server == &uri.server || is_unix && server.port().is_none());
        ensure!(
            is_allowed,
            "{uri}: the sandbox allows connections only to the NBD servers known at the start \
             (start the daemon with such a disk, {REMEDY})"
        );
        Ok(())
    }

    /// Fails if the sandbox prevents creating a socket at this path.
    pub fn check_socket(&self, path: &Path) -> anyhow::Result<()> {
        let Some(directories) = &self.sockets else { return Ok(()) };
        // A missing directory is reported with a better message later.
        let Ok(directory) = directory_of(path).canonicalize() else { return Ok(()) };
        ensure!(
            directories.iter().any(|allowed| directory.starts_with(allowed)),
            "unix:{}: the sandbox allows sockets only in {} (choose one of these, start weir with \
             a socket beside it, {REMEDY})",
            path.display(),
            joined_paths(directories)
        );
        Ok(())
    }

    /// Fails if the sandbox lacks rights that this export needs.
    pub fn check_export(&self, target: &ExportTarget) -> anyhow::Result<()> {
        let (action, allowed, alternative) = match target {
            ExportTarget::VhostUserBlk(machine) if machine.client => {
                ("connect to a front end", self.needs.connects, "")
            }
            ExportTarget::VhostUserBlk(_) => return Ok(()),
            ExportTarget::Ublk(_) | ExportTarget::Fuse(_) | ExportTarget::NbdDevice(_) => (
                "create devices and mounts on this host",
                self.needs.host,
                "; `weir attach` creates devices without a daemon",
            ),
        };
        ensure!(
            allowed,
            "the sandbox does not allow this daemon to {action} (start it with such an export, \
             {REMEDY}{alternative})"
        );
        Ok(())
    }

    /// Fails if the sandbox prevents listening at this address.
    pub fn check_address(&self, address: &ListenAddress) -> anyhow::Result<()> {
        if let ListenAddress::Unix(path) = address {
            return self.check_socket(path);
        }
        ensure!(
            self.needs.tcp || self.needs.host,
            "{address}: the sandbox does not allow TCP sockets to a daemon that started without \
             (start it with --nbd HOST:PORT, {REMEDY})"
        );
        Ok(())
    }
}

/// Checks the config against the user that the daemon is to become.
///
/// # Errors
/// Fails on a contradiction; the error has the remedy.
pub fn check(plan: &DesiredState) -> anyhow::Result<()> {
    let Some(owner) = &plan.process.user else { return Ok(()) };
    user::find(owner)?;
    let host = plan.exports.iter().find(|export| !matches!(export.target, ExportTarget::VhostUserBlk(_)));
    if let Some(export) = host {
        bail!("user: {} needs root while the daemon runs (leave one of them out)", export.target.address());
    }
    ensure!(
        plan.process.cgroup_limits.is_none(),
        "user: cgroup-limits needs root while the daemon runs (leave one of them out)"
    );
    Ok(())
}

/// Checks the limit of file descriptors for those reserved for virtual machines, as far as it
/// can be known before workers and sockets use theirs.
///
/// # Errors
/// Fails if the limit is too low; the message has a sufficient one.
pub fn check_descriptor_limit(plan: &DesiredState) -> anyhow::Result<()> {
    let targets = plan.exports.iter().map(|export| export.target.clone()).collect();
    let needs = SandboxNeeds::of(
        &ServedResources { export_targets: targets, ..ServedResources::default() },
        &plan.process,
    );
    // With a set-uid helper nothing is dropped, so nothing is reserved.
    match plan.process.sandbox {
        SandboxMode::Off => Ok(()),
        _ if needs.helper => Ok(()),
        _ => check_descriptors(needs),
    }
}

/// Drops all rights that this daemon does not need. Call it once everything is open and before a
/// client is served; `config` is a file that may be read again.
///
/// # Errors
/// Fails if `--user` fails, or if the sandbox is required and not complete: the daemon does not
/// serve then. Never fails with `--sandbox off`.
pub async fn enter(
    plan: &DesiredState,
    config: Option<&Path>,
    served: &ServedResources,
    workers: &[ReactorWorker],
) -> anyhow::Result<Option<EnteredSandbox>> {
    let service = &plan.process;
    let needs = SandboxNeeds::of(served, service);
    // Made before the user changes: root can resolve all paths.
    let is_confined = service.sandbox != SandboxMode::Off && !needs.host;
    let files = is_confined.then(|| LandlockFiles::new(plan, config, served)).transpose()?;
    if let Some(owner) = &service.user {
        ensure!(
            !needs.host,
            "user: devices of this host need root while the daemon runs (leave one of them out)"
        );
        user::find(owner)?.switch()?;
    }
    if service.sandbox == SandboxMode::Off {
        reactor::join_transient_threads();
        return Ok(None);
    }
    let (mut entered, missing) = drop_rights(needs, files, workers).await?;
    entered.servers = served.remotes.iter().map(|uri| uri.server.clone()).collect();
    if service.sandbox == SandboxMode::Require && !missing.is_empty() {
        bail!("sandbox: {} (fix that, or start weir with --sandbox on)", missing.join("; "));
    }
    for why in &missing {
        tracing::warn!("sandbox: {why}");
    }
    let images = entered.images.as_deref().map_or_else(|| "anywhere".to_owned(), joined_paths);
    tracing::info!(kind = if needs.host { "host" } else { "disks" }, %images, "sandboxed");
    Ok(Some(entered))
}

fn joined_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
}

/// Drops the rights; also returns what could not be dropped, and why.
async fn drop_rights(
    needs: SandboxNeeds,
    files: Option<Result<LandlockFiles, String>>,
    workers: &[ReactorWorker],
) -> anyhow::Result<(EnteredSandbox, Vec<String>)> {
    let mut missing = Vec::new();
    let (mut images, mut sockets, mut ruleset) = (None, None, None);
    match files {
        Some(Ok(files)) => {
            (images, sockets, ruleset) = (Some(files.images), Some(files.sockets), Some(files.ruleset));
        }
        Some(Err(why)) => missing.push(why),
        None => {}
    }
    if needs.helper {
        missing.push(
            "a file over FUSE needs root, or the set-uid program fusermount3: no rights are dropped".into(),
        );
        reactor::join_transient_threads();
        return Ok((EnteredSandbox { needs, images: None, sockets: None, servers: Vec::new() }, missing));
    }
    // Created now, because the filter prevents creating rings.
    check_descriptors(needs)?;
    reactor::set_notifiers_aside(needs.queues).context("cannot create rings for virtual machines")?;
    let allowed = capabilities(needs);
    on_each_thread(workers, ThreadRestrictions { ruleset, allowed }).await.context("sandbox")?;
    missing.extend(calls::restrict(needs).err());
    // After the filter: a thread inherits rights from its creator, and an idle pool thread would
    // keep the old ones.
    reactor::join_transient_threads();
    // The controller of cgroups has its own thread.
    if !needs.host
        && let Some(unrestricted) = unrestricted_threads(workers.len())
    {
        missing.push(unrestricted);
    }
    Ok((EnteredSandbox { needs, images, sockets, servers: Vec::new() }, missing))
}

/// Fails if the limit of file descriptors is below the number reserved for machines.
fn check_descriptors(SandboxNeeds { machines, queues, .. }: SandboxNeeds) -> anyhow::Result<()> {
    let (aside, free) = (reactor::notifiers_set_aside_for(queues) as u64, operation::free_descriptors());
    // Without a queue, the later error of the failing operation is more precise.
    if aside < free || queues == 0 {
        return Ok(());
    }
    let limit = descriptors::limit();
    let machine_descriptors = (queues as u64) * DESCRIPTORS_PER_QUEUE + machines * DESCRIPTORS_PER_MACHINE;
    let required = limit - free + aside + machine_descriptors + operation::MAX_RESERVED_DESCRIPTORS;
    bail!(
        "descriptors: {aside} are reserved for virtual machines with {queues} queues, which leaves \
         {free} of the limit of {limit} (with all machines connected it needs {required} or more: \
         raise LimitNOFILE= of its service, or `ulimit -Hn`; or give the exports fewer queues)"
    );
}

/// Capabilities that root keeps.
fn capabilities(needs: SandboxNeeds) -> CapabilitySet {
    // Images of other users, and ports below 1024.
    let mut allowed =
        CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::NET_BIND_SERVICE;
    if needs.changes_ownership {
        allowed |= CapabilitySet::CHOWN | CapabilitySet::FOWNER;
    }
    if needs.host {
        // Drivers, mounts and the kernel's NBD client; openers of a device; PR_SET_IO_FLUSHER for
        // writeback; killing a device's guard or a mount's watcher.
        allowed |= CapabilitySet::SYS_ADMIN
            | CapabilitySet::NET_ADMIN
            | CapabilitySet::SYS_PTRACE
            | CapabilitySet::SYS_RESOURCE
            | CapabilitySet::KILL;
    }
    allowed
}

/// Restrictions that each thread applies to itself.
struct ThreadRestrictions {
    ruleset: Option<landlock::RulesetCreated>,
    allowed: CapabilitySet,
}

impl ThreadRestrictions {
    fn try_clone(&self) -> anyhow::Result<Self> {
        let ruleset = self.ruleset.as_ref().map(landlock::RulesetCreated::try_clone).transpose()?;
        Ok(Self { ruleset, allowed: self.allowed })
    }

    fn take(self) -> anyhow::Result<()> {
        thread::set_no_new_privs(true).context("no_new_privs")?;
        let current = thread::capabilities(None).context("capabilities")?;
        // Skipped if nothing is to be dropped: a service manager may forbid capset(2) then.
        if !(current.permitted - self.allowed).is_empty() {
            let sets = CapabilitySets {
                effective: current.effective & self.allowed,
                permitted: current.permitted & self.allowed,
                inheritable: CapabilitySet::empty(),
            };
            thread::set_capabilities(None, sets).context("capabilities")?;
        }
        if let Some(ruleset) = self.ruleset {
            ruleset.restrict_self().context("landlock")?;
        }
        Ok(())
    }
}

/// Applies the restrictions on this thread and on each worker; later threads inherit them.
async fn on_each_thread(workers: &[ReactorWorker], part: ThreadRestrictions) -> anyhow::Result<()> {
    let (done, results) = async_channel::bounded(workers.len().max(1));
    for worker in workers {
        let (part, done) = (part.try_clone()?, done.clone());
        // Cannot fail: the channel has room for all workers.
        worker.spawn(move || async move { drop(done.try_send(part.take())) });
    }
    part.take()?;
    for _ in workers {
        results.recv().await.context("a worker has ended")??;
    }
    Ok(())
}

/// Reports threads other than this one and the workers: they have kept their rights.
fn unrestricted_threads(workers: usize) -> Option<String> {
    // A log thread that starts from now on inherits restricted rights.
    let has_no_log = logging::flush();
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
    // Kernel threads of io_uring run no code of this process.
    let names: Vec<_> = threads
        .map(name)
        .filter(|name| !name.starts_with("iou-"))
        .filter(|name| !(has_no_log && name.trim_end() == logging::THREAD))
        .collect();
    let unrestricted = names.len().saturating_sub(workers + 1);
    (unrestricted > 0).then(|| format!("threads not started by weir keep their rights: {unrestricted}"))
}

#[cfg(test)]
mod tests;
