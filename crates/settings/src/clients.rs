//! Which clients of NBD are let in, by their networks and by the names that TLS proves: of the
//! whole daemon, and of one disk. Only the settings are judged here.

use std::collections::HashSet;

use policy::access::{Access, Names, Network, Networks};

use super::{Credentials, Said, Tls, Wrong};

/// Who may connect, as it was said.
#[derive(Clone, Debug, Default)]
pub struct AccessDraft {
    pub allow: Vec<Said<Network>>,
    pub deny: Vec<Said<Network>>,
    /// Patterns of names.
    pub tls_authz: Vec<Said<String>>,
}

impl AccessDraft {
    /// These settings, and `other`'s where these say nothing. Networks are one setting.
    pub fn or(self, other: Self) -> Self {
        let says_networks = !self.allow.is_empty() || !self.deny.is_empty();
        let (allow, deny) = if says_networks { (self.allow, self.deny) } else { (other.allow, other.deny) };
        let tls_authz = if self.tls_authz.is_empty() { other.tls_authz } else { self.tls_authz };
        Self { allow, deny, tls_authz }
    }

    /// What they add up to, with the TLS that the daemon has. `for_all`: whoever connects must have
    /// one of these names, to whatever disk.
    ///
    /// # Errors
    /// A network twice; names that nobody would be asked for.
    pub(crate) fn check(&self, tls: &Tls, for_all: bool) -> Result<Access, Wrong> {
        let mut seen = HashSet::new();
        if let Some(again) = self.allow.iter().chain(&self.deny).find(|said| !seen.insert(said.value)) {
            return Err(again.wrong("this network is given twice (remove one)"));
        }
        if let Some(name) = self.tls_authz.first() {
            let rule = match tls {
                Tls::Off => Some("is not used, because tls is off (set tls to required)"),
                Tls::On(_) if for_all => {
                    Some("needs tls = required, because a client without TLS has no name (set that)")
                }
                Tls::On(Credentials::Certificates { verify_peer: false, .. })
                | Tls::Required(Credentials::Certificates { verify_peer: false, .. }) => {
                    Some("needs tls-verify-peer, because clients show no certificate without it (add that)")
                }
                Tls::On(_) | Tls::Required(_) => None,
            };
            if let Some(rule) = rule {
                return Err(name.wrong(rule));
            }
        }
        let networks = |said: &[Said<Network>]| said.iter().map(|said| said.value).collect();
        let names = self.tls_authz.iter().map(|said| said.value.clone());
        Ok(Access {
            networks: Networks { allow: networks(&self.allow), deny: networks(&self.deny) },
            names: (!self.tls_authz.is_empty()).then(|| Names::any_of(names)),
        })
    }

    /// The first network that was said.
    pub(crate) fn network(&self) -> Option<&Said<Network>> {
        self.allow.iter().chain(&self.deny).next()
    }
}

/// A pattern of names that TLS proves.
///
/// # Errors
/// If it is empty, which no name is.
pub fn tls_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("is empty (write the name of a client, such as CN=vm1 or a key's user)".to_owned()),
        text => Ok(text.to_owned()),
    }
}
