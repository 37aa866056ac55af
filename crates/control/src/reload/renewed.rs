//! Keys, certificates and passwords that are in files: read again at each reload, for connections
//! from then on. Nothing of the config says that they have changed.

use std::io;

use anyhow::Context as _;
use cluster::EtcdCredentials;
use export::nbd;
use serde_json::Value;
use settings::DesiredState;

use crate::{assemble, loaded::Loaded, reconcile::applied, registry::Registry};

/// What was read, as far as that could be.
pub(super) struct Renewed {
    tls: Option<nbd::NbdServerTls>,
    etcd: Option<EtcdCredentials>,
    /// Why some could not.
    kept: Vec<String>,
}

impl Renewed {
    /// # Errors
    /// What is wrong in a file. One that may not be read any more is no error: the daemon has given
    /// up its rights since it began.
    pub(super) async fn read(plan: &DesiredState) -> anyhow::Result<Self> {
        let (tls, cluster) = (plan.process.tls.clone(), plan.process.cluster.clone());
        let reading = reactor::run_blocking(move || {
            let mut kept = Vec::new();
            let tls = unless_forbidden(assemble::credentials(&tls), &mut kept)?.flatten();
            let mut etcd = None;
            if let Some(cluster) = cluster {
                let read = EtcdCredentials::read(&cluster).with_context(|| format!("cluster {}", cluster.name));
                etcd = unless_forbidden(read, &mut kept)?;
            }
            anyhow::Ok(Self { tls, etcd, kept })
        });
        reading.await
    }

    /// What is told of it.
    pub(super) fn told(&self) -> impl Iterator<Item = Value> {
        self.kept.iter().map(|why| applied::not_read(why))
    }

    /// Puts it in force.
    pub(super) fn settle(self, registry: &Registry, loaded: &Loaded) {
        if let (Some(before), Some(tls)) = (&loaded.tls, self.tls) {
            before.keys.renew(tls.keys);
        }
        if let (Some(cluster), Some(proofs)) = (registry.cluster(), self.etcd) {
            cluster.renew(proofs);
        }
    }
}

fn unless_forbidden<T>(read: anyhow::Result<T>, kept: &mut Vec<String>) -> anyhow::Result<Option<T>> {
    let is_forbidden = |cause: &io::Error| cause.kind() == io::ErrorKind::PermissionDenied;
    match read {
        Err(error) if error.chain().any(|cause| cause.downcast_ref().is_some_and(is_forbidden)) => {
            let why = format!(
                "{error:#}: what was read before holds on (let the daemon's user and its sandbox read it, or have `weir serve --takeover` read it)"
            );
            tracing::warn!("{why}");
            kept.push(why);
            Ok(None)
        }
        read => read.map(Some),
    }
}
