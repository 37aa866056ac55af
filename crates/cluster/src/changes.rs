//! Changes that apply to all hosts: new limits for a group, removal of a group, removal of a host.
//!
//! Each change is one transaction, which fails if its keys were changed concurrently: of two
//! simultaneous commands one is rejected with an error.

use std::collections::BTreeMap;

use api::{ClusterGroupChange, ForgottenHost};
use policy::{cluster::MAX_HOSTS, throttle::Limits};

use super::{
    environment::random,
    etcd::{EtcdClient, EtcdError, EtcdOperation, TransactionCondition},
    etcd_values::{self, GroupValue, HostReservations},
    keys::EtcdKey,
    limit_file::StoredGroup,
    messages::GroupLimitChange,
    reservations::{MAX_NAMED_HOSTS, max_reservable},
    session_state::SessionState,
};

/// Number of removed groups to remember, so that a host that was away does not restore one.
const MAX_REMOVAL_MARKS: usize = 64;

/// Makes a change, or returns the reason for rejecting it. `None` if the state that the check used
/// is stale.
pub(super) async fn change_group(
    known: &SessionState,
    etcd: &mut EtcdClient,
    change: &GroupLimitChange,
) -> Result<Option<Result<StoredGroup, String>>, EtcdError> {
    let key = known.keys.key(EtcdKey::Group(&change.group));
    if let Some(why) = known.unreadable_groups.get(&change.group) {
        let name = &change.group;
        return Ok(Some(Err(format!("group {name}: not changed, because the value at {key} in etcd {why}"))));
    }
    let before = known.groups.get(&change.group);
    let next = match change.removes {
        true => removal_mark(known, &change.group, before.map(|stored| &stored.group)),
        false => changed_group(
            before.map(|stored| &stored.group),
            change,
            known_hosts(known),
            known.cluster.fallback_share_ppm,
        ),
    };
    let group = match next {
        Ok(group) => group,
        Err(why) => return Ok(Some(Err(why))),
    };
    let spec = match group.spec() {
        Ok(spec) => spec,
        Err(why) => return Ok(Some(Err(why))),
    };
    if let Some(why) = overbooked_error(&known.reservations, &change.group, spec.limits()) {
        return Ok(Some(Err(why)));
    }
    let compare = [
        match before.map_or(0, |stored| stored.changed) {
            0 => TransactionCondition::Absent(key.clone()),
            changed => TransactionCondition::Changed(key.clone(), changed),
        },
        // Reservations made since the check above may exceed the new limits.
        TransactionCondition::UnchangedSince(known.keys.reservations(), known.reservations_revision),
    ];
    let done =
        etcd.transact(&compare, &[EtcdOperation::put(&key, &etcd_values::write(&group), None)]).await?;
    Ok(done.succeeded.then_some(Ok(StoredGroup { group, spec, changed: done.revision })))
}

/// Result of a change, for the client.
pub(super) fn change_report(known: &SessionState, name: &str, group: &GroupValue) -> ClusterGroupChange {
    ClusterGroupChange {
        group: name.to_owned(),
        change: group.number,
        limits: group.limits.clone(),
        hosts: group.hosts,
        used: known.reservations.values().any(|reservations| has_group(reservations, name)),
        fallback_share_ppm: group.configured_share_ppm(),
    }
}

/// True if a host has the group. An older weir does not list its groups, so it counts as having
/// each.
fn has_group(reservations: &HostReservations, group: &str) -> bool {
    reservations.members.as_ref().is_none_or(|all| all.contains(group))
}

/// Value that marks a group as removed.
///
/// It replaces the limits instead of deleting the key: a concurrent change is then rejected, and no
/// host restores the limits.
fn removal_mark(known: &SessionState, name: &str, before: Option<&GroupValue>) -> Result<GroupValue, String> {
    let Some(before) = before.filter(|group| !group.removed) else {
        return Err(format!(
            "group {name}: cluster {:?} has no group of this name (`weir cluster status` lists them)",
            known.cluster.name
        ));
    };
    // Reservations of a stopped host wait for its next run.
    let uses_group = |reservations: &HostReservations| {
        has_group(reservations, name) || reservations.groups.contains_key(name)
    };
    let users: Vec<_> =
        known.reservations.iter().filter(|(_, reservations)| uses_group(reservations)).collect();
    if !users.is_empty() {
        let hosts: Vec<_> = users.iter().map(|(host, _)| host.as_str()).take(MAX_NAMED_HOSTS).collect();
        let more = match users.len() - hosts.len() {
            0 => String::new(),
            more => format!(" and {more} more hosts"),
        };
        return Err(format!(
            "group {name}: in use on {}{more} (remove [group.{name}] from the config files there, \
             and reload; `weir cluster forget HOST` deletes the keys of a host that will not \
             return)",
            hosts.join(", ")
        ));
    }
    let number = before.number.checked_add(1);
    let number = number.ok_or_else(|| too_many_changes(name))?;
    Ok(GroupValue { removed: true, ..GroupValue::of(&Limits::default(), 1, None, number, random() as u32) })
}

/// Deletes the oldest marks of removed groups, beyond [`MAX_REMOVAL_MARKS`].
pub(super) async fn delete_old_removal_marks(
    known: &SessionState,
    etcd: &mut EtcdClient,
) -> Result<(), EtcdError> {
    let removed = known.groups.iter().filter(|(_, stored)| stored.group.removed && stored.changed != 0);
    let mut removed: Vec<_> = removed.map(|(name, stored)| (stored.changed, name)).collect();
    removed.sort_unstable();
    for (changed, name) in removed.iter().rev().skip(MAX_REMOVAL_MARKS) {
        let compare = TransactionCondition::Changed(known.keys.key(EtcdKey::Group(name)), *changed);
        etcd.transact(&[compare], &[EtcdOperation::Delete(known.keys.single(EtcdKey::Group(name)))]).await?;
    }
    Ok(())
}

fn too_many_changes(name: &str) -> String {
    format!(
        "group {name}: the number of its changes has reached the maximum (use another group \
         name)"
    )
}

/// Number of hosts that take part, this one included: the initial number of hosts of a group. The
/// leader raises it when more take part.
fn known_hosts(known: &SessionState) -> u32 {
    let takes_part = |reservations: &HostReservations| {
        reservations.members.as_ref().is_none_or(|groups| !groups.is_empty())
    };
    let others = known
        .reservations
        .iter()
        .filter(|(host, reservations)| **host != known.cluster.host && takes_part(reservations));
    u32::try_from(others.count() + 1).unwrap_or(MAX_HOSTS).min(MAX_HOSTS)
}

fn changed_group(
    before: Option<&GroupValue>,
    change: &GroupLimitChange,
    known_hosts: u32,
    safe_share_ppm: Option<u32>,
) -> Result<GroupValue, String> {
    let name = &change.group;
    let number = before.map_or(0, |group| group.number);
    // A removed group starts again with defaults.
    let before = before.filter(|group| !group.removed);
    let limits = match before {
        Some(group) => *group.spec()?.limits(),
        None => Limits::default(),
    };
    let limits = limits.with_settings(&change.limits);
    let limits = limits.map_err(|invalid| format!("{}: {}", invalid.setting.name(), invalid.rule))?;
    let number = number.checked_add(1).ok_or_else(|| too_many_changes(name))?;
    let hosts = change.hosts.or(before.map(|group| group.hosts)).unwrap_or(known_hosts);
    if !(1..=MAX_HOSTS).contains(&hosts) {
        return Err(format!("hosts: {hosts} is not between 1 and {MAX_HOSTS}"));
    }
    let first = before.map_or(safe_share_ppm, GroupValue::configured_share_ppm);
    let share = change.safe_share_ppm.unwrap_or(first);
    let group = GroupValue::of(&limits, hosts, share, number, random() as u32);
    let group = if share.is_none() { group.with_default_share() } else { group };
    // Only for a new group can the config file's fallback share be the cause.
    let is_of_file = change.safe_share_ppm.is_none() && before.is_none() && safe_share_ppm.is_some();
    group.spec().map_err(|why| match is_of_file && why.starts_with("fallback-share: ") {
        true => format!("{why}; it is set in [cluster] of this host's config file"),
        false => why,
    })?;
    Ok(group)
}

/// Returns an error message if the hosts' reservations exceed these limits.
pub(super) fn overbooked_error(
    promises: &BTreeMap<String, HostReservations>,
    group: &str,
    limits: &Limits,
) -> Option<String> {
    let promised = promises.values().filter_map(|promises| promises.groups.get(group));
    let promised =
        promised.fold([0_u64; 2], |sum, more| [0, 1].map(|unit| sum[unit].saturating_add(more[unit])));
    for (unit, name) in [(0, "iops"), (1, "bps")] {
        if let Some(max_rate) = max_reservable(limits, unit).filter(|there| promised[unit] > *there) {
            return Some(format!(
                "group {group}: {name}-reservation: {} is reserved on its hosts, more than the \
                 limit of {max_rate} (lower reservations, or set a higher limit)",
                promised[unit]
            ));
        }
    }
    None
}

/// Deletes the keys of a host that is not running.
pub(super) async fn forget_host(
    known: &SessionState,
    etcd: &mut EtcdClient,
    host: &str,
) -> Result<Result<ForgottenHost, String>, EtcdError> {
    let report = known.keys.key(EtcdKey::Report(host));
    let ranges = [EtcdKey::Report(host), EtcdKey::Reservation(host), EtcdKey::Peer(host)]
        .map(|key| known.keys.single(key));
    let (_, found) = etcd.read(&ranges).await?;
    if found.iter().all(Vec::is_empty) {
        return Ok(Err(format!(
            "host {host}: cluster {:?} has no host of this name (`weir cluster status` lists them)",
            known.cluster.name
        )));
    }
    let rest = [known.keys.single(EtcdKey::Asks(host)), known.keys.below_host(host)];
    let ranges = ranges.into_iter().chain(rest);
    let deletions = ranges.map(EtcdOperation::Delete);
    let deletions: Vec<_> = deletions.collect();
    // The host must not be running: its keys would be deleted while it uses its quota.
    let absent = TransactionCondition::Absent(known.keys.key(EtcdKey::Host(host)));
    let result = etcd.transact(&[absent], &deletions).await?;
    Ok(match result.succeeded {
        true => Ok(ForgottenHost { host: host.to_owned(), key: report }),
        false => Err(format!(
            "host {host}: is running (stop weir on it; after a crash its name is released within a minute)"
        )),
    })
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, LimitPart, LimitSetting};

    use super::*;

    const IOPS: LimitSetting = LimitSetting::Limit(LimitKind::IopsTotal, LimitPart::Rate);

    fn of(limits: &[(LimitSetting, u64)]) -> GroupLimitChange {
        GroupLimitChange { group: "gold".to_owned(), limits: limits.to_vec(), ..GroupLimitChange::default() }
    }

    #[test]
    fn a_change_keeps_unnamed_limits_and_increments_the_number() {
        let first = changed_group(None, &of(&[(IOPS, 10_000)]), 16, Some(5000)).unwrap();
        assert_eq!((first.number, first.hosts, first.safe_share_ppm), (1, 16, Some(5000)));
        let hosts = GroupLimitChange { hosts: Some(100), ..of(&[]) };
        let second = changed_group(Some(&first), &hosts, 16, None).unwrap();
        assert_eq!((second.number, second.hosts, second.safe_share_ppm), (2, 100, Some(5000)));
        assert_eq!(second.limits, first.limits);
        let third = changed_group(Some(&second), &of(&[(IOPS, 0)]), 16, None).unwrap();
        assert!(third.limits.is_empty());
        let [burst, length] = [LimitPart::BurstRate, LimitPart::BurstLength]
            .map(|part| LimitSetting::Limit(LimitKind::IopsTotal, part));
        let bursting = changed_group(Some(&second), &of(&[(burst, 20_000), (length, 5)]), 16, None).unwrap();
        for setting in [burst, IOPS] {
            // As on one host: settings that need the removed one are removed as well.
            let without = changed_group(Some(&bursting), &of(&[(setting, 0)]), 16, None).unwrap();
            assert_eq!(
                without.limits,
                if setting == IOPS { third.limits.clone() } else { second.limits.clone() }
            );
        }
        let removed_group = GroupValue { removed: true, ..second.clone() };
        let anew = changed_group(Some(&removed_group), &of(&[(IOPS, 500)]), 16, None).unwrap();
        assert_eq!((anew.number, anew.hosts, anew.removed), (3, 16, false));
        assert!(changed_group(Some(&removed_group), &hosts, 16, None).unwrap().limits.is_empty());
        let share = |ppm| GroupLimitChange { safe_share_ppm: Some(ppm), ..of(&[]) };
        let fourth = changed_group(Some(&second), &share(Some(700)), 16, None).unwrap();
        assert_eq!(fourth.safe_share_ppm, Some(700));
        let fifth = changed_group(Some(&fourth), &share(None), 16, Some(5000)).unwrap();
        assert_eq!(
            (fifth.safe_share_ppm, fifth.has_default_share),
            (Some(2000), true),
            "20 % over 100 hosts"
        );
        assert_eq!(fifth.limits, second.limits);
    }

    #[test]
    fn a_rejected_change_has_no_effect() {
        let max = LimitSetting::Limit(LimitKind::IopsTotal, LimitPart::BurstRate);
        assert!(changed_group(None, &of(&[(max, 5)]), 16, None).is_err());
        assert!(
            changed_group(None, &GroupLimitChange { hosts: Some(0), ..of(&[(IOPS, 5)]) }, 16, None)
                .unwrap_err()
                .contains("hosts")
        );
        let message = changed_group(None, &of(&[(IOPS, 5)]), 16, None).unwrap_err();
        assert!(
            message.starts_with("iops-total: 5 is too low") && message.contains("at least 16"),
            "{message}"
        );
        assert!(changed_group(None, &of(&[(IOPS, 16)]), 16, None).is_ok());
        let message = changed_group(None, &of(&[(IOPS, 500)]), 16, Some(100_000)).unwrap_err();
        assert!(message.contains("fallback-share: 10 %") && message.contains("at most 6.25 %"), "{message}");
        assert!(changed_group(None, &of(&[(IOPS, 500)]), 16, Some(62_500)).is_ok());
    }
}
