//! `weir cgroup run`: runs a command in a temporary cgroup with limits, and reports its I/O.
//!
//! ```text
//!   create the cgroup ─► set limits ─► start the command in it ─► forward signals ─► read totals ─► remove the cgroup
//!   place.rs             hold.rs       command.rs                                    summary.rs     place.rs
//! ```
//!
//! The command inherits the standard streams, and its exit status becomes weir's. weir reports on
//! standard error after the command's end, or in a file. The cgroup is removed in every case, also
//! on a signal, unless processes outlive the command: then it remains for them with its limits.

pub(crate) mod arguments;
mod command;
mod hold;
mod place;
mod summary;

use std::{
    ffi::OsString,
    fs,
    io::{Write as _, stderr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use block::device::{Identity, Number};
pub(crate) use command::enter;
use command::{Ended, Signals};
use console::{Failure, complain, say};
use hold::Places;
use place::Place;
use policy::counter;
use summary::{Summary, Waited};

use super::{
    control_group::{ControlGroup, Version},
    device,
    hierarchy::{Hierarchy, Roots},
    kernel::{
        io_stat::Usage,
        memory_stat::{self, Waiting},
    },
    limit::asked::Asked,
    show::{
        reading::{self, Reading},
        tasks,
    },
    target,
};
use crate::run::arguments::RunArgs;

/// Runs the command and returns its exit status ([`Failure::Found`]).
pub(crate) fn run(arguments: RunArgs) -> Result<(), Failure> {
    let change = arguments.settings.change();
    let limits = hold::limits(&change).map_err(|invalid| Failure::Usage(anyhow!("--{invalid}")))?;
    let hierarchy = Hierarchy::discover(Roots::default())?;
    // Without limits no disk is needed; the current directory may be on a network file system.
    let device = match device::resolve(&hierarchy.roots, arguments.device.as_deref().unwrap_or(".")) {
        Err(_) if arguments.device.is_none() && change.is_empty() => None,
        device => Some(device?),
    };
    let disk = device.as_ref().map(|device| &device.identity);
    let parent = arguments.parent.as_ref().map(|parent| target::resolve(&hierarchy, parent)).transpose()?;
    // Blocked before anything needs cleaning up: from here on no signal kills weir.
    let signals = Signals::block().context("signals cannot be awaited")?;
    let place = Place::make(&hierarchy, parent, arguments.name.as_deref())?;
    let places = Places { limits: arguments.limits.as_deref(), state: arguments.state.as_deref() };
    // In force before the command starts, so that its first request is throttled as well.
    let held = hold::hold(&hierarchy, place.group(), disk, &change, &places)?;
    // Before the command's own output begins.
    let notices = device.iter().flat_map(|device| &device.notices);
    for notice in notices.chain(&held.notices) {
        say(notice);
    }

    let ran = see_it_run(place.group(), &arguments.command, &signals, &hierarchy)?;
    let asked = Asked {
        limits,
        watermark: change.watermark.unwrap_or(0),
        weight: change.weight,
        group: change.group.filter(|name| !name.is_empty()),
    };
    let mut summary = Summary {
        cgroup: place.group().name.clone(),
        status: ran.ended.status,
        wall: ran.wall,
        limited: disk.map(Identity::number),
        asked,
        devices: done(&ran, disk.map(Identity::number)),
        waited: waited(&ran, &hierarchy),
        dirty_bytes: dirty_bytes(place.group()),
        left: None,
    };
    // Limits are removed only if no process needs them any more.
    let outlived = place.end(arguments.kill);
    if outlived.is_empty() {
        drop(held);
    } else {
        held.leave();
    }
    summary.left = place.remove(outlived);
    if let Err(error) = tell(&arguments, &summary) {
        // The command's status is returned even if the report cannot be written.
        complain(&error);
    }
    match ran.ended.status {
        0 => Ok(()),
        status => Err(Failure::Found(status)),
    }
}

struct Ran {
    before: Reading,
    after: Reading,
    ended: Ended,
    wall: Duration,
}

fn see_it_run(
    group: &ControlGroup,
    command: &[OsString],
    signals: &Signals,
    hierarchy: &Hierarchy,
) -> anyhow::Result<Ran> {
    let began = Instant::now();
    let before = look(group)?;
    let mut child = command::start(group, command)?;
    let ended = signals.await_end(&mut child, &hierarchy.roots.proc);
    let ended = ended.context("the command cannot be awaited")?;
    let wall = began.elapsed();
    // The command's status is returned even if the command removed its cgroup.
    let after = look(group).unwrap_or_else(|error| {
        complain(&error);
        before.clone()
    });
    Ok(Ran { before, after, ended, wall })
}

/// Usage of each device, always including the limited one; `None` for a device whose counters fell.
fn done(Ran { before, after, .. }: &Ran, limited: Option<Number>) -> Vec<(Number, String, Option<Usage>)> {
    let usage = |reading: &Reading, number| {
        reading.devices.get(&number).map(|account| account.usage).unwrap_or_default()
    };
    // The limited device comes first.
    let others = after.devices.keys().copied().filter(|&number| Some(number) != limited);
    let numbers: Vec<Number> = limited.into_iter().chain(others).collect();
    let of = |number| (number, reading::node(number), usage(after, number).since(&usage(before, number)));
    numbers
        .into_iter()
        .map(of)
        // Other devices only if the command used them.
        .filter(|(number, _, done)| Some(*number) == limited || *done != Some(Usage::default()))
        .collect()
}

fn waited(Ran { before, after, ended, .. }: &Ran, hierarchy: &Hierarchy) -> Waited {
    let pressure = before.pressure.zip(after.pressure).and_then(|(before, after)| {
        counter::growth(before.some.total_us, after.some.total_us).map(Duration::from_micros)
    });
    // Both are lower bounds of the time waited: report the larger one.
    match (pressure, ended.waited) {
        (Some(anyone), Some(first)) if first > anyone => Waited::First(first),
        (Some(anyone), _) => Waited::Anyone(anyone),
        (None, Some(first)) => Waited::First(first),
        (None, None) if tasks::are_waits_counted(&hierarchy.roots.proc) => Waited::Unknown,
        (None, None) => Waited::NotCounted,
    }
}

/// Dirty bytes not yet on disk; `None` if the kernel does not count them.
fn dirty_bytes(group: &ControlGroup) -> Option<u64> {
    if group.version == Version::V1 {
        return None;
    }
    let text = group.read("memory.stat").ok()?;
    memory_stat::parse(&text).ok().map(Waiting::total)
}

fn look(group: &ControlGroup) -> anyhow::Result<Reading> {
    reading::read(group)?.with_context(|| {
        format!("cgroup {}: somebody has removed it (the command may have)", group.name.display())
    })
}

fn tell(arguments: &RunArgs, summary: &Summary) -> anyhow::Result<()> {
    let text = if arguments.json { summary.json() } else { summary.text() };
    match &arguments.output {
        Some(path) => fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display())),
        // One write: processes of the command may write to the same stream.
        None => stderr().write_all(text.as_bytes()).context("standard error cannot be written"),
    }
}
