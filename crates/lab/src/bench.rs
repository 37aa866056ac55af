//! `weir bench`: a load through weir's data path or on a server's export. Options and output are
//! those of `qemu-img bench`, with additions.
//!
//! ```text
//!   options ─► check ─► LoadJob ─► load ─► LoadOutcome ─┬─► text       qemu-img's output, and latencies
//!   image or URI ─► target ──────────┘                  ├─► json       fio's output, and weir's own
//!                   progress                            └─► findings   the result file
//! ```
//!
//! Opening and closing the image are not measured, as in qemu-img; but a run that writes ends with
//! a flush.

mod arguments;
mod check;
mod findings;
mod json;
mod progress;
mod target;
mod text;

use std::{
    cell::Cell,
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    rc::Rc,
    sync::{Arc, Mutex},
};

use anyhow::{Context as _, anyhow, bail};
pub use arguments::{BenchArgs, EXAMPLES};
use block::{disk::Disk, layer::throttle::DiskSettings};
use console::{CommandFailure, on_reactor, print, print_error, print_json};
use export::vhost_user_blk::client;
use image::{
    Image,
    open::{BackingChoice, ImageOptions, open},
};
use nbd::{client::HandshakeOptions, uri::Uri};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};
use policy::{prefetch::PrefetchStats, time::Duration};
use reactor::{error::Error, guest::driver::RequestSlots, now, sleep_until, spawn};
use storage::{OpenOptions, rbd};

use self::progress::BenchProgress;
pub(crate) use self::target::BenchTarget;
use super::{
    interruption::SignalInterruption,
    load::{CONNECT_TIMEOUT, JobResult, LoadJob, LoadOutcome, LoadSource, LoadStop, run_jobs},
    result::{HeaderStart, INTERRUPTED, ResultFile, ResultHeader},
};
use crate::probe::in_use::{ExclusiveDevice, claim};

/// Puts a load on an image or export and prints the result.
///
/// # Errors
/// Fails on impossible options, the first failed request, or an interruption (after printing the
/// result).
pub fn run(mut arguments: BenchArgs) -> Result<(), CommandFailure> {
    arguments.resolve().map_err(CommandFailure::Usage)?;
    check::check(&arguments).map_err(CommandFailure::Usage)?;
    arguments.results.check()?;
    let begun = ResultHeader::begin();
    let stop = LoadStop::default();
    let stopped = stop.clone();
    // Before the reactor's threads start: they inherit the blocked signals.
    let interruption = SignalInterruption::watch(move || _ = stopped.stop(), || {})?;
    // Held until the end, so that nothing mounts the device during the run.
    let _claim = claimed(&arguments)?;
    let name = arguments.target.to_string();
    on_reactor(async move {
        let run = BenchRun {
            arguments,
            header_start: begun,
            interruption,
            stop,
            size_bytes: Cell::new(0),
            cpu_time: Cell::default(),
        };
        Ok(run.measure().await.context(name)?)
    })
}

/// Claims a device before writing to it: `-w` is permission to destroy its data.
fn claimed(arguments: &BenchArgs) -> anyhow::Result<Option<ExclusiveDevice>> {
    let BenchTarget::Image(image) = &arguments.target else { return Ok(None) };
    let Some(path) = image.path().filter(|_| arguments.write) else { return Ok(None) };
    // A missing path is reported when it is opened.
    let meta = fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device());
    meta.map(|meta| claim(path, meta.rdev(), true)).transpose()
}

struct BenchRun {
    arguments: BenchArgs,
    header_start: HeaderStart,
    interruption: SignalInterruption,
    stop: LoadStop,
    /// Size of the disk, once it is open.
    size_bytes: Cell<u64>,
    /// CPU time of the load, excluding the ramp time.
    cpu_time: Cell<Duration>,
}

impl BenchRun {
    async fn measure(&self) -> anyhow::Result<()> {
        match &self.arguments.target {
            BenchTarget::Image(image) => self.measure_image(image).await,
            BenchTarget::Nbd(export) => self.measure_export(export).await,
            BenchTarget::VhostUser(path) => self.measure_vhost_user(path).await,
        }
    }

    async fn measure_image(&self, image: &settings::ImageLocation) -> anyhow::Result<()> {
        let disk = Arc::new(self.unless_stopped(open_disk(&self.arguments, image)).await?);
        // The image is opened once; all jobs share the disk, as clients of a daemon do.
        let (job, result) = self.run_load(disk.size_bytes(), LoadSource::Disk(Arc::clone(&disk))).await?;
        let prefetch = disk.prefetch().stats();
        let closed = match disk.image().storage().is_remote() {
            true => self.stop.unless_overdue(disk.close()).await.unwrap_or_else(|| {
                // An unresponsive Ceph cluster keeps the image's lock until it times this client
                // out.
                rbd::abandon_closing();
                Err(Error::TIMED_OUT)
            }),
            false => disk.close().await,
        };
        let closed = closed.context("the image could not be closed");
        self.report(&job, result, Some(prefetch)).and(closed)
    }

    async fn measure_export(&self, export: &Uri) -> anyhow::Result<()> {
        let place = export.clone();
        let tls = reactor::run_blocking(move || place.credentials()).await?;
        let wanted = HandshakeOptions { export: export.export.clone(), tls, allocation: false };
        let client = self.unless_stopped(LoadSource::client(&export.server, &wanted)).await?;
        let export_info = client.export().clone();
        // Only for the handshake: each job opens a separate connection later.
        client.disconnect().await;
        if self.arguments.write && export_info.is_read_only() {
            bail!("is read-only (leave out -w to read)");
        }
        // Checked before the first request, which a server would answer with an error.
        self.check_server(
            export_info.minimum_block.into(),
            Some(export_info.maximum_payload.into()),
            export_info.can_flush(),
        )?;
        let source = LoadSource::Nbd { server: export.server.clone(), options: wanted };
        let (job, result) = self.run_load(export_info.size_bytes, source).await?;
        self.report(&job, result, None)
    }

    async fn measure_vhost_user(&self, path: &str) -> anyhow::Result<()> {
        let BenchArgs { jobs, depth, readers, write, rwmixread, pattern, buffer_size, .. } = self.arguments;
        let device = self.unless_stopped(client::connect(path, !write, CONNECT_TIMEOUT)).await?;
        let properties = *device.properties();
        self.check_server(properties.block_bytes, properties.request_bytes, properties.has_cache)?;
        if jobs as usize > properties.queues {
            let available = if properties.queues == 1 {
                "1 queue".to_owned()
            } else {
                format!("{} queues", properties.queues)
            };
            bail!("has {available}, but each of the {jobs} jobs needs one (choose a smaller --jobs)");
        }
        let slots = RequestSlots {
            count: depth as usize * readers as usize,
            bytes: usize::try_from(buffer_size).context("a request is larger than memory")?,
            read: !write || rwmixread.is_some(),
            write: write.then_some(pattern.unwrap_or(0)),
        };
        // Before the queues start: an invalid job must not leave the device in use.
        check::job(&self.arguments, properties.size_bytes)?;
        let queues =
            self.unless_stopped(client::start(device, jobs as usize, slots, CONNECT_TIMEOUT)).await?;
        let source = LoadSource::VhostUser(Arc::new(Mutex::new(queues)));
        let (job, result) = self.run_load(properties.size_bytes, source).await?;
        self.report(&job, result, None)
    }

    /// Waits for a server, which may never respond, or for an interruption.
    async fn unless_stopped<T, E: Into<anyhow::Error>>(
        &self,
        answered: impl Future<Output = Result<T, E>>,
    ) -> anyhow::Result<T> {
        match self.stop.unless_stopped(answered).await {
            Some(answer) => answer.map_err(Into::into),
            None => bail!("{INTERRUPTED} before anything was sent"),
        }
    }

    /// Fails if the server does not accept requests of this form.
    fn check_server(&self, block_bytes: u64, most_bytes: Option<u64>, can_flush: bool) -> anyhow::Result<()> {
        let BenchArgs { offset, step_size, buffer_size, flush_interval, .. } = self.arguments;
        if let Some(max_bytes) = most_bytes.filter(|&most| buffer_size > most) {
            bail!(
                "accepts requests of up to {max_bytes} bytes, but -s is {buffer_size} (choose a smaller -s)"
            );
        }
        if [offset, step_size.unwrap_or(0), buffer_size].map(|bytes| bytes % block_bytes) != [0; 3] {
            bail!("supports only multiples of {block_bytes} bytes (choose another -o, -s or -S)");
        }
        if flush_interval.is_some() && !can_flush {
            bail!("does not support flush (leave out --flush-interval)");
        }
        Ok(())
    }

    async fn run_load(&self, size_bytes: u64, source: LoadSource) -> anyhow::Result<(LoadJob, JobResult)> {
        let BenchArgs { jobs, quiet, json, .. } = self.arguments;
        self.size_bytes.set(size_bytes);
        let job = check::job(&self.arguments, size_bytes)?;
        let job = LoadJob { stop: self.stop.clone(), ..job };
        // Every part has a separate counter, so that jobs on different threads share no cache line.
        let parts = job.clone().split(jobs);
        let counts: Vec<_> = parts.iter().map(|part| part.answered.clone()).collect();
        let mut progress = BenchProgress::default();
        let before = Rc::new(Cell::new(None));
        let begin = || {
            let (before, ramp) = (Rc::clone(&before), job.ramp);
            before.set(Some(cpu_time()));
            spawn(async move {
                // CPU time of the ramp is excluded by reading the counter again at its end.
                sleep_until(now() + ramp).await;
                before.set(Some(cpu_time()));
            });
            if !quiet && !json {
                print(&text::announcement(&job, jobs))?;
            }
            progress = BenchProgress::begin(quiet || json, &job, &counts);
            Ok(())
        };
        let job_result = run_jobs(parts, source, begin).await?;
        let spent = before.get().map(|before| cpu_time().saturating_sub(before));
        self.cpu_time.set(spent.unwrap_or_default());
        drop(progress);
        Ok((job, job_result))
    }

    fn report(
        &self,
        job: &LoadJob,
        result: JobResult,
        prefetch: Option<PrefetchStats>,
    ) -> anyhow::Result<()> {
        let JobResult { outcome, failed } = result;
        let partial = match (&failed, self.interruption.is_interrupted()) {
            (Some(_), _) => Some("a request failed"),
            (None, true) => Some(INTERRUPTED),
            (None, false) => None,
        };
        // Saved even after a failed request: the request's error is returned then, and an error of
        // saving is printed.
        let saved = self.save_result(job, &outcome, partial);
        if let Some(failed) = failed {
            saved.err().iter().for_each(print_error);
            return Err(failed);
        }
        let printed = self.print(job, &outcome, prefetch, partial);
        // An interrupted run prints its result and still exits with an error.
        let completed = match partial {
            Some(why) => Err(anyhow!("{why} after {:.3} seconds", outcome.elapsed.as_secs_f64())),
            None => Ok(()),
        };
        printed.and(saved).and(completed)
    }

    fn print(
        &self,
        job: &LoadJob,
        outcome: &LoadOutcome,
        prefetch: Option<PrefetchStats>,
        partial: Option<&'static str>,
    ) -> anyhow::Result<()> {
        if self.arguments.json {
            let weir_keys =
                json::weir_json(&self.arguments, job, outcome, self.cpu_time.get(), prefetch, partial);
            return print_json(&json::report(&self.arguments, job, outcome, &weir_keys));
        }
        if self.arguments.quiet {
            return Ok(());
        }
        if partial.is_none() {
            print(&text::completion(outcome))?;
        }
        print(&text::summary(job, outcome, self.cpu_time.get()))?;
        if self.arguments.has_details() || partial.is_some() {
            print(&text::details(outcome))?;
        }
        self.unallocated().map_or(Ok(()), |note| print(&(note + "\n")))
    }

    /// Notes the unallocated share of an image that was read: those reads cost the storage nothing.
    fn unallocated(&self) -> Option<String> {
        let BenchTarget::Image(image) = &self.arguments.target else { return None };
        let file = fs::metadata(image.path()?).ok().filter(fs::Metadata::is_file)?;
        let reads = !self.arguments.write || self.arguments.rwmixread.is_some();
        // st_blocks counts 512-byte units, whatever the file system's block size (stat(2)).
        let percent = 100 - (file.blocks() * 512 * 100).div_ceil(self.size_bytes.get().max(1)).min(100);
        (reads && percent > 0).then(|| {
            format!(
                "{percent} % of {image} is not allocated: reads of it cost the storage nothing \
                 (write it first, with -w)."
            )
        })
    }

    fn save_result(&self, job: &LoadJob, outcome: &LoadOutcome, partial: Option<&str>) -> anyhow::Result<()> {
        let place = match &self.arguments.target {
            BenchTarget::Image(image) => image.path(),
            BenchTarget::Nbd(_) | BenchTarget::VhostUser(_) => None,
        };
        let text = text::announcement(job, self.arguments.jobs)
            + &text::summary(job, outcome, self.cpu_time.get())
            + &text::details(outcome);
        let lines = text.lines().map(|line| line.trim().to_owned()).chain(self.unallocated()).collect();
        let result = ResultFile::new(self.header_start.end(place), findings::findings(outcome, lines));
        self.arguments.results.save_files(&ResultFile { partial: partial.map(str::to_owned), ..result })
    }
}

/// CPU time of all threads of this process.
fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    let [user, system] = [usage.user_time(), usage.system_time()]
        .map(|time| Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap_or(0)));
    user + system
}

async fn open_disk(arguments: &BenchArgs, image: &settings::ImageLocation) -> anyhow::Result<Disk> {
    let disk = arguments.disk()?;
    let mut caches = disk.qcow2.caches;
    let (mut part, mut backing) = (None, BackingChoice::AsInImage);
    if let Some(description) = &arguments.description {
        part = description.part;
        if description.no_backing {
            backing = BackingChoice::Nothing;
        }
        if !description.cache_options.is_empty() {
            caches = description.caches;
        }
    }
    let options = ImageOptions {
        storage: OpenOptions {
            cache: arguments.cache,
            format: arguments.format,
            read_only: !arguments.write,
            force_share: arguments.force_share,
            delay: arguments.delay,
            rate: arguments.rate.clone(),
            part,
            ..OpenOptions::default()
        },
        caches,
        backing,
        ..ImageOptions::default()
    };
    let image = open(&image.to_spec()?, options).await?;
    if let (Image::Raw(_), Some(option)) = (&image, disk.first_qcow2_key()) {
        bail!("{option} is for qcow2 images, and this one is raw (leave it out)");
    }
    let measured = Disk::new("bench", image, DiskSettings::default(), None)?;
    measured.prefetch().set(disk.prefetch)?;
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    pub(super) struct BenchLine {
        #[command(flatten)]
        pub(super) arguments: BenchArgs,
    }

    pub(super) fn arguments(text: &str) -> BenchArgs {
        let tokens = ["bench"].into_iter().chain(text.split_whitespace());
        BenchLine::try_parse_from(tokens).unwrap_or_else(|error| panic!("{text}: {error}")).arguments
    }
}
