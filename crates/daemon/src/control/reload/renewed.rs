//! Keys, certificates and passwords that are in files: read again at each reload, for connections
//! from then on. Nothing of the config says that they have changed.

use std::io;

use anyhow::Context as _;
use block::reactor;
use export::nbd;
use settings::Plan;

use crate::{
    cluster::Proofs,
    control::{assemble, inventory::Inventory, loaded::Loaded},
};

/// What was read, as far as that could be.
pub(super) struct Renewed {
    tls: Option<nbd::Tls>,
    etcd: Option<Proofs>,
}

impl Renewed {
    /// # Errors
    /// What is wrong in a file. One that may not be read any more is no error: the daemon has given
    /// up its rights since it began.
    pub(super) async fn read(plan: &Plan) -> anyhow::Result<Self> {
        let (tls, cluster) = (plan.service.tls.clone(), plan.service.cluster.clone());
        let reading = reactor::blocking(move || {
            let tls = unless_forbidden(assemble::credentials(&tls))?.flatten();
            let proofs = |cluster| {
                let read = Proofs::read(&cluster).with_context(|| format!("cluster {}", cluster.name));
                unless_forbidden(read)
            };
            anyhow::Ok(Self { tls, etcd: cluster.map(proofs).transpose()?.flatten() })
        });
        reading.await
    }

    /// Puts it in force.
    pub(super) fn settle(self, inventory: &Inventory, loaded: &Loaded) {
        if let (Some(before), Some(tls)) = (&loaded.tls, self.tls) {
            before.keys.renew(tls.keys);
        }
        if let (Some(cluster), Some(proofs)) = (inventory.cluster(), self.etcd) {
            cluster.renew(proofs);
        }
    }
}

fn unless_forbidden<T>(read: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
    let is_forbidden = |cause: &io::Error| cause.kind() == io::ErrorKind::PermissionDenied;
    match read {
        Err(error) if error.chain().any(|cause| cause.downcast_ref().is_some_and(is_forbidden)) => {
            tracing::warn!(
                "{error:#}: what was read at the start holds on (`weir serve --takeover` reads it with more rights)"
            );
            Ok(None)
        }
        read => read.map(Some),
    }
}
