//! `weir probe`: measures the capacity of a device, for the utilization that watermarks depend on.
//!
//! ```text
//!   DIR ────► a temporary file ──┐                       ┌─► a table, or JSON
//!                                ├─► eight loads ────────┤
//!   DEVICE ─► unchanged ─────────┘    random, sequential └─► a record under the device's name, which `serve` reads
//!                                     × read, write × 4 KiB, 1 MiB
//! ```
//!
//! The capacity in operations is that of random 4 KiB requests, that in bytes the better of the two
//! patterns at 1 MiB. Unmeasured capacities are never guessed: the daemon then uses busy time.
//!
//! Measures through the storage that serves disks, bypassing the page cache. Never writes to a
//! device in use ([`in_use`]), and leaves no file in a directory, however it ends.

mod arguments;
pub(crate) mod in_use;
mod load;
mod report;
mod target;

use std::{
    rc::Rc,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, anyhow, bail};
pub use arguments::{EXAMPLES, ProbeArgs};
use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use console::{CommandFailure, on_reactor, print, progress::StepProgress};
pub(crate) use load::DEPTH;
use load::{ProbeLoad, ProbeResult, ProbedRange};
use policy::{request::Direction, time::Duration};
use report::ProbeReport;
use settings::state::{CapacityFigures, CapacityRecord, CapacityStore};
use target::{MIN_SIZE, ProbeOptions, ProbeTarget, ProbeTargetKind};

/// Bound on the time for filling the file, in multiples of a load's time; a slower device gets a
/// smaller file.
const FILL_TIMES: u32 = 5;

/// Measures a device, prints its capacity and stores it.
///
/// # Errors
/// Fails on anything that prevents measuring or storing.
pub fn run(arguments: ProbeArgs) -> Result<(), CommandFailure> {
    let options = ProbeOptions {
        path: &arguments.path,
        size_bytes: arguments.size,
        write: arguments.write,
        force: arguments.force,
    };
    let target = ProbeTarget::open(options)?;
    let roots = SysfsRoots::default();
    // Without an identity (a file system in memory) the result is not stored.
    let identity = DeviceIdentity::resolve(DeviceNumber::unpack(target.device_number), &roots).ok();
    let name = arguments.path.display().to_string();
    let device = identity.map(|identity| (identity.node(), identity.key().to_owned()));
    let store = CapacityStore::new(arguments.state.as_deref());
    // The store is tested now, and not after minutes of measuring.
    if device.is_some() {
        store.check_writable()?;
    }
    let progress = StepProgress::new(arguments.json);
    let read_only = arguments.read_only;
    let seconds = Duration::from_secs(arguments.seconds);
    let accept = arguments.accept;
    // The target is opened before the reactor starts, because opening may block.
    let measured = on_reactor(async move {
        let measured = measure(&target, &name, seconds, read_only, &progress).await;
        Ok(measured.with_context(|| format!("{name}: cannot be measured"))?)
    })?;
    let (report, saved) =
        store_record(measured, &store, device, arguments.path.display().to_string(), accept);
    let text = if arguments.json { report.json() } else { report.text() };
    print(&text)?;
    Ok(saved?)
}

#[derive(Debug)]
struct ProbedLoads {
    size_bytes: u64,
    figures: Vec<ProbeResult>,
    not_measured: Vec<&'static str>,
}

async fn measure(
    target: &ProbeTarget,
    name: &str,
    time: Duration,
    read_only: bool,
    progress: &StepProgress,
) -> anyhow::Result<ProbedLoads> {
    // Incompressible, or devices and file systems with compression would look faster.
    let noise: Rc<[u8]> = (0..1 << 20).map(|_| fastrand::u8(..)).collect();
    let mut field = ProbedRange { image: Rc::clone(&target.image), size_bytes: target.size_bytes, noise };
    if target.kind == ProbeTargetKind::File {
        progress.begin(&format!("{name}: writing a file to measure"), field.size_bytes);
        // Reads of holes would not reach the device.
        field.size_bytes = field.fill(time * FILL_TIMES, |done| progress.advance(done)).await?;
        // Otherwise writeback of the file would compete with the first load.
        target.image.flush().await.context("flushing the file to be measured")?;
        progress.end();
        if field.size_bytes < MIN_SIZE {
            bail!(
                "only {} bytes were written in {} seconds (give more --seconds)",
                field.size_bytes,
                (time * FILL_TIMES).as_secs()
            );
        }
    }
    let mut not_measured = Vec::new();
    let writes = match target.kind {
        _ if read_only => Err("writes: excluded by --read-only"),
        ProbeTargetKind::Device { writable: false } => {
            Err("writes: they would destroy the data on the device (--write)")
        }
        ProbeTargetKind::File | ProbeTargetKind::Device { writable: true } => Ok(()),
    };
    not_measured.extend(writes.err());
    let loads = ProbeLoad::all().filter(|load| load.direction == Direction::Read || writes.is_ok());
    let mut figures = Vec::new();
    for load in loads {
        progress.step(&format!("{} of {}", load.name(), report::size(load.block_bytes as u64)));
        let longer = |time: Duration| {
            let step = format!("{} again, for {} s: its rate varies", load.name(), time.as_secs());
            progress.end();
            progress.step(&step);
        };
        figures.push(field.measure_steadily(load, time, longer).await?);
        progress.end();
    }
    Ok(ProbedLoads { size_bytes: field.size_bytes, figures, not_measured })
}

/// Capacities; 0 if not measured.
fn capacity(figures: &[ProbeResult]) -> CapacityFigures {
    let best =
        |direction: Direction, block_bytes: usize, part: fn(&ProbeResult) -> u64, random_only: bool| {
            let is_match = |figure: &&ProbeResult| {
                figure.load.direction == direction
                    && figure.load.block_bytes == block_bytes
                    && (!random_only || figure.load.pattern == load::ProbePattern::Random)
            };
            // The better of the two patterns, unless only random requests count.
            figures.iter().filter(is_match).map(part).max().unwrap_or(0)
        };
    let iops = |direction| best(direction, 4096, ProbeResult::iops, true);
    let bps = |direction| best(direction, 1 << 20, ProbeResult::bps, false);
    CapacityFigures {
        read_iops: iops(Direction::Read),
        write_iops: iops(Direction::Write),
        read_bps: bps(Direction::Read),
        write_bps: bps(Direction::Write),
    }
}

/// Returns the report, and an error if the record was not stored. It is not stored if a rate
/// varies, unless `accept` is set.
fn store_record(
    measured: ProbedLoads,
    store: &CapacityStore,
    device: Option<(String, String)>,
    target: String,
    accept: bool,
) -> (ProbeReport, anyhow::Result<()>) {
    let ProbedLoads { size_bytes, figures, mut not_measured } = measured;
    let mut capacity = capacity(&figures);
    let mut saved = Ok(None);
    // Includes loads that are not part of the capacity: a device whose sequential rate varies was
    // used by another program while its random rate was measured.
    let varying = figures.iter().find(|figure| !figure.is_steady());
    if let (false, Some(_), Some(first)) = (accept, &device, varying) {
        saved = Err(anyhow!(
            "{target}: not saved: the rate of {} of {} varies by {:.0} % (stop what else uses the \
             device, give more --seconds, or save it with --accept)",
            first.load.name(),
            report::size(first.load.block_bytes as u64),
            first.spread * 100.0
        ));
    } else if let Some((node, key)) = &device {
        let earlier = store.load(key).ok().flatten();
        // A read-only probe keeps the write capacity that an earlier probe measured.
        if let Some(earlier) = earlier.filter(|_| capacity.write_bps == 0 && capacity.write_iops == 0) {
            capacity.write_iops = earlier.capacity.write_iops;
            capacity.write_bps = earlier.capacity.write_bps;
            if capacity.write_bps > 0 {
                not_measured.push("writes: the figures of an earlier probe are kept");
            }
        }
        // Shown by commands that print the age of a record.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let record = CapacityRecord { key: key.clone(), device: node.clone(), time, capacity };
        saved = store.save(&record).map(Some);
    }
    let (kept, outcome) = match saved {
        Ok(kept) => (kept, Ok(())),
        Err(error) => (None, Err(error)),
    };
    (ProbeReport { target, device, size_bytes, figures, capacity, not_measured, kept }, outcome)
}

#[cfg(test)]
mod tests {
    use load::ProbePattern;

    use super::*;

    fn figure(pattern: ProbePattern, direction: Direction, block_bytes: usize, rate: f64) -> ProbeResult {
        ProbeResult { load: ProbeLoad { pattern, direction, block_bytes }, rate, spread: 0.0 }
    }

    #[test]
    fn unwritable_store_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "").unwrap();
        let device = Some(("/dev/vda".to_owned(), "serial".to_owned()));
        let measure = || ProbedLoads {
            size_bytes: 1 << 20,
            figures: vec![figure(ProbePattern::Random, Direction::Read, 4096, 100.0)],
            not_measured: Vec::new(),
        };
        let store = CapacityStore::new(Some(&file));
        let (report, outcome) = store_record(measure(), &store, device.clone(), "x".to_owned(), false);
        assert_eq!((report.capacity.read_iops, report.kept), (100, None));
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("cannot be written (choose another directory with --state)"), "{error}");
        let error = store.check_writable().unwrap_err().to_string();
        assert!(error.contains("cannot be written to (choose another directory with --state)"), "{error}");
        let store = CapacityStore::new(Some(directory.path()));
        store.check_writable().unwrap();
        let (report, outcome) = store_record(measure(), &store, device, "x".to_owned(), false);
        assert!(outcome.is_ok() && report.kept.is_some());
    }

    #[test]
    fn varying_capacity_is_saved_only_on_request() {
        let directory = tempfile::tempdir().unwrap();
        let store = CapacityStore::new(Some(directory.path()));
        let device = Some(("/dev/vda".to_owned(), "serial".to_owned()));
        let varying = |pattern, block_bytes, rate| ProbeResult {
            spread: 2.55,
            ..figure(pattern, Direction::Read, block_bytes, rate)
        };
        let steady = figure(ProbePattern::Random, Direction::Read, 4096, 100.0);
        let measured = |figures: &[ProbeResult]| ProbedLoads {
            size_bytes: 1 << 20,
            figures: figures.to_vec(),
            not_measured: Vec::new(),
        };
        let decisive = [varying(ProbePattern::Random, 4096, 100.0)];
        let (report, outcome) =
            store_record(measured(&decisive), &store, device.clone(), "x".to_owned(), false);
        let error = outcome.unwrap_err().to_string();
        assert!(
            error.starts_with("x: not saved: the rate of random read of 4 KiB varies by 255 % ("),
            "{error}"
        );
        assert!(report.kept.is_none() && store.load("serial").unwrap().is_none());
        let (report, outcome) =
            store_record(measured(&decisive), &store, device.clone(), "x".to_owned(), true);
        assert!(outcome.is_ok() && report.kept.is_some());
        // The same rule applies to loads that are not part of the capacity.
        let other = [steady, varying(ProbePattern::Sequential, 4096, 9000.0)];
        let (report, outcome) = store_record(measured(&other), &store, device, "x".to_owned(), false);
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the rate of sequential read of 4 KiB varies by 255 %"), "{error}");
        assert!(report.kept.is_none());
    }

    #[test]
    fn capacity_uses_random_iops_and_the_best_bandwidth() {
        let figures = [
            figure(ProbePattern::Random, Direction::Read, 4096, 100.0),
            figure(ProbePattern::Sequential, Direction::Read, 4096, 20_000.0),
            figure(ProbePattern::Random, Direction::Read, 1 << 20, 70.0),
            figure(ProbePattern::Sequential, Direction::Read, 1 << 20, 90.0),
        ];
        let expect = CapacityFigures { read_iops: 100, read_bps: 90 << 20, write_iops: 0, write_bps: 0 };
        assert_eq!(capacity(&figures), expect);
    }
}
