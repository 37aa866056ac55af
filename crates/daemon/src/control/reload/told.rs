//! What a reload has changed, for whoever asked for it: `docs/reference/qmp.md` describes it.

use block::{disk::ErrorPolicies, layer::throttle::GroupSettings};
use image::qcow2::{CacheSettings, L2Size};
use policy::{
    prefetch,
    throttle::{Limits, Setting},
};
use serde_json::{Value, json};
use settings::on_error;

use crate::control::inventory::RunningDisk;

/// That a disk, a group or an export has come or gone: `change` is `added` or `removed`.
pub(super) fn listed(kind: &str, name: &str, change: &str) -> Value {
    json!({ "kind": kind, "name": name, "change": change })
}

/// That a disk of the config file is on another host.
pub(super) fn left_out(disk: &str, host: &str) -> Value {
    json!({ "kind": "disk", "name": disk, "change": "left-out", "host": host })
}

/// That keys, certificates or passwords could not be read again.
pub(super) fn not_read(why: &str) -> Value {
    json!({ "kind": "daemon", "name": "", "change": "not-read", "reason": why })
}

/// The same of an export, and where.
pub(super) fn exported((name, address): (String, String), disk: &str, change: &str) -> Value {
    json!({ "kind": "export", "name": name, "disk": disk, "address": address, "change": change })
}

/// A setting, its name and its value.
pub(crate) type Named = (&'static str, Value);

/// Those that differ.
pub(super) fn settings<'a>(
    kind: &'a str,
    name: &'a str,
    before: Vec<Named>,
    after: Vec<Named>,
) -> impl Iterator<Item = Value> + 'a {
    before.into_iter().zip(after).filter(|(before, after)| before != after).map(
        move |((setting, before), (_, after))| {
            json!({
                "kind": kind, "name": name, "change": "set",
                "setting": setting, "before": before, "after": after,
            })
        },
    )
}

pub(crate) fn of_limits(limits: &Limits) -> Vec<Named> {
    Setting::ALL.map(|setting| (setting.name(), json!(limits.get(setting)))).into()
}

pub(crate) fn of_throttle(settings: &GroupSettings, group: &str) -> Vec<Named> {
    let GroupSettings { limits, share, watermark } = settings;
    let others = [
        ("weight", json!(share.weight())),
        ("iops-reservation", json!(share.iops_reservation())),
        ("bps-reservation", json!(share.bps_reservation())),
        ("watermark", json!(watermark.percent())),
        ("group", json!(group)),
    ];
    of_limits(limits).into_iter().chain(others).collect()
}

/// Of [`Care::values`], those of qcow2 images alone.
pub(crate) const OF_QCOW2: [&str; 5] =
    ["l2-cache-size", "l2-cache-entry-size", "refcount-cache-size", "cache-size", "cache-clean-interval"];

/// What is set of a disk beside its limits.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Care {
    pub(crate) prefetch: prefetch::Settings,
    pub(crate) caches: CacheSettings,
    pub(crate) on_error: ErrorPolicies,
}

impl Care {
    pub(crate) fn now(running: &RunningDisk) -> Self {
        Self {
            prefetch: running.disk.prefetch().settings(),
            caches: running.caches.get(),
            on_error: running.disk.failures().policies(),
        }
    }

    pub(super) fn planned(disk: &settings::PlacedDisk) -> Self {
        Self { prefetch: disk.prefetch, caches: disk.qcow2.caches, on_error: disk.on_error }
    }

    pub(crate) fn values(&self) -> Vec<Named> {
        let Self { prefetch, caches, on_error } = self;
        let ahead = prefetch::Setting::ALL.map(|setting| (setting.name(), json!(prefetch.get(setting))));
        let l2 = match caches.l2 {
            None => Value::Null,
            Some(L2Size::Full) => json!("full"),
            Some(L2Size::Bytes(bytes)) => json!(bytes),
        };
        [(settings::prefetch::MODE, json!(prefetch.mode.to_string()))]
            .into_iter()
            .chain(ahead)
            .chain([
                ("l2-cache-size", l2),
                ("l2-cache-entry-size", json!(caches.entry_bytes)),
                ("refcount-cache-size", json!(caches.refcount_bytes)),
                ("cache-size", json!(caches.total_bytes)),
                ("cache-clean-interval", json!(caches.clean_interval.as_secs())),
                (on_error::READ, json!(on_error.read.name())),
                (on_error::WRITE, json!(on_error.write.name())),
            ])
            .collect()
    }
}
