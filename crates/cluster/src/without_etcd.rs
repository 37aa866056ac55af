//! The agent's handling of other hosts, with a session and without one.
//!
//! Without a session this host leads by agreement, or reports to the leader that it reaches; a
//! leader elected through etcd answers direct reports until its key may have expired.

use std::{collections::BTreeSet, time::Duration};

use policy::time::Instant;

use super::{
    agent::{EtcdSession, unreachable_error},
    environment::now,
    etcd::{EtcdClient, EtcdError, EtcdOperation, TransactionCondition},
    etcd_values::{self, AskedHosts, HostReports, PeerValue},
    keys::EtcdKey,
    leader::LeaderTerm,
    messages::{AgentInput, AgentMessage},
    migration_offer::StepOutcome,
    peer_message::PeerMessage,
    peers::granted,
    status,
};

/// Interval between reads that check whether etcd still answers, while other hosts have lost it.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of hosts that are removed from those that this host asks at once.
const MAX_DROPPED: usize = 100;

impl EtcdSession<'_> {
    /// Begins a session: compares etcd with the last one, and ends an agreement.
    pub(super) async fn begin_with_peers(
        &mut self,
        revision: i64,
        cluster: Option<String>,
    ) -> Result<(), EtcdError> {
        let known = &mut self.known;
        let is_replaced = cluster.is_some() && known.etcd_cluster.is_some() && known.etcd_cluster != cluster;
        let is_restored = revision < known.revision;
        if is_replaced {
            tracing::warn!(
                "cluster: etcd has the data of another etcd cluster than before: this host keeps what \
                 it knows, and writes it again"
            );
        } else if is_restored {
            tracing::warn!(
                revision,
                before = known.revision,
                "cluster: etcd was restored from an older copy: this host keeps what it knows, and \
                 writes it again"
            );
        }
        known.etcd_cluster = cluster.or(known.etcd_cluster.take());
        known.revision = revision;
        let Some(peers) = &mut self.peers else { return Ok(()) };
        if is_replaced || is_restored {
            peers.on_restored();
        }
        let messages = peers.on_session(&self.known);
        self.forward(messages).await
    }

    /// Sends messages to the main thread.
    async fn forward(&mut self, messages: Vec<AgentMessage>) -> Result<(), EtcdError> {
        for message in messages {
            if let AgentMessage::LeaderChanged { leader } = &message {
                self.known.leader.clone_from(leader);
            }
            self.send(message).await?;
        }
        Ok(())
    }

    /// Passes the hosts in etcd to the agreements.
    pub(super) fn update_peers(&mut self) {
        let Some(peers) = &mut self.peers else { return };
        let takes_part = |reservations: &etcd_values::HostReservations| {
            reservations.members.as_ref().is_none_or(|groups| !groups.is_empty())
        };
        let known = &self.known;
        let others = known.reservations.iter().filter(|(_, reservations)| takes_part(reservations));
        let leader = known.leader.as_ref().map(|(_, host)| host);
        let others: BTreeSet<String> = others.map(|(host, _)| host).chain(leader).cloned().collect();
        peers.on_hosts(&known.peers, others);
    }

    /// Writes this host's address and the hosts that it asks, if they changed.
    ///
    /// A host is removed from those only while another host leads, so that the removed one does
    /// not.
    pub(super) async fn register_peer(&mut self, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        if self.known.joined.is_none() {
            return Ok(());
        }
        let Some(peers) = &mut self.peers else { return Ok(()) };
        let Some((mut asks, mut dropped)) = peers.due_registration() else { return Ok(()) };
        let (keys, host) = (&self.known.keys, &self.agent.cluster.host);
        let leader = self.known.leader.as_ref().filter(|(_, leader)| !dropped.contains_key(leader));
        if leader.is_none() || dropped.len() > MAX_DROPPED {
            asks.append(&mut dropped);
        }
        let mut conditions: Vec<_> =
            dropped.keys().map(|name| TransactionCondition::Absent(keys.key(EtcdKey::Peer(name)))).collect();
        if let (Some((term, _)), false) = (leader, dropped.is_empty()) {
            let created = term.revision.cast_signed();
            conditions.push(TransactionCondition::Created(keys.key(EtcdKey::Leader), created));
        }
        let address = etcd_values::write(&PeerValue { address: peers.own_address() });
        let asked = etcd_values::write(&AskedHosts { hosts: asks.clone() });
        let puts = [(EtcdKey::Peer(host), address), (EtcdKey::Asks(host), asked)]
            .map(|(key, value)| EtcdOperation::put(&keys.key(key), &value, None));
        let is_written = etcd.transact(&conditions, &puts).await?.succeeded;
        peers.on_registered(asks, is_written);
        Ok(())
    }

    /// Handles a message of another host during a session.
    pub(super) async fn on_peer(&mut self, from: &str, message: PeerMessage) -> Result<(), EtcdError> {
        let Some(peers) = &self.peers else { return Ok(()) };
        // The other host lost etcd; perhaps this one has, and does not know it yet.
        let asks = matches!(message, PeerMessage::Report { .. } | PeerMessage::Ask { .. });
        if asks && self.leading.is_none() && peers.is_peer(from) {
            self.probe_at
                .get_or_insert(now().max(self.answered.unwrap_or(Instant::ZERO) + PROBE_INTERVAL / 4));
        }
        self.deliver(from, message, true).await
    }

    /// Passes a message to the leader that this host is by election in etcd, or to the connections.
    async fn deliver(
        &mut self,
        from: &str,
        message: PeerMessage,
        has_session: bool,
    ) -> Result<(), EtcdError> {
        let Some(peers) = &mut self.peers else { return Ok(()) };
        let messages = match (message, &mut self.leading) {
            (PeerMessage::Report { reports }, Some(leading)) => {
                if let Some(reports) = peers.on_direct_report(from, reports, leading.term(), &self.known) {
                    leading.on_reports(from, &reports);
                }
                Vec::new()
            }
            (message, leading) => {
                let is_free = !has_session && leading.is_none();
                peers.on_message(from, message, has_session, is_free, &self.known)
            }
        };
        self.forward(messages).await
    }

    /// Adds the connections to other hosts to a report.
    pub(super) fn with_peers(&self, report: api::ClusterReport) -> api::ClusterReport {
        let connected = self.peers.as_ref().map(|peers| peers.connected() as u64);
        api::ClusterReport { connected_peers: connected, ..report }
    }

    /// Handles an input without a session. True if the agent has to stop.
    pub(super) async fn handle_disconnected(&mut self, input: Option<AgentInput>) -> bool {
        let why = &self.why;
        match input {
            Some(AgentInput::Stop) | None => return true,
            // Accepted here: the main thread checks against the last known reservations of other
            // hosts.
            Some(AgentInput::ReserveIfFits(_, sender)) => drop(sender.try_send(Ok(()))),
            Some(AgentInput::Change(_, sender)) => {
                let _ = sender.try_send(Err(unreachable_error(why)));
            }
            Some(AgentInput::Forget(_, sender)) => {
                let _ = sender.try_send(Err(unreachable_error(why)));
            }
            Some(AgentInput::Move(_, sender)) => {
                let _ = sender.try_send(StepOutcome::Disconnected(why.clone()));
            }
            Some(AgentInput::Status(sender)) => {
                let report = status::last_known(&self.known, self.answered, why);
                let _ = sender.try_send(self.with_peers(report));
            }
            Some(AgentInput::Reports(reports)) => return self.report_directly(reports).await.is_err(),
            Some(AgentInput::Peer(from, message, permit)) => {
                drop(permit);
                return self.on_peer_disconnected(&from, *message).await.is_err();
            }
            Some(AgentInput::Reservations(_) | AgentInput::Watched(..) | AgentInput::Ended(..)) => {}
        }
        false
    }

    async fn report_directly(&mut self, reports: HostReports) -> Result<(), EtcdError> {
        let Some(peers) = &mut self.peers else { return Ok(()) };
        let messages = match &mut self.leading {
            // A leader that no other host reaches does not extend its own lease.
            Some(leading) => {
                if peers.has_direct() {
                    leading.on_reports(&self.agent.cluster.host, &reports);
                }
                Vec::new()
            }
            None => peers.report(reports, &self.known),
        };
        self.forward(messages).await
    }

    async fn on_peer_disconnected(&mut self, from: &str, message: PeerMessage) -> Result<(), EtcdError> {
        let Some(peers) = &self.peers else { return Ok(()) };
        // A change of etcd's member takes less time, and a leader stays leader meanwhile.
        let is_cut_off =
            self.answered.is_none_or(|answered| now() >= answered + self.agent.timing.term_lease() / 2);
        if is_cut_off && peers.would_confirm(from, &message) && self.leading.take().is_some() {
            tracing::info!(
                "this host no longer leads the cluster: etcd is unreachable, and {from} asks for it"
            );
        }
        self.deliver(from, message, false).await
    }

    /// Time of the next call of [`EtcdSession::perform_disconnected`].
    pub(super) fn next_disconnected(&self) -> Instant {
        let Some(peers) = &self.peers else { return Instant::MAX };
        self.leading.as_ref().map_or(Instant::MAX, LeaderTerm::next_division).min(peers.next())
    }

    /// Performs what is due without a session.
    pub(super) async fn perform_disconnected(&mut self) {
        let Some(peers) = &mut self.peers else { return };
        let mut messages = Vec::new();
        if let Some(leading) = &mut self.leading {
            let host = &self.agent.cluster.host;
            if leading.divide(&self.known) {
                self.leading = None;
            } else {
                for (to, grants) in leading.take_direct(|to| to == host || peers.is_direct(to)) {
                    match to == *host {
                        true => messages.extend(granted(grants, &self.known)),
                        false => peers.send_grants(&to, &grants),
                    }
                }
            }
        }
        messages.extend(peers.tick(self.leading.is_none(), &self.known));
        // The main thread has ended: the inbox shows that as well.
        let _ = self.forward(messages).await;
    }
}
