//! The simulation itself: requests come, wait for limits, are served, and the time is a number.
//!
//! ```text
//!   arrive ─────► limits: policy::throttle::Tree ──► prefetch.rs: policy::prefetch::Cache ──► device.rs ──► tally.rs, Row
//!                   ▲                                                                         │
//!   events, by time ┴─ a tree's timer · a chunk arrives · a write ends · a client goes on ◄───┘
//! ```
//!
//! Drives the policy's code as the daemon does (block's `layer/throttle` and `layer/prefetch`), with the same protocol: ask, poll until it says to
//! wait, one timer a tree; one tree for each group that is in no other and for each disk without a group. What differs is that all takes no time but what
//! the device and the limits take, and a timer is never late.
//!
//! Requests that come by themselves ([`Engine::arrive`]) must come in the order of their time. A disk begins to be with its first request, so that
//! what happens to it does not depend on when somebody learned of it. Clients that wait for their answers
//! ([`Engine::add_client`]) are part of the events.
//!
//! A request that comes at the instant of an event comes after it. Events of one instant happen in the order in which they were foreseen.
//! So a simulation is the same each time; and what shares neither group nor device is the same in whichever company.
//!
//! Who waits takes some 120 bytes, twice that while a table grows, and there is a bound: [`MOST_WAITING`]. Allocates nothing for a request once its tables have grown to what is in flight; except where something is read ahead.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::atomic::{AtomicBool, Ordering},
};

use policy::{
    prefetch::{FetchId, Invalid, WriteId},
    request::Direction,
    throttle::{Admission, Cost, Decision, LimitKind, NodeId, Refused, Tree},
    time::Instant,
};

use super::{
    bucket::{Bucket, Held},
    client::Client,
    device::{Devices, Place},
    prefetch::Ahead,
    request::{Op, Request},
    tally::{Queue, Tally},
    watermark::Watch,
    world::{Disk, Group, World},
};

/// How many disks are drawn: as many lines as can be told apart.
pub(crate) const DRAWN: usize = 8;
/// Requests that may wait at a time: 6 GB of them, or 12 while a table grows.
pub(crate) const MOST_WAITING: usize = 50_000_000;
/// Events between two looks at whether to stop.
pub(super) const STEPS: usize = 1 << 14;
/// No timer is set.
const NEVER: u64 = u64::MAX;
/// A request that no client waits for.
const NOBODY: u32 = u32::MAX;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) request: Request,
    /// When it passed all limits, and when it was done, in nanoseconds.
    pub(crate) admitted_ns: u64,
    pub(crate) completed_ns: u64,
    /// The limit that it waited for.
    pub(crate) bucket: Bucket,
}

/// Why a world cannot be: settings that contradict each other.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Impossible {
    #[error("{0}: {1}")]
    Hold(String, Refused),
    #[error("{0}: {1}")]
    Prefetch(String, Invalid),
}

/// A simulation at one instant.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(super) now: u64,
    pub(super) arbiters: Vec<Arbiter>,
    pub(super) groups: Vec<GroupState>,
    pub(super) disks: Vec<DiskState>,
    flow: Flow,
    waiting: Waiting,
    clients: Vec<Client>,
    watch: Watch,
    /// By disk, what is kept of every request; none is without this.
    rows: Option<Vec<Row>>,
    /// Nothing is limited, and nothing read ahead.
    unlimited: bool,
}

/// A tree, and when its timer fires.
#[derive(Debug)]
pub(super) struct Arbiter {
    pub(super) tree: Tree<u32>,
    timer: u64,
}

#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) arbiter: usize,
    pub(super) node: NodeId,
    pub(super) parent: Option<usize>,
    pub(super) queue: Queue,
}

#[derive(Debug)]
pub(super) struct DiskState {
    pub(super) arbiter: usize,
    pub(super) node: NodeId,
    group: Option<usize>,
    /// Whether any limit applies; else nothing asks.
    limited: bool,
    place: Place,
    ahead: Option<Box<Ahead>>,
    pub(super) queue: Queue,
    pub(super) held: Held,
    pub(super) tally: Tally,
}

/// What lies ahead, and what requests are served by.
#[derive(Debug)]
pub(super) struct Flow {
    events: BinaryHeap<Reverse<Event>>,
    foreseen: u64,
    /// Events that keep the simulation going: all but the watching of devices.
    lively: usize,
    pub(super) devices: Devices,
}

#[derive(Debug)]
struct Event {
    at: u64,
    number: u64,
    what: What,
}

/// What happens.
#[derive(Debug)]
pub(super) enum What {
    /// The timer of a tree.
    Timer(usize),
    /// A client has its answer, at once or not, and may go on.
    Answer(u32, bool),
    /// A client sends its next request.
    Send(u32),
    /// A chunk of what was read ahead of a disk is there.
    Chunk(usize, FetchId),
    /// A change of a disk has ended.
    Written(usize, WriteId),
    /// Devices are looked at.
    Watch,
}

impl Engine {
    /// At the beginning. With `rows`, what becomes of every request is kept for [`Engine::take_rows`].
    ///
    /// # Errors
    /// If a group cannot keep what it promises.
    pub(crate) fn new(world: &World, rows: bool) -> Result<Self, Impossible> {
        Self::of(world, rows, false)
    }

    /// At the beginning, with the same disks on the same devices, but no limits and nothing read ahead: as things were without weir.
    ///
    /// # Errors
    /// None; it has those of [`Engine::new`].
    pub(crate) fn unlimited(world: &World) -> Result<Self, Impossible> {
        Self::of(world, false, true)
    }

    fn of(world: &World, rows: bool, unlimited: bool) -> Result<Self, Impossible> {
        let flow = Flow { events: BinaryHeap::new(), foreseen: 0, lively: 0, devices: Devices::default() };
        let mut engine = Self {
            now: 0,
            arbiters: Vec::new(),
            groups: Vec::new(),
            disks: Vec::new(),
            flow,
            waiting: Waiting::default(),
            clients: Vec::new(),
            watch: Watch::default(),
            rows: rows.then(Vec::new),
            unlimited,
        };
        engine.follow(world, world.disks.len())?;
        engine.watch.begin(&mut engine.flow);
        Ok(engine)
    }

    /// How many of the world's disks it has.
    pub(crate) fn disks(&self) -> usize {
        self.disks.len()
    }

    /// Adds what the world has grown by, up to so many disks, with nothing asked of it yet.
    ///
    /// # Errors
    /// If a group cannot keep what it promises.
    pub(crate) fn follow(&mut self, world: &World, disks: usize) -> Result<(), Impossible> {
        self.flow.devices.follow(&world.stations, &world.budgets);
        if !self.unlimited {
            for group in &world.groups[self.groups.len()..] {
                self.add_group(group)?;
            }
        }
        for disk in &world.disks[self.disks.len()..disks] {
            if self.unlimited {
                self.add_disk(&World::default(), &disk.unlimited())?;
            } else {
                self.add_disk(world, disk)?;
            }
        }
        Ok(())
    }

    fn add_group(&mut self, group: &Group) -> Result<(), Impossible> {
        let arbiter = match group.parent {
            Some(parent) => self.groups[parent].arbiter,
            None => self.add_arbiter(),
        };
        let parent = group.parent.map(|parent| self.groups[parent].node);
        let node = self.arbiters[arbiter].tree.add(parent, group.hold.limits, group.hold.share);
        let node = node.map_err(|refused| Impossible::Hold(format!("group {}", group.name), refused))?;
        self.watch.add_group(self.groups.len(), &group.hold, self.now);
        self.groups.push(GroupState { arbiter, node, parent: group.parent, queue: Queue::default() });
        Ok(())
    }

    fn add_disk(&mut self, world: &World, disk: &Disk) -> Result<(), Impossible> {
        let name = || format!("disk {}", disk.name);
        let arbiter = match disk.group {
            Some(group) => self.groups[group].arbiter,
            None => self.add_arbiter(),
        };
        let parent = disk.group.map(|group| self.groups[group].node);
        let tree = &mut self.arbiters[arbiter].tree;
        let node = tree.add(parent, disk.hold.limits, disk.hold.share);
        let node = node.map_err(|refused| Impossible::Hold(name(), refused))?;
        let limited = !tree.is_unlimited(node);
        let index = self.disks.len();
        let ahead = Ahead::new(disk).map_err(|invalid| Impossible::Prefetch(name(), invalid))?;
        self.disks.push(DiskState {
            arbiter,
            node,
            group: disk.group,
            limited,
            place: disk.place,
            ahead: ahead.map(Box::new),
            queue: Queue::default(),
            held: Held::new(world, disk),
            tally: if index < DRAWN { Tally::drawn() } else { Tally::default() },
        });
        let mut watch = std::mem::take(&mut self.watch);
        watch.add_disk(index, disk, self);
        self.watch = watch;
        Ok(())
    }

    fn add_arbiter(&mut self) -> usize {
        let tree = Tree::new(Instant::from_nanos(self.now));
        self.arbiters.push(Arbiter { tree, timer: NEVER });
        self.arbiters.len() - 1
    }

    /// How long what a disk lies on has worked by now: see [`Devices::worked_ns`].
    pub(super) fn worked_ns(&self, place: Place) -> u64 {
        self.flow.devices.worked_ns(place, self.now)
    }

    /// Someone who sends the next request only when he has his answer. He begins at once, or at his time if he has one.
    pub(crate) fn add_client(&mut self, client: Client) {
        let number = self.clients.len() as u32;
        for _ in 0..client.depth() {
            self.flow.foresee(client.begins().max(self.now), What::Send(number));
        }
        self.clients.push(client);
    }

    /// A request comes, not before any that came before it. All that happens until then has happened. Not where `stop` has been set meanwhile.
    #[inline]
    pub(crate) fn arrive(&mut self, request: Request, stop: &AtomicBool) {
        if self.run_until(request.at_ns, stop) {
            self.wake();
            self.ask(request, NOBODY);
        }
    }

    /// Lets time pass; false if `stop` has been set meanwhile.
    #[inline]
    pub(crate) fn run_until(&mut self, at: u64, stop: &AtomicBool) -> bool {
        let mut steps = 0;
        while self.flow.events.peek().is_some_and(|Reverse(event)| event.at <= at) {
            self.step();
            steps += 1;
            if steps % STEPS == 0 && stop.load(Ordering::Relaxed) {
                return false;
            }
        }
        self.now = self.now.max(at);
        true
    }

    /// Somebody has something to do, now: devices are looked at again.
    fn wake(&mut self) {
        if self.watch.wakes() {
            self.look_at_devices();
        }
    }

    /// Whether nothing is left of what has come.
    pub(super) fn is_idle(&self) -> bool {
        self.flow.lively == 0
    }

    /// How many events there have been.
    #[cfg(test)]
    pub(crate) fn foreseen(&self) -> u64 {
        self.flow.foreseen
    }

    /// How many wait for limits.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Lets at most so many events happen; whether anything is left of what has come and what clients have to send.
    pub(crate) fn run(&mut self, steps: usize) -> bool {
        for _ in 0..steps {
            if self.flow.lively == 0 {
                return false;
            }
            self.step();
        }
        true
    }

    /// Takes note of those who still wait, at the end.
    pub(crate) fn settle(&mut self) {
        let now = self.now;
        for disk in &mut self.disks {
            disk.queue.settle(now);
            disk.held.settle(now);
        }
        self.groups.iter_mut().for_each(|group| group.queue.settle(now));
    }

    /// What became of the requests since this was asked last, in the order in which they passed the limits.
    pub(crate) fn take_rows(&mut self) -> std::vec::Drain<'_, Row> {
        self.rows.get_or_insert_default().drain(..)
    }

    /// What was noted of a disk, who waits there and what for.
    pub(crate) fn disk(&self, index: usize) -> (&Tally, &Queue, &Held) {
        let disk = &self.disks[index];
        (&disk.tally, &disk.queue, &disk.held)
    }

    /// Takes what was noted of a disk's requests.
    pub(crate) fn take_tally(&mut self, index: usize) -> Tally {
        std::mem::take(&mut self.disks[index].tally)
    }

    /// Who waits in a group.
    pub(crate) fn group(&self, index: usize) -> &Queue {
        &self.groups[index].queue
    }

    /// What reading ahead of a disk came to; `None` where nothing is.
    pub(crate) fn prefetch(&self, index: usize) -> Option<policy::prefetch::Stats> {
        self.disks[index].ahead.as_ref().map(|ahead| ahead.stats())
    }

    fn step(&mut self) {
        let Some(Reverse(event)) = self.flow.events.pop() else { return };
        self.now = event.at;
        match event.what {
            What::Watch => {}
            _ => self.flow.lively -= 1,
        }
        match event.what {
            What::Timer(arbiter) => {
                if self.arbiters[arbiter].timer == event.at {
                    self.arbiters[arbiter].timer = NEVER;
                    self.release(arbiter);
                }
            }
            What::Answer(client, at_once) => {
                if let Some(at) = self.clients[client as usize].answered(self.now, at_once) {
                    self.flow.foresee(at, What::Send(client));
                }
            }
            What::Send(client) => {
                if let Some(request) = self.clients[client as usize].next(self.now) {
                    self.ask(request, client);
                }
            }
            What::Chunk(disk, fetch) => {
                if let Some(ahead) = &mut self.disks[disk].ahead {
                    ahead.arrived(fetch, self.now);
                }
            }
            What::Written(disk, write) => {
                if let Some(ahead) = &mut self.disks[disk].ahead {
                    ahead.written(write);
                }
            }
            What::Watch => self.look_at_devices(),
        }
    }

    /// A request comes, now.
    fn ask(&mut self, request: Request, client: u32) {
        let disk = &mut self.disks[request.disk];
        let direction = match request.op.direction() {
            Some(direction) if disk.limited => direction,
            // A flush moves no data and is not asked about.
            _ => return self.serve(&request, client, Bucket::NONE),
        };
        let (arbiter, node) = (disk.arbiter, disk.node);
        let token = self.waiting.enter(request, client);
        let tree = &mut self.arbiters[arbiter].tree;
        let now = Instant::from_nanos(self.now);
        match tree.request(node, direction, Cost::one(request.length), token, now) {
            Admission::Admitted(token) => {
                self.waiting.leave(token);
                self.serve(&request, client, Bucket::NONE);
            }
            Admission::Queued(_) => {
                let is_first = tree.waiting(node, direction) == 1;
                self.count_in(request.disk);
                // Behind another it changes nothing for anybody.
                if is_first {
                    self.release(arbiter);
                    let disk = &mut self.disks[request.disk];
                    // Unless it has just passed, after others that were ready at this instant.
                    let tree = &self.arbiters[arbiter].tree;
                    if tree.waiting(node, direction) > 0 {
                        disk.held.begin(direction, self.now, |path| judge(tree, node, direction, path, now));
                    }
                }
            }
        }
    }

    /// Lets pass what may, and sets the timer for the rest.
    fn release(&mut self, arbiter: usize) {
        let now = Instant::from_nanos(self.now);
        loop {
            match self.arbiters[arbiter].tree.poll(now) {
                Decision::Admit(token) => {
                    let (request, client) = self.waiting.leave(token);
                    let bucket = self.count_out(&request);
                    self.serve(&request, client, bucket);
                }
                Decision::Idle => return,
                Decision::Wait { until } => {
                    let until = until.as_nanos();
                    let timer = &mut self.arbiters[arbiter].timer;
                    // A later one still fires, and finds nothing to do.
                    if until < *timer {
                        *timer = until;
                        self.flow.foresee(until, What::Timer(arbiter));
                    }
                    return;
                }
            }
        }
    }

    /// Looks at devices, and lets pass what the watermarks let.
    fn look_at_devices(&mut self) {
        let mut watch = std::mem::take(&mut self.watch);
        for arbiter in watch.look(self) {
            self.release(arbiter);
        }
        // Whatever is to come brings this along.
        watch.go_on(&mut self.flow, self.now);
        self.watch = watch;
    }

    fn count_in(&mut self, disk: usize) {
        let now = self.now;
        let disk = &mut self.disks[disk];
        let waiting = disk.queue.join(now);
        if let Some(drawn) = &mut disk.tally.drawn {
            drawn.waiting.note(now, waiting);
        }
        let mut group = disk.group;
        while let Some(index) = group {
            self.groups[index].queue.join(now);
            group = self.groups[index].parent;
        }
    }

    /// A request leaves its queue; says what it waited for.
    fn count_out(&mut self, request: &Request) -> Bucket {
        let now = self.now;
        let disk = &mut self.disks[request.disk];
        disk.queue.leave(now);
        let mut group = disk.group;
        while let Some(index) = group {
            self.groups[index].queue.leave(now);
            group = self.groups[index].parent;
        }
        let Some(direction) = request.op.direction() else { return Bucket::NONE };
        let (tree, node) = (&self.arbiters[disk.arbiter].tree, disk.node);
        let waits = tree.waiting(node, direction) > 0;
        let at = Instant::from_nanos(now);
        disk.held.end(direction, now, waits, |path| judge(tree, node, direction, path, at))
    }

    /// A request has passed the limits, now.
    fn serve(&mut self, request: &Request, client: u32, bucket: Bucket) {
        let (now, index) = (self.now, request.disk);
        let disk = &mut self.disks[index];
        let completed = match &mut disk.ahead {
            None => self.flow.devices.begin(disk.place, request.op, request.length, now),
            Some(ahead) if request.op == Op::Read => {
                let (tree, node, limited) = (&mut self.arbiters[disk.arbiter].tree, disk.node, disk.limited);
                let at = Instant::from_nanos(now);
                let may = |cost: &Cost, given_back| !limited || tree.spare(node, cost, given_back, at);
                ahead.read(request, now, &mut self.flow, may)
            }
            Some(ahead) => ahead.change(request, now, &mut self.flow),
        };
        disk.tally.note(request.at_ns, now, completed, request.length);
        if let Some(rows) = &mut self.rows {
            rows.push(Row { request: *request, admitted_ns: now, completed_ns: completed, bucket });
        }
        if client != NOBODY {
            self.flow.foresee(completed, What::Answer(client, completed == request.at_ns));
        }
    }
}

/// Which limit a disk's work of this direction waits for: on what level of its way up, and which there.
///
/// A tree tells of each node what it waits for, or waited for last; it is the former if the time that it is limited goes on.
fn judge(
    tree: &Tree<u32>,
    disk: NodeId,
    direction: Direction,
    path: &[(u8, LimitKind)],
    now: Instant,
) -> Bucket {
    let later = Instant::from_nanos(now.as_nanos().saturating_add(1));
    let nodes = std::iter::successors(Some(disk), |&node| tree.parent(node));
    for (level, node) in nodes.enumerate() {
        let (stats, then) = (tree.stats(node, now), tree.stats(node, later));
        let is_limited = then.limited_ns > stats.limited_ns;
        match stats.binding {
            Some(kind) if is_limited && LimitKind::applying_to(direction).contains(&kind) => {
                return Bucket::new(level as u8, kind);
            }
            _ => {}
        }
    }
    // It waits for its turn behind others, or for a limit that the other direction shares: the first that could be it.
    path.first().map_or(Bucket::NONE, |&(level, kind)| Bucket::new(level, kind))
}

impl Flow {
    pub(super) fn foresee(&mut self, at: u64, what: What) {
        self.lively += usize::from(!matches!(what, What::Watch));
        self.foreseen += 1;
        self.events.push(Reverse(Event { at, number: self.foreseen, what }));
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Event {}

/// Requests that wait, by their token.
#[derive(Debug, Default)]
struct Waiting {
    requests: Vec<(Request, u32)>,
    free: Vec<u32>,
}

impl Waiting {
    fn enter(&mut self, request: Request, client: u32) -> u32 {
        if let Some(token) = self.free.pop() {
            self.requests[token as usize] = (request, client);
            return token;
        }
        self.requests.push((request, client));
        // As many do not fit into memory.
        (self.requests.len() - 1) as u32
    }

    fn len(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    fn leave(&mut self, token: u32) -> (Request, u32) {
        self.free.push(token);
        self.requests[token as usize]
    }
}

#[cfg(test)]
mod tests;
