//! Handling of watch events: keys that were created, changed or deleted. Unreadable values are
//! logged once and skipped.

use std::time::Duration;

use policy::cluster::Term;

use super::{
    agent::EtcdSession,
    etcd::{EtcdClient, EtcdError, EtcdEvent, EtcdKeyValue},
    etcd_values::{self, GroupValue, HostGrants, HostIdentity, HostReports, HostReservations, PeerValue},
    identity,
    keys::EtcdKey,
    leader::LeaderTerm,
    limit_file::StoredGroup,
    messages::AgentMessage,
    migration_offer::{MigrationAnswer, MigrationOffer, ReceivedOffer},
};
use crate::actor::ChangeOrigin;

/// Number of keys to log.
const MAX_LOGGED_KEYS: usize = 64;

impl EtcdSession<'_> {
    pub(super) async fn on_event(
        &mut self,
        etcd: &mut EtcdClient,
        event: EtcdEvent,
    ) -> Result<(), EtcdError> {
        match event {
            EtcdEvent::Put(value) => {
                self.known.revision = self.known.revision.max(value.mod_revision);
                self.silence.note_value(&value);
                match self.known.keys.parse(&value.key) {
                    Some(EtcdKey::Host(name)) => {
                        if name == self.agent.cluster.host {
                            self.on_own_host(etcd, Some(&value)).await?;
                        }
                    }
                    Some(EtcdKey::Peer(_)) => {
                        self.on_put(&value).await?;
                        self.update_peers();
                    }
                    Some(EtcdKey::Leader) => {
                        self.on_put(&value).await?;
                        self.check_leadership(etcd).await?;
                        self.update_peers();
                        self.send(AgentMessage::LeaderChanged { leader: self.known.leader.clone() }).await?;
                    }
                    Some(EtcdKey::Reservation(host)) => {
                        self.on_put(&value).await?;
                        self.update_peers();
                        self.send(AgentMessage::Reservations(self.known.reservations.clone())).await?;
                        let known = self.known.reservations.get(host);
                        // Lost or changed by another run: this host's reservations are written
                        // again.
                        if host == self.agent.cluster.host && known != self.own_reservations.as_ref() {
                            self.write_reservations(etcd).await?;
                        }
                    }
                    Some(EtcdKey::Grant(_)) => {
                        self.silence.note_grant();
                        self.on_put(&value).await?;
                    }
                    Some(EtcdKey::Move(..)) => {
                        // The reservation on the source host is free by now, but its key belongs to
                        // another watch, which may lag behind.
                        self.read_reservations(etcd).await?;
                        self.on_put(&value).await?;
                    }
                    _ => self.on_put(&value).await?,
                }
            }
            EtcdEvent::Deleted(key) => match self.known.keys.parse(&key) {
                Some(EtcdKey::Leader) => {
                    self.known.leader = None;
                    self.check_leadership(etcd).await?;
                    self.send(AgentMessage::LeaderChanged { leader: self.known.leader.clone() }).await?;
                    if self.known.leader.is_none() {
                        self.schedule_campaign(Duration::ZERO);
                    }
                }
                Some(EtcdKey::Host(name)) if name == self.agent.cluster.host => {
                    self.on_own_host(etcd, None).await?;
                }
                Some(EtcdKey::Peer(name)) => {
                    self.known.peers.remove(name);
                    if name == self.agent.cluster.host
                        && let Some(peers) = &mut self.peers
                    {
                        peers.register_again();
                    }
                    self.update_peers();
                }
                Some(EtcdKey::Reservation(name)) => {
                    self.known.reservations.remove(name);
                    self.update_peers();
                    self.send(AgentMessage::Reservations(self.known.reservations.clone())).await?;
                    if name == self.agent.cluster.host {
                        self.write_reservations(etcd).await?;
                    }
                }
                // The known limits stay; the leader writes them again.
                Some(EtcdKey::Group(name)) => {
                    self.known.unreadable_groups.remove(name);
                    self.known.groups.retain(|known, stored| known != name || !stored.group.removed);
                    if let Some(stored) = self.known.groups.get_mut(name) {
                        stored.changed = 0;
                    }
                }
                Some(EtcdKey::Report(name)) => {
                    if let Some(leading) = &mut self.leading {
                        leading.on_report_deleted(name);
                    }
                }
                // A deleted grant stays in force until its lease ends.
                _ => {}
            },
        }
        Ok(())
    }

    /// Handles any value except this host's own name.
    pub(super) async fn on_put(&mut self, value: &EtcdKeyValue) -> Result<(), EtcdError> {
        match self.known.keys.parse(&value.key) {
            Some(EtcdKey::Leader) => match etcd_values::read::<etcd_values::LeaderValue>(&value.value) {
                // A leader without a lease would never end.
                Ok(leader) if value.lease != 0 => {
                    let term = Term { revision: value.create_revision.cast_unsigned(), nonce: leader.nonce };
                    self.known.leader = Some((term, leader.host));
                }
                // Unreadable, but with a lease: it expires.
                Err(why) if value.lease != 0 => {
                    self.log_skipped(value, &why);
                    self.known.leader = None;
                }
                _ => {
                    tracing::warn!(
                        key = %value.key,
                        "cluster: the value in etcd is not a leader's: it is deleted"
                    );
                    (self.known.leader, self.known.foreign_leader_revision) =
                        (None, Some(value.mod_revision));
                }
            },
            // The watch may lag behind a direct read, or behind this host's own write.
            Some(EtcdKey::Group(name))
                if self.known.groups.get(name).is_some_and(|known| known.changed > value.mod_revision) => {}
            Some(EtcdKey::Group(name)) => {
                let read = etcd_values::read::<GroupValue>(&value.value)
                    .and_then(|group| Ok((group.spec()?, group)));
                match read {
                    Ok((spec, group)) => {
                        self.known.unreadable_groups.remove(name);
                        self.logged_keys.remove(&value.key);
                        let known = self.known.groups.get(name).map_or(0, |known| known.group.number);
                        // A restored backup. etcd decides: all hosts have to follow the same
                        // limits.
                        if group.number < known {
                            tracing::warn!(
                                group = %name,
                                change = group.number,
                                known,
                                "etcd has older limits for this group than this host, as after a \
                                 restored backup: the older ones apply (`weir throttle {name} \
                                 --cluster` shows and changes them)"
                            );
                        }
                        let stored = StoredGroup { group, spec, changed: value.mod_revision };
                        self.on_limits(name.to_owned(), stored, None).await?;
                    }
                    Err(why) => {
                        if self.is_first_message(value) {
                            tracing::warn!(
                                key = %value.key,
                                "cluster: the value in etcd {why}: it is ignored; the fallback \
                                 share of group {name} applies once this host's lease has expired"
                            );
                        }
                        self.known.unreadable_groups.insert(name.to_owned(), why);
                    }
                }
            }
            Some(EtcdKey::Reservation(name)) => match etcd_values::read::<HostReservations>(&value.value) {
                Ok(reservations) => {
                    self.known.reservations.insert(name.to_owned(), reservations);
                    self.known.reservations_revision =
                        self.known.reservations_revision.max(value.mod_revision);
                }
                Err(why) => self.log_skipped(value, &why),
            },
            Some(EtcdKey::Grant(name)) if name == self.agent.cluster.host => {
                match etcd_values::read::<HostGrants>(&value.value) {
                    Ok(grants) => {
                        for (group, grant) in grants.groups {
                            match grant.read() {
                                // Unreadable limits: a grant from them cannot be checked, so the
                                // lease runs out.
                                _ if self.known.unreadable_groups.contains_key(&group) => {}
                                Ok(grant) => self.send(AgentMessage::Granted { group, grant }).await?,
                                Err(why) => self.log_skipped(value, &why),
                            }
                        }
                    }
                    Err(why) => self.log_skipped(value, &why),
                }
            }
            Some(EtcdKey::Report(name)) => {
                if let Some(leading) = &mut self.leading {
                    match etcd_values::read::<HostReports>(&value.value) {
                        Ok(reports) => leading.on_reports(name, &reports),
                        Err(why) => self.log_skipped(value, &why),
                    }
                }
            }
            Some(EtcdKey::Move(host, disk)) if host == self.agent.cluster.host => {
                let named = |offer: MigrationOffer| settings::parse_cluster_name(&offer.from).map(|_| offer);
                match etcd_values::read::<MigrationOffer>(&value.value).and_then(named) {
                    Ok(offer) => {
                        let offered =
                            ReceivedOffer { disk: disk.to_owned(), offer, revision: value.mod_revision };
                        self.send(AgentMessage::Offered(Box::new(offered))).await?;
                    }
                    Err(why) => self.log_skipped(value, &why),
                }
            }
            Some(EtcdKey::Moved(host, disk)) if host == self.agent.cluster.host => {
                let named =
                    |answer: MigrationAnswer| settings::parse_cluster_name(&answer.by).map(|_| answer);
                match etcd_values::read::<MigrationAnswer>(&value.value).and_then(named) {
                    Ok(answer) => self.send(AgentMessage::Answered { disk: disk.to_owned(), answer }).await?,
                    Err(why) => self.log_skipped(value, &why),
                }
            }
            Some(EtcdKey::Peer(name)) => match etcd_values::read::<PeerValue>(&value.value) {
                Ok(peer) => drop(self.known.peers.insert(name.to_owned(), peer.address)),
                Err(why) => self.log_skipped(value, &why),
            },
            Some(
                EtcdKey::Asks(_)
                | EtcdKey::Host(_)
                | EtcdKey::Grant(_)
                | EtcdKey::Move(..)
                | EtcdKey::Moved(..),
            ) => {}
            None => {
                if self.is_first_message(value) {
                    tracing::warn!(
                        key = ?value.key,
                        "cluster: a key in etcd was not written by weir (unknown form or invalid \
                         name): it is ignored"
                    );
                }
            }
        }
        Ok(())
    }

    /// Gives up this host's leadership if etcd has another leader or none. A grant to a host that
    /// reports directly is fenced by nothing else once the session has ended.
    async fn check_leadership(&mut self, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        let Some(term) = self.leading.as_ref().map(LeaderTerm::term) else { return Ok(()) };
        let is_own = |leader: &Option<(Term, String)>| leader.as_ref().is_some_and(|(of, _)| *of == term);
        if is_own(&self.known.leader) {
            return Ok(());
        }
        // The event may precede this host's election, since a watch may lag behind.
        self.known.leader = None;
        if let Some(value) = etcd.read_one(self.known.keys.single(EtcdKey::Leader)).await? {
            Box::pin(self.on_put(&value)).await?;
        }
        if !is_own(&self.known.leader) {
            tracing::info!("this host no longer leads the cluster");
            self.leading = None;
        }
        Ok(())
    }

    fn log_skipped(&mut self, value: &EtcdKeyValue, why: &str) {
        if self.is_first_message(value) {
            tracing::warn!(key = %value.key, "cluster: the value in etcd {why}: it is ignored");
        }
    }

    /// True for the first message about this key. Bounded, since a foreign writer may create any
    /// number.
    fn is_first_message(&mut self, value: &EtcdKeyValue) -> bool {
        self.logged_keys.len() < MAX_LOGGED_KEYS && self.logged_keys.insert(value.key.clone())
    }

    pub(super) async fn on_limits(
        &mut self,
        name: String,
        stored: StoredGroup,
        by: Option<ChangeOrigin>,
    ) -> Result<(), EtcdError> {
        let spec = stored.spec;
        self.known.groups.insert(name.clone(), stored);
        self.keeper.mark_changed();
        self.send(AgentMessage::Group { name, spec, by }).await
    }

    async fn on_own_host(
        &mut self,
        etcd: &mut EtcdClient,
        value: Option<&EtcdKeyValue>,
    ) -> Result<(), EtcdError> {
        let read = value.and_then(|value| etcd_values::read::<HostIdentity>(&value.value).ok());
        let is_own = read.is_some_and(|identity| {
            let own_identity = identity::own_identity(&self.agent.machine_id, identity.instance);
            self.known.joined.is_some()
                && (identity.pid, identity.start_ticks, &identity.machine)
                    == (own_identity.pid, own_identity.start_ticks, &own_identity.machine)
        });
        // Deleted or replaced: joins again, or reports that another process has the name.
        if !is_own {
            self.known.joined = None;
            self.join(etcd, value).await?;
        }
        Ok(())
    }
}
