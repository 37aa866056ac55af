//! Connected clients of a server, counted by export and by whether their handshake is complete.
//!
//! Each operation at the arrival or departure of a client is O(log n) in clients.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use policy::time::Instant;
use reactor::{memory::ConnectionMemory, operation::Fd};

use crate::nbd::{client_observer::NbdClientInfo, stop_signal::StopSignal, transfers::ClientTransfers};

/// A connected client.
#[derive(Debug)]
pub(super) struct ConnectedClient {
    pub(super) socket: Fd,
    pub(super) stop: Arc<StopSignal>,
    /// `None` through a Unix socket.
    pub(super) address: Option<IpAddr>,
    pub(super) since: Instant,
    /// Reported to the observer when the client has disconnected.
    pub(super) client_info: Option<Box<NbdClientInfo>>,
    /// After the handshake.
    pub(super) transfers: Option<Arc<ClientTransfers>>,
    /// Memory of TLS, after the client has started it.
    pub(super) tls_memory: Option<ConnectionMemory>,
    /// After the handshake.
    export: Option<usize>,
}

impl ConnectedClient {
    /// A client that has not chosen an export.
    pub(super) fn new(socket: Fd, address: Option<IpAddr>, since: Instant) -> Self {
        Self {
            socket,
            stop: Arc::default(),
            address,
            since,
            client_info: None,
            transfers: None,
            tls_memory: None,
            export: None,
        }
    }

    pub(super) fn export(&self) -> Option<usize> {
        self.export
    }
}

/// Clients by number. A number belongs to a slot, for which a listener may wait long, so the order
/// of numbers is not that of arrival.
#[derive(Debug, Default)]
pub(super) struct ConnectedClients {
    live: HashMap<u64, ConnectedClient>,
    /// Clients that have not chosen an export, in the order of arrival.
    unfinished: BTreeSet<(Instant, u64)>,
    /// Clients among `unfinished` that may be disconnected while others wait.
    to_disconnect: BTreeSet<(Instant, u64)>,
    /// Clients of each export that has any.
    by_export: HashMap<usize, usize>,
}

impl ConnectedClients {
    /// Adds a client that has not chosen an export.
    pub(super) fn insert(&mut self, number: u64, live: ConnectedClient) {
        self.unfinished.insert((live.since, number));
        self.to_disconnect.insert((live.since, number));
        self.live.insert(number, live);
    }

    /// Counts a client to the export that it has chosen; false if the client has disconnected.
    pub(super) fn choose(
        &mut self,
        number: u64,
        export: usize,
        client_info: Option<Box<NbdClientInfo>>,
    ) -> bool {
        let Some(live) = self.live.get_mut(&number) else { return false };
        live.client_info = client_info;
        // A client that chooses again is counted for its new export only.
        let previous = live.export.replace(export);
        self.unfinished.remove(&(live.since, number));
        self.to_disconnect.remove(&(live.since, number));
        *self.by_export.entry(export).or_default() += 1;
        self.uncount(previous);
        true
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<ConnectedClient> {
        let removed = self.live.remove(&number)?;
        self.unfinished.remove(&(removed.since, number));
        self.to_disconnect.remove(&(removed.since, number));
        self.uncount(removed.export);
        Some(removed)
    }

    fn uncount(&mut self, export: Option<usize>) {
        let Some(export) = export else { return };
        if let Some(count) = self.by_export.get_mut(&export) {
            *count -= 1;
            if *count == 0 {
                self.by_export.remove(&export);
            }
        }
    }

    pub(super) fn get(&self, number: u64) -> Option<&ConnectedClient> {
        self.live.get(&number)
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut ConnectedClient> {
        self.live.get_mut(&number)
    }

    /// Excludes a client from [`Self::oldest_to_disconnect`]: it was disconnected, or it waits for
    /// the server.
    pub(super) fn spare(&mut self, number: u64) {
        if let Some(live) = self.live.get(&number) {
            self.to_disconnect.remove(&(live.since, number));
        }
    }

    /// Charges a client for its TLS. Its handshake proceeds, so it may be disconnected again.
    pub(super) fn start_tls(&mut self, number: u64, memory: ConnectionMemory) {
        if let Some(live) = self.live.get_mut(&number) {
            live.tls_memory = Some(memory);
            if live.export.is_none() {
                self.to_disconnect.insert((live.since, number));
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &ConnectedClient)> {
        self.live.iter().map(|(number, live)| (*number, live))
    }

    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    /// Clients of an export.
    pub(super) fn count_of(&self, export: usize) -> usize {
        self.by_export.get(&export).copied().unwrap_or(0)
    }

    /// Clients of each export that has any.
    pub(super) fn counts(&self) -> &HashMap<usize, usize> {
        &self.by_export
    }

    /// The client that has been in its handshake for longest, and when it arrived.
    pub(super) fn oldest_unfinished(&self) -> Option<(u64, Instant)> {
        self.unfinished.first().map(|(since, number)| (*number, *since))
    }

    /// The client that has been in its handshake for longest, of those that may be disconnected,
    /// and when it arrived.
    pub(super) fn oldest_to_disconnect(&self) -> Option<(u64, Instant)> {
        self.to_disconnect.first().map(|(since, number)| (*number, *since))
    }

    /// Clients in their handshake.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = &ConnectedClient> {
        self.unfinished.iter().filter_map(|(_, number)| self.live.get(number))
    }
}

#[cfg(test)]
mod tests {
    use std::os::{fd::OwnedFd, unix::net::UnixStream};

    use reactor::memory::MemoryBudget;

    use super::*;

    fn client(since: u64) -> ConnectedClient {
        let (socket, _) = UnixStream::pair().expect("sockets");
        ConnectedClient::new(OwnedFd::from(socket).into(), None, Instant::from_nanos(since))
    }

    #[test]
    fn oldest_client_is_chosen_by_arrival() {
        let mut roster = ConnectedClients::default();
        roster.insert(5, client(10));
        roster.insert(2, client(20));
        assert_eq!(roster.oldest_unfinished(), Some((5, Instant::from_nanos(10))));
        roster.remove(5);
        assert_eq!(roster.oldest_unfinished(), Some((2, Instant::from_nanos(20))));
    }

    #[test]
    fn clients_are_counted_by_export_and_handshake() {
        let mut roster = ConnectedClients::default();
        for number in 1..=3 {
            roster.insert(number, client(10 * number));
        }
        assert_eq!(roster.oldest_unfinished(), Some((1, Instant::from_nanos(10))));
        assert!(roster.choose(1, 7, None) && roster.choose(3, 7, None) && !roster.choose(4, 7, None));
        assert_eq!((roster.count_of(7), roster.unfinished().count(), roster.len()), (2, 1, 3));
        assert_eq!(roster.oldest_unfinished(), Some((2, Instant::from_nanos(20))));
        // A second choice of the same client does not count it twice.
        assert!(roster.choose(3, 8, None));
        assert_eq!(roster.counts(), &HashMap::from([(7, 1), (8, 1)]));
        for number in 1..=3 {
            assert!(roster.remove(number).is_some() && roster.remove(number).is_none());
        }
        assert_eq!((roster.counts().len(), roster.oldest_unfinished(), roster.len()), (0, None, 0));
    }

    #[test]
    fn a_client_that_waits_for_the_server_or_was_disconnected_is_not_disconnected() {
        let mut roster = ConnectedClients::default();
        roster.insert(1, client(10));
        roster.insert(2, client(20));
        roster.spare(1);
        assert_eq!(roster.oldest_to_disconnect(), Some((2, Instant::from_nanos(20))));
        assert_eq!(roster.oldest_unfinished(), Some((1, Instant::from_nanos(10))));
        roster.spare(2);
        assert_eq!(roster.oldest_to_disconnect(), None);
        let memory = ConnectionMemory::new(MemoryBudget::process(), 1).expect("a byte");
        roster.start_tls(1, memory);
        assert_eq!(roster.oldest_to_disconnect(), Some((1, Instant::from_nanos(10))));
        roster.remove(1);
        assert_eq!(roster.oldest_to_disconnect(), None);
    }
}
