//! `x-weir-remove-disk`: removes an unused disk and all its exports.
//!
//! QEMU's commands remove one object each, and a client that connects in between would prevent the
//! rest.

use std::rc::Rc;

use export::nbd::Removal;
use serde_json::{Value, json};

use crate::{
    qmp::{arguments::Arguments, command::Command, error::Error},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct RemoveDisk {
    name: String,
}

impl Command for RemoveDisk {
    const NAME: &'static str = "x-weir-remove-disk";
    const CHANGES: bool = true;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { name: arguments.required("name")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        // An unavailable disk has no exports to check.
        if registry.give_up_unopened(&self.name) {
            return Ok(json!({}));
        }
        let disk = registry.disks.get(&self.name)?;
        if disk.below.iter().any(|node| node.stays) {
            let why = format!("disk {}: it is above another node (`blockdev-del` removes it)", self.name);
            return Err(Error::generic(why));
        }
        drop(disk);
        // Exports that are ending have no connected clients, only requests in flight.
        for export in registry.exports.of_disk(&self.name).iter().filter(|export| !export.is_ending()) {
            export.check_unused().await.map_err(|error| Error::generic(error.to_string()))?;
        }
        registry.remove_disk_and_exports(&self.name, Removal::IfUnused).await?;
        Ok(json!({}))
    }
}
