//! Access rules of a server or one of its exports: by the client's network, and by the name that
//! its TLS credentials prove.
//!
//! ```text
//!   address ─► networks: the narrowest match decides ─┐
//!                                                     ├─► both must allow the client
//!   name ────► names: the first match decides ────────┘
//! ```
//!
//! Never authenticates: the code that owns the connection determines address and name.

mod names;
mod network;

use alloc::string::String;
use core::net::IpAddr;

pub use names::{NameRule, NameRules};
pub use network::{Network, NetworkRules, connection_origin};

/// Identity of a connected client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientIdentity {
    /// Address of the peer; `None` for a Unix socket, where file permissions restrict access.
    pub address: Option<IpAddr>,
    /// Authenticated name: the subject of a certificate, or the user of a pre-shared key.
    pub name: Option<String>,
}

/// Access rules. The default allows every client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessRules {
    /// Rules for the client's address.
    pub networks: NetworkRules,
    /// Rules for the client's name; `None` allows clients with any name, or without one.
    pub names: Option<NameRules>,
}

impl AccessRules {
    /// True if every client is allowed.
    pub fn allows_all(&self) -> bool {
        *self == Self::default()
    }

    /// True if the client is allowed. With rules for names, a client without a name is denied.
    pub fn allows(&self, client: &ClientIdentity) -> bool {
        self.networks.allows(client.address) && self.allows_name(client.name.as_deref())
    }

    /// True if the rules for names allow this name. Does not look at networks.
    pub fn allows_name(&self, name: Option<&str>) -> bool {
        self.names.as_ref().is_none_or(|names| name.is_some_and(|name| names.allows(name)))
    }
}

#[cfg(test)]
mod tests {
    use alloc::{borrow::ToOwned as _, vec, vec::Vec};

    use super::*;

    #[test]
    fn both_rules_apply_and_unnamed_clients_are_denied_by_name_rules() {
        let networks = NetworkRules { allow: vec!["10.0.0.0/8".parse().unwrap()], deny: Vec::new() };
        let access = AccessRules { networks, names: Some(NameRules::any_of(["alice".to_owned()])) };
        let admits = |address: &str, name: Option<&str>| {
            let address = (!address.is_empty()).then(|| address.parse().unwrap());
            access.allows(&ClientIdentity { address, name: name.map(str::to_owned) })
        };
        assert!(admits("10.1.2.3", Some("alice")));
        assert!(!admits("10.1.2.3", Some("bob")));
        assert!(!admits("10.1.2.3", None));
        assert!(!admits("11.1.2.3", Some("alice")));
        // A Unix socket has no network.
        assert!(admits("", Some("alice")));
        assert!(!admits("", None));
        assert!(!access.allows_all() && AccessRules::default().allows_all());
    }
}
