//! Access control of a server: networks, connections per address, client names, and the exports
//! that a client may use. Rejected clients are counted, and logged at most once a second.
//!
//! ```text
//!   accepted ─► network, connections of its address ─► handshake ─► name, once TLS has proved it
//!                     │ no: closed, no byte was sent       │              │ no: closed
//!                     ▼                                    ▼              ▼
//!                  counted              exports without access are reported as absent
//! ```
//!
//! Never decides by itself: `policy::access` does.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    os::fd::{AsFd, AsRawFd as _},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use nix::sys::socket::{SockaddrStorage, getpeername};
use policy::access::{AccessRules, ClientIdentity, connection_origin};
use reactor::log_rate_limit::LogRateLimit;

use super::wire;

/// Number of rejected clients since the server's start, by reason.
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectedClientCounts {
    /// By their network address.
    pub networks: u64,
    /// By the limit on connections of one address.
    pub connections: u64,
    /// By the name that TLS proved.
    pub names: u64,
    /// Requests for an export by name that the client may not use; the client stays connected.
    pub exports: u64,
}

#[derive(Clone, Copy, Debug)]
enum RejectionReason {
    Network,
    Connections,
    Name,
    Export,
}

#[derive(Debug)]
pub(super) struct NbdAccessControl {
    access: AccessRules,
    /// Largest number of connections of one address.
    max_per_address: usize,
    connections_by_origin: Mutex<HashMap<IpAddr, usize>>,
    counts: [AtomicU64; 4],
    log_limit: LogRateLimit,
}

impl NbdAccessControl {
    /// Creates the access control of a server. `max_per_address` bounds the connections of an
    /// address.
    pub(super) fn new(access: AccessRules, max_per_address: usize) -> Self {
        Self {
            access,
            max_per_address,
            connections_by_origin: Mutex::default(),
            counts: Default::default(),
            log_limit: LogRateLimit::default(),
        }
    }

    /// True if a client from this address may begin a handshake. An admitted client is counted
    /// until [`NbdAccessControl::release`].
    pub(super) fn admit(&self, address: Option<IpAddr>) -> bool {
        if !self.access.networks.allows(address) {
            self.reject(RejectionReason::Network, &ClientIdentity { address, name: None }, None);
            return false;
        }
        // Unix sockets have no address, so the bound per address does not apply to them. Networks
        // first: a client of a forbidden network must not use up the connections of its address.
        let Some(address) = address else { return true };
        let admitted = {
            let mut guests = self.connections_by_origin.lock().unwrap_or_else(PoisonError::into_inner);
            // `connection_origin` maps addresses of one site (an IPv6 prefix) to one key.
            let taken = guests.entry(connection_origin(address)).or_default();
            let has_room = *taken < self.max_per_address;
            *taken += usize::from(has_room);
            has_room
        };
        if !admitted {
            self.reject(
                RejectionReason::Connections,
                &ClientIdentity { address: Some(address), name: None },
                None,
            );
        }
        admitted
    }

    /// Counts a client that another process admitted, until [`NbdAccessControl::release`]. The
    /// access rules are not checked again.
    pub(super) fn count_transferred(&self, address: IpAddr) {
        let mut guests = self.connections_by_origin.lock().unwrap_or_else(PoisonError::into_inner);
        *guests.entry(connection_origin(address)).or_default() += 1;
    }

    pub(super) fn release(&self, address: IpAddr) {
        let mut guests = self.connections_by_origin.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut taken) = guests.entry(connection_origin(address)) {
            *taken.get_mut() -= 1;
            // Removed at zero, so that the map is bounded by the number of connections, not of
            // addresses seen.
            if *taken.get() == 0 {
                taken.remove();
            }
        }
    }

    /// True if the rules allow the name that TLS has proved.
    pub(super) fn admits_name(&self, client: &ClientIdentity) -> bool {
        let admitted = self.access.allows_name(client.name.as_deref());
        if !admitted {
            self.reject(RejectionReason::Name, client, None);
        }
        admitted
    }

    /// True if the client may use an export with these access rules.
    pub(super) fn admits_to_export(&self, access: &AccessRules, client: &ClientIdentity) -> bool {
        self.access.allows_name(client.name.as_deref()) && access.allows(client)
    }

    /// Counts a request for an export that the client may not use.
    pub(super) fn reject_export(&self, client: &ClientIdentity, export: &str) {
        self.reject(RejectionReason::Export, client, Some(export));
    }

    pub(super) fn rejected_counts(&self) -> RejectedClientCounts {
        let [networks, connections, names, exports] = self.counts.each_ref().map(|count| count.load(Relaxed));
        RejectedClientCounts { networks, connections, names, exports }
    }

    /// Adds the counters of the old process after an upgrade.
    pub(super) fn add_counts(&self, refused: RejectedClientCounts) {
        let RejectedClientCounts { networks, connections, names, exports } = refused;
        for (count, more) in self.counts.iter().zip([networks, connections, names, exports]) {
            count.fetch_add(more, Relaxed);
        }
    }

    fn reject(&self, why: RejectionReason, client: &ClientIdentity, export: Option<&str>) {
        // Every rejection is counted, but only one a second is logged: a client could fill the log.
        self.counts[why as usize].fetch_add(1, Relaxed);
        if let Some(suppressed) = self.log_limit.try_log(reactor::coarse_now()) {
            let reason = match why {
                RejectionReason::Network => "the client's network is not allowed",
                RejectionReason::Connections => "too many connections from the client's address",
                RejectionReason::Name => "tls-authz does not allow the client's name",
                RejectionReason::Export => "the export's access rules do not allow the client",
            };
            tracing::info!(
                address = client.address.map(|address| address.to_canonical().to_string()),
                name = client.name.as_deref().map(|name| format!("{:?}", wire::truncated(name))),
                export,
                reason,
                suppressed,
                "a client was rejected"
            );
        }
    }
}

/// Address of a socket's peer; `None` for a Unix socket.
pub(super) fn peer_address(socket: impl AsFd) -> Option<IpAddr> {
    let peer = getpeername::<SockaddrStorage>(socket.as_fd().as_raw_fd()).ok()?;
    let v4 = || peer.as_sockaddr_in().map(|peer| peer.ip().into());
    let v6 = || peer.as_sockaddr_in6().map(|peer| peer.ip().into());
    v4().or_else(v6)
}
