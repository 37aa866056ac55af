//! The findings as text. Control characters in names chosen by other programs are escaped.

use std::fmt::Write as _;

use block::device::DeviceNumber;
use console::table::{ColumnAlignment, TextTable};
use reactor::sanitize::sanitize;

use super::{
    facts::{CgroupFacts, CgroupLevel, Evidence},
    findings::{Cause, Coverage, CoverageFinding},
    verdict::Verdict,
};
use crate::control_group::Version;

pub(super) fn text(facts: &CgroupFacts, findings: &[CoverageFinding]) -> String {
    let mut text = String::new();
    let version = if facts.version == Version::V1 { 1 } else { 2 };
    let subject = match facts.pid {
        Some(pid) => format!("process {pid} in {}", facts.name),
        None => facts.name.clone(),
    };
    let _ = writeln!(text, "{} (cgroup v{version}): {}", clean(&subject), Verdict::of(findings));
    let mut disks: Vec<Option<DeviceNumber>> = Vec::new();
    // Limited disks first, also those without a finding.
    let limited = facts.levels.iter().flat_map(|level| &level.limits).map(|limit| Some(limit.disk));
    let failure_disks =
        findings.iter().filter(|finding| finding.coverage != Coverage::Note).map(|finding| finding.disk);
    for disk in limited.chain(failure_disks) {
        if !disks.contains(&disk) {
            disks.push(disk);
        }
    }
    // Findings without a disk come last, under the heading `elsewhere`.
    disks.sort_by_key(Option::is_none);
    for disk in disks {
        text.push('\n');
        text += &disk_section(facts, findings, disk);
    }
    text += &processes(facts, findings);
    let notes: Vec<&CoverageFinding> =
        findings.iter().filter(|finding| finding.coverage == Coverage::Note).collect();
    if !notes.is_empty() {
        text += "\nnotes:\n";
        for note in notes {
            text += &finding_text(note);
        }
    }
    text
}

fn disk_section(facts: &CgroupFacts, findings: &[CoverageFinding], disk: Option<DeviceNumber>) -> String {
    let mut text = match disk {
        Some(disk) => {
            let limits: Vec<String> = facts.levels.iter().filter_map(|level| limit(level, disk)).collect();
            let limits = if limits.is_empty() { "no limit".to_owned() } else { limits.join("; ") };
            format!("{} ({disk}): {}\n", clean(&facts.node(disk)), clean(&limits))
        }
        None => "elsewhere:\n".to_owned(),
    };
    for finding in
        findings.iter().filter(|finding| finding.disk == disk && finding.coverage != Coverage::Note)
    {
        text += &finding_text(finding);
    }
    text
}

fn limit(level: &CgroupLevel, disk: DeviceNumber) -> Option<String> {
    let limit = level.limit(disk)?;
    Some(format!("{} in {}", super::findings::rates(limit.rates), level.name))
}

fn finding_text(finding: &CoverageFinding) -> String {
    let ios: Vec<String> = finding.ios().iter().map(ToString::to_string).collect();
    let parts = [ios.join(", "), finding.location.clone()].into_iter().filter(|part| !part.is_empty());
    let summary = parts.collect::<Vec<_>>().join(", ");
    let name = finding.cause.name();
    // The cause of full coverage needs no name.
    let heading = match finding.cause {
        Cause::Covered => summary,
        _ if summary.is_empty() => name.to_owned(),
        _ => format!("{summary} [{name}]"),
    };
    let mut text = format!(
        "  {:<9} {}\n            {}\n",
        finding.coverage,
        clean(&heading),
        clean(&finding.explanation)
    );
    if let Some(remedy) = &finding.remedy {
        let _ = writeln!(text, "            fix: {}", clean(remedy));
    }
    for Evidence { file, value } in &finding.evidence {
        let _ = writeln!(text, "            {}: {}", clean(file), clean(value));
    }
    text
}

fn processes(facts: &CgroupFacts, findings: &[CoverageFinding]) -> String {
    let columns = [
        ("PID", ColumnAlignment::Right),
        ("NAME", ColumnAlignment::Left),
        ("I/O", ColumnAlignment::Left),
        ("WHERE", ColumnAlignment::Left),
        ("LIMIT", ColumnAlignment::Left),
    ];
    let mut table = TextTable::new(columns);
    for process in &facts.processes {
        // A process has a row for each finding about it.
        for finding in findings.iter().filter(|finding| finding.coverage != Coverage::Note) {
            let ios = finding.acts.iter().filter(|(pid, _)| *pid == Some(process.pid));
            let ios: Vec<String> = ios.map(|(_, io)| io.to_string()).collect();
            if !ios.is_empty() {
                table.row(vec![
                    process.pid.to_string(),
                    process.name.clone(),
                    ios.join(", "),
                    finding.location.clone(),
                    coverage_cell(finding),
                ]);
            }
        }
    }
    let table = table.render(false);
    if table.is_empty() { table } else { format!("\n{table}") }
}

fn coverage_cell(finding: &CoverageFinding) -> String {
    match finding.coverage {
        Coverage::Covered => "covered".to_owned(),
        coverage => format!("{}: {}", coverage.name(), finding.cause.name()),
    }
}

/// Escapes control characters and joins lines by `; `.
pub(super) fn clean(text: &str) -> String {
    sanitize(&text.replace('\n', "; "))
}
