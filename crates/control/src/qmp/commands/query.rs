//! Queries of disks: `query-block`, `query-named-block-nodes`, `query-blockstats`.
//!
//! A disk is a device and a node at the same time, both with its name. Unknown values are omitted.

use std::rc::Rc;

use ::settings::image_info::{add_header_facts, referenced_path};
use block::measures::OperationClass;
use image::{
    Image,
    qcow2::header::{EncryptionMethod, Qcow2Header},
};
use policy::time::Duration;
use serde_json::{Value, json};

use super::bitmap;
use crate::{
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError, errors, settings},
    registry::{Registry, RunningDisk},
};

/// Time that a query waits for the file system of a disk, before it returns the last known figure.
const SIZE_TIMEOUT: Duration = Duration::from_secs(1);

/// Nodes of all disks, queried concurrently: several unresponsive file systems cost the time of
/// one.
async fn all_nodes(registry: &Registry) -> Vec<(Rc<RunningDisk>, Value)> {
    let begin = |running: Rc<RunningDisk>| {
        let of_task = Rc::clone(&running);
        (running, reactor::spawn_joinable(async move { block_device_info(&of_task).await }))
    };
    let tasks: Vec<_> = registry.disks.all().into_iter().map(begin).collect();
    let mut nodes = Vec::new();
    for (running, node) in tasks {
        nodes.push((running, node.await));
    }
    nodes
}

query!(QueryBlock, "query-block", |registry| {
    let mut list = Vec::new();
    for (running, node) in all_nodes(&registry).await {
        let mut entry = json!({
            "device": &**running.disk.name(),
            // The value that QEMU always returns.
            "type": "unknown",
            "removable": false,
            "locked": false,
            "inserted": node,
        });
        if let Some(status) = errors::io_status(running.disk.failures()) {
            entry["io-status"] = json!(status);
        }
        list.push(entry);
    }
    Value::Array(list)
});

#[derive(Debug)]
pub(super) struct QueryNamedBlockNodes;

impl QmpCommand for QueryNamedBlockNodes {
    const NAME: &'static str = "query-named-block-nodes";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        // Omits backing images, which are no nodes here.
        arguments.optional::<bool>("flat")?;
        Ok(Self)
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let list = all_nodes(&registry).await.into_iter().map(|(_, node)| node).collect();
        Ok(Value::Array(list))
    }
}

/// Returns a `BlockDeviceInfo`.
async fn block_device_info(running: &RunningDisk) -> Value {
    let disk = &running.disk;
    let disk_limits = disk.throttle().limits();
    // QEMU has one level of limits: the disk's own, or else its group's.
    let group = disk.throttle().group().filter(|_| disk_limits.is_unlimited());
    let limits = group.as_ref().map_or(disk_limits, |group| group.limits());
    let mut info = settings::device_limits(&limits);
    if let Some(group) = group {
        info.insert("group".to_owned(), json!(group.name()));
    } else if !disk_limits.is_unlimited() {
        info.insert("group".to_owned(), json!(&**disk.name()));
    }
    let cache = running.config().cache;
    let file = running.config().image.to_string();
    let header = header(&disk.image());
    let members = json!({
        "node-name": &**disk.name(),
        "drv": driver_name(running),
        "file": file,
        "ro": disk.image().is_read_only(),
        "active": true,
        "encrypted": header.as_ref().is_some_and(|header| header.crypt != EncryptionMethod::None),
        "detect_zeroes": disk.detect_zeroes().name(),
        "write_threshold": 0,
        "backing_file_depth": backing_depth(&disk.image()),
        "cache": {
            "writeback": cache.has_write_cache(),
            "direct": cache.is_direct(),
            "no-flush": cache == storage::CacheMode::Unsafe,
        },
        "image": image_info(running, &file).await,
    });
    if let Value::Object(members) = members {
        info.extend(members);
    }
    if let Some(backing) = header.as_ref().and_then(|header| header.backing.as_ref()) {
        info.insert("backing_file".to_owned(), json!(backing.name));
    }
    // The disk itself can be used without them. Their storage may not answer.
    let bitmaps = match reactor::timeout(SIZE_TIMEOUT, disk.bitmap_statuses()).await {
        Ok(Ok(bitmaps)) => bitmaps,
        Ok(Err(error)) => {
            tracing::warn!(disk = %disk.name(), "the bitmaps of a disk cannot be read: {error}");
            Vec::new()
        }
        Err(_) => {
            tracing::warn!(disk = %disk.name(), "the bitmaps of a disk cannot be read: no answer of its storage");
            Vec::new()
        }
    };
    if !bitmaps.is_empty() {
        info.insert("dirty-bitmaps".to_owned(), bitmaps.iter().map(bitmap::dirty_info).collect());
    }
    Value::Object(info)
}

fn header(image: &Image) -> Option<Qcow2Header> {
    match image {
        Image::Qcow2(qcow2) => Some(qcow2.header()),
        Image::Raw(_) => None,
    }
}

fn backing_depth(image: &Image) -> usize {
    image.chain().skip(1).count()
}

/// Returns an `ImageInfo`, without those of its backing chain.
async fn image_info(running: &RunningDisk, file: &str) -> Value {
    let mut info = json!({
        "filename": file,
        "format": driver_name(running),
        "virtual-size": running.disk.size_bytes(),
    });
    if let Some(header) = header(&running.disk.image()) {
        add_header_facts(&header, &mut info);
        if let (Some(path), Some(backing)) = (running.config().image.path(), &header.backing) {
            info["full-backing-filename"] = json!(referenced_path(path, &backing.name).display().to_string());
        }
    }
    let deadline = reactor::now() + SIZE_TIMEOUT;
    if let Some(bytes) = running.disk.image().storage().allocated_bytes_before(deadline).await {
        info["actual-size"] = json!(bytes);
    }
    info
}

/// Name of the driver: QEMU's name, or weir's own.
fn driver_name(running: &RunningDisk) -> &'static str {
    match running.config().image.to_string().split(':').next() {
        _ if matches!(&*running.disk.image(), Image::Qcow2(_)) => "qcow2",
        _ if running.config().image.path().is_some() => "raw",
        _ if running.config().image.remote().is_some() => "nbd",
        _ if running.config().image.is_rbd() => "rbd",
        Some("null") => "null-co",
        _ => "x-weir-memory",
    }
}

#[derive(Debug)]
pub(super) struct QueryBlockstats;

impl QmpCommand for QueryBlockstats {
    const NAME: &'static str = "query-blockstats";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        // Selects nodes without a device in QEMU; in weir every node is a device.
        arguments.optional::<bool>("query-nodes")?;
        Ok(Self)
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        Ok(registry.disks.all().iter().map(|running| block_stats(running)).collect())
    }
}

/// Returns a `BlockStats` with all mandatory members (QEMU's qapi/block-core.json,
/// `BlockDeviceStats`). Counts requests and bytes of clients. A request that is held by an error
/// policy and fails again counts as two failures.
///
/// The latencies are measured from the first query or scrape on. Exports reject invalid requests
/// before they reach a disk, so none are counted.
fn block_stats(running: &RunningDisk) -> Value {
    let totals = running.disk.totals();
    let errors = running.disk.failures().errors();
    let measures = running.disk.measure();
    let time_ns = |class| measures.latency(class).sum_ns;
    let unmap_time_ns = measures.discarding_ns();
    json!({
        "device": &**running.disk.name(),
        "node-name": &**running.disk.name(),
        "stats": {
            "rd_operations": totals.reads,
            "wr_operations": totals.writes.saturating_sub(totals.discards),
            "flush_operations": totals.flushes,
            "unmap_operations": totals.discards,
            "rd_bytes": totals.read_bytes,
            "wr_bytes": totals.written_bytes.saturating_sub(totals.discarded_bytes),
            "unmap_bytes": totals.discarded_bytes,
            "rd_total_time_ns": time_ns(OperationClass::Read),
            "wr_total_time_ns": time_ns(OperationClass::Write).saturating_sub(unmap_time_ns),
            "flush_total_time_ns": time_ns(OperationClass::Flush),
            "unmap_total_time_ns": unmap_time_ns,
            "wr_highest_offset": totals.highest_write_end,
            "rd_merged": totals.merged_reads,
            "wr_merged": totals.merged_requests.saturating_sub(totals.merged_reads),
            "unmap_merged": 0,
            "failed_rd_operations": errors.reads,
            "failed_wr_operations": errors.writes,
            "failed_flush_operations": errors.flushes,
            "failed_unmap_operations": errors.discards,
            "invalid_rd_operations": 0,
            "invalid_wr_operations": 0,
            "invalid_flush_operations": 0,
            "invalid_unmap_operations": 0,
            "account_invalid": false,
            "account_failed": false,
            "timed_stats": [],
        },
    })
}

#[cfg(test)]
mod tests {
    use reactor::sim;

    use super::*;

    #[test]
    fn raw_images_have_the_driver_of_their_storage() {
        sim::run(1, async {
            let running = RunningDisk::in_memory("a", None);
            for (image, driver) in [
                ("memory:1M", "x-weir-memory"),
                ("null:1M", "null-co"),
                ("rbd:pool/image", "rbd"),
                ("nbd://host/export", "nbd"),
                ("/images/a.raw", "raw"),
            ] {
                running.config.borrow_mut().image = image.parse().expect("an image");
                assert_eq!(driver_name(&running), driver, "{image}");
            }
        });
    }
}
