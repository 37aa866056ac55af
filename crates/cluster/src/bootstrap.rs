//! The limits, reservations and moved disks that etcd has at a start, read once before a session
//! exists; and the stored limits that replace them if etcd is unreachable.
//!
//! ```text
//!   a start       read_start_state: one member after another, until one answers ─┐
//!   check-config  check_start: all members in parallel                           ├─► read_from_member
//!                                       none? ─► stored_start_state: limits stored by an earlier run
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{self, Path},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail};
use policy::cluster::ClusterGroupLimits;
use settings::DesiredState;
use tokio::runtime::{Builder, Runtime};

use super::{
    etcd::{self, EtcdClient, EtcdError, EtcdParameters},
    etcd_values::{self, HostReservations},
    keys::{EtcdKey, EtcdKeys},
    limit_file::{self, StoredGroup},
    migration, warn_of_local_group,
};

/// State in etcd at the start.
#[derive(Default)]
pub(super) struct StartState {
    pub(super) specs: BTreeMap<String, ClusterGroupLimits>,
    pub(super) removed: BTreeSet<String>,
    pub(super) reservations: BTreeMap<String, HostReservations>,
    pub(super) moved: BTreeMap<String, String>,
    /// Hosts that report, for which leaders reserve fallback shares; `None` if unknown.
    pub(super) reporting: Option<BTreeSet<String>>,
    /// Id of the etcd cluster, and the member that returned it.
    cluster: Option<(String, String)>,
}

/// Groups and disks that a start needs.
pub(super) struct StartQuery {
    pub(super) groups: Vec<String>,
    pub(super) host: String,
    /// Disks of the config file, with their images.
    pub(super) disks: BTreeMap<String, String>,
}

impl StartQuery {
    pub(super) fn of(plan: &DesiredState, cluster: &settings::ClusterConfig) -> io::Result<Self> {
        let here = path::absolute(".")?;
        let image = |disk: &settings::DiskWithOrigins| disk.image.clone().relative_to(&here).to_string();
        let cluster_groups = plan.groups.iter().filter(|group| group.cluster);
        Ok(Self {
            groups: cluster_groups.map(|group| group.name.clone()).collect(),
            host: cluster.host.clone(),
            disks: plan.disks.iter().map(|disk| (disk.name.clone(), image(disk))).collect(),
        })
    }
}

impl StartState {
    /// Adds limits that this host stored and etcd lost: without them the group would be unlimited.
    pub(super) fn add_stored_limits(&mut self, known: &BTreeMap<String, StoredGroup>) {
        for (name, stored) in known {
            if !self.specs.contains_key(name) && !self.removed.contains(name) {
                tracing::warn!(group = %name, "etcd lost this group's limits: the last known ones apply");
                self.specs.insert(name.clone(), stored.spec);
            }
        }
    }
}

/// Checks that a start would find the limits of its groups. Changes nothing in etcd.
///
/// All members of etcd are queried; a start uses the first that answers. Without etcd, stored
/// limits must exist. Problems that a start tolerates are logged as warnings.
pub async fn check_start(plan: &DesiredState) -> anyhow::Result<()> {
    let Some(cluster) = &plan.process.cluster else { return Ok(()) };
    let name = &cluster.name;
    let (settings, query) = (cluster.clone(), StartQuery::of(plan, cluster)?);
    let task = reactor::run_blocking(move || {
        let terms = EtcdParameters::new(&settings)?;
        anyhow::Ok(read_from_all(EtcdKeys::new(&settings.name), query, terms)?)
    });
    let results = task.await.with_context(|| format!("cluster {name}"))?;
    let (mut errors, mut first) = (Vec::new(), None);
    for result in results {
        match result {
            Ok(state) => {
                // The leader of each of two etcd clusters would divide the whole limit among its
                // hosts.
                let cluster_of = |first: &StartState| first.cluster.clone();
                if let (Some((one, member)), Some((other, other_member))) =
                    (first.as_ref().and_then(cluster_of), cluster_of(&state))
                    && one != other
                {
                    bail!("cluster {name}: {}", etcd::different_clusters(&member, &other_member));
                }
                first = first.or(Some(state));
            }
            Err(error) => errors.push(error),
        }
    }
    let has_answer = first.is_some();
    let specs = first.iter().flat_map(|first| &first.specs);
    for (group, _) in specs.filter(|(_, spec)| !spec.limits().is_unlimited()) {
        if plan.groups.iter().any(|configured| configured.name == *group && !configured.cluster) {
            warn_of_local_group(group, name);
        }
    }
    // A refusal sorts last: it is the error that a start would fail with.
    errors.sort_by_key(|error| matches!(error, EtcdError::Refused(_)));
    let last = errors.pop_if(|_| !has_answer);
    for error in errors {
        tracing::warn!("cluster {name}: {error}: a start uses another member");
    }
    match last {
        None => {}
        Some(EtcdError::Refused(why)) => bail!("cluster {name}: {why}"),
        Some(error) => {
            let file = limit_file::file(plan.process.state.as_deref(), name);
            stored_start_state(&file, plan, &error.to_string()).with_context(|| format!("cluster {name}"))?;
            tracing::warn!(
                "cluster {name}: {error}: a start uses the fallback share of the last known limits"
            );
        }
    }
    Ok(())
}

/// Reads etcd on a temporary runtime, before threads are confined.
pub(super) fn read_start_state(
    keys: &EtcdKeys,
    query: &StartQuery,
    terms: &EtcdParameters,
) -> Result<StartState, EtcdError> {
    let runtime = runtime().map_err(|error| EtcdError::Unreachable(anyhow!(error)))?;
    runtime.block_on(async {
        let mut last = EtcdError::unknown_member();
        for member in 0..EtcdClient::members(terms) {
            match read_from_member(terms, member, keys, query).await {
                Ok(first) => return Ok(first),
                Err(error) => last = last.prefer_refusal(error),
            }
        }
        Err(last)
    })
}

/// Answers of all members, queried in parallel: takes as long as the slowest.
fn read_from_all(
    keys: EtcdKeys,
    query: StartQuery,
    terms: EtcdParameters,
) -> io::Result<Vec<Result<StartState, EtcdError>>> {
    let shared = Arc::new((keys, query, terms));
    Ok(runtime()?.block_on(async {
        let read_member = |member| {
            let shared = Arc::clone(&shared);
            tokio::spawn(async move { read_from_member(&shared.2, member, &shared.0, &shared.1).await })
        };
        let tasks: Vec<_> = (0..EtcdClient::members(&shared.2)).map(read_member).collect();
        let mut results = Vec::new();
        for task in tasks {
            results.push(task.await.unwrap_or_else(|error| Err(EtcdError::Unreachable(anyhow!(error)))));
        }
        results
    }))
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_io().enable_time().build()
}

/// Reads the state from one member.
async fn read_from_member(
    terms: &EtcdParameters,
    member: usize,
    keys: &EtcdKeys,
    query: &StartQuery,
) -> Result<StartState, EtcdError> {
    let mut etcd = EtcdClient::connect_to(terms, member).await?;
    // Before any image is opened: a missing right must fail the start, not the first report.
    etcd.check_rights().await?;
    let (_, found) = etcd.read(&[keys.groups(), keys.reservations()]).await?;
    let moved = migration::moved_disks(keys, &mut etcd, &query.host, &query.disks).await?;
    let cluster = etcd.cluster().map(|cluster| (cluster.to_owned(), etcd.member()));
    let reports = etcd.keys(&[keys.reports()]).await?;
    let reporting = reports.iter().flatten().filter_map(|value| match keys.parse(&value.key) {
        Some(EtcdKey::Report(host)) => Some(host.to_owned()),
        _ => None,
    });
    let reporting = Some(reporting.collect());
    let mut first = StartState { moved, cluster, reporting, ..StartState::default() };
    for value in found.iter().flatten() {
        match keys.parse(&value.key) {
            Some(EtcdKey::Group(name)) => {
                let read = etcd_values::read::<etcd_values::GroupValue>(&value.value);
                match read.and_then(|group| Ok((group.removed, group.spec()?))) {
                    Ok((true, _)) => drop(first.removed.insert(name.to_owned())),
                    Ok((false, spec)) => drop(first.specs.insert(name.to_owned(), spec)),
                    Err(why) if query.groups.iter().any(|own| own == name) => {
                        let why = format!("group {name}: the value at {} in etcd {why}", value.key);
                        return Err(EtcdError::Refused(why));
                    }
                    // Unreadable limits of a group that this host does not have.
                    Err(_) => {}
                }
            }
            Some(EtcdKey::Reservation(name)) => {
                if let Ok(reservations) = etcd_values::read(&value.value) {
                    first.reservations.insert(name.to_owned(), reservations);
                }
            }
            _ => {}
        }
    }
    Ok(first)
}

/// Limits that an earlier run stored.
///
/// # Errors
/// Fails if the limits of a group of this host are unknown: a start without them would admit
/// requests without a limit.
pub(super) fn stored_start_state(file: &Path, plan: &DesiredState, why: &str) -> anyhow::Result<StartState> {
    let groups = limit_file::load(file).with_context(|| file.display().to_string())?;
    let mut specs = BTreeMap::new();
    for (name, group) in groups {
        let spec = group.spec().map_err(|rule| anyhow!("{}: group {name}: {rule}", file.display()))?;
        specs.insert(name, spec);
    }
    let unlimited = limit_file::without_limits(file);
    let is_unknown = |name: &&String| !specs.contains_key(*name) && !unlimited.contains(*name);
    let of_disks = plan.groups.iter().filter(|group| group.cluster).map(|group| &group.name);
    let of_control_groups = plan.process.cluster.iter().flat_map(|cluster| &cluster.control_groups);
    if let Some(group) = of_disks.chain(of_control_groups).find(is_unknown) {
        bail!(
            "group {group}: its limits are unknown: {why}, and this host has not stored them yet \
             (correct etcd of [cluster], or start etcd; only the first start needs it)"
        );
    }
    Ok(StartState { specs, ..StartState::default() })
}
