//! `block_set_io_throttle`: QEMU's oldest command for limits, which libvirt and Proxmox use.
//!
//! ```text
//!   group given ────────► moves the disk into it (added if missing) and sets the group's limits
//!   else, in a group ───► sets the limits of the disk's group
//!   else ───────────────► sets the disk's own limits
//!   all six zero ───────► moves the disk out of its group and removes its limits
//! ```
//!
//! In QEMU a disk without a group is an implicit group with its name, so the disk's own name as
//! `group` means the disk alone. Limits of groups above its group stay in force.

use std::{rc::Rc, sync::Arc};

use block::{
    disk::Disk,
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use policy::throttle::{LimitKind, LimitPart, LimitSetting, Limits};
use serde_json::{Value, json};

use super::set;
use crate::{
    change::RegistryChange,
    qmp::{
        arguments::QmpArguments,
        command::QmpCommand,
        error::QmpError,
        identifier,
        settings::{LimitChanges, SettingNaming},
    },
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct BlockSetIoThrottle {
    disk: String,
    group: Option<String>,
    changes: LimitChanges,
}

impl QmpCommand for BlockSetIoThrottle {
    const NAME: &'static str = "block_set_io_throttle";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let disk = read_disk_name(arguments)?;
        let group = arguments.optional::<String>("group")?;
        if let Some(group) = &group {
            identifier::check_name("group", group)?;
        }
        let changes = LimitChanges::read(arguments, SettingNaming::Device)?;
        for kind in LimitKind::ALL {
            let mandatory = LimitSetting::Limit(kind, LimitPart::Rate);
            if !changes.contains(mandatory) {
                return Err(QmpError::missing(&SettingNaming::Device.name(mandatory)));
            }
        }
        Ok(Self { disk, group, changes })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let running = registry.disks.get(&self.disk)?;
        let disk = &running.disk;
        let limits = self.changes.apply_to(Limits::default())?;
        let current = disk.throttle().group();
        let placed = (disk.throttle().settings(), current.clone());
        let entered = self.group.as_ref().and_then(|name| registry.groups.get(name).ok());
        // Kept for the roll-back, as the command may overwrite the group's limits.
        let entered = entered.map(|group| (group.settings(), group));
        let changed = match (&self.group, current) {
            _ if limits.is_unlimited() => set_alone(disk, limits)?,
            (Some(name), _) if *name == self.disk => set_alone(disk, limits)?,
            (None, None) => set_alone(disk, limits)?,
            (Some(name), _) => enter_group(&registry, disk, name, limits)?,
            (None, Some(group)) => set_group_limits(&group, limits)?,
        };
        if let Err(why) = set::publish_reservations(&registry).await {
            disk.throttle().configure_and_move(placed.0, placed.1.as_ref())?;
            if let Some((before, group)) = entered {
                group.set(before)?;
            }
            set::publish_rolled_back(&registry).await;
            return Err(why);
        }
        // The event may name only the group, while the disk has entered or left one.
        if changed != self.disk
            && let Err(error) = registry.check_device_of(&self.disk)
        {
            tracing::warn!("{error:#}");
        }
        registry.notify(&RegistryChange::SettingsChanged { name: changed });
        Ok(json!({}))
    }
}

/// Disk named by `device` or `id`: both are its name here.
pub(super) fn read_disk_name(arguments: &mut QmpArguments) -> Result<String, QmpError> {
    let device = arguments.optional("device")?;
    let id = arguments.optional("id")?;
    match (device, id) {
        (Some(name), None) | (None, Some(name)) => Ok(name),
        _ => Err(QmpError::generic("Need exactly one of 'device' and 'id'")),
    }
}

/// Moves the disk out of its group. Returns the name whose settings changed, like
/// [`set_group_limits`] and [`enter_group`].
fn set_alone(disk: &Disk, limits: Limits) -> Result<String, QmpError> {
    let member = disk.throttle();
    member.configure_and_move(DiskSettings { limits, ..member.settings() }, None)?;
    Ok(disk.name().to_string())
}

fn set_group_limits(group: &Arc<ThrottleGroup>, limits: Limits) -> Result<String, QmpError> {
    group.set(GroupSettings { limits, ..group.settings() })?;
    Ok(group.name().to_owned())
}

/// Moves the disk into a group and sets the group's limits. The disk's own limits are removed: in
/// QEMU's model they belonged to its implicit group.
fn enter_group(registry: &Registry, disk: &Disk, name: &str, limits: Limits) -> Result<String, QmpError> {
    let disk_settings = DiskSettings { limits: Limits::default(), ..disk.throttle().settings() };
    let Ok(group) = registry.groups.get(name) else {
        let group = ThrottleGroup::new(name, GroupSettings { limits, ..GroupSettings::default() }, None)?;
        registry.add_group(&group)?;
        if let Err(refused) = disk.throttle().configure_and_move(disk_settings, Some(&group)) {
            registry.remove_group(name)?;
            return Err(refused.into());
        }
        return Ok(name.to_owned());
    };
    let before = group.settings();
    group.set(GroupSettings { limits, ..before })?;
    if let Err(refused) = disk.throttle().configure_and_move(disk_settings, Some(&group)) {
        // Cannot fail: the previous settings were valid.
        let restored = group.set(before);
        debug_assert!(restored.is_ok(), "{restored:?}");
        return Err(refused.into());
    }
    Ok(name.to_owned())
}
