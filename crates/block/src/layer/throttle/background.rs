//! Admission of background work on a disk, such as a backup, from the capacity that clients leave.
//!
//! ```text
//!   without a weight   spare capacity of the disk and of all groups above it, as read-ahead uses
//!                      it: no client's request waits for it
//!   with a weight      a member of the disk's group like a disk, with this share; while a
//!                      controller caps the disk: as without a weight
//!   in both cases      limits of its own
//! ```
//!
//! Spare capacity has no queue: admission is requested again after [`RETRY_INTERVAL`], which loses
//! none, because unused capacity accumulates for a tenth of a second. One request at a time does
//! so.
//!
//! Follows the disk into another group, also while it waits. Never makes a request of the disk wait
//! for its own work, except by its share.

use std::{
    iter,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
};

use policy::{
    request::Direction,
    throttle::{CauseKind, LevelCause, LimitKind, Limits, NodeShare, RateLimit, RequestCost, ThrottleError},
    time::{Duration, Instant},
};

use super::{group::ThrottleGroup, member::ThrottleMember, settings::DiskSettings};
use storage::RangeLocks;

/// Interval at which spare capacity is requested, and at which a waiting request follows the disk:
/// a tenth of the time for which spare capacity accumulates.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Time for which a throttle cause is reported after the wait.
const CAUSE_EXPIRY: Duration = Duration::from_secs(1);

/// Limits and share of background work.
///
/// Without a weight, it is held back by the limits of the disk and of all groups above, and by the
/// caps that the controller of a latency target sets there.
///
/// With a weight, it competes with the disk: the limits and caps of the groups apply, the disk's
/// own limits do not, since they bound its clients and would leave nothing while a client uses them
/// up. While a controller caps the disk itself, the weight has no effect. A latency target never
/// caps the disk that has it, so a backup of that disk needs limits of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackgroundSettings {
    /// Limit in bytes per second; 0 is unlimited.
    pub bps_total: u64,
    /// Limit in requests per second; 0 is unlimited.
    pub iops_total: u64,
    /// Weight beside the members of the disk's group, in [`NodeShare::WEIGHTS`]; `None` is spare
    /// capacity only. Without a group it has no effect.
    pub weight: Option<u32>,
}

/// Throttle cause of background work: the limit that it waits for, or that has no spare capacity.
#[derive(Clone, Debug)]
pub struct BackgroundCause {
    /// Owner of the limit.
    pub owner: CauseOwner,
    /// Kind of the limit, or the cap for a latency target.
    pub kind: CauseKind,
}

/// Owner of the limit that background work waits for.
#[derive(Clone, Debug)]
pub enum CauseOwner {
    /// The work itself.
    Work,
    /// The disk.
    Disk,
    /// The group of the disk.
    Group(Arc<ThrottleGroup>),
    /// A group above that.
    Above(Arc<ThrottleGroup>),
}

/// A wait for capacity.
#[derive(Clone, Copy, Debug)]
struct CapacityWait {
    /// Level 0 is the disk; of a wait for a share, the work itself.
    cause: LevelCause,
    is_for_share: bool,
    /// When it was last refused or was admitted.
    seen: Instant,
}

/// Background work of one disk in its throttle tree.
#[derive(Debug)]
pub struct BackgroundMember {
    member: ThrottleMember,
    settings: Mutex<BackgroundSettings>,
    /// Held by the request that asks for admission.
    turn: RangeLocks,
    debt: Mutex<WorkDone>,
    last_wait: Mutex<Option<CapacityWait>>,
}

/// Reads that were done without admission.
#[derive(Clone, Copy, Debug, Default)]
struct WorkDone {
    requests: u64,
    bytes: u64,
}

impl BackgroundSettings {
    fn limits(self) -> Limits {
        let mut limits = Limits::default();
        let rate = |rate| RateLimit { rate, ..RateLimit::NONE };
        *limits.limit_mut(LimitKind::BpsTotal) = rate(self.bps_total);
        *limits.limit_mut(LimitKind::IopsTotal) = rate(self.iops_total);
        limits
    }

    fn disk_settings(self) -> Result<DiskSettings, ThrottleError> {
        let limits = self.limits();
        limits.validate()?;
        let share = match self.weight {
            Some(weight) => NodeShare::new(weight).ok_or(ThrottleError::Weight(weight))?,
            None => NodeShare::default(),
        };
        Ok(DiskSettings { limits, share, ..DiskSettings::default() })
    }
}

impl BackgroundMember {
    /// Creates background work. It joins the group of its disk when it needs to.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or an invalid weight.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn new(settings: BackgroundSettings) -> Result<Self, ThrottleError> {
        // Its limits never follow a size.
        let member = ThrottleMember::new(settings.disk_settings()?, 0, None)?;
        Ok(Self {
            member,
            settings: Mutex::new(settings),
            turn: RangeLocks::default(),
            debt: Mutex::default(),
            last_wait: Mutex::default(),
        })
    }

    /// Settings in force.
    pub fn settings(&self) -> BackgroundSettings {
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the settings, also for work that waits.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or an invalid weight; nothing is changed.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set(&self, settings: BackgroundSettings) -> Result<(), ThrottleError> {
        self.member.set(settings.disk_settings()?)?;
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = settings;
        Ok(())
    }

    /// Its throttle cause on `disk` at present or in the last second.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn throttle_cause(&self, disk: &ThrottleMember) -> Option<BackgroundCause> {
        let own = self.member.brief_stats();
        if let Some(kind) = own.throttle_cause {
            return Some(BackgroundCause { owner: CauseOwner::Work, kind });
        }
        let groups = || iter::successors(disk.group(), |group| group.parent().cloned());
        let group_at = |level: usize| {
            let group = groups().nth(level.checked_sub(1)?)?;
            Some(if level == 1 { CauseOwner::Group(group) } else { CauseOwner::Above(group) })
        };
        // With a share, it waits for a limit of a group.
        if own.waiting != [0; 2] && self.member.group().is_some() {
            let mut causes = groups().map(|group| group.brief_stats().throttle_cause).enumerate();
            return causes.find_map(|(index, kind)| {
                Some(BackgroundCause { owner: group_at(index + 1)?, kind: kind? })
            });
        }
        let wait = self.last_wait.lock().unwrap_or_else(PoisonError::into_inner).as_ref().copied()?;
        let CapacityWait { cause: LevelCause { level, kind }, is_for_share, seen } = wait;
        let is_recent = reactor::now() - seen <= CAUSE_EXPIRY;
        let owner = match (level, is_for_share) {
            (0, true) => CauseOwner::Work,
            (0, false) => CauseOwner::Disk,
            (level, _) => group_at(level)?,
        };
        is_recent.then_some(BackgroundCause { owner, kind })
    }

    fn record_wait(&self, cause: LevelCause, is_for_share: bool) {
        let wait = CapacityWait { cause, is_for_share, seen: reactor::now() };
        *self.last_wait.lock().unwrap_or_else(PoisonError::into_inner) = Some(wait);
    }

    /// Waits until a request of `bytes` on `disk` is admitted, and charges it. A dropped future may
    /// have charged it.
    pub(crate) async fn admit(&self, disk: &ThrottleMember, bytes: u64) {
        let _turn = self.turn.exclusive(0..1).await;
        let cost = self.cost_with_debt(bytes);
        let mut is_within_own_limits = false;
        loop {
            let has_share = self.follow(disk);
            // Again if it has got a share since, whose groups must be charged.
            if has_share || !is_within_own_limits {
                if self.admit_itself(disk, cost.clone()).await {
                    return;
                }
                is_within_own_limits = true;
            }
            match disk.try_background(&cost) {
                Ok(()) => return,
                Err(Some(cause)) => self.record_wait(cause, false),
                Err(None) => {}
            }
            reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
        }
    }

    /// Waits until the limits of the work, and of the groups if it has a share there, admit it.
    /// Follows the disk meanwhile. Returns true if it has a share.
    async fn admit_itself(&self, disk: &ThrottleMember, cost: RequestCost) -> bool {
        let mut admission = pin!(self.member.admit(Direction::Read, cost));
        loop {
            let admitted = reactor::timeout(RETRY_INTERVAL, admission.as_mut()).await;
            if let Ok(cause) = admitted {
                if let Some(cause) = cause {
                    self.record_wait(cause, true);
                }
                return self.member.group().is_some();
            }
            self.follow(disk);
        }
    }

    /// Charges a read of `bytes` that is done without admission, because a client waits for it. The
    /// next work is charged for it as well, so that only background work is delayed.
    pub(crate) fn charge_later(&self, bytes: u64) {
        let mut debt = self.debt.lock().unwrap_or_else(PoisonError::into_inner);
        *debt = WorkDone { requests: debt.requests + 1, bytes: debt.bytes + bytes };
    }

    /// Cost of one request and of all earlier reads without admission.
    fn cost_with_debt(&self, bytes: u64) -> RequestCost {
        let debt = std::mem::take(&mut *self.debt.lock().unwrap_or_else(PoisonError::into_inner));
        let requests = debt.requests + 1;
        RequestCost::equal(requests, (debt.bytes + bytes).div_ceil(requests))
    }

    /// Moves to the disk's group if it has a share there, with a request that waits; returns true
    /// if so. Otherwise it is alone, so that only its own limits delay it.
    fn follow(&self, disk: &ThrottleMember) -> bool {
        let has_share = self.settings().weight.is_some() && disk.cap().is_none();
        let group = disk.group().filter(|_| has_share);
        // Without a reservation it fits into every group that has room for a disk.
        if let Err(error) = self.member.move_to(group.as_ref()) {
            debug_assert!(false, "a member without a reservation was rejected: {error}");
        }
        self.member.group().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc, sync::Arc};

    use super::*;
    use crate::layer::throttle::{GroupSettings, ThrottleGroup};
    use policy::latency_target::RateCap;
    use reactor::sim;

    const MIB: u64 = 1 << 20;

    fn limits(bps_total: u64) -> Limits {
        BackgroundSettings { bps_total, ..BackgroundSettings::default() }.limits()
    }

    /// A group whose members wait for `wait_s`.
    fn busy_group(wait_s: u64) -> (Arc<ThrottleGroup>, ThrottleMember) {
        let settings = GroupSettings { limits: limits(MIB), ..GroupSettings::default() };
        let group = ThrottleGroup::new("group", settings, None).expect("valid");
        let other = ThrottleMember::new(DiskSettings::default(), 0, Some(&group)).expect("valid");
        other.charge_unconditionally(Direction::Read, &RequestCost::one(wait_s * MIB));
        (group, other)
    }

    /// Starts an admission on `disk` with a weight; the flag is true once it is admitted.
    fn start(disk: &Rc<ThrottleMember>) -> Rc<Cell<bool>> {
        let settings = BackgroundSettings { weight: Some(100), ..BackgroundSettings::default() };
        let work = BackgroundMember::new(settings).expect("valid");
        let is_admitted = Rc::new(Cell::new(false));
        let (disk, flag) = (Rc::clone(disk), Rc::clone(&is_admitted));
        reactor::spawn(async move {
            work.admit(&disk, 4096).await;
            flag.set(true);
        });
        is_admitted
    }

    async fn wait_s(seconds: u64) {
        reactor::sleep_until(reactor::now() + Duration::from_secs(seconds)).await;
    }

    #[test]
    fn a_group_that_the_disk_moves_to_is_charged() {
        sim::run(1, async {
            let settings = DiskSettings { limits: limits(1), ..DiskSettings::default() };
            let disk = Rc::new(ThrottleMember::new(settings, 0, None).expect("valid"));
            disk.charge_unconditionally(Direction::Read, &RequestCost::one(MIB));
            let is_admitted = start(&disk);
            wait_s(1).await;
            let (group, _other) = busy_group(20);
            disk.move_to(Some(&group)).expect("no reservation");
            wait_s(15).await;
            assert!(!is_admitted.get(), "the group has no capacity");
            wait_s(10).await;
            assert!(is_admitted.get(), "and the disk's own limit does not apply to a share");
        });
    }

    #[test]
    fn work_that_waits_follows_the_disk_to_another_group_and_out_of_it() {
        for leaves in [false, true] {
            sim::run(1, async move {
                let (busy, _other) = busy_group(1000);
                let disk = ThrottleMember::new(DiskSettings::default(), 0, Some(&busy)).expect("valid");
                let disk = Rc::new(disk);
                let is_admitted = start(&disk);
                wait_s(1).await;
                assert!(!is_admitted.get());
                let (idle, _other) = busy_group(0);
                disk.move_to((!leaves).then_some(&idle)).expect("no reservation");
                wait_s(1).await;
                assert!(is_admitted.get());
            });
        }
    }

    /// The throttle cause of work with these settings on `disk` after a second, and after its end.
    async fn cause_of(settings: BackgroundSettings, disk: &Rc<ThrottleMember>) -> [Option<String>; 2] {
        let work = Arc::new(BackgroundMember::new(settings).expect("valid"));
        let (admitted, of_disk) = (Arc::clone(&work), Rc::clone(disk));
        let task = reactor::spawn_joinable(async move {
            loop {
                admitted.admit(&of_disk, MIB).await;
                // Otherwise work without a limit would never return to the executor.
                reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
            }
        });
        wait_s(1).await;
        let text = || {
            work.throttle_cause(disk).map(|BackgroundCause { owner, kind }| {
                let owner = match owner {
                    CauseOwner::Work => "work".to_owned(),
                    CauseOwner::Disk => "disk".to_owned(),
                    CauseOwner::Group(group) => format!("group {}", group.name()),
                    CauseOwner::Above(group) => format!("above {}", group.name()),
                };
                format!("{owner} {}", kind.name())
            })
        };
        let during = text();
        drop(task);
        wait_s(3).await;
        [during, text()]
    }

    #[test]
    fn throttle_cause_has_the_owner_of_the_limit() {
        sim::run(1, async {
            let spare = BackgroundSettings::default();
            let shared = BackgroundSettings { weight: Some(100), ..spare };
            let limited = BackgroundSettings { bps_total: MIB, ..spare };
            let unlimited = Rc::new(ThrottleMember::new(DiskSettings::default(), 0, None).expect("valid"));
            assert_eq!(cause_of(spare, &unlimited).await, [None, None]);
            assert_eq!(cause_of(limited, &unlimited).await, [Some("work bps-total".to_owned()), None]);
            let settings = DiskSettings { limits: limits(MIB), ..DiskSettings::default() };
            let alone = Rc::new(ThrottleMember::new(settings, 0, None).expect("valid"));
            assert_eq!(cause_of(spare, &alone).await, [Some("disk bps-total".to_owned()), None]);
            let (group, _other) = busy_group(20);
            let member = ThrottleMember::new(DiskSettings::default(), 0, Some(&group)).expect("valid");
            let member = Rc::new(member);
            for settings in [spare, shared] {
                let [during, _] = cause_of(settings, &member).await;
                assert_eq!(during.as_deref(), Some("group group bps-total"), "{settings:?}");
            }
            let inner = ThrottleGroup::new("inner", GroupSettings::default(), Some(&group)).expect("valid");
            member.move_to(Some(&inner)).expect("no reservation");
            let [during, _] = cause_of(spare, &member).await;
            assert_eq!(during.as_deref(), Some("above group bps-total"));
            member.move_to(None).expect("no reservation");
            member.set_cap(Some(RateCap::new(1)));
            let [during, _] = cause_of(spare, &member).await;
            assert_eq!(during.as_deref(), Some("disk latency-target"));
        });
    }
}
