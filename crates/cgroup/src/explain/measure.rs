//! `--measure`: the limit tested, path by path.
//!
//! ```text
//!   weir ──── moves, tells ────► weir cgroup load, in a cgroup beside the examined one, with its limits    place.rs, worker.rs, load.rs
//!    │                               │ writes and reads small files: direct, buffered, flushed, from the page cache   proof.rs
//!    ├── io.stat of that cgroup ◄────┤ what was charged to it
//!    ├── the disk's statistics ◄─────┤ what arrived
//!    └── a trace of our own ◄────────┘ who sent it, and who was made to wait                                trace.rs
//! ```
//!
//! If writeback is charged to the cgroup, it gets so little memory that the writer soon waits for
//! writeback workers, as every long writer does; the rest is flushed in the owner's name. If not,
//! syncfs(2) has the workers write at once: no limit of others holds that up, as theirs are not
//! kept either. Everything made is removed, also on a signal; files have no names from the
//! beginning.

mod load;
mod place;
mod proof;
mod report;
mod trace;
mod worker;

use std::{
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use anyhow::{Context as _, bail};
use block::device::{Identity, Number, Roots};
use console::undo::Undo;
pub(crate) use load::run as run_load;
use policy::steering::Rates;
pub(super) use report::{json, text};

use self::{
    place::Place,
    proof::Proof,
    trace::{Trace, Traced},
    worker::Worker,
};
use super::{
    facts::{self, Facts},
    findings,
};
use crate::{
    control_group::{ControlGroup, Version},
    device,
    hierarchy::Hierarchy,
};

#[derive(Debug, Clone)]
pub(super) struct Wish<'a> {
    /// Where files are made; by default on a limited disk.
    pub(super) directory: Option<&'a Path>,
    /// On each path.
    pub(super) most_bytes: u64,
    /// How long each path takes if the limit is kept.
    pub(super) time: Duration,
    pub(super) quiet: bool,
}

#[derive(Debug)]
pub(super) struct Measured {
    pub(super) directory: PathBuf,
    pub(super) node: String,
    pub(super) untraced: Option<String>,
    pub(super) ways: Vec<Way>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Way {
    pub(super) name: &'static str,
    /// In bytes per second.
    pub(super) limit_bps: Option<u64>,
    pub(super) result: Result<Figures, String>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figures {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    /// Of the calls themselves: less than all if something was written later.
    pub(super) calls_seconds: f64,
    pub(super) charged_bytes: u64,
    /// By whomever.
    pub(super) disk_bytes: u64,
    traced: Option<Traced>,
    pub(super) kept: Kept,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    Yes,
    No,
    /// It was slower than the limit by itself.
    Slower,
    /// There is nothing to compare with.
    NotLimited,
    /// It is no I/O.
    NoIo,
}

impl Figures {
    pub(super) fn bps(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9)
    }
}

pub(super) fn measure(
    hierarchy: &Hierarchy,
    group: &ControlGroup,
    facts: &Facts,
    wish: &Wish<'_>,
) -> anyhow::Result<Measured> {
    let directory = match wish.directory {
        Some(directory) => directory.to_owned(),
        None => usual_directory(facts)?,
    };
    let shown = directory.display().to_string();
    let target = device::resolve(&hierarchy.roots, &shown)?;
    let node = target.identity.node();
    let spot = facts::spot(hierarchy, &directory);
    let Some((disk, rates)) = in_force(facts, &spot.stack) else {
        bail!(
            "{shown}: nothing is limited on its disk {node} (set a limit on that, or name another --directory)"
        );
    };
    let places = Roots { sys: hierarchy.roots.sys.clone(), mounts: hierarchy.roots.mountinfo() };
    let identity = Identity::resolve(disk, &places).with_context(|| format!("the limited disk {disk}"))?;
    let undo = Undo::watch()?;
    let name = format!("weir-explain-{}", process::id());
    let own = facts.own().limits.iter().filter(|limit| spot.stack.contains(&limit.disk));
    let own: Vec<(Number, Rates)> = own.map(|limit| (limit.disk, limit.rates)).collect();
    let place = undo.making(|| {
        let place = Place::beside(group, &name, &own)?;
        let removal = place.removal();
        Ok((place, removal))
    })?;
    let worker = undo.making(|| {
        let worker = Worker::start(&directory)?;
        let end = worker.end();
        Ok((worker, end))
    })?;
    place.enter(worker.process())?;
    let trace = undo.making(|| {
        let trace = begin_trace(hierarchy, &name, disk)?;
        let removal = trace.removal();
        Ok((trace, removal))
    });
    let untraced = trace.as_ref().err().map(|error| format!("{error:#}"));
    let charged =
        spot.file_system.is_some_and(|file_system| findings::charges_writeback(facts, &file_system));
    let (trace, wish) = (trace.ok(), wish.clone());
    let mut proof =
        Proof { directory: directory.clone(), worker, place, trace, disk, identity, rates, charged, wish };
    let ways = proof.all();
    Ok(Measured { directory, node, untraced, ways })
}

fn usual_directory(facts: &Facts) -> anyhow::Result<PathBuf> {
    let limited = |disk: Number| facts.levels.iter().any(|level| level.limit(disk).is_some());
    let on_limited = facts
        .file_systems
        .iter()
        .filter(|file_system| file_system.used)
        .find(|file_system| matches!(file_system.below, facts::Below::Disk(disk) if limited(disk)));
    match on_limited {
        Some(file_system) => Ok(PathBuf::from(&file_system.point)),
        None => bail!("--measure: no file system on a limited disk is known (name a --directory)"),
    }
}

/// The uppermost limited disk of a stack, and the lowest rates in force on it.
fn in_force(facts: &Facts, stack: &[Number]) -> Option<(Number, Rates)> {
    let levels = if facts.version == Version::V1 { &facts.levels[..1] } else { &facts.levels[..] };
    stack.iter().find_map(|&disk| {
        let mut limits =
            levels.iter().filter_map(|level| level.limit(disk)).map(|limit| limit.rates).peekable();
        limits.peek()?;
        Some((disk, findings::lowest_of(limits)))
    })
}

fn begin_trace(hierarchy: &Hierarchy, name: &str, disk: Number) -> anyhow::Result<Trace> {
    let mounts = hierarchy.roots.mounts()?;
    let tracefs = mounts.iter().find(|mount| mount.kind == "tracefs").context("no tracefs is mounted")?;
    Trace::begin(&tracefs.point, name, disk).with_context(|| tracefs.point.display().to_string())
}
