//! Access rules of a server or one of its exports: by the client's network, and by the name that
//! its TLS credentials prove.
//!
//! ```text
//!   address ─► Networks: the narrowest match decides ─┐
//!                                                     ├─► both must allow the client
//!   name ────► Names: the first match decides ────────┘
//! ```
//!
//! Never authenticates: the code that owns the connection determines address and name.

mod names;
mod network;

use alloc::string::String;
use core::net::IpAddr;

pub use names::{Names, Rule};
pub use network::{Network, Networks, origin};

/// Identity of a connected client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// Address of the peer; `None` for a Unix socket, where file permissions restrict access.
    pub address: Option<IpAddr>,
    /// Authenticated name: the subject of a certificate, or the user of a pre-shared key.
    pub name: Option<String>,
}

/// Access rules. The default allows every client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Rules for the client's address.
    pub networks: Networks,
    /// Rules for the client's name; `None` allows clients with any name, or without one.
    pub names: Option<Names>,
}

impl Access {
    /// True if every client is allowed.
    pub fn is_open(&self) -> bool {
        *self == Self::default()
    }

    /// True if the client is allowed. With rules for names, a client without a name is denied.
    pub fn admits(&self, client: &Client) -> bool {
        self.networks.admits(client.address) && self.admits_name(client.name.as_deref())
    }

    /// True if the rules for names allow this name. Does not look at networks.
    pub fn admits_name(&self, name: Option<&str>) -> bool {
        self.names.as_ref().is_none_or(|names| name.is_some_and(|name| names.admits(name)))
    }
}

#[cfg(test)]
mod tests {
    use alloc::{borrow::ToOwned as _, vec, vec::Vec};

    use super::*;

    #[test]
    fn both_decide_and_who_has_no_name_is_refused_where_names_are_asked_for() {
        let networks = Networks { allow: vec!["10.0.0.0/8".parse().unwrap()], deny: Vec::new() };
        let access = Access { networks, names: Some(Names::any_of(["alice".to_owned()])) };
        let admits = |address: &str, name: Option<&str>| {
            let address = (!address.is_empty()).then(|| address.parse().unwrap());
            access.admits(&Client { address, name: name.map(str::to_owned) })
        };
        assert!(admits("10.1.2.3", Some("alice")));
        assert!(!admits("10.1.2.3", Some("bob")));
        assert!(!admits("10.1.2.3", None));
        assert!(!admits("11.1.2.3", Some("alice")));
        // A Unix socket has no network.
        assert!(admits("", Some("alice")));
        assert!(!admits("", None));
        assert!(!access.is_open() && Access::default().is_open());
    }
}
