//! The findings as one JSON object, with device numbers as the kernel prints them.

use serde::Serialize;

use super::{
    facts::{CgroupFacts, CgroupLevel, Evidence, LevelLimit},
    findings::CoverageFinding,
    measure::MeasurementReport,
    verdict::Verdict,
};
use crate::control_group::Version;

/// Output of `weir cgroup explain --json`.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct CoverageReport<'a> {
    cgroup: &'a str,
    process: Option<i32>,
    version: u8,
    kernel: &'a str,
    verdict: &'static str,
    limits: Vec<LevelLimitReport<'a>>,
    findings: Vec<FindingReport<'a>>,
    /// Result of `--measure`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) measured: Option<MeasurementReport>,
}

/// Limits of a cgroup on a device. Null is no limit.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct LevelLimitReport<'a> {
    cgroup: &'a str,
    device: String,
    device_number: String,
    read_bps: Option<u64>,
    write_bps: Option<u64>,
    read_iops: Option<u64>,
    write_iops: Option<u64>,
    evidence: &'a [Evidence],
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct FindingReport<'a> {
    coverage: &'static str,
    cause: &'static str,
    device: Option<String>,
    device_number: Option<String>,
    place: &'a str,
    io: Vec<ActReport<'a>>,
    why: &'a str,
    evidence: &'a [Evidence],
    mend: Option<&'a str>,
}

/// Kind of I/O of a process. Null if no process does it at present.
#[derive(Serialize)]
struct ActReport<'a> {
    pid: Option<i32>,
    name: Option<&'a str>,
    io: &'static str,
}

pub(super) fn report<'a>(facts: &'a CgroupFacts, findings: &'a [CoverageFinding]) -> CoverageReport<'a> {
    let limits = facts
        .levels
        .iter()
        .flat_map(|level| level.limits.iter().map(move |limit| limit_report(facts, level, limit)));
    CoverageReport {
        cgroup: &facts.name,
        process: facts.pid,
        version: if facts.version == Version::V1 { 1 } else { 2 },
        kernel: &facts.kernel.evidence.value,
        verdict: Verdict::of(findings).name(),
        limits: limits.collect(),
        findings: findings.iter().map(|finding| finding_report(facts, finding)).collect(),
        measured: None,
    }
}

fn limit_report<'a>(
    facts: &CgroupFacts,
    level: &'a CgroupLevel,
    limit: &'a LevelLimit,
) -> LevelLimitReport<'a> {
    LevelLimitReport {
        cgroup: &level.name,
        device: facts.node(limit.disk),
        device_number: limit.disk.to_string(),
        read_bps: limit.rates.bps[0],
        write_bps: limit.rates.bps[1],
        read_iops: limit.rates.iops[0],
        write_iops: limit.rates.iops[1],
        evidence: &limit.evidence,
    }
}

fn finding_report<'a>(facts: &'a CgroupFacts, finding: &'a CoverageFinding) -> FindingReport<'a> {
    let acts = finding.acts.iter().map(|(pid, io)| {
        let process = pid.and_then(|pid| facts.processes.iter().find(|process| process.pid == pid));
        ActReport { pid: *pid, name: process.map(|process| process.name.as_str()), io: io.name() }
    });
    FindingReport {
        coverage: finding.coverage.name(),
        cause: finding.cause.name(),
        device: finding.disk.map(|disk| facts.node(disk)),
        device_number: finding.disk.map(|disk| disk.to_string()),
        place: &finding.location,
        io: acts.collect(),
        why: &finding.explanation,
        evidence: &finding.evidence,
        mend: finding.remedy.as_deref(),
    }
}
