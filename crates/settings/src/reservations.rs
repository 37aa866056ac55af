//! Checks that reservations fit into the limits around them, before any image is opened.
//!
//! Uses the policy's own tree, so that the daemon accepts the same. Only the daemon knows the
//! capacities of devices.

use std::collections::HashMap;

use policy::{
    throttle::{ReservationExceeded, ThrottleError, ThrottleTree},
    time::Instant,
};

use super::{ConfigError, ConfigWithOrigins, DiskConfig, GroupConfig, KeyTable};

/// Fails at the first reservation that exceeds a limit, groups before disks.
pub(crate) fn check_reservations(
    groups: &[ConfigWithOrigins<GroupConfig>],
    disks: &[ConfigWithOrigins<DiskConfig>],
) -> Result<(), ConfigError> {
    let mut tree = ThrottleTree::<()>::new(Instant::from_nanos(0));
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
    for disk in disks {
        let group = disk.group.as_ref().and_then(|group| nodes.get(group.as_str()).copied());
        let added = tree.add(group, disk.settings.limits, disk.settings.share());
        added.map(drop).or_else(|refused| overbooked_error(&refused, disk).map_or(Ok(()), Err))?;
    }
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
