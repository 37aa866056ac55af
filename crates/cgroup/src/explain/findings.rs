//! Conclusions from the facts: which I/O a limit covers, which escapes it, why, and the remedy.
//!
//! ```text
//!   a use (process, file, mode) ─► requests ─► charged to …          charge.rs    its cgroup │ the root │ several
//!                                          └─► limited there on …    reach.rs     this disk │ one below │ none
//!                                          ──► covered │ partly │ escapes │ unlimited
//!   findings about the whole cgroup                                  around.rs
//! ```
//!
//! A pure function of the facts. Each rule cites its document or commit. Rules go by the kernel's
//! release number, so a distribution's backported fix is reported as missing, never the reverse;
//! `--measure` shows the difference.

mod around;
mod cause;
mod charge;
mod reach;
mod wording;

use std::collections::BTreeSet;

use block::device::Number;
pub(crate) use cause::Cause;
pub(crate) use wording::{lowest_of, rates};

use self::{charge::Charge, reach::Reach};
use super::facts::{Evidence, Facts, FileSystem, Place, Use, Way};

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
    pub(crate) fn alarms(self) -> bool {
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
    fn of(used: &Use) -> Vec<Self> {
        let read = if used.way == Way::Direct { Self::DirectReads } else { Self::Reads };
        let write = match used.way {
            Way::Direct => Self::DirectWrites,
            Way::Buffered => Self::BufferedWrites,
            Way::Synchronous => Self::SynchronousWrites,
            Way::Mapped => Self::MappedWrites,
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
pub(crate) struct Finding {
    pub(crate) coverage: Coverage,
    pub(crate) cause: Cause,
    /// Processes and their kinds of I/O; `None` if no process does it at present.
    pub(crate) acts: BTreeSet<(Option<i32>, Io)>,
    pub(crate) disk: Option<Number>,
    /// Disk node and file system, as text; empty if the finding is about no location.
    pub(crate) place: String,
    pub(crate) why: String,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) mend: Option<String>,
}

impl Finding {
    pub(crate) fn ios(&self) -> BTreeSet<Io> {
        self.acts.iter().map(|(_, io)| *io).collect()
    }
}

/// Finding about one request, before equal findings are merged.
#[derive(Debug)]
struct Judgement {
    coverage: Coverage,
    cause: Cause,
    evidence: Vec<Evidence>,
    detail: String,
}

/// Number of files that a finding cites at most.
const MAX_EVIDENCE: usize = 8;

pub(crate) fn charges_writeback(facts: &Facts, file_system: &FileSystem) -> bool {
    charge::written_back(facts, Some(file_system)).is_ok()
}

/// All findings, sorted by coverage, the most severe first.
pub(crate) fn find(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    for process in &facts.processes {
        for used in &process.uses {
            for io in Io::of(used) {
                let judged = judge(facts, &process.group, used, io);
                gather(facts, &mut found, judged, Some(used.place), (Some(process.pid), io));
            }
        }
        around::swapping(facts, process, &mut found);
    }
    for used in &facts.possible {
        for io in Io::of(used) {
            let judged = judge(facts, &facts.own().name, used, io);
            gather(facts, &mut found, judged, Some(used.place), (None, io));
        }
    }
    around::look(facts, &mut found);
    found.sort_by_key(|finding| finding.coverage);
    found
}

fn judge(facts: &Facts, group: &str, used: &Use, io: Io) -> Judgement {
    // Two questions: which cgroup is charged, and whether a limit of that cgroup is on the
    // request's path.
    let charge = charge::of(facts, used, io);
    let Some(disk) = facts.disk_of(used.place) else {
        return charge.without_disk(used);
    };
    let (charge, reach) = reach::from(facts, group, disk, io, charge);
    match (charge, reach) {
        // No limit is set, and this I/O would escape any limit: report the cause of the escape.
        (Charge::Elsewhere(cause, mut evidence), Reach::Nothing(nothing))
            if nothing.cause == Cause::NoLimit =>
        {
            evidence.push(used.evidence.clone());
            Judgement { coverage: Coverage::Escapes, cause, evidence, detail: nothing.detail }
        }
        // Otherwise a missing limit is the whole finding, regardless of the charge.
        (_, Reach::Nothing(nothing)) => nothing,
        (Charge::Own(mut evidence), Reach::Limit(limit)) => {
            // In the order of the path: the limit's files before the file of the process.
            evidence.splice(0..0, limit.evidence);
            evidence.push(used.evidence.clone());
            let cause = if limit.below { Cause::LimitBelow } else { Cause::Covered };
            Judgement { coverage: Coverage::Covered, cause, evidence, detail: limit.rate }
        }
        // One of several writers is charged for all, so the limit applies in part.
        (Charge::Several(cause, mut evidence), Reach::Limit(limit)) => {
            evidence.extend(limit.evidence);
            Judgement { coverage: Coverage::Partly, cause, evidence, detail: limit.rate }
        }
        (Charge::Elsewhere(cause, mut evidence), Reach::Limit(limit)) => {
            evidence.extend(limit.evidence);
            evidence.push(used.evidence.clone());
            Judgement { coverage: Coverage::Escapes, cause, evidence, detail: limit.rate }
        }
    }
}

fn gather(
    facts: &Facts,
    found: &mut Vec<Finding>,
    judged: Judgement,
    place: Option<Place>,
    act: (Option<i32>, Io),
) {
    // Findings are merged by coverage, cause and location; only their processes and evidence
    // differ.
    let named = place.map_or_else(String::new, |place| wording::place(facts, place));
    let same = |finding: &&mut Finding| {
        finding.coverage == judged.coverage && finding.cause == judged.cause && finding.place == named
    };
    if let Some(finding) = found.iter_mut().find(same) {
        finding.acts.insert(act);
        cite(&mut finding.evidence, judged.evidence);
        return;
    }
    let (why, mend) = wording::of(facts, judged.cause, &judged.detail);
    let mut evidence = Vec::new();
    cite(&mut evidence, judged.evidence);
    found.push(Finding {
        coverage: judged.coverage,
        cause: judged.cause,
        acts: BTreeSet::from([act]),
        disk: place.and_then(|place| facts.disk_of(place)),
        place: named,
        why,
        evidence,
        mend,
    });
}

fn cite(cited: &mut Vec<Evidence>, more: Vec<Evidence>) {
    for evidence in more {
        if cited.len() < MAX_EVIDENCE && !cited.contains(&evidence) {
            cited.push(evidence);
        }
    }
}
