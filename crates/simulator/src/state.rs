//! State of a simulation at one time.

use policy::throttle::{NodeId, Tree};

use super::{
    backlog::Backlog,
    bucket::Held,
    device::Place,
    flow::Flow,
    prefetch::Ahead,
    tally::{Queue, Tally},
};

pub(super) const NEVER: u64 = u64::MAX;

#[derive(Debug, Default)]
pub(super) struct State {
    /// Nanoseconds since the start.
    pub(super) now: u64,
    pub(super) arbiters: Vec<Arbiter>,
    pub(super) groups: Vec<GroupState>,
    pub(super) disks: Vec<DiskState>,
    pub(super) flow: Flow,
}

impl State {
    pub(super) fn worked_ns(&self, place: Place) -> u64 {
        self.flow.devices.worked_ns(place, self.now)
    }
}

#[derive(Debug)]
pub(super) struct Arbiter {
    pub(super) tree: Tree<u32>,
    pub(super) timer: u64,
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
    pub(super) group: Option<usize>,
    pub(super) limited: bool,
    pub(super) place: Place,
    pub(super) ahead: Option<Box<Ahead>>,
    /// Waiting requests that are not in the tree yet, by direction.
    pub(super) behind: [Backlog; 2],
    pub(super) queue: Queue,
    pub(super) held: Held,
    pub(super) tally: Tally,
}
