//! Commands for cluster-wide limits: query and change them in etcd.

use std::rc::Rc;

use cluster::{ClusterMembership, GroupLimitChange};
use serde_json::Value;

use crate::{
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
        json::excerpt,
        settings::{LimitChanges, SettingNaming},
    },
    registry::Registry,
};

/// Maximum number of hosts, from the policy.
const MAX_HOSTS: u64 = policy::cluster::MAX_HOSTS as u64;

fn cluster(registry: &Registry) -> Result<Rc<ClusterMembership>, QmpError> {
    let none = || {
        QmpError::generic(
            "cluster: this daemon is in none (add [cluster] to its config file, and restart weir)",
        )
    };
    registry.cluster().cloned().ok_or_else(none)
}

#[derive(Debug)]
pub(super) struct QueryCluster;

impl QmpCommand for QueryCluster {
    const NAME: &'static str = "x-weir-query-cluster";

    fn read(_: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self)
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        Ok(response(cluster(&registry)?.status().await))
    }
}

#[derive(Debug)]
pub(super) struct ClusterSet {
    change: GroupLimitChange,
}

impl QmpCommand for ClusterSet {
    const NAME: &'static str = "x-weir-cluster-set";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let group: String = arguments.required("group")?;
        settings::check::check_object_name(&group)
            .map_err(|rule| QmpError::generic(format!("group {:?}: {rule}", excerpt(&group))))?;
        let limits = LimitChanges::read(arguments, SettingNaming::Plain)?;
        let limits = limits.then(LimitChanges::read_burst_for(arguments, "burst-for")?).values().collect();
        let hosts = arguments.number("hosts", 1..=MAX_HOSTS)?.map(|hosts| hosts as u32);
        let safe_share = arguments.number("fallback-share-ppm", 0..=1_000_000)?;
        // Zero removes the setting, so that the default applies.
        let safe_share = safe_share.map(|ppm| (ppm > 0).then_some(ppm as u32));
        let change = GroupLimitChange {
            group,
            limits,
            hosts,
            safe_share_ppm: safe_share,
            ..GroupLimitChange::default()
        };
        Ok(Self { change })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let cluster = cluster(&registry)?;
        if registry.disks.get(&self.change.group).is_ok() {
            return Err(QmpError::generic(format!(
                "{}: is a disk here, and limits of all hosts are a group's (name a group that has \
                 cluster = true; without --cluster it is the disk's own limit)",
                self.change.group
            )));
        }
        cluster.change(self.change).await.map(response).map_err(QmpError::generic)
    }
}

/// Removes cluster-wide limits.
#[derive(Debug)]
pub(super) struct ClusterRemove {
    group: String,
}

impl QmpCommand for ClusterRemove {
    const NAME: &'static str = "x-weir-cluster-remove";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { group: arguments.required("group")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let change = GroupLimitChange { group: self.group, removes: true, ..GroupLimitChange::default() };
        cluster(&registry)?.change(change).await.map(response).map_err(QmpError::generic)
    }
}

#[derive(Debug)]
pub(super) struct ClusterForget {
    host: String,
}

impl QmpCommand for ClusterForget {
    const NAME: &'static str = "x-weir-cluster-forget";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { host: arguments.required("host")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        cluster(&registry)?.forget_host(self.host).await.map(response).map_err(QmpError::generic)
    }
}
