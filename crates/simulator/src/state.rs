//! State of a simulation at one time.

use policy::throttle::{NodeId, ThrottleTree};

use super::{
    backlog::Backlog,
    bucket::ThrottleTimes,
    device::DevicePlacement,
    flow::EventQueue,
    prefetch::PrefetchModel,
    tally::{QueueStatistics, RequestStatistics},
};

pub(super) const NEVER: u64 = u64::MAX;

#[derive(Debug, Default)]
pub(super) struct SimulationState {
    /// Nanoseconds since the start.
    pub(super) now: u64,
    pub(super) trees: Vec<TreeWithTimer>,
    pub(super) groups: Vec<GroupState>,
    pub(super) disks: Vec<DiskState>,
    pub(super) flow: EventQueue,
}

impl SimulationState {
    pub(super) fn worked_ns(&self, place: DevicePlacement) -> u64 {
        self.flow.devices.worked_ns(place, self.now)
    }
}

#[derive(Debug)]
pub(super) struct TreeWithTimer {
    pub(super) tree: ThrottleTree<u32>,
    /// Time of the tree's next timer event in nanoseconds, or [`NEVER`].
    pub(super) timer: u64,
}

#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) tree: usize,
    pub(super) node: NodeId,
    pub(super) parent: Option<usize>,
    pub(super) queue: QueueStatistics,
}

#[derive(Debug)]
pub(super) struct DiskState {
    pub(super) tree: usize,
    pub(super) node: NodeId,
    pub(super) group: Option<usize>,
    /// True if a limit of the disk or of a group above it applies.
    pub(super) has_limits: bool,
    pub(super) place: DevicePlacement,
    pub(super) prefetch: Option<Box<PrefetchModel>>,
    /// Waiting requests that are not in the tree yet, by direction.
    pub(super) backlogs: [Backlog; 2],
    pub(super) queue: QueueStatistics,
    pub(super) throttle_times: ThrottleTimes,
    pub(super) statistics: RequestStatistics,
}
