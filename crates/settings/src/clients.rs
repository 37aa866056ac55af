//! Which clients of NBD are let in, by their networks and by the names that TLS proves: of the
//! whole daemon, and of one disk. Only the settings are judged here.

use std::collections::HashSet;

use policy::access::{Access, Names, Network, Networks};

use super::{Credentials, Place, Said, Tls, Wrong};

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

    /// What they add up to, with the TLS that the daemon has.
    ///
    /// # Errors
    /// A network twice; names that no client would be asked for.
    pub(crate) fn check(&self, tls: &Tls) -> Result<Access, Wrong> {
        let networks = |said: &[Said<Network>]| said.iter().map(|said| said.value).collect();
        let names = self.tls_authz.iter().map(|said| said.value.clone());
        let access = Access {
            networks: Networks { allow: networks(&self.allow), deny: networks(&self.deny) },
            names: (!self.tls_authz.is_empty()).then(|| Names::any_of(names)),
        };
        let place = |key: &str, index: usize| match key {
            "allow" => &self.allow[index].place,
            "deny" => &self.deny[index].place,
            _ => &self.tls_authz[index].place,
        };
        check_access(&access, tls, true, place)?;
        Ok(access)
    }

    /// The first network that was said.
    pub(crate) fn network(&self) -> Option<&Said<Network>> {
        self.allow.iter().chain(&self.deny).next()
    }
}

/// Checks which clients may connect, with the TLS that the daemon has. `for_all`: a client must
/// have
/// one of these names, whatever disk it connects to. `place` is that of a value of a key.
///
/// # Errors
/// A network twice; names that no client would be asked for.
pub(crate) fn check_access<'a>(
    access: &Access,
    tls: &Tls,
    for_all: bool,
    place: impl Fn(&str, usize) -> &'a Place,
) -> Result<(), Wrong> {
    let mut seen = HashSet::new();
    let Networks { allow, deny } = &access.networks;
    for (key, networks) in [("allow", allow), ("deny", deny)] {
        if let Some(again) = networks.iter().position(|network| !seen.insert(network)) {
            return Err(place(key, again).wrong("this network is given twice (remove one)"));
        }
    }
    if access.names.is_none() {
        return Ok(());
    }
    let rule = match tls {
        Tls::Off => "is not used, because tls is off (set tls to required)",
        Tls::On(_) if for_all => "needs tls = required, because a client without TLS has no name (set that)",
        Tls::On(Credentials::Certificates { verify_peer: false, .. })
        | Tls::Required(Credentials::Certificates { verify_peer: false, .. }) => {
            "needs tls-verify-peer, because clients show no certificate without it (add that)"
        }
        Tls::On(_) | Tls::Required(_) => return Ok(()),
    };
    Err(place("tls-authz", 0).wrong(rule))
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
