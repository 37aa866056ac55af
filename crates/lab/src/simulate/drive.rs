//! Drives a simulation: reads requests, resolves disks, and runs engines on several threads.
//!
//! ```text
//!                                 ┌─► shard 0: after (with limits), before (without) ─┐
//!    trace ─► records ─► requests ┤                                                   ├─► SimulationOutcome
//!             a batch    disks by └─► shard 1 … ──────────────────────────────────────┘
//!                        number
//! ```
//!
//! "Before" is the trace as it would be without limits, "after" with them. Disks that share a group
//! or a device are in the same shard, so results do not depend on the number of shards. A
//! simulation ends early when waiting requests take [`MAX_BYTES`], on an interruption, or at an
//! error in a trace. The outcome then covers the part before, with the reason.

use std::{
    ops::ControlFlow,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, ScopedJoinHandle},
};

use anyhow::anyhow;
use policy::prefetch;
use recording::{RecordSource, TraceRecord};
use simulator::{
    backlog::{BacklogMemory, MAX_BYTES},
    client::{ClientSpec, ClosedLoopClient},
    engine::{RowSink, STEPS, SimulationEngine, WorldError},
    request::SimulatedRequest,
    tally::{QueueStatistics, RequestStatistics},
    world::{DiskSpec, UNKNOWN_SIZE, WorldSpec},
};

use super::{
    events::EventsFile,
    setup::{DiskResolver, SimulationSetup},
};

/// Large enough to amortize a channel operation, small enough for the CPU cache.
const BATCH: usize = 4096;
/// Batches that wait for a shard before the reader waits too.
const MAX_QUEUED_BATCHES: usize = 16;

#[derive(Debug)]
pub(crate) struct EmptySource;

impl RecordSource for EmptySource {
    fn fill(&mut self, _: &mut Vec<TraceRecord>, _: usize) -> anyhow::Result<()> {
        Ok(())
    }

    fn disks(&self) -> &[String] {
        &[]
    }

    fn place(&self, _: &TraceRecord) -> String {
        String::new()
    }
}

pub(crate) struct SimulationInput {
    pub(crate) source: Box<dyn RecordSource>,
    pub(crate) disks: Vec<String>,
    /// Clients; the disk of each is an index into `disks`.
    pub(crate) clients: Vec<ClientSpec>,
}

impl SimulationInput {
    pub(crate) fn of(source: impl RecordSource + 'static) -> Self {
        Self { source: Box::new(source), disks: Vec::new(), clients: Vec::new() }
    }
}

pub(crate) struct SimulationJob<'a> {
    pub(crate) setup: &'a SimulationSetup,
    pub(crate) input: SimulationInput,
    pub(crate) threads: usize,
    /// True to simulate without limits as well.
    pub(crate) before: bool,
    /// Receives every request's result; forces one thread.
    pub(crate) events: Option<Arc<Mutex<EventsFile>>>,
    pub(crate) stop: &'a AtomicBool,
    /// Progress callback: number of requests, and time of the last one.
    pub(crate) report_progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl<'a> SimulationJob<'a> {
    /// A job on one thread, with and without limits, without progress.
    pub(crate) fn new(setup: &'a SimulationSetup, input: SimulationInput, stop: &'a AtomicBool) -> Self {
        Self { setup, input, threads: 1, before: true, events: None, stop, report_progress: &|_, _| () }
    }
}

#[derive(Debug)]
pub(crate) struct SimulationOutcome {
    pub(crate) world: WorldSpec,
    pub(crate) disks: Vec<SimulatedDisk>,
    pub(crate) groups: Vec<QueueStatistics>,
    /// Reason why the outcome is incomplete.
    pub(crate) partial: Option<String>,
}

#[derive(Debug)]
pub(crate) struct SimulatedDisk {
    pub(crate) after: RequestStatistics,
    pub(crate) before: Option<RequestStatistics>,
    pub(crate) queue: QueueStatistics,
    /// Nanoseconds throttled by each limit, the longest first.
    pub(crate) throttled: Vec<(String, u64)>,
    pub(crate) prefetch: Option<prefetch::PrefetchStats>,
}

/// Simulates a job. Fails if nothing can be simulated: contradictory settings, or an unreadable
/// trace.
pub(crate) fn simulate(job: SimulationJob<'_>) -> anyhow::Result<SimulationOutcome> {
    let mut names = DiskResolver::new(job.setup);
    let mut world = job.setup.world.clone();
    for name in &job.input.disks {
        // The workload's disks come first, so that its clients can refer to them by index.
        names.add(name, &mut world).map_err(|why| anyhow!("the workload: {why}"))?;
    }
    // A client's disk is an index into the workload's names; engines need an index into the world.
    let in_world = |spec: &ClientSpec| ClientSpec { disk: names.known[spec.disk], ..spec.clone() };
    let clients: Vec<ClientSpec> = job.input.clients.iter().map(in_world).collect();
    if let Some(spec) = clients.iter().find(|spec| spec.region.end > world.disks[spec.disk].size_bytes) {
        let DiskSpec { name, size_bytes, .. } = &world.disks[spec.disk];
        return Err(anyhow!(
            "the workload: span={} goes past the end of the disk {name:?}, which has {size_bytes} bytes",
            spec.region.end
        ));
    }
    let first = names.known.len();
    let reading = SimulationReader { names, first, world, requests: 0, partial: None };
    // Rows of several threads would reach the events file in an unpredictable order.
    let shards = if job.events.is_some() { 1 } else { job.setup.parts().min(job.threads) };
    if shards > 1 {
        reading.read_in_shards(job, shards, &clients)
    } else {
        reading.read_in_one(job, &clients)
    }
}

struct SimulationReader<'a> {
    names: DiskResolver<'a>,
    first: usize,
    world: WorldSpec,
    requests: u64,
    partial: Option<String>,
}

impl SimulationReader<'_> {
    /// Reads to the end, or until `handle_batch` breaks. `handle_batch` receives the world, true if
    /// it has grown, and a batch of requests.
    fn read(
        &mut self,
        source: &mut dyn RecordSource,
        stop: &AtomicBool,
        report_progress: &dyn Fn(u64, u64),
        mut handle_batch: impl FnMut(
            &WorldSpec,
            bool,
            &mut Vec<SimulatedRequest>,
        ) -> anyhow::Result<ControlFlow<()>>,
    ) -> anyhow::Result<()> {
        let (mut records, mut requests) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        loop {
            records.clear();
            let filled = source.fill(&mut records, BATCH);
            // Compared with the number after this batch, to detect new disks.
            let disks = self.world.disks.len();
            let taken = records.iter().try_for_each(|record| {
                requests.push(self.request(source, record)?);
                Ok(())
            });
            let grown = self.world.disks.len() > disks;
            self.requests += requests.len() as u64;
            if let Some(last) = requests.last() {
                report_progress(self.requests, last.at_ns);
            }
            // Also after an error: the requests before it are part of the result.
            let more = handle_batch(&self.world, grown, &mut requests)?;
            // An error after the first request makes the result partial; before it there is no
            // result.
            if let Err(error) = taken.and(filled) {
                if self.requests == 0 {
                    return Err(error);
                }
                self.partial = Some(format!("{error:#}"));
                return Ok(());
            }
            if records.is_empty() || more.is_break() || stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
    }

    #[inline]
    fn request(
        &mut self,
        source: &dyn RecordSource,
        record: &TraceRecord,
    ) -> anyhow::Result<SimulatedRequest> {
        let number = self.first + record.disk.index();
        // Numbers are assigned in order of appearance, so all names up to this one exist.
        while self.names.known.len() <= number {
            let name = &source.disks()[self.names.known.len() - self.first];
            self.names
                .add(name, &mut self.world)
                .map_err(|why| anyhow!("{}: {why}", source.place(record)))?;
        }
        let disk = self.names.known[number];
        let size_bytes = self.world.disks[disk].size_bytes;
        if record.offset.saturating_add(record.length) > size_bytes {
            let name = &self.world.disks[disk].name;
            let size = if size_bytes == UNKNOWN_SIZE {
                "any disk".to_owned()
            } else {
                format!("the disk {name:?}, which has {size_bytes} bytes")
            };
            return Err(anyhow!(
                "{}: a {} of {} bytes at {} goes past the end of {size}",
                source.place(record),
                record.op.name(),
                record.length,
                record.offset
            ));
        }
        let TraceRecord { time_ns: at_ns, op, offset, length, .. } = *record;
        Ok(SimulatedRequest { at_ns, disk, op, offset, length })
    }

    fn read_in_one(
        mut self,
        job: SimulationJob<'_>,
        clients: &[ClientSpec],
    ) -> anyhow::Result<SimulationOutcome> {
        let SimulationJob { mut input, stop, report_progress, events, before, .. } = job;
        let follow = |world: &WorldSpec| {
            if let Some(events) = &events {
                locked(events).follow(world);
            }
        };
        let results =
            events.clone().map(|events| -> RowSink { Box::new(move |rows| locked(&events).write(rows)) });
        follow(&self.world);
        let mut pair = EnginePair::new(&self.world, before, results, clients, &BacklogMemory::default())?;
        self.read(&mut *input.source, stop, report_progress, |world, grown, requests| {
            if grown {
                follow(world);
            }
            for request in requests.drain(..) {
                pair.arrive(world, request, stop)?;
            }
            Ok(if pair.is_full() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        pair.finish(&self.world, stop)?;
        Ok(self.outcome(vec![pair], |_| 0, stop))
    }

    fn read_in_shards(
        mut self,
        job: SimulationJob<'_>,
        shards: usize,
        clients: &[ClientSpec],
    ) -> anyhow::Result<SimulationOutcome> {
        let SimulationJob { setup, mut input, stop, report_progress, before, .. } = job;
        let shard_of = setup.shards(&self.world, shards);
        // Each shard simulates the clients of its disks, and all shards share the bound on memory.
        let mut pairs = Vec::with_capacity(shards);
        let memory = BacklogMemory::default();
        for shard in 0..shards {
            let is_own = |client: &&ClientSpec| shard_of(client.disk) == shard;
            let own_clients: Vec<_> = clients.iter().filter(is_own).cloned().collect();
            pairs.push(EnginePair::new(&self.world, before, None, &own_clients, &memory)?);
        }
        let full = AtomicBool::new(false);
        let pairs = thread::scope(|scope| {
            let full = &full;
            let (mut workers, mut channels) = (Vec::new(), Vec::new());
            for pair in pairs {
                let (sender, receiver): (SyncSender<RequestBatch>, _) = sync_channel(MAX_QUEUED_BATCHES);
                channels.push(sender);
                let world = Arc::new(self.world.clone());
                workers.push(scope.spawn(move || pair.work(world, &receiver, stop, full)));
            }
            let mut divided: Vec<Vec<SimulatedRequest>> = vec![Vec::new(); shards];
            let read = self.read(&mut *input.source, stop, report_progress, |world, grown, requests| {
                // One copy of the grown world for all workers.
                let grown = grown.then(|| Arc::new(world.clone()));
                for request in requests.drain(..) {
                    divided[shard_of(request.disk)].push(request);
                }
                // Every shard receives every batch, even an empty one, so that all learn of new
                // disks.
                for (channel, requests) in channels.iter().zip(&mut divided) {
                    let batch = RequestBatch { grown: grown.clone(), requests: std::mem::take(requests) };
                    // Fails if the worker has failed; joining it returns its error.
                    let _ = channel.send(batch);
                }
                Ok(if full.load(Ordering::Relaxed) {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                })
            });
            // Closed channels end the workers' loops; otherwise joining them would never return.
            drop(channels);
            let join = |worker: ScopedJoinHandle<'_, anyhow::Result<EnginePair>>| {
                worker.join().expect("it does not panic")
            };
            let pairs: Vec<_> = workers.into_iter().map(join).collect();
            read.and_then(|()| pairs.into_iter().collect::<anyhow::Result<Vec<EnginePair>>>())
        })?;
        Ok(self.outcome(pairs, shard_of, stop))
    }

    fn why_partial(&mut self, pairs: &[EnginePair], stop: &AtomicBool) -> Option<String> {
        if pairs.iter().any(EnginePair::is_full) {
            let waiting: usize = pairs.iter().map(|pair| pair.after.waiting()).sum();
            return Some(format!(
                "{waiting} requests waited for limits at once, and the {} of memory for them are \
                 used up (raise the limits, or split the trace)",
                settings::exact_size(MAX_BYTES as u64)
            ));
        }
        if stop.load(Ordering::Relaxed) && self.partial.is_none() {
            let waiting: usize = pairs.iter().map(|pair| pair.after.waiting()).sum();
            return Some(match waiting {
                0 => "interrupted".to_owned(),
                1 => "interrupted; one request that still waited is left out".to_owned(),
                _ => format!("interrupted; {waiting} requests that still waited are left out"),
            });
        }
        self.partial.take()
    }

    fn outcome(
        mut self,
        mut pairs: Vec<EnginePair>,
        shard_of: impl Fn(usize) -> usize,
        stop: &AtomicBool,
    ) -> SimulationOutcome {
        let partial = self.why_partial(&pairs, stop);
        let Self { world, .. } = self;
        let mut groups = vec![QueueStatistics::default(); world.groups.len()];
        let mut disks = Vec::with_capacity(world.disks.len());
        for (index, disk) in world.disks.iter().enumerate() {
            // A disk's results, and those of the groups above it, are in its own shard.
            let pair = &mut pairs[shard_of(index)];
            let above: Vec<usize> = world.groups_above(disk).collect();
            for &group in &above {
                groups[group] = *pair.after.group(group);
            }
            let names: Vec<&str> = above.iter().map(|&group| world.groups[group].name.as_str()).collect();
            let prefetch = pair.after.prefetch(index);
            let (_, queue, throttle_times) = pair.after.disk(index);
            let throttle_times =
                throttle_times.times().into_iter().map(|(bucket, ns)| (bucket.name(&names), ns)).collect();
            let queue = *queue;
            disks.push(SimulatedDisk {
                after: pair.after.take_statistics(index),
                before: pair.before.as_mut().map(|before| before.take_statistics(index)),
                queue,
                throttled: throttle_times,
                prefetch,
            });
        }
        SimulationOutcome { world, disks, groups, partial }
    }
}

fn locked(events: &Mutex<EventsFile>) -> MutexGuard<'_, EventsFile> {
    events.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An engine with limits and one without.
#[derive(Debug)]
struct EnginePair {
    after: SimulationEngine,
    before: Option<SimulationEngine>,
    memory: BacklogMemory,
    /// True if this pair found the memory full: it stops at once, even if another shard frees
    /// memory.
    is_full: bool,
}

struct RequestBatch {
    grown: Option<Arc<WorldSpec>>,
    requests: Vec<SimulatedRequest>,
}

impl EnginePair {
    fn new(
        world: &WorldSpec,
        before: bool,
        results: Option<RowSink>,
        clients: &[ClientSpec],
        memory: &BacklogMemory,
    ) -> anyhow::Result<Self> {
        let mut after = SimulationEngine::with_shared_memory(world, results, memory)?;
        let mut before = before.then(|| SimulationEngine::unlimited(world)).transpose()?;
        for engine in std::iter::once(&mut after).chain(&mut before) {
            clients.iter().for_each(|spec| engine.add_client(ClosedLoopClient::new(spec.clone())));
        }
        Ok(Self { after, before, memory: memory.clone(), is_full: false })
    }

    fn follow(&mut self, world: &WorldSpec, disks: usize) -> Result<(), WorldError> {
        for engine in std::iter::once(&mut self.after).chain(&mut self.before) {
            if engine.disks() < disks {
                engine.extend(world, disks)?;
            }
        }
        Ok(())
    }

    fn arrive(
        &mut self,
        world: &WorldSpec,
        request: SimulatedRequest,
        stop: &AtomicBool,
    ) -> Result<(), WorldError> {
        if request.disk >= self.after.disks() {
            self.add_disk(world, request, stop)?;
        }
        self.is_full |= self.memory.is_full();
        if self.is_full {
            return Ok(());
        }
        self.after.arrive(request, stop);
        if let Some(before) = &mut self.before {
            before.arrive(request, stop);
        }
        Ok(())
    }

    /// Adds a disk at the time of its first request. The time at which the trace was read has no
    /// effect.
    #[cold]
    fn add_disk(
        &mut self,
        world: &WorldSpec,
        request: SimulatedRequest,
        stop: &AtomicBool,
    ) -> Result<(), WorldError> {
        // All events before must have happened: a new disk changes the shares of its group.
        for engine in std::iter::once(&mut self.after).chain(&mut self.before) {
            engine.run_until(request.at_ns, stop);
        }
        self.follow(world, request.disk + 1)
    }

    fn is_full(&self) -> bool {
        self.is_full
    }

    fn finish(&mut self, world: &WorldSpec, stop: &AtomicBool) -> Result<(), WorldError> {
        self.follow(world, world.disks.len())?;
        let is_full = self.is_full();
        let is_stopped = || is_full || stop.load(Ordering::Relaxed);
        // Run in portions, so that an interruption takes effect.
        while self.after.run(STEPS) && !is_stopped() {}
        self.after.settle();
        if let Some(before) = &mut self.before {
            while before.run(STEPS) && !is_stopped() {}
            before.settle();
        }
        Ok(())
    }

    fn work(
        mut self,
        mut world: Arc<WorldSpec>,
        batches: &Receiver<RequestBatch>,
        stop: &AtomicBool,
        full: &AtomicBool,
    ) -> anyhow::Result<Self> {
        for RequestBatch { grown, requests } in batches {
            // The latest world applies to all requests until the next one.
            world = grown.unwrap_or(world);
            for request in requests {
                self.arrive(&world, request, stop)?;
            }
            if self.is_full() {
                full.store(true, Ordering::Relaxed);
            }
        }
        self.finish(&world, stop)?;
        Ok(self)
    }
}
