//! Conclusions from the facts: which I/O a limit covers, which escapes it, why, and the remedy.
//!
//! ```text
//!   a use (process, file, mode) ─► requests ─► charged to …          charge.rs         its cgroup │ the root │ several
//!                                          └─► limited there on …    limit_search.rs   this disk │ one below │ none
//!                                          ──► covered │ partly │ escapes │ unlimited
//!   findings about the whole cgroup                                  whole_cgroup.rs
//! ```
//!
//! A pure function of the facts. Each rule cites its document or commit. Rules go by the kernel's
//! release number, so a distribution's backported fix is reported as missing, never the reverse;
//! `--measure` shows the difference.

mod cause;
mod charge;
mod limit_search;
mod whole_cgroup;
mod wording;

use std::collections::BTreeSet;

use block::device::DeviceNumber;
pub(crate) use cause::Cause;
pub(crate) use wording::{lowest_of, rates};

use self::{charge::ChargedCgroup, limit_search::LimitSearch};
use super::facts::{AccessMode, CgroupFacts, Evidence, FileUse, IoLocation, MountedFileSystem};

named! { Coverage {
    Escapes = "escapes" / "ESCAPES",
    Partly = "partly" / "PARTLY",
    Covered = "covered",
    /// No limit is set for that direction on that disk.
    Unlimited = "unlimited" / "no limit",
    Note = "note",
} }

impl Coverage {
    /// True if the coverage defeats the purpose of the limit.
    pub(crate) fn is_failure(self) -> bool {
        matches!(self, Self::Escapes | Self::Partly)
    }
}

named! { Io {
    DirectReads = "direct-reads" / "direct reads",
    DirectWrites = "direct-writes" / "direct writes",
    Reads = "reads",
    BufferedWrites = "buffered-writes" / "buffered writes",
    SynchronousWrites = "synchronous-writes" / "synchronous writes",
    MappedWrites = "mapped-writes" / "writes to mappings",
    Swapping = "swapping",
} }

impl Io {
    fn of(used: &FileUse) -> Vec<Self> {
        let read = if used.access_mode == AccessMode::Direct { Self::DirectReads } else { Self::Reads };
        let write = match used.access_mode {
            AccessMode::Direct => Self::DirectWrites,
            AccessMode::Buffered => Self::BufferedWrites,
            AccessMode::Synchronous => Self::SynchronousWrites,
            AccessMode::Mapped => Self::MappedWrites,
        };
        [used.reads.then_some(read), used.writes.then_some(write)].into_iter().flatten().collect()
    }

    fn reads(self) -> bool {
        matches!(self, Self::DirectReads | Self::Reads | Self::Swapping)
    }

    fn writes(self) -> bool {
        !matches!(self, Self::DirectReads | Self::Reads)
    }

    fn written_back(self) -> bool {
        matches!(self, Self::BufferedWrites | Self::MappedWrites)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct CoverageFinding {
    pub(crate) coverage: Coverage,
    pub(crate) cause: Cause,
    /// Processes and their kinds of I/O; `None` if no process does it at present.
    pub(crate) acts: BTreeSet<(Option<i32>, Io)>,
    pub(crate) disk: Option<DeviceNumber>,
    /// Disk node and file system, as text; empty if the finding is about no location.
    pub(crate) location: String,
    pub(crate) explanation: String,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) remedy: Option<String>,
}

impl CoverageFinding {
    pub(crate) fn ios(&self) -> BTreeSet<Io> {
        self.acts.iter().map(|(_, io)| *io).collect()
    }
}

/// Finding about one request, before equal findings are merged.
#[derive(Debug)]
struct RequestVerdict {
    coverage: Coverage,
    cause: Cause,
    evidence: Vec<Evidence>,
    detail: String,
}

/// Number of files that a finding cites at most.
const MAX_EVIDENCE: usize = 8;

pub(crate) fn charges_writeback(facts: &CgroupFacts, file_system: &MountedFileSystem) -> bool {
    charge::writeback_charge(facts, Some(file_system)).is_ok()
}

/// All findings, sorted by coverage, the most severe first.
pub(crate) fn find(facts: &CgroupFacts) -> Vec<CoverageFinding> {
    let mut found = Vec::new();
    for process in &facts.processes {
        for used in &process.uses {
            for io in Io::of(used) {
                let verdict = classify(facts, &process.group, used, io);
                merge_finding(facts, &mut found, verdict, Some(used.location), Some(process.pid), io);
            }
        }
        whole_cgroup::swapping(facts, process, &mut found);
    }
    for used in &facts.hypothetical_uses {
        for io in Io::of(used) {
            let verdict = classify(facts, &facts.own().name, used, io);
            merge_finding(facts, &mut found, verdict, Some(used.location), None, io);
        }
    }
    whole_cgroup::add_cgroup_findings(facts, &mut found);
    found.sort_by_key(|finding| finding.coverage);
    found
}

fn classify(facts: &CgroupFacts, group: &str, used: &FileUse, io: Io) -> RequestVerdict {
    // Two questions: which cgroup is charged, and whether a limit of that cgroup is on the
    // request's path.
    let charge = charge::charged_cgroup(facts, used, io);
    let Some(disk) = facts.disk_of(used.location) else {
        return charge.without_disk(used);
    };
    let (charge, reach) = limit_search::find_limit(facts, group, disk, io, charge);
    match (charge, reach) {
        // No limit is set, and this I/O would escape any limit: report the cause of the escape.
        (ChargedCgroup::Elsewhere(cause, mut evidence), LimitSearch::Nothing(nothing))
            if nothing.cause == Cause::NoLimit =>
        {
            evidence.push(used.evidence.clone());
            RequestVerdict { coverage: Coverage::Escapes, cause, evidence, detail: nothing.detail }
        }
        // Otherwise a missing limit is the whole finding, regardless of the charge.
        (_, LimitSearch::Nothing(nothing)) => nothing,
        (ChargedCgroup::Own(mut evidence), LimitSearch::Limit(limit)) => {
            // In the order of the path: the limit's files before the file of the process.
            evidence.splice(0..0, limit.evidence);
            evidence.push(used.evidence.clone());
            let cause = if limit.below { Cause::LimitBelow } else { Cause::Covered };
            RequestVerdict { coverage: Coverage::Covered, cause, evidence, detail: limit.rate }
        }
        // One of several writers is charged for all, so the limit applies in part.
        (ChargedCgroup::Several(cause, mut evidence), LimitSearch::Limit(limit)) => {
            evidence.extend(limit.evidence);
            RequestVerdict { coverage: Coverage::Partly, cause, evidence, detail: limit.rate }
        }
        (ChargedCgroup::Elsewhere(cause, mut evidence), LimitSearch::Limit(limit)) => {
            evidence.extend(limit.evidence);
            evidence.push(used.evidence.clone());
            RequestVerdict { coverage: Coverage::Escapes, cause, evidence, detail: limit.rate }
        }
    }
}

fn merge_finding(
    facts: &CgroupFacts,
    found: &mut Vec<CoverageFinding>,
    verdict: RequestVerdict,
    location: Option<IoLocation>,
    process: Option<i32>,
    io: Io,
) {
    // Findings are merged by coverage, cause and location; only their processes and evidence
    // differ.
    let named = location.map_or_else(String::new, |place| wording::location_text(facts, place));
    let same = |finding: &&mut CoverageFinding| {
        finding.coverage == verdict.coverage && finding.cause == verdict.cause && finding.location == named
    };
    if let Some(finding) = found.iter_mut().find(same) {
        finding.acts.insert((process, io));
        cite(&mut finding.evidence, verdict.evidence);
        return;
    }
    let (explanation, remedy) = wording::cause_and_remedy(facts, verdict.cause, &verdict.detail);
    let mut evidence = Vec::new();
    cite(&mut evidence, verdict.evidence);
    found.push(CoverageFinding {
        coverage: verdict.coverage,
        cause: verdict.cause,
        acts: BTreeSet::from([(process, io)]),
        disk: location.and_then(|place| facts.disk_of(place)),
        location: named,
        explanation,
        evidence,
        remedy,
    });
}

fn cite(cited: &mut Vec<Evidence>, additional: Vec<Evidence>) {
    for evidence in additional {
        if cited.len() < MAX_EVIDENCE && !cited.contains(&evidence) {
            cited.push(evidence);
        }
    }
}
