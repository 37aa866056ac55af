//! The steps by which a disk moves to another host, as they stand in etcd.
//!
//! ```text
//!   from                                   to
//!   Ask       move = asked        ─────►
//!             moved = ready       ◄─────   Reply      it could have the disk
//!   (serves nobody, closes the image)
//!   Give      move = given        ─────►
//!                                          Check      is it offered still?
//!                                          (opens the image)
//!             moved = taken       ◄─────   Claim      takes `move` away with it: now it has the disk
//!             moved = settled     ◄─────   Settle     it knows
//!   Forget    takes `moved` away           where nobody needs it
//!   Withdraw  takes `move` away            if that comes first, `from` has it
//! ```
//!
//! So one of two transactions decides who has the disk, and both hosts learn of it. An offer has
//! its host's lease, and is claimed only while that host is the same run: what a host has offered
//! that ends is nobody's to take. Never opens an image.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    etcd::{Compare, Error, Etcd, KeyValue, Operation, Range},
    keys::{Key, Keys},
    known::{Known, Leases},
    offers::{Answer, Offer, Offered, Outcome, Said, Step},
    values,
};

/// Does it, or says why not.
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
                    // One before may have held, whose answer was lost.
                    let there = etcd.read_one(known.keys.one(Key::Move(&to, &disk))).await?;
                    let there = there.and_then(|value| values::read::<Offer>(&value.value).ok());
                    match there.is_some_and(|there| there.given && (there.number, there.run) == (number, run))
                    {
                        true => Outcome::Done(done.revision),
                        false => Outcome::Lost("the offer is gone from etcd (move it again)".to_owned()),
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

/// It is offered still, by the same run.
fn claimable(known: &Known, offered: &Offered) -> [Compare; 2] {
    let from = known.keys.key(Key::Host(&offered.offer.from));
    [unchanged(known, offered), Compare::Changed(from, offered.offer.run)]
}

fn lost(offered: &Offered) -> Outcome {
    let from = &offered.offer.from;
    Outcome::Lost(format!(
        "{from} has withdrawn its offer, was started again, or has joined the cluster anew since (move it again)"
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
            "no host of cluster {:?} that is there is called {to:?} (`weir cluster status` lists them)",
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
            "a disk of this name is on its way to {to} already (try again in a minute, or see which host it comes from)"
        )),
    })
}

/// The number of what stands at a key, if that is an offer.
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
                // What was said to it is of no use to anybody.
                let answer = known.keys.one(Key::Moved(&known.cluster.host, disk));
                let gone = [range.clone(), answer].map(Operation::Delete);
                let done = etcd.transact(&[compare], &gone).await?;
                if done.held {
                    return Ok(Outcome::Done(done.revision));
                }
            }
            // Claimed, or its lease has ended: then nobody claims it any more.
            _ => {
                let host = &known.cluster.host;
                return Ok(match is_taken(known, etcd, (host, disk), number).await? {
                    true => Outcome::Lost("it is the other host's".to_owned()),
                    false => Outcome::Done(0),
                });
            }
        }
    }
}

/// Ends what an earlier run of a host has offered: its key changes, and stays that run's.
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

/// Which of these disks of a host, each with its image, others have taken that may have them still.
/// A host that has left its cluster has none: what it had is this host's again, and it finds that
/// when it comes back. To be asked before an image is opened: whatever is not gone by then, nobody
/// can take any more.
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
        // It may have gone on from there.
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
            // It is to know when it comes back, as its file may have the disk too.
            let answer = Answer {
                by: host.to_owned(),
                number: 0,
                said: Said::Taken,
                image: Some(image.clone()),
                listed: Some(true),
                settled: true,
            };
            then.push(Operation::put(&keys.key(Key::Moved(by, disk)), &values::write(&answer), None));
            compare.push(Compare::Absent(keys.key(Key::Host(by))));
        }
        if !etcd.transact(&compare, &then).await?.held {
            gone.insert(disk.to_owned(), by.to_owned());
        }
    }
    forget(keys, etcd, host, found.iter().flatten(), |disk| disks.contains_key(disk)).await?;
    Ok(gone)
}

/// Takes away what tells that disks have left this host, where nobody can need it any more. That is
/// needed:
///
/// - by the host that took the disk, until it knows that it has: it finds here whether its claim
///   held. Then it has settled it.
/// - by this host, to know that it must not take the disk back: until it has heard of that, which
///   it has where it asks for this, or has ended, and at its next start where its file has the
///   disk.
/// - by a host from which the disk came here before: at its start it follows from here where the
///   disk is now.
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

/// Where that is not heard, what tells of the move stays longer.
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
    // Without a lease: whoever has offered it learns of it, however late.
    let mut then = vec![
        Operation::Delete(known.keys.one(Key::Move(&known.cluster.host, disk))),
        Operation::put(
            &known.keys.key(Key::Moved(&offer.from, disk)),
            &values::write(&Answer { image, listed, ..answer(known, offer, Said::Taken) }),
            None,
        ),
    ];
    if offer.from != known.cluster.host {
        // It may have left from here once.
        then.push(Operation::Delete(known.keys.one(Key::Moved(&known.cluster.host, disk))));
    }
    let done = etcd.transact(&claimable(known, offered), &then).await?;
    // A claim before may have held, whose answer was lost.
    if done.held || is_taken(known, etcd, (&offer.from, disk), offer.number).await? {
        return Ok(Outcome::Done(done.revision));
    }
    Ok(lost(offered))
}
