//! FUSE endpoint: a disk as a file of this host.

use std::{rc::Rc, sync::Arc};

use api::ExportCounters;
use export::fuse::{
    FuseExport, FuseExportServer, FuseMount, FuseMountOptions, FuseStatistics, QuiescedFuseFile,
};
use settings::FuseConfig;

use super::{EndpointOptions, ExportEndpoint, HostEndpoint, TransferredEndpoint, attended};

attended!(FuseExportServer, counters, add_counts);

/// Mounts over the file. A process that opens it blocks until the server runs.
pub(super) async fn open(
    settings: &FuseConfig,
    terms: &EndpointOptions<'_>,
) -> anyhow::Result<ExportEndpoint> {
    let disk = &terms.disk.disk;
    let read_only = terms.read_only || settings.read_only || disk.image().is_read_only();
    // A transferred mount keeps its descriptor, so open files stay valid.
    let (mount, state) = match terms.transferred.take() {
        Some(TransferredEndpoint::Fuse(QuiescedFuseFile { mount, state })) => {
            (FuseMount::adopt(mount, state.owner), Some(state))
        }
        _ => {
            let options = FuseMountOptions { read_only, allow_other: settings.allow_other };
            let file = settings.file.clone();
            (reactor::run_blocking(move || FuseMount::mount_over(&file, options)).await?, None)
        }
    };
    let address = mount.path().display().to_string();
    let export = FuseExport {
        id: terms.id.into(),
        disk: Arc::clone(disk),
        read_only,
        growable: settings.growable,
        owner: mount.owner(),
    };
    let server = match state {
        Some(state) => FuseExportServer::adopt(export, &state)?,
        None => FuseExportServer::new(export),
    };
    let host = HostEndpoint::Fuse(Arc::clone(&server));
    let serving = Arc::clone(&server).serve(mount, Rc::clone(terms.workers));
    Ok(ExportEndpoint::new("fuse", address, server, serving, terms).with_device(host))
}

fn counters(statistics: FuseStatistics) -> ExportCounters {
    let FuseStatistics { queues, openers, requests, in_flight } = statistics;
    ExportCounters {
        queues: Some(queues as u64),
        openers: Some(openers as u64),
        requests: Some(requests),
        in_flight: Some(in_flight),
        ..ExportCounters::default()
    }
}

fn add_counts(server: &FuseExportServer, before: &ExportCounters) {
    server.add_counts(before.requests.unwrap_or(0));
}
