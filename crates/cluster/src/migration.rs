//! The protocol that migrates a disk to another host, as transactions in etcd.
//!
//! ```text
//!   from                                   to
//!   Offer     move = asked        ─────►
//!             moved = ready       ◄─────   Reply      it could serve the disk
//!   (disconnects clients, closes the image)
//!   Release   move = given        ─────►
//!                                          Check      the offer is still valid
//!                                          (opens the image)
//!             moved = taken       ◄─────   Claim      deletes `move`: the disk belongs to `to`
//!             moved = settled     ◄─────   Settle     `to` has read the result
//!   Forget    deletes `moved`              once no host needs it
//!   Withdraw  deletes `move`               if before Claim, the disk stays on `from`
//!   Reclaim   deletes `moved`              a disk of this name was added on `from` again
//! ```
//!
//! Claim and Withdraw exclude each other, so exactly one host has the disk, and both hosts learn
//! which one. An offer has its host's lease and the revision of that host's key, which changes at
//! each start: the offer of a process that has ended cannot be claimed. Never opens an image.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    etcd::{EtcdClient, EtcdError, EtcdKeyValue, EtcdOperation, KeyRange, TransactionCondition},
    etcd_values,
    keys::{EtcdKey, EtcdKeys},
    migration_offer::{
        MigrationAnswer, MigrationOffer, MigrationReply, MigrationStep, ReceivedOffer, StepOutcome,
    },
    session_state::{HostLeases, SessionState},
};

/// Performs a step, or returns the reason why not.
pub(super) async fn perform_step(
    session: &SessionState,
    etcd: &mut EtcdClient,
    step: MigrationStep,
) -> Result<StepOutcome, EtcdError> {
    let Some(HostLeases { name: lease, .. }) = session.joined else {
        return Ok(StepOutcome::Disconnected(
            "this host has not joined its cluster (`weir cluster status` shows why)".to_owned(),
        ));
    };
    match step {
        MigrationStep::Offer { to, disk, offer } => {
            offer_disk(session, etcd, lease, &to, &disk, *offer).await
        }
        MigrationStep::Release { to, disk, offer, revision } => {
            let own_key = session.keys.key(EtcdKey::Host(&session.cluster.host));
            let host = etcd.read_one(session.keys.single(EtcdKey::Host(&session.cluster.host))).await?;
            let run = host.map_or(0, |value| value.mod_revision);
            let (key, number) = (session.keys.key(EtcdKey::Move(&to, &disk)), offer.number);
            let put = EtcdOperation::put(
                &key,
                &etcd_values::write(&MigrationOffer { host_revision: run, ..*offer }),
                Some(lease),
            );
            let compare =
                [TransactionCondition::Changed(key, revision), TransactionCondition::Changed(own_key, run)];
            let result = etcd.transact(&compare, &[put]).await?;
            Ok(match result.succeeded {
                true => StepOutcome::Done(result.revision),
                false => {
                    // An earlier attempt may have succeeded and its answer was lost.
                    let stored = etcd.read_one(session.keys.single(EtcdKey::Move(&to, &disk))).await?;
                    let stored =
                        stored.and_then(|value| etcd_values::read::<MigrationOffer>(&value.value).ok());
                    match stored.is_some_and(|stored| {
                        stored.is_released && (stored.number, stored.host_revision) == (number, run)
                    }) {
                        true => StepOutcome::Done(result.revision),
                        false => StepOutcome::Lost(
                            "the offer was deleted from etcd (move the disk again)".to_owned(),
                        ),
                    }
                }
            })
        }
        MigrationStep::Withdraw { to, disk, number } => withdraw(session, etcd, &to, &disk, number).await,
        MigrationStep::Reply { offered, said: migration_reply } => {
            let unchanged = unchanged(session, &offered);
            let put = reply(session, &offered, migration_reply, Some(lease));
            let result = etcd.transact(&[unchanged], &[put]).await?;
            Ok(match result.succeeded {
                true => StepOutcome::Done(result.revision),
                false => StepOutcome::Lost("the offer was withdrawn".to_owned()),
            })
        }
        MigrationStep::Check { offered } => {
            let result = etcd.transact(&claimable(session, &offered), &[]).await?;
            Ok(match result.succeeded {
                true => StepOutcome::Done(result.revision),
                false => lost_outcome(&offered),
            })
        }
        MigrationStep::Claim { offered, listed } => claim(session, etcd, &offered, listed).await,
        MigrationStep::Settle { offered } => settle(session, etcd, &offered).await,
        MigrationStep::Forget { disk } => {
            let (_, found) = etcd.read(&[session.keys.below_all_hosts()]).await?;
            delete_moved_records(
                &session.keys,
                etcd,
                &session.cluster.host,
                found.iter().flatten(),
                |other| other != disk,
            )
            .await?;
            Ok(StepOutcome::Done(0))
        }
        MigrationStep::Reclaim { disk } => {
            let deletion =
                EtcdOperation::Delete(session.keys.single(EtcdKey::Moved(&session.cluster.host, &disk)));
            Ok(StepOutcome::Done(etcd.transact(&[], &[deletion]).await?.revision))
        }
    }
}

fn unchanged(
    session: &SessionState,
    ReceivedOffer { disk, revision, .. }: &ReceivedOffer,
) -> TransactionCondition {
    TransactionCondition::Changed(session.keys.key(EtcdKey::Move(&session.cluster.host, disk)), *revision)
}

/// Conditions of a claim: the offer is unchanged, and its host has neither restarted nor rejoined
/// the cluster.
fn claimable(session: &SessionState, offered: &ReceivedOffer) -> [TransactionCondition; 2] {
    let from = session.keys.key(EtcdKey::Host(&offered.offer.from));
    [unchanged(session, offered), TransactionCondition::Changed(from, offered.offer.host_revision)]
}

fn lost_outcome(offered: &ReceivedOffer) -> StepOutcome {
    let from = &offered.offer.from;
    StepOutcome::Lost(format!(
        "{from} has withdrawn its offer, restarted, or rejoined the cluster (move the disk again)"
    ))
}

fn reply(
    session: &SessionState,
    ReceivedOffer { disk, offer, .. }: &ReceivedOffer,
    migration_reply: MigrationReply,
    lease: Option<i64>,
) -> EtcdOperation {
    let answer = answer(session, offer, migration_reply);
    EtcdOperation::put(
        &session.keys.key(EtcdKey::Moved(&offer.from, disk)),
        &etcd_values::write(&answer),
        lease,
    )
}

fn answer(session: &SessionState, offer: &MigrationOffer, reply: MigrationReply) -> MigrationAnswer {
    let by = session.cluster.host.clone();
    MigrationAnswer { by, number: offer.number, said: reply, image: None, listed: None, settled: false }
}

async fn offer_disk(
    session: &SessionState,
    etcd: &mut EtcdClient,
    lease: i64,
    to: &str,
    disk: &str,
    offer: MigrationOffer,
) -> Result<StepOutcome, EtcdError> {
    let own_key = session.keys.key(EtcdKey::Host(&session.cluster.host));
    let names =
        [session.keys.single(EtcdKey::Host(to)), session.keys.single(EtcdKey::Host(&session.cluster.host))];
    let (_, found) = etcd.read(&names).await?;
    let value_of = |key: &str| found.iter().flatten().find(|value| value.key == key).cloned();
    let target_key = session.keys.key(EtcdKey::Host(to));
    let (Some(_), Some(EtcdKeyValue { mod_revision: run, .. })) = (value_of(&target_key), value_of(&own_key))
    else {
        return Ok(StepOutcome::Absent(format!(
            "no running host of cluster {:?} is called {to:?} (`weir cluster status` lists them)",
            session.cluster.name
        )));
    };
    let key = session.keys.key(EtcdKey::Move(to, disk));
    let offer = MigrationOffer { host_revision: run, ..offer };
    let compare = [TransactionCondition::Absent(key.clone()), TransactionCondition::Changed(own_key, run)];
    let earlier = EtcdOperation::Delete(session.keys.single(EtcdKey::Moved(&session.cluster.host, disk)));
    let put = EtcdOperation::put(&key, &etcd_values::write(&offer), Some(lease));
    let result = etcd.transact(&compare, &[earlier, put]).await?;
    Ok(match result.succeeded {
        true => StepOutcome::Done(result.revision),
        false => StepOutcome::Lost(format!(
            "a disk of this name is already being moved to {to} (try again in a minute, or check \
             which host it comes from)"
        )),
    })
}

/// Number and revision of an offer.
fn offer_number(found: &[Vec<EtcdKeyValue>]) -> Option<(u64, i64)> {
    let value = found.iter().flatten().next()?;
    let offer = etcd_values::read::<MigrationOffer>(&value.value).ok()?;
    Some((offer.number, value.mod_revision))
}

async fn withdraw(
    session: &SessionState,
    etcd: &mut EtcdClient,
    to: &str,
    disk: &str,
    number: u64,
) -> Result<StepOutcome, EtcdError> {
    let range = session.keys.single(EtcdKey::Move(to, disk));
    loop {
        let (_, found) = etcd.read(std::slice::from_ref(&range)).await?;
        match offer_number(&found) {
            Some((current, revision)) if current == number => {
                let compare =
                    TransactionCondition::Changed(session.keys.key(EtcdKey::Move(to, disk)), revision);
                // The answer to this offer is obsolete.
                let moved_range = session.keys.single(EtcdKey::Moved(&session.cluster.host, disk));
                let deletions = [range.clone(), moved_range].map(EtcdOperation::Delete);
                let result = etcd.transact(&[compare], &deletions).await?;
                // If it fails, the offer was claimed or changed meanwhile: the loop reads it again.
                if result.succeeded {
                    return Ok(StepOutcome::Done(result.revision));
                }
            }
            // The offer is gone: claimed, or deleted with its lease, after which it can no longer
            // be claimed.
            _ => {
                let host = &session.cluster.host;
                return Ok(match is_taken(session, etcd, host, disk, number).await? {
                    true => StepOutcome::Lost("the other host has claimed the disk".to_owned()),
                    false => StepOutcome::Done(0),
                });
            }
        }
    }
}

/// Invalidates the offers of an earlier run of this host, if its lease has not expired yet: claims
/// compare the revision of the host's key, and rewriting the key changes it. The key keeps that
/// run's lease.
async fn invalidate_earlier_offers(
    keys: &EtcdKeys,
    etcd: &mut EtcdClient,
    host: &str,
) -> Result<(), EtcdError> {
    let key = keys.key(EtcdKey::Host(host));
    loop {
        let Some(own_value) = etcd.read_one(keys.single(EtcdKey::Host(host))).await? else { return Ok(()) };
        let lease = (own_value.lease != 0).then_some(own_value.lease);
        let put = EtcdOperation::put(&key, &own_value.value, lease);
        if etcd
            .transact(&[TransactionCondition::Changed(key.clone(), own_value.mod_revision)], &[put])
            .await?
            .succeeded
        {
            return Ok(());
        }
    }
}

/// Returns which of a host's disks (with their images) moved to another host of the cluster.
///
/// Disks that moved to a host that has left the cluster return to this host. A record of this is
/// written for the departed host, which may join again. Has to run before images are opened: offers
/// of earlier runs cannot be claimed afterwards.
pub(super) async fn moved_disks(
    keys: &EtcdKeys,
    etcd: &mut EtcdClient,
    host: &str,
    disks: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, EtcdError> {
    invalidate_earlier_offers(keys, etcd, host).await?;
    let (_, found) = etcd.read(&[keys.below_all_hosts(), keys.reports()]).await?;
    let (mut moved, mut members) = (BTreeMap::new(), BTreeSet::new());
    for value in found.iter().flatten() {
        match keys.parse(&value.key) {
            Some(EtcdKey::Moved(from, disk)) => {
                moved.extend(parse_taken(&value.value).map(|answer| ((from, disk), answer)));
            }
            Some(EtcdKey::Host(name) | EtcdKey::Report(name)) => drop(members.insert(name)),
            _ => {}
        }
    }
    let (mut moved_away, mut returned) = (BTreeMap::new(), Vec::new());
    for (&(_, disk), answer) in moved.iter().filter(|((from, _), _)| *from == host) {
        let Some(image) = disks.get(disk) else { continue };
        if answer.image.as_ref().is_some_and(|moved| moved != image) {
            continue;
        }
        let (mut by, mut visited) = (&*answer.by, BTreeSet::from([host]));
        // Follows further migrations. The set of visited hosts ends a cycle.
        while visited.insert(by)
            && let Some(next) = moved.get(&(by, disk))
        {
            by = &next.by;
        }
        match by != host && members.contains(by) {
            true => drop(moved_away.insert(disk.to_owned(), by.to_owned())),
            false => returned.push((disk, by, image)),
        }
    }
    for (disk, by, image) in returned {
        let mut operations = vec![EtcdOperation::Delete(keys.single(EtcdKey::Moved(host, disk)))];
        let mut compare = Vec::new();
        if by != host {
            // The departed host may join again, and its config file may list the disk.
            let answer = MigrationAnswer {
                by: host.to_owned(),
                number: 0,
                said: MigrationReply::Taken,
                image: Some(image.clone()),
                listed: Some(true),
                settled: true,
            };
            operations.push(EtcdOperation::put(
                &keys.key(EtcdKey::Moved(by, disk)),
                &etcd_values::write(&answer),
                None,
            ));
            // If the departed host has joined again since the read above, it keeps the disk.
            compare.push(TransactionCondition::Absent(keys.key(EtcdKey::Host(by))));
        }
        if !etcd.transact(&compare, &operations).await?.succeeded {
            moved_away.insert(disk.to_owned(), by.to_owned());
        }
    }
    delete_moved_records(keys, etcd, host, found.iter().flatten(), |disk| disks.contains_key(disk)).await?;
    Ok(moved_away)
}

/// Deletes the record of moved disks once no host needs it. A record is needed:
///
/// - by the host that claimed the disk, until it has read that its claim succeeded (`settled`);
/// - by this host, which must not serve the disk again: until it has read the record, as every
///   caller has, and at its next start if its config file lists the disk;
/// - by an earlier host of the same disk, which follows the chain of records at its start.
async fn delete_moved_records(
    keys: &EtcdKeys,
    etcd: &mut EtcdClient,
    host: &str,
    of_hosts: impl Iterator<Item = &EtcdKeyValue>,
    is_listed: impl Fn(&str) -> bool,
) -> Result<(), EtcdError> {
    let (mut settled, mut arrived) = (Vec::new(), BTreeSet::new());
    for value in of_hosts {
        let (Some(EtcdKey::Moved(from, disk)), Some(answer)) =
            (keys.parse(&value.key), parse_taken(&value.value))
        else {
            continue;
        };
        if from == host && answer.settled && !is_listed(disk) {
            settled.push((disk, value));
        } else if answer.by == host {
            arrived.insert(disk);
        }
    }
    for (_, value) in settled.iter().filter(|(disk, _)| !arrived.contains(disk)) {
        let deletion = EtcdOperation::Delete(KeyRange::Key(value.key.clone()));
        etcd.transact(&[TransactionCondition::Changed(value.key.clone(), value.mod_revision)], &[deletion])
            .await?;
    }
    Ok(())
}

/// Marks a claim as known to the host that made it. Best effort: otherwise the record stays longer.
async fn settle(
    session: &SessionState,
    etcd: &mut EtcdClient,
    offered: &ReceivedOffer,
) -> Result<StepOutcome, EtcdError> {
    let key = session.keys.key(EtcdKey::Moved(&offered.offer.from, &offered.disk));
    let stored = etcd.read_one(KeyRange::Key(key.clone())).await?;
    let Some((revision, answer)) =
        stored.and_then(|value| Some((value.mod_revision, parse_taken(&value.value)?)))
    else {
        return Ok(StepOutcome::Done(0));
    };
    if answer.number == offered.offer.number {
        let put =
            EtcdOperation::put(&key, &etcd_values::write(&MigrationAnswer { settled: true, ..answer }), None);
        etcd.transact(&[TransactionCondition::Changed(key, revision)], &[put]).await?;
    }
    Ok(StepOutcome::Done(0))
}

fn parse_taken(value: &[u8]) -> Option<MigrationAnswer> {
    etcd_values::read::<MigrationAnswer>(value).ok().filter(|answer| answer.said == MigrationReply::Taken)
}

async fn is_taken(
    session: &SessionState,
    etcd: &mut EtcdClient,
    host: &str,
    disk: &str,
    number: u64,
) -> Result<bool, EtcdError> {
    let answer = etcd.read_one(session.keys.single(EtcdKey::Moved(host, disk))).await?;
    let answer = answer.and_then(|value| parse_taken(&value.value));
    Ok(answer.is_some_and(|answer| answer.number == number))
}

async fn claim(
    session: &SessionState,
    etcd: &mut EtcdClient,
    offered: &ReceivedOffer,
    listed: Option<bool>,
) -> Result<StepOutcome, EtcdError> {
    let ReceivedOffer { disk, offer, .. } = offered;
    let image = offer.described["keys"]["image"].as_str().map(str::to_owned);
    // Without a lease: the offering host has to see it, however late.
    let mut operations = vec![
        EtcdOperation::Delete(session.keys.single(EtcdKey::Move(&session.cluster.host, disk))),
        EtcdOperation::put(
            &session.keys.key(EtcdKey::Moved(&offer.from, disk)),
            &etcd_values::write(&MigrationAnswer {
                image,
                listed,
                ..answer(session, offer, MigrationReply::Taken)
            }),
            None,
        ),
    ];
    if offer.from != session.cluster.host {
        // An older record would say that the disk has left this host.
        operations
            .push(EtcdOperation::Delete(session.keys.single(EtcdKey::Moved(&session.cluster.host, disk))));
    }
    let result = etcd.transact(&claimable(session, offered), &operations).await?;
    // An earlier claim may have succeeded and its answer was lost.
    if result.succeeded || is_taken(session, etcd, &offer.from, disk, offer.number).await? {
        return Ok(StepOutcome::Done(result.revision));
    }
    Ok(lost_outcome(offered))
}
