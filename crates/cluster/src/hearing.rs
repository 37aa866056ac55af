//! Handling of watch events: keys that were created, changed or deleted. Unreadable values are
//! logged once and skipped.

use std::time::Duration;

use policy::cluster::Term;

use super::{
    agent::Session,
    etcd::{Error, Etcd, Event, KeyValue},
    identity,
    keys::Key,
    offers::{Answer, Offer, Offered},
    stored::Stored,
    values::{self, Grants, Group, Identity, Promises, Reports},
    words::Word,
};
use crate::actor::Actor;

/// Number of keys to log.
const MOST_STRANGE: usize = 64;

impl Session<'_> {
    pub(super) async fn on_event(&mut self, etcd: &mut Etcd, event: Event) -> Result<(), Error> {
        match event {
            Event::Put(value) => {
                self.silence.saw(&value);
                match self.known.keys.read(&value.key) {
                    Some(Key::Host(name)) => {
                        if name == self.agent.cluster.host {
                            self.on_own_host(etcd, Some(&value)).await?;
                        }
                    }
                    Some(Key::Leader) => {
                        self.on_put(&value).await?;
                        self.tell(Word::Led { leader: self.known.leader.clone() }).await?;
                    }
                    Some(Key::Promise(host)) => {
                        self.on_put(&value).await?;
                        self.tell(Word::Promises(self.known.promises.clone())).await?;
                        let known = self.known.promises.get(host);
                        // Lost or changed by another run: this host's reservations are written
                        // again.
                        if host == self.agent.cluster.host && known != self.own_promises.as_ref() {
                            self.promise(etcd).await?;
                        }
                    }
                    Some(Key::Grant(_)) => {
                        self.silence.answered();
                        self.on_put(&value).await?;
                    }
                    Some(Key::Move(..)) => {
                        // The reservation on the source host is free by now, but its key belongs to
                        // another watch, which may lag behind.
                        self.read_promises(etcd).await?;
                        self.on_put(&value).await?;
                    }
                    _ => self.on_put(&value).await?,
                }
            }
            Event::Deleted(key) => match self.known.keys.read(&key) {
                Some(Key::Leader) => {
                    self.known.leader = None;
                    self.tell(Word::Led { leader: None }).await?;
                    self.stand(Duration::ZERO);
                }
                Some(Key::Host(name)) if name == self.agent.cluster.host => {
                    self.on_own_host(etcd, None).await?;
                }
                Some(Key::Promise(name)) => {
                    self.known.promises.remove(name);
                    self.tell(Word::Promises(self.known.promises.clone())).await?;
                    if name == self.agent.cluster.host {
                        self.promise(etcd).await?;
                    }
                }
                // The known limits stay; the leader writes them again.
                Some(Key::Group(name)) => {
                    self.known.not_understood.remove(name);
                    self.known.groups.retain(|known, stored| known != name || !stored.group.removed);
                    if let Some(stored) = self.known.groups.get_mut(name) {
                        stored.changed = 0;
                    }
                }
                Some(Key::Report(name)) => {
                    if let Some(leading) = &mut self.leading {
                        leading.on_gone(name);
                    }
                }
                // A deleted grant stays in force until its lease ends.
                _ => {}
            },
        }
        Ok(())
    }

    /// Handles any value except this host's own name.
    pub(super) async fn on_put(&mut self, value: &KeyValue) -> Result<(), Error> {
        match self.known.keys.read(&value.key) {
            Some(Key::Leader) => match values::read::<values::Leader>(&value.value) {
                // A leader without a lease would never end.
                Ok(leader) if value.lease != 0 => {
                    let term = Term { revision: value.create_revision.cast_unsigned(), nonce: leader.nonce };
                    self.known.leader = Some((term, leader.host));
                }
                // Unreadable, but with a lease: it expires.
                Err(why) if value.lease != 0 => {
                    self.pass_over(value, &why);
                    self.known.leader = None;
                }
                _ => {
                    tracing::warn!(key = %value.key, "cluster: the value in etcd is not a leader's: it is deleted");
                    (self.known.leader, self.known.usurped) = (None, Some(value.mod_revision));
                }
            },
            // The watch may lag behind a direct read, or behind this host's own write.
            Some(Key::Group(name))
                if self.known.groups.get(name).is_some_and(|known| known.changed > value.mod_revision) => {}
            Some(Key::Group(name)) => {
                let read = values::read::<Group>(&value.value).and_then(|group| Ok((group.spec()?, group)));
                match read {
                    Ok((spec, group)) => {
                        self.known.not_understood.remove(name);
                        self.strange.remove(&value.key);
                        let known = self.known.groups.get(name).map_or(0, |known| known.group.number);
                        // A restored backup. etcd decides: all hosts have to follow the same
                        // limits.
                        if group.number < known {
                            tracing::warn!(
                                group = %name,
                                change = group.number,
                                known,
                                "etcd has older limits for this group than this host, as after a restored backup: the older ones apply (`weir throttle {name} --cluster` shows and changes them)"
                            );
                        }
                        let stored = Stored { group, spec, changed: value.mod_revision };
                        self.on_limits(name.to_owned(), stored, None).await?;
                    }
                    Err(why) => {
                        if self.is_news(value) {
                            tracing::warn!(key = %value.key, "cluster: the value in etcd {why}: it is ignored; the fallback share of group {name} applies once this host's lease has expired");
                        }
                        self.known.not_understood.insert(name.to_owned(), why);
                    }
                }
            }
            Some(Key::Promise(name)) => match values::read::<Promises>(&value.value) {
                Ok(promises) => {
                    self.known.promises.insert(name.to_owned(), promises);
                    self.known.promises_at = self.known.promises_at.max(value.mod_revision);
                }
                Err(why) => self.pass_over(value, &why),
            },
            Some(Key::Grant(name)) if name == self.agent.cluster.host => {
                match values::read::<Grants>(&value.value) {
                    Ok(grants) => {
                        for (group, grant) in grants.groups {
                            match grant.read() {
                                // Unreadable limits: a grant from them cannot be judged, so the
                                // lease runs out.
                                _ if self.known.not_understood.contains_key(&group) => {}
                                Ok(grant) => self.tell(Word::Granted { group, grant }).await?,
                                Err(why) => self.pass_over(value, &why),
                            }
                        }
                    }
                    Err(why) => self.pass_over(value, &why),
                }
            }
            Some(Key::Report(name)) => {
                if let Some(leading) = &mut self.leading {
                    match values::read::<Reports>(&value.value) {
                        Ok(reports) => leading.on_reports(name, &reports),
                        Err(why) => self.pass_over(value, &why),
                    }
                }
            }
            Some(Key::Move(host, disk)) if host == self.agent.cluster.host => {
                let named = |offer: Offer| settings::cluster_name(&offer.from).map(|_| offer);
                match values::read::<Offer>(&value.value).and_then(named) {
                    Ok(offer) => {
                        let offered = Offered { disk: disk.to_owned(), offer, revision: value.mod_revision };
                        self.tell(Word::Offered(Box::new(offered))).await?;
                    }
                    Err(why) => self.pass_over(value, &why),
                }
            }
            Some(Key::Moved(host, disk)) if host == self.agent.cluster.host => {
                let named = |answer: Answer| settings::cluster_name(&answer.by).map(|_| answer);
                match values::read::<Answer>(&value.value).and_then(named) {
                    Ok(answer) => self.tell(Word::Answered { disk: disk.to_owned(), answer }).await?,
                    Err(why) => self.pass_over(value, &why),
                }
            }
            Some(Key::Host(_) | Key::Grant(_) | Key::Move(..) | Key::Moved(..)) => {}
            None => {
                if self.is_news(value) {
                    tracing::warn!(key = ?value.key, "cluster: a key in etcd is not weir's, by its form or its names: it is ignored");
                }
            }
        }
        Ok(())
    }

    fn pass_over(&mut self, value: &KeyValue, why: &str) {
        if self.is_news(value) {
            tracing::warn!(key = %value.key, "cluster: the value in etcd {why}: it is ignored");
        }
    }

    /// True for the first message about this key. Bounded, since a foreign writer may create any
    /// number.
    fn is_news(&mut self, value: &KeyValue) -> bool {
        self.strange.len() < MOST_STRANGE && self.strange.insert(value.key.clone())
    }

    pub(super) async fn on_limits(
        &mut self,
        name: String,
        stored: Stored,
        by: Option<Actor>,
    ) -> Result<(), Error> {
        let spec = stored.spec;
        self.known.groups.insert(name.clone(), stored);
        self.keeper.note();
        self.tell(Word::Group { name, spec, by }).await
    }

    async fn on_own_host(&mut self, etcd: &mut Etcd, value: Option<&KeyValue>) -> Result<(), Error> {
        let read = value.and_then(|value| values::read::<Identity>(&value.value).ok());
        let is_own = read.is_some_and(|identity| {
            let own = identity::own(&self.agent.machine_id, identity.instance);
            self.known.joined.is_some()
                && (identity.pid, identity.began, &identity.machine) == (own.pid, own.began, &own.machine)
        });
        // Deleted or replaced: joins again, or reports that another process has the name.
        if !is_own {
            self.known.joined = None;
            self.join(etcd, value).await?;
        }
        Ok(())
    }
}
