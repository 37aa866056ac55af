//! ublk endpoint: a block device of the kernel's ublk driver.

use std::sync::Arc;

use api::ExportCounters;
use block::disk::Disk;
use export::ublk::{UblkExport, UblkOffer, UblkServer, UblkStatistics};
use settings::UblkConfig;
use storage::CacheMode;

use super::{EndpointOptions, ExportEndpoint, HostEndpoint, TransferredEndpoint, attended};

attended!(UblkServer, counters, add_counts, leave);

/// Creates the device, or recovers the orphaned device that an earlier process left for this image.
pub(super) async fn open(
    settings: &UblkConfig,
    terms: &EndpointOptions<'_>,
) -> anyhow::Result<ExportEndpoint> {
    let EndpointOptions { id, disk: running, read_only, workers, .. } = terms;
    let disk = &running.disk;
    let queues = settings.queues.unwrap_or(u16::try_from(workers.len()).unwrap_or(u16::MAX));
    let export = UblkExport {
        id: (*id).into(),
        disk: Arc::clone(disk),
        offer: UblkOffer { queues, ..device_offer(disk, running.config().cache, *read_only, settings) },
    };
    let server = match terms.transferred.take() {
        Some(TransferredEndpoint::Ublk) => UblkServer::recover(export, workers).await?,
        // Adopts an orphaned device of this image, if there is one, so that its openers continue.
        _ => UblkServer::open(export, workers).await?,
    };
    let address = server.path().display().to_string();
    let over = Arc::clone(&server).until_ended_or_left();
    let host = HostEndpoint::Ublk(Arc::clone(&server));
    Ok(ExportEndpoint::new("x-ublk", address, server, over, terms).with_device(host))
}

fn counters(statistics: UblkStatistics) -> ExportCounters {
    let UblkStatistics {
        queues,
        requests,
        in_flight,
        is_taken_over,
        survives,
        lent_bytes,
        is_zero_copy,
        copied_bytes,
    } = statistics;
    ExportCounters {
        queues: Some(queues as u64),
        requests: Some(requests),
        in_flight: Some(in_flight),
        taken_over: Some(is_taken_over),
        survives: Some(survives),
        buffer_bytes: Some(lent_bytes),
        zero_copy: Some(is_zero_copy),
        copied_bytes: Some(copied_bytes),
        ..ExportCounters::default()
    }
}

fn add_counts(server: &UblkServer, before: &ExportCounters) {
    server.add_counts(before.requests.unwrap_or(0), before.copied_bytes.unwrap_or(0));
}

fn device_offer(disk: &Disk, cache: CacheMode, read_only: bool, settings: &UblkConfig) -> UblkOffer {
    let standard = UblkOffer::default();
    let best = disk.image().block_size().preferred.clamp(settings.block_bytes, 1 << 20).next_power_of_two();
    UblkOffer {
        number: settings.number,
        depth: settings.queue_depth,
        dead_timeout_s: settings.dead_timeout_s,
        read_only: read_only || settings.read_only || disk.image().is_read_only(),
        discard: settings.discard,
        write_zeroes: settings.write_zeroes,
        // In cache modes without a write cache every write is durable, so the kernel needs no
        // flushes.
        write_cache: settings.write_cache && cache.has_write_cache(),
        block_bytes: settings.block_bytes,
        // File systems use this as their sector size, and support none above a page.
        physical_block_bytes: best.min(4096),
        optimal_io_bytes: best.max(4096),
        discard_granularity_bytes: best,
        unprivileged: settings.unprivileged,
        zero_copy: settings.zero_copy,
        ..standard
    }
}
