//! Keys, certificates and passwords in files: read again at each reload, for later connections. The
//! config does not show whether they have changed.

use std::io;

use anyhow::Context as _;
use api::ReloadChange;
use cluster::EtcdCredentials;
use export::nbd;
use settings::DesiredState;

use crate::{assemble, loaded_config::LoadedConfig, reconcile::change_report, registry::Registry};

/// Credentials that were read again.
pub(super) struct RenewedCredentials {
    tls: Option<nbd::NbdServerTls>,
    etcd: Option<EtcdCredentials>,
    /// Errors of files that could not be read again.
    unreadable: Vec<String>,
}

impl RenewedCredentials {
    /// # Errors
    /// A file is invalid. Missing permission is no error: the daemon has given up rights since its
    /// start, and keeps the old credentials.
    pub(super) async fn read(plan: &DesiredState) -> anyhow::Result<Self> {
        let (tls, cluster) = (plan.process.tls.clone(), plan.process.cluster.clone());
        let reading = reactor::run_blocking(move || {
            let mut errors = Vec::new();
            let tls = none_if_forbidden(assemble::read_tls_credentials(&tls), &mut errors)?.flatten();
            let mut etcd = None;
            if let Some(cluster) = cluster {
                let read =
                    EtcdCredentials::read(&cluster).with_context(|| format!("cluster {}", cluster.name));
                etcd = none_if_forbidden(read, &mut errors)?;
            }
            anyhow::Ok(Self { tls, etcd, unreadable: errors })
        });
        reading.await
    }

    /// Reports for the client of the reload.
    pub(super) fn reports(&self) -> impl Iterator<Item = ReloadChange> {
        self.unreadable.iter().map(|why| change_report::credentials_report(why))
    }

    /// Puts the credentials in force.
    pub(super) fn apply(self, registry: &Registry, loaded: &LoadedConfig) {
        if let (Some(before), Some(tls)) = (&loaded.tls, self.tls) {
            // Shared with all servers, which use the new keys for later handshakes.
            before.keys.replace(tls.keys);
        }
        if let (Some(cluster), Some(credentials)) = (registry.cluster(), self.etcd) {
            cluster.renew(credentials);
        }
    }
}

fn none_if_forbidden<T>(read: anyhow::Result<T>, errors: &mut Vec<String>) -> anyhow::Result<Option<T>> {
    let is_forbidden = |cause: &io::Error| cause.kind() == io::ErrorKind::PermissionDenied;
    match read {
        Err(error) if error.chain().any(|cause| cause.downcast_ref().is_some_and(is_forbidden)) => {
            let why = format!(
                "{error:#}: the old credentials stay in force (make it readable for the daemon's \
                 user and sandbox, or run `weir serve --takeover`)"
            );
            tracing::warn!("{why}");
            errors.push(why);
            Ok(None)
        }
        read => read.map(Some),
    }
}
