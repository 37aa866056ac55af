//! The simulation: requests arrive, wait for limits and are served, in virtual time.
//!
//! ```text
//!   arrive ─────► limits: ThrottleTree ──► prefetch.rs: PrefetchCache ──► device.rs ──► tally.rs, ResultRow
//!                   ▲                                                     │
//!   events, by time ┴─ timer of a tree · chunk arrives · write completes ─┘ · client sends
//! ```
//!
//! The engine drives the policy's code as the daemon does (block's `layer/throttle` and
//! `layer/prefetch`): one tree with one timer for each outermost group and each disk without a
//! group.
//!
//! Requests must arrive in order. A disk is created at its first request, and the events of
//! an instant precede its requests. Results therefore depend neither on the order of disks nor on
//! disks that share nothing. The first waiting requests of each disk and direction are in the tree;
//! later ones are in a [`Backlog`](super::backlog), a few bytes each.

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
};

use policy::{
    prefetch::InvalidPrefetchSettings,
    request::Direction,
    throttle::{
        AdmissionResult, CauseKind, LimitKind, NodeId, PollDecision, RequestCost, ThrottleError, ThrottleTree,
    },
    time::Instant,
};

use super::{
    backlog::{Backlog, BacklogMemory},
    bucket::{LimitingBucket, ThrottleTimes},
    client::{ClosedLoopClient, RequestChain},
    flow::SimulationEvent,
    latency_target::SimulatedLatencySampler,
    prefetch::PrefetchModel,
    request::{RequestOp, SimulatedRequest},
    state::{DiskState, GroupState, NEVER, SimulationState, TreeWithTimer},
    tally::{QueueStatistics, RequestStatistics},
    watermark::WatermarkSampler,
    world::{DiskGroupSpec, DiskSpec, WorldSpec},
};

/// Maximum number of disks in a chart: more lines cannot be distinguished.
pub const MAX_CHARTS: usize = 8;
/// Number of waiting requests of a disk and direction that the tree holds; it decides by the first
/// one. Above 1, or a disk would count as idle between an admission and the next request.
const TREE_REQUESTS: usize = 4;
/// Number of events between two checks of the stop flag.
pub const STEPS: usize = 1 << 14;
// Client of a request that no client waits for.
const NO_CLIENT: u32 = u32::MAX;

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultRow {
    /// The request.
    pub request: SimulatedRequest,
    /// Time of admission by all limits, in nanoseconds.
    pub admitted_ns: u64,
    /// Time of completion, in nanoseconds.
    pub completed_ns: u64,
    /// Limit that throttled it.
    pub bucket: LimitingBucket,
}

/// Reason why a world cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// Invalid limits of a disk or group, by name.
    #[error("{0}: {1}")]
    Limits(String, ThrottleError),
    /// Invalid prefetch settings of a disk, by name.
    #[error("{0}: {1}")]
    Prefetch(String, InvalidPrefetchSettings),
}

/// Source of the next request after a completion.
#[derive(Debug)]
enum RequestSource {
    Client(ClosedLoopClient),
    /// The service time is the recorded one of the request in flight.
    Chain {
        chain: RequestChain,
        service_ns: u64,
    },
}

/// Receives results, in order of admission.
pub type RowSink = Box<dyn FnMut(&[ResultRow]) + Send>;
// Number of rows that are passed on together.
const ROW_BATCH: usize = 4096;

/// Destination of rows.
enum ResultRows {
    None,
    /// Stored until [`SimulationEngine::take_rows`].
    Stored(Vec<ResultRow>),
    Forwarded(Vec<ResultRow>, RowSink),
}

impl fmt::Debug for ResultRows {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ResultRows")
    }
}

/// A running simulation.
#[derive(Debug)]
pub struct SimulationEngine {
    state: SimulationState,
    waiting: TreeRequests,
    /// Memory of all backlogs, of this engine and others of the same simulation.
    memory: BacklogMemory,
    /// Number of requests in backlogs.
    backlogged: usize,
    /// Value of [`TREE_REQUESTS`]; does not affect results.
    max_tree_requests: usize,
    clients: Vec<RequestSource>,
    sampler: WatermarkSampler,
    latency: SimulatedLatencySampler,
    rows: ResultRows,
    /// True without limits and read-ahead.
    unlimited: bool,
}

impl SimulationEngine {
    /// Creates an engine; `rows` stores results for [`SimulationEngine::take_rows`].
    ///
    /// # Errors
    /// Limits, reservations or prefetch settings are invalid.
    pub fn new(world: &WorldSpec, rows: bool) -> Result<Self, WorldError> {
        Self::of(
            world,
            if rows { ResultRows::Stored(Vec::new()) } else { ResultRows::None },
            false,
            BacklogMemory::default(),
        )
    }

    /// Creates one of several engines that share memory for waiting requests and optionally pass
    /// on results.
    pub fn with_shared_memory(
        world: &WorldSpec,
        results: Option<RowSink>,
        memory: &BacklogMemory,
    ) -> Result<Self, WorldError> {
        let rows = results.map_or(ResultRows::None, |results| ResultRows::Forwarded(Vec::new(), results));
        Self::of(world, rows, false, memory.clone())
    }

    /// Creates an engine with the same disks and devices, but without limits and read-ahead.
    pub fn unlimited(world: &WorldSpec) -> Result<Self, WorldError> {
        Self::of(world, ResultRows::None, true, BacklogMemory::default())
    }

    fn of(
        world: &WorldSpec,
        rows: ResultRows,
        unlimited: bool,
        memory: BacklogMemory,
    ) -> Result<Self, WorldError> {
        let mut engine = Self {
            state: SimulationState::default(),
            waiting: TreeRequests::default(),
            memory,
            backlogged: 0,
            max_tree_requests: TREE_REQUESTS,
            clients: Vec::new(),
            sampler: WatermarkSampler::default(),
            latency: SimulatedLatencySampler::default(),
            rows,
            unlimited,
        };
        engine.extend(world, world.disks.len())?;
        engine.sampler.begin(&mut engine.state.flow);
        Ok(engine)
    }

    /// Number of disks.
    pub fn disks(&self) -> usize {
        self.state.disks.len()
    }

    /// Adds the groups, disks and devices that were added to the world, up to this number of disks.
    ///
    /// # Errors
    /// Limits or prefetch settings are invalid.
    pub fn extend(&mut self, world: &WorldSpec, disks: usize) -> Result<(), WorldError> {
        self.state.flow.devices.follow(&world.stations, &world.budgets);
        if !self.unlimited {
            for group in &world.groups[self.state.groups.len()..] {
                self.add_group(group)?;
            }
        }
        for disk in &world.disks[self.state.disks.len()..disks] {
            if self.unlimited {
                self.add_disk(&WorldSpec::default(), &disk.unlimited())?;
            } else {
                self.add_disk(world, disk)?;
            }
        }
        Ok(())
    }

    fn add_group(&mut self, group: &DiskGroupSpec) -> Result<(), WorldError> {
        let tree_index = match group.parent {
            Some(parent) => self.state.groups[parent].tree,
            None => self.add_tree(),
        };
        let parent = group.parent.map(|parent| self.state.groups[parent].node);
        let node = self.state.trees[tree_index].tree.add(parent, group.settings.limits, group.settings.share);
        let node = node.map_err(|error| WorldError::Limits(format!("group {}", group.name), error))?;
        self.sampler.add_group(self.state.groups.len(), &group.settings, self.state.now);
        self.latency.add_group(&group.settings);
        self.state.groups.push(GroupState {
            tree: tree_index,
            node,
            parent: group.parent,
            queue: QueueStatistics::default(),
        });
        Ok(())
    }

    fn add_disk(&mut self, world: &WorldSpec, disk: &DiskSpec) -> Result<(), WorldError> {
        let name = || format!("disk {}", disk.name);
        let tree_index = match disk.group {
            Some(group) => self.state.groups[group].tree,
            None => self.add_tree(),
        };
        let parent = disk.group.map(|group| self.state.groups[group].node);
        let tree = &mut self.state.trees[tree_index].tree;
        let node = tree.add(parent, disk.settings.limits, disk.settings.share);
        let node = node.map_err(|error| WorldError::Limits(name(), error))?;
        let has_limits = !tree.is_unlimited(node);
        let index = self.state.disks.len();
        let prefetch = PrefetchModel::new(disk).map_err(|invalid| WorldError::Prefetch(name(), invalid))?;
        self.state.disks.push(DiskState {
            tree: tree_index,
            node,
            group: disk.group,
            has_limits,
            place: disk.place,
            prefetch: prefetch.map(Box::new),
            backlogs: [(); 2].map(|()| Backlog::new(&self.memory)),
            queue: QueueStatistics::default(),
            throttle_times: ThrottleTimes::new(world, disk),
            statistics: if index < MAX_CHARTS {
                RequestStatistics::with_chart()
            } else {
                RequestStatistics::default()
            },
        });
        self.sampler.add_disk(index, disk, &mut self.state);
        let groups = std::iter::successors(disk.group, |&group| self.state.groups[group].parent);
        self.latency.add_disk(disk.place, &disk.settings, groups.collect());
        if self.latency.has_target() {
            // A cap may be set later, for any disk.
            self.state.disks.iter_mut().for_each(|disk| disk.has_limits = true);
        }
        Ok(())
    }

    fn add_tree(&mut self) -> usize {
        let tree = ThrottleTree::new(Instant::from_nanos(self.state.now));
        self.state.trees.push(TreeWithTimer { tree, timer: NEVER });
        self.state.trees.len() - 1
    }

    /// Adds a client, which begins at its own time or now.
    pub fn add_client(&mut self, client: ClosedLoopClient) {
        let number = self.clients.len() as u32;
        for _ in 0..client.spec.depth {
            self.state
                .flow
                .schedule(client.spec.time.start.max(self.state.now), SimulationEvent::Send(number));
        }
        self.clients.push(RequestSource::Client(client));
    }

    /// Adds a chain, which begins at its own time and never ends.
    pub(crate) fn add_chain(&mut self, chain: RequestChain) {
        let Some(begins_ns) = chain.start_ns() else { return };
        let number = self.clients.len() as u32;
        self.state.flow.schedule(begins_ns.max(self.state.now), SimulationEvent::Send(number));
        self.clients.push(RequestSource::Chain { chain, service_ns: 0 });
    }

    /// Processes all events before a request and then the request, which must not be earlier than
    /// previous ones. Does nothing after `stop` was set.
    #[inline]
    pub fn arrive(&mut self, request: SimulatedRequest, stop: &AtomicBool) {
        if self.run_until(request.at_ns, stop) {
            self.sample_if_due();
            self.submit(request, NO_CLIENT);
        }
    }

    /// Processes all events up to `at`; false if `stop` was set meanwhile.
    #[inline]
    pub fn run_until(&mut self, at: u64, stop: &AtomicBool) -> bool {
        let mut steps = 0;
        while self.state.flow.next_at().is_some_and(|next| next <= at) {
            self.step();
            steps += 1;
            if steps % STEPS == 0 && stop.load(Ordering::Relaxed) {
                return false;
            }
        }
        self.state.now = self.state.now.max(at);
        true
    }

    fn sample_if_due(&mut self) {
        if self.sampler.is_due() {
            self.sample_devices();
        }
    }

    #[cfg(test)]
    pub(crate) fn scheduled(&self) -> u64 {
        self.state.flow.scheduled()
    }

    /// Virtual time of the last event, in nanoseconds.
    pub(crate) const fn now_ns(&self) -> u64 {
        self.state.now
    }

    /// Number of requests that wait for limits.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.backlogged
    }

    /// Processes at most `steps` events; false if none is left.
    pub fn run(&mut self, steps: usize) -> bool {
        for _ in 0..steps {
            if self.state.flow.is_idle() {
                return false;
            }
            self.step();
        }
        true
    }

    /// Accounts for requests that still wait at the end.
    pub fn settle(&mut self) {
        let now = self.state.now;
        for disk in &mut self.state.disks {
            let waiting = disk.queue.settle(now);
            if let Some(chart) = disk.statistics.chart.as_mut().filter(|_| waiting > 0) {
                chart.waiting.set_level(now, waiting);
            }
            disk.throttle_times.settle(now);
        }
        self.state.groups.iter_mut().for_each(|group| _ = group.queue.settle(now));
        if let ResultRows::Forwarded(rows, results) = &mut self.rows {
            results(&std::mem::take(rows));
        }
    }

    /// Returns the rows since the last call, in order of admission. Empty unless the engine stores
    /// rows.
    pub fn take_rows(&mut self) -> std::vec::IntoIter<ResultRow> {
        match &mut self.rows {
            ResultRows::Stored(rows) => std::mem::take(rows).into_iter(),
            _ => Vec::new().into_iter(),
        }
    }

    /// Measurements of a disk, its queue, and the limits that throttled it.
    pub fn disk(&self, index: usize) -> (&RequestStatistics, &QueueStatistics, &ThrottleTimes) {
        let disk = &self.state.disks[index];
        (&disk.statistics, &disk.queue, &disk.throttle_times)
    }

    /// Removes and returns the measurements of a disk.
    pub fn take_statistics(&mut self, index: usize) -> RequestStatistics {
        std::mem::take(&mut self.state.disks[index].statistics)
    }

    /// The queue of a group.
    pub fn group(&self, index: usize) -> &QueueStatistics {
        &self.state.groups[index].queue
    }

    /// Counters of a disk's prefetch cache; `None` without one.
    pub fn prefetch(&self, index: usize) -> Option<policy::prefetch::PrefetchStats> {
        self.state.disks[index].prefetch.as_ref().map(|model| model.stats())
    }

    fn step(&mut self) {
        // Events are in order of time, so `now` never moves backwards.
        let Some((at, event)) = self.state.flow.pop() else { return };
        self.state.now = at;
        match event {
            // Timers are never cancelled: only the latest one is valid.
            SimulationEvent::Timer(tree_index) => {
                if self.state.trees[tree_index].timer == at {
                    self.state.trees[tree_index].timer = NEVER;
                    self.release(tree_index);
                }
            }
            SimulationEvent::Completed(client, took_no_time) => {
                let now = self.state.now;
                let at = match &self.clients[client as usize] {
                    RequestSource::Client(client_state) => client_state.next_send_ns(now, took_no_time),
                    RequestSource::Chain { chain, .. } => Some(chain.next_send_ns(now)),
                };
                if let Some(at) = at {
                    self.state.flow.schedule(at, SimulationEvent::Send(client));
                }
            }
            // A client that has reached its end returns no request, and with that stops.
            SimulationEvent::Send(client) => {
                let now = self.state.now;
                let request = match &mut self.clients[client as usize] {
                    RequestSource::Client(client_state) => client_state.next(now),
                    RequestSource::Chain { chain, service_ns } => {
                        let (request, recorded_ns) = chain.next(now);
                        *service_ns = recorded_ns;
                        Some(request)
                    }
                };
                if let Some(request) = request {
                    self.submit(request, client);
                }
            }
            SimulationEvent::Chunk(disk, fetch) => {
                if let Some(prefetch) = &mut self.state.disks[disk].prefetch {
                    prefetch.arrived(fetch, self.state.now);
                }
            }
            SimulationEvent::Written(disk, write) => {
                if let Some(prefetch) = &mut self.state.disks[disk].prefetch {
                    prefetch.written(write);
                }
            }
            SimulationEvent::Sample => self.sample_devices(),
            SimulationEvent::ControlLatency => {
                // A larger cap admits requests at once; no timer of the tree would report that.
                for tree_index in self.latency.step(&mut self.state) {
                    self.release(tree_index);
                }
            }
        }
    }

    fn submit(&mut self, request: SimulatedRequest, client: u32) {
        let disk = &mut self.state.disks[request.disk];
        let direction = match request.op.direction() {
            Some(direction) if disk.has_limits => direction,
            // A flush moves no data and is not limited.
            _ => return self.serve(&request, client, LimitingBucket::NONE),
        };
        let (tree_index, node) = (disk.tree, disk.node);
        let tree = &mut self.state.trees[tree_index].tree;
        let now = Instant::from_nanos(self.state.now);
        if tree.waiting(node, direction) >= self.max_tree_requests {
            // The tree's clock must advance with every arrival, even of a request that goes to the
            // backlog.
            let is_admitted = tree.try_admit(node, direction, &RequestCost::one(request.length), now);
            debug_assert!(!is_admitted, "no request overtakes those before it");
            disk.backlogs[direction.index()].push(&request, client);
            self.backlogged += 1;
            return self.enter_queues(request.disk);
        }
        // With fewer than `max_tree_requests` in the tree the backlog is empty:
        // `refill_from_backlog` refills the tree at every admission.
        let token = self.waiting.enter(request, client);
        match tree.submit(node, direction, RequestCost::one(request.length), token, now) {
            AdmissionResult::Admitted(token) => {
                self.waiting.leave(token);
                self.serve(&request, client, LimitingBucket::NONE);
            }
            AdmissionResult::Queued(_) => {
                let is_first = tree.waiting(node, direction) == 1;
                self.enter_queues(request.disk);
                // Only a new head changes the time of the next admission: requests behind it wait
                // for it.
                if is_first {
                    self.release(tree_index);
                    let disk = &mut self.state.disks[request.disk];
                    // It may have been admitted by `release`, after others that were ready at this
                    // instant.
                    let tree = &self.state.trees[tree_index].tree;
                    if tree.waiting(node, direction) > 0 {
                        disk.throttle_times.begin(direction, self.state.now, |path| {
                            limit_of_direction(tree, node, direction, path, now)
                        });
                    }
                }
            }
        }
    }

    fn release(&mut self, tree_index: usize) {
        let now = Instant::from_nanos(self.state.now);
        loop {
            match self.state.trees[tree_index].tree.poll(now) {
                PollDecision::Admit(token) => {
                    let (request, client) = self.waiting.leave(token);
                    let bucket = self.leave_queues(&request);
                    // The successor enters the tree before the next poll, so that order is
                    // preserved.
                    self.serve(&request, client, bucket);
                    self.refill_from_backlog(&request);
                }
                PollDecision::Idle => return,
                PollDecision::Wait { until } => {
                    let until = until.as_nanos();
                    let timer = &mut self.state.trees[tree_index].timer;
                    // The previous timer still fires, finds another time and does nothing.
                    // A later time needs no event: the timer in force fires first and schedules
                    // the next one.
                    if until < *timer {
                        *timer = until;
                        self.state.flow.schedule(until, SimulationEvent::Timer(tree_index));
                    }
                    return;
                }
            }
        }
    }

    /// Moves the next request of the admitted one's disk and direction from the backlog to the
    /// tree.
    fn refill_from_backlog(&mut self, admitted: &SimulatedRequest) {
        let Some(direction) = admitted.op.direction() else { return };
        let disk = &mut self.state.disks[admitted.disk];
        let Some((next, client)) = disk.backlogs[direction.index()].pop(admitted.disk) else { return };
        self.backlogged -= 1;
        let token = self.waiting.enter(next, client);
        let tree = &mut self.state.trees[disk.tree].tree;
        let now = Instant::from_nanos(self.state.now);
        let admission = tree.submit(disk.node, direction, RequestCost::one(next.length), token, now);
        // `max_tree_requests` is above 1, so another request of this direction is still in the
        // tree.
        assert!(matches!(admission, AdmissionResult::Queued(_)), "earlier requests wait");
    }

    fn sample_devices(&mut self) {
        // A lifted limit admits requests at once; no timer of the tree would report that.
        for tree_index in self.sampler.sample(&mut self.state) {
            self.release(tree_index);
        }
        self.sampler.schedule_next(&mut self.state.flow, self.state.now);
    }

    fn enter_queues(&mut self, disk: usize) {
        let now = self.state.now;
        let disk = &mut self.state.disks[disk];
        let waiting = disk.queue.join(now);
        if let Some(chart) = &mut disk.statistics.chart {
            chart.waiting.set_level(now, waiting);
        }
        let mut group = disk.group;
        while let Some(index) = group {
            self.state.groups[index].queue.join(now);
            group = self.state.groups[index].parent;
        }
    }

    fn leave_queues(&mut self, request: &SimulatedRequest) -> LimitingBucket {
        let now = self.state.now;
        let disk = &mut self.state.disks[request.disk];
        let waiting = disk.queue.leave(now);
        if let Some(chart) = &mut disk.statistics.chart {
            chart.waiting.set_level(now, waiting);
        }
        let mut group = disk.group;
        while let Some(index) = group {
            self.state.groups[index].queue.leave(now);
            group = self.state.groups[index].parent;
        }
        let Some(direction) = request.op.direction() else { return LimitingBucket::NONE };
        let (tree, node) = (&self.state.trees[disk.tree].tree, disk.node);
        let has_waiting = tree.waiting(node, direction) > 0;
        // The limit of the next head is determined now, after the admission has changed the
        // buckets.
        let at = Instant::from_nanos(now);
        disk.throttle_times
            .end(direction, now, has_waiting, |path| limit_of_direction(tree, node, direction, path, at))
    }

    fn serve(&mut self, request: &SimulatedRequest, client: u32, bucket: LimitingBucket) {
        let (now, index) = (self.state.now, request.disk);
        let disk = &mut self.state.disks[index];
        let recorded_ns = match self.clients.get(client as usize) {
            Some(RequestSource::Chain { service_ns, .. }) => Some(*service_ns),
            _ => None,
        };
        let completed = match &mut disk.prefetch {
            // A replayed request takes its recorded service time, on its device if it has one; the
            // cache is not modelled.
            _ if recorded_ns.is_some() => {
                self.state.flow.devices.begin_recorded(disk.place, recorded_ns.unwrap_or(0), now)
            }
            None => self.state.flow.devices.begin(disk.place, request.op, request.length, now),
            Some(prefetch) if request.op == RequestOp::Read => {
                let (tree, node, has_limits) =
                    (&mut self.state.trees[disk.tree].tree, disk.node, disk.has_limits);
                let at = Instant::from_nanos(now);
                let try_admit = |cost: &RequestCost, given_back| {
                    !has_limits || tree.try_admit_read_ahead(node, cost, given_back, at)
                };
                // A prefetch must not delay requests: it uses only spare tokens.
                prefetch.read(request, now, &mut self.state.flow, try_admit)
            }
            Some(prefetch) => prefetch.change(request, now, &mut self.state.flow),
        };
        disk.statistics.record(request.at_ns, now, completed, request.length);
        if let Some(direction) = request.op.direction() {
            let times = (now, completed);
            self.latency.record(index, direction, request.length, times, &mut self.state.flow);
        }
        let row = || ResultRow { request: *request, admitted_ns: now, completed_ns: completed, bucket };
        match &mut self.rows {
            ResultRows::None => {}
            ResultRows::Stored(rows) => rows.push(row()),
            ResultRows::Forwarded(rows, results) => {
                rows.push(row());
                if rows.len() == ROW_BATCH {
                    results(rows);
                    rows.clear();
                }
            }
        }
        // A request that took no time at all is marked: its client sends the next one later.
        if client != NO_CLIENT {
            self.state
                .flow
                .schedule(completed, SimulationEvent::Completed(client, completed == request.at_ns));
        }
    }
}

/// Determines the limit that a direction waits for. A tree reports a node's present or last limit;
/// it is present while the node's throttled time grows.
fn limit_of_direction(
    tree: &ThrottleTree<u32>,
    disk: NodeId,
    direction: Direction,
    path: &[(u8, LimitKind)],
    now: Instant,
) -> LimitingBucket {
    let later = Instant::from_nanos(now.as_nanos().saturating_add(1));
    let nodes = std::iter::successors(Some(disk), |&node| tree.parent(node));
    for (level, node) in nodes.enumerate() {
        let (stats, later_stats) = (tree.stats(node, now), tree.stats(node, later));
        let is_limited = later_stats.throttled_ns > stats.throttled_ns;
        match stats.throttle_cause {
            Some(CauseKind::Limit(kind))
                if is_limited && LimitKind::applying_to(direction).contains(&kind) =>
            {
                return LimitingBucket::new(level as u8, kind);
            }
            // A cap for a latency target is none of the configured limits.
            Some(CauseKind::LatencyTarget) if is_limited => return LimitingBucket::NONE,
            _ => {}
        }
    }
    // The request waits for its siblings, or for a limit shared with the other direction: report
    // the first possible limit.
    path.first().map_or(LimitingBucket::NONE, |&(level, kind)| LimitingBucket::new(level, kind))
}

#[derive(Debug, Default)]
struct TreeRequests {
    requests: Vec<(SimulatedRequest, u32)>,
    free: Vec<u32>,
}

impl TreeRequests {
    fn enter(&mut self, request: SimulatedRequest, client: u32) -> u32 {
        if let Some(token) = self.free.pop() {
            self.requests[token as usize] = (request, client);
            return token;
        }
        self.requests.push((request, client));
        // Memory for 2³² requests does not exist.
        (self.requests.len() - 1) as u32
    }

    fn len(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    fn leave(&mut self, token: u32) -> (SimulatedRequest, u32) {
        self.free.push(token);
        self.requests[token as usize]
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
