//! The I/O paths in turn: the I/O on each, and the counters around it.

use std::{
    fs::File,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use block::device::{DeviceIdentity, DeviceNumber, StatisticsFile};
use console::progress::StepProgress;
use nix::{fcntl::OFlag, unistd::syncfs};
use policy::{counter, steering::IoMaxRates};

use super::{
    LimitCompliance, MeasureOptions, PathFigures, PathResult,
    load::{self, BLOCK, LoadOrder, LoadReply},
    temporary_cgroup::TemporaryCgroup,
    trace::TraceInstance,
    worker::LoadWorker,
};
use crate::{explain::findings::Io, kernel::io_stat::CgroupIoUsage};

/// Timeout of a path, as a multiple of the time that the limit needs.
const TIMEOUT_FACTOR: u32 = 4;
/// Additional timeout for slow machines.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(60);
/// Tolerated excess over the limit. The kernel throttles in slices of 0.1 s, and writes back in
/// chunks.
const TOLERANCE: f64 = 0.25;
/// Share of the limit below which something else slowed the I/O.
const SLOW: f64 = 0.5;
const MIN_BYTES: u64 = BLOCK as u64;
const MIN_SIZE_OPTION: u64 = 16 * BLOCK as u64;

type PathTest<'a> = fn(&mut PathTests<'a>, u64) -> anyhow::Result<PathFigures>;

/// Fields are dropped in order: the worker leaves the cgroup before its removal.
pub(super) struct PathTests<'a> {
    pub(super) directory: PathBuf,
    pub(super) worker: LoadWorker,
    pub(super) cgroup: TemporaryCgroup,
    pub(super) trace: Option<TraceInstance>,
    pub(super) disk: DeviceNumber,
    pub(super) identity: DeviceIdentity,
    pub(super) rates: IoMaxRates,
    /// True if writeback is charged to the cgroup.
    pub(super) charged: bool,
    pub(super) options: MeasureOptions<'a>,
}

impl<'a> PathTests<'a> {
    pub(super) fn all(&mut self) -> Vec<PathResult> {
        let progress = StepProgress::new(self.options.quiet);
        let mut results = Vec::new();
        let (write_bps, read_bps) = (self.write_bps(), self.read_bps());
        let writes: [(&'static str, PathTest<'a>); 3] = [
            ("direct writes", |this, bytes| this.done(&LoadOrder::DirectWrites { bytes }, bytes, false)),
            ("buffered writes", Self::buffered_writes),
            ("writes and fsync", |this, bytes| this.done(&LoadOrder::SyncedWrites { bytes }, bytes, false)),
        ];
        for (name, test) in writes {
            progress.step(name);
            results.push(self.measure_path(name, write_bps, test));
            progress.end();
        }
        let file = self.file_to_read(read_bps);
        let reads = [
            ("direct reads", Io::DirectReads, false),
            ("reads", Io::Reads, true),
            ("reads from the page cache", Io::Reads, false),
        ];
        for (name, io, forget) in reads {
            progress.step(name);
            let limit_bps = if name.ends_with("cache") { None } else { read_bps };
            let path_result = self.measure_path(name, limit_bps, |this, bytes| {
                let (path, file_bytes) = file
                    .as_ref()
                    .map(|(_, path, bytes)| (path, *bytes))
                    .map_err(|error| anyhow::anyhow!("{error:#}"))?;
                this.read(path, bytes.min(file_bytes), io, forget)
            });
            results.push(path_result);
            progress.end();
        }
        // The last path reads from the page cache, which the reads before it filled.
        if let Some(last) = results.last_mut()
            && let Ok(figures) = &mut last.result
        {
            figures.compliance = LimitCompliance::NoIo;
        }
        results
    }

    fn write_bps(&self) -> Option<u64> {
        lower_limit_bps(self.rates.bps[1], self.rates.iops[1])
    }

    fn read_bps(&self) -> Option<u64> {
        lower_limit_bps(self.rates.bps[0], self.rates.iops[0])
    }

    /// Bytes that the limit admits in the time of one path, in whole blocks.
    fn amount(&self, limit_bps: Option<u64>) -> u64 {
        let max_bytes = self.options.max_bytes.max(MIN_SIZE_OPTION);
        let seconds = self.options.time.as_secs_f64();
        let bytes = limit_bps.map_or(max_bytes, |bps| (bps as f64 * seconds) as u64);
        bytes.clamp(MIN_BYTES, max_bytes) / BLOCK as u64 * BLOCK as u64
    }

    fn timeout(&self, bytes: u64, limit_bps: Option<u64>) -> Duration {
        let expected = limit_bps.map_or(0.0, |bps| bytes as f64 / bps.max(1) as f64);
        Duration::try_from_secs_f64(expected).unwrap_or(TIMEOUT_MARGIN) * TIMEOUT_FACTOR + TIMEOUT_MARGIN
    }

    fn measure_path(
        &mut self,
        name: &'static str,
        limit_bps: Option<u64>,
        test: impl FnOnce(&mut Self, u64) -> anyhow::Result<PathFigures>,
    ) -> PathResult {
        let bytes = self.amount(limit_bps);
        let result = test(self, bytes)
            .map(|figures| PathFigures { compliance: limit_compliance(figures.bps(), limit_bps), ..figures });
        PathResult { name, limit_bps, result: result.map_err(|error| format!("{error:#}")) }
    }

    fn counted(
        &mut self,
        reads: bool,
        act: impl FnOnce(&mut Self) -> anyhow::Result<(LoadReply, Duration)>,
    ) -> anyhow::Result<PathFigures> {
        let source = StatisticsFile::open(self.identity.directory()).context("the disk's statistics")?;
        let of_usage = |usage: CgroupIoUsage| {
            if reads { usage.read_bytes } else { usage.written_bytes }
        };
        let (usage, disk) = (self.cgroup.usage(self.disk)?, source.read()?);
        // Cleared last, so that the trace has only events of `act`.
        if let Some(trace) = &self.trace {
            trace.clear().context("the trace")?;
        }
        let (reply, flush_time) = act(self)?;
        let traced = self
            .trace
            .as_ref()
            .map(|trace| trace.read(self.worker.process()))
            .transpose()
            .context("the trace")?;
        let charged = counter::growth(of_usage(usage), of_usage(self.cgroup.usage(self.disk)?));
        let charged = charged.context("the cgroup's counters fell meanwhile")?;
        let disk = source.read()?.since(&disk).context("the disk's counters fell meanwhile")?;
        let calls = Duration::from_nanos(reply.nanoseconds);
        Ok(PathFigures {
            bytes: reply.bytes,
            seconds: (calls + flush_time).as_secs_f64(),
            calls_seconds: calls.as_secs_f64(),
            charged_bytes: charged,
            disk_bytes: if reads { disk.read_bytes } else { disk.written_bytes },
            traced,
            compliance: LimitCompliance::NotLimited,
        })
    }

    fn order(&mut self, order: &LoadOrder, bytes: u64, limit_bps: Option<u64>) -> anyhow::Result<LoadReply> {
        let timeout = self.timeout(bytes, limit_bps);
        self.worker.run_order(order, timeout)
    }

    /// Runs one order in the worker and counts its I/O.
    fn done(&mut self, order: &LoadOrder, bytes: u64, reads: bool) -> anyhow::Result<PathFigures> {
        let limit = if reads { self.read_bps() } else { self.write_bps() };
        self.counted(reads, |this| Ok((this.order(order, bytes, limit)?, Duration::ZERO)))
    }

    fn buffered_writes(&mut self, bytes: u64) -> anyhow::Result<PathFigures> {
        let limit = self.write_bps();
        let narrowed = self.charged && self.cgroup.restrict_memory(bytes);
        let directory = File::open(&self.directory).with_context(|| self.directory.display().to_string())?;
        if !self.charged {
            // Flushes dirty pages of other processes first, so that they are not counted.
            syncfs(&directory).context("syncfs")?;
        }
        let ms = u64::try_from(self.options.time.as_millis()).unwrap_or(u64::MAX).saturating_mul(2);
        let order = LoadOrder::BufferedWrites { bytes, ms };
        let figures = self.counted(false, |this| {
            let reply = this.order(&order, bytes, limit)?;
            let begin = Instant::now();
            // Through /proc: the worker's file is unlinked. Flushed from here, outside of the
            // cgroup, as a kernel worker would; `sync_data` in the worker would be charged to the
            // worker itself.
            if this.charged {
                let fd = reply.open_fd.context("the file that was written")?;
                let path = format!("/proc/{}/fd/{fd}", this.worker.process());
                File::open(&path).and_then(|file| file.sync_data()).context("flushing the written data")?;
            } else {
                syncfs(&directory).context("syncfs")?;
            }
            Ok((reply, begin.elapsed()))
        });
        if narrowed {
            self.cgroup.unrestrict_memory();
        }
        figures
    }

    fn read(&mut self, path: &Path, bytes: u64, io: Io, forget: bool) -> anyhow::Result<PathFigures> {
        let order = match io {
            Io::DirectReads => LoadOrder::DirectReads { path: path.to_owned(), bytes },
            _ => LoadOrder::Reads { path: path.to_owned(), bytes, forget },
        };
        self.done(&order, bytes, true)
    }

    /// A file to read, written from outside the cgroup; it exists while the `File` is open.
    fn file_to_read(&self, read_bps: Option<u64>) -> anyhow::Result<(File, PathBuf, u64)> {
        let bytes = self.amount(read_bps);
        let file = load::unlinked_file(&self.directory)?;
        // Direct if possible, or the file would be in the page cache already.
        let direct = load::reopen(&file, OFlag::O_DIRECT);
        load::fill(direct.as_ref().unwrap_or(&file), bytes)?;
        file.sync_data().context("flushing the file to be read")?;
        let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
        Ok((file, path.into(), bytes))
    }
}

/// Lower of the limits in bytes per second; operations count as one block each.
fn lower_limit_bps(bps: Option<u64>, iops: Option<u64>) -> Option<u64> {
    let of_operations = iops.map(|iops| iops.saturating_mul(BLOCK as u64));
    bps.into_iter().chain(of_operations).min()
}

fn limit_compliance(bps: f64, limit_bps: Option<u64>) -> LimitCompliance {
    match limit_bps {
        None => LimitCompliance::NotLimited,
        Some(limit) if bps > limit as f64 * (1.0 + TOLERANCE) => LimitCompliance::No,
        Some(limit) if bps < limit as f64 * SLOW => LimitCompliance::Slower,
        Some(_) => LimitCompliance::Yes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_enforced_within_the_tolerance() {
        let limit = Some(4_000_000);
        assert_eq!(limit_compliance(4_500_000.0, limit), LimitCompliance::Yes);
        assert_eq!(limit_compliance(5_100_000.0, limit), LimitCompliance::No);
        assert_eq!(limit_compliance(1_900_000.0, limit), LimitCompliance::Slower);
        assert_eq!(limit_compliance(1e12, None), LimitCompliance::NotLimited);
    }

    #[test]
    fn operations_limit_bytes_by_the_size_of_a_block() {
        assert_eq!(lower_limit_bps(Some(1 << 20), Some(2)), Some(2 * BLOCK as u64));
        assert_eq!(lower_limit_bps(Some(4096), Some(2)), Some(4096));
        assert_eq!(lower_limit_bps(None, None), None);
        assert_eq!(lower_limit_bps(None, Some(u64::MAX)), Some(u64::MAX));
    }
}
