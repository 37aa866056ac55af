//! Target of a migration.

use std::{fs, os::unix::net::UnixListener, path::Path, rc::Rc, sync::Arc};

use anyhow::{Context as _, anyhow, bail, ensure};
use block::layer::throttle::ThrottleGroup;
use cluster::{
    ClusterMembership,
    migration_offer::{MigrationReply, MigrationStep, ReceivedOffer, StepOutcome},
};
use settings::ExportTarget;

use super::{CHECK_TIMEOUT, MigratedDisk, RETRY_INTERVAL};
use crate::{
    assemble::{self, DiskAssembly},
    registry::{NewNbdExport, Registry, RunningEndpoint},
    running_server::RunningServer,
};

/// Receives disks that other hosts offer, until the handle is dropped.
pub fn receive_disks(registry: &Rc<Registry>) -> Option<reactor::JoinHandle<()>> {
    let cluster = Rc::clone(registry.cluster()?);
    let registry = Rc::downgrade(registry);
    Some(reactor::spawn_joinable(async move {
        while let Some(offered) = cluster.next_offer().await {
            let Some(registry) = registry.upgrade() else { return };
            let cluster = Rc::clone(&cluster);
            reactor::spawn(async move { handle_offer(&registry, &cluster, offered).await });
        }
    }))
}

async fn handle_offer(registry: &Rc<Registry>, cluster: &Rc<ClusterMembership>, offered: ReceivedOffer) {
    let (disk, from) = (&offered.disk, &offered.offer.from);
    if !offered.offer.is_released {
        let answer = match reactor::timeout(CHECK_TIMEOUT, check_acceptable(registry, &offered)).await {
            Ok(Ok(())) => MigrationReply::Ready,
            Ok(Err(why)) => MigrationReply::Refused(format!("{why:#}")),
            Err(_) => MigrationReply::Refused("its image does not answer there".to_owned()),
        };
        reply(cluster, &offered, answer).await;
        return;
    }
    // An offer may arrive twice after an interruption of etcd.
    if !registry.disks.begin_migration(disk) {
        return;
    }
    let taken = take_disk(registry, cluster, &offered).await;
    registry.disks.end_migration(disk);
    match taken {
        Ok(Ok(())) => tracing::info!(%disk, %from, "the disk was migrated here"),
        Ok(Err(why)) => {
            tracing::warn!(%disk, %from, "the disk stays on its host: {why}");
            // The source waits for an answer while the offer exists.
            reply(cluster, &offered, MigrationReply::Refused(why)).await;
        }
        Err(why) => {
            tracing::warn!(%disk, %from, "the disk cannot be migrated here: {why:#}");
            reply(cluster, &offered, MigrationReply::Refused(format!("{why:#}"))).await;
        }
    }
}

async fn reply(cluster: &ClusterMembership, offered: &ReceivedOffer, answer: MigrationReply) {
    // Without this reply the source runs into its time limit and resumes the disk.
    let _ = cluster.step(MigrationStep::Reply { offered: Box::new(offered.clone()), said: answer }).await;
}

const UNREADABLE: &str = "the offer cannot be parsed";

fn described_disk(offered: &ReceivedOffer) -> anyhow::Result<MigratedDisk> {
    serde_json::from_value(offered.offer.described.clone()).context(UNREADABLE)
}

/// Checks whether this host can serve the disk, as far as possible while the source has it open.
async fn check_acceptable(registry: &Rc<Registry>, offered: &ReceivedOffer) -> anyhow::Result<()> {
    let described = &described_disk(offered)?;
    registry.check_name(&offered.disk)?;
    check_exports(registry, described)?;
    let (mut planned, group) = check_config(registry, &offered.disk, described).await?;
    // The source is still writing to the image.
    (planned.read_only, planned.force_share) = (true, true);
    let image = DiskAssembly::for_registry(registry).open(&planned).await?;
    // The cluster counts the reservation for the source until the disk is handed over; booking it
    // here as well would count it twice.
    let is_counted_by_cluster = described.group.as_ref().is_some_and(|group| group.cluster);
    let closed = match is_counted_by_cluster {
        true => image.close().await,
        false => assemble::build_disk(&planned, group.as_ref(), image)?.disk.close().await,
    };
    closed.context("its image")
}

/// Checks that need neither the image nor its endpoints.
async fn check_config(
    registry: &Rc<Registry>,
    disk: &str,
    described: &MigratedDisk,
) -> anyhow::Result<(settings::DiskWithOrigins, Option<Arc<ThrottleGroup>>)> {
    let planned = described.to_config(disk).context(UNREADABLE)?;
    let group = group(registry, described)?;
    registry.check_image(&planned.image).await?;
    Ok((planned, group))
}

/// Group of this host that the disk joins.
fn group(registry: &Registry, described: &MigratedDisk) -> anyhow::Result<Option<Arc<ThrottleGroup>>> {
    let group = described.group.as_ref().map(|there| {
        let group = registry.groups.get(&there.name)?;
        ensure!(
            registry.cluster_of(&there.name).is_some() == there.cluster,
            "group {}: its limits are cluster-wide on only one of both hosts (configure the same \
             group on both)",
            there.name
        );
        Ok(group)
    });
    group.transpose()
}

fn check_exports(registry: &Rc<Registry>, described: &MigratedDisk) -> anyhow::Result<()> {
    ensure!(!registry.lifecycle.is_upgrading.get(), "an upgrade is in progress there (try again)");
    if let Some(serving) = target_server(registry, described)? {
        for name in &described.exports {
            // Includes exports that are ending: their names are still in use at the server.
            let name_exists = registry.exports.all().iter().any(|export| {
                export.name == *name
                    && matches!(&export.endpoint, RunningEndpoint::Nbd(at, _) if Rc::ptr_eq(at, &serving))
            });
            registry.check_reserved_name(&serving, name, "")?;
            ensure!(!name_exists, "export {name}: an export of this name exists at {}", serving.address());
        }
    }
    for endpoint in described.endpoints()? {
        registry.sandbox().map_or(Ok(()), |sandbox| sandbox.check_export(&endpoint))?;
        endpoint.path().map_or(Ok(()), |socket| check_directory(&socket))?;
    }
    Ok(())
}

/// Checks that a socket can be created in this directory. Uses another name, as the source may be
/// on the same host and have the socket.
fn check_directory(socket: &Path) -> anyhow::Result<()> {
    let mut probe = socket.as_os_str().to_owned();
    probe.push(".try");
    let result = UnixListener::bind(&probe);
    result.with_context(|| format!("no socket can be created in the directory of {}", socket.display()))?;
    // A remaining file is harmless.
    let _ = fs::remove_file(&probe);
    Ok(())
}

/// NBD server for the exports of the disk; `None` if it has no NBD exports.
fn target_server(registry: &Registry, described: &MigratedDisk) -> anyhow::Result<Option<Rc<RunningServer>>> {
    if described.exports.is_empty() {
        return Ok(None);
    }
    let servers = registry.exports.servers();
    let addresses = || servers.iter().map(|serving| serving.address()).collect::<Vec<_>>().join(", ");
    match (&described.listen, &*servers) {
        (Some(address), []) => {
            bail!("that host has no NBD server (start weir there with --nbd {address})")
        }
        (Some(address), _) => {
            let found = servers.iter().find(|serving| serving.listens_at(address));
            let missing =
                || anyhow!("no NBD server listens at {address} there (its servers: {})", addresses());
            Ok(Some(Rc::clone(found.with_context(|| missing().to_string())?)))
        }
        (None, []) => bail!(
            "it is exported over NBD, and that host has no NBD server (start weir there with --nbd \
             ADDRESS, or detach the export here)"
        ),
        (None, _) => match &*registry.exports.default_servers() {
            [only] => Ok(Some(Rc::clone(only))),
            _ => bail!("that host has several NBD servers: {} (select one with --nbd ADDRESS)", addresses()),
        },
    }
}

/// Opens the image, which the source has closed, and adds the disk with its bucket levels. No
/// client reaches it yet.
pub(super) async fn open_disk(
    registry: &Rc<Registry>,
    disk: &str,
    described: &MigratedDisk,
) -> anyhow::Result<()> {
    let (planned, _) = check_config(registry, disk, described).await?;
    let image = DiskAssembly::for_registry(registry).open(&planned).await?;
    let _guard = registry.lock_structure().await?;
    // Looked up again: a reload may have removed or created the group while the image was opened.
    let group = group(registry, described)?;
    let running = assemble::build_disk(&planned, group.as_ref(), image)?;
    // Before the disk is listed, so that it never starts with full buckets after a migration.
    if let Some(filled) = &described.filled {
        let filled = running.disk.throttle().restore_levels(&filled.to_levels()?);
        filled.map_err(|invalid| anyhow!("{}", invalid.rule))?;
    }
    if let Some(counts) = &described.quota {
        registry.quotas.restore(disk, counts);
    }
    // `add_disk` rejects names of disks that are being migrated; this disk is the exception.
    let reserved_group = registry.disks.end_migration(disk);
    let added = registry.add_disk(running);
    registry.disks.reserve_for_migration(disk, reserved_group);
    added?;
    if let Err(error) = registry.check_device_of(disk) {
        let _ = registry.remove_disk(disk).await;
        return Err(error);
    }
    Ok(())
}

/// Waits until etcd confirms that the offer still stands. This daemon may have been suspended since
/// it received the offer, and an image at an NBD server has no lock that excludes the source.
async fn check_offer(cluster: &ClusterMembership, offered: &ReceivedOffer) -> Result<(), String> {
    loop {
        match cluster.step(MigrationStep::Check { offered: Box::new(offered.clone()) }).await {
            Some(StepOutcome::Done(_)) => return Ok(()),
            Some(StepOutcome::Lost(why) | StepOutcome::Absent(why)) => return Err(why),
            Some(StepOutcome::Disconnected(_)) | None => {
                reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
            }
        }
    }
}

/// Takes the disk: opens it, claims it in etcd and exports it. The inner error is the reason for
/// which etcd rejected the claim.
async fn take_disk(
    registry: &Rc<Registry>,
    cluster: &Rc<ClusterMembership>,
    offered: &ReceivedOffer,
) -> anyhow::Result<Result<(), String>> {
    let disk = &offered.disk;
    if let Err(why) = check_offer(cluster, offered).await {
        return Ok(Err(why));
    }
    let described = described_disk(offered)?;
    check_exports(registry, &described)?;
    open_disk(registry, disk, &described).await?;
    if let Err(why) = cluster.record_reservations_now(&**registry).await {
        registry.remove_disk(disk).await?;
        bail!("{why}");
    }
    let mut is_open = true;
    let listed = super::is_in_config_file(registry, disk).await;
    // Open before the claim: once claimed, the disk must be served here.
    loop {
        match cluster.step(MigrationStep::Claim { offered: Box::new(offered.clone()), listed }).await {
            Some(StepOutcome::Done(_)) => break,
            Some(StepOutcome::Lost(why) | StepOutcome::Absent(why)) => {
                if is_open {
                    registry.remove_disk(disk).await?;
                }
                return Ok(Err(why));
            }
            // The outcome is unknown: the source may own the disk again, and then needs the image.
            Some(StepOutcome::Disconnected(_)) | None => {
                if std::mem::take(&mut is_open) {
                    registry.remove_disk(disk).await?;
                }
                reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
            }
        }
    }
    while !is_open {
        match open_disk(registry, disk, &described).await {
            Ok(()) => is_open = true,
            Err(why) => {
                tracing::error!(%disk, "the disk was migrated here, but cannot be opened: {why:#}");
                reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
            }
        }
    }
    cluster.set_moved(disk, None);
    export_disk(registry, disk, &described).await;
    // If etcd does not receive this step, only an unused key remains.
    let _ = cluster.step(MigrationStep::Settle { offered: Box::new(offered.clone()) }).await;
    Ok(Ok(()))
}

/// Exports the disk. Errors are logged: the disk belongs to this host by now.
async fn export_disk(registry: &Rc<Registry>, disk: &str, described: &MigratedDisk) {
    let _guard = registry.lock_structure().await;
    let nbd = match target_server(registry, described) {
        Ok(serving) => serving
            .into_iter()
            .flat_map(|serving| described.exports.iter().map(move |name| (Rc::clone(&serving), name)))
            .collect(),
        Err(error) => {
            tracing::error!(%disk, "it was migrated here, but is not exported: {error:#}");
            Vec::new()
        }
    };
    let Ok(running) = registry.disks.get(disk) else { return };
    let read_only = running.disk.image().is_read_only();
    for (serving, name) in nbd {
        let new = NewNbdExport {
            id: registry.exports.free_id(if name.is_empty() { disk } else { name }, &serving.address()),
            name: name.clone(),
            description: String::new(),
            access: policy::access::AccessRules::default(),
            disk: disk.to_owned(),
            read_only,
            bitmaps: [].into(),
        };
        if let Err(error) = registry.add_export(&serving, new) {
            tracing::error!(%disk, "it was migrated here, but is not exported: {error:#}");
        }
    }
    let endpoints: Vec<ExportTarget> = described.endpoints().unwrap_or_default();
    for endpoint in endpoints {
        let id = registry.exports.free_id(disk, &endpoint.address());
        if let Err(error) = registry.add_endpoint(id, Rc::clone(&running), read_only, &endpoint, None).await {
            tracing::error!(%disk, "it was migrated here, but is not exported: {error:#}");
        }
    }
}
