//! Who asks, as far as the kernel knows: an address, or a user of this host.
//!
//! Never what a client says of itself.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

/// Who asks; every request has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Address(IpAddr),
    /// Over a Unix socket: the user, as the kernel knows it (unix(7), SO_PEERCRED).
    User(Option<u32>),
}

impl Peer {
    /// Whom bounds count: of IPv6 a network, and all of this host's own addresses, as one may have
    /// all of them.
    pub(super) fn source(self) -> Self {
        match self {
            Self::Address(address) if address.is_loopback() => Self::Address(Ipv4Addr::LOCALHOST.into()),
            Self::Address(IpAddr::V6(v6)) => {
                Self::Address(IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()))
            }
            other => other,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::User(_) => f.write_str("a Unix socket"),
        }
    }
}
