//! `x-weir-remove-disk`: a disk and all its exports, where nobody uses any of them.
//!
//! QEMU's commands remove one thing each, and a client that comes in between would be in the way
//! of the rest.

use std::rc::Rc;

use export::nbd::Removal;
use serde_json::{Value, json};

use crate::control::{
    inventory::{Door, Inventory, RunningExport},
    qmp::{arguments::Arguments, command::Command, error::Error},
};

#[derive(Debug)]
pub(super) struct RemoveDisk {
    name: String,
}

impl Command for RemoveDisk {
    const NAME: &'static str = "x-weir-remove-disk";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { name: arguments.required("name")? })
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        let disk = inventory.disk(&self.name)?;
        if disk.below.iter().any(|node| node.stays) {
            let why = format!("disk {}: it lies on another node (`blockdev-del` takes it off)", self.name);
            return Err(Error::generic(why));
        }
        let exports: Vec<_> =
            inventory.exports().into_iter().filter(|export| Rc::ptr_eq(&export.disk, &disk)).collect();
        drop(disk);
        for export in &exports {
            export.check_unused().await.map_err(|error| Error::generic(error.to_string()))?;
        }
        remove_exports(&inventory, &exports).await?;
        drop(exports);
        inventory.remove_disk(&self.name).await?;
        Ok(json!({}))
    }
}

/// All, or none where somebody has come meanwhile.
async fn remove_exports(inventory: &Rc<Inventory>, exports: &[Rc<RunningExport>]) -> Result<(), Error> {
    let mut ends = Vec::new();
    // Those over NBD can be put back.
    let (nbd, own): (Vec<_>, Vec<_>) =
        exports.iter().partition(|export| matches!(export.door, Door::Nbd(..)));
    let mut refused = None;
    for export in nbd.iter().chain(&own) {
        match inventory.removal(&export.id, Removal::Safe) {
            Ok(end) => ends.push((export, end)),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    for (export, end) in ends {
        end.await;
        if refused.is_some()
            && let (Door::Nbd(serving, _), Some(new)) = (&export.door, &export.new)
        {
            inventory.add_export(serving, new.clone())?;
        }
    }
    refused.map_or(Ok(()), |refused| Err(refused.into()))
}
