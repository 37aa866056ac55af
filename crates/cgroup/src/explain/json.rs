//! The findings as one JSON object, with device numbers as the kernel prints them.

use serde_json::{Value, json};

use super::{
    facts::{CgroupFacts, Evidence},
    findings::CoverageFinding,
    verdict::Verdict,
};
use crate::control_group::Version;

pub(super) fn json(facts: &CgroupFacts, findings: &[CoverageFinding]) -> Value {
    let limits = facts.levels.iter().flat_map(|level| {
        level.limits.iter().map(|limit| {
            json!({
                "cgroup": level.name,
                "device": facts.node(limit.disk),
                "device-number": limit.disk.to_string(),
                "read-bps": limit.rates.bps[0],
                "write-bps": limit.rates.bps[1],
                "read-iops": limit.rates.iops[0],
                "write-iops": limit.rates.iops[1],
                "evidence": evidence(&limit.evidence),
            })
        })
    });
    json!({
        "cgroup": facts.name,
        "process": facts.pid,
        "version": if facts.version == Version::V1 { 1 } else { 2 },
        "kernel": facts.kernel.evidence.value,
        "verdict": Verdict::of(findings).name(),
        "limits": limits.collect::<Vec<_>>(),
        "findings": findings.iter().map(|finding| finding_json(facts, finding)).collect::<Vec<_>>(),
    })
}

fn finding_json(facts: &CgroupFacts, finding: &CoverageFinding) -> Value {
    let acts = finding.acts.iter().map(|(pid, io)| {
        let process = pid.and_then(|pid| facts.processes.iter().find(|process| process.pid == pid));
        json!({ "pid": pid, "name": process.map(|process| process.name.as_str()), "io": io.name() })
    });
    json!({
        "coverage": finding.coverage.name(),
        "cause": finding.cause.name(),
        "device": finding.disk.map(|disk| facts.node(disk)),
        "device-number": finding.disk.map(|disk| disk.to_string()),
        "place": finding.location,
        "io": acts.collect::<Vec<_>>(),
        "why": finding.explanation,
        "evidence": evidence(&finding.evidence),
        "mend": finding.remedy,
    })
}

fn evidence(all: &[Evidence]) -> Vec<Value> {
    all.iter().map(|Evidence { file, value }| json!({ "file": file, "value": value })).collect()
}
