//! The options of `weir serve`, and the draft that they make.
//!
//! Values are parsed as the config file's, and rules between them are the plan's.

use std::{
    fmt::Display,
    path::{self, PathBuf},
};

use super::steps::Steps;
use clap::{Arg, Args};
use policy::access::Network;
use reactor::Polling;
use settings::{
    AccessDraft, Address, DiskConfig, Door, Draft, ExportConfig, Fuse, GroupConfig, Image, Key, LogFormat,
    Nbd, NbdDevice, NbdExport, OnEvent, Owner, Place, Placed, Record, Said, Sandbox, SecretSource,
    ServiceDraft, TlsDraft, TlsMode, Ublk, VhostUserBlk, Wrong,
    arguments::{KeyArgs, KeyOptions, shared_group},
    log,
};

/// Shown below the options.
pub const EXAMPLES: &str = concat!(
    "\
Examples:
  weir serve vm1.raw
      The image at nbd://localhost, as `qemu-nbd vm1.raw` would, for any number of clients.
  weir serve vm1.raw --cache none --nbd unix:/run/vm1.sock \\
      --iops-total 1000 --iops-total-max 5000 --iops-total-max-length 5
      1000 operations per second, after idle time 5000 for about 6 seconds.
  weir serve a.raw b.raw --group tenant --bps-total 100M
      Two disks, nbd://localhost/a and nbd://localhost/b, that share 100 MiB per second.
  weir serve vm1.raw --iops-total 1000 --watermark 90
      1000 operations per second once the device is nine tenths busy; `weir throttle vm1` changes them.
  weir serve vm1.qcow2 -f qcow2 --cache none --vhost-user-blk unix:/run/vm1.sock,queues=4
      For a virtual machine that shares its memory: docs/virtual-machines.md has QEMU's options.
  weir serve vm1.qcow2 -f qcow2 --ublk
      For this host, as a block device, /dev/ublkb0; `weir attach` does it in one command.
  nbdinfo -- [ weir serve --read-only vm1.raw ]
      On the socket that the caller passes.
  weir serve --config /etc/weir.toml
      Many disks; docs/reference/config.md lists the keys.

", settings::sizes!(), " Times take ns, us, ms or s.
SIGTERM and SIGINT finish what is in flight, flush and exit with status 0; another one, a second or more after the first, exits at once with status 1.
Exit status: 0 ended as asked, 1 failed, 2 wrong use of the command line."
);

/// What `weir serve` is told.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Take the disks from this file; options of an image, its limits and devices to imitate are
    /// then its keys
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Check as `weir check-config` does, also that no program has an image or listens at an
    /// address, and serve nothing
    #[arg(long)]
    pub(crate) check: bool,
    /// Go on where the daemon at this control socket stops, which no client sees; whatever cannot
    /// be taken over is named, and that one goes on [default: the one of --qmp, or where commands
    /// find it]
    #[arg(long, value_name = "unix:PATH", num_args = 0..=1, require_equals = true, conflicts_with = "check", value_parser = settings::socket)]
    pub(crate) takeover: Option<Option<PathBuf>>,
    #[command(flatten)]
    image: ImageArgs,
    #[command(flatten)]
    disk: KeyArgs<DiskOptions>,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    process: ProcessArgs,
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    pub(super) steps: Steps,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Image")]
struct ImageArgs {
    /// A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE, or an export of an NBD
    /// server, nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH; several are several disks
    #[arg(value_name = "IMAGE", value_parser = settings::read::<Image>, display_order = 0, conflicts_with = "config")]
    images: Vec<Image>,
    /// The disk's name, which clients ask for; once for each IMAGE. An empty one is for clients
    /// that ask for no name [default: the file's, without its extension]
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    name: Vec<String>,
    /// What clients are told about the disk; once for each IMAGE
    #[arg(long, value_name = "TEXT", conflicts_with = "config")]
    description: Vec<String>,
    /// An open descriptor to read the passphrase of an encrypted image from
    #[arg(long, value_name = "N", conflicts_with_all = ["config", "secret-file"], help_heading = "qcow2")]
    secret_fd: Vec<u32>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Network")]
struct NetworkArgs {
    /// Serve NBD at unix:PATH, HOST:PORT or fd:NAME, a socket that a service manager passed;
    /// repeatable. Behind a comma: read-only [default: inherited sockets, else localhost:10809]
    #[arg(long, value_name = "ADDRESS[,…]", value_parser = settings::read::<Nbd>)]
    nbd: Vec<Nbd>,
    /// Serve a virtual machine at unix:PATH, over vhost-user-blk, or at fd:NAME, a socket that a
    /// service manager passed; once for each IMAGE, or several for one. Behind commas: queues=N,
    /// queue-size=N, serial=TEXT, logical-block-size=N, discard=off, write-zeroes=off,
    /// write-cache=off, read-only, client (the machine listens there).
    /// NBD is then served only where --nbd says so
    #[arg(long, value_name = "unix:PATH[,…]", value_parser = settings::read::<VhostUserBlk>, conflicts_with = "config")]
    vhost_user_blk: Vec<VhostUserBlk>,
    /// Serve a block device of this host, /dev/ublkbN, by the kernel's ublk driver; once for each
    /// IMAGE, or several for one [default N: the first that is free]. Behind commas: queues=N,
    /// queue-depth=N, dead-timeout=SECONDS (how long requests wait for weir to come back, before
    /// they fail and the device goes; 0 is for ever), logical-block-size=N, discard=off,
    /// write-zeroes=off, write-cache=off, read-only, unprivileged, zero-copy=off
    #[arg(long, value_name = "N[,…]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = settings::read::<Ublk>, conflicts_with = "config")]
    ublk: Vec<Ublk>,
    /// Serve the disk as a file, by FUSE: it is seen in place of FILE, which is there already; once
    /// for each IMAGE, or several for one. Behind commas: growable, allow-other=on|off,
    /// read-only
    #[arg(long, value_name = "FILE[,…]", value_parser = settings::read::<Fuse>, conflicts_with = "config")]
    fuse: Vec<Fuse>,
    /// Serve a block device of this host, /dev/nbdN, by the kernel's NBD client; auto is the first
    /// that is free; once for each IMAGE, or several for one. Behind commas: connections=N,
    /// timeout=SECONDS, dead-timeout=SECONDS (how long requests wait for weir to come back),
    /// logical-block-size=N, read-only
    #[arg(long, value_name = "/dev/nbdN[,…]", value_parser = settings::read::<NbdDevice>, conflicts_with = "config")]
    nbd_device: Vec<NbdDevice>,
    /// Clients at a time at each address; 0 is any number [default: 100]
    #[arg(long, value_name = "N", value_parser = settings::connections)]
    max_connections: Option<u32>,
    /// Of them from one address, or one network of IPv6 of 64 bits, over TCP; further ones are
    /// closed. 0 is any number [default: nine tenths of --max-connections]
    #[arg(long, value_name = "N", value_parser = settings::connections)]
    max_connections_per_address: Option<u32>,
    /// Let clients of NBD come over TCP from this network, such as 10.0.0.0/8 or 2001:db8::/32, and
    /// from no other; repeatable. Of several networks that an address lies in, the narrowest
    /// decides
    #[arg(long, value_name = "NETWORK", value_parser = settings::read::<Network>)]
    allow: Vec<Network>,
    /// Close connections over TCP that come from this network; repeatable
    #[arg(long, value_name = "NETWORK", value_parser = settings::read::<Network>)]
    deny: Vec<Network>,
    /// Permissions of the sockets of --nbd and --vhost-user-blk, in octal, whatever the umask
    /// [default: 0600]
    #[arg(long, value_name = "MODE", value_parser = settings::socket_mode)]
    socket_mode: Option<u32>,
    /// Owner of those sockets: USER, USER:GROUP or :GROUP [default: the daemon's]
    #[arg(long, value_name = "OWNER", value_parser = settings::read::<Owner>)]
    socket_owner: Option<Owner>,
    /// End once a client has been served and the last has gone
    #[arg(long)]
    exit_when_idle: bool,
    /// Take commands of `weir status` and others, which are QEMU's machine protocol, at unix:PATH,
    /// from root and the daemon's own user; repeatable [default: $WEIR_QMP, else
    /// /run/weir/qmp.sock, or $XDG_RUNTIME_DIR/weir/qmp.sock if not root]
    #[arg(long, value_name = "unix:PATH", value_parser = settings::socket)]
    qmp: Vec<PathBuf>,
    /// Fail if the default of --qmp cannot be had; without this, weir then serves and warns
    #[arg(long)]
    control: bool,
    /// Take commands nowhere
    #[arg(long, conflicts_with_all = ["qmp", "control"])]
    no_control: bool,
    /// Tell Prometheus how disks, groups and the daemon do, over HTTP at unix:PATH or HOST:PORT, in
    /// /metrics. Whoever reaches it sees the names of disks and what they do; 0.0.0.0 or :: is
    /// every address of this host [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<Address>,
    /// Start a command for each event, such as a limit that is hit or an image that fails. COMMAND
    /// is an absolute path with arguments; it reads the event as JSON on standard input [default:
    /// none; events are in the log]
    #[arg(long, value_name = "COMMAND", value_parser = settings::read::<OnEvent>)]
    on_event: Option<OnEvent>,
    /// Show what runs on a page, over HTTP at unix:PATH or HOST:PORT, and tell programs the same as
    /// JSON, in /api/v1. Over TLS with --tls and --tls-certificates, but at unix:PATH. Nothing can
    /// be changed there without --http-token-file [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    http: Option<Address>,
    /// Let whoever sends what is in this file, in one line of 16 characters or more, change limits
    /// over --http. Only its owner may read it
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<PathBuf>,
    /// Another name of this host in the page's address; repeatable. Under a name that is not told,
    /// it answers nobody [default: its addresses and localhost]
    #[arg(long, value_name = "NAME", value_parser = settings::http_name)]
    http_name: Vec<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
struct TlsArgs {
    /// Encrypt: off, on (where the client asks) or required [default: off]
    #[arg(long, value_name = "MODE")]
    tls: Option<TlsMode>,
    /// Directory with server-cert.pem and server-key.pem, and ca-cert.pem to verify clients
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Refuse clients without a certificate that ca-cert.pem signs
    #[arg(long)]
    tls_verify_peer: bool,
    /// File of pre-shared keys, user:hexkey lines as psktool writes them
    #[arg(long, value_name = "FILE")]
    tls_psk: Option<PathBuf>,
    /// Serve a client only if its certificate's subject, such as O=Acme,CN=vm1, or its key's user
    /// is this; * and ? are wild; repeatable
    #[arg(long, value_name = "NAME", value_parser = settings::tls_name)]
    tls_authz: Vec<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Process")]
struct ProcessArgs {
    /// Threads that do I/O, from 1 to 256 [default: one for each CPU, at most 8]
    #[arg(long, value_name = "N", value_parser = settings::workers)]
    workers: Option<usize>,
    /// How long a thread looks for completions before it sleeps, at most 1s; off (or 0) never
    /// polls, auto polls while clients get more for it than it costs [default: off]
    #[arg(long, value_name = "TIME|auto|off", value_parser = settings::polling)]
    poll: Option<Polling>,
    /// Memory for data: of requests, which wait for more, of disks in memory, where writes past it
    /// fail with ENOSPC, of caches and read-ahead; at least 128M [default: four
    /// fifths of what the machine, its cgroup and ulimit allow]
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    memory: Option<u64>,
    /// Leave the process's number in this file, locked, while it serves
    #[arg(long, value_name = "FILE", alias = "pidfile")]
    pid_file: Option<PathBuf>,
    /// Continue in the background once it serves. Until then, errors are reported here. From then
    /// on the log goes to --log-file, or nowhere without that option
    #[arg(long)]
    daemonize: bool,
    /// Refuse images outside of this directory, and those that name files outside of it
    #[arg(long, value_name = "DIR")]
    image_root: Option<PathBuf>,
    /// Also run the bursts, watermarks and groups of these limits of control groups, as
    /// `weir cgroup watch` does
    #[arg(long, value_name = "FILE")]
    cgroup_limits: Option<PathBuf>,
    /// Keep every request, with what it waited for, in recordings of an hour in this directory, the
    /// newest: keep=TIME of them [default: 24h], and limit=SIZE at most [default: 1G]
    #[arg(long, value_name = "DIR[,KEY=VALUE]", value_parser = settings::read::<Record>)]
    record: Option<Record>,
    /// Once all is open, give up what serving does not need, by seccomp, landlock and capabilities:
    /// on, require to serve only where the kernel has all of them, or off [default: on]
    #[arg(long, value_name = "MODE", value_parser = settings::read::<Sandbox>)]
    sandbox: Option<Sandbox>,
    /// Once all is open, go on as this user, and this group or else the user's own; as root only
    #[arg(long, value_name = "USER[:GROUP]", value_parser = settings::read::<Owner>)]
    user: Option<Owner>,
    /// Where `weir probe` left what devices can do [default: /var/lib/weir, or ~/.local/state/weir
    /// if not root]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
struct LogArgs {
    /// off, error, warn, info, debug or trace, or for a part MODULE=LEVEL, separated by commas
    /// [default: info]
    #[arg(long, value_name = "FILTER", value_parser = log::filter)]
    log: Option<String>,
    /// Lines for people or JSON objects: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// Append lines to this file instead of standard error, as with --daemonize; SIGUSR1 opens it
    /// again, so that logrotate can move it away
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
}

impl ServeArgs {
    /// Fails where neither an image, a config file nor a step says what to serve.
    pub(crate) fn check_disks(&self) -> Result<(), String> {
        if self.image.images.is_empty() && self.config.is_none() && self.steps.is_empty() {
            let why = "neither an image nor a config file is given";
            return Err(format!("{why} (name an IMAGE, such as disk.qcow2 or memory:1G, or --config FILE)"));
        }
        Ok(())
    }

    /// Whether it is to go on in the background.
    pub fn is_to_daemonize(&self) -> bool {
        self.process.daemonize
    }

    /// Without disks if `--config` was given.
    pub(crate) fn into_draft(self) -> Result<Draft, Wrong> {
        let Self { image, disk, mut network, tls, process, log, .. } = self;
        let (mut disks, group) = image.disks(&disk)?;
        network.own_doors(&mut disks)?;
        Ok(Draft { disks, groups: group.into_iter().collect(), service: service(network, tls, process, log) })
    }
}

impl NetworkArgs {
    /// Gives each disk its own doors, if there are some, and the addresses of NBD.
    fn own_doors(&mut self, disks: &mut [Placed<DiskConfig>]) -> Result<(), Wrong> {
        give(disks, "vhost-user-blk", &mut self.vhost_user_blk, Door::VhostUserBlk)?;
        give(disks, "ublk", &mut self.ublk, Door::Ublk)?;
        give(disks, "fuse", &mut self.fuse, Door::Fuse)?;
        give(disks, "nbd-device", &mut self.nbd_device, Door::NbdDevice)?;
        if disks.iter().all(|disk| disk.exports.is_empty()) {
            return Ok(());
        }
        let nbd: Vec<_> = self.nbd.drain(..).collect();
        for disk in disks {
            for nbd in &nbd {
                let name = disk.export_name.clone();
                let export = NbdExport { listen: nbd.at.clone(), name, read_only: nbd.read_only };
                export_at(disk, ExportConfig::Nbd(export), Place::option("nbd", nbd));
            }
        }
        Ok(())
    }
}

fn export_at(disk: &mut Placed<DiskConfig>, export: ExportConfig, place: Place) {
    disk.put(format!("export[{}]", disk.exports.len()), place);
    disk.exports.push(export);
}

/// Gives each disk one of the doors that an option names, if it names some; a single disk has all.
fn give<D: Display>(
    disks: &mut [Placed<DiskConfig>],
    option: &str,
    doors: &mut Vec<D>,
    door: fn(D) -> Door,
) -> Result<(), Wrong> {
    let (given, images) = (doors.len(), disks.len());
    if given != 0 && given != images && images != 1 {
        let rule = format!("times given: {given}, images: {images} (give one for each, in their order)");
        return Err(Place::new(format!("--{option}")).wrong(rule));
    }
    for (number, value) in doors.drain(..).enumerate() {
        let place = Place::option(option, &value);
        export_at(&mut disks[number % images], ExportConfig::Own(door(value)), place);
    }
    Ok(())
}

/// Keys of the disks that no config file names.
#[derive(Clone, Debug)]
struct DiskOptions;

impl KeyOptions for DiskOptions {
    type Config = DiskConfig;

    /// All but the image and those of each disk, which are options of their own.
    fn has(key: &Key<DiskConfig>) -> bool {
        key.heading != "Access" && !["image", "description", "export"].contains(&key.name)
    }

    fn adapt(option: Arg) -> Arg {
        shared_group(option).conflicts_with("config")
    }
}

impl ImageArgs {
    /// The disks, and the group that they are in.
    fn disks(&self, keys: &KeyArgs<DiskOptions>) -> Result<Disks, Wrong> {
        for (option, given) in [("name", self.name.len()), ("description", self.description.len())] {
            let images = self.images.len();
            if given != 0 && given != images {
                let rule =
                    format!("times given: {given}, images: {images} (give one for each, in their order)");
                return Err(Place::new(format!("--{option}")).wrong(rule));
            }
        }
        let mut group = None;
        let mut disks = Vec::new();
        for (index, image) in self.images.iter().enumerate() {
            let disk;
            (disk, group) = self.disk(index, image, keys)?;
            disks.push(disk);
        }
        Ok((disks, group))
    }

    fn disk(
        &self,
        index: usize,
        image: &Image,
        keys: &KeyArgs<DiskOptions>,
    ) -> Result<(Placed<DiskConfig>, Option<Placed<GroupConfig>>), Wrong> {
        let place = Place::new(image.to_string());
        let config = DiskConfig { name: image.default_name(), image: image.clone(), ..DiskConfig::default() };
        let mut disk = Placed::new(config, place.clone());
        disk.put("image", place);
        // Options of images in a cluster or at a server are for those alone; if there are none, for
        // all, so that they are refused.
        let is_meant = |is_it: fn(&Image) -> bool| is_it(image) || !self.images.iter().any(is_it);
        let group = keys.read_disk(&mut disk, |key| match key {
            "reconnect-delay" | "open-timeout" => is_meant(|image| image.remote().is_some()),
            "rbd-config" | "rbd-user" => is_meant(Image::is_rbd),
            _ => true,
        })?;
        disk.rbd_config = disk.rbd_config.take().map(|path| path::absolute(&path).unwrap_or(path));
        disk.reach()?;
        match self.name.get(index) {
            None => {}
            Some(name) if name.is_empty() => disk.export_name = Some(String::new()),
            Some(name) => disk.name.clone_from(name),
        }
        if let Some(name) = self.name.get(index) {
            disk.put("name", Place::option("name", name));
        }
        if let Some(text) = self.description.get(index) {
            disk.description.clone_from(text);
            disk.put("description", Place::option("description", text));
        }
        if let Some(number) = self.secret_fd.first() {
            disk.qcow2.secrets = self.secret_fd.iter().copied().map(SecretSource::Descriptor).collect();
            disk.put("secret-fd", Place::option("secret-fd", number));
        }
        Ok((disk, group))
    }
}

type Disks = (Vec<Placed<DiskConfig>>, Option<Placed<GroupConfig>>);

fn service(network: NetworkArgs, tls: TlsArgs, process: ProcessArgs, log: LogArgs) -> ServiceDraft {
    let socket = |path: PathBuf| {
        let place = Place::option("qmp", format_args!("unix:{}", path.display()));
        Said { value: path, place }
    };
    fn said<T>(name: &str, value: Option<T>, show: fn(&T) -> String) -> Option<Said<T>> {
        value.map(|value| Said { place: Place::option(name, show(&value)), value })
    }
    fn each<T: Display>(name: &str, values: Vec<T>) -> Vec<Said<T>> {
        let said = |value: T| Said { place: Place::option(name, &value), value };
        values.into_iter().map(said).collect()
    }
    ServiceDraft {
        // A section of the config file's own.
        cluster: None,
        nbd: each("nbd", network.nbd),
        control: network
            .control
            .then(|| Said::new(true, Place::new("--control")))
            .or_else(|| network.no_control.then(|| Said::new(false, Place::new("--no-control")))),
        qmp: network.qmp.into_iter().map(socket).collect(),
        metrics: Said::option("metrics", network.metrics),
        on_event: Said::option("on-event", network.on_event),
        http: Said::option("http", network.http),
        http_token_file: said("http-token-file", network.http_token_file, |path| path.display().to_string()),
        http_name: each("http-name", network.http_name),
        socket_mode: Said::option("socket-mode", network.socket_mode),
        socket_owner: Said::option("socket-owner", network.socket_owner),
        exit_when_idle: Said::option("exit-when-idle", network.exit_when_idle.then_some(true)),
        workers: said("workers", process.workers, usize::to_string),
        poll: said("poll", process.poll, Polling::to_string),
        max_connections: Said::option("max-connections", network.max_connections),
        max_connections_per_address: Said::option(
            "max-connections-per-address",
            network.max_connections_per_address,
        ),
        access: AccessDraft {
            allow: each("allow", network.allow),
            deny: each("deny", network.deny),
            tls_authz: each("tls-authz", tls.tls_authz),
        },
        memory: said("memory", process.memory, |size| settings::exact_size(*size)),
        tls: TlsDraft {
            mode: Said::option("tls", tls.tls),
            certificates: Said::option("tls-certificates", tls.tls_certificates),
            verify_peer: Said::option("tls-verify-peer", tls.tls_verify_peer.then_some(true)),
            psk: Said::option("tls-psk", tls.tls_psk),
        },
        log: Said::option("log", log.log),
        log_format: Said::option("log-format", log.log_format),
        log_file: Said::option("log-file", log.log_file),
        pid_file: Said::option("pid-file", process.pid_file),
        state: Said::option("state", process.state),
        image_root: Said::option("image-root", process.image_root),
        cgroup_limits: Said::option("cgroup-limits", process.cgroup_limits),
        record: Said::option("record", process.record),
        sandbox: Said::option("sandbox", process.sandbox),
        user: Said::option("user", process.user),
    }
}

#[cfg(test)]
#[path = "arguments_tests.rs"]
mod tests;
