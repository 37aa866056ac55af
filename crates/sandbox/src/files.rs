//! Files that can still be opened: landlock rules, made once from the config and the served disks.
//!
//! ```text
//!   directories of images, sockets, state,   all files in them
//!   and --image-root
//!   the system's own directories (/tmp)      the named file; for sockets, also files beside them
//!   config file, keys, certificates          reading their directories
//!   /proc, /sys, libraries, names of hosts   reading
//!   everything else                          nothing
//! ```
//!
//! Whole directories, not single files, because names may refer to other files later (`weir disk
//! add`, snapshots, a replaced file). Open files stay open wherever they are.

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
    ControlSocketPolicy, DesiredState, ExportTarget, ListenAddress, ListenEndpoint, SecretSource, TlsConfig,
    TlsCredentialFiles, control::ControlSocketLocation,
};

use super::ServedResources;

/// Landlock ABI of the oldest supported kernel (6.1).
const MIN_ABI: ABI = ABI::V2;
/// Landlock ABI that the rules use if the kernel has it: truncation, devices' ioctls.
const BEST: ABI = ABI::V5;
/// Longest config file of Ceph that is read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Always readable: needed by the C library, TLS and backtraces.
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

/// Directories of the system and of users, which also hold files that weir was not given.
const SHARED: [&str; 16] = [
    "/", "/boot", "/etc", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/usr", "/var",
    "/var/lib", "/var/tmp", "/var/log",
];
/// No directory below these belongs to weir.
const NEVER: [&str; 5] = ["/dev", "/proc", "/sys", "/etc", "/usr"];

/// The rules, not in force yet.
pub(super) struct LandlockFiles {
    pub(super) ruleset: RulesetCreated,
    /// Directories and files that may be opened as images, as canonical paths.
    pub(super) images: Vec<PathBuf>,
    /// Directories where sockets may be created, as canonical paths.
    pub(super) sockets: Vec<PathBuf>,
}

impl LandlockFiles {
    /// Makes the rules; the inner error is the reason why this kernel does not support them.
    ///
    /// # Errors
    /// Fails if a named file cannot be examined.
    pub(super) fn new(
        plan: &DesiredState,
        config: Option<&Path>,
        served: &ServedResources,
    ) -> anyhow::Result<Result<Self, String>> {
        let ruleset = match ruleset(served.cluster) {
            Ok(ruleset) => ruleset,
            Err(error) => {
                return Ok(Err(format!(
                    "files are not confined: this kernel has no landlock: {error} (boot it with \
                     `landlock` in lsm=)"
                )));
            }
        };
        let mut rules = LandlockRules::new(ruleset);
        rules.all(plan, config, served).context("sandbox")?;
        let LandlockRules { ruleset, mut images, mut sockets } = rules;
        for paths in [&mut images, &mut sockets] {
            paths.sort();
            paths.dedup();
        }
        Ok(Ok(Self { ruleset, images, sockets }))
    }
}

/// Creates an empty ruleset. With a Ceph cluster, TCP connections are not restricted: the addresses
/// of its OSDs are unknown and change.
fn ruleset(has_cluster: bool) -> Result<RulesetCreated, landlock::RulesetError> {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(MIN_ABI))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(BEST))?;
    // Connecting is restricted to the ports that are added as rules.
    let ruleset = if has_cluster { ruleset } else { ruleset.handle_access(AccessNet::ConnectTcp)? };
    ruleset
        // Abstract sockets, which no directory rule covers.
        .scope(Scope::AbstractUnixSocket)?
        .create()
}

struct LandlockRules {
    ruleset: RulesetCreated,
    images: Vec<PathBuf>,
    sockets: Vec<PathBuf>,
}

impl LandlockRules {
    fn new(ruleset: RulesetCreated) -> Self {
        Self { ruleset, images: Vec::new(), sockets: Vec::new() }
    }

    fn all(
        &mut self,
        plan: &DesiredState,
        config: Option<&Path>,
        served: &ServedResources,
    ) -> anyhow::Result<()> {
        for path in PUBLIC {
            self.readable(Path::new(path))?;
        }
        if let Ok(program) = env::current_exe() {
            self.readable(&program)?;
            // Separate debug information, for line numbers in backtraces.
            self.readable(&program.with_extension("debug"))?;
        }
        for device in ["/dev/null", "/dev/urandom"] {
            self.writable(Path::new(device))?;
        }
        for image in &served.images {
            self.allow_location(image, BitFlags::EMPTY)?;
        }
        // Unrestricted connections need no rules for ports.
        for port in super::called_ports(served).into_iter().filter(|_| !served.cluster) {
            (&mut self.ruleset).add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
        }
        for uri in &served.remotes {
            let tls = uri.tls.iter().flat_map(|tls| [&tls.certificates, &tls.psk_file]);
            for path in tls.flatten() {
                self.readable(path)?;
            }
        }
        let service = &plan.process;
        if let Some(root) = &service.image_root {
            self.directory(root)?;
        }
        // Rights to create the socket, to check whether it is in use, and to remove it.
        let directory_access = make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile});
        for socket in sockets(plan, served) {
            self.allow_location(&socket, directory_access)?;
        }
        if let Some(path) = &service.pid_file {
            self.allow_location(path, AccessFs::RemoveFile.into())?;
        }
        if let Some(path) = &service.log.file {
            self.allow_location(path, BitFlags::EMPTY)?;
        }
        if let Some(record) = &service.record {
            let access =
                make_bitflags!(AccessFs::{ReadDir | ReadFile | WriteFile | MakeReg | RemoveFile | Truncate});
            self.allow(&record.directory, access)?;
        }
        let store = settings::state::CapacityStore::new(service.state.as_deref());
        // State files of devices; their names are not known in advance.
        if let Some(capacity) = store.file("x").parent() {
            self.readable(capacity)?;
        }
        for directory in &served.own_directories {
            let access =
                make_bitflags!(AccessFs::{ReadDir | ReadFile | WriteFile | MakeReg | RemoveFile | Truncate});
            self.allow(directory, access)?;
        }
        if let Some(config) = config {
            self.allow_reading_beside(config)?;
        }
        for disk in &plan.disks {
            for secret in &disk.qcow2.secrets {
                if let SecretSource::File(path) = secret {
                    self.allow_reading_beside(path)?;
                }
            }
        }
        if served.cluster {
            self.of_ceph(plan)?;
        }
        if let Some(cluster) = &service.cluster {
            cluster.certificates.iter().try_for_each(|directory| self.allow_renewed(directory))?;
            cluster.password_file.iter().try_for_each(|password| self.allow_renewed(password))?;
        }
        match &service.tls {
            TlsConfig::Off => {}
            TlsConfig::On(TlsCredentialFiles::Certificates { directory, .. })
            | TlsConfig::Required(TlsCredentialFiles::Certificates { directory, .. }) => {
                self.allow_renewed(directory)?;
            }
            TlsConfig::On(TlsCredentialFiles::PreShared(file))
            | TlsConfig::Required(TlsCredentialFiles::PreShared(file)) => {
                self.allow_renewed(file)?;
            }
        }
        Ok(())
    }

    /// Allows Ceph's config files and keyrings, which are read again for each new connection.
    fn of_ceph(&mut self, plan: &DesiredState) -> anyhow::Result<()> {
        self.readable(Path::new("/etc/ceph"))?;
        if let Some(path) = env::var_os("CEPH_CONF") {
            self.beside_of_ceph(Path::new(&path))?;
        }
        for disk in &plan.disks {
            for path in disk.image.ceph_files() {
                self.beside_of_ceph(path)?;
            }
        }
        Ok(())
    }

    /// Allows a config file of Ceph, and the keyrings that it names.
    fn beside_of_ceph(&mut self, path: &Path) -> anyhow::Result<()> {
        self.allow_reading_beside(path)?;
        // Endless or blocking files are skipped; the connection to the cluster will fail on them.
        let is_file = fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() <= MAX_CONFIG_BYTES);
        let text = if is_file { fs::read_to_string(path).unwrap_or_default() } else { String::new() };
        let named = text.lines().filter_map(|line| line.split_once('='));
        let keyrings = named.filter(|(key, _)| key.trim() == "keyring");
        for keyring in keyrings.flat_map(|(_, value)| value.split(',')) {
            self.allow_reading_beside(Path::new(keyring.trim()))?;
        }
        Ok(())
    }

    /// Allows the location of a file: the whole directory if it belongs to weir, otherwise the
    /// file, with the rights of `directory_access` on its directory. Landlock applies these to
    /// subdirectories too.
    fn allow_location(&mut self, path: &Path, directory_access: BitFlags<AccessFs>) -> anyhow::Result<()> {
        let parent = directory_of(path);
        // A link's directory is included, because the link may be changed to another file.
        let resolved = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        for directory in [parent, directory_of(&resolved)] {
            let Ok(directory) = directory.canonicalize() else { continue };
            if is_dedicated(&directory) {
                self.directory(&directory)?;
            } else if !is_below(&directory, &NEVER) && !directory_access.is_empty() {
                self.allow(&directory, directory_access)?;
                if directory_access.contains(AccessFs::MakeSock) {
                    self.sockets.push(directory);
                }
            }
        }
        let is_file = fs::metadata(&resolved).is_ok_and(|file| !file.is_dir());
        if is_file && !self.images.iter().any(|image| resolved.starts_with(image)) {
            self.writable(&resolved)?;
            self.images.push(resolved);
        }
        Ok(())
    }

    fn directory(&mut self, path: &Path) -> anyhow::Result<()> {
        let Ok(resolved) = path.canonicalize() else { return Ok(()) };
        let never = make_bitflags!(AccessFs::{Execute | MakeChar | MakeBlock});
        self.allow(&resolved, AccessFs::from_all(BEST) & !never)?;
        self.sockets.push(resolved.clone());
        self.images.push(resolved);
        Ok(())
    }

    fn writable(&mut self, path: &Path) -> anyhow::Result<()> {
        self.allow(path, make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | IoctlDev}))
    }

    /// Allows reading a file that may be replaced by another of the same name.
    fn allow_reading_beside(&mut self, path: &Path) -> anyhow::Result<()> {
        let resolved = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let directory = directory_of(&resolved);
        self.readable(if is_dedicated(directory) { directory } else { &resolved })
    }

    /// Allows reading a file of secrets, or a directory of them, that is renewed: programs replace
    /// the files, or change links to new files beside the old ones.
    fn allow_renewed(&mut self, path: &Path) -> anyhow::Result<()> {
        let files = fs::read_dir(path).into_iter().flatten().flatten().map(|file| file.path());
        for entry in [path.to_owned()].into_iter().chain(files) {
            let directory = directory_of(&entry);
            if directory.canonicalize().is_ok_and(|directory| is_dedicated(&directory)) {
                self.readable(directory)?;
            }
            self.allow_reading_beside(&entry)?;
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

    /// Adds a rule; a missing file needs none.
    fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>) -> anyhow::Result<()> {
        let Ok(open) = PathFd::new(path) else { return Ok(()) };
        let rule = PathBeneath::new(open, access);
        (&mut self.ruleset).add_rule(rule).with_context(|| path.display().to_string())?;
        Ok(())
    }
}

/// True if a directory holds only files that weir was given.
fn is_dedicated(directory: &Path) -> bool {
    let is_home = ["/home", "/run/user"].iter().any(|homes| directory.parent() == Some(Path::new(homes)));
    let is_shared = SHARED.iter().any(|shared| directory == Path::new(shared));
    // weir's own configuration is below /etc.
    let never = is_below(directory, &NEVER) && !directory.starts_with("/etc/weir");
    !is_home && !is_shared && !never && !is_home_of_owner(directory)
}

/// True for the home directory of a user account, wherever it is.
fn is_home_of_owner(directory: &Path) -> bool {
    // Lower IDs belong to services (login.defs(5), UID_MIN), whose home is the data that they
    // serve.
    const FIRST_PERSON: u32 = 1000;
    let owner =
        fs::metadata(directory).ok().map(|metadata| metadata.uid()).filter(|&uid| uid >= FIRST_PERSON);
    let account = owner.and_then(|uid| User::from_uid(Uid::from_raw(uid)).ok().flatten());
    let home = account.and_then(|account| account.dir.canonicalize().ok());
    home.is_some_and(|home| home == directory)
}

fn is_below(directory: &Path, roots: &[&str]) -> bool {
    roots.iter().any(|parent| directory.starts_with(parent))
}

/// Paths of existing and later sockets.
fn sockets(plan: &DesiredState, served: &ServedResources) -> Vec<PathBuf> {
    let mut sockets = plan.process.qmp.clone();
    if plan.process.control_socket() != ControlSocketPolicy::Off {
        sockets.extend(ControlSocketLocation::for_daemon().ok().map(|location| location.path));
    }
    for address in plan.process.metrics.iter().chain(&plan.process.http_address) {
        if let ListenAddress::Unix(path) = address {
            sockets.push(path.clone());
        }
    }
    for endpoint in &served.endpoints {
        if let ListenEndpoint::Address(ListenAddress::Unix(path)) = endpoint {
            sockets.push(path.clone());
        }
    }
    for target in &served.export_targets {
        if let ExportTarget::VhostUserBlk(machine) = target {
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
    fn system_directories_are_shared() {
        for dedicated in
            ["/var/lib/weir/images", "/srv/vms", "/etc/weir", "/run/weir", "/tmp/x", "/home/a/vms"]
        {
            assert!(is_dedicated(Path::new(dedicated)), "{dedicated}");
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
            assert!(!is_dedicated(Path::new(shared)), "{shared}");
        }
    }
}
