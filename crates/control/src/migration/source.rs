//! Source of a migration.

use std::{cell::Cell, rc::Rc};

use anyhow::{Context as _, anyhow, bail, ensure};
use api::MovedDisk;
use cluster::{
    ClusterMembership,
    migration_offer::{MigrationAnswer, MigrationOffer, MigrationReply, MigrationStep, StepOutcome},
};
use export::nbd::Removal;

use super::{ANSWER_TIMEOUT, JOIN_TIMEOUT, MigratedDisk, RETRY_INTERVAL, target};
use crate::{
    registry::{NewNbdExport, Registry, RegistryError, RunningEndpoint, RunningExport},
    running_server::RunningServer,
};

/// Parameters of a migration.
#[derive(Clone, Debug)]
pub(crate) struct MigrationRequest {
    pub(crate) disk: String,
    /// Target host.
    pub(crate) to: String,
    /// Address of the NBD server at the target.
    pub(crate) listen: Option<String>,
    /// Disconnects clients.
    pub(crate) force: bool,
}

/// Migrates a disk. Continues if the caller is dropped.
///
/// # Errors
/// Reason why the disk is still, or again, on this host.
pub(crate) async fn migrate(registry: &Rc<Registry>, request: MigrationRequest) -> anyhow::Result<MovedDisk> {
    let cluster = registry.cluster().cloned();
    let cluster = cluster.context(
        "cluster: this daemon is in none (add [cluster] to the config files of both hosts, and restart weir)",
    )?;
    ensure!(
        request.to != cluster.host(),
        "disk {}: it is on {} already (name another host)",
        request.disk,
        request.to
    );
    registry.disks.get(&request.disk)?;
    registry.jobs.check_idle(&request.disk)?;
    // Reserved until the end of the task below, also across the removal of the disk.
    let is_first = registry.disks.begin_migration(&request.disk);
    ensure!(is_first, "disk {}: it is already being migrated (wait for that)", request.disk);
    let (done, outcome) = async_channel::bounded(1);
    let registry = Rc::clone(registry);
    reactor::spawn(async move {
        let result = migrate_to_target(&registry, &cluster, &request).await;
        registry.disks.end_migration(&request.disk);
        if let Err(error) = &result {
            tracing::warn!(disk = request.disk, to = request.to, "the disk was not migrated: {error:#}");
        }
        // The caller may be gone; the task must still finish.
        let _ = done.try_send(result.with_context(|| format!("disk {}", request.disk)));
    });
    outcome.recv().await.context("the daemon is ending")?
}

async fn migrate_to_target(
    registry: &Rc<Registry>,
    cluster: &Rc<ClusterMembership>,
    request: &MigrationRequest,
) -> anyhow::Result<MovedDisk> {
    let running = registry.disks.get(&request.disk)?;
    ensure!(
        !running.lower_nodes.iter().any(|node| node.is_own_disk),
        "it is above another node (`blockdev-del` removes it)"
    );
    let exports = registry.exports.of_disk(&request.disk);
    let described = MigratedDisk::describe(registry, &running, &exports, request.listen.clone())?;
    // Early, for a quick answer; `remove_exports` checks again atomically.
    if !request.force {
        check_unused(&exports).await?;
    }
    drop(running);
    let number = random_number()?;
    let from = cluster.host().to_owned();
    let described = serde_json::to_value(described)?;
    let offer = MigrationOffer { from, host_revision: 0, number, is_released: false, described };
    let answers = cluster.await_answers(number);
    let offer_step = || MigrationStep::Offer {
        to: request.to.clone(),
        disk: request.disk.clone(),
        offer: Box::new(offer.clone()),
    };
    let until = reactor::now() + JOIN_TIMEOUT;
    let mut outcome = cluster.step(offer_step()).await;
    // A host that was just started may join the cluster any moment.
    let may_join = |outcome: &Option<StepOutcome>| match outcome {
        Some(StepOutcome::Absent(_)) => true,
        Some(StepOutcome::Disconnected(_)) => cluster.is_joining(),
        _ => false,
    };
    while may_join(&outcome) && reactor::now() < until {
        reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
        outcome = cluster.step(offer_step()).await;
    }
    let revision = match outcome {
        Some(StepOutcome::Done(revision)) => revision,
        Some(StepOutcome::Lost(why) | StepOutcome::Absent(why)) => bail!("{why}"),
        Some(StepOutcome::Disconnected(why)) => bail!("etcd is unreachable: {why}"),
        None => bail!("etcd does not answer in time (try again)"),
    };
    let answered = reactor::timeout(ANSWER_TIMEOUT, answers.recv()).await;
    let handed_over = match answered {
        Ok(Ok(MigrationAnswer { said: MigrationReply::Ready, .. })) => {
            hand_over(registry, cluster, request, SentOffer { offer, revision }, exports, &answers).await
        }
        Ok(Ok(MigrationAnswer { said: MigrationReply::Refused(why), .. })) => {
            Err(anyhow!("{} refuses it: {why}", request.to))
        }
        _ => Err(anyhow!(
            "{} does not answer within {} s (is its weir older than this one, or stopped?)",
            request.to,
            ANSWER_TIMEOUT.as_secs()
        )),
    };
    if handed_over.is_err() {
        // If this fails, the offer expires with this host's lease before the target can claim it.
        let _ = withdraw(cluster, request, number).await;
    }
    // From here on the disk belongs to the target.
    let taken = handed_over?;
    cluster.set_moved(&request.disk, Some(&request.to));
    let listed_there = taken.as_ref().and_then(|answer| answer.listed);
    let listed_here = super::is_in_config_file(registry, &request.disk).await;
    // Wait until the target has exported the disk. Without that message the migration still
    // succeeded; the next start removes the key.
    let settled = async { taken.is_some_and(|answer| answer.settled) || until_exported(&answers).await };
    if reactor::timeout(ANSWER_TIMEOUT, settled).await == Ok(true) && listed_here == Some(false) {
        let _ = cluster.step(MigrationStep::Forget { disk: request.disk.clone() }).await;
    }
    Ok(MovedDisk {
        disk: request.disk.clone(),
        from: cluster.host().to_owned(),
        to: request.to.clone(),
        listed_here,
        listed_there,
    })
}

/// Removed export, with the parameters for adding it again.
enum RemovedExport {
    Nbd(Rc<RunningServer>, NewNbdExport),
    Separate { id: String, config: settings::ExportTarget, read_only: bool },
}

impl RemovedExport {
    fn of(export: &RunningExport) -> Option<Self> {
        match &export.endpoint {
            RunningEndpoint::Nbd(serving, _) => {
                Some(Self::Nbd(Rc::clone(serving), export.nbd_parameters.clone()?))
            }
            RunningEndpoint::Separate(_) => Some(Self::Separate {
                id: export.id.clone(),
                config: export.endpoint_config.clone()?,
                read_only: export.read_only,
            }),
        }
    }
}

async fn restore_exports(registry: &Rc<Registry>, disk: &str, removed: Vec<RemovedExport>) {
    let _guard = registry.lock_structure().await;
    for export in removed {
        let restored = match export {
            RemovedExport::Nbd(serving, new) => registry.add_export(&serving, new).map_err(Into::into),
            RemovedExport::Separate { id, config: endpoint_config, read_only } => {
                match registry.disks.get(disk) {
                    Ok(running) => {
                        registry.add_endpoint(id, running, read_only, &endpoint_config, None).await.map(drop)
                    }
                    Err(refused) => Err(refused.into()),
                }
            }
        };
        if let Err(error) = restored {
            tracing::error!(disk, "an export cannot be restored after a failed migration: {error:#}");
        }
    }
}

/// Removes the exports of a disk, and returns the parameters for adding them again. If requests of
/// their clients are in flight for longer than [`ANSWER_TIMEOUT`], the disk stays, and the exports
/// are added again once the requests complete.
async fn remove_in_time(
    registry: &Rc<Registry>,
    disk: &str,
    exports: Vec<Rc<RunningExport>>,
    removal: Removal,
    removed: Vec<RemovedExport>,
) -> anyhow::Result<Vec<RemovedExport>> {
    let is_abandoned = Rc::new(Cell::new(false));
    let (registry, name, is_late) = (Rc::clone(registry), disk.to_owned(), Rc::clone(&is_abandoned));
    // Not cancelled by the time limit: the removal completes in the background.
    let removing = reactor::spawn_detached(async move {
        registry.remove_exports(&exports, removal).await?;
        drop(exports);
        if is_late.get() {
            restore_exports(&registry, &name, removed).await;
            return Ok(Vec::new());
        }
        Ok(removed)
    });
    match reactor::timeout(ANSWER_TIMEOUT, removing).await {
        Ok(result) => {
            result.context("the daemon is ending")?.map_err(|refused: RegistryError| refused.into())
        }
        Err(_) => {
            is_abandoned.set(true);
            let patience_s = ANSWER_TIMEOUT.as_secs();
            bail!(
                "requests of its clients have been in flight for {patience_s} s (check its \
                 storage; its exports are restored when the requests end)"
            )
        }
    }
}

async fn check_unused(exports: &[Rc<RunningExport>]) -> anyhow::Result<()> {
    for export in exports {
        let unused = export.check_unused().await;
        unused.context("clients use it (disconnect them, or use --force)")?;
    }
    Ok(())
}

async fn withdraw(
    cluster: &ClusterMembership,
    request: &MigrationRequest,
    number: u64,
) -> Option<StepOutcome> {
    cluster.step(MigrationStep::Withdraw { to: request.to.clone(), disk: request.disk.clone(), number }).await
}

/// Offer in etcd, with the revision that stored it.
struct SentOffer {
    offer: MigrationOffer,
    revision: i64,
}

/// Stops serving the disk and hands it over to the target, which is ready; on failure the disk is
/// served here again. Returns the target's answer, or `None` if the target owns the disk but its
/// answer was lost.
async fn hand_over(
    registry: &Rc<Registry>,
    cluster: &Rc<ClusterMembership>,
    request: &MigrationRequest,
    sent: SentOffer,
    exports: Vec<Rc<RunningExport>>,
    answers: &async_channel::Receiver<MigrationAnswer>,
) -> anyhow::Result<Option<MigrationAnswer>> {
    let SentOffer { offer, revision } = sent;
    let structure_guard = registry.lock_structure().await?;
    let running = registry.disks.get(&request.disk)?;
    // Described again: settings may have changed since the offer.
    let mut described = MigratedDisk::describe(registry, &running, &exports, request.listen.clone())?;
    let active = exports.iter().filter(|export| !export.is_ending());
    let removed: Vec<_> = active.filter_map(|export| RemovedExport::of(export)).collect();
    let removal = if request.force { Removal::Hard } else { Removal::IfUnused };
    let removed = remove_in_time(registry, &request.disk, exports, removal, removed).await?;
    // Without exports, no request can write after this flush.
    let flushed = running.disk.flush().await;
    // After the last request, so that the levels include its charge.
    described.filled = running.disk.throttle().bucket_levels().map(Into::into);
    registry.quotas.count_before_change(&running.disk);
    described.quota = registry.quotas.stored(&request.disk, &running.disk.throttle().settings().quota);
    // From here on no request may reach the image until the owner of the disk is known.
    let group = running.disk.throttle().group().map(|group| group.name().to_owned());
    registry.disks.reserve_for_migration(&request.disk, group);
    let ready = flushed
        .context("its image could not be flushed")
        .and_then(|()| Ok(serde_json::to_value(&described)?))
        .and_then(|serialized| {
            registry.remove_from_list(&request.disk).map(|_| serialized).map_err(Into::into)
        });
    drop(structure_guard);
    let serialized = match ready {
        Ok(serialized) => serialized,
        Err(why) => {
            restore_exports(registry, &request.disk, removed).await;
            return Err(why);
        }
    };
    let closed = running.disk.close().await;
    drop(running);
    cluster.record_lowered_reservations(&**registry);
    let why = match closed {
        Ok(()) => {
            let given =
                Box::new(MigrationOffer { is_released: true, described: serialized, ..offer.clone() });
            let step = || MigrationStep::Release {
                to: request.to.clone(),
                disk: request.disk.clone(),
                offer: given.clone(),
                revision,
            };
            let until = reactor::now() + ANSWER_TIMEOUT;
            let mut done = cluster.step(step()).await;
            // No answer: the transaction may have been applied or not. It is idempotent.
            while done.is_none() && reactor::now() < until {
                reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
                done = cluster.step(step()).await;
            }
            match done {
                Some(StepOutcome::Lost(why) | StepOutcome::Absent(why) | StepOutcome::Disconnected(why)) => {
                    why
                }
                Some(StepOutcome::Done(_)) | None => {
                    match reactor::timeout(ANSWER_TIMEOUT, final_answer(answers)).await {
                        Ok(Some(answer)) if answer.said == MigrationReply::Taken => return Ok(Some(answer)),
                        Ok(Some(MigrationAnswer { said: MigrationReply::Refused(why), .. })) => {
                            format!("{} refuses it: {why}", request.to)
                        }
                        _ => {
                            format!("{} has not claimed it within {} s", request.to, ANSWER_TIMEOUT.as_secs())
                        }
                    }
                }
            }
        }
        Err(error) => format!("its image could not be closed: {error}"),
    };
    if resume_disk(registry, cluster, request, offer.number, &described, &why).await == DiskOwner::Target {
        return Ok(None);
    }
    restore_exports(registry, &request.disk, removed).await;
    Err(anyhow!("{why}; it is served here again"))
}

/// First answer after "ready".
async fn final_answer(answers: &async_channel::Receiver<MigrationAnswer>) -> Option<MigrationAnswer> {
    loop {
        let answer = answers.recv().await.ok()?;
        if answer.said != MigrationReply::Ready {
            return Some(answer);
        }
    }
}

/// Waits for the message that the target has completed the migration; false if the channel closes.
async fn until_exported(answers: &async_channel::Receiver<MigrationAnswer>) -> bool {
    while let Ok(answer) = answers.recv().await {
        if answer.settled {
            return true;
        }
    }
    false
}

#[derive(PartialEq)]
enum DiskOwner {
    ThisHost,
    Target,
}

/// Opens the disk here again, unless the target has claimed it.
async fn resume_disk(
    registry: &Rc<Registry>,
    cluster: &Rc<ClusterMembership>,
    request: &MigrationRequest,
    number: u64,
    described: &MigratedDisk,
    why: &str,
) -> DiskOwner {
    tracing::warn!(disk = request.disk, to = request.to, "migration failed, resuming the disk here: {why}");
    // The withdrawal is a transaction: either it or the target's claim succeeds.
    loop {
        match withdraw(cluster, request, number).await {
            Some(StepOutcome::Done(_)) => break,
            Some(StepOutcome::Lost(_) | StepOutcome::Absent(_)) => return DiskOwner::Target,
            Some(StepOutcome::Disconnected(_)) | None => {
                reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
            }
        }
    }
    // The target may keep the image open for a moment longer.
    while let Err(error) = target::open_disk(registry, &request.disk, described).await {
        tracing::error!(
            disk = request.disk,
            "migration failed, and the disk cannot be opened again: {error:#}"
        );
        reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
    }
    DiskOwner::ThisHost
}

/// Random number that identifies a migration.
fn random_number() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    openssl::rand::rand_bytes(&mut bytes).context("no random number is available")?;
    Ok(u64::from_le_bytes(bytes))
}
