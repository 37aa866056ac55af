//! Admission of background work on a disk, such as a backup, from the capacity that clients leave.
//!
//! ```text
//!   without a weight   spare capacity of the disk's group, or of the disk itself if it has no group;
//!                      no client's request waits for it
//!   with a weight      a member of the group like a disk, with this share
//!   in both cases      limits of its own
//! ```
//!
//! Spare capacity has no queue: admission is requested again after [`RETRY_INTERVAL`], which loses
//! none, because unused capacity accumulates for a tenth of a second. One request at a time does
//! so.
//!
//! Follows the disk into another group. Never makes a request of the disk wait for its own work,
//! except by its share.

use std::sync::{Mutex, PoisonError};

use policy::{
    request::Direction,
    throttle::{LimitKind, Limits, NodeShare, RateLimit, RequestCost, SpareRefund, ThrottleError},
    time::Duration,
};

use super::{member::ThrottleMember, settings::DiskSettings};
use storage::RangeLocks;

/// Interval at which spare capacity is requested: a tenth of the time for which it accumulates.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Limits and share of background work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackgroundSettings {
    /// Limit in bytes per second; 0 is unlimited.
    pub bps_total: u64,
    /// Limit in requests per second; 0 is unlimited.
    pub iops_total: u64,
    /// Weight beside the members of the disk's group; `None` is spare capacity only. Without a
    /// group it has no effect.
    pub weight: Option<u32>,
}

/// Background work of one disk in its throttle tree.
#[derive(Debug)]
pub struct BackgroundMember {
    member: ThrottleMember,
    settings: Mutex<BackgroundSettings>,
    /// Held by the request that asks for admission.
    turn: RangeLocks,
    debt: Mutex<WorkDone>,
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
        let share = self.weight.and_then(NodeShare::new).unwrap_or_default();
        Ok(DiskSettings { limits, share, ..DiskSettings::default() })
    }
}

impl BackgroundMember {
    /// Adds background work of `disk` to its group.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn new(settings: BackgroundSettings, disk: &ThrottleMember) -> Result<Self, ThrottleError> {
        // Its limits never follow a size.
        let member = ThrottleMember::new(settings.disk_settings()?, 0, disk.group().as_ref())?;
        Ok(Self {
            member,
            settings: Mutex::new(settings),
            turn: RangeLocks::default(),
            debt: Mutex::default(),
        })
    }

    /// Settings in force.
    pub fn settings(&self) -> BackgroundSettings {
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the settings, also for work that waits.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits; nothing is changed.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set(&self, settings: BackgroundSettings) -> Result<(), ThrottleError> {
        self.member.set(settings.disk_settings()?)?;
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = settings;
        Ok(())
    }

    /// Waits until a request of `bytes` on `disk` is admitted, and charges it. A dropped future may
    /// have charged it.
    pub(crate) async fn admit(&self, disk: &ThrottleMember, bytes: u64) {
        let _turn = self.turn.exclusive(0..1).await;
        let cost = self.cost_with_debt(bytes);
        let mut is_within_own_limits = false;
        loop {
            let has_group = self.follow(disk);
            if has_group && self.settings().weight.is_some() {
                if !is_within_own_limits {
                    self.member.admit(Direction::Read, cost).await;
                }
                return;
            }
            if has_group {
                if self.member.try_read_ahead(&cost, SpareRefund::default()) {
                    return;
                }
            } else {
                // Alone in its tree: only its own limits delay it there.
                if !std::mem::replace(&mut is_within_own_limits, true) {
                    self.member.admit(Direction::Read, cost.clone()).await;
                }
                if disk.try_read_ahead(&cost, SpareRefund::default()) {
                    return;
                }
            }
            reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
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

    /// Moves to the disk's group; returns true if there is one.
    fn follow(&self, disk: &ThrottleMember) -> bool {
        let group = disk.group();
        self.member.move_to(group.as_ref()).expect("it has no reservation");
        group.is_some()
    }
}
