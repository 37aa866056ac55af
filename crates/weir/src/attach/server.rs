//! Servers of attached disks: a private `weir serve`, which ends with its device, or a running
//! daemon, over its control socket.
//!
//! A daemon that makes no devices (`makes-devices`, as in its sandbox by default) is skipped, and
//! so is one that does not respond within 10 s; a private process then serves the disk. `--qmp` and
//! a `--group` of the daemon are errors in that case: a second group of the same name would have
//! separate limits, and the sum of both would exceed what the operator has set. Passing an opened
//! device to the daemon was not built, as the daemon could not remove or resize it.

use std::{
    fs,
    os::unix::net::{UnixDatagram, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{Receiver, Sender},
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{getsockopt, sockopt::PeerCredentials},
        statvfs::statvfs,
    },
    unistd::{Pid, Uid},
};
use serde_json::json;
use settings::{ExportConfig, ExportTarget, FuseConfig, NbdDeviceConfig, UblkConfig};

use super::{AttachRequest, Attachment, kind::AttachKind, record::AttachmentRecord};
use crate::{
    added_keys,
    client::{ClientError, ControlAddress, ControlClient},
};

/// Events for a keeper.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AttachmentEvent {
    /// The server is ready.
    Ready,
    /// The server or the export has ended; `orderly` if the device is gone.
    Ended { orderly: bool },
    /// The directory is no longer a mount point.
    Unmounted,
}

/// File over which FUSE mounts the disk.
pub(super) fn fuse_file(place: &AttachmentRecord) -> PathBuf {
    place.file("disk")
}

/// Receives readiness messages of the private servers of a place, like a service manager
/// (sd_notify(3)).
pub(super) fn listen(place: &AttachmentRecord, events: Sender<AttachmentEvent>) -> anyhow::Result<()> {
    let path = place.file("notify");
    let _ = fs::remove_file(&path);
    let socket = UnixDatagram::bind(&path).with_context(|| path.display().to_string())?;
    thread::spawn(move || {
        let mut message = [0; 4096];
        while let Ok(length) = socket.recv(&mut message) {
            let mut lines = message[..length].split(|byte| *byte == b'\n');
            if lines.any(|line| line == b"READY=1") && events.send(AttachmentEvent::Ready).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Starts a private server and waits until it is ready. The thread ends with the server.
pub(super) fn start(
    request: &AttachRequest,
    place: &AttachmentRecord,
    events: &Sender<AttachmentEvent>,
    receiver: &Receiver<AttachmentEvent>,
) -> anyhow::Result<JoinHandle<()>> {
    let log = fs::File::create(place.file("log")).context("the server's log")?;
    let lives = place.lock_server()?;
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let mut command = Command::new(program);
    command.arg("serve").arg(format!("--name={}", request.name)).arg(export_option(request, place)?);
    for (name, value) in &request.options {
        command.arg(match value {
            Some(value) => format!("--{name}={value}"),
            None => format!("--{name}"),
        });
    }
    let mut child = command
        .arg(format!("--qmp={}", own_qmp(place)))
        .arg("--")
        .arg(&request.image)
        .env("NOTIFY_SOCKET", place.file("notify"))
        // Describe descriptors that a service manager passed to the caller, not to this server.
        .env_remove("LISTEN_FDS")
        .env_remove("LISTEN_PID")
        .current_dir("/")
        // Holds the lock, so that a cleanup after a killed keeper detects this server.
        .stdin(lives.share().context("the server's lock")?)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("no process can be started")?;
    let (events, sender) = (events.clone(), events.clone());
    let process = thread::spawn(move || {
        let orderly = child.wait().is_ok_and(|status| status.success());
        drop(lives);
        let _ = events.send(AttachmentEvent::Ended { orderly });
    });
    let mut unmounted = false;
    loop {
        match receiver.recv()? {
            AttachmentEvent::Ready => break,
            AttachmentEvent::Ended { .. } => bail!("{}", last_error(&place.file("log"))),
            AttachmentEvent::Unmounted => unmounted = true,
        }
    }
    if unmounted {
        // Requeued for the keeper's own loop.
        let _ = sender.send(AttachmentEvent::Unmounted);
    }
    watch(&own_qmp(place), &request.name, &sender)?;
    Ok(process)
}

/// Reports the end of an export. The end of a private server is reported by its process.
fn watch(qmp: &str, export: &str, events: &Sender<AttachmentEvent>) -> anyhow::Result<()> {
    let target: ControlAddress = qmp.parse().map_err(anyhow::Error::msg)?;
    let watch = ControlClient::connect(&target)?;
    let events = events.clone();
    report_end(target, watch, export, move |orderly| {
        if orderly {
            let _ = events.send(AttachmentEvent::Ended { orderly });
        }
    });
    Ok(())
}

/// Calls `report` once an export has ended: with true if it was removed, false if its server died.
/// An upgrade disconnects watchers, and the export continues at the new process.
fn report_end(
    target: ControlAddress,
    mut watch: ControlClient,
    export: &str,
    report: impl FnOnce(bool) + Send + 'static,
) {
    let export = export.to_owned();
    thread::spawn(move || {
        // A lost connection does not mean a lost export.
        while watch.await_export_end(&export).is_err() {
            let Some(reconnected) = reconnect(&target, &export) else { return report(false) };
            watch = reconnected;
        }
        report(true);
    });
}

/// Connection to the process that serves the export now, if any.
fn reconnect(target: &ControlAddress, export: &str) -> Option<ControlClient> {
    loop {
        match ControlClient::connect(target) {
            // Connected before the query, or the export could end unnoticed in between.
            Ok(watch) => return device(&target.to_string(), export).is_ok().then_some(watch),
            // During an upgrade no process responds for a moment.
            Err(ClientError::Timeout(_)) => {}
            Err(_) => return None,
        }
    }
}

/// Adopts a server that an earlier keeper started. True if it still serves the export.
pub(super) fn adopt(attached: &Attachment, events: &Sender<AttachmentEvent>) -> bool {
    let Ok(target) = attached.qmp.parse::<ControlAddress>() else { return false };
    let Ok(watch) = ControlClient::connect(&target) else { return false };
    if device(&attached.qmp, &attached.export).is_err() {
        return false;
    }
    let events = events.clone();
    report_end(target, watch, &attached.export, move |orderly| {
        let _ = events.send(AttachmentEvent::Ended { orderly });
    });
    true
}

pub(super) fn own_qmp(place: &AttachmentRecord) -> String {
    format!("unix:{}", place.file("qmp").display())
}

/// The last error that a server logged.
fn last_error(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    // The log may end with messages of the shutdown after the error.
    let complaint = text.lines().rev().find_map(|line| line.strip_prefix("weir: "));
    let is_full = || statvfs(log).is_ok_and(|system| system.blocks_free() == 0);
    match complaint.or(text.lines().last()) {
        Some(complaint) => complaint.to_owned(),
        None if is_full() => format!(
            "the server ended, and its log {} could not be written: the file system is full (free \
             some space)",
            log.display()
        ),
        None => "the server ended without an error message".to_owned(),
    }
}

/// Option of `weir serve` that makes the device.
fn export_option(request: &AttachRequest, place: &AttachmentRecord) -> anyhow::Result<String> {
    Ok(match request.way {
        AttachKind::Ublk => {
            let ublk = request.ublk()?;
            format!(
                "--ublk={}",
                // Without CAP_SYS_ADMIN the driver makes unprivileged devices only
                // (UBLK_F_UNPRIVILEGED_DEV).
                UblkConfig { unprivileged: ublk.unprivileged || !Uid::effective().is_root(), ..ublk }
            )
        }
        AttachKind::Nbd => match request.number {
            Some(number) => format!("--nbd-device=/dev/nbd{number}"),
            None => "--nbd-device=auto".to_owned(),
        },
        AttachKind::Fuse => format!("--fuse={}", make_file(place)?),
    })
}

fn make_file(place: &AttachmentRecord) -> anyhow::Result<String> {
    let file = fuse_file(place);
    fs::File::create(&file).with_context(|| file.display().to_string())?;
    file.into_os_string().into_string().map_err(|file| anyhow!("{}: not UTF-8", file.display()))
}

/// Adds the disk to a running daemon. Reports the end of the export or of the daemon.
pub(super) fn add(
    request: &AttachRequest,
    place: &AttachmentRecord,
    qmp: &str,
    events: &Sender<AttachmentEvent>,
) -> anyhow::Result<()> {
    let target: ControlAddress = qmp.parse().map_err(anyhow::Error::msg)?;
    let mut client = ControlClient::connect(&target)?;
    // Connected before the export exists, so that its end cannot be missed.
    let watch = ControlClient::connect(&target)?;
    let report = client.status()?;
    let is_taken = report.disks.iter().any(|disk| disk.name == request.name)
        || report.exports.iter().any(|export| export.id == request.name);
    ensure!(
        !is_taken,
        "{}: the daemon at {target} has a disk or an export of this name already (choose another --name)",
        request.name
    );
    place.set_asked()?;
    let mut disk = added_keys::disk_from_options(&request.name, &request.image, &request.options)?;
    added_keys::adopt_ceph_access(&mut disk, &report.disks)?;
    added_keys::add_export(&mut disk, ExportConfig::Target(export_config(request, place)?));
    added_keys::add_to_daemon(&mut client, &disk)?;
    let events = events.clone();
    report_end(target, watch, &request.name, move |orderly| {
        let _ = events.send(AttachmentEvent::Ended { orderly });
    });
    Ok(())
}

fn export_config(request: &AttachRequest, place: &AttachmentRecord) -> anyhow::Result<ExportTarget> {
    Ok(match request.way {
        AttachKind::Ublk => ExportTarget::Ublk(request.ublk()?),
        AttachKind::Nbd => {
            ExportTarget::NbdDevice(NbdDeviceConfig { number: request.number, ..NbdDeviceConfig::default() })
        }
        AttachKind::Fuse => ExportTarget::Fuse(FuseConfig::new(make_file(place)?.into())),
    })
}

/// Node or file of an export.
pub(super) fn device(qmp: &str, export: &str) -> anyhow::Result<PathBuf> {
    let target: ControlAddress = qmp.parse().map_err(anyhow::Error::msg)?;
    let report = ControlClient::connect(&target)?.status()?;
    let found = report.status.exports.into_iter().find(|found| found.id == export);
    let device = found.and_then(|found| found.device).map(PathBuf::from);
    device.with_context(|| format!("{export}: the server has no device with this name"))
}

/// Checks that the server responds. With `force`, kills a private FUSE server that does not, which
/// removes its device as well.
///
/// # Errors
/// If the server does not respond. Called before any step is undone that only the server can
/// finish.
pub(super) fn check_answers(attached: &Attachment, force: bool) -> anyhow::Result<()> {
    let target: ControlAddress = attached.qmp.parse().map_err(anyhow::Error::msg)?;
    let Err(ClientError::Timeout(_)) = ControlClient::connect(&target) else { return Ok(()) };
    let peer =
        UnixStream::connect(target.path()).and_then(|stream| Ok(getsockopt(&stream, PeerCredentials)?));
    let process = peer.map_err(anyhow::Error::from)?.pid();
    if attached.daemon {
        bail!("the daemon that serves it, process {process}, does not respond (continue it, or end it)");
    }
    // Killing it would not remove its device: ublk and NBD devices wait for a new server.
    if attached.kind != AttachKind::Fuse {
        bail!(
            "its server, process {process}, does not respond (end it with `kill -9 {process}`: it \
             is restarted, and then releases the device)"
        );
    }
    if !force {
        bail!(
            "its server, process {process}, does not respond (continue it, or detach with --force, \
             which ends it: data that is not written yet is lost)"
        );
    }
    kill(Pid::from_raw(process), Signal::SIGKILL).with_context(|| format!("process {process}"))
}

/// Removes the device from the server, even if it is in use, and the disk. An export that is
/// already gone, or that was never requested from the daemon, is not an error.
pub(super) fn remove_export(attached: &Attachment, place: &AttachmentRecord) -> anyhow::Result<()> {
    if attached.daemon && !place.has_asked() {
        return Ok(());
    }
    let target: ControlAddress = attached.qmp.parse().map_err(anyhow::Error::msg)?;
    let mut client = match ControlClient::connect(&target) {
        Ok(client) => client,
        Err(ClientError::Unreachable(_)) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let watch = ControlClient::connect(&target);
    // The caller has already checked for users, or ignores them because of `--force`.
    match client.delete_export(&attached.export, true) {
        // The export is already gone.
        Err(ClientError::Rejected(message)) if !message.ends_with("already shutting down") => {}
        // The keeper may have requested the removal first, after an unmount.
        Ok(_) | Err(ClientError::Rejected(_)) => {
            if let Ok(watch) = watch {
                let _ = watch.await_export_end(&attached.export);
            }
        }
        Err(silent @ ClientError::Timeout(_)) => return Err(silent.into()),
        // A private server ends with its export.
        Err(ClientError::Unreachable(_)) => return Ok(()),
    }
    if !attached.daemon {
        // Fails if the server ended first.
        let _ = client.query("quit");
    } else {
        // The disk is removed from a shared daemon too; without its export it would only hold the
        // image's lock.
        let deleted = client.execute("blockdev-del", json!({ "node-name": attached.name }));
        if let Err(error @ ClientError::Rejected(_)) = deleted
            && client.status().is_ok_and(|report| report.find(&attached.name).is_some())
        {
            return Err(error.into());
        }
    }
    Ok(())
}
