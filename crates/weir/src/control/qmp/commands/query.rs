//! What a client may ask about disks: `query-block`, `query-named-block-nodes`, `query-blockstats`.
//!
//! A disk is a device and a node at once, both called by its name. What weir does not know or does not have is absent: a zero
//! would say that it had been counted.

use std::{os::unix::fs::MetadataExt as _, rc::Rc};

use block::reactor;
use serde_json::{Map, Value, json};

use crate::control::{
    inventory::{Inventory, RunningDisk},
    qmp::{arguments::Arguments, command::Command, error::Error, settings},
};

/// `query-block`.
#[derive(Debug)]
pub(super) struct QueryBlock;

impl Command for QueryBlock {
    const NAME: &'static str = "query-block";

    fn read(_: &mut Arguments) -> Result<Self, Error> {
        Ok(Self)
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        let mut list = Vec::new();
        for running in inventory.disks() {
            list.push(json!({
                "device": &**running.disk.name(),
                // QEMU's own answer to everything.
                "type": "unknown",
                "removable": false,
                "locked": false,
                "inserted": node(&running).await,
            }));
        }
        Ok(Value::Array(list))
    }
}

/// `query-named-block-nodes`.
#[derive(Debug)]
pub(super) struct QueryNamedBlockNodes;

impl Command for QueryNamedBlockNodes {
    const NAME: &'static str = "query-named-block-nodes";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        // Leaves out backing images, of which there are none.
        arguments.optional::<bool>("flat")?;
        Ok(Self)
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        let mut list = Vec::new();
        for running in inventory.disks() {
            list.push(node(&running).await);
        }
        Ok(Value::Array(list))
    }
}

/// A `BlockDeviceInfo`.
async fn node(running: &RunningDisk) -> Value {
    let disk = &running.disk;
    let own = disk.throttle().settings().limits;
    // QEMU knows one level of limits. A disk's own say most about it; one that has none is held by its group.
    let group = disk.throttle().group().filter(|_| own.is_unlimited());
    let limits = group.as_ref().map_or(own, |group| group.settings().limits);
    let mut info = settings::of_device(&limits);
    if let Some(group) = group {
        info.insert("group".to_owned(), json!(group.name()));
    } else if !own.is_unlimited() {
        info.insert("group".to_owned(), json!(&**disk.name()));
    }
    let cache = running.cache;
    let file = running.image.to_string();
    let others = json!({
        "node-name": &**disk.name(),
        "drv": driver(running),
        "file": file,
        "ro": disk.image().is_read_only(),
        "active": true,
        "encrypted": false,
        "detect_zeroes": "off",
        "write_threshold": 0,
        "backing_file_depth": 0,
        "cache": {
            "writeback": cache.has_write_cache(),
            "direct": cache.is_direct(),
            "no-flush": cache == block::storage::CacheMode::Unsafe,
        },
        "image": image(running, &file).await,
    });
    if let Value::Object(others) = others {
        info.extend(others);
    }
    Value::Object(info)
}

/// An `ImageInfo`.
async fn image(running: &RunningDisk, file: &str) -> Value {
    let mut info = Map::new();
    info.insert("filename".to_owned(), json!(file));
    info.insert("format".to_owned(), json!(driver(running)));
    info.insert("virtual-size".to_owned(), json!(running.disk.size_bytes()));
    if let Some(path) = running.image.path().map(ToOwned::to_owned) {
        // A file system may take its time.
        let metadata = reactor::blocking(move || std::fs::metadata(path)).await;
        if let Ok(metadata) = metadata.as_ref().map(|metadata| metadata.blocks() * 512) {
            info.insert("actual-size".to_owned(), json!(metadata));
        }
    }
    Value::Object(info)
}

/// The name QEMU has for what answers the disk's requests, or weir's own.
fn driver(running: &RunningDisk) -> &'static str {
    match running.image.to_string().split(':').next() {
        _ if running.image.path().is_some() => "raw",
        Some("null") => "null-co",
        _ => "x-weir-memory",
    }
}

/// `query-blockstats`.
#[derive(Debug)]
pub(super) struct QueryBlockstats;

impl Command for QueryBlockstats {
    const NAME: &'static str = "query-blockstats";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        // Asks for nodes that no device shows; here every node is a device.
        arguments.optional::<bool>("query-nodes")?;
        Ok(Self)
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        Ok(inventory.disks().iter().map(|running| statistics(running)).collect())
    }
}

/// A `BlockStats`. Operations and bytes are as clients asked, discards among the writes.
fn statistics(running: &RunningDisk) -> Value {
    let totals = running.disk.totals();
    json!({
        "device": &**running.disk.name(),
        "node-name": &**running.disk.name(),
        "stats": {
            "rd_operations": totals.reads,
            "wr_operations": totals.writes,
            "rd_bytes": totals.read_bytes,
            "wr_bytes": totals.written_bytes,
            "x-weir-merged": totals.merged_requests,
        },
    })
}
