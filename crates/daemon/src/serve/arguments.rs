//! The options of `weir serve`, and their conversion to a parsed config.
//!
//! Values are parsed as in the config file; rules between them are checked with the whole config.

use std::{
    fmt::Display,
    path::{self, Path, PathBuf},
};

use super::qemu_options::QemuSteps;
use clap::{Arg, Args};
use settings::{
    ConfigError, ConfigKey, ConfigWithOrigins, DaemonConfig, DiskConfig, ExportConfig, ExportTarget,
    FuseConfig, GroupConfig, ImageLocation, NbdDeviceConfig, NbdExportConfig, NbdServerConfig, Origin,
    ParsedConfig, SecretSource, UblkConfig, VhostUserBlkConfig,
    arguments::{ConfigKeyArgs, OptionSelection, describe_shared_group},
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

/// Arguments of `weir serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Read the disks from this file; options of images, limits and imitated devices are then its
    /// keys
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Check as `weir check-config` does, and also that images and addresses are free; serve
    /// nothing
    #[arg(long)]
    pub(crate) check: bool,
    /// Take over from the daemon at this control socket, without an effect on clients; if anything
    /// cannot be taken over, it is named, and the old daemon continues [default: the socket of
    /// --qmp, or the default control socket]
    #[arg(long, value_name = "unix:PATH", num_args = 0..=1, require_equals = true, conflicts_with = "check", value_parser = settings::parse_unix_socket)]
    pub(crate) takeover: Option<Option<PathBuf>>,
    #[command(flatten)]
    image: ImageArgs,
    #[command(flatten)]
    disk: ConfigKeyArgs<ServeDiskOptions>,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    daemon: ConfigKeyArgs<DaemonOptions>,
    #[command(flatten)]
    process: ProcessArgs,
    #[command(flatten)]
    pub(super) steps: QemuSteps,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Image")]
struct ImageArgs {
    /// A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE, or an export of an NBD
    /// server, nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH; repeatable: a disk for each
    #[arg(value_name = "IMAGE", value_parser = settings::parse::<ImageLocation>, display_order = 0, conflicts_with = "config")]
    images: Vec<ImageLocation>,
    /// The disk's name, which clients request; once for each IMAGE. An empty name is for clients
    /// that request none [default: the file's, without its extension]
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    name: Vec<String>,
    /// Description that clients see; once for each IMAGE
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
    /// repeatable. After a comma: read-only [default: inherited sockets, else localhost:10809]
    #[arg(long, value_name = "ADDRESS[,…]", value_parser = settings::parse::<NbdServerConfig>)]
    nbd: Vec<NbdServerConfig>,
    /// Serve a virtual machine at unix:PATH, over vhost-user-blk, or at fd:NAME, a socket that a
    /// service manager passed; once for each IMAGE, or several for one. After commas: queues=N,
    /// queue-size=N, serial=TEXT, logical-block-size=N, discard=off, write-zeroes=off,
    /// write-cache=off, read-only, client (the machine listens there).
    /// NBD is then served only with --nbd
    #[arg(long, value_name = "unix:PATH[,…]", value_parser = settings::parse::<VhostUserBlkConfig>, conflicts_with = "config")]
    vhost_user_blk: Vec<VhostUserBlkConfig>,
    /// Serve a block device of this host, /dev/ublkbN, by the kernel's ublk driver; once for each
    /// IMAGE, or several for one [default N: the first that is free]. After commas: queues=N,
    /// queue-depth=N, dead-timeout=SECONDS (time for which requests wait for a restarted weir,
    /// before they fail and the device is removed; 0: forever), logical-block-size=N, discard=off,
    /// write-zeroes=off, write-cache=off, read-only, unprivileged, zero-copy=off
    #[arg(long, value_name = "N[,…]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = settings::parse::<UblkConfig>, conflicts_with = "config")]
    ublk: Vec<UblkConfig>,
    /// Serve the disk as a file, by FUSE: it is mounted over FILE, which must exist; once for each
    /// IMAGE, or several for one. After commas: growable, allow-other=on|off, read-only
    #[arg(long, value_name = "FILE[,…]", value_parser = settings::parse::<FuseConfig>, conflicts_with = "config")]
    fuse: Vec<FuseConfig>,
    /// Serve a block device of this host, /dev/nbdN, by the kernel's NBD client; auto is the first
    /// that is free; once for each IMAGE, or several for one. After commas: connections=N,
    /// timeout=SECONDS, dead-timeout=SECONDS (time for which requests wait for a restarted weir),
    /// logical-block-size=N, read-only
    #[arg(long, value_name = "/dev/nbdN[,…]", value_parser = settings::parse::<NbdDeviceConfig>, conflicts_with = "config")]
    nbd_device: Vec<NbdDeviceConfig>,
    /// Deprecated: --qmp none
    #[arg(long, hide = true, conflicts_with_all = ["qmp", "control"])]
    no_control: bool,
    /// Deprecated: --qmp default
    #[arg(long, hide = true)]
    control: bool,
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

    /// Converts the options to a parsed config; without disks if `--config` was given.
    pub(crate) fn into_parsed_config(self) -> Result<ParsedConfig, ConfigError> {
        let Self { image, disk, mut network, daemon, .. } = self;
        let (mut disks, group) = image.disks(&disk)?;
        network.assign_exports(&mut disks)?;
        let service = network.daemon(&daemon)?;
        Ok(ParsedConfig { disks, groups: group.into_iter().collect(), daemon: service, cluster: None })
    }
}

impl NetworkArgs {
    /// Assigns exports to their disks, and NBD addresses too if any disk has its own export.
    fn assign_exports(&mut self, disks: &mut [ConfigWithOrigins<DiskConfig>]) -> Result<(), ConfigError> {
        assign(disks, "vhost-user-blk", &mut self.vhost_user_blk, ExportTarget::VhostUserBlk)?;
        assign(disks, "ublk", &mut self.ublk, ExportTarget::Ublk)?;
        assign(disks, "fuse", &mut self.fuse, ExportTarget::Fuse)?;
        assign(disks, "nbd-device", &mut self.nbd_device, ExportTarget::NbdDevice)?;
        if disks.iter().all(|disk| disk.exports.is_empty()) {
            return Ok(());
        }
        // With exports of single disks, NBD is served only at the given addresses, with every disk
        // there.
        let nbd: Vec<_> = self.nbd.drain(..).collect();
        for disk in disks {
            for nbd in &nbd {
                let name = disk.export_name.clone();
                let export = NbdExportConfig { listen: nbd.endpoint.clone(), name, read_only: nbd.read_only };
                export_at(disk, ExportConfig::Nbd(export), Origin::option("nbd", nbd));
            }
        }
        Ok(())
    }

    /// Config of the daemon: these keys, and the NBD addresses that are left.
    fn daemon(
        self,
        keys: &ConfigKeyArgs<DaemonOptions>,
    ) -> Result<ConfigWithOrigins<DaemonConfig>, ConfigError> {
        let mut daemon = ConfigWithOrigins::<DaemonConfig>::default();
        keys.read_into(&mut daemon, Path::new(""), |_| true)?;
        for (index, nbd) in self.nbd.into_iter().enumerate() {
            daemon.record_origin(format!("nbd[{index}]"), Origin::option("nbd", &nbd));
            daemon.nbd.push(nbd);
        }
        for (is_given, option, control) in
            [(self.no_control, "--no-control", false), (self.control, "--control", true)]
        {
            if is_given {
                daemon.control = Some(control);
                daemon.record_origin("control", Origin::new(option));
            }
        }
        Ok(daemon)
    }
}

fn export_at(disk: &mut ConfigWithOrigins<DiskConfig>, export: ExportConfig, place: Origin) {
    disk.record_origin(format!("export[{}]", disk.exports.len()), place);
    disk.exports.push(export);
}

/// Assigns the exports of one option to the disks in order; a single disk gets all of them.
fn assign<D: Display>(
    disks: &mut [ConfigWithOrigins<DiskConfig>],
    option: &str,
    values: &mut Vec<D>,
    to_target: fn(D) -> ExportTarget,
) -> Result<(), ConfigError> {
    let (given, images) = (values.len(), disks.len());
    if given != 0 && given != images && images != 1 {
        let rule = format!("times given: {given}, images: {images} (give one for each, in their order)");
        return Err(Origin::new(format!("--{option}")).error(rule));
    }
    for (number, value) in values.drain(..).enumerate() {
        let origin = Origin::option(option, &value);
        export_at(&mut disks[number % images], ExportConfig::Target(to_target(value)), origin);
    }
    Ok(())
}

/// Keys of disks as options, for command lines without a config file.
#[derive(Clone, Debug)]
struct ServeDiskOptions;

impl OptionSelection for ServeDiskOptions {
    type Config = DiskConfig;

    /// True for all keys but the image and those with an option for each disk.
    fn is_option(key: &ConfigKey<DiskConfig>) -> bool {
        key.heading != "Access" && !["image", "description", "export"].contains(&key.name)
    }

    fn adapt(option: Arg) -> Arg {
        describe_shared_group(option).conflicts_with("config")
    }
}

/// Keys of the daemon as options.
#[derive(Clone, Debug)]
struct DaemonOptions;

impl OptionSelection for DaemonOptions {
    type Config = DaemonConfig;

    /// True for all keys but NBD addresses, which accept keys after a comma.
    fn is_option(key: &ConfigKey<DaemonConfig>) -> bool {
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
    fn disks(&self, keys: &ConfigKeyArgs<ServeDiskOptions>) -> Result<Disks, ConfigError> {
        for (option, given) in [("name", self.name.len()), ("description", self.description.len())] {
            let images = self.images.len();
            if given != 0 && given != images {
                let rule =
                    format!("times given: {given}, images: {images} (give one for each, in their order)");
                return Err(Origin::new(format!("--{option}")).error(rule));
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
        image: &ImageLocation,
        keys: &ConfigKeyArgs<ServeDiskOptions>,
    ) -> Result<(ConfigWithOrigins<DiskConfig>, Option<ConfigWithOrigins<GroupConfig>>), ConfigError> {
        let origin = Origin::new(image.to_string());
        let config = DiskConfig { name: image.default_name(), image: image.clone(), ..DiskConfig::default() };
        let mut disk = ConfigWithOrigins::new(config, origin.clone());
        disk.record_origin("image", origin);
        // Options for images in Ceph or at an NBD server apply to such images only. If there is
        // none, they apply to all, so that they are rejected.
        let is_meant =
            |applies_to: fn(&ImageLocation) -> bool| applies_to(image) || !self.images.iter().any(applies_to);
        let group = keys.read_disk(&mut disk, |key| match key {
            "reconnect-delay" | "open-timeout" => is_meant(|image| image.remote().is_some()),
            "rbd-config" | "rbd-user" => is_meant(ImageLocation::is_rbd),
            _ => true,
        })?;
        // Absolute, because librbd reads the file again later.
        disk.rbd_config = disk.rbd_config.take().map(|path| path::absolute(&path).unwrap_or(path));
        disk.apply_ceph_access()?;
        match self.name.get(index) {
            None => {}
            Some(name) if name.is_empty() => disk.export_name = Some(String::new()),
            Some(name) => disk.name.clone_from(name),
        }
        if let Some(name) = self.name.get(index) {
            disk.record_origin("name", Origin::option("name", name));
        }
        if let Some(text) = self.description.get(index) {
            disk.description.clone_from(text);
            disk.record_origin("description", Origin::option("description", text));
        }
        if let Some(number) = self.secret_fd.first() {
            disk.qcow2.secrets = self.secret_fd.iter().copied().map(SecretSource::Descriptor).collect();
            disk.record_origin("secret-fd", Origin::option("secret-fd", number));
        }
        Ok((disk, group))
    }
}

type Disks = (Vec<ConfigWithOrigins<DiskConfig>>, Option<ConfigWithOrigins<GroupConfig>>);

#[cfg(test)]
#[path = "arguments_tests.rs"]
mod tests;
