//! From a plan to the parts of the data path: opened images, groups, disks, servers.

use std::sync::Arc;

use anyhow::Context as _;
use block::{
    disk::Disk,
    export::nbd,
    layer::throttle::Group,
    storage::{OpenOptions, open},
};

use crate::plan::{self, Credentials, Plan, Tls};

/// Opens every image and puts it under its limits.
///
/// # Errors
/// The first image that cannot be served, with the reason.
pub(super) fn disks(plan: &Plan) -> anyhow::Result<Vec<Arc<Disk>>> {
    let groups = plan.groups.iter().map(|group| Group::new(&group.name, group.settings.limits));
    let groups: Vec<_> = groups.collect::<Result<_, _>>()?;
    for remark in plan.remarks() {
        tracing::warn!(name = remark.name, "{}", remark.remark);
    }
    let disk = |disk: &plan::Disk| {
        let image = open(&disk.image.spec()?, options(disk))?;
        let group = match disk.group {
            Some(index) => Arc::clone(&groups[index]),
            None => Group::new(&disk.name, disk.settings.limits)?,
        };
        tracing::debug!(disk = disk.name, image = image.description(), "opened");
        Ok(Arc::new(Disk::new(&disk.name, image, &group)))
    };
    plan.disks.iter().map(disk).collect()
}

fn options(disk: &plan::Disk) -> OpenOptions {
    OpenOptions {
        cache: disk.cache,
        format: disk.format,
        read_only: disk.read_only,
        force_share: disk.force_share,
        delay: disk.delay,
        rate: disk.rate,
        faults: disk.faults.clone(),
    }
}

/// A server for each of the plan's, in their order; none listens yet.
///
/// # Errors
/// If the keys for TLS cannot be used.
pub(super) fn servers(plan: &Plan, disks: &[Arc<Disk>]) -> anyhow::Result<Vec<Arc<nbd::Server>>> {
    let tls = credentials(&plan.service.tls)?;
    let terms = nbd::Terms {
        // A count that does not fit is more than there can ever be.
        max_connections: usize::try_from(plan.service.max_connections).unwrap_or(usize::MAX),
        ..nbd::Terms::default()
    };
    let export = |export: &plan::Export| nbd::Export {
        name: export.name.as_str().into(),
        description: plan.disks[export.disk].description.as_str().into(),
        disk: Arc::clone(&disks[export.disk]),
        read_only: plan.disks[export.disk].read_only,
    };
    let server = |server: &plan::Server| {
        let exports = server.exports.iter().map(export).collect();
        let tls = tls.as_ref().map(|(required, keys)| nbd::Tls { required: *required, keys: keys.clone() });
        nbd::Server::new(exports, tls, terms)
    };
    Ok(plan.servers.iter().map(server).collect())
}

/// Whether TLS is required, and the keys; `None` without TLS.
fn credentials(tls: &Tls) -> anyhow::Result<Option<(bool, nbd::TlsServer)>> {
    let (required, credentials) = match tls {
        Tls::Off => return Ok(None),
        Tls::On(credentials) => (false, credentials),
        Tls::Required(credentials) => (true, credentials),
    };
    let keys = match credentials {
        Credentials::Certificates { directory, verify_peer } => nbd::TlsServer::x509(directory, *verify_peer),
        Credentials::PreShared(file) => nbd::TlsServer::psk(file),
    };
    Ok(Some((required, keys.context("TLS")?)))
}
