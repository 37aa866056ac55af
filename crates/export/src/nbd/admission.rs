//! Who gets in at a server: where clients may come from, how many of one address, whose they may
//! be, and which exports each of them may have. Who is refused is counted, and told once a second.
//!
//! ```text
//!   accepted ─► network, connections of its address ─► handshake ─► name, once TLS has proved it
//!                     │ no: closed, no byte was sent       │              │ no: closed
//!                     ▼                                    ▼              ▼
//!                  counted              exports that it may not have are not there for it
//! ```
//!
//! Decides nothing by itself: `policy::access` does.

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
use policy::access::{Access, Client, origin};
use reactor::seldom::Seldom;

use super::wire;

/// Clients that were refused, since the server's start.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// For where they came from.
    pub networks: u64,
    /// Because their address had as many connections as it may have.
    pub connections: u64,
    /// For the name that TLS proved.
    pub names: u64,
    /// An export alone, which they asked for by its name.
    pub exports: u64,
}

#[derive(Clone, Copy, Debug)]
enum Why {
    Network,
    Connections,
    Name,
    Export,
}

#[derive(Debug)]
pub(super) struct Admission {
    access: Access,
    /// Connections of one address.
    most_of_one: usize,
    guests: Mutex<HashMap<IpAddr, usize>>,
    counts: [AtomicU64; 4],
    lines: Seldom,
}

impl Admission {
    /// Of clients with this access, and so many connections of one address.
    pub(super) fn new(access: Access, most_of_one: usize) -> Self {
        Self {
            access,
            most_of_one,
            guests: Mutex::default(),
            counts: Default::default(),
            lines: Seldom::default(),
        }
    }

    /// Whether a client from this address may say something. One that is let in is counted until
    /// [`Admission::leave`].
    pub(super) fn admit(&self, address: Option<IpAddr>) -> bool {
        if !self.access.networks.admits(address) {
            self.refuse(Why::Network, &Client { address, name: None }, None);
            return false;
        }
        let Some(address) = address else { return true };
        let admitted = {
            let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
            let taken = guests.entry(origin(address)).or_default();
            let has_room = *taken < self.most_of_one;
            *taken += usize::from(has_room);
            has_room
        };
        if !admitted {
            self.refuse(Why::Connections, &Client { address: Some(address), name: None }, None);
        }
        admitted
    }

    /// Counts one that was let in by another server, until [`Admission::leave`]: it is not judged
    /// again.
    pub(super) fn count(&self, address: IpAddr) {
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        *guests.entry(origin(address)).or_default() += 1;
    }

    pub(super) fn leave(&self, address: IpAddr) {
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut taken) = guests.entry(origin(address)) {
            *taken.get_mut() -= 1;
            if *taken.get() == 0 {
                taken.remove();
            }
        }
    }

    /// Whether a client may be who TLS has proved it to be.
    pub(super) fn admits_name(&self, client: &Client) -> bool {
        let admitted = self.access.admits_name(client.name.as_deref());
        if !admitted {
            self.refuse(Why::Name, client, None);
        }
        admitted
    }

    /// Whether a client may have an export with this access.
    pub(super) fn admits_to(&self, access: &Access, client: &Client) -> bool {
        self.access.admits_name(client.name.as_deref()) && access.admits(client)
    }

    /// It asked for one that it may not have.
    pub(super) fn refuse_export(&self, client: &Client, export: &str) {
        self.refuse(Why::Export, client, Some(export));
    }

    pub(super) fn refused(&self) -> Refused {
        let [networks, connections, names, exports] = self.counts.each_ref().map(|count| count.load(Relaxed));
        Refused { networks, connections, names, exports }
    }

    /// Counts on from what another process has counted.
    pub(super) fn count_on(&self, refused: Refused) {
        let Refused { networks, connections, names, exports } = refused;
        for (count, more) in self.counts.iter().zip([networks, connections, names, exports]) {
            count.fetch_add(more, Relaxed);
        }
    }

    fn refuse(&self, why: Why, client: &Client, export: Option<&str>) {
        self.counts[why as usize].fetch_add(1, Relaxed);
        if let Some(left_out) = self.lines.line(reactor::recently()) {
            let reason = match why {
                Why::Network => "networks that may not connect",
                Why::Connections => "as many connections of its address as there may be",
                Why::Name => "tls-authz does not have its name",
                Why::Export => "the export is not for it",
            };
            tracing::info!(
                address = client.address.map(|address| address.to_canonical().to_string()),
                name = client.name.as_deref().map(|name| format!("{:?}", wire::clip(name))),
                export,
                reason,
                left_out,
                "a client was refused"
            );
        }
    }
}

/// Where the client at the other end of a socket comes from; `None` of a Unix socket.
pub(super) fn address_of(socket: impl AsFd) -> Option<IpAddr> {
    let peer = getpeername::<SockaddrStorage>(socket.as_fd().as_raw_fd()).ok()?;
    let v4 = || peer.as_sockaddr_in().map(|peer| peer.ip().into());
    let v6 = || peer.as_sockaddr_in6().map(|peer| peer.ip().into());
    v4().or_else(v6)
}
