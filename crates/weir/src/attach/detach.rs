//! `weir detach`: checks the users of a device, unmounts its mounts, and removes it.

use std::{
    path::{Path, PathBuf, absolute},
    sync::mpsc,
    thread,
};

use anyhow::{Context as _, anyhow};
use api::{DetachedDevice, ExportStatus};
use console::{CommandFailure, print_json, print_notice};
use control::openers::DeviceOpeners;

use super::{
    Attachment, DetachArgs, find_attachment, host, keeper, lasting_users, orphans, record::AttachmentRecord,
    server,
};
use crate::client::{ControlAddress, ControlClient};

/// Remedy for a device in use.
const IN_USE: &str = "end these, or detach it with --force: data that is not written yet is lost";

/// Reason for rejecting an attachment whose keeper is attaching or detaching it.
const BUSY: &str = "is being attached or detached (try again when that is done: see `weir attach --list`)";

/// The attachment recorded at a place; `None` while its keeper starts or ends. Includes the remains
/// of an attachment whose keeper was killed early, which may be empty.
pub(super) fn attachment_at(place: &AttachmentRecord) -> anyhow::Result<Option<Attachment>> {
    if let Some(attached) = place.attached() {
        return Ok(Some(attached));
    }
    Ok(place.is_abandoned()?.then(|| keeper::partial_record(place)))
}

pub(crate) fn run(arguments: DetachArgs) -> Result<(), CommandFailure> {
    let DetachArgs { what: targets, all, force, json, qmp } = arguments;
    let mut outcomes = Vec::new();
    let mut finish = |name: &Path, result: anyhow::Result<()>| {
        let (name, error) = (name.display().to_string(), result.err().map(|error| format!("{error:#}")));
        if let Some(error) = &error {
            print_notice(&format!("{name}: {error}"));
        }
        outcomes.push(DetachedDevice { name, detached: error.is_none(), error });
    };
    if all {
        for place in AttachmentRecord::all()? {
            let known = place.ensure_not_stopped(force).and_then(|()| attachment_at(&place));
            let detached =
                known.and_then(|known| known.map_or(Ok(()), |known| detach(&place, &known, force)));
            finish(Path::new(&place.name()), detached);
        }
    }
    for target in &targets {
        finish(
            target,
            match find_attachment(target)? {
                Some((place, attached)) => detach(&place, &attached, force),
                None => remove_without_keeper(target, force, qmp.clone()),
            },
        );
    }
    if json {
        print_json(&outcomes)?;
    }
    if outcomes.iter().all(|outcome| outcome.detached) { Ok(()) } else { Err(CommandFailure::Found(1)) }
}

/// Detaches, and returns once the keeper has ended.
pub(crate) fn detach(place: &AttachmentRecord, attached: &Attachment, force: bool) -> anyhow::Result<()> {
    place.ensure_not_stopped(force)?;
    // An incomplete attachment has no keeper. Its lock is taken so that no new keeper starts
    // meanwhile.
    let (lock, attached) = match place.attached() {
        Some(_) => (None, attached),
        None => {
            let lock = place.lock_abandoned()?.context(BUSY)?;
            place.await_server()?;
            (Some(lock), &keeper::partial_record(place))
        }
    };
    let Attachment { device, mount, .. } = attached;
    // Read now: the keeper deletes the record of the loop device together with the device.
    let attached_loop = place.made_loop();
    let attached_loop = attached_loop.as_ref();
    let mount =
        mount.as_ref().filter(|directory| DeviceOpeners::of_device(device).mounts.contains(directory));
    ensure_unused(device, attached_loop, mount, force)?;
    // Before unmounting: a server that does not respond could not finish the writeback.
    server::check_answers(attached, force)?;
    if let Some(directory) = mount.filter(|_| !force) {
        unmount(directory)?;
    }
    // The loop device may be gone already, and its name may belong to another file: unmount only if
    // it is the recorded one.
    if force && attached_loop.is_none_or(|attached_loop| attached_loop.device().is_some()) {
        host::unmount_everywhere(device);
    }
    if mount.is_some() {
        // A copy of the mount in another mount namespace still writes to the device.
        ensure_unused(device, attached_loop, None, force)?;
    }
    // Loop devices before the server: they hold its file open.
    keeper::remove_loops(place);
    server::remove_export(attached, place)?;
    // A living keeper clears the record itself; this removes the record of a dead one.
    let lock = lock.map_or_else(|| place.lock_abandoned(), |held| Ok(Some(held)))?;
    if let Some(lock) = lock {
        keeper::remove_remains(place);
        place.remove();
        drop(lock);
    }
    place.wait()
}

fn ensure_unused(
    device: &Path,
    attached_loop: Option<&host::AttachedLoop>,
    except: Option<&PathBuf>,
    force: bool,
) -> anyhow::Result<()> {
    match lasting_users_of(device, attached_loop, except) {
        users if users.is_empty() || force => Ok(()),
        users => Err(anyhow!("in use: {users} ({IN_USE})")),
    }
}

/// Lasting users of a device. Prints a message if the kernel still writes it back.
pub(super) fn lasting_users_of(
    device: &Path,
    attached_loop: Option<&host::AttachedLoop>,
    except: Option<&PathBuf>,
) -> DeviceOpeners {
    let notify = || {
        print_notice(&format!(
            "{}: the kernel still uses it, for example to write back an unmounted file system: \
             waiting up to {} s",
            device.display(),
            lasting_users::WRITEBACK_TIMEOUT.as_secs()
        ));
    };
    lasting_users::users_after_writing_back(device, attached_loop, except, notify)
}

fn unmount(directory: &Path) -> anyhow::Result<()> {
    let Err(error) = host::unmount(directory) else { return Ok(()) };
    match DeviceOpeners::of_directory(directory) {
        users if users.is_empty() => Err(error),
        users => Err(anyhow!("in use: {users} ({IN_USE})")),
    }
}

/// Removes a device without a keeper: an export, an incomplete attachment or an orphaned device.
fn remove_without_keeper(target: &Path, force: bool, qmp: Option<ControlAddress>) -> anyhow::Result<()> {
    if remove_export(target, force, qmp)? {
        return Ok(());
    }
    if let Some(place) = target.to_str().and_then(AttachmentRecord::find) {
        place.ensure_not_stopped(force)?;
        return match attachment_at(&place)? {
            Some(attached) => detach(&place, &attached, force),
            None => Err(anyhow!(BUSY)),
        };
    }
    // Last: a device with a keeper or an export must be removed by those.
    if orphans::devices().contains(&absolute(target)?) {
        ensure_unused(target, None, None, force)?;
        if orphans::remove(target)? {
            return Ok(());
        }
    }
    Err(anyhow!(
        "not attached (`weir attach --list` lists attached disks; --qmp includes the devices of that daemon)"
    ))
}

/// Removes a device that `weir serve` exports itself. Returns true if it was one.
fn remove_export(path: &Path, force: bool, qmp: Option<ControlAddress>) -> anyhow::Result<bool> {
    let target = ControlAddress::choose(qmp).map_err(anyhow::Error::msg)?;
    let Ok(mut client) = ControlClient::connect(&target) else { return Ok(false) };
    let report = client.status()?;
    let (full_path, real) = (absolute(path)?, path.canonicalize());
    let is_meant = |device: &str| Path::new(device) == full_path;
    let is_real = |point: &String| real.as_ref().is_ok_and(|real| Path::new(point) == real);
    let export = report.status.exports.into_iter().find(|export| {
        let named = export.id.as_str() == path.as_os_str() && export.device.is_some();
        named || export.device.as_deref().is_some_and(is_meant) || export.mounts.iter().flatten().any(is_real)
    });
    let Some(export) = export else { return Ok(false) };
    match export.device.as_deref() {
        // Mounts would keep the device in use even after its forced removal.
        Some(device) if force => host::unmount_everywhere(Path::new(device)),
        _ if export.mounts.iter().flatten().any(is_real) => unmount(&full_path)?,
        _ => {}
    }
    // Connected before the removal, so that its event cannot be missed.
    let watch = ControlClient::connect(&target)?;
    let removed = client.delete_export(&export.id, force);
    // Replaces the daemon's hint about QMP's mode by the option of this command.
    removed.map_err(|error| match error.to_string().split_once(" (use mode 'hard'") {
        Some((users, _)) => anyhow!("{users} ({IN_USE})"),
        None => error.into(),
    })?;
    await_removal(watch, &export, force)?;
    Ok(true)
}

/// Waits until a device is removed. The kernel keeps a forcibly removed device until its last user
/// closes it.
fn await_removal(watch: ControlClient, export: &ExportStatus, force: bool) -> anyhow::Result<()> {
    let users = export
        .device
        .as_deref()
        .filter(|_| force)
        .map(|device| DeviceOpeners::of_device(Path::new(device)).with_processes());
    let Some(users) = users.filter(|users| !users.is_empty()) else {
        return Ok(watch.await_export_end(&export.id)?);
    };
    print_notice(&format!(
        "{}: all its requests fail now; the kernel removes it when its last user closes it (in \
         use: {users}; waiting up to {1} s)",
        export.id,
        lasting_users::WRITEBACK_TIMEOUT.as_secs()
    ));
    let (sender, receiver) = mpsc::channel();
    let id = export.id.clone();
    // The client's wait has no deadline, so it runs in a thread that is abandoned.
    thread::spawn(move || sender.send(watch.await_export_end(&id)));
    match receiver.recv_timeout(lasting_users::WRITEBACK_TIMEOUT) {
        Ok(result) => Ok(result?),
        Err(_) => Err(orphans::removal_pending(&users)),
    }
}
