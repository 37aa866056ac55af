//! `weir cgroup run`: runs a command in a temporary cgroup with limits, and reports its I/O.
//!
//! ```text
//!   create the cgroup ─► set limits     ─► start the command in it ─► forward signals ─► read totals ─► remove the cgroup
//!   command_cgroup.rs    command_limits.rs command.rs                                    summary.rs     command_cgroup.rs
//! ```
//!
//! The command inherits the standard streams, and its exit status becomes weir's. weir reports on
//! standard error after the command's end, or in a file. The cgroup is removed in every case, also
//! on a signal, unless processes outlive the command: then it remains for them with its limits.

pub(crate) mod arguments;
mod command;
mod command_cgroup;
mod command_limits;
mod summary;

use std::{
    ffi::OsString,
    fs,
    io::{Write as _, stderr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use block::device::{DeviceIdentity, DeviceNumber};
pub(crate) use command::enter;
use command::{CommandEnd, ForwardedSignals};
use command_cgroup::CommandCgroup;
use command_limits::CommandPaths;
use console::{CommandFailure, print_error, print_notice};
use policy::counter;
use summary::{CommandSummary, IoWait};

use super::{
    control_group::{ControlGroup, Version},
    device,
    hierarchy::{CgroupHierarchy, KernelRoots},
    kernel::{
        io_stat::CgroupIoUsage,
        memory_stat::{self, DirtyBytes},
    },
    limit::{any_device, configured::ConfiguredLimits},
    show::{
        reading::{self, CgroupReading},
        tasks,
    },
    target,
};
use crate::run::arguments::RunArgs;

/// Runs the command and returns its exit status ([`CommandFailure::Found`]).
pub(crate) fn run(arguments: RunArgs) -> Result<(), CommandFailure> {
    let change = arguments.settings.change();
    let limits =
        command_limits::limits(&change).map_err(|invalid| CommandFailure::Usage(anyhow!("--{invalid}")))?;
    if arguments.device.as_deref() == Some(any_device::ANY) {
        return Err(CommandFailure::Usage(anyhow!(
            "--device any: the limits of a command are on one disk (name it; or run the command without \
             limits and with --name, and meanwhile set them: `weir cgroup limit NAME --device any`)"
        )));
    }
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
    // Without limits no disk is needed; the current directory may be on a network file system.
    let device = match device::resolve(&hierarchy.roots, arguments.device.as_deref().unwrap_or(".")) {
        Err(_) if arguments.device.is_none() && change.is_empty() => None,
        device => Some(device?),
    };
    let disk = device.as_ref().map(|device| &device.identity);
    let parent = arguments.parent.as_ref().map(|parent| target::resolve(&hierarchy, parent)).transpose()?;
    // Blocked before anything needs cleaning up: from here on no signal kills weir.
    let signals = ForwardedSignals::block().context("signals cannot be awaited")?;
    let cgroup = CommandCgroup::make(&hierarchy, parent, arguments.name.as_deref())?;
    let paths = CommandPaths { limits: arguments.limits.as_deref(), state: arguments.state.as_deref() };
    // In force before the command starts, so that its first request is throttled as well.
    let limits_in_force = command_limits::apply_limits(&hierarchy, cgroup.group(), disk, &change, &paths)?;
    // Before the command's own output begins.
    let notices = device.iter().flat_map(|device| &device.notices);
    for notice in notices.chain(&limits_in_force.notices) {
        print_notice(notice);
    }

    let finished = run_command(cgroup.group(), &arguments.command, &signals, &hierarchy)?;
    let configured = ConfiguredLimits {
        limits,
        watermark: change.watermark.unwrap_or(0),
        weight: change.weight,
        latency_target_us: change.latency_target_us.filter(|target_us| *target_us > 0),
        group: change.group.filter(|name| !name.is_empty()),
    };
    let mut summary = CommandSummary {
        cgroup: cgroup.group().name.clone(),
        status: finished.end.status,
        wall: finished.wall,
        limited: disk.map(DeviceIdentity::number),
        configured,
        devices: device_usage(&finished, disk.map(DeviceIdentity::number)),
        waited: time_waited(&finished, &hierarchy),
        dirty_bytes: dirty_bytes(cgroup.group()),
        remaining: None,
    };
    // Limits are removed only if no process needs them any more.
    let outlived = cgroup.end(arguments.kill);
    if outlived.is_empty() {
        drop(limits_in_force);
    } else {
        limits_in_force.leave();
    }
    summary.remaining = cgroup.remove(outlived);
    if let Err(error) = write_summary(&arguments, &summary) {
        // The command's status is returned even if the report cannot be written.
        print_error(&error);
    }
    match finished.end.status {
        0 => Ok(()),
        status => Err(CommandFailure::Found(status)),
    }
}

struct FinishedCommand {
    before: CgroupReading,
    after: CgroupReading,
    end: CommandEnd,
    wall: Duration,
}

fn run_command(
    group: &ControlGroup,
    command: &[OsString],
    signals: &ForwardedSignals,
    hierarchy: &CgroupHierarchy,
) -> anyhow::Result<FinishedCommand> {
    let began = Instant::now();
    let before = read_cgroup(group)?;
    let mut child = command::start(group, command)?;
    let end = signals.await_end(&mut child, &hierarchy.roots.proc);
    let end = end.context("the command cannot be awaited")?;
    let wall = began.elapsed();
    // The command's status is returned even if the command removed its cgroup.
    let after = read_cgroup(group).unwrap_or_else(|error| {
        print_error(&error);
        before.clone()
    });
    Ok(FinishedCommand { before, after, end, wall })
}

/// Usage of each device, always including the limited one; `None` for a device whose counters fell.
fn device_usage(
    FinishedCommand { before, after, .. }: &FinishedCommand,
    limited: Option<DeviceNumber>,
) -> Vec<(DeviceNumber, String, Option<CgroupIoUsage>)> {
    let usage = |reading: &CgroupReading, number| {
        reading.devices.get(&number).map(|account| account.usage).unwrap_or_default()
    };
    // The limited device comes first.
    let others = after.devices.keys().copied().filter(|&number| Some(number) != limited);
    let numbers: Vec<DeviceNumber> = limited.into_iter().chain(others).collect();
    let row = |number| (number, reading::node(number), usage(after, number).since(&usage(before, number)));
    numbers
        .into_iter()
        .map(row)
        // Other devices only if the command used them.
        .filter(|(number, _, done)| Some(*number) == limited || *done != Some(CgroupIoUsage::default()))
        .collect()
}

fn time_waited(
    FinishedCommand { before, after, end: ended, .. }: &FinishedCommand,
    hierarchy: &CgroupHierarchy,
) -> IoWait {
    let pressure = before.pressure.zip(after.pressure).and_then(|(before, after)| {
        counter::growth(before.some.total_us, after.some.total_us).map(Duration::from_micros)
    });
    // Both are lower bounds of the time waited: report the larger one.
    match (pressure, ended.waited) {
        (Some(anyone), Some(first)) if first > anyone => IoWait::FirstTask(first),
        (Some(anyone), _) => IoWait::AnyTask(anyone),
        (None, Some(first)) => IoWait::FirstTask(first),
        (None, None) if tasks::has_delay_accounting(&hierarchy.roots.proc) => IoWait::Unknown,
        (None, None) => IoWait::NotCounted,
    }
}

/// Dirty bytes not yet on disk; `None` if the kernel does not count them.
fn dirty_bytes(group: &ControlGroup) -> Option<u64> {
    if group.version == Version::V1 {
        return None;
    }
    let text = group.read("memory.stat").ok()?;
    memory_stat::parse(&text).ok().map(DirtyBytes::total)
}

fn read_cgroup(group: &ControlGroup) -> anyhow::Result<CgroupReading> {
    reading::read(group)?
        .with_context(|| format!("cgroup {}: it was removed, perhaps by the command", group.name.display()))
}

fn write_summary(arguments: &RunArgs, summary: &CommandSummary) -> anyhow::Result<()> {
    let text = if arguments.json { summary.json() } else { summary.text() };
    match &arguments.output {
        Some(path) => fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display())),
        // One write: processes of the command may write to the same stream.
        None => stderr().write_all(text.as_bytes()).context("standard error cannot be written"),
    }
}
