//! The options of `weir serve`, and the config draft made of them.
//!
//! Values are parsed as in the config file; the plan checks rules between them.

use std::{
    fmt::Display,
    path::{self, Path, PathBuf},
};

use super::steps::Steps;
use clap::{Arg, Args};
use settings::{
    DaemonConfig, DiskConfig, Door, Draft, ExportConfig, Fuse, GroupConfig, Image, Key, Nbd, NbdDevice,
    NbdExport, Place, Placed, SecretSource, Ublk, VhostUserBlk, Wrong,
    arguments::{KeyArgs, KeyOptions, shared_group},
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
    daemon: KeyArgs<DaemonOptions>,
    #[command(flatten)]
    process: ProcessArgs,
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
    /// Take commands nowhere
    #[arg(long, conflicts_with_all = ["qmp", "control"])]
    no_control: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Process")]
struct ProcessArgs {
    /// Continue in the background once it serves. Until then, errors are reported here. From then
    /// on the log goes to --log-file, or nowhere without that option
    #[arg(long)]
    daemonize: bool,
}

impl ServeArgs {
    /// Fails if there is neither an image, a config file nor a step.
    pub(crate) fn check_disks(&self) -> Result<(), String> {
        if self.image.images.is_empty() && self.config.is_none() && self.steps.is_empty() {
            let why = "neither an image nor a config file is given";
            return Err(format!("{why} (name an IMAGE, such as disk.qcow2 or memory:1G, or --config FILE)"));
        }
        Ok(())
    }

    /// True if the daemon is to continue in the background.
    pub fn is_to_daemonize(&self) -> bool {
        self.process.daemonize
    }

    /// Converts the options to a draft; without disks if `--config` was given.
    pub(crate) fn into_draft(self) -> Result<Draft, Wrong> {
        let Self { image, disk, mut network, daemon, .. } = self;
        let (mut disks, group) = image.disks(&disk)?;
        network.own_doors(&mut disks)?;
        let service = network.daemon(&daemon)?;
        Ok(Draft { disks, groups: group.into_iter().collect(), service, cluster: None })
    }
}

impl NetworkArgs {
    /// Assigns exports to their disks, and NBD addresses too if any disk has its own export.
    fn own_doors(&mut self, disks: &mut [Placed<DiskConfig>]) -> Result<(), Wrong> {
        give(disks, "vhost-user-blk", &mut self.vhost_user_blk, Door::VhostUserBlk)?;
        give(disks, "ublk", &mut self.ublk, Door::Ublk)?;
        give(disks, "fuse", &mut self.fuse, Door::Fuse)?;
        give(disks, "nbd-device", &mut self.nbd_device, Door::NbdDevice)?;
        if disks.iter().all(|disk| disk.exports.is_empty()) {
            return Ok(());
        }
        // With exports of single disks, NBD is served only at the given addresses, with every disk
        // there.
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

    /// Config of the daemon: these keys, and the NBD addresses that are left.
    fn daemon(self, keys: &KeyArgs<DaemonOptions>) -> Result<Placed<DaemonConfig>, Wrong> {
        let mut daemon = Placed::<DaemonConfig>::default();
        keys.read_into(&mut daemon, Path::new(""), |_| true)?;
        for (index, nbd) in self.nbd.into_iter().enumerate() {
            daemon.put(format!("nbd[{index}]"), Place::option("nbd", &nbd));
            daemon.nbd.push(nbd);
        }
        if self.no_control {
            daemon.control = Some(false);
            daemon.put("control", Place::new("--no-control"));
        }
        Ok(daemon)
    }
}

fn export_at(disk: &mut Placed<DiskConfig>, export: ExportConfig, place: Place) {
    disk.put(format!("export[{}]", disk.exports.len()), place);
    disk.exports.push(export);
}

/// Assigns the exports of one option to the disks in order; a single disk gets all of them.
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

/// Keys of disks as options, for command lines without a config file.
#[derive(Clone, Debug)]
struct DiskOptions;

impl KeyOptions for DiskOptions {
    type Config = DiskConfig;

    /// True for all keys but the image and those with an option for each disk.
    fn has(key: &Key<DiskConfig>) -> bool {
        key.heading != "Access" && !["image", "description", "export"].contains(&key.name)
    }

    fn adapt(option: Arg) -> Arg {
        shared_group(option).conflicts_with("config")
    }
}

/// Keys of the daemon as options.
#[derive(Clone, Debug)]
struct DaemonOptions;

impl KeyOptions for DaemonOptions {
    type Config = DaemonConfig;

    /// True for all keys but NBD addresses, which accept keys behind a comma.
    fn has(key: &Key<DaemonConfig>) -> bool {
        key.name != "nbd"
    }

    fn adapt(option: Arg) -> Arg {
        match option.get_id().as_str() {
            "pid-file" => option.alias("pidfile"),
            _ => option,
        }
    }
}

impl ImageArgs {
    /// Configs of the disks, and of the group that they share.
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
        // Options for images in Ceph or at an NBD server apply to such images only. If there is
        // none, they apply to all, so that they are rejected.
        let is_meant = |is_it: fn(&Image) -> bool| is_it(image) || !self.images.iter().any(is_it);
        let group = keys.read_disk(&mut disk, |key| match key {
            "reconnect-delay" | "open-timeout" => is_meant(|image| image.remote().is_some()),
            "rbd-config" | "rbd-user" => is_meant(Image::is_rbd),
            _ => true,
        })?;
        // Absolute, because librbd reads the file again later.
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

#[cfg(test)]
#[path = "arguments_tests.rs"]
mod tests;
