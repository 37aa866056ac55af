//! `weir image check`: checks and repairs an image, with the output and exit statuses of `qemu-img
//! check`.
//!
//! Never writes unless a repair is requested, and never while another process uses the image.

use anyhow::{Context as _, anyhow};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::qcow2::{
    self,
    check::{CheckReport, GuestRange, Repair, check},
    header::incompatible,
};
use reactor::sanitize::sanitize;
use serde_json::{Value, json};
use storage::{CacheMode, ImageFormat};

use super::{ImageOutput, ImageOutputArgs, image_args::ImageArg, opening::OpenMode, qemu_format};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image check vm1.qcow2
      Report damage, and how much of the disk is allocated.
  weir image check --repair=leaks vm1.qcow2
      Free leaked clusters.
  weir image check --repair vm1.qcow2
      Repair damage that has exactly one correct repair. No byte that a guest can read changes;
      ambiguous content is reported and unchanged.
  weir image check -r all --force vm1.qcow2
      Also discard ambiguous content, such as data at an invalid offset. Each lost guest range is printed.

Exit status: 0 consistent, 1 check incomplete, 2 corrupt, 3 leaks, 63 the format cannot be checked.
Wrong use of the command line also exits with 2, and prints the usage.";

const NOT_SUPPORTED: u8 = 63;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RepairScope {
    Leaks,
    All,
}

/// The options of `weir image check`.
#[derive(Debug, Args)]
pub struct ImageCheckArgs {
    #[command(flatten)]
    image: ImageArg,
    #[command(flatten)]
    output: ImageOutputArgs,
    /// Repair the image: leaks, or all
    #[arg(long, value_name = "WHAT", num_args = 0..=1, require_equals = true, default_missing_value = "all", conflicts_with = "short_repair")]
    repair: Option<RepairScope>,
    /// Same as --repair, in the form of qemu-img
    #[arg(short = 'r', value_name = "WHAT")]
    short_repair: Option<RepairScope>,
    /// With a repair of all: discard guest data with ambiguous content, and print its ranges
    #[arg(long)]
    force: bool,
    /// Cache mode: writeback, writethrough, none, directsync or unsafe [default: writeback]
    #[arg(short = 'T', long, value_name = "MODE", value_parser = settings::parse::<CacheMode>)]
    cache: Option<CacheMode>,
    /// Check the image even if another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(arguments: ImageCheckArgs) -> Result<(), CommandFailure> {
    let image = arguments.image.named()?;
    let name = image.name();
    let format = image.format()?;
    if format == ImageFormat::Raw {
        eprint(&format!("weir: {name}: raw images have nothing to check\n"));
        return Err(CommandFailure::Found(NOT_SUPPORTED));
    }
    let repair = match arguments.repair.or(arguments.short_repair) {
        None => Repair::Nothing,
        Some(RepairScope::Leaks) => Repair::Leaks,
        Some(RepairScope::All) if arguments.force => Repair::Forced,
        Some(RepairScope::All) => Repair::All,
    };
    if arguments.force && repair != Repair::Forced {
        return Err(CommandFailure::Usage(anyhow!("{name}: --force: needs a repair of all (add -r all)")));
    }
    let write = repair != Repair::Nothing;
    // Two writers would overwrite each other's metadata.
    if write && arguments.force_share {
        return Err(CommandFailure::Usage(anyhow!(
            "{name}: a repair while another process writes would corrupt the image (leave out -U)"
        )));
    }
    let mode = OpenMode {
        write,
        force_share: arguments.force_share,
        cache: arguments.cache.unwrap_or_default(),
        ..OpenMode::default()
    };
    let storage = image.storage(mode)?;
    let (report, is_marked) = on_reactor(async move {
        let report = check(&storage, repair).await;
        // The mark is read after the repair, which clears it on success.
        let header = qcow2::read_header(&storage).await;
        Ok((report, header.is_ok_and(|header| header.incompatible & incompatible::CORRUPT != 0)))
    })?;
    let report = report.with_context(|| name.clone())?;
    if !arguments.quiet {
        for finding in &report.findings {
            eprint(&format!("{}\n", sanitize(&finding.to_string())));
        }
        if report.unreported > 0 {
            eprint(&format!("and {} more\n", report.unreported));
        }
        // Findings go to standard error, so that standard output is the report alone.
        eprint(&unknown_leaks_reason(&report));
        eprint(&ranges(&report, &name, repair));
        eprint(&remaining_errors(&report, &name, repair));
        if repair == Repair::Nothing {
            eprint(&next_steps(&report, is_marked, &name));
        }
        print(&match arguments.output.kind() {
            ImageOutput::Human => text(&report),
            ImageOutput::Json => qemu_format::json(&json(&report, &name)),
        })?;
    }
    status(&report)
}

fn status(report: &CheckReport) -> Result<(), CommandFailure> {
    match report {
        // The order is that of qemu-img: an incomplete check outranks its findings.
        CheckReport { check_errors: 1.., .. } => Err(CommandFailure::Found(1)),
        CheckReport { corruptions: 1.., .. } => Err(CommandFailure::Found(2)),
        CheckReport { leaks: 1.., .. } => Err(CommandFailure::Found(3)),
        _ => Ok(()),
    }
}

/// Reason why leaks are unknown.
fn unknown_leaks_reason(report: &CheckReport) -> String {
    match &report.missed_references {
        Some(why) => format!(
            "Nothing is freed or reported as leaked, because the check may have missed \
             references: {}\n",
            sanitize(why)
        ),
        None => String::new(),
    }
}

/// Reason why a repair of leaks did not make the image consistent.
fn remaining_errors(report: &CheckReport, name: &str, repair: Repair) -> String {
    let errors = report.corruptions + report.check_errors;
    if repair != Repair::Leaks || errors == 0 {
        return String::new();
    }
    format!(
        "weir: {}: {errors} errors are left: a repair of leaks only frees leaked clusters \
         (`weir image check -r all` repairs damage that has exactly one correct repair)\n",
        sanitize(name)
    )
}

/// Commands for the findings of a check without a repair, a line each. `is_marked` is true if the
/// image is marked corrupt.
fn next_steps(report: &CheckReport, is_marked: bool, name: &str) -> String {
    let mut text = String::new();
    let mut add_line = |message: &str| text += &format!("weir: {}: {message}\n", sanitize(name));
    let is_damaged = report.corruptions + report.check_errors > 0;
    match (is_damaged, is_marked) {
        (true, _) => add_line(
            "it is damaged (`weir image check -r all` repairs damage that has exactly one correct repair)",
        ),
        (false, true) => add_line(
            "it is marked corrupt, though no error was found, and opens read-only at most \
             (`weir image check -r all` clears the mark)",
        ),
        (false, false) if report.leaks > 0 => {
            add_line("clusters are leaked (`weir image check -r leaks` frees them)");
        }
        (false, false) => {}
    }
    if !report.ambiguous.is_empty() {
        add_line(
            "the ambiguous ranges stay unchanged in that repair (`-r all --force` discards their content; \
             copy the disk with `weir image convert --salvage` first)",
        );
    }
    text
}

/// Guest ranges that were lost, and those that a repair left unchanged.
fn ranges(report: &CheckReport, name: &str, repair: Repair) -> String {
    let mut text = String::new();
    for range in &report.lost {
        text += &format!("Lost: {}\n", sanitize(&range.to_string()));
    }
    for range in &report.ambiguous {
        text += &format!("Ambiguous: {}\n", sanitize(&range.to_string()));
    }
    if repair == Repair::All && report.corruptions > 0 {
        let remedy = if report.ambiguous.is_empty() {
            "copy the disk with `weir image convert --salvage`"
        } else {
            "copy the disk with `weir image convert --salvage` first; `-r all --force` discards \
             these ranges"
        };
        text += &format!(
            "weir: {}: not repaired: a repair could lose data or bring back old data ({remedy})\n",
            sanitize(name)
        );
    }
    text
}

fn eprint(text: &str) {
    use std::io::Write as _;
    // Ignored: a closed standard error leaves no place to report that.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

fn json_ranges(ranges: &[GuestRange]) -> Value {
    let range = |range: &GuestRange| {
        let mut json = json!({ "offset": range.offset, "length": range.length });
        if let Some(name) = &range.snapshot {
            json["snapshot"] = name.as_str().into();
        }
        json
    };
    ranges.iter().map(range).collect()
}

/// JSON as printed by qemu-img: counters of zero are omitted, except for `check-errors`.
fn json(report: &CheckReport, name: &str) -> Value {
    let mut json = json!({ "filename": name, "format": "qcow2", "check-errors": report.check_errors });
    for (key, value) in [
        ("image-end-offset", report.image_end_offset),
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("possible-leaks", report.possible_leaks),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if value > 0 {
            json[key] = value.into();
        }
    }
    for (key, ranges) in [("ambiguous-ranges", &report.ambiguous), ("lost-ranges", &report.lost)] {
        if !ranges.is_empty() {
            json[key] = json_ranges(ranges);
        }
    }
    json
}

fn text(report: &CheckReport) -> String {
    let mut text = String::new();
    if report.leaks_fixed + report.corruptions_fixed > 0 {
        text += &format!(
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    \
             {} corruptions\n\nDouble checking the fixed image now...\n",
            report.leaks_fixed, report.corruptions_fixed
        );
    }
    if report.corruptions + report.leaks + report.check_errors == 0 {
        text += "No errors were found on the image.\n";
    }
    if report.corruptions > 0 {
        text += &format!(
            "\n{} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.\n",
            report.corruptions
        );
    }
    if report.leaks > 0 {
        text += &format!(
            "\n\
             {} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.\n",
            report.leaks
        );
    }
    if report.possible_leaks > 0 {
        text += &format!(
            "\n{} clusters may be leaked. They stay allocated, because the check may have missed \
             references.\n",
            report.possible_leaks
        );
    }
    if report.check_errors > 0 {
        text += &format!("\n{} internal errors have occurred during the check.\n", report.check_errors);
    }
    let percent = |part: u64, total: u64| part as f64 * 100.0 / total as f64;
    if report.total_clusters > 0 && report.allocated_clusters > 0 {
        let (total_clusters, allocated_clusters) = (report.total_clusters, report.allocated_clusters);
        text += &format!(
            "{allocated_clusters}/{total_clusters} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            percent(allocated_clusters, total_clusters),
            percent(report.fragmented_clusters, allocated_clusters),
            percent(report.compressed_clusters, allocated_clusters)
        );
    }
    if report.image_end_offset > 0 {
        text += &format!("Image end offset: {}\n", report.image_end_offset);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_names_the_command_that_repairs_it() {
        let steps = |report: CheckReport, is_marked| next_steps(&report, is_marked, "a.qcow2");
        assert_eq!(steps(CheckReport::default(), false), "");
        let marked = steps(CheckReport::default(), true);
        assert!(marked.contains("marked corrupt") && marked.contains("-r all"), "{marked}");
        let leaks = steps(CheckReport { leaks: 1, ..CheckReport::default() }, false);
        assert!(leaks.contains("`weir image check -r leaks`"), "{leaks}");
        let damaged = steps(CheckReport { corruptions: 1, leaks: 1, ..CheckReport::default() }, false);
        assert!(damaged.contains("`weir image check -r all`") && damaged.lines().count() == 1, "{damaged}");
        let range = GuestRange { offset: 0, length: 512, snapshot: None };
        let ambiguous =
            steps(CheckReport { corruptions: 1, ambiguous: vec![range], ..CheckReport::default() }, false);
        assert!(ambiguous.contains("--force") && ambiguous.lines().count() == 2, "{ambiguous}");
    }
}
