//! Changes that apply to all hosts: new limits for a group, removal of a group, removal of a host.
//!
//! Each is one transaction that fails if the same was changed concurrently. Of two simultaneous
//! commands one is therefore rejected with an error.

use std::collections::BTreeMap;

use policy::{cluster::MAX_HOSTS, throttle::Limits};
use serde_json::{Value, json};

use super::{
    etcd::{Compare, Error, Etcd, Operation},
    keys::Key,
    known::Known,
    outside::draw,
    promising::{MOST_NAMED, most},
    stored::Stored,
    values::{self, Group, Promises},
    words::Change,
};

/// Initial number of hosts of a group; the leader raises it when more take part.
const FIRST_HOSTS: u32 = 16;
/// Number of removed groups to remember, so that a host that was away does not restore one.
const MOST_REMOVED: usize = 64;

type Done = Result<Value, String>;

/// Makes a change, or returns the reason against it. `None` if the state it was judged by is stale.
pub(super) async fn change(
    known: &Known,
    etcd: &mut Etcd,
    change: &Change,
) -> Result<Option<Result<Stored, String>>, Error> {
    let key = known.keys.key(Key::Group(&change.group));
    if let Some(why) = known.not_understood.get(&change.group) {
        let name = &change.group;
        return Ok(Some(Err(format!("group {name}: not changed, because the value at {key} in etcd {why}"))));
    }
    let before = known.groups.get(&change.group);
    let next = match change.removes {
        true => removed(known, &change.group, before.map(|stored| &stored.group)),
        false => next(before.map(|stored| &stored.group), change, known.cluster.safe_share_ppm),
    };
    let group = match next {
        Ok(group) => group,
        Err(why) => return Ok(Some(Err(why))),
    };
    let spec = match group.spec() {
        Ok(spec) => spec,
        Err(why) => return Ok(Some(Err(why))),
    };
    if let Some(why) = overcommitted(&known.promises, &change.group, spec.limits()) {
        return Ok(Some(Err(why)));
    }
    let compare = [
        match before.map_or(0, |stored| stored.changed) {
            0 => Compare::Absent(key.clone()),
            changed => Compare::Changed(key.clone(), changed),
        },
        // Reservations made since the check above may exceed the new limits.
        Compare::NotSince(known.keys.promises(), known.promises_at),
    ];
    let done = etcd.transact(&compare, &[Operation::put(&key, &values::write(&group), None)]).await?;
    Ok(done.held.then_some(Ok(Stored { group, spec, changed: done.revision })))
}

/// Result of a change, for the client.
pub(super) fn shown(known: &Known, name: &String, group: &Group) -> Value {
    let mut shown = json!({
        "group": name,
        "change": group.number,
        "limits": group.limits,
        "hosts": group.hosts,
        "used": known.promises.values().any(|promises| takes_part(promises, name)),
    });
    if let Some(ppm) = group.safe_share_ppm {
        shown["safe-share-ppm"] = ppm.into();
    }
    shown
}

/// An older weir does not list its groups: it counts as taking part.
fn takes_part(promises: &Promises, group: &str) -> bool {
    promises.members.as_ref().is_none_or(|all| all.contains(group))
}

/// Value that marks a group as removed.
///
/// It replaces the limits instead of deleting the key: a concurrent change is then rejected, and no
/// host restores the limits.
fn removed(known: &Known, name: &str, before: Option<&Group>) -> Result<Group, String> {
    let Some(before) = before.filter(|group| !group.removed) else {
        return Err(format!(
            "group {name}: cluster {:?} has no group of this name (`weir cluster status` lists them)",
            known.cluster.name
        ));
    };
    // Reservations of a stopped host wait for its next run.
    let has = |promises: &Promises| takes_part(promises, name) || promises.groups.contains_key(name);
    let has: Vec<_> = known.promises.iter().filter(|(_, promises)| has(promises)).collect();
    if !has.is_empty() {
        let hosts: Vec<_> = has.iter().map(|(host, _)| host.as_str()).take(MOST_NAMED).collect();
        let more = match has.len() - hosts.len() {
            0 => String::new(),
            more => format!(" and {more} more hosts"),
        };
        return Err(format!(
            "group {name}: in use on {}{more} (remove [group.{name}] from the config files there, and reload; `weir cluster forget HOST` deletes the keys of a host that will not return)",
            hosts.join(", ")
        ));
    }
    let number = before.number.checked_add(1);
    let number = number.ok_or_else(|| format!("group {name}: it was changed too often"))?;
    Ok(Group { removed: true, ..Group::of(&Limits::default(), FIRST_HOSTS, None, number, draw() as u32) })
}

/// Deletes the oldest marks of removed groups, beyond [`MOST_REMOVED`].
pub(super) async fn forget_removed(known: &Known, etcd: &mut Etcd) -> Result<(), Error> {
    let removed = known.groups.iter().filter(|(_, stored)| stored.group.removed && stored.changed != 0);
    let mut removed: Vec<_> = removed.map(|(name, stored)| (stored.changed, name)).collect();
    removed.sort_unstable();
    for (changed, name) in removed.iter().rev().skip(MOST_REMOVED) {
        let compare = Compare::Changed(known.keys.key(Key::Group(name)), *changed);
        etcd.transact(&[compare], &[Operation::Delete(known.keys.one(Key::Group(name)))]).await?;
    }
    Ok(())
}

fn next(before: Option<&Group>, change: &Change, safe_share_ppm: Option<u32>) -> Result<Group, String> {
    let name = &change.group;
    let number = before.map_or(0, |group| group.number);
    // A removed group starts again with defaults.
    let before = before.filter(|group| !group.removed);
    let limits = match before {
        Some(group) => *group.spec()?.limits(),
        None => Limits::default(),
    };
    let limits = limits.changed(&change.limits);
    let limits = limits.map_err(|invalid| format!("{}: {}", invalid.setting.name(), invalid.rule))?;
    let number = number.checked_add(1).ok_or_else(|| format!("group {name}: it was changed too often"))?;
    let hosts = change.hosts.or(before.map(|group| group.hosts)).unwrap_or(FIRST_HOSTS);
    if !(1..=MAX_HOSTS).contains(&hosts) {
        return Err(format!("hosts: {hosts} is not between 1 and {MAX_HOSTS}"));
    }
    let first = before.map_or(safe_share_ppm, |group| group.safe_share_ppm);
    let group = Group::of(&limits, hosts, change.safe_share_ppm.unwrap_or(first), number, draw() as u32);
    // Only for a new group can the config file's fallback share be the cause.
    let is_of_file = change.safe_share_ppm.is_none() && before.is_none() && safe_share_ppm.is_some();
    group.spec().map_err(|why| match is_of_file && why.starts_with("safe-share: ") {
        true => format!("{why}; it is set in [cluster] of this host's config file"),
        false => why,
    })?;
    Ok(group)
}

/// Returns an error message if the hosts' reservations exceed these limits.
pub(super) fn overcommitted(
    promises: &BTreeMap<String, Promises>,
    group: &str,
    limits: &Limits,
) -> Option<String> {
    let promised = promises.values().filter_map(|promises| promises.groups.get(group));
    let promised =
        promised.fold([0_u64; 2], |sum, more| [0, 1].map(|unit| sum[unit].saturating_add(more[unit])));
    for (unit, name) in [(0, "iops"), (1, "bps")] {
        if let Some(there) = most(limits, unit).filter(|there| promised[unit] > *there) {
            return Some(format!(
                "group {group}: {name}-reservation: {} is reserved on its hosts, more than the limit of {there} (lower reservations, or set a higher limit)",
                promised[unit]
            ));
        }
    }
    None
}

/// Deletes the keys of a host that is not running.
pub(super) async fn forget(known: &Known, etcd: &mut Etcd, host: &str) -> Result<Done, Error> {
    let report = known.keys.key(Key::Report(host));
    let left = [Key::Report(host), Key::Promise(host)].map(|key| known.keys.one(key));
    let (_, found) = etcd.read(&left).await?;
    if found.iter().all(Vec::is_empty) {
        return Ok(Err(format!(
            "host {host}: cluster {:?} has no host of this name (`weir cluster status` lists them)",
            known.cluster.name
        )));
    }
    let gone = left.into_iter().chain([known.keys.of_host(host)]).map(Operation::Delete);
    let gone: Vec<_> = gone.collect();
    // The host must not be running: its keys would be deleted while it uses its quota.
    let absent = Compare::Absent(known.keys.key(Key::Host(host)));
    let done = etcd.transact(&[absent], &gone).await?;
    Ok(match done.held {
        true => Ok(json!({ "host": host, "key": report })),
        false => Err(format!(
            "host {host}: is running (stop weir on it; after a crash its name is released within a minute)"
        )),
    })
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, Part, Setting};

    use super::*;

    const IOPS: Setting = Setting::Limit(LimitKind::IopsTotal, Part::Rate);

    fn of(limits: &[(Setting, u64)]) -> Change {
        Change { group: "gold".to_owned(), limits: limits.to_vec(), ..Change::default() }
    }

    #[test]
    fn a_change_keeps_what_it_does_not_name_and_counts() {
        let first = next(None, &of(&[(IOPS, 10_000)]), Some(5000)).unwrap();
        assert_eq!((first.number, first.hosts, first.safe_share_ppm), (1, FIRST_HOSTS, Some(5000)));
        let hosts = Change { hosts: Some(100), ..of(&[]) };
        let second = next(Some(&first), &hosts, None).unwrap();
        assert_eq!((second.number, second.hosts, second.safe_share_ppm), (2, 100, Some(5000)));
        assert_eq!(second.limits, first.limits);
        let third = next(Some(&second), &of(&[(IOPS, 0)]), None).unwrap();
        assert!(third.limits.is_empty());
        let [burst, length] =
            [Part::BurstRate, Part::BurstLength].map(|part| Setting::Limit(LimitKind::IopsTotal, part));
        let bursting = next(Some(&second), &of(&[(burst, 20_000), (length, 5)]), None).unwrap();
        for gone in [burst, IOPS] {
            // As on one host: settings that need the removed one are removed as well.
            let without = next(Some(&bursting), &of(&[(gone, 0)]), None).unwrap();
            assert_eq!(
                without.limits,
                if gone == IOPS { third.limits.clone() } else { second.limits.clone() }
            );
        }
        let gone = Group { removed: true, ..second.clone() };
        let anew = next(Some(&gone), &of(&[(IOPS, 500)]), None).unwrap();
        assert_eq!((anew.number, anew.hosts, anew.removed), (3, FIRST_HOSTS, false));
        assert!(next(Some(&gone), &hosts, None).unwrap().limits.is_empty());
        let share = |ppm| Change { safe_share_ppm: Some(ppm), ..of(&[]) };
        let fourth = next(Some(&second), &share(Some(700)), None).unwrap();
        assert_eq!(fourth.safe_share_ppm, Some(700));
        let fifth = next(Some(&fourth), &share(None), Some(5000)).unwrap();
        assert_eq!((fifth.safe_share_ppm, fifth.limits), (None, second.limits));
    }

    #[test]
    fn what_breaks_a_rule_changes_nothing() {
        let max = Setting::Limit(LimitKind::IopsTotal, Part::BurstRate);
        assert!(next(None, &of(&[(max, 5)]), None).is_err());
        assert!(
            next(None, &Change { hosts: Some(0), ..of(&[(IOPS, 5)]) }, None).unwrap_err().contains("hosts")
        );
        let said = next(None, &of(&[(IOPS, 5)]), None).unwrap_err();
        assert!(said.starts_with("iops-total: 5 is too low") && said.contains("at least 16"), "{said}");
        assert!(next(None, &of(&[(IOPS, 16)]), None).is_ok());
        let said = next(None, &of(&[(IOPS, 500)]), Some(100_000)).unwrap_err();
        assert!(said.contains("safe-share: 10 %") && said.contains("at most 6.25 %"), "{said}");
        assert!(next(None, &of(&[(IOPS, 500)]), Some(62_500)).is_ok());
    }
}
