//! Body of the fuzz target, with its assertions; unit tests run it as well.
//!
//! Every parser gets every text, so that a sample of one format also tests all parsers.

use std::path::Path;

use super::{
    MAX_LINE_CHARS, UnknownFormat, blkio, io_latency, io_max, io_stat, memory_stat, mountinfo, number,
    pressure, proc_cgroup, proc_io, proc_stat, weight,
};

const OTHER: block::device::DeviceNumber = block::device::DeviceNumber { major: 4_094, minor: 1_048_574 };

/// Parses a text with the parser of every kernel file.
pub fn kernel_files(data: &[u8]) {
    let text = &String::from_utf8_lossy(data);
    nested_files(text);
    blkio_files(text);
    weight_files(text);
    process_files(text);
    mounts(text);
}

/// The parsed value; a rejected line must be quoted within bounds.
fn accepted<T>(parsed: Result<T, UnknownFormat>) -> Option<T> {
    match parsed {
        Ok(value) => Some(value),
        Err(unknown) => {
            assert!(unknown.line.chars().count() <= MAX_LINE_CHARS + 1, "{} characters", unknown.line.len());
            assert!(unknown.to_string().starts_with(unknown.what));
            None
        }
    }
}

fn nested_files(text: &str) {
    if let Some(all) = accepted(io_stat::parse(text)) {
        for (device, _) in &all {
            let first = all.iter().find(|(number, _)| number == device).map(|(_, usage)| *usage);
            // `find` stops early, but must agree with the full parse.
            assert_eq!(io_stat::find(text, *device), Ok(first));
            assert_eq!(number(&device.to_string()), Some(*device));
        }
        let other = all.iter().find(|(number, _)| *number == OTHER).map(|(_, usage)| *usage);
        assert_eq!(io_stat::find(text, OTHER), Ok(other));
        for (one, other) in all.iter().zip(all.iter().skip(1)) {
            assert_eq!(one.1.since(&one.1), Some(io_stat::CgroupIoUsage::default()));
            let _ = one.1.since(&other.1);
        }
    }
    for (device, rates) in accepted(io_max::parse(text)).unwrap_or_default() {
        // A line that weir writes must parse to the same rates.
        assert_eq!(io_max::parse(&io_max::line(rates, device)), Ok(vec![(device, rates)]));
    }
    let _ = accepted(io_latency::targets(text));
    if let Some(waiting) = accepted(memory_stat::parse(text)) {
        assert!(waiting.total() >= waiting.dirty.max(waiting.writeback));
    }
    if let Some(pressure) = accepted(pressure::parse(text)) {
        for stall in [Some(pressure.some), pressure.full].into_iter().flatten() {
            for share in [stall.avg10, stall.avg60, stall.avg300] {
                assert!(share.is_finite() && share >= 0.0, "{share}");
            }
        }
    }
}

fn blkio_files(text: &str) {
    if let Some(all) = accepted(blkio::usage(text, text)) {
        for (device, usage) in all {
            assert_eq!(blkio::find(text, text, device), Ok(Some(usage)));
            assert_eq!((usage.read_bytes, usage.written_bytes), (usage.reads, usage.writes));
        }
    }
    let _ = accepted(blkio::limits(blkio::LIMITS[0], text));
}

fn weight_files(text: &str) {
    if let Some(weights) = accepted(weight::weights(text)) {
        for (device, _) in &weights.devices {
            assert!(weights.on(*device).is_some());
        }
    }
    let _ = accepted(weight::cost_enabled(text));
    if let Some(Some(scheduler)) = accepted(weight::scheduler(text)) {
        assert!(text.contains(scheduler));
    }
}

fn process_files(text: &str) {
    for membership in accepted(proc_cgroup::parse(text)).unwrap_or_default() {
        assert!(membership.path.is_absolute());
    }
    let _ = accepted(proc_io::parse(text));
    if let Some(stat) = accepted(proc_stat::parse(text)) {
        assert!(stat.pid >= 0 && stat.name.len() < text.len());
    }
}

fn mounts(text: &str) {
    let Some(mounts) = accepted(mountinfo::parse(text)) else { return };
    for mount in &mounts {
        let _ = mount.option("upperdir");
        if let Some(containing) = mountinfo::mount_containing(&mounts, &mount.point) {
            assert!(mount.point.starts_with(&containing.point));
        }
    }
    let _ = mountinfo::mount_containing(&mounts, Path::new("/"));
}
