//! Messages between hosts: one JSON object on each line, after a line that names both hosts.
//!
//! Bytes of a peer are untrusted: the length of a line is bounded, and names and numbers are
//! checked where they are used.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use policy::cluster::{AgreementAnswer, AgreementRefusal, AgreementRequest, MAX_AGREEING_HOSTS, PeerSet};
use serde::{Deserialize, Serialize};

use super::etcd_values::{HostGrants, HostReports, TermValue};

/// Version of the messages. A connection of another version is refused.
pub(super) const VERSION: u32 = 1;
/// Maximum length of the first line of a connection, in bytes.
pub(super) const MAX_GREETING_BYTES: usize = 1024;
/// Maximum length of any other line: reports or grants of some hundred groups.
pub(super) const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// First line of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerGreeting {
    pub(super) version: u32,
    pub(super) cluster: String,
    pub(super) from: String,
    pub(super) to: String,
}

/// Message of one host to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub(crate) enum PeerMessage {
    /// The sender asks for the receiver's agreement; see [`AgreementRequest`].
    Ask { nonce: u64, number: u64, members: BTreeSet<String>, leads: bool },
    /// Answer to `Ask`.
    Answer { nonce: u64, number: u64, refusal: Option<PeerRefusal> },
    /// The sender's candidacy is over.
    Release { nonce: u64 },
    /// Reports of the sender's groups, for the leader.
    Report { reports: HostReports },
    /// The sender leads this term.
    Leads { term: TermValue },
    /// Grants of the sender, which leads, to the receiver.
    Grant { grants: HostGrants },
    /// Shows that the connection is alive.
    Ping,
}

/// Reason why a host does not agree; see [`AgreementRefusal`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PeerRefusal {
    ReachesEtcd,
    Promised,
    UnknownSender,
    /// Hosts that the sender does not ask, with their addresses.
    MoreHosts(BTreeMap<String, Option<SocketAddr>>),
}

impl PeerMessage {
    /// Parses a line without its end. `None` if it is invalid, or names more hosts than can agree.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let message = serde_json::from_slice(line).ok()?;
        let hosts = match &message {
            Self::Ask { members, .. } => members.len(),
            Self::Answer { refusal: Some(PeerRefusal::MoreHosts(hosts)), .. } => hosts.len(),
            _ => 0,
        };
        (hosts <= MAX_AGREEING_HOSTS).then_some(message)
    }

    /// The line, with its end.
    pub(super) fn line(&self) -> Vec<u8> {
        line(self)
    }

    pub(super) fn request(request: AgreementRequest) -> Self {
        let AgreementRequest { nonce, number, members, leads } = request;
        Self::Ask { nonce, number, members, leads }
    }

    pub(super) fn answer(answer: AgreementAnswer, addresses: &BTreeMap<String, SocketAddr>) -> Self {
        let refusal = answer.refusal.map(|refusal| match refusal {
            AgreementRefusal::ReachesStore => PeerRefusal::ReachesEtcd,
            AgreementRefusal::Promised => PeerRefusal::Promised,
            AgreementRefusal::UnknownSender => PeerRefusal::UnknownSender,
            AgreementRefusal::MoreHosts(hosts) => {
                let address = |name: String| (addresses.get(&name).copied(), name);
                let hosts = hosts.into_keys().map(address).map(|(address, name)| (name, address));
                PeerRefusal::MoreHosts(hosts.collect())
            }
        });
        Self::Answer { nonce: answer.nonce, number: answer.number, refusal }
    }
}

impl PeerRefusal {
    pub(super) fn into_policy(self) -> AgreementRefusal {
        match self {
            Self::ReachesEtcd => AgreementRefusal::ReachesStore,
            Self::Promised => AgreementRefusal::Promised,
            Self::UnknownSender => AgreementRefusal::UnknownSender,
            Self::MoreHosts(hosts) => {
                let hosts = hosts.into_iter().filter(|(name, _)| settings::parse_cluster_name(name).is_ok());
                let hosts: PeerSet = hosts.map(|(name, address)| (name, address.is_some())).collect();
                AgreementRefusal::MoreHosts(hosts)
            }
        }
    }
}

/// A JSON object and the end of the line.
pub(super) fn line(value: &impl Serialize) -> Vec<u8> {
    // Strings as keys and no maps with other keys: this cannot fail.
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_are_lines_of_json() {
        let hosts = BTreeMap::from([("a".to_owned(), None), ("b".to_owned(), "10.0.0.1:7".parse().ok())]);
        for message in [
            PeerMessage::Ask {
                nonce: u64::MAX,
                number: 1,
                members: BTreeSet::from(["a".to_owned()]),
                leads: true,
            },
            PeerMessage::Answer { nonce: 1, number: 2, refusal: Some(PeerRefusal::MoreHosts(hosts)) },
            PeerMessage::Answer { nonce: 1, number: 2, refusal: Some(PeerRefusal::ReachesEtcd) },
            PeerMessage::Release { nonce: 7 },
            PeerMessage::Report { reports: HostReports::default() },
            PeerMessage::Ping,
        ] {
            let line = message.line();
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            assert_eq!(serde_json::from_slice::<PeerMessage>(&line).unwrap(), message);
        }
    }

    #[test]
    fn more_hosts_than_can_agree_are_refused() {
        let ask = |count: usize| {
            let members = (0..count).map(|host| host.to_string()).collect();
            PeerMessage::Ask { nonce: 1, number: 1, members, leads: false }
        };
        let refused = |count: usize| {
            let hosts = (0..count).map(|host| (host.to_string(), None)).collect();
            PeerMessage::Answer { nonce: 1, number: 1, refusal: Some(PeerRefusal::MoreHosts(hosts)) }
        };
        for message in [ask(MAX_AGREEING_HOSTS), refused(MAX_AGREEING_HOSTS)] {
            assert_eq!(PeerMessage::parse(&message.line()), Some(message));
        }
        for message in [ask(MAX_AGREEING_HOSTS + 1), refused(MAX_AGREEING_HOSTS + 1)] {
            assert_eq!(PeerMessage::parse(&message.line()), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = serde_json::from_slice::<PeerMessage>(&bytes);
            let _ = serde_json::from_slice::<PeerGreeting>(&bytes);
        }
    }
}
