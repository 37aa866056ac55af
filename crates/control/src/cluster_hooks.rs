//! Hooks of the cluster agent into the registry: measured capacity, reservations, events.

use std::iter;

use cluster::{ClusterHooks, ReservationRefusal, actor::ChangeOrigin};
use policy::throttle::Limits;

use super::{
    registry::Registry,
    watch::settings::{MemberSettingValues, changed_event},
};
use crate::events::{Kind, NewEvent};

impl ClusterHooks for Registry {
    fn capacity(&self, is_shared: &dyn Fn(&str) -> bool) -> [u64; 2] {
        // A device counts once, however many of its disks are in cluster-wide groups.
        let takes_part = |disk: &String| {
            let group = self.disks.get(disk).ok().and_then(|running| running.disk.throttle().group());
            group.is_some_and(|group| {
                iter::successors(Some(group), |group| group.parent().cloned())
                    .any(|group| is_shared(group.name()))
            })
        };
        let member_devices = self.devices().into_iter().filter(|listed| listed.disks.iter().any(takes_part));
        let capacities = member_devices.filter_map(|listed| listed.device.capacity());
        capacities.fold([0; 2], |sum: [u64; 2], capacity| {
            let figures =
                [[capacity.read_iops, capacity.write_iops], [capacity.read_bps, capacity.write_bps]];
            // The smaller of the read and write capacity: a reservation does not distinguish
            // directions, so all of its requests may be of the slower kind.
            [0, 1].map(|unit| {
                let smaller = figures[unit].into_iter().filter(|figure| *figure > 0).min().unwrap_or(0);
                sum[unit].saturating_add(smaller)
            })
        })
    }

    fn has_group(&self, name: &str) -> bool {
        self.groups.get(name).is_ok()
    }

    fn report_connection(&self, cluster: &str, host: &str, partition_reason: Option<&str>) {
        let (kind, message) = match partition_reason {
            None => (
                Kind::ClusterJoined,
                format!("this host ({host}) has its quota of cluster {cluster}'s limits"),
            ),
            Some(why) => (
                Kind::ClusterPartitioned,
                format!(
                    "partitioned from cluster {cluster}: {why} (the fallback share applies once \
                     the quota leases expire, unless other hosts agree)"
                ),
            ),
        };
        let event = NewEvent::new(kind, message).with("cluster", cluster).with("host", host);
        self.events.record(event.with("reason", partition_reason));
    }

    fn report_agreement(&self, cluster: &str, leader: Option<(&str, u64)>, detail: &str) {
        let (kind, message) = match leader {
            Some((leader, 0)) => (
                Kind::ClusterAgreed,
                format!(
                    "etcd is unreachable: this host keeps its quota through the leader {leader}, \
                     which it reaches ({detail})"
                ),
            ),
            Some((leader, hosts)) => (
                Kind::ClusterAgreed,
                format!(
                    "etcd is unreachable: this host keeps its quota by agreement of {hosts} hosts, \
                     of which {leader} leads ({detail})"
                ),
            ),
            None => (
                Kind::ClusterFallback,
                format!(
                    "etcd is unreachable, and the hosts have not agreed on a leader: the fallback \
                     share applies{}{detail}",
                    if detail.is_empty() { "" } else { ": " }
                ),
            ),
        };
        let event = NewEvent::new(kind, message).with("cluster", cluster);
        let event = event.with("leader", leader.map(|(leader, _)| leader));
        self.events.record(event.with("agreed-hosts", leader.map(|(_, hosts)| hosts)));
    }

    fn quota_changed(&self) {
        // Only groups with a quota: limits of all others change by commands, which are recorded
        // elsewhere.
        for group in self.groups.all().iter().filter(|group| group.quota_lease().is_some()) {
            self.recordings.handle_quota_change(group);
        }
    }

    fn restore_reservations(&self) {
        self.book_unmet();
    }

    fn suspend_reservations(&self, refusal: &ReservationRefusal) {
        self.unbook_excess(refusal);
    }

    fn report_reservations(&self) {
        self.report_unmet();
    }

    fn report_limits(&self, cluster: &str, group: &str, [before, after]: [&Limits; 2], by: &ChangeOrigin) {
        let changes =
            MemberSettingValues::of_limits(after).changes_since(&MemberSettingValues::of_limits(before));
        let message = format!("group {group} was changed on all hosts by {}", by.shown());
        let event = changed_event(&message, &changes).of_group(group).with("cluster", cluster);
        self.events.record(event.with("by", by.to_json()));
    }

    fn report_silent_host(&self, cluster: &str, host: &str, is_unreachable: bool) {
        let (kind, message) = match is_unreachable {
            true => (
                Kind::ClusterHostUnreachable,
                format!(
                    "host {host} is unreachable: its quota goes to other hosts, except its \
                     fallback share (`weir cluster forget {host}` if it will not return)"
                ),
            ),
            false => (Kind::ClusterHostReachable, format!("host {host} is reachable again, or has left")),
        };
        self.events.record(NewEvent::new(kind, message).with("cluster", cluster).with("host", host));
    }

    fn report_overbooked(&self, cluster: &str, group: &str, unit: &'static str, [promised, there]: [u64; 2]) {
        let message = format!(
            "group {group}: {unit}-reservation: its hosts reserve {promised}, more than the limit \
             of {there} (lower reservations, or set a higher limit)"
        );
        let event =
            NewEvent::new(Kind::ClusterOvercommitted, message).of_group(group).with("cluster", cluster);
        self.events.record(event.with("unit", unit).with("reserved", promised).with("limit", there));
    }
}
