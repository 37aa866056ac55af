//! Endpoint of the kernel's NBD client: a block device, served over socket pairs.

use std::{rc::Rc, sync::Arc};

use anyhow::Context as _;
use api::ExportCounters;
use export::nbd::kernel_client::{NbdDeviceExport, NbdDeviceServer, NbdDeviceStatistics};
use settings::NbdDeviceConfig;

use super::{EndpointOptions, ExportEndpoint, HostEndpoint, TransferredEndpoint, attended, data_identity};

// No counters to restore: all of them are current values.
attended!(NbdDeviceServer, counters, |_, _| {}, leave);

pub(super) async fn open(
    settings: &NbdDeviceConfig,
    terms: &EndpointOptions<'_>,
) -> anyhow::Result<ExportEndpoint> {
    let EndpointOptions { id, disk: running, read_only, workers, .. } = terms;
    // More connections than workers gain nothing; the kernel needs at least one.
    let standard = workers.len().clamp(1, 64) as u16;
    let export = NbdDeviceExport {
        id: (*id).into(),
        disk: Arc::clone(&running.disk),
        read_only: *read_only,
        number: settings.number,
        connections: settings.connections.unwrap_or(standard),
        timeout_s: settings.timeout_s,
        dead_timeout_s: settings.dead_timeout_s,
        block_bytes: settings.block_bytes,
        identity: data_identity(running)?,
    };
    let disk = running.disk.name();
    let server = match terms.transferred.take() {
        Some(TransferredEndpoint::NbdDevice(rested)) => NbdDeviceServer::adopt(&export, rested),
        _ => NbdDeviceServer::connect(export).await,
    };
    let server = server.with_context(|| format!("disk {disk}"))?;
    let serving = Arc::clone(&server).serve(Rc::clone(workers));
    let host = HostEndpoint::NbdDevice(Arc::clone(&server));
    Ok(ExportEndpoint::new("x-nbd-device", server.path(), server, serving, terms).with_device(host))
}

fn counters(statistics: NbdDeviceStatistics) -> ExportCounters {
    let NbdDeviceStatistics { sockets, replaced } = statistics;
    ExportCounters { sockets: Some(sockets as u64), replaced: Some(replaced), ..ExportCounters::default() }
}
