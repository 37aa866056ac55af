//! Attribution of waiting time to limits.
//!
//! The policy returns which request waits until when, but not for which limit. That is determined
//! for each new head of a queue, if more than one limit is possible.

use policy::{
    request::Direction,
    throttle::{LimitKind, Limits, MAX_LEVELS},
};

use super::world::{DiskSpec, WorldSpec};

/// A limit and its level in the tree; [`LimitingBucket::NONE`] for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LimitingBucket(u8);

const KINDS: usize = LimitKind::ALL.len();

impl LimitingBucket {
    pub(crate) const NONE: Self = Self(u8::MAX);

    /// Level 0 is the disk, 1 its group, and so on upwards.
    pub(super) const fn new(level: u8, kind: LimitKind) -> Self {
        Self(level * KINDS as u8 + kind.index() as u8)
    }

    pub(crate) fn limit(self) -> Option<(usize, LimitKind)> {
        let number = usize::from(self.0);
        (self != Self::NONE).then(|| (number / KINDS, LimitKind::ALL[number % KINDS]))
    }

    /// Name such as `iops-total`, `bps-read@gold`, or `-`. `groups` are those of the disk,
    /// innermost first.
    pub fn name(self, groups: &[&str]) -> String {
        match self.limit() {
            None => "-".to_owned(),
            Some((0, kind)) => name(kind).to_owned(),
            Some((level, kind)) => format!("{}@{}", name(kind), groups.get(level - 1).unwrap_or(&"?")),
        }
    }
}

fn name(kind: LimitKind) -> &'static str {
    policy::throttle::LimitSetting::Limit(kind, policy::throttle::LimitPart::Rate).name()
}

/// Time for which each limit throttled a disk.
#[derive(Clone, Debug)]
pub struct ThrottleTimes {
    /// All possible limits, by direction.
    possible: [Vec<(u8, LimitKind)>; 2],
    /// Present limit and its start, by direction, while a request waits.
    current: [Option<(LimitingBucket, u64)>; 2],
    /// Nanoseconds by bucket, both directions together.
    ns: [u64; (MAX_LEVELS + 1) * KINDS],
}

impl ThrottleTimes {
    pub(super) fn new(world: &WorldSpec, disk: &DiskSpec) -> Self {
        let above = world.groups_above(disk).map(|group| &world.groups[group].settings.limits);
        let levels: Vec<&Limits> = std::iter::once(&disk.settings.limits).chain(above).collect();
        let reach = Direction::ALL.map(|direction| {
            let limits_of_level = |(level, limits): (usize, &&Limits)| {
                let set = LimitKind::applying_to(direction)
                    .map(|kind| (limits.limit(kind).rate > 0).then_some(kind));
                set.into_iter().flatten().map(move |kind| (level as u8, kind)).collect::<Vec<_>>()
            };
            levels.iter().enumerate().flat_map(limits_of_level).collect()
        });
        Self { possible: reach, current: [None; 2], ns: [0; (MAX_LEVELS + 1) * KINDS] }
    }

    pub(super) fn begin(
        &mut self,
        direction: Direction,
        now: u64,
        choose: impl Fn(&[(u8, LimitKind)]) -> LimitingBucket,
    ) {
        self.current[direction.index()] = Some((self.find(direction, choose), now));
    }

    /// Called when the head of the queue was admitted; returns the limit that it waited for.
    /// `more` is true if requests wait behind it.
    pub(super) fn end(
        &mut self,
        direction: Direction,
        now: u64,
        more: bool,
        choose: impl Fn(&[(u8, LimitKind)]) -> LimitingBucket,
    ) -> LimitingBucket {
        let period = self.current[direction.index()].take();
        if let Some((bucket, since)) = period {
            self.add(bucket, now - since);
        }
        if more {
            self.begin(direction, now, choose);
        }
        // No period began for a request that was admitted in the instant of its arrival.
        period.map_or(LimitingBucket::NONE, |(bucket, _)| bucket)
    }

    pub(super) fn settle(&mut self, now: u64) {
        for direction in Direction::ALL {
            if let Some((bucket, since)) = self.current[direction.index()] {
                self.add(bucket, now - since);
                // The period continues, so a second call adds only the time since this one.
                self.current[direction.index()] = Some((bucket, now));
            }
        }
    }

    /// Limits with the nanoseconds for which they throttled the disk, longest first.
    pub fn times(&self) -> Vec<(LimitingBucket, u64)> {
        let mut times: Vec<_> = (0_u8..).map(LimitingBucket).zip(self.ns).filter(|(_, ns)| *ns > 0).collect();
        times.sort_by_key(|&(bucket, ns)| (std::cmp::Reverse(ns), bucket));
        times
    }

    fn find(
        &self,
        direction: Direction,
        choose: impl Fn(&[(u8, LimitKind)]) -> LimitingBucket,
    ) -> LimitingBucket {
        match *self.possible[direction.index()] {
            // Most disks have one limit for each direction: nothing to determine.
            [(level, kind)] => LimitingBucket::new(level, kind),
            ref several => choose(several),
        }
    }

    fn add(&mut self, bucket: LimitingBucket, ns: u64) {
        // `LimitingBucket::NONE` is beyond the array: time without a known limit is dropped.
        if let Some(sum) = self.ns.get_mut(usize::from(bucket.0)) {
            *sum = sum.saturating_add(ns);
        }
    }
}
