//! Identity of a client as the kernel reports it: an address, or a user of this host.
//!
//! Never uses a client's own claims.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

/// Identity of a client. Every request carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpPeer {
    Address(IpAddr),
    /// User of a Unix socket's peer (unix(7), SO_PEERCRED).
    User(Option<u32>),
}

impl HttpPeer {
    /// Unit of the bounds for clients: the /64 network for IPv6, and one for all loopback
    /// addresses, since one client may use all addresses of either.
    pub(super) fn bound_key(self) -> Self {
        match self {
            Self::Address(address) if address.is_loopback() => Self::Address(Ipv4Addr::LOCALHOST.into()),
            Self::Address(IpAddr::V6(v6)) => {
                // The upper 64 bits: the smallest network that a site receives.
                Self::Address(IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()))
            }
            other => other,
        }
    }
}

impl fmt::Display for HttpPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::User(_) => f.write_str("a Unix socket"),
        }
    }
}
