//! Checks that reservations fit into the limits around them, before any image is opened.
//!
//! Uses the policy's own tree, so that the daemon accepts the same. Only the daemon knows the
//! capacities of devices.

use std::collections::HashMap;

use policy::{
    schedule::LimitSchedule,
    throttle::{NodeId, ReservationExceeded, ThrottleError, ThrottleTree},
    time::Instant,
};

use super::{ConfigError, ConfigWithOrigins, DiskConfig, GroupConfig, KeyTable, ThrottleConfig, schedule};

const START: Instant = Instant::from_nanos(0);

/// Fails at the first reservation that exceeds a limit: with the configured limits, then with each
/// entry of a schedule; groups before disks.
pub(crate) fn check_reservations(
    groups: &[ConfigWithOrigins<GroupConfig>],
    disks: &[ConfigWithOrigins<DiskConfig>],
) -> Result<(), ConfigError> {
    let mut tree = ThrottleTree::<()>::new(START);
    let mut nodes = HashMap::new();
    for group in groups {
        let parent = group.group.as_ref().and_then(|parent| nodes.get(parent.as_str()).copied());
        // Parents come first in `groups`, so their nodes exist.
        let added = tree.add(parent, group.settings.limits, group.settings.share());
        if let Ok(node) = added {
            nodes.insert(group.name.as_str(), node);
        }
        added.map(drop).or_else(|refused| overbooked_error(&refused, group).map_or(Ok(()), Err))?;
    }
    let mut disk_nodes = Vec::new();
    for disk in disks {
        let group = disk.group.as_ref().and_then(|group| nodes.get(group.as_str()).copied());
        // At the largest size: a limit for each GiB must cover a reservation at some size.
        let limits = disk.settings.limits.at_size_with(u64::MAX, disk.settings.share());
        let added = tree.add(group, limits, disk.settings.share());
        disk_nodes.extend(added.as_ref().ok().map(|node| (disk, *node)));
        added.map(drop).or_else(|refused| overbooked_error(&refused, disk).map_or(Ok(()), Err))?;
    }
    // Last, because the limits of an entry must cover all reservations below its group.
    for group in groups {
        if let Some(node) = nodes.get(group.name.as_str()) {
            check_entries(&mut tree, *node, group, &group.settings, &group.schedule)?;
        }
    }
    disk_nodes
        .into_iter()
        .try_for_each(|(disk, node)| check_entries(&mut tree, node, disk, &disk.settings, &disk.schedule))
}

/// Fails at the first entry of the schedule whose limits are below the reservations of a node.
fn check_entries<T>(
    tree: &mut ThrottleTree<()>,
    node: NodeId,
    placed: &ConfigWithOrigins<T>,
    settings: &ThrottleConfig,
    schedule: &LimitSchedule,
) -> Result<(), ConfigError> {
    let configured = tree.limits(node);
    for (index, entry) in schedule.entries.iter().enumerate() {
        // Contradictions are reported by `schedule::check`.
        let Ok(limits) = settings.limits.with_settings(&entry.limits) else { continue };
        let limits = limits.at_size_with(u64::MAX, settings.share());
        let configured = tree.configure(node, limits, settings.share(), START);
        if let Err(ThrottleError::Overbooked(overbooked)) = configured {
            return Err(schedule::entry_origin(placed, index).error(overbooked.to_string()));
        }
    }
    // Fitted when the node was added.
    let _ = tree.configure(node, configured, settings.share(), START);
    Ok(())
}

/// Error of an overbooked reservation. Other errors are reported elsewhere.
fn overbooked_error<T: KeyTable>(
    refused: &ThrottleError,
    placed: &ConfigWithOrigins<T>,
) -> Option<ConfigError> {
    let ThrottleError::Overbooked(overbooked @ ReservationExceeded { unit, .. }) = refused else {
        return None;
    };
    let rule = overbooked.to_string();
    let rule =
        // The origin already contains the key.
        rule.strip_prefix(unit.reservation()).and_then(|rule| rule.strip_prefix(": ")).unwrap_or(&rule);
    Some(placed.error(unit.reservation(), rule))
}
