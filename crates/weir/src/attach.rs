//! `weir attach` and `weir detach`: a disk as a block device of this host, or mounted, by one
//! command.
//!
//! ```text
//!   attach ── request (JSON) ──────► keeper, in the background      record: /run/weir/attached/NAME
//!     ▲                                │  server    a private weir serve, or a running daemon
//!     └── device or error ─────────────┤  host      loop device, mount
//!                                      ▼
//!                     undoes everything when the server ends or DIR is unmounted
//!   detach ── checks the openers, unmounts, removes the export; waits for the keeper to end
//! ```
//!
//! Each attachment has a keeper, the only process that tracks its progress: the keeper undoes the
//! attachment if a step fails or the caller is gone. An attachment is recorded in a directory that
//! its keeper locks for its lifetime.
//!
//! Is not in the data path: I/O requests go to the server. Never releases a device that is in use,
//! unless forced.

mod arguments;
mod detach;
mod host;
mod keeper;
mod kind;
mod lasting_users;
mod list;
mod orphans;
mod record;
mod server;

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
use control::openers::{DeviceOpeners, is_stopped};
pub(crate) use detach::run as detach;
pub(crate) use keeper::run as keep;
use kind::AttachKind;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
pub(crate) use orphans::run_guard as guard;
use record::AttachmentRecord;
use serde::{Deserialize, Serialize};
use settings::{UblkConfig, control::VARIABLE};

use crate::{
    added_keys,
    client::{ClientError, ControlAddress, ControlClient},
};

/// Interval at which a caller that waits for a keeper checks if the keeper is stopped, in
/// milliseconds.
const POLL_MS: u16 = 500;

/// Request to a keeper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachRequest {
    pub(crate) name: String,
    /// An absolute path, or storage of a given size (`memory:`, `null:`).
    pub(crate) image: String,
    /// Options of `weir serve` for the disk: names, and values of those that take one.
    pub(crate) options: Vec<(String, Option<String>)>,
    pub(crate) way: AttachKind,
    /// Text after `--ublk=`.
    #[serde(default)]
    pub(crate) ublk: String,
    /// The device's number, if it must keep one.
    pub(crate) number: Option<u32>,
    /// The daemon's control socket; `None` for a private server.
    pub(crate) daemon: Option<String>,
    pub(crate) mount: Option<AttachMount>,
    /// True to wait until udev has processed the device.
    pub(crate) udev: bool,
}

impl AttachRequest {
    /// Parameters of the ublk device.
    pub(crate) fn ublk(&self) -> anyhow::Result<UblkConfig> {
        let ublk: UblkConfig =
            self.ublk.parse().map_err(|rule: String| anyhow!("--ublk={}: {rule}", self.ublk))?;
        Ok(UblkConfig { number: self.number.or(ublk.number), ..ublk })
    }

    pub(crate) fn is_read_only(&self) -> bool {
        let is_by_device = self.way == AttachKind::Ublk && self.ublk().is_ok_and(|ublk| ublk.read_only);
        is_by_device || self.options.iter().any(|(name, _)| name == "read-only" || name == "snapshot")
    }
}

/// Mount of a device's file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachMount {
    pub(crate) directory: PathBuf,
    pub(crate) fstype: Option<String>,
    pub(crate) options: Option<String>,
}

/// A complete attachment, as recorded and printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Attachment {
    pub(crate) name: String,
    pub(crate) image: String,
    // Records of keepers that an earlier version started have the old name.
    #[serde(rename = "type", alias = "way")]
    pub(crate) kind: AttachKind,
    /// The device to use: a block device, or a file where no loop device can be made.
    pub(crate) device: PathBuf,
    /// The FUSE file below a loop device.
    pub(crate) file: Option<PathBuf>,
    pub(crate) mount: Option<PathBuf>,
    /// Id of the export at the control socket `qmp`.
    pub(crate) export: String,
    pub(crate) qmp: String,
    /// True if the server is a shared daemon.
    pub(crate) daemon: bool,
    pub(crate) keeper: u32,
}

/// The keeper's response.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum KeeperResponse {
    Attached(Box<Attachment>),
    Failed(String),
}

pub(crate) fn run(arguments: AttachArgs) -> Result<(), CommandFailure> {
    if arguments.list || arguments.recover {
        arguments.reject_disk_options().map_err(|message| CommandFailure::Usage(anyhow!(message)))?;
    }
    if arguments.list {
        return list::run(arguments.json, arguments.qmp);
    }
    if arguments.recover {
        return recover(arguments.json);
    }
    let (json, as_mount) = (arguments.json, arguments.as_mount);
    let is_quiet = as_mount && !arguments.verbose;
    let request = attach_request(arguments)?;
    if as_mount && is_mounted(&request)? {
        return Ok(());
    }
    let attached = attach(&request)?;
    if is_quiet {
        return Ok(());
    }
    let printed = print_attachment(&attached, json);
    // Standard output may be a closed pipe: without this, the device would stay behind unnoticed.
    if printed.is_err()
        && let Some((place, attached)) = find_attachment(Path::new(&attached.name))?
    {
        // The caller has no name to detach it by.
        let _ = detach::detach(&place, &attached, false);
    }
    printed
}

/// True if this image is already mounted at this directory.
fn is_mounted(request: &AttachRequest) -> anyhow::Result<bool> {
    let Some(AttachMount { directory, .. }) = &request.mount else { return Ok(false) };
    let is_same = |attached: &Attachment| {
        attached.image == request.image
            && attached.mount.as_ref() == Some(directory)
            && DeviceOpeners::of_device(&attached.device).mounts.contains(directory)
    };
    Ok(AttachmentRecord::all()?
        .iter()
        .filter_map(AttachmentRecord::attached)
        .any(|attached| is_same(&attached)))
}

fn print_attachment(attached: &Attachment, json: bool) -> Result<(), CommandFailure> {
    if let Some(cut) = attached.file.as_deref().map(bytes_past_sectors).filter(|&bytes| bytes > 0) {
        print_notice(&format!(
            "{}: the device lacks the last {cut} bytes of the disk, which are no whole sector of 512 bytes",
            attached.name
        ));
    }
    match json {
        true => Ok(print_json(attached)?),
        false => Ok(print(&format!("{}\n", attached.device.display()))?),
    }
}

/// Bytes at the end of a file that a loop device omits.
fn bytes_past_sectors(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |file| file.len() % 512)
}

/// Attaches in a background process (the keeper).
///
/// # Errors
/// The keeper's; nothing is left behind then.
pub(crate) fn attach(request: &AttachRequest) -> anyhow::Result<Attachment> {
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let mut keeper = Command::new(program)
        .arg(keeper::COMMAND)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // The keeper outlives the caller's terminal; its error is in the response.
        .stderr(Stdio::null())
        .spawn()
        .context("no process can be started")?;
    let mut stdin = keeper.stdin.take().context("no pipe")?;
    let text = serde_json::to_string(request)?;
    // A write to a keeper that died fails; the missing response below reports that.
    let _ = stdin.write_all(text.as_bytes());
    drop(stdin);
    let stdout = keeper.stdout.take().context("no pipe")?;
    await_response(&stdout, keeper.id()).with_context(|| request.name.clone())?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("the keeper's response")?;
    match serde_json::from_str(&line) {
        Ok(KeeperResponse::Attached(attached)) => Ok(*attached),
        Ok(KeeperResponse::Failed(why)) => bail!(why),
        Err(_) => Err(anyhow!("{}: its keeper process died (`dmesg` may have the reason)", request.name)),
    }
}

/// Waits until a keeper responds or ends.
///
/// # Errors
/// If the keeper is stopped. It undoes everything once it continues, as its pipe is closed by then.
fn await_response(stdout: &ChildStdout, keeper: u32) -> anyhow::Result<()> {
    loop {
        let mut polled = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, PollTimeout::from(POLL_MS)) {
            // Without this check, a keeper stopped by a debugger would block its caller forever.
            Ok(0) if is_stopped(keeper) => bail!(
                "its keeper, process {keeper}, is stopped (continue it with `kill -CONT {keeper}`: \
                 it then undoes the attachment)"
            ),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno).context("the keeper's response"),
        }
    }
}

/// Request to the keeper from the command line. Chooses the kind of device and prints the choice.
fn attach_request(arguments: AttachArgs) -> Result<AttachRequest, CommandFailure> {
    let AttachArgs { image, name, alone, qmp, mount, fstype, mount_options, udev, disk, .. } = &arguments;
    let notify = |text: &str| {
        if !arguments.as_mount || arguments.verbose {
            print_notice(text);
        }
    };
    let usage = |text: String| CommandFailure::Usage(anyhow!(text));
    let Some(image) = image else { return Err(usage("IMAGE is missing".to_owned())) };
    let name = match name {
        Some(name) => {
            record::check_name(name).map_err(|rule| usage(format!("--name {name}: {rule}")))?;
            name.clone()
        }
        None => record::default_name(image),
    };
    let mount = mount.as_ref().map(|directory| -> anyhow::Result<AttachMount> {
        // The kernel's own path: mounts are found by it later.
        let real = directory.canonicalize().ok().filter(|directory| directory.is_dir());
        let real =
            real.with_context(|| format!("{}: is not a directory (create it)", directory.display()))?;
        Ok(AttachMount { directory: real, fstype: fstype.clone(), options: mount_options.clone() })
    });
    let mount = mount.transpose()?;
    let group = disk.value("group");
    let daemon = match alone {
        true => DeviceDaemon::None,
        false => device_daemon(qmp.clone(), group)?,
    };
    let (daemon, by, why_alone) = match daemon {
        DeviceDaemon::Serves(at) => (Some(at.clone()), format!("by the daemon at {at}"), ""),
        DeviceDaemon::MakesNone(at) => (
            None,
            format!("by a private process, as the daemon at {at} makes no devices (docs/devices.md)"),
            "the daemon here has no such group",
        ),
        DeviceDaemon::Silent(at) => (
            None,
            format!("by a private process, as the daemon at {at} does not respond (is it stopped?)"),
            "the daemon here does not respond",
        ),
        DeviceDaemon::None => (None, "by a private process".to_owned(), "no daemon runs here"),
    };
    let (kind, passed_over) = kind::choose(arguments.requested_kind(), daemon.is_some())?;
    passed_over.iter().for_each(|why| notify(why));
    notify(&format!("{name}: {}, {by}", kind.description()));
    if let (None, false, Some(group)) = (&daemon, *alone, group) {
        print_notice(&format!(
            "{name}: {why_alone}: the group {group} consists of this disk only and has no other \
             limits than those given here (give the daemon's socket with --qmp, or start it first)"
        ));
    }
    let config = added_keys::disk(&name, image, disk).map_err(CommandFailure::Usage)?;
    let (image, options) = (config.image.to_string(), added_keys::options(&config));
    let ublk = arguments.ublk.as_ref().map(UblkConfig::to_string).unwrap_or_default();
    Ok(AttachRequest { name, image, options, way: kind, ublk, number: None, daemon, mount, udev: *udev })
}

/// Which daemon serves attached disks, found by its control socket.
enum DeviceDaemon {
    Serves(String),
    /// The daemon may not make devices of this host.
    MakesNone(String),
    /// A process listens and does not respond.
    Silent(String),
    None,
}

/// The daemon named by `--qmp` or the environment, or the default one if it runs and has a config
/// file: a daemon without one was started for its own disks and may end with a terminal.
///
/// # Errors
/// If a daemon is required and makes no devices. It is required if `--qmp` names it, or if it has
/// the `group`, whose limits only this daemon can enforce.
fn device_daemon(qmp: Option<ControlAddress>, group: Option<&str>) -> Result<DeviceDaemon, CommandFailure> {
    let is_address_given = qmp.is_some();
    let is_named = is_address_given || std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty());
    let target = ControlAddress::choose(qmp).map_err(|message| CommandFailure::Usage(anyhow!(message)))?;
    let at = target.to_absolute().context("the current directory")?.to_string();
    let report = match ControlClient::connect(&target).map(|mut client| client.status()) {
        Ok(Ok(report)) => report,
        Err(error) | Ok(Err(error)) if is_address_given => return Err(error.into()),
        // A stopped daemon must not prevent attaching, unless it was named explicitly.
        Err(ClientError::Timeout(_)) | Ok(Err(ClientError::Timeout(_))) => {
            return Ok(DeviceDaemon::Silent(at));
        }
        Err(_) => return Ok(DeviceDaemon::None),
        Ok(Err(error)) => return Err(error.into()),
    };
    if !is_named && report.config.is_none() {
        return Ok(DeviceDaemon::None);
    }
    if report.makes_devices != Some(false) {
        return Ok(DeviceDaemon::Serves(at));
    }
    let group = group.filter(|group| report.group(group).is_some());
    // A second group of the same name would double the limit that the operator has set.
    if !is_address_given && group.is_none() {
        return Ok(DeviceDaemon::MakesNone(at));
    }
    let group_note = group.map_or_else(String::new, |group| format!(", and group {group} exists only there"));
    Err(CommandFailure::Failed(anyhow!(
        "the daemon at {at} makes no devices of this host{group_note} (start it as root with --sandbox \
         off, or with a device; for weir.service see \"A daemon that makes devices\" in \
         docs/devices.md; or attach with --alone: by a private process, without the daemon's \
         groups)"
    )))
}

/// Restarts the keepers of attachments whose keepers were killed.
fn recover(json: bool) -> Result<(), CommandFailure> {
    let mut failed = false;
    for place in AttachmentRecord::all()? {
        let (Some(request), Some(_), true) = (place.request(), place.attached(), place.is_abandoned()?)
        else {
            continue;
        };
        match attach(&request) {
            Ok(attached) => print_attachment(&attached, json)?,
            Err(error) => {
                failed = true;
                print_notice(&format!("{}: {error:#}", request.name));
            }
        }
    }
    if failed { Err(CommandFailure::Found(1)) } else { Ok(()) }
}

/// Detaches an unused device if it is an attachment. Returns true if it is one.
///
/// # Errors
/// If the device is in use, even if it is not an attachment.
pub(crate) fn detach_if_attached(device: &Path) -> anyhow::Result<bool> {
    if let Some((place, attached)) = find_attachment(device)? {
        return detach::detach(&place, &attached, false).map(|()| true);
    }
    let users = detach::lasting_users_of(device, None, None);
    ensure!(users.is_empty(), "in use: {users} (end these first)");
    Ok(false)
}

/// The attachment with this name, device, file, directory or image. If its device is mounted at a
/// directory of this name by another process, that mount is returned as its mount.
pub(crate) fn find_attachment(target: &Path) -> anyhow::Result<Option<(AttachmentRecord, Attachment)>> {
    let full_path = absolute(target)?;
    let mut all = Vec::new();
    for place in AttachmentRecord::all()? {
        all.extend(detach::attachment_at(&place)?.map(|attached| (place, attached)));
    }
    let is_meant = |attached: &Attachment| {
        let paths = [Some(&attached.device), attached.file.as_ref(), attached.mount.as_ref()];
        target.as_os_str() == attached.name.as_str()
            || paths.into_iter().flatten().any(|path| *path == full_path)
    };
    if let Some(index) = all.iter().position(|(_, attached)| is_meant(attached)) {
        return Ok(Some(all.swap_remove(index)));
    }
    // Names and recorded paths first: resolving a path may touch the very file system that hangs.
    let Ok(real) = target.canonicalize() else { return Ok(None) };
    // A read-only image may be attached twice; its path is ambiguous then.
    let mut of_image = all.iter().enumerate().filter(|(_, (_, attached))| {
        [&full_path, &real].into_iter().any(|path| path.as_os_str() == attached.image.as_str())
    });
    if let (Some((index, _)), None) = (of_image.next(), of_image.next()) {
        return Ok(Some(all.swap_remove(index)));
    }
    let mounted = all
        .into_iter()
        .find(|(_, attached)| DeviceOpeners::of_device(&attached.device).mounts.contains(&real));
    Ok(mounted.map(|(place, attached)| (place, Attachment { mount: Some(real), ..attached })))
}
