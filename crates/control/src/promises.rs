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
use policy::throttle::{ThrottleError, NodeShare};

use super::{
    change::Change,
    left_out::{LeftOut, State, reservations, wanted_of},
    reconcile::seats::{Node, Seat},
    registry::Registry,
};
use crate::events::{Kind, News};

impl Registry {
    /// Innermost group with cluster-wide limits that contains this group, or is it.
    pub(crate) fn shared_group(&self, group: Option<&Arc<ThrottleGroup>>) -> Option<Arc<ThrottleGroup>> {
        let mut above = iter::successors(group.cloned(), |group| group.parent().cloned());
        above.find(|group| self.cluster_of(group.name()).is_some())
    }

    /// Books the configured reservation of a disk or group that has none yet; leaves it unmet if
    /// the cluster has no capacity for it.
    ///
    /// # Errors
    /// The reservation does not fit regardless of other hosts.
    pub(crate) fn promise_at_start(&self, name: &str, wanted: [u64; 2]) -> anyhow::Result<()> {
        let node = self.node(name).context("what is not listed")?;
        let promised = seat(&node, wanted).take();
        let Err(ThrottleError::Overbooked(overbooked)) = &promised else { return promised.context(titled(&node)) };
        // Only a bound of the cluster can change by actions of other hosts.
        if !overbooked.bound.is_shared() {
            return promised.context(titled(&node));
        }
        let why = format!("{overbooked}{}", self.elsewhere(&node));
        self.note_left_out(name, wanted, why);
        Ok(())
    }

    /// As `promise_at_start`, for a disk that becomes available later: its capacity may be booked
    /// by then. The disk is served in any case.
    pub(super) fn promise_late(&self, name: &str, wanted: [u64; 2]) {
        let Some(node) = self.node(name).filter(|_| wanted != [0, 0]) else { return };
        if let Err(refused) = seat(&node, wanted).take() {
            let why = format!("{refused}{}", self.elsewhere(&node));
            self.note_left_out(name, wanted, why);
            self.tell_left_out();
        }
    }

    /// Books unmet reservations whenever a change may free capacity. In a cluster, the agent calls
    /// `make_left_out` instead.
    pub fn promise_once_there_is_room(self: &Rc<Self>) {
        let registry = Rc::downgrade(self);
        self.listen(move |change| {
            let may_leave_room = matches!(change, Change::Listed { .. } | Change::SettingsChanged { .. });
            if let Some(registry) = registry.upgrade()
                && may_leave_room
                && registry.cluster().is_none()
            {
                registry.make_left_out();
                registry.tell_left_out();
            }
        });
    }

    /// Text about reservations on other hosts in the same cluster-wide limit.
    fn elsewhere(&self, node: &Node) -> String {
        let shared = self.shared_group_of(node);
        let said = shared.and_then(|group| Some(self.cluster()?.reservations_elsewhere(group.name())));
        said.unwrap_or_default()
    }

    fn shared_group_of(&self, node: &Node) -> Option<Arc<ThrottleGroup>> {
        match node {
            Node::Group(group) => self.shared_group(Some(group)),
            Node::Disk(disk) => self.shared_group(disk.throttle().group().as_ref()),
        }
    }

    fn note_left_out(&self, name: &str, wanted: [u64; 2], why: String) {
        let mut left_out = self.groups.unmet.borrow_mut();
        let was_told =
            matches!(left_out.get(name), Some(LeftOut { state: State::Told | State::Tried(true), .. }));
        let state = if was_told { State::Told } else { State::Untold };
        left_out.insert(name.to_owned(), LeftOut { wanted, why, state });
    }

    fn node(&self, name: &str) -> Option<Node> {
        let disk = || self.disks.get(name).ok().map(|running| Node::Disk(Arc::clone(&running.disk)));
        self.groups.get(name).ok().map(Node::Group).or_else(disk)
    }

    /// Books unmet reservations as far as this host's information allows. Drops entries whose disk
    /// or group is gone or has another reservation by now.
    pub(super) fn make_left_out(&self) {
        let known = self.groups.unmet.borrow().clone();
        for (name, LeftOut { wanted, why, state }) in known {
            let Some(node) = self.node(&name) else {
                self.groups.unmet.borrow_mut().remove(&name);
                continue;
            };
            // Already booked here; the cluster's answer decides.
            if matches!(state, State::Tried(_)) {
                continue;
            }
            if wanted_of(Seat::now(&node).settings.share) != [0, 0] {
                self.groups.unmet.borrow_mut().remove(&name);
                continue;
            }
            if seat(&node, wanted).take().is_ok() {
                let state = State::Tried(state == State::Told);
                self.groups.unmet.borrow_mut().insert(name, LeftOut { wanted, why, state });
            }
        }
    }

    /// Removes reservations of a group, last name first, until the rest fits.
    pub(super) fn leave_out_promises(&self, refusal: &ReservationRefusal) {
        let Some((group, left)) = &refusal.group else { return };
        let Ok(shared) = self.groups.get(group) else { return };
        let disks = self.disks.all().into_iter().map(|running| Node::Disk(Arc::clone(&running.disk)));
        let mut nodes: Vec<_> = self.groups.all().into_iter().map(Node::Group).chain(disks).collect();
        // The sort below is stable, so among equals the last name comes first.
        nodes.reverse();
        // Reservations that were unmet before are removed first; established ones stay longest.
        nodes.sort_by_key(|node| !self.groups.unmet.borrow().contains_key(&Seat::now(node).named().1));
        for node in &nodes {
            // Read again for each member: the previous removal has changed it.
            let promised = shared.reserved();
            let fits = |unit: usize| left[unit].is_none_or(|left| promised[unit] <= left);
            if fits(0) && fits(1) {
                return;
            }
            let now = Seat::now(node);
            let wanted = wanted_of(now.settings.share);
            let is_inside = self.shared_group_of(node).is_some_and(|group| Arc::ptr_eq(&group, &shared));
            if wanted == [0, 0] || !is_inside {
                continue;
            }
            let (_, name) = now.named();
            if let Err(error) = now.without_promises().take() {
                tracing::error!("{name}: its reservation cannot be removed: {error}");
            } else {
                self.note_left_out(&name, wanted, refusal.why.clone());
            }
        }
    }

    /// Reports the changes since the last report.
    pub(super) fn tell_left_out(&self) {
        let mut told = Vec::new();
        self.groups.unmet.borrow_mut().retain(|name, one| {
            // `Tried(false)` was never reported as unmet, so being met is no news.
            let was = std::mem::replace(&mut one.state, State::Told);
            if matches!(was, State::Untold | State::Tried(true)) {
                told.push((name.clone(), was, one.clone()));
            }
            !matches!(was, State::Tried(_))
        });
        for (name, was, LeftOut { wanted, why, .. }) in told {
            let amounts = || reservations(wanted);
            let news = if was == State::Untold {
                let amounts: Vec<_> = amounts().map(|(key, amount)| format!("{key} {amount}")).collect();
                let amounts = amounts.join(" and ");
                let message = format!("{name}: served without its {amounts} until capacity is free: {why}");
                News::new(Kind::PromiseLeftOut, message)
            } else {
                News::new(Kind::PromiseMade, format!("{name}: its reservation is in force now"))
            };
            let news =
                if self.groups.get(&name).is_ok() { news.of_group(&name) } else { news.of_disk(&name) };
            self.events.tell(amounts().fold(news, |news, (key, amount)| news.with(key, amount)));
        }
    }

    /// Drops the unmet reservation of a disk or group, because a command changed it.
    pub(crate) fn forget_left_out(&self, name: &str) {
        self.groups.unmet.borrow_mut().remove(name);
    }

    /// True if exactly this reservation is unmet.
    pub(super) fn is_left_out(&self, name: &str, share: NodeShare) -> bool {
        self.groups.unmet.borrow().get(name).is_some_and(|one| one.wanted == wanted_of(share))
    }
}

fn seat(node: &Node, [iops, bps]: [u64; 2]) -> Seat {
    let mut seat = Seat::now(node);
    seat.settings.share = seat.settings.share.with_reservation(iops, bps);
    seat
}

fn titled(node: &Node) -> String {
    let (kind, name) = Seat::now(node).named();
    format!("{kind} {name}")
}
