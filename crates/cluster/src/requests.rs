//! Requests of this host to the agent thread, with their answers: reports, changes of limits,
//! reservations, and steps of a migration.
//!
//! Every request has a time limit, so that no command waits for an unresponsive etcd.

use api::{ClusterGroupChange, ClusterReport, ForgottenHost, LocalQuota};
use async_channel::{Receiver, Sender};
use policy::time::Duration;

use super::{
    AGENT_ENDED, ClusterHooks, ClusterMembership, actor,
    etcd_values::HostReservations,
    local_groups::LocalGroupState,
    messages::{AgentInput, GroupLimitChange},
    migration_offer::{MigrationAnswer, MigrationReply, MigrationStep, ReceivedOffer, StepOutcome},
    reservations::ReservationRefusal,
    status,
};

/// Time that a command waits for etcd: longer than one round of requests to all members.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

impl ClusterMembership {
    /// Report for `weir cluster status`. Waits up to `REQUEST_TIMEOUT` for etcd.
    pub async fn status(&self) -> ClusterReport {
        let (sender, receiver) = async_channel::bounded(1);
        let report = match self.send(AgentInput::Status(sender)) {
            Ok(()) => match reactor::timeout(REQUEST_TIMEOUT, receiver.recv()).await {
                Ok(Ok(received)) => received,
                _ => status::unavailable("etcd does not answer in time"),
            },
            Err(why) => status::unavailable(why),
        };
        let quota = |state: LocalGroupState| LocalQuota { name: state.group, leased: state.is_leased };
        ClusterReport {
            name: self.name.clone(),
            host: self.host.clone(),
            local_groups: self.group_states().into_iter().map(quota).collect(),
            agreement: self.agreement(),
            missing_hosts: {
                let missing = self.peers.borrow().missing.clone();
                let missing = missing.into_iter().filter(|_| !self.is_connected.get());
                missing.map(|(host, why)| (host, why.to_owned())).collect()
            },
            ..report
        }
    }

    /// Changes or removes the limits of a group on all hosts.
    ///
    /// # Errors
    /// Returns the reason as a message.
    pub async fn change(&self, change: GroupLimitChange) -> Result<ClusterGroupChange, String> {
        let is_here = self.has_group(&change.group);
        if is_here && change.removes {
            let name = &change.group;
            return Err(format!(
                "group {name}: in use on {} (remove [group.{name}] from the config file here, and reload)",
                self.host
            ));
        }
        // Taken here, not in the agent: the actor is known on the main thread, during the poll.
        let change = GroupLimitChange { by: actor::current_actor(), ..change };
        let mut response = self.request(|sender| AgentInput::Change(change, sender)).await?;
        response.used |= is_here;
        Ok(response)
    }

    /// Records this host's reservations in etcd, if all hosts' reservations then fit.
    ///
    /// # Errors
    /// Returns the reason of a refusal; the caller undoes its change. Without etcd the last known
    /// reservations of all hosts decide.
    pub async fn record_reservations_now(&self, hooks: &dyn ClusterHooks) -> Result<(), String> {
        match self.changed_reservations(hooks) {
            Some(reservations) => self.record_and_wait(reservations).await.map_err(|refusal| refusal.why),
            None => Ok(()),
        }
    }

    /// Records this host's reservations after a roll-back has released some, if they fit.
    ///
    /// They may include the reservation of a concurrent command, which the cluster has not
    /// confirmed. If it does not fit, etcd keeps this host's earlier reservations: that command is
    /// refused as well and records what its own roll-back leaves, or the next tick does.
    pub async fn record_rolled_back_reservations(&self, hooks: &dyn ClusterHooks) {
        if self.record_reservations_now(hooks).await.is_err() {
            self.hosts.borrow_mut().resend_reservations();
        }
    }

    pub(super) async fn record_and_wait(
        &self,
        reservations: HostReservations,
    ) -> Result<(), ReservationRefusal> {
        let (sender, receiver) = async_channel::bounded(1);
        if self.send(AgentInput::ReserveIfFits(reservations, sender)).is_err() {
            return Ok(());
        }
        // After a timeout the next session records them again.
        match reactor::timeout(REQUEST_TIMEOUT, receiver.recv()).await {
            Ok(Ok(result)) => result,
            _ => Ok(()),
        }
    }

    /// Deletes the keys of a host that will not return.
    ///
    /// # Errors
    /// Returns the reason as a message.
    pub async fn forget_host(&self, host: String) -> Result<ForgottenHost, String> {
        self.request(|sender| AgentInput::Forget(host, sender)).await
    }

    /// Next disk that another host offers; `None` after the end of the agent.
    pub async fn next_offer(&self) -> Option<ReceivedOffer> {
        self.offers.1.recv().await.ok()
    }

    /// Answers to the offer of this number, until the receiver is dropped.
    pub fn await_answers(&self, number: u64) -> Receiver<MigrationAnswer> {
        let (sender, receiver) = async_channel::bounded(4);
        let mut senders = self.answer_senders.borrow_mut();
        senders.retain(|_, sender| !sender.is_closed());
        senders.insert(number, sender);
        receiver
    }

    pub(super) fn handle_answer(&self, disk: String, answer: MigrationAnswer) {
        let sent =
            self.answer_senders.borrow().get(&answer.number).map(|sender| sender.try_send(answer.clone()));
        if !matches!(sent, Some(Ok(()))) && answer.said != MigrationReply::Taken {
            // The offer is an earlier run's, or the receiver gave up. Withdrawing it frees the
            // other host.
            let step = MigrationStep::Withdraw { to: answer.by, disk, number: answer.number };
            let _ = self.input.try_send(AgentInput::Move(Box::new(step), async_channel::bounded(1).0));
        }
    }

    /// Performs one step of a migration. `None` if the outcome is unknown.
    pub async fn step(&self, step: MigrationStep) -> Option<StepOutcome> {
        let (sender, receiver) = async_channel::bounded(1);
        if let Err(why) = self.send(AgentInput::Move(Box::new(step), sender)) {
            return Some(StepOutcome::Disconnected(why.to_owned()));
        }
        reactor::timeout(REQUEST_TIMEOUT, receiver.recv()).await.ok()?.ok()
    }

    /// Sends to the agent; the error is the text for the user.
    pub(super) fn send(&self, input: AgentInput) -> Result<(), &'static str> {
        self.input.try_send(input).map_err(|error| match error.is_closed() {
            true => AGENT_ENDED,
            false => "too many requests at once (try again)",
        })
    }

    async fn request<T>(
        &self,
        input: impl FnOnce(Sender<Result<T, String>>) -> AgentInput,
    ) -> Result<T, String> {
        let (sender, receiver) = async_channel::bounded(1);
        self.send(input(sender))?;
        match reactor::timeout(REQUEST_TIMEOUT, receiver.recv()).await {
            Ok(Ok(result)) => result,
            _ => Err(
                "etcd does not answer in time; the change may have been made (check `weir cluster status`)"
                    .to_owned(),
            ),
        }
    }
}
