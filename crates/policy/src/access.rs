//! Who may connect to a server, or have one of its exports: by the network that a client comes
//! from, and by the name that its TLS credentials have proved.
//!
//! ```text
//!   address ─► Networks: the narrowest one that has it decides ─┐
//!                                                               ├─► both, or it is refused
//!   name ────► Names: the first rule that fits it decides ──────┘
//! ```
//!
//! Never asks who somebody is: that is found out where connections are.

mod names;
mod network;

use alloc::string::String;
use core::net::IpAddr;

pub use names::{Names, Rule};
pub use network::{Network, Networks, origin};

/// What is known of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// Where it comes from; `None` through a Unix socket, where files' permissions decide.
    pub address: Option<IpAddr>,
    /// What its credentials have proved: the subject of a certificate, or the user of a key.
    pub name: Option<String>,
}

/// Who is let in. By default everybody is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Where clients may come from.
    pub networks: Networks,
    /// Whose clients they may be; `None`: anybody's.
    pub names: Option<Names>,
}

impl Access {
    /// Whether nobody is refused.
    pub fn is_open(&self) -> bool {
        *self == Self::default()
    }

    /// Whether this client is let in. A client without a name is not where names are asked for.
    pub fn admits(&self, client: &Client) -> bool {
        self.networks.admits(client.address) && self.admits_name(client.name.as_deref())
    }

    /// The same, as far as its name decides.
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
