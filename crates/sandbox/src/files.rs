//! Which files can still be opened: landlock's rules, made once, of all that was named.
//!
//! ```text
//!   directories of images, sockets, state,   all files in them
//!   and --image-root
//!   the system's own directories (/tmp)      the file that was named; of sockets, beside them too
//!   config file, keys, certificates          reading their directories
//!   /proc, /sys, libraries, names of hosts   reading
//!   everything else                          nothing
//! ```
//!
//! A directory and not the file alone: what names an image today names another tomorrow (`weir disk
//! add`, snapshots, a file that is replaced). Files that are open stay open, whatever lies where.

use std::{
    env, fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, NetPort, PathBeneath,
    PathFd, Ruleset, RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _, Scope, make_bitflags,
};
use nix::unistd::{Uid, User};
use settings::{
    Address, Credentials, Door, Endpoint, Plan, SecretSource, Standard, Tls, control::ControlSocket,
};

use super::Served;

/// What every kernel has that weir runs on (6.1).
const LEAST: ABI = ABI::V2;
/// What rules for files were written for: truncation, devices' ioctls.
const BEST: ABI = ABI::V5;
/// Of a config file of Ceph's.
const MOST_CONFIG_BYTES: u64 = 1 << 20;

/// Readable whoever runs: what the C library, TLS and backtraces look at.
const PUBLIC: [&str; 15] = [
    "/proc",
    "/sys",
    "/usr/lib",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/ssl/openssl.cnf",
    "/etc/ssl/certs",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/localtime",
];

/// Directories of the system and of users, which hold more than what weir was given.
const SHARED: [&str; 16] = [
    "/", "/boot", "/etc", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/usr", "/var",
    "/var/lib", "/var/tmp", "/var/log",
];
/// Below these, no directory is weir's own.
const NEVER: [&str; 5] = ["/dev", "/proc", "/sys", "/etc", "/usr"];

/// The rules, not in force yet.
pub(super) struct Files {
    pub(super) ruleset: RulesetCreated,
    /// Where images may be opened, each a real path.
    pub(super) images: Vec<PathBuf>,
    /// Directories where sockets may be made, each a real path.
    pub(super) sockets: Vec<PathBuf>,
}

impl Files {
    /// Or why this kernel has no such rules.
    ///
    /// # Errors
    /// If what was named cannot be looked at.
    pub(super) fn new(
        plan: &Plan,
        config: Option<&Path>,
        served: &Served,
    ) -> anyhow::Result<Result<Self, String>> {
        let ruleset = match ruleset(served.cluster) {
            Ok(ruleset) => ruleset,
            Err(error) => {
                return Ok(Err(format!(
                    "files are not confined: this kernel has no landlock: {error} (boot it with `landlock` in lsm=)"
                )));
            }
        };
        let mut rules = Rules::new(ruleset);
        rules.all(plan, config, served).context("sandbox")?;
        let Rules { ruleset, mut images, mut sockets } = rules;
        for places in [&mut images, &mut sockets] {
            places.sort();
            places.dedup();
        }
        Ok(Ok(Self { ruleset, images, sockets }))
    }
}

/// With a cluster, connections may go anywhere: its OSDs are where it says, and move.
fn ruleset(has_cluster: bool) -> Result<RulesetCreated, landlock::RulesetError> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(LEAST))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(BEST))?;
    // To no port, but those that are called.
    let ruleset = if has_cluster { ruleset } else { ruleset.handle_access(AccessNet::ConnectTcp)? };
    ruleset
        // Names that lie in no directory.
        .scope(Scope::AbstractUnixSocket)?
        .create()
}

struct Rules {
    ruleset: RulesetCreated,
    images: Vec<PathBuf>,
    sockets: Vec<PathBuf>,
}

impl Rules {
    fn new(ruleset: RulesetCreated) -> Self {
        Self { ruleset, images: Vec::new(), sockets: Vec::new() }
    }

    fn all(&mut self, plan: &Plan, config: Option<&Path>, served: &Served) -> anyhow::Result<()> {
        for path in PUBLIC {
            self.readable(Path::new(path))?;
        }
        if let Ok(program) = env::current_exe() {
            self.readable(&program)?;
            // Where a backtrace finds lines.
            self.readable(&program.with_extension("debug"))?;
        }
        for device in ["/dev/null", "/dev/urandom"] {
            self.writable(Path::new(device))?;
        }
        for image in &served.images {
            self.place(image, BitFlags::EMPTY)?;
        }
        // Where that goes to any port, no rule is made of ports.
        for port in super::called_ports(served).into_iter().filter(|_| !served.cluster) {
            (&mut self.ruleset).add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
        }
        for uri in &served.remotes {
            let tls = uri.tls.iter().flat_map(|tls| [&tls.certificates, &tls.psk_file]);
            for path in tls.flatten() {
                self.readable(path)?;
            }
        }
        let service = &plan.service;
        if let Some(root) = &service.image_root {
            self.directory(root)?;
        }
        // To make it, to look whether it is in use, and to remove it.
        let beside = make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile});
        for socket in sockets(plan, served) {
            self.place(&socket, beside)?;
        }
        if let Some(path) = &service.pid_file {
            self.place(path, AccessFs::RemoveFile.into())?;
        }
        if let Some(path) = &service.log.file {
            self.place(path, BitFlags::EMPTY)?;
        }
        if let Some(record) = &service.record {
            let access =
                make_bitflags!(AccessFs::{ReadDir | ReadFile | WriteFile | MakeReg | RemoveFile | Truncate});
            self.allow(&record.directory, access)?;
        }
        let store = settings::state::Store::new(service.state.as_deref());
        // Records of devices, of which it is told the name.
        if let Some(capacity) = store.file("x").parent() {
            self.readable(capacity)?;
        }
        for directory in &served.own {
            let access =
                make_bitflags!(AccessFs::{ReadDir | ReadFile | WriteFile | MakeReg | RemoveFile | Truncate});
            self.allow(directory, access)?;
        }
        if let Some(config) = config {
            self.beside(config)?;
        }
        for disk in &plan.disks {
            for secret in &disk.qcow2.secrets {
                if let SecretSource::File(path) = secret {
                    self.beside(path)?;
                }
            }
        }
        if served.cluster {
            self.of_ceph(plan)?;
        }
        if let Some(cluster) = &service.cluster {
            cluster.certificates.iter().try_for_each(|directory| self.renewed(directory))?;
            cluster.password_file.iter().try_for_each(|password| self.renewed(password))?;
        }
        match &service.tls {
            Tls::Off => {}
            Tls::On(Credentials::Certificates { directory, .. })
            | Tls::Required(Credentials::Certificates { directory, .. }) => self.renewed(directory)?,
            Tls::On(Credentials::PreShared(file)) | Tls::Required(Credentials::PreShared(file)) => {
                self.renewed(file)?;
            }
        }
        Ok(())
    }

    /// Ceph's config files and keyrings, which are read again for each new connection.
    fn of_ceph(&mut self, plan: &Plan) -> anyhow::Result<()> {
        self.readable(Path::new("/etc/ceph"))?;
        if let Some(path) = env::var_os("CEPH_CONF") {
            self.beside_of_ceph(Path::new(&path))?;
        }
        for disk in &plan.disks {
            for path in disk.image.files_of_ceph() {
                self.beside_of_ceph(path)?;
            }
        }
        Ok(())
    }

    /// A config file, and the keyrings that it names.
    fn beside_of_ceph(&mut self, path: &Path) -> anyhow::Result<()> {
        self.beside(path)?;
        // What has no end, or waits for who writes to it, is refused when the cluster is called.
        let is_file = fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() <= MOST_CONFIG_BYTES);
        let text = if is_file { fs::read_to_string(path).unwrap_or_default() } else { String::new() };
        let named = text.lines().filter_map(|line| line.split_once('='));
        let keyrings = named.filter(|(key, _)| key.trim() == "keyring");
        for keyring in keyrings.flat_map(|(_, value)| value.split(',')) {
            self.beside(Path::new(keyring.trim()))?;
        }
        Ok(())
    }

    /// Where a file lies that weir was given: all of its directory, if that is weir's own; else the
    /// file, and `beside` it what such a file takes, which landlock then also allows below.
    fn place(&mut self, path: &Path, beside: BitFlags<AccessFs>) -> anyhow::Result<()> {
        let given = directory_of(path);
        // A link's directory is looked at too: it may be set to another file.
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        for directory in [given, directory_of(&real)] {
            let Ok(directory) = directory.canonicalize() else { continue };
            if is_own(&directory) {
                self.directory(&directory)?;
            } else if !is_below(&directory, &NEVER) && !beside.is_empty() {
                self.allow(&directory, beside)?;
                if beside.contains(AccessFs::MakeSock) {
                    self.sockets.push(directory);
                }
            }
        }
        let is_there = fs::metadata(&real).is_ok_and(|file| !file.is_dir());
        if is_there && !self.images.iter().any(|place| real.starts_with(place)) {
            self.writable(&real)?;
            self.images.push(real);
        }
        Ok(())
    }

    fn directory(&mut self, path: &Path) -> anyhow::Result<()> {
        let Ok(real) = path.canonicalize() else { return Ok(()) };
        let never = make_bitflags!(AccessFs::{Execute | MakeChar | MakeBlock});
        self.allow(&real, AccessFs::from_all(BEST) & !never)?;
        self.sockets.push(real.clone());
        self.images.push(real);
        Ok(())
    }

    fn writable(&mut self, path: &Path) -> anyhow::Result<()> {
        self.allow(path, make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | IoctlDev}))
    }

    /// What is read again, and may be replaced by another file of its name.
    fn beside(&mut self, path: &Path) -> anyhow::Result<()> {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let directory = directory_of(&real);
        self.readable(if is_own(directory) { directory } else { &real })
    }

    /// A file of secrets, or a directory of them, which are read again: programs that renew them
    /// put another in its place, or set links to others that lie beside those there were.
    fn renewed(&mut self, path: &Path) -> anyhow::Result<()> {
        let files = fs::read_dir(path).into_iter().flatten().flatten().map(|file| file.path());
        for place in [path.to_owned()].into_iter().chain(files) {
            let directory = directory_of(&place);
            if directory.canonicalize().is_ok_and(|directory| is_own(&directory)) {
                self.readable(directory)?;
            }
            self.beside(&place)?;
        }
        self.readable(path)
    }

    fn readable(&mut self, path: &Path) -> anyhow::Result<()> {
        let access = match fs::metadata(path) {
            Ok(file) if file.is_dir() => make_bitflags!(AccessFs::{ReadFile | ReadDir}),
            _ => AccessFs::ReadFile.into(),
        };
        self.allow(path, access)
    }

    /// What is not there needs no rule.
    fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>) -> anyhow::Result<()> {
        let Ok(open) = PathFd::new(path) else { return Ok(()) };
        let rule = PathBeneath::new(open, access);
        (&mut self.ruleset).add_rule(rule).with_context(|| path.display().to_string())?;
        Ok(())
    }
}

/// Whether such a directory holds nothing but what weir was given.
fn is_own(directory: &Path) -> bool {
    let is_home = ["/home", "/run/user"].iter().any(|homes| directory.parent() == Some(Path::new(homes)));
    let is_shared = SHARED.iter().any(|shared| directory == Path::new(shared));
    // A configuration of weir's own lies below /etc.
    let never = is_below(directory, &NEVER) && !directory.starts_with("/etc/weir");
    !is_home && !is_shared && !never && !is_home_of_owner(directory)
}

/// A person's, wherever the system keeps such.
fn is_home_of_owner(directory: &Path) -> bool {
    // Below it are users that run services (login.defs(5), UID_MIN), whose home is what they serve.
    const FIRST_PERSON: u32 = 1000;
    let owner =
        fs::metadata(directory).ok().map(|metadata| metadata.uid()).filter(|&uid| uid >= FIRST_PERSON);
    let person = owner.and_then(|uid| User::from_uid(Uid::from_raw(uid)).ok().flatten());
    let home = person.and_then(|person| person.dir.canonicalize().ok());
    home.is_some_and(|home| home == directory)
}

fn is_below(directory: &Path, tops: &[&str]) -> bool {
    tops.iter().any(|top| directory.starts_with(top))
}

/// Paths of sockets that are there, or will be.
fn sockets(plan: &Plan, served: &Served) -> Vec<PathBuf> {
    let mut sockets = plan.service.qmp.clone();
    if plan.service.control_socket() != Standard::Off {
        sockets.extend(ControlSocket::of_daemon().ok().map(|place| place.path));
    }
    for address in plan.service.metrics.iter().chain(&plan.service.http_address) {
        if let Address::Unix(path) = address {
            sockets.push(path.clone());
        }
    }
    for endpoint in &served.endpoints {
        if let Endpoint::Address(Address::Unix(path)) = endpoint {
            sockets.push(path.clone());
        }
    }
    for door in &served.doors {
        if let Door::VhostUserBlk(machine) = door {
            sockets.extend(machine.socket.path().map(Path::to_owned));
        }
    }
    sockets
}

/// Directory of a file; the current one if the path has none.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_the_system_are_nobodys_own() {
        for own in ["/var/lib/weir/images", "/srv/vms", "/etc/weir", "/run/weir", "/tmp/x", "/home/a/vms"] {
            assert!(is_own(Path::new(own)), "{own}");
        }
        for shared in [
            "/",
            "/tmp",
            "/home/a",
            "/run/user/7",
            "/root",
            "/etc",
            "/etc/ssh",
            "/dev",
            "/dev/vg0",
            "/usr/bin",
            "/run",
        ] {
            assert!(!is_own(Path::new(shared)), "{shared}");
        }
    }
}
