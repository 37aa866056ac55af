//! `x-weir-remove-disk`: removes an unused disk and all its exports.
//!
//! QEMU's commands remove one object each, and a client that connects in between would prevent the
//! rest.

use std::rc::Rc;

use export::nbd::Removal;
use serde_json::{Value, json};

use crate::{
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct RemoveDisk {
    name: String,
}

impl QmpCommand for RemoveDisk {
    const NAME: &'static str = "x-weir-remove-disk";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { name: arguments.required("name")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        // An unavailable disk has no exports to check.
        if registry.abandon_unavailable(&self.name) {
            return Ok(json!({}));
        }
        let disk = registry.disks.get(&self.name)?;
        // After a snapshot they cannot be used without their overlay.
        if !disk.is_switched() && disk.lower_nodes.iter().any(|node| node.is_own_disk) {
            let why = format!("disk {}: it is above another node (`blockdev-del` removes it)", self.name);
            return Err(QmpError::generic(why));
        }
        drop(disk);
        // Exports that are ending have no connected clients, only requests in flight.
        for export in registry.exports.of_disk(&self.name).iter().filter(|export| !export.is_ending()) {
            export.check_unused().await.map_err(|error| QmpError::generic(error.to_string()))?;
        }
        registry.remove_disk_and_exports(&self.name, Removal::IfUnused).await?;
        Ok(json!({}))
    }
}
