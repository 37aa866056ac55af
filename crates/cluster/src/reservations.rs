//! Reservations that a host may make of cluster-wide limits, beside those of other hosts.
//!
//! ```text
//!   limit 3000    others 2000 │ left 1000
//!   pool  5000    others 2000 │ this host's other groups 500 │ left 2500     the least applies
//! ```
//!
//! Reservations that etcd has for a host stay that host's, even if the sum is too large: a
//! restarted daemon gets its earlier reservations back. Only decides; `agent` reads and writes.

use std::{collections::BTreeMap, fmt::Write as _};

use policy::throttle::{LimitKind, Limits, ReservationBound};

use super::etcd_values::HostReservations;

/// Number of hosts that an error names.
pub(super) const MAX_NAMED_HOSTS: usize = 8;

/// Reservations that do not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationRefusal {
    /// The group and the reservations that fit, in operations and bytes per second. `None` if each
    /// attempt lost against a concurrent write.
    pub group: Option<(String, [Option<u64>; 2])>,
    /// Reason, for the log.
    pub why: String,
}

impl ReservationRefusal {
    pub(super) fn busy() -> Self {
        let why = "other hosts reserve at the same time (try again)".to_owned();
        Self { group: None, why }
    }
}

/// Operations (unit 0) or bytes (1) per second that limits admit, reads and writes together.
/// `None` if unlimited.
pub(super) fn max_reservable(limits: &Limits, unit: usize) -> Option<u64> {
    let [total, read, write] = match unit {
        0 => [LimitKind::IopsTotal, LimitKind::IopsRead, LimitKind::IopsWrite],
        _ => [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite],
    }
    .map(|kind| limits.limit(kind).rate);
    match (total, read, write) {
        // A limit on one direction only does not bound the sum.
        (0, 0, _) | (0, _, 0) => None,
        (0, read, write) => Some(read.saturating_add(write)),
        (total, ..) => Some(total),
    }
}

/// Measured capacity below all hosts: the lowest that a host reports, 0 if none does.
pub(super) fn capacity<'a>(reservations: impl Iterator<Item = &'a HostReservations>) -> [u64; 2] {
    reservations.fold([0; 2], |lowest, reservations| {
        [0, 1].map(|unit| match (lowest[unit], reservations.capacity[unit]) {
            // 0 is unknown, not a lowest value.
            (0, one) | (one, 0) => one,
            (one, other) => one.min(other),
        })
    })
}

/// Sum of the reservations of each group over these hosts.
pub(super) fn sums<'a>(
    reservations: impl Iterator<Item = &'a HostReservations>,
) -> BTreeMap<&'a str, [u64; 2]> {
    let mut sums: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
    for (name, more) in reservations.flat_map(|reservations| &reservations.groups) {
        let sum = sums.entry(name).or_default();
        *sum = [0, 1].map(|unit| sum[unit].saturating_add(more[unit]));
    }
    sums
}

/// Reservable rate of a group on one host, in operations and bytes per second, with the bound that
/// decides; `None` is unbounded.
pub(super) type ReservableRates = [Option<(u64, ReservationBound)>; 2];

/// Rate of a group that `host` may reserve. `all` are all hosts' reservations in etcd, `own` the
/// reservations that the host is about to make.
pub(super) fn reservable(
    all: &BTreeMap<String, HostReservations>,
    host: &str,
    own: &HostReservations,
    group: &str,
    limits: Option<&Limits>,
) -> ReservableRates {
    let others = || all.iter().filter(|(name, _)| *name != host).map(|(_, reservations)| reservations);
    let pool = capacity(others().chain([own]));
    [0, 1].map(|unit| {
        let sum = |sum: u64, more: &[u64; 2]| sum.saturating_add(more[unit]);
        let of_group = others().filter_map(|reservations| reservations.groups.get(group)).fold(0, sum);
        let own_others = own.groups.iter().filter(|(name, _)| *name != group).map(|(_, rates)| rates);
        let of_all =
            others().flat_map(|reservations| reservations.groups.values()).chain(own_others).fold(0, sum);
        let of_limit =
            limits.and_then(|limits| max_reservable(limits, unit)).map(|max| max.saturating_sub(of_group));
        let of_pool = (pool[unit] > 0).then(|| pool[unit].saturating_sub(of_all));
        let all_of_them =
            [of_limit.zip(Some(ReservationBound::Cluster)), of_pool.zip(Some(ReservationBound::Pool))];
        let (left, bound) = all_of_them.into_iter().flatten().min_by_key(|(left, _)| *left)?;
        // A stored reservation is never refused to its owner, or a restart could lose it.
        let recorded = all.get(host).and_then(|before| before.groups.get(group)).map_or(0, |had| had[unit]);
        Some((left.max(recorded), bound))
    })
}

/// Returns the reason to refuse `own`, if there is one.
pub(super) fn check(
    all: &BTreeMap<String, HostReservations>,
    host: &str,
    own: &HostReservations,
    limits: impl Fn(&str) -> Option<Limits>,
) -> Option<ReservationRefusal> {
    own.groups.iter().find_map(|(group, requested)| {
        let left = reservable(all, host, own, group, limits(group).as_ref());
        let too_much = |unit: usize| Some((unit, left[unit].filter(|(left, _)| requested[unit] > *left)?));
        let (unit, (room, bound)) = (0..2).find_map(too_much)?;
        let name = ["iops", "bps"][unit];
        let (note, remedy) = match bound {
            ReservationBound::Pool => (measured_capacity_note(all, host, own, unit), bound.remedy()),
            _ => (String::new(), "set a higher limit"),
        };
        let why = format!(
            "group {group}: {name}-reservation: {} would be reserved on {host}, but only {room} is \
             available{note}{} (lower a reservation on any host, or {remedy}; `weir cluster forget \
             HOST` removes those of a host that will not return)",
            requested[unit],
            reservations_elsewhere(all, host, group)
        );
        Some(ReservationRefusal { group: Some((group.clone(), left.map(|left| Some(left?.0)))), why })
    })
}

/// ` of the 2000 that `weir probe` measured below a`: names the host with the lowest capacity.
fn measured_capacity_note(
    all: &BTreeMap<String, HostReservations>,
    host: &str,
    own: &HostReservations,
    unit: usize,
) -> String {
    let others = all
        .iter()
        .filter(|(name, _)| *name != host)
        .map(|(name, reservations)| (name.as_str(), reservations));
    let known = others.chain([(host, own)]).map(|(name, reservations)| (reservations.capacity[unit], name));
    let lowest = known.filter(|(measured, _)| *measured > 0).min();
    lowest.map_or_else(String::new, |(there, name)| {
        format!(" of the {there} that `weir probe` measured below {name}")
    })
}

/// `; reserved in group gold on other hosts: a 2000 IOPS, b 900 IOPS`, without this host; empty
/// without reservations of others.
pub(super) fn reservations_elsewhere(
    all: &BTreeMap<String, HostReservations>,
    host: &str,
    group: &str,
) -> String {
    let others = all.iter().filter(|(name, _)| *name != host);
    let describe = |(name, reservations): (&String, &HostReservations)| {
        let [iops, bps] = *reservations.groups.get(group)?;
        let amounts =
            [(iops, "IOPS"), (bps, "bytes per second")].into_iter().filter(|(amount, _)| *amount > 0);
        let amounts: Vec<_> = amounts.map(|(amount, unit)| format!("{amount} {unit}")).collect();
        (!amounts.is_empty()).then(|| format!("{name} {}", amounts.join(" and ")))
    };
    let mut named: Vec<_> = others.filter_map(describe).collect();
    if named.is_empty() {
        return String::new();
    }
    let more = named.len().saturating_sub(MAX_NAMED_HOSTS);
    named.truncate(MAX_NAMED_HOSTS);
    let mut text = format!("; reserved in group {group} on other hosts: {}", named.join(", "));
    if more > 0 {
        let _ = write!(text, " and {more} more hosts");
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOSTS: [&str; 3] = ["a", "b", "c"];
    const LIMIT: u64 = 1000;

    fn limits(rate: u64) -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = rate;
        limits
    }

    fn of(amounts: &[(&str, u64)]) -> HostReservations {
        let groups = amounts.iter().map(|(group, iops)| ((*group).to_owned(), [*iops, 0])).collect();
        HostReservations { groups, ..HostReservations::default() }
    }

    fn all(hosts: &[(&str, HostReservations)]) -> BTreeMap<String, HostReservations> {
        hosts.iter().map(|(host, reservations)| ((*host).to_owned(), reservations.clone())).collect()
    }

    #[test]
    fn stored_reservations_stay_and_more_is_refused() {
        let stored = all(&[("a", of(&[("gold", 600)])), ("b", of(&[("gold", 700)]))]);
        let try_reserve =
            |host: &str, iops| check(&stored, host, &of(&[("gold", iops)]), |_| Some(limits(LIMIT)));
        assert_eq!(try_reserve("a", 600), None, "though all together is too much");
        assert_eq!(try_reserve("a", 100), None);
        let refusal = try_reserve("a", 601).unwrap();
        assert_eq!(refusal.group, Some(("gold".to_owned(), [Some(600), None])));
        for expect in
            ["601 would be reserved on a, but only 600 is available", "on other hosts: b 700 IOPS ("]
        {
            assert!(refusal.why.contains(expect), "{}", refusal.why);
        }
        assert!(try_reserve("c", 1).unwrap().why.contains("a 600 IOPS, b 700 IOPS"));
    }

    #[test]
    fn the_pool_bounds_the_sum_of_all_groups() {
        let measured = HostReservations { capacity: [2000, 0], ..of(&[("silver", 900)]) };
        let stored = all(&[("a", measured)]);
        let own_reservations = of(&[("gold", 500), ("silver", 200)]);
        let of_pool = |amount| [Some((amount, ReservationBound::Pool)), None];
        assert_eq!(reservable(&stored, "b", &own_reservations, "gold", None), of_pool(900));
        assert_eq!(reservable(&stored, "b", &own_reservations, "gold", Some(&limits(LIMIT))), of_pool(900));
        assert_eq!(reservable(&stored, "b", &own_reservations, "silver", None), of_pool(600));
        let refused = check(&stored, "b", &of(&[("gold", 1200)]), |_| None).unwrap();
        for expect in [
            "1100 is available of the 2000 that `weir probe` measured below a (",
            "measure again with `weir probe`",
        ] {
            assert!(refused.why.contains(expect), "{}", refused.why);
        }
        assert_eq!(refused.group.unwrap().1, [Some(1100), None]);
    }

    #[test]
    fn only_some_hosts_are_named() {
        let many = (0..20).map(|host| (format!("h{host:02}"), of(&[("gold", 7)]))).collect();
        let message = reservations_elsewhere(&many, "h00", "gold");
        assert!(message.ends_with("h08 7 IOPS and 11 more hosts"), "{message}");
        assert_eq!(reservations_elsewhere(&many, "h00", "silver"), "");
    }

    /// Step of one host, by its index.
    #[derive(Clone, Debug)]
    enum ReservationStep {
        /// Reads etcd.
        Look(usize),
        /// Reserves a rate, checked against the last read. After a conflict it reads and retries,
        /// as `agent` does.
        Ask(usize, u64),
        /// Restarts with its earlier reservation.
        Restart(usize),
        /// Loses its reservation: the host was away for longer than the lease.
        Expire(usize),
    }

    fn step() -> impl Strategy<Value = ReservationStep> {
        let host = 0..HOSTS.len();
        prop_oneof![
            host.clone().prop_map(ReservationStep::Look),
            (host.clone(), 0..=LIMIT + 100).prop_map(|(host, iops)| ReservationStep::Ask(host, iops)),
            host.clone().prop_map(ReservationStep::Restart),
            host.prop_map(ReservationStep::Expire),
        ]
    }

    /// Model of etcd: reservations, and the revision of the last change.
    #[derive(Default)]
    struct EtcdModel {
        reservations: BTreeMap<String, HostReservations>,
        revision: u64,
    }

    impl EtcdModel {
        /// True if the reservation was written, checked against the state at the revision in
        /// `seen`.
        fn reserve(
            &mut self,
            host: &str,
            iops: u64,
            seen: &mut (BTreeMap<String, HostReservations>, u64),
        ) -> bool {
            let reservations = of(&[("gold", iops)]);
            loop {
                if check(&seen.0, host, &reservations, |_| Some(limits(LIMIT))).is_some() {
                    return false;
                }
                if seen.1 >= self.revision {
                    self.revision += 1;
                    self.reservations.insert(host.to_owned(), reservations.clone());
                    *seen = (self.reservations.clone(), self.revision);
                    return true;
                }
                *seen = (self.reservations.clone(), self.revision);
            }
        }

        fn reserved(&self, host: &str) -> u64 {
            self.reservations.get(host).map_or(0, |reservations| reservations.groups["gold"][0])
        }
    }

    proptest! {
        /// For any interleaving of stale reads, restarts and expiries: the sum stays within the
        /// limit, and a restarted host gets its reservation back.
        #[test]
        fn reservations_never_exceed_the_limit(steps in prop::collection::vec(step(), 1..60)) {
            let mut store = EtcdModel::default();
            let mut seen: [(BTreeMap<String, HostReservations>, u64); 3] = Default::default();
            for step in steps {
                match step {
                    ReservationStep::Look(at) => seen[at] = (store.reservations.clone(), store.revision),
                    ReservationStep::Ask(at, iops) => {
                        let before = store.reserved(HOSTS[at]);
                        let others: u64 = HOSTS.iter().map(|host| store.reserved(host)).sum::<u64>() - before;
                        let done = store.reserve(HOSTS[at], iops, &mut seen[at]);
                        prop_assert!(!done || others + iops <= LIMIT);
                        // Refused by stale state. The host learns of ended reservations by its
                        // watch.
                        let known = |host: &str| {
                            seen[at].0.get(host).map_or(0, |reservations| reservations.groups["gold"][0])
                        };
                        let seen_others: u64 = HOSTS.iter().map(|host| known(host)).sum();
                        let own_rate = known(HOSTS[at]);
                        prop_assert!(done || seen_others - own_rate + iops > LIMIT);
                    }
                    ReservationStep::Restart(at) => {
                        let reserved = store.reserved(HOSTS[at]);
                        seen[at] = (store.reservations.clone(), store.revision);
                        prop_assert!(store.reserve(HOSTS[at], reserved, &mut seen[at]));
                    }
                    ReservationStep::Expire(at) => {
                        store.reservations.remove(HOSTS[at]);
                        // It joins anew, which reads everything.
                        seen[at] = (store.reservations.clone(), store.revision);
                    }
                }
                let sum: u64 = HOSTS.iter().map(|host| store.reserved(host)).sum();
                prop_assert!(sum <= LIMIT, "{sum} is reserved");
            }
        }
    }
}
