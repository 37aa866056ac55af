//! Unmet reservations: disks and groups that are served without their reservation in a cluster's
//! limits, because reservations on other hosts use the capacity.
//!
//! A command with such a reservation is rejected. A start, or a daemon that was disconnected from
//! etcd, serves the disk without the reservation instead, and books it as soon as capacity is free,
//! unless the reservation is changed in between.

use std::{iter, rc::Rc, sync::Arc};

use anyhow::Context as _;
use block::layer::throttle::ThrottleGroup;
use cluster::ReservationRefusal;
use policy::throttle::{NodeShare, ThrottleError};

use super::{
    change::RegistryChange,
    reconcile::placements::{GroupOrDisk, MemberPlacement},
    registry::Registry,
    unmet_reservation::{UnmetReservationEntry, UnmetReservationState, named_reservations, reservation_of},
};
use crate::events::{Kind, NewEvent};

impl Registry {
    /// Innermost group with cluster-wide limits that contains this group, or the group itself.
    pub(crate) fn shared_group(&self, group: Option<&Arc<ThrottleGroup>>) -> Option<Arc<ThrottleGroup>> {
        let mut above = iter::successors(group.cloned(), |group| group.parent().cloned());
        above.find(|group| self.cluster_of(group.name()).is_some())
    }

    /// Books the configured reservation of a disk or group that has none yet; leaves it unmet if
    /// the cluster has no capacity for it.
    ///
    /// # Errors
    /// The reservation does not fit regardless of other hosts.
    pub(crate) fn book_at_start(&self, name: &str, wanted: [u64; 2]) -> anyhow::Result<()> {
        let node = self.group_or_disk(name).context("no disk or group has this name")?;
        let booked = placement_with_reservation(&node, wanted).apply();
        let Err(ThrottleError::Overbooked(overbooked)) = &booked else {
            return booked.context(kind_and_name(&node));
        };
        // Only a bound of the cluster can change by actions of other hosts.
        if !overbooked.bound.is_shared() {
            return booked.context(kind_and_name(&node));
        }
        let why = format!("{overbooked}{}", self.reservations_elsewhere(&node));
        self.record_unmet(name, wanted, why);
        Ok(())
    }

    /// As `book_at_start`, for a disk that becomes available later: other hosts may have booked its
    /// capacity meanwhile. The disk is served in any case.
    pub(super) fn book_later(&self, name: &str, wanted: [u64; 2]) {
        let Some(node) = self.group_or_disk(name).filter(|_| wanted != [0, 0]) else { return };
        if let Err(refused) = placement_with_reservation(&node, wanted).apply() {
            let why = format!("{refused}{}", self.reservations_elsewhere(&node));
            self.record_unmet(name, wanted, why);
            self.report_unmet();
        }
    }

    /// Books unmet reservations whenever a change may free capacity. In a cluster, the agent calls
    /// `book_unmet` instead.
    pub fn book_when_possible(self: &Rc<Self>) {
        let registry = Rc::downgrade(self);
        self.listen(move |change| {
            let may_free_capacity =
                matches!(change, RegistryChange::Listed { .. } | RegistryChange::SettingsChanged { .. });
            if let Some(registry) = registry.upgrade()
                && may_free_capacity
                && registry.cluster().is_none()
            {
                registry.book_unmet();
                registry.report_unmet();
            }
        });
    }

    /// Text about reservations on other hosts in the same cluster-wide limit.
    fn reservations_elsewhere(&self, node: &GroupOrDisk) -> String {
        let shared = self.shared_group_of(node);
        let text = shared.and_then(|group| Some(self.cluster()?.reservations_elsewhere(group.name())));
        text.unwrap_or_default()
    }

    fn shared_group_of(&self, node: &GroupOrDisk) -> Option<Arc<ThrottleGroup>> {
        match node {
            GroupOrDisk::Group(group) => self.shared_group(Some(group)),
            GroupOrDisk::Disk(disk) => self.shared_group(disk.throttle().group().as_ref()),
        }
    }

    fn record_unmet(&self, name: &str, wanted: [u64; 2], why: String) {
        let mut unmet = self.groups.unmet.borrow_mut();
        let was_reported = matches!(
            unmet.get(name),
            Some(UnmetReservationEntry {
                state: UnmetReservationState::Reported | UnmetReservationState::BookedAgain(true),
                ..
            })
        );
        let state =
            if was_reported { UnmetReservationState::Reported } else { UnmetReservationState::Unreported };
        unmet.insert(name.to_owned(), UnmetReservationEntry { wanted, why, state });
    }

    fn group_or_disk(&self, name: &str) -> Option<GroupOrDisk> {
        let disk = || self.disks.get(name).ok().map(|running| GroupOrDisk::Disk(Arc::clone(&running.disk)));
        self.groups.get(name).ok().map(GroupOrDisk::Group).or_else(disk)
    }

    /// Books unmet reservations as far as this host's information allows. Drops entries whose disk
    /// or group is gone or has another reservation by now.
    pub(super) fn book_unmet(&self) {
        let known = self.groups.unmet.borrow().clone();
        for (name, UnmetReservationEntry { wanted, why, state }) in known {
            let Some(node) = self.group_or_disk(&name) else {
                self.groups.unmet.borrow_mut().remove(&name);
                continue;
            };
            // Already booked here; the cluster's answer decides.
            if matches!(state, UnmetReservationState::BookedAgain(_)) {
                continue;
            }
            if reservation_of(MemberPlacement::current(&node).settings.share) != [0, 0] {
                self.groups.unmet.borrow_mut().remove(&name);
                continue;
            }
            if placement_with_reservation(&node, wanted).apply().is_ok() {
                let state = UnmetReservationState::BookedAgain(state == UnmetReservationState::Reported);
                self.groups.unmet.borrow_mut().insert(name, UnmetReservationEntry { wanted, why, state });
            }
        }
    }

    /// Removes reservations of a group, last name first, until the rest fits.
    pub(super) fn unbook_excess(&self, refusal: &ReservationRefusal) {
        let Some((group, left)) = &refusal.group else { return };
        let Ok(shared) = self.groups.get(group) else { return };
        let disks = self.disks.all().into_iter().map(|running| GroupOrDisk::Disk(Arc::clone(&running.disk)));
        let mut nodes: Vec<_> = self.groups.all().into_iter().map(GroupOrDisk::Group).chain(disks).collect();
        // The sort below is stable, so among equals the last name comes first.
        nodes.reverse();
        // Reservations that were unmet before are removed first; established ones stay longest.
        nodes.sort_by_key(|node| {
            !self.groups.unmet.borrow().contains_key(&MemberPlacement::current(node).kind_and_name().1)
        });
        for node in &nodes {
            // Read again for each member: the previous removal has changed it.
            let reserved = shared.reserved();
            let fits = |unit: usize| left[unit].is_none_or(|left| reserved[unit] <= left);
            if fits(0) && fits(1) {
                return;
            }
            let now = MemberPlacement::current(node);
            let wanted = reservation_of(now.settings.share);
            let is_inside = self.shared_group_of(node).is_some_and(|group| Arc::ptr_eq(&group, &shared));
            if wanted == [0, 0] || !is_inside {
                continue;
            }
            let (_, name) = now.kind_and_name();
            if let Err(error) = now.without_reservations().apply() {
                tracing::error!("{name}: its reservation cannot be removed: {error}");
            } else {
                self.record_unmet(&name, wanted, refusal.why.clone());
            }
        }
    }

    /// Reports the changes since the last report.
    pub(super) fn report_unmet(&self) {
        let mut changed = Vec::new();
        self.groups.unmet.borrow_mut().retain(|name, entry| {
            // `BookedAgain(false)` was never reported as unmet: no event reports that it is met.
            let was = std::mem::replace(&mut entry.state, UnmetReservationState::Reported);
            if matches!(was, UnmetReservationState::Unreported | UnmetReservationState::BookedAgain(true)) {
                changed.push((name.clone(), was, entry.clone()));
            }
            !matches!(was, UnmetReservationState::BookedAgain(_))
        });
        for (name, was, UnmetReservationEntry { wanted, why, .. }) in changed {
            let amounts = || named_reservations(wanted);
            let event = if was == UnmetReservationState::Unreported {
                let amounts: Vec<_> = amounts().map(|(key, amount)| format!("{key} {amount}")).collect();
                let amounts = amounts.join(" and ");
                let message = format!("{name}: served without its {amounts} until capacity is free: {why}");
                NewEvent::new(Kind::ReservationUnmet, message)
            } else {
                NewEvent::new(Kind::ReservationInForce, format!("{name}: its reservation is in force now"))
            };
            let event =
                if self.groups.get(&name).is_ok() { event.of_group(&name) } else { event.of_disk(&name) };
            self.events.record(amounts().fold(event, |event, (key, amount)| event.with(key, amount)));
        }
    }

    /// Drops the unmet reservation of a disk or group, because a command changed it.
    pub(crate) fn forget_unmet(&self, name: &str) {
        self.groups.unmet.borrow_mut().remove(name);
    }

    /// True if exactly this reservation is unmet.
    pub(super) fn is_unmet(&self, name: &str, share: NodeShare) -> bool {
        self.groups.unmet.borrow().get(name).is_some_and(|entry| entry.wanted == reservation_of(share))
    }
}

fn placement_with_reservation(node: &GroupOrDisk, [iops, bps]: [u64; 2]) -> MemberPlacement {
    let mut placement = MemberPlacement::current(node);
    placement.settings.share = placement.settings.share.with_reservation(iops, bps);
    placement
}

fn kind_and_name(node: &GroupOrDisk) -> String {
    let (kind, name) = MemberPlacement::current(node).kind_and_name();
    format!("{kind} {name}")
}
