//! Dirty bitmaps of disks: QEMU's `block-dirty-bitmap-*`.
//!
//! Source: `BlockDirtyBitmap…` of QEMU's `qapi/block-core.json`.

use std::rc::Rc;

use image::qcow2::bitmap::{BitmapChange, BitmapStatus, GRANULARITY_BITS, MergeSource, NewBitmap};
use serde_json::{Value, json};

use super::block::find_device;
use crate::{
    bitmaps::{change_bitmap, default_granularity_bits, explain},
    qmp::{
        arguments::{NodeReference, QmpArguments},
        command::QmpCommand,
        error::QmpError,
    },
    registry::Registry,
};

async fn change(registry: &Registry, node: &str, change: &BitmapChange) -> Result<Value, QmpError> {
    let running = find_device(registry, node)?;
    change_bitmap(registry, &running, change).await.map_err(QmpError::from_daemon_error)?;
    Ok(json!({}))
}

/// Returns a `BlockDirtyInfo`.
pub(super) fn dirty_info(status: &BitmapStatus) -> Value {
    let mut info = json!({
        "name": status.name,
        "count": status.marked_bytes.unwrap_or_default(),
        "granularity": status.granularity_bytes,
        "recording": status.is_recording,
        "busy": status.is_busy,
        "persistent": status.is_persistent,
    });
    // QEMU omits it otherwise.
    if status.is_inconsistent {
        info["inconsistent"] = true.into();
    }
    info
}

#[derive(Debug)]
pub(super) struct AddBitmap {
    node: String,
    name: String,
    granularity: Option<u64>,
    is_persistent: bool,
    is_disabled: bool,
}

impl QmpCommand for AddBitmap {
    const NAME: &'static str = "block-dirty-bitmap-add";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let granularity = arguments.optional::<u64>("granularity")?;
        let sizes = 1 << GRANULARITY_BITS.start()..=1 << GRANULARITY_BITS.end();
        if granularity.is_some_and(|size| !size.is_power_of_two() || !sizes.contains(&size)) {
            return Err(QmpError::rule("granularity", "is a power of two from 512 to 2147483648"));
        }
        Ok(Self {
            node: arguments.required("node")?,
            name: arguments.required("name")?,
            granularity,
            is_persistent: arguments.optional("persistent")?.unwrap_or(false),
            is_disabled: arguments.optional("disabled")?.unwrap_or(false),
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let running = find_device(&registry, &self.node)?;
        let granularity_bits = match self.granularity {
            Some(granularity) => granularity.trailing_zeros(),
            None => default_granularity_bits(&running.disk.image()),
        };
        let new = NewBitmap {
            name: self.name,
            granularity_bits,
            is_persistent: self.is_persistent,
            is_enabled: !self.is_disabled,
            is_marked: false,
        };
        change(&registry, &self.node, &BitmapChange::Add(new)).await
    }
}

/// Defines a command on one bitmap.
macro_rules! bitmap_command {
    ($type:ident, $command:literal, |$name:ident| $change:expr) => {
        #[derive(Debug)]
        pub(super) struct $type {
            node: String,
            name: String,
        }

        impl QmpCommand for $type {
            const NAME: &'static str = $command;

            fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
                Ok(Self { node: arguments.required("node")?, name: arguments.required("name")? })
            }

            async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
                let $name = self.name;
                change(&registry, &self.node, &$change).await
            }
        }
    };
}

bitmap_command!(RemoveBitmap, "block-dirty-bitmap-remove", |name| BitmapChange::Remove(name));
bitmap_command!(ClearBitmap, "block-dirty-bitmap-clear", |name| BitmapChange::Clear(name));
bitmap_command!(EnableBitmap, "block-dirty-bitmap-enable", |name| {
    BitmapChange::Enable { name, is_enabled: true }
});
bitmap_command!(DisableBitmap, "block-dirty-bitmap-disable", |name| {
    BitmapChange::Enable { name, is_enabled: false }
});

#[derive(Debug)]
pub(super) struct MergeBitmaps {
    node: String,
    target: String,
    /// Bitmaps of this node, or of the one that is named.
    sources: Vec<(Option<String>, String)>,
}

impl QmpCommand for MergeBitmaps {
    const NAME: &'static str = "block-dirty-bitmap-merge";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let mut sources = Vec::new();
        for source in arguments.references("bitmaps", "BlockDirtyBitmapOrStr")? {
            sources.push(match source {
                NodeReference::Name(name) => (None, name),
                NodeReference::Description(mut other) => {
                    let source = (Some(other.required("node")?), other.required("name")?);
                    other.finish()?;
                    source
                }
            });
        }
        Ok(Self { node: arguments.required("node")?, target: arguments.required("target")?, sources })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let mut sources = Vec::new();
        for (node, name) in self.sources {
            sources.push(match node.filter(|node| *node != self.node) {
                None => MergeSource::Own(name),
                Some(node) => {
                    let other = find_device(&registry, &node)?;
                    let bits = other.disk.bitmap_bits(&name).await;
                    let bits = bits.map_err(|error| explain(other.disk.name(), error));
                    MergeSource::Bits(bits.map_err(QmpError::from_daemon_error)?)
                }
            });
        }
        change(&registry, &self.node, &BitmapChange::Merge { name: self.target, sources }).await
    }
}
