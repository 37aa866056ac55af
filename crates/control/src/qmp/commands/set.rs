//! `x-weir-set`: one command for all settings of a disk or group.
//!
//! Used by `weir throttle` and `weir prefetch`.

use std::rc::Rc;

use block::layer::throttle::{GroupSettings, ThrottleGroup};
use image::qcow2::CacheSettings;
use serde_json::{Value, json};

use crate::{
    change::RegistryChange,
    latency_targets,
    qmp::{
        arguments::QmpArguments,
        caches::{self, Qcow2CacheChanges},
        command::QmpCommand,
        error::{QmpError, QmpErrorClass},
        errors::ErrorPolicyChanges,
        json::excerpt,
        prefetch::PrefetchChanges,
        settings::{LimitChanges, SettingChanges, SettingNaming},
    },
    registry::{Registry, RunningDisk},
};

#[derive(Debug)]
pub(super) struct SetSettings {
    name: String,
    /// The empty name removes the disk from its group.
    group: Option<String>,
    changes: SettingChanges,
    caches: Qcow2CacheChanges,
    prefetch: PrefetchChanges,
    policies: ErrorPolicyChanges,
}

impl QmpCommand for SetSettings {
    const NAME: &'static str = "x-weir-set";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let name = arguments.required("name")?;
        let group = arguments.optional("group")?;
        let limits = LimitChanges::read(arguments, SettingNaming::Plain)?;
        let changes = SettingChanges::read_own(arguments, "")?;
        let caches = Qcow2CacheChanges::read(arguments)?;
        let prefetch = PrefetchChanges::read(arguments, "")?;
        let policies = ErrorPolicyChanges::read(arguments, "")?;
        Ok(Self { name, group, changes: changes.with_limits(limits), caches, prefetch, policies })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        match registry.groups.get(&self.name) {
            Ok(group) => self.set_group(&registry, &group).await?,
            Err(_) => self.set_disk(&registry).await?,
        }
        if self.changes.changes_reservation() {
            registry.forget_unmet(&self.name);
        }
        registry.notify(&RegistryChange::SettingsChanged { name: self.name });
        Ok(json!({}))
    }
}

impl SetSettings {
    async fn set_group(&self, registry: &Registry, group: &ThrottleGroup) -> Result<(), QmpError> {
        if !self.caches.is_empty() {
            return Err(QmpError::generic(format!(
                "group {}: it has no caches; its disks' images have",
                group.name()
            )));
        }
        if !self.prefetch.is_empty() {
            return Err(QmpError::generic(format!(
                "group {}: prefetch is a setting of its disks",
                group.name()
            )));
        }
        if !self.policies.is_empty() {
            return Err(QmpError::generic(format!(
                "group {}: error policies are settings of its disks (set them for each)",
                group.name()
            )));
        }
        let parent = group.parent().map_or("", |parent| parent.name());
        if self.group.as_deref().is_some_and(|wanted| wanted != parent) {
            let rule = "cannot be changed for a group (only a disk can change its group)";
            return Err(QmpError::rule("group", rule));
        }
        set_group(registry, group, self.changes.apply_to(group.settings())?).await
    }

    async fn set_disk(&self, registry: &Registry) -> Result<(), QmpError> {
        let running = registry.disks.get(&self.name)?;
        let disk = &running.disk;
        // The disk may leave its group.
        registry.quotas.count_before_change(disk);
        let caches = self.checked_caches(&running)?;
        let prefetch = self.prefetch.apply_to(disk.prefetch().settings())?;
        let before = disk.throttle().settings();
        let settings = self.changes.apply_to_disk(before)?;
        let group = match self.group.as_deref() {
            None => disk.throttle().group(),
            Some("") => None,
            Some(name) => Some(registry.groups.get(name).map_err(|_| no_group_error(registry, name))?),
        };
        // An unchanged command must not fail because of an earlier watermark.
        let changes_watermark = self.group.is_some() || settings.watermark != before.watermark;
        if let Some(group) = group.as_ref().filter(|_| changes_watermark && settings.watermark.percent() > 0)
        {
            let rule = format_args!(
                "cannot be the disk's own: it is in group {0:?}, which has the watermark for its \
                 members (set it at {0:?})",
                group.name()
            );
            return Err(QmpError::rule("watermark", rule));
        }
        if settings.latency != before.latency || self.group.is_some() {
            latency_targets::check_above(&settings.latency, group.as_ref())
                .map_err(|rule| QmpError::rule("latency-target", rule))?;
        }
        let of_disk =
            |error: &dyn std::fmt::Display| QmpError::generic(format!("disk {}: {error}", self.name));
        let before = (disk.prefetch().settings(), running.caches.get());
        // The order is: steps that can fail and be undone first, error policies (infallible) last.
        disk.prefetch().set(prefetch).map_err(|invalid| of_disk(&invalid))?;
        if let Some(caches) = caches {
            running.set_caches(caches).await.map_err(|error| of_disk(&error))?;
        }
        let changed = disk.reserve_memory().map_err(|error| of_disk(&error));
        let placed = (disk.throttle().settings(), disk.throttle().group());
        let mut changed =
            changed.and_then(|()| Ok(disk.throttle().configure_and_move(settings, group.as_ref())?));
        if changed.is_ok() {
            changed = publish_reservations(registry).await;
            if changed.is_err() {
                disk.throttle().configure_and_move(placed.0, placed.1.as_ref())?;
                publish_rolled_back(registry).await;
            }
        }
        if changed.is_err() {
            disk.prefetch().set(before.0).expect("it was in force");
            if caches.is_some() {
                running.set_caches(before.1).await.map_err(|error| of_disk(&error))?;
            }
            disk.reserve_memory().map_err(|error| of_disk(&error))?;
        } else {
            self.policies.apply_to(disk.failures());
        }
        changed
    }

    fn checked_caches(&self, running: &RunningDisk) -> Result<Option<CacheSettings>, QmpError> {
        if self.caches.is_empty() {
            return Ok(None);
        }
        let image = running.disk.image();
        let qcow2 = caches::qcow2_image(&image, &self.name)?;
        let settings = self.caches.apply_to(running.caches.get());
        // Checked before anything changes.
        settings
            .sizes(&qcow2.header())
            .map_err(|error| QmpError::generic(format!("disk {}: {error}", self.name)))?;
        Ok(Some(settings))
    }
}

/// Applies the settings if its reservations fit beside those of other hosts; otherwise changes
/// nothing.
pub(super) async fn set_group(
    registry: &Registry,
    group: &ThrottleGroup,
    settings: GroupSettings,
) -> Result<(), QmpError> {
    let before = group.settings();
    if settings.latency != before.latency {
        latency_targets::check_above(&settings.latency, group.parent())
            .and_then(|()| latency_targets::check_below(registry, &settings.latency, group))
            .map_err(|rule| QmpError::rule("latency-target", rule))?;
    }
    group.set(settings)?;
    let published = publish_reservations(registry).await;
    if published.is_err() {
        // The quota may have changed in the meantime; keep it.
        let limits = if group.quota_lease().is_some() { group.settings().limits } else { before.limits };
        group.set(GroupSettings { limits, ..before })?;
        publish_rolled_back(registry).await;
    }
    published
}

/// Publishes the reservations to all hosts of the cluster; fails if they do not fit.
pub(super) async fn publish_reservations(registry: &Registry) -> Result<(), QmpError> {
    let Some(cluster) = registry.cluster().cloned() else { return Ok(()) };
    cluster.record_reservations_now(registry).await.map_err(QmpError::generic)
}

/// Publishes the reservations after a roll-back.
pub(super) async fn publish_rolled_back(registry: &Registry) {
    if let Some(cluster) = registry.cluster() {
        cluster.record_rolled_back_reservations(registry).await;
    }
}

/// Error for an unknown group.
fn no_group_error(registry: &Registry, name: &str) -> QmpError {
    let name = excerpt(name);
    QmpError::new(
        QmpErrorClass::DeviceNotFound,
        match registry.disks.get(&name) {
            Ok(_) => format!("{name:?} is a disk, not a group (name a group)"),
            Err(_) => {
                format!("there is no group {name:?} (`weir status` lists them; `weir group add` makes one)")
            }
        },
    )
}
