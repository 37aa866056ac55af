//! The line `ready`, with the exports' URIs and the limits, and the message to the service manager.

use console::figures;
use control::{notify, registry::Registry};
use policy::throttle::{LimitSetting, Limits};
use sd_notify::NotifyState;

/// Number of URIs in the line `ready`.
const MAX_URIS_SHOWN: usize = 16;
/// Largest number of disks and groups whose limits that line shows.
const MAX_LIMITS_SHOWN: usize = 16;

/// Limits of the first groups and disks that have some: `gold: iops 2000; vm1: bps 10M`.
fn limits(registry: &Registry) -> Option<String> {
    let groups = registry.groups.all();
    let groups = groups.iter().map(|group| (group.name().to_owned(), group.limits()));
    let disks = registry.disks.all();
    let disks =
        disks.iter().map(|running| (running.disk.name().to_string(), running.disk.throttle().limits()));
    let limited = groups.chain(disks).filter(|(_, limits)| !limits.is_unlimited());
    let shown = |(name, limits): (String, Limits)| format!("{name}: {}", figures::limits(&by_name(&limits)));
    let all: Vec<_> = limited.collect();
    let more = all.len().saturating_sub(MAX_LIMITS_SHOWN);
    let mut lines: Vec<_> = all.into_iter().take(MAX_LIMITS_SHOWN).map(shown).collect();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    (!lines.is_empty()).then(|| lines.join("; "))
}

fn by_name(limits: &Limits) -> figures::SettingValues {
    let set = LimitSetting::ALL.iter().map(|&setting| (setting.name().to_owned(), limits.get(setting)));
    set.filter(|(_, value)| *value != 0).collect()
}

pub(super) fn announce(uris: &[String], registry: &Registry) {
    // Bounded: a daemon may have thousands of exports, and the log line must stay readable.
    let shown = uris[..uris.len().min(MAX_URIS_SHOWN)].join(" ");
    let limits = limits(registry);
    let limits = limits.as_deref();
    match uris.len().saturating_sub(MAX_URIS_SHOWN) {
        0 => tracing::info!(limits, exports = %shown, "ready"),
        more => tracing::info!(limits, more, exports = %shown, "ready"),
    }
    notify::send(&[NotifyState::Ready]);
}
