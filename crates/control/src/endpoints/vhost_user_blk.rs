//! vhost-user-blk endpoint of a virtual machine: its socket, and the device that the guest sees.

use std::sync::Arc;

use api::{ExportCounters, FrontEndProcess};
use block::disk::Disk;
use export::vhost_user_blk::{
    FrontEnds, PeerProcess, Threads, VhostUserExport, VhostUserOffer, VhostUserServer, VhostUserStatistics,
};
use reactor::operation::Fd;
use settings::VhostUserBlkConfig;
use storage::CacheMode;

use super::{EndpointOptions, ExportEndpoint, VhostUserEndpoint, attended};
use crate::listen;

attended!(VhostUserServer, counters, add_counts);

/// Binds the socket. Clients are not accepted yet.
pub(super) fn open(
    settings: &VhostUserBlkConfig,
    terms: &EndpointOptions<'_>,
) -> anyhow::Result<ExportEndpoint> {
    let EndpointOptions { id, disk: running, read_only, access, inherited, workers, .. } = terms;
    let disk = &running.disk;
    let (front_ends, file, listening) = match settings.socket.path() {
        Some(path) if settings.client => (FrontEnds::call(id, std::path::absolute(path)?), None, None),
        _ => {
            let listen::BoundListener { socket, file, .. } =
                listen::vhost_user_listener(&settings.socket, access, inherited)?;
            let socket = Fd::from(socket);
            let path = file.as_ref().map(|file| file.path().to_owned());
            let name = listen::vhost_user_socket_name(&settings.socket)?;
            (FrontEnds::listen(id, socket.clone()), file, Some((name, (socket, path))))
        }
    };
    let export = VhostUserExport {
        id: (*id).into(),
        disk: Arc::clone(disk),
        offer: device_offer(disk, running.config().cache, *read_only, settings),
        serial: settings.serial.as_deref().unwrap_or(disk.name()).into(),
    };
    let server = VhostUserServer::with_observer(Arc::new(terms.events.clone()), export);
    let serving = Arc::clone(&server).serve(front_ends, Threads::Workers((*workers).clone()));
    let vhost_user = VhostUserEndpoint { server: Arc::clone(&server), listening };
    let endpoint = ExportEndpoint::new(
        "vhost-user-blk",
        listen::vhost_user_socket_name(&settings.socket)?,
        server,
        serving,
        terms,
    );
    Ok(endpoint.with_vhost_user(vhost_user).with_resource(file))
}

fn counters(statistics: VhostUserStatistics) -> ExportCounters {
    let VhostUserStatistics { queues, requests, in_flight, kicks, calls, copies, front_end } = statistics;
    let process = |PeerProcess { pid, name }| FrontEndProcess { pid, name: name.to_string() };
    ExportCounters {
        queues: Some(queues as u64),
        requests: Some(requests),
        in_flight: Some(in_flight),
        kicks: Some(kicks),
        calls: Some(calls),
        copies: Some(copies),
        front_end: front_end.map(process),
        ..ExportCounters::default()
    }
}

fn add_counts(server: &VhostUserServer, before: &ExportCounters) {
    let ExportCounters { requests, kicks, calls, copies, .. } = before;
    let [requests, kicks, calls, copies] = [requests, kicks, calls, copies].map(|count| count.unwrap_or(0));
    server.add_counts(requests, kicks, calls, copies);
}

fn device_offer(
    disk: &Disk,
    cache: CacheMode,
    read_only: bool,
    settings: &VhostUserBlkConfig,
) -> VhostUserOffer {
    // In cache modes without a write cache every write is durable, so the guest needs no flushes.
    let write_cache = settings.write_cache && cache.has_write_cache();
    let standard = VhostUserOffer::default();
    let sizes = disk.image().block_size();
    let best = sizes.preferred.clamp(settings.block_bytes, 1 << 20).next_power_of_two();
    VhostUserOffer {
        size_bytes: disk.size_bytes(),
        read_only: read_only || settings.read_only || disk.image().is_read_only(),
        discard: settings.discard,
        write_zeroes: settings.write_zeroes,
        queues: settings.queues,
        queue_size: settings.queue_size,
        block_bytes: settings.block_bytes,
        write_cache,
        // File systems use this as their sector size, and support none above a page.
        physical_block_bytes: best.min(4096),
        optimal_io_bytes: if best > 4096 { best } else { 0 },
        discard_alignment_bytes: best,
        ..standard
    }
}
