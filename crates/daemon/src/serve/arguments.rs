//! The options of `weir serve`, and the draft that they make.
//!
//! Values are parsed as the config file's, and rules between them are the plan's.

use std::{
    fmt::Display,
    path::{self, PathBuf},
};

use super::steps::Steps;
use block::disk::{DetectZeroes, Discards, OnError};
use clap::Args;
use policy::{access::Network, throttle::Setting};
use reactor::Polling;
use settings::{
    AccessDraft, Address, DiskDraft, Door, Draft, ExportDraft, Fuse, GroupDraft, Image, LogFormat, Nbd,
    NbdDevice, OnErrorDraft, OnEvent, Owner, Place, PrefetchDraft, Qcow2Draft, Record, Said, Sandbox,
    ServiceDraft, SettingsDraft, TlsDraft, TlsMode, Ublk, VhostUserBlk, Wrong,
    arguments::{CacheArgs, LimitArgs, LongArgs, Qcow2Args, ShareArgs},
    log, on_error,
};
use storage::{CacheMode, Format, Part, delay::DelayOptions, fault::FaultRule, rate::RateOptions};

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
    #[arg(long, value_name = "FILE", conflicts_with_all = CacheArgs::OPTIONS.into_iter().chain(Setting::ALL.map(Setting::name)))]
    pub(crate) config: Option<PathBuf>,
    /// Tell what would keep it from serving, such as somebody who has an image or listens at an
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
    qcow2: Qcow2Args,
    #[command(flatten)]
    prefetch: LongArgs<true>,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    shares: ShareArgs,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    imitate: ImitateArgs,
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
    /// How the image's bytes are laid out: raw or qcow2 [default: found by probing, where that is
    /// safe]
    #[arg(short, long, value_name = "FORMAT", value_parser = settings::read::<Format>, conflicts_with = "config")]
    format: Option<Format>,
    /// The part of a raw image to serve, such as offset=1M,size=10M [default: all of it]
    #[arg(short, long, value_name = "PART", value_parser = settings::read::<Part>, conflicts_with = "config")]
    options: Option<Part>,
    /// Serve this internal snapshot of a qcow2 image, by its id or name, read-only
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    snapshot: Option<String>,
    /// The host's page cache: writeback, writethrough, none, directsync or unsafe [default:
    /// writeback]
    #[arg(long, value_name = "MODE", value_parser = settings::read::<CacheMode>, conflicts_with = "config")]
    cache: Option<CacheMode>,
    /// When the device fails a read: report it to the client, or stop the disk until `weir resume`
    /// [default: report]
    #[arg(long, value_name = "POLICY", value_parser = settings::read::<OnError>, conflicts_with = "config")]
    on_read_error: Option<OnError>,
    /// The same for writes, flushes and discards: report, stop, or enospc to stop where the device
    /// is full [default: report]
    #[arg(long, value_name = "POLICY", value_parser = settings::read::<OnError>, conflicts_with = "config")]
    on_write_error: Option<OnError>,
    /// What becomes of discards: unmap gives the space back, ignore keeps it allocated, also where
    /// zeroes are written [default: unmap]
    #[arg(long, value_name = "MODE", value_parser = settings::discards, conflicts_with = "config")]
    discard: Option<Discards>,
    /// Look for writes of zeroes alone: on stores them as zeroes and not as bytes, unmap also gives
    /// their space back, off writes what comes [default: off]
    #[arg(long, value_name = "MODE", value_parser = settings::detect_zeroes, conflicts_with = "config")]
    detect_zeroes: Option<DetectZeroes>,
    /// Ceph's config file, for images rbd:POOL/IMAGE [default: the one that Ceph finds]
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    rbd_config: Option<PathBuf>,
    /// Who asks the Ceph cluster, without `client.` [default: admin]
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    rbd_user: Option<String>,
    /// Refuse writes
    #[arg(long, conflicts_with = "config")]
    read_only: bool,
    /// Read an image that somebody else has locked for writing; needs --read-only
    #[arg(long, conflicts_with = "config")]
    force_share: bool,
    /// Lock the image only while a virtual machine runs on the disk, so that another daemon can
    /// take it over, in which the machine goes on
    #[arg(long, conflicts_with = "config")]
    handover: bool,
    /// An image at an NBD server that has gone: let requests wait so long, such as 30s, and ask
    /// again once it is back [default: 0, they fail]
    #[arg(long, value_name = "TIME", value_parser = settings::long_duration, conflicts_with = "config")]
    reconnect_delay: Option<policy::time::Duration>,
    /// An image at an NBD server that cannot be reached yet: try for so long, such as 1m [default:
    /// once, for ten seconds]
    #[arg(long, value_name = "TIME", value_parser = settings::long_duration, conflicts_with = "config")]
    open_timeout: Option<policy::time::Duration>,
    /// The disk's name, which clients ask for; once for each IMAGE. An empty one is for clients
    /// that ask for no name [default: the file's, without its extension]
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    name: Vec<String>,
    /// What clients are told about the disk; once for each IMAGE
    #[arg(long, value_name = "TEXT", conflicts_with = "config")]
    description: Vec<String>,
    /// Put the disks into one group, which limits, reservations and watermark are then for: they
    /// share them
    #[arg(long, value_name = "GROUP", conflicts_with = "config")]
    group: Option<String>,
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
#[command(next_help_heading = "Devices to imitate")]
struct ImitateArgs {
    /// A slower device: each request takes longer, such as read=5ms,write=1ms,parallel=4
    #[arg(long, value_name = "TIMES", value_parser = settings::read::<DelayOptions>, conflicts_with = "config")]
    delay: Option<DelayOptions>,
    /// A narrower device: so much passes per second, such as bytes=22M; with shared=NAME for all
    /// disks together
    #[arg(long, value_name = "RATES", value_parser = settings::read::<RateOptions>, conflicts_with = "config")]
    rate: Option<RateOptions>,
    /// A failing device, such as kind=read,offset=1M-2M,error=EIO,count=3; repeatable
    #[arg(long, value_name = "RULE", value_parser = settings::read::<FaultRule>, conflicts_with = "config")]
    fault: Vec<FaultRule>,
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
        let Self { image, qcow2, prefetch, limits, shares, mut network, tls, imitate, process, log, .. } =
            self;
        let of_disk = if image.group.is_some() { shares.of_member() } else { shares.of_loner(&limits) };
        Ok(Draft {
            groups: image.groups(&shares.settings(&limits)),
            disks: {
                let mut disks = image.disks(&of_disk, &qcow2.draft(), &prefetch.draft(), &imitate)?;
                network.own_doors(&mut disks)?;
                disks
            },
            service: service(network, tls, process, log),
        })
    }
}

impl NetworkArgs {
    /// Gives each disk its own doors, if there are some, and the addresses of NBD.
    fn own_doors(&mut self, disks: &mut [DiskDraft]) -> Result<(), Wrong> {
        give(disks, "vhost-user-blk", &mut self.vhost_user_blk, Door::VhostUserBlk)?;
        give(disks, "ublk", &mut self.ublk, Door::Ublk)?;
        give(disks, "fuse", &mut self.fuse, Door::Fuse)?;
        give(disks, "nbd-device", &mut self.nbd_device, Door::NbdDevice)?;
        if disks.iter().all(|disk| disk.doors.is_empty()) {
            return Ok(());
        }
        let nbd: Vec<_> = self.nbd.drain(..).collect();
        for disk in disks {
            let export = |nbd: &Nbd| ExportDraft {
                listen: Said::new(nbd.at.clone(), Place::option("nbd", nbd)),
                name: disk.export_name.clone(),
                read_only: nbd.read_only,
            };
            disk.exports = nbd.iter().map(export).collect();
        }
        Ok(())
    }
}

/// Gives each disk one of the doors that an option names, if it names some; a single disk has all.
fn give<D: Display>(
    disks: &mut [DiskDraft],
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
        disks[number % images].doors.push(Said::new(door(value), place));
    }
    Ok(())
}

impl ImageArgs {
    fn groups(&self, settings: &SettingsDraft) -> Vec<GroupDraft> {
        let group = |name: &String| GroupDraft {
            cluster: None,
            name: Said::new(name.clone(), Place::option("group", name)),
            settings: settings.clone(),
            group: None,
        };
        self.group.iter().map(group).collect()
    }

    fn disks(
        &self,
        settings: &SettingsDraft,
        qcow2: &Qcow2Draft,
        prefetch: &PrefetchDraft,
        imitate: &ImitateArgs,
    ) -> Result<Vec<DiskDraft>, Wrong> {
        for (option, given) in [("name", self.name.len()), ("description", self.description.len())] {
            let images = self.images.len();
            if given != 0 && given != images {
                let rule =
                    format!("times given: {given}, images: {images} (give one for each, in their order)");
                return Err(Place::new(format!("--{option}")).wrong(rule));
            }
        }
        self.images
            .iter()
            .enumerate()
            .map(|(index, image)| {
                Ok(self.disk(index, &self.reached(image)?, settings, qcow2, prefetch, imitate))
            })
            .collect::<Result<_, Wrong>>()
    }

    /// An image of a cluster, with how that is reached; others as they are, unless all are others.
    fn reached(&self, image: &Image) -> Result<Image, Wrong> {
        let config = Said::option(
            "rbd-config",
            self.rbd_config.as_ref().map(|path| path::absolute(path).unwrap_or_else(|_| path.clone())),
        );
        let user = Said::option("rbd-user", self.rbd_user.clone());
        if !image.is_rbd() && self.images.iter().any(Image::is_rbd) {
            return Ok(image.clone());
        }
        settings::reached(image.clone(), config.as_ref(), user.as_ref())
    }

    fn disk(
        &self,
        index: usize,
        image: &Image,
        settings: &SettingsDraft,
        qcow2: &Qcow2Draft,
        prefetch: &PrefetchDraft,
        imitate: &ImitateArgs,
    ) -> DiskDraft {
        let image = Said::new(image.clone(), Place::new(image.to_string()));
        let said = |option: &str, text: &String| Said::new(text.clone(), Place::option(option, text));
        // Of images at servers; of others too if all are others, so that it is refused.
        let is_meant =
            image.value.remote().is_some() || self.images.iter().all(|image| image.remote().is_none());
        let time = |option, time: Option<policy::time::Duration>| {
            let time = time.filter(|_| is_meant);
            time.map(|time| Said::new(time, Place::option(option, format_args!("{time:?}"))))
        };
        DiskDraft {
            export_name: self.name.get(index).filter(|name| name.is_empty()).map(|name| said("name", name)),
            name: match self.name.get(index).filter(|name| !name.is_empty()) {
                Some(name) => said("name", name),
                None => Said::new(image.value.default_name(), image.place.clone()),
            },
            description: self.description.get(index).map(|text| said("description", text)),
            access: AccessDraft::default(),
            format: Said::option("format", self.format),
            part: Said::option("options", self.options),
            snapshot: self.snapshot.as_ref().map(|name| said("snapshot", name)),
            cache: Said::option("cache", self.cache),
            image,
            qcow2: qcow2.clone(),
            prefetch: prefetch.clone(),
            on_error: OnErrorDraft {
                read: Said::option(on_error::READ, self.on_read_error),
                write: Said::option(on_error::WRITE, self.on_write_error),
            },
            discard: Said::option("discard", self.discard),
            detect_zeroes: Said::option("detect-zeroes", self.detect_zeroes),
            read_only: self.read_only,
            force_share: self.force_share.then(|| Place::new("--force-share")),
            handover: self.handover.then(|| Place::new("--handover")),
            reconnect_delay: time("reconnect-delay", self.reconnect_delay),
            open_timeout: time("open-timeout", self.open_timeout),
            settings: settings.clone(),
            group: self.group.as_ref().map(|name| said("group", name)),
            delay: Said::option("delay", imitate.delay),
            rate: Said::option("rate", imitate.rate.clone()),
            faults: imitate.fault.iter().map(|rule| Said::new(rule.clone(), Place::new("--fault"))).collect(),
            exports: Vec::new(),
            doors: Vec::new(),
        }
    }
}

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
