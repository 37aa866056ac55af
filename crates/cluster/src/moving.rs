//! The protocol that migrates a disk to another host, as transactions in etcd.
//!
//! ```text
//!   from                                   to
//!   Ask       move = asked        ─────►
//!             moved = ready       ◄─────   Reply      it could serve the disk
//!   (disconnects clients, closes the image)
//!   Give      move = given        ─────►
//!                                          Check      the offer is still valid
//!                                          (opens the image)
//!             moved = taken       ◄─────   Claim      deletes `move`: the disk is now its own
//!             moved = settled     ◄─────   Settle     it has read the result
//!   Forget    deletes `moved`              once no host needs it
//!   Withdraw  deletes `move`               if before Claim, the disk stays on `from`
//! ```
//!
//! Claim and Withdraw exclude each other, so exactly one host has the disk, and both learn which.
//! An offer has its host's lease and names that host's run: an offer of an ended run cannot be
//! claimed. Never opens an image.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    etcd::{Compare, Error, Etcd, KeyValue, Operation, Range},
    keys::{Key, Keys},
    known::{Known, Leases},
    offers::{Answer, Offer, Offered, Outcome, Said, Step},
    values,
};

/// Performs a step, or returns the reason why not.
pub(super) async fn step(known: &Known, etcd: &mut Etcd, step: Step) -> Result<Outcome, Error> {
    let Some(Leases { name: lease, .. }) = known.joined else {
        return Ok(Outcome::Apart(
            "this host has not joined its cluster (`weir cluster status` says why)".to_owned(),
        ));
    };
    match step {
        Step::Ask { to, disk, offer } => ask(known, etcd, lease, (&to, &disk), *offer).await,
        Step::Give { to, disk, offer, revision } => {
            let own = known.keys.key(Key::Host(&known.cluster.host));
            let host = etcd.read_one(known.keys.one(Key::Host(&known.cluster.host))).await?;
            let run = host.map_or(0, |value| value.mod_revision);
            let (key, number) = (known.keys.key(Key::Move(&to, &disk)), offer.number);
            let put = Operation::put(&key, &values::write(&Offer { run, ..*offer }), Some(lease));
            let compare = [Compare::Changed(key, revision), Compare::Changed(own, run)];
            let done = etcd.transact(&compare, &[put]).await?;
            Ok(match done.held {
                true => Outcome::Done(done.revision),
                false => {
                    // An earlier attempt may have succeeded and its answer was lost.
                    let there = etcd.read_one(known.keys.one(Key::Move(&to, &disk))).await?;
                    let there = there.and_then(|value| values::read::<Offer>(&value.value).ok());
                    match there.is_some_and(|there| there.given && (there.number, there.run) == (number, run))
                    {
                        true => Outcome::Done(done.revision),
                        false => {
                            Outcome::Lost("the offer was deleted from etcd (move the disk again)".to_owned())
                        }
                    }
                }
            })
        }
        Step::Withdraw { to, disk, number } => withdraw(known, etcd, (&to, &disk), number).await,
        Step::Reply { offered, said } => {
            let unchanged = unchanged(known, &offered);
            let put = reply(known, &offered, said, Some(lease));
            let done = etcd.transact(&[unchanged], &[put]).await?;
            Ok(match done.held {
                true => Outcome::Done(done.revision),
                false => Outcome::Lost("the offer was withdrawn".to_owned()),
            })
        }
        Step::Check { offered } => {
            let done = etcd.transact(&claimable(known, &offered), &[]).await?;
            Ok(match done.held {
                true => Outcome::Done(done.revision),
                false => lost(&offered),
            })
        }
        Step::Claim { offered, listed } => claim(known, etcd, &offered, listed).await,
        Step::Settle { offered } => settle(known, etcd, &offered).await,
        Step::Forget { disk } => {
            let (_, found) = etcd.read(&[known.keys.of_hosts()]).await?;
            forget(&known.keys, etcd, &known.cluster.host, found.iter().flatten(), |other| other != disk)
                .await?;
            Ok(Outcome::Done(0))
        }
        Step::Own { disk } => {
            let gone = Operation::Delete(known.keys.one(Key::Moved(&known.cluster.host, &disk)));
            Ok(Outcome::Done(etcd.transact(&[], &[gone]).await?.revision))
        }
    }
}

fn unchanged(known: &Known, Offered { disk, revision, .. }: &Offered) -> Compare {
    Compare::Changed(known.keys.key(Key::Move(&known.cluster.host, disk)), *revision)
}

/// Conditions of a claim: the offer is unchanged, and its host is the same run.
fn claimable(known: &Known, offered: &Offered) -> [Compare; 2] {
    let from = known.keys.key(Key::Host(&offered.offer.from));
    [unchanged(known, offered), Compare::Changed(from, offered.offer.run)]
}

fn lost(offered: &Offered) -> Outcome {
    let from = &offered.offer.from;
    Outcome::Lost(format!(
        "{from} has withdrawn its offer, restarted, or rejoined the cluster (move the disk again)"
    ))
}

fn reply(known: &Known, Offered { disk, offer, .. }: &Offered, said: Said, lease: Option<i64>) -> Operation {
    let answer = answer(known, offer, said);
    Operation::put(&known.keys.key(Key::Moved(&offer.from, disk)), &values::write(&answer), lease)
}

fn answer(known: &Known, offer: &Offer, said: Said) -> Answer {
    let by = known.cluster.host.clone();
    Answer { by, number: offer.number, said, image: None, listed: None, settled: false }
}

async fn ask(
    known: &Known,
    etcd: &mut Etcd,
    lease: i64,
    (to, disk): (&str, &str),
    offer: Offer,
) -> Result<Outcome, Error> {
    let own = known.keys.key(Key::Host(&known.cluster.host));
    let names = [known.keys.one(Key::Host(to)), known.keys.one(Key::Host(&known.cluster.host))];
    let (_, found) = etcd.read(&names).await?;
    let of = |key: &str| found.iter().flatten().find(|value| value.key == key).cloned();
    let there = known.keys.key(Key::Host(to));
    let (Some(_), Some(KeyValue { mod_revision: run, .. })) = (of(&there), of(&own)) else {
        return Ok(Outcome::Absent(format!(
            "no running host of cluster {:?} is called {to:?} (`weir cluster status` lists them)",
            known.cluster.name
        )));
    };
    let key = known.keys.key(Key::Move(to, disk));
    let offer = Offer { run, ..offer };
    let compare = [Compare::Absent(key.clone()), Compare::Changed(own, run)];
    let earlier = Operation::Delete(known.keys.one(Key::Moved(&known.cluster.host, disk)));
    let put = Operation::put(&key, &values::write(&offer), Some(lease));
    let done = etcd.transact(&compare, &[earlier, put]).await?;
    Ok(match done.held {
        true => Outcome::Done(done.revision),
        false => Outcome::Lost(format!(
            "a disk of this name is already being moved to {to} (try again in a minute, or check which host it comes from)"
        )),
    })
}

/// Number and revision of an offer.
fn number_of(found: &[Vec<KeyValue>]) -> Option<(u64, i64)> {
    let value = found.iter().flatten().next()?;
    let offer = values::read::<Offer>(&value.value).ok()?;
    Some((offer.number, value.mod_revision))
}

async fn withdraw(
    known: &Known,
    etcd: &mut Etcd,
    (to, disk): (&str, &str),
    number: u64,
) -> Result<Outcome, Error> {
    let range = known.keys.one(Key::Move(to, disk));
    loop {
        let (_, found) = etcd.read(std::slice::from_ref(&range)).await?;
        match number_of(&found) {
            Some((of, revision)) if of == number => {
                let compare = Compare::Changed(known.keys.key(Key::Move(to, disk)), revision);
                // The answer to this offer is obsolete.
                let answer = known.keys.one(Key::Moved(&known.cluster.host, disk));
                let gone = [range.clone(), answer].map(Operation::Delete);
                let done = etcd.transact(&[compare], &gone).await?;
                if done.held {
                    // Claimed or changed meanwhile: read again.
                    return Ok(Outcome::Done(done.revision));
                }
            }
            // Claimed, or the lease expired: then it cannot be claimed any more.
            _ => {
                let host = &known.cluster.host;
                return Ok(match is_taken(known, etcd, (host, disk), number).await? {
                    true => Outcome::Lost("the other host has it".to_owned()),
                    false => Outcome::Done(0),
                });
            }
        }
    }
}

/// Invalidates the offers of an earlier run: rewriting the host's key changes its revision, while
/// the key stays with that run's lease.
async fn end_earlier(keys: &Keys, etcd: &mut Etcd, host: &str) -> Result<(), Error> {
    let key = keys.key(Key::Host(host));
    loop {
        let Some(own) = etcd.read_one(keys.one(Key::Host(host))).await? else { return Ok(()) };
        let lease = (own.lease != 0).then_some(own.lease);
        let put = Operation::put(&key, &own.value, lease);
        if etcd.transact(&[Compare::Changed(key.clone(), own.mod_revision)], &[put]).await?.held {
            return Ok(());
        }
    }
}

/// Returns which of a host's disks (with their images) moved to another host of the cluster.
///
/// Disks on a host that left the cluster return to this host, and are recorded as moved there for
/// the case that it returns. Has to run before images are opened: offers of earlier runs cannot be
/// claimed afterwards.
pub(super) async fn gone(
    keys: &Keys,
    etcd: &mut Etcd,
    host: &str,
    disks: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Error> {
    end_earlier(keys, etcd, host).await?;
    let (_, found) = etcd.read(&[keys.of_hosts(), keys.reports()]).await?;
    let (mut moved, mut members) = (BTreeMap::new(), BTreeSet::new());
    for value in found.iter().flatten() {
        match keys.read(&value.key) {
            Some(Key::Moved(from, disk)) => {
                moved.extend(taken(&value.value).map(|answer| ((from, disk), answer)));
            }
            Some(Key::Host(name) | Key::Report(name)) => drop(members.insert(name)),
            _ => {}
        }
    }
    let (mut gone, mut back) = (BTreeMap::new(), Vec::new());
    for (&(_, disk), answer) in moved.iter().filter(|((from, _), _)| *from == host) {
        let Some(image) = disks.get(disk) else { continue };
        if answer.image.as_ref().is_some_and(|moved| moved != image) {
            continue;
        }
        let (mut by, mut passed) = (&*answer.by, BTreeSet::from([host]));
        // Follows further moves. `passed` ends a cycle.
        while passed.insert(by)
            && let Some(next) = moved.get(&(by, disk))
        {
            by = &next.by;
        }
        match by != host && members.contains(by) {
            true => drop(gone.insert(disk.to_owned(), by.to_owned())),
            false => back.push((disk, by, image)),
        }
    }
    for (disk, by, image) in back {
        let mut then = vec![Operation::Delete(keys.one(Key::Moved(host, disk)))];
        let mut compare = Vec::new();
        if by != host {
            // For the case that that host returns: its config file may list the disk.
            let answer = Answer {
                by: host.to_owned(),
                number: 0,
                said: Said::Taken,
                image: Some(image.clone()),
                listed: Some(true),
                settled: true,
            };
            then.push(Operation::put(&keys.key(Key::Moved(by, disk)), &values::write(&answer), None));
            // If that host returned since the read above, it keeps the disk.
            compare.push(Compare::Absent(keys.key(Key::Host(by))));
        }
        if !etcd.transact(&compare, &then).await?.held {
            gone.insert(disk.to_owned(), by.to_owned());
        }
    }
    forget(keys, etcd, host, found.iter().flatten(), |disk| disks.contains_key(disk)).await?;
    Ok(gone)
}

/// Deletes the record of moved disks once no host needs it. A record is needed:
///
/// - by the host that took the disk, until it has read that its claim succeeded (`settled`).
/// - by this host, so that it does not take the disk back: until it has seen the record (it has,
///   when it calls this), and at its next start if its config file lists the disk.
/// - by an earlier host of the same disk, which follows the chain of records at its start.
async fn forget(
    keys: &Keys,
    etcd: &mut Etcd,
    host: &str,
    of_hosts: impl Iterator<Item = &KeyValue>,
    is_listed: impl Fn(&str) -> bool,
) -> Result<(), Error> {
    let (mut settled, mut came) = (Vec::new(), BTreeSet::new());
    for value in of_hosts {
        let (Some(Key::Moved(from, disk)), Some(answer)) = (keys.read(&value.key), taken(&value.value))
        else {
            continue;
        };
        if from == host && answer.settled && !is_listed(disk) {
            settled.push((disk, value));
        } else if answer.by == host {
            came.insert(disk);
        }
    }
    for (_, value) in settled.iter().filter(|(disk, _)| !came.contains(disk)) {
        let gone = Operation::Delete(Range::Key(value.key.clone()));
        etcd.transact(&[Compare::Changed(value.key.clone(), value.mod_revision)], &[gone]).await?;
    }
    Ok(())
}

/// Marks a claim as known to the host that made it. Best effort: otherwise the record stays longer.
async fn settle(known: &Known, etcd: &mut Etcd, offered: &Offered) -> Result<Outcome, Error> {
    let key = known.keys.key(Key::Moved(&offered.offer.from, &offered.disk));
    let there = etcd.read_one(Range::Key(key.clone())).await?;
    let Some((revision, answer)) = there.and_then(|value| Some((value.mod_revision, taken(&value.value)?)))
    else {
        return Ok(Outcome::Done(0));
    };
    if answer.number == offered.offer.number {
        let put = Operation::put(&key, &values::write(&Answer { settled: true, ..answer }), None);
        etcd.transact(&[Compare::Changed(key, revision)], &[put]).await?;
    }
    Ok(Outcome::Done(0))
}

fn taken(value: &[u8]) -> Option<Answer> {
    values::read::<Answer>(value).ok().filter(|answer| answer.said == Said::Taken)
}

async fn is_taken(
    known: &Known,
    etcd: &mut Etcd,
    (host, disk): (&str, &str),
    number: u64,
) -> Result<bool, Error> {
    let answer = etcd.read_one(known.keys.one(Key::Moved(host, disk))).await?;
    let answer = answer.and_then(|value| taken(&value.value));
    Ok(answer.is_some_and(|answer| answer.number == number))
}

async fn claim(
    known: &Known,
    etcd: &mut Etcd,
    offered: &Offered,
    listed: Option<bool>,
) -> Result<Outcome, Error> {
    let Offered { disk, offer, .. } = offered;
    let image = offer.described["keys"]["image"].as_str().map(str::to_owned);
    // Without a lease: the offering host has to see it, however late.
    let mut then = vec![
        Operation::Delete(known.keys.one(Key::Move(&known.cluster.host, disk))),
        Operation::put(
            &known.keys.key(Key::Moved(&offer.from, disk)),
            &values::write(&Answer { image, listed, ..answer(known, offer, Said::Taken) }),
            None,
        ),
    ];
    if offer.from != known.cluster.host {
        // An old record would say that the disk left this host.
        then.push(Operation::Delete(known.keys.one(Key::Moved(&known.cluster.host, disk))));
    }
    let done = etcd.transact(&claimable(known, offered), &then).await?;
    // An earlier claim may have succeeded and its answer was lost.
    if done.held || is_taken(known, etcd, (&offer.from, disk), offer.number).await? {
        return Ok(Outcome::Done(done.revision));
    }
    Ok(lost(offered))
}
