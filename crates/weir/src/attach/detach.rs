//! `weir detach`: looks who uses a device, unmounts what was mounted for it, and has it let go.

use std::{
    path::{Path, PathBuf, absolute},
    sync::mpsc,
    thread,
};

use anyhow::{Context as _, anyhow};
use api::ExportStatus;
use console::{CommandFailure, print_notice};
use control::users::Users;
use serde_json::json;

use super::{Attached, DetachArgs, find, host, keeper, lasting, lost, place::Place, server};
use crate::client::{Client, Target};

/// What to do about users.
const IN_USE: &str = "end that, or detach it with --force: what is not written yet is lost";

/// Of an attachment that a keeper is at work on.
const IN_BETWEEN: &str = "is being attached or detached at this moment (try again once that is over: `weir attach --list` shows what is)";

/// What is at work in a place; `None` while a keeper begins or ends with it. What a keeper that was
/// killed has left of a beginning, and perhaps is nothing, is at work too.
pub(super) fn known(place: &Place) -> anyhow::Result<Option<Attached>> {
    if let Some(attached) = place.attached() {
        return Ok(Some(attached));
    }
    Ok(place.is_deserted()?.then(|| keeper::remains(place)))
}

pub(crate) fn run(arguments: DetachArgs) -> Result<(), CommandFailure> {
    let DetachArgs { what, all, force, qmp } = arguments;
    let mut failed = false;
    let mut done = |name: &Path, result: anyhow::Result<()>| {
        if let Err(error) = result {
            failed = true;
            print_notice(&format!("{}: {error:#}", name.display()));
        }
    };
    if all {
        for place in Place::all()? {
            let known = place.ensure_goes_on(force).and_then(|()| known(&place));
            let detached =
                known.and_then(|known| known.map_or(Ok(()), |known| detach(&place, &known, force)));
            done(Path::new(&place.name()), detached);
        }
    }
    for what in &what {
        done(
            what,
            match find(what)? {
                Some((place, attached)) => detach(&place, &attached, force),
                None => remove(what, force, qmp.clone()),
            },
        );
    }
    if failed { Err(CommandFailure::Found(1)) } else { Ok(()) }
}

/// Waits until everything of it has gone.
pub(crate) fn detach(place: &Place, attached: &Attached, force: bool) -> anyhow::Result<()> {
    place.ensure_goes_on(force)?;
    // Of what never came to be whole nobody has the place, and nobody is to begin with it now.
    let (held, attached) = match place.attached() {
        Some(_) => (None, attached),
        None => {
            let held = place.take_deserted()?.context(IN_BETWEEN)?;
            place.await_server()?;
            (Some(held), &keeper::remains(place))
        }
    };
    let Attached { device, mount, .. } = attached;
    // The keeper takes what is written down of it away as soon as it has gone.
    let made = place.made_loop();
    let made = made.as_ref();
    let mount = mount.as_ref().filter(|directory| Users::of(device).mounts.contains(directory));
    ensure_unused(device, made, mount, force)?;
    server::check_answers(attached, force)?;
    if let Some(directory) = mount.filter(|_| !force) {
        unmount(directory)?;
    }
    if force && made.is_none_or(|made| made.device().is_some()) {
        host::unmount_everywhere(device);
    }
    if mount.is_some() {
        // Whoever has a copy of the mount, in a namespace of its own, writes through it still.
        ensure_unused(device, made, None, force)?;
    }
    keeper::remove_loops(place);
    server::let_go(attached, place)?;
    let held = held.map_or_else(|| place.take_deserted(), |held| Ok(Some(held)))?;
    if let Some(held) = held {
        keeper::clear(place);
        place.remove();
        drop(held);
    }
    place.wait()
}

fn ensure_unused(
    device: &Path,
    made: Option<&host::Loop>,
    except: Option<&PathBuf>,
    force: bool,
) -> anyhow::Result<()> {
    match users(device, made, except) {
        users if users.is_empty() || force => Ok(()),
        users => Err(anyhow!("in use: {users} ({IN_USE})")),
    }
}

/// Who uses a device, and not only for a while. Says so where that may take longer.
pub(super) fn users(device: &Path, made: Option<&host::Loop>, except: Option<&PathBuf>) -> Users {
    let tell = || {
        print_notice(&format!(
            "{}: the kernel has it, such as a file system that is still being unmounted: waiting for that, {} s at most",
            device.display(),
            lasting::WRITING_BACK.as_secs()
        ));
    };
    lasting::users_after_writing_back(device, made, except, tell)
}

fn unmount(directory: &Path) -> anyhow::Result<()> {
    let Err(error) = host::unmount(directory) else { return Ok(()) };
    match Users::inside(directory) {
        users if users.is_empty() => Err(error),
        users => Err(anyhow!("in use: {users} ({IN_USE})")),
    }
}

/// A device that nobody keeps.
fn remove(what: &Path, force: bool, qmp: Option<Target>) -> anyhow::Result<()> {
    if remove_export(what, force, qmp)? {
        return Ok(());
    }
    if let Some(place) = what.to_str().and_then(Place::named) {
        place.ensure_goes_on(force)?;
        return match known(&place)? {
            Some(attached) => detach(&place, &attached, force),
            None => Err(anyhow!(IN_BETWEEN)),
        };
    }
    if lost::devices().contains(&absolute(what)?) {
        ensure_unused(what, None, None, force)?;
        if lost::remove(what)? {
            return Ok(());
        }
    }
    Err(anyhow!(
        "nothing is attached under this name (`weir attach --list` shows what is; with --qmp, what a daemon at that control socket serves)"
    ))
}

/// Of a device that `weir serve` made itself. Whether it was one.
fn remove_export(what: &Path, force: bool, qmp: Option<Target>) -> anyhow::Result<bool> {
    let target = Target::choose(qmp).map_err(anyhow::Error::msg)?;
    let Ok(mut client) = Client::connect(&target) else { return Ok(false) };
    let report = client.status()?;
    let (whole, real) = (absolute(what)?, what.canonicalize());
    let is_meant = |device: &str| Path::new(device) == whole;
    let is_real = |point: &String| real.as_ref().is_ok_and(|real| Path::new(point) == real);
    let export = report.status.exports.into_iter().find(|export| {
        let named = export.id.as_str() == what.as_os_str() && export.device.is_some();
        named || export.device.as_deref().is_some_and(is_meant) || export.mounts.iter().flatten().any(is_real)
    });
    let Some(export) = export else { return Ok(false) };
    match export.device.as_deref() {
        Some(device) if force => host::unmount_everywhere(Path::new(device)),
        _ if export.mounts.iter().flatten().any(is_real) => unmount(&whole)?,
        _ => {}
    }
    let watch = Client::connect(&target)?;
    let mode = if force { "hard" } else { "safe" };
    let removed = client.execute("block-export-del", json!({ "id": export.id, "mode": mode }));
    // What the socket's clients are told to do, in the words of this command.
    removed.map_err(|error| match error.to_string().split_once(" (use mode 'hard'") {
        Some((users, _)) => anyhow!("{users} ({IN_USE})"),
        None => error.into(),
    })?;
    await_end(watch, &export, force)?;
    Ok(true)
}

/// Waits until a device that is on its way out has gone. The kernel keeps one by force until its
/// last user closes it.
fn await_end(watch: Client, export: &ExportStatus, force: bool) -> anyhow::Result<()> {
    let users = export
        .device
        .as_deref()
        .filter(|_| force)
        .map(|device| Users::of(Path::new(device)).with_processes());
    let Some(users) = users.filter(|users| !users.is_empty()) else {
        return Ok(watch.await_export_end(&export.id)?);
    };
    print_notice(&format!(
        "{}: fails all requests now, and goes with its last user: waiting for {users}, {} s at most",
        export.id,
        lasting::WRITING_BACK.as_secs()
    ));
    let (done, ended) = mpsc::channel();
    let id = export.id.clone();
    thread::spawn(move || done.send(watch.await_export_end(&id)));
    match ended.recv_timeout(lasting::WRITING_BACK) {
        Ok(result) => Ok(result?),
        Err(_) => Err(lost::goes_later(&users)),
    }
}
