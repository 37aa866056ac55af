//! `weir attach` and `weir detach`: a disk as a block device of this host, or mounted, by one
//! command.
//!
//! ```text
//!   attach ── what is wanted ──► keeper, in the background          place: /run/weir/attached/NAME
//!     ▲                            │  server    weir serve of its own, or a running daemon
//!     └── the device, or why not ──┤  host      loop device, mount
//!                                  ▼
//!                     undoes all of it when the server ends, or DIR is unmounted
//!   detach ── looks who uses it, unmounts, has the server let go; waits for the keeper
//! ```
//!
//! Each attachment has a keeper, which alone knows how far it has come: what fails, or loses
//! whoever asked for it, is undone by it. An attachment is a directory, locked by its keeper while
//! that lives.
//!
//! Never touches a request, and never lets go of a device that somebody uses, unless forced.

mod arguments;
mod detach;
mod host;
mod keeper;
mod lasting;
mod list;
mod lost;
mod place;
mod server;
mod way;

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::fd::AsFd as _,
    path::{Path, PathBuf, absolute},
    process::{ChildStdout, Command, Stdio},
};

use anyhow::{Context as _, anyhow, bail, ensure};
pub(crate) use arguments::{ATTACH_EXAMPLES, AttachArgs, DETACH_EXAMPLES, DetachArgs};
use console::{CommandFailure, print, print_json, print_notice};
use control::users::{Users, is_stopped};
pub(crate) use detach::run as detach;
pub(crate) use keeper::run as keep;
pub(crate) use lost::run_guard as guard;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use place::Place;
use serde::{Deserialize, Serialize};
use settings::{UblkConfig, control::VARIABLE};
use way::Way;

use crate::{
    added,
    client::{Client, Error, Target},
};

/// How often whoever waits for a keeper's answer looks whether it stands still, in milliseconds.
const LOOK_MS: u16 = 500;

/// What a keeper is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wanted {
    pub(crate) name: String,
    /// A whole path, or storage of a size.
    pub(crate) image: String,
    /// Options of `weir serve` about the disk: names, and values where they take one.
    pub(crate) options: Vec<(String, Option<String>)>,
    pub(crate) way: Way,
    /// Of ublk, what is said behind `--ublk=`.
    #[serde(default)]
    pub(crate) ublk: String,
    /// The device's number, where it has to be this.
    pub(crate) number: Option<u32>,
    /// The daemon's control socket; none: a server of its own.
    pub(crate) daemon: Option<String>,
    pub(crate) mount: Option<Mount>,
    /// Wait until udev is through with the device.
    pub(crate) udev: bool,
}

impl Wanted {
    /// How ublk is to make the device.
    pub(crate) fn ublk(&self) -> anyhow::Result<UblkConfig> {
        let ublk: UblkConfig = self.ublk.parse().map_err(|rule: String| anyhow!("--ublk={}: {rule}", self.ublk))?;
        Ok(UblkConfig { number: self.number.or(ublk.number), ..ublk })
    }

    pub(crate) fn is_read_only(&self) -> bool {
        let is_by_device = self.way == Way::Ublk && self.ublk().is_ok_and(|ublk| ublk.read_only);
        is_by_device || self.options.iter().any(|(name, _)| name == "read-only" || name == "snapshot")
    }
}

/// Where a device's file system is to be seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mount {
    pub(crate) directory: PathBuf,
    pub(crate) fstype: Option<String>,
    pub(crate) options: Option<String>,
}

/// What a keeper made of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Attached {
    pub(crate) name: String,
    pub(crate) image: String,
    pub(crate) way: Way,
    /// What is to be used: a block device, or a file where no loop device is to be had.
    pub(crate) device: PathBuf,
    /// Below a loop device, the file.
    pub(crate) file: Option<PathBuf>,
    pub(crate) mount: Option<PathBuf>,
    /// The export's id, at this control socket.
    pub(crate) export: String,
    pub(crate) qmp: String,
    /// Whether the server is a daemon that others use too.
    pub(crate) daemon: bool,
    pub(crate) keeper: u32,
}

/// The keeper's answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Attached(Box<Attached>),
    Failed(String),
}

pub(crate) fn run(arguments: AttachArgs) -> Result<(), CommandFailure> {
    if arguments.list || arguments.recover {
        arguments.check_without_image().map_err(|what| CommandFailure::Usage(anyhow!(what)))?;
    }
    if arguments.list {
        return list::run(arguments.json, arguments.qmp);
    }
    if arguments.recover {
        return recover(arguments.json);
    }
    let (json, as_mount) = (arguments.json, arguments.as_mount);
    let is_quiet = as_mount && !arguments.verbose;
    let wanted = wanted(arguments)?;
    if as_mount && is_mounted(&wanted)? {
        return Ok(());
    }
    let attached = attach(&wanted)?;
    if is_quiet {
        return Ok(());
    }
    let told = tell(&attached, json);
    if told.is_err()
        && let Some((place, attached)) = find(Path::new(&attached.name))?
    {
        // Nobody knows of it.
        let _ = detach::detach(&place, &attached, false);
    }
    told
}

/// Whether this image is mounted there already.
fn is_mounted(wanted: &Wanted) -> anyhow::Result<bool> {
    let Some(Mount { directory, .. }) = &wanted.mount else { return Ok(false) };
    let is_it = |attached: &Attached| {
        attached.image == wanted.image
            && attached.mount.as_ref() == Some(directory)
            && Users::of(&attached.device).mounts.contains(directory)
    };
    Ok(Place::all()?.iter().filter_map(Place::attached).any(|attached| is_it(&attached)))
}

fn tell(attached: &Attached, json: bool) -> Result<(), CommandFailure> {
    if let Some(cut) = attached.file.as_deref().map(bytes_past_sectors).filter(|&bytes| bytes > 0) {
        print_notice(&format!(
            "{}: the device is without the last {cut} bytes of the disk, which are no whole sector of 512",
            attached.name
        ));
    }
    match json {
        true => Ok(print_json(attached)?),
        false => Ok(print(&format!("{}\n", attached.device.display()))?),
    }
}

/// What a loop device over a file cannot show.
fn bytes_past_sectors(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |file| file.len() % 512)
}

/// Attaches, in a process of its own that stays.
///
/// # Errors
/// The keeper's; then nothing is left.
pub(crate) fn attach(wanted: &Wanted) -> anyhow::Result<Attached> {
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let mut keeper = Command::new(program)
        .arg(keeper::COMMAND)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("no process can be started")?;
    let mut stdin = keeper.stdin.take().context("no pipe")?;
    let text = serde_json::to_string(wanted)?;
    // One that has died says so below.
    let _ = stdin.write_all(text.as_bytes());
    drop(stdin);
    let stdout = keeper.stdout.take().context("no pipe")?;
    await_answer(&stdout, keeper.id()).with_context(|| wanted.name.clone())?;
    let mut answer = String::new();
    BufReader::new(stdout).read_line(&mut answer).context("the keeper's answer")?;
    match serde_json::from_str(&answer) {
        Ok(Outcome::Attached(attached)) => Ok(*attached),
        Ok(Outcome::Failed(why)) => bail!(why),
        Err(_) => Err(anyhow!("{}: the process that was to keep it died (`dmesg` may say why)", wanted.name)),
    }
}

/// Waits until a keeper answers, or has ended.
///
/// # Errors
/// That it stands still. Nobody hears its answer then, so it undoes everything once it continues.
fn await_answer(stdout: &ChildStdout, keeper: u32) -> anyhow::Result<()> {
    loop {
        let mut polled = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, PollTimeout::from(LOOK_MS)) {
            Ok(0) if is_stopped(keeper) => bail!(
                "process {keeper}, which was to keep it, is stopped (continue it with `kill -CONT {keeper}`: it undoes what it has begun, as nobody waits for it any more)"
            ),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno).context("the keeper's answer"),
        }
    }
}

/// What the command line comes to: the way is chosen here, and told.
fn wanted(arguments: AttachArgs) -> Result<Wanted, CommandFailure> {
    let AttachArgs { image, name, alone, qmp, mount, fstype, mount_options, udev, disk, .. } = &arguments;
    let tell = |text: &str| {
        if !arguments.as_mount || arguments.verbose {
            print_notice(text);
        }
    };
    let usage = |text: String| CommandFailure::Usage(anyhow!(text));
    let Some(image) = image else { return Err(usage("no IMAGE is named".to_owned())) };
    let name = match name {
        Some(name) => {
            place::check_name(name).map_err(|rule| usage(format!("--name {name}: {rule}")))?;
            name.clone()
        }
        None => place::default_name(image),
    };
    let mount = mount.as_ref().map(|directory| -> anyhow::Result<Mount> {
        // As the kernel will name it, by which it is found again.
        let real = directory.canonicalize().ok().filter(|directory| directory.is_dir());
        let real =
            real.with_context(|| format!("{}: is no directory to mount at (make it)", directory.display()))?;
        Ok(Mount { directory: real, fstype: fstype.clone(), options: mount_options.clone() })
    });
    let mount = mount.transpose()?;
    let group = disk.value("group");
    let daemon = match alone {
        true => Running::None,
        false => running_daemon(qmp.clone(), group)?,
    };
    let (daemon, by, why_alone) = match daemon {
        Running::Serves(at) => (Some(at.clone()), format!("by the daemon at {at}"), ""),
        Running::MakesNone(at) => (
            None,
            format!("by a process of its own, as the daemon at {at} makes no devices (docs/devices.md)"),
            "the daemon here has no such group",
        ),
        Running::Silent(at) => (
            None,
            format!("by a process of its own, as the daemon at {at} does not answer (is it stopped?)"),
            "the daemon here does not answer",
        ),
        Running::None => (None, "by a process of its own".to_owned(), "no daemon runs here"),
    };
    let (way, passed_over) = way::choose(arguments.way(), daemon.is_some())?;
    passed_over.iter().for_each(|why| tell(why));
    tell(&format!("{name}: {}, {by}", way.told()));
    if let (None, false, Some(group)) = (&daemon, *alone, group) {
        print_notice(&format!(
            "{name}: {why_alone}, so group {group} has this disk alone, and no limits but those named with it (name the daemon's socket with --qmp, or start it first)"
        ));
    }
    let config = added::disk(&name, image, disk).map_err(CommandFailure::Usage)?;
    let (image, options) = (config.image.to_string(), added::options(&config));
    let ublk = arguments.ublk.as_ref().map(UblkConfig::to_string).unwrap_or_default();
    Ok(Wanted { name, image, options, way, ublk, number: None, daemon, mount, udev: *udev })
}

/// Whether a daemon is to serve what is attached, by its control socket.
enum Running {
    Serves(String),
    /// It may not make devices of this host.
    MakesNone(String),
    /// Something listens there, and does not answer.
    Silent(String),
    None,
}

/// The daemon that was named, or the usual one if it runs and has a config file: one without was
/// started for its own disks, and may end with a terminal.
///
/// # Errors
/// Where only a daemon will do, and it makes no devices: it was named, or has the `group`, whose
/// limits nobody else can keep.
fn running_daemon(qmp: Option<Target>, group: Option<&str>) -> Result<Running, CommandFailure> {
    let is_asked_for = qmp.is_some();
    let is_named = is_asked_for || std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty());
    let target = Target::choose(qmp).map_err(|said| CommandFailure::Usage(anyhow!(said)))?;
    let at = target.whole().context("the current directory")?.to_string();
    let report = match Client::connect(&target).map(|mut client| client.status()) {
        Ok(Ok(report)) => report,
        Err(error) | Ok(Err(error)) if is_asked_for => return Err(error.into()),
        Err(Error::Silent(_)) | Ok(Err(Error::Silent(_))) => return Ok(Running::Silent(at)),
        Err(_) => return Ok(Running::None),
        Ok(Err(error)) => return Err(error.into()),
    };
    if !is_named && report.config.is_none() {
        return Ok(Running::None);
    }
    if report.makes_devices != Some(false) {
        return Ok(Running::Serves(at));
    }
    let group = group.filter(|group| report.group(group).is_some());
    if !is_asked_for && group.is_none() {
        return Ok(Running::MakesNone(at));
    }
    let has = group.map_or_else(String::new, |group| format!(", and it alone has group {group}"));
    Err(CommandFailure::Failed(anyhow!(
        "the daemon at {at} makes no devices of this host{has} (start it as root with --sandbox off, or with a device; for weir.service see \"A daemon that makes devices\" in docs/devices.md; or attach with --alone: a process of its own, and no group of the daemon's)"
    )))
}

/// Takes over what earlier keepers left, each as it was.
fn recover(json: bool) -> Result<(), CommandFailure> {
    let mut failed = false;
    for place in Place::all()? {
        let (Some(wanted), Some(_), true) = (place.wanted(), place.attached(), place.is_deserted()?) else {
            continue;
        };
        match attach(&wanted) {
            Ok(attached) => tell(&attached, json)?,
            Err(error) => {
                failed = true;
                print_notice(&format!("{}: {error:#}", wanted.name));
            }
        }
    }
    if failed { Err(CommandFailure::Found(1)) } else { Ok(()) }
}

/// Takes a device away that nobody uses, if it is one of these. Whether it is.
///
/// # Errors
/// If somebody uses it, whoever made it.
pub(crate) fn let_go(device: &Path) -> anyhow::Result<bool> {
    if let Some((place, attached)) = find(device)? {
        return detach::detach(&place, &attached, false).map(|()| true);
    }
    let users = detach::users(device, None, None);
    ensure!(users.is_empty(), "in use: {users} (end that first)");
    Ok(false)
}

/// What is at work under this name, device, file, directory or image. Where it is mounted at a
/// directory of this name by somebody else, that is its mount.
pub(crate) fn find(what: &Path) -> anyhow::Result<Option<(Place, Attached)>> {
    let whole = absolute(what)?;
    let mut all = Vec::new();
    for place in Place::all()? {
        all.extend(detach::known(&place)?.map(|attached| (place, attached)));
    }
    let is_meant = |attached: &Attached| {
        let paths = [Some(&attached.device), attached.file.as_ref(), attached.mount.as_ref()];
        what.as_os_str() == attached.name.as_str() || paths.into_iter().flatten().any(|path| *path == whole)
    };
    if let Some(index) = all.iter().position(|(_, attached)| is_meant(attached)) {
        return Ok(Some(all.swap_remove(index)));
    }
    let Ok(real) = what.canonicalize() else { return Ok(None) };
    // An image may be attached twice, where nobody writes: then it names neither.
    let mut of_image = all.iter().enumerate().filter(|(_, (_, attached))| {
        [&whole, &real].into_iter().any(|path| path.as_os_str() == attached.image.as_str())
    });
    if let (Some((index, _)), None) = (of_image.next(), of_image.next()) {
        return Ok(Some(all.swap_remove(index)));
    }
    let mounted = all.into_iter().find(|(_, attached)| Users::of(&attached.device).mounts.contains(&real));
    Ok(mounted.map(|(place, attached)| (place, Attached { mount: Some(real), ..attached })))
}
