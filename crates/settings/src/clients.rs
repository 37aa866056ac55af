//! Access rules for NBD clients, by network and by the name that TLS verifies, for the daemon and
//! for single disks. Checks only the settings.

use std::collections::HashSet;

use policy::access::{Access, Names, Network, Networks};

use super::{Credentials, Tls};
use crate::{
    key::{self, Field, KeyValue as _, Literal},
    place::Wrong,
    placed::Placed,
};

/// Field of the allowed networks of a config.
pub(crate) fn allow<T: 'static>(
    access: fn(&T) -> &Access,
    access_mut: fn(&mut T) -> &mut Access,
) -> Field<T> {
    networks(
        move |config| &access(config).networks.allow,
        move |config| &mut access_mut(config).networks.allow,
    )
}

/// Field of the denied networks of a config.
pub(crate) fn deny<T: 'static>(access: fn(&T) -> &Access, access_mut: fn(&mut T) -> &mut Access) -> Field<T> {
    networks(move |config| &access(config).networks.deny, move |config| &mut access_mut(config).networks.deny)
}

fn networks<T: 'static>(
    networks: impl Fn(&T) -> &Vec<Network> + Send + Sync + 'static,
    networks_mut: impl Fn(&mut T) -> &mut Vec<Network> + Send + Sync + 'static,
) -> Field<T> {
    Field::new(
        move |config: &mut T, given| {
            networks_mut(config).push(crate::read(given.text)?);
            Ok(())
        },
        move |config| key::list(networks(config)),
    )
    .list()
}

/// Field of the allowed name patterns of a config.
pub(crate) fn names<T: 'static>(
    access: fn(&T) -> &Access,
    access_mut: fn(&mut T) -> &mut Access,
) -> Field<T> {
    Field::new(
        move |config: &mut T, given| {
            let name = tls_name(given.text)?;
            // The first rule changes the default from "any name" to "these names".
            let names = access_mut(config).names.get_or_insert_with(|| Names::any_of([]));
            names.rules.extend(Names::any_of([name]).rules);
            Ok(())
        },
        move |config| {
            let rules = access(config).names.as_ref().map(|names| &names.rules)?;
            Some(Literal::List(rules.iter().map(|rule| rule.pattern.write()).collect()))
        },
    )
    .list()
}

/// Checks access rules against the daemon's TLS settings. `for_all`: the rules apply to all disks,
/// so every client needs a name.
///
/// # Errors
/// Fails on a duplicate network, and on name rules that can never apply.
pub(crate) fn check_access<T>(
    config: &Placed<T>,
    access: &Access,
    tls: &Tls,
    for_all: bool,
) -> Result<(), Wrong> {
    let place = |key: &str, index| config.item(key, index, "").unwrap_or(config.own_place());
    let mut seen = HashSet::new();
    let Networks { allow, deny } = &access.networks;
    for (key, networks) in [("allow", allow), ("deny", deny)] {
        // One set for both lists: a network cannot be allowed and denied.
        if let Some(again) = networks.iter().position(|network| !seen.insert(network)) {
            return Err(place(key, again).wrong("this network is given twice (remove one)"));
        }
    }
    if access.names.is_none() {
        return Ok(());
    }
    let rule = match tls {
        Tls::Off => "is not used, because tls is off (set tls to required)",
        // With optional TLS, a client without TLS has no name.
        Tls::On(_) if for_all => "needs tls = required, because a client without TLS has no name (set that)",
        Tls::On(Credentials::Certificates { verify_peer: false, .. })
        | Tls::Required(Credentials::Certificates { verify_peer: false, .. }) => {
            "needs tls-verify-peer, because clients show no certificate without it (add that)"
        }
        Tls::On(_) | Tls::Required(_) => return Ok(()),
    };
    Err(place("tls-authz", 0).wrong(rule))
}

/// Checks a pattern for the names that TLS verifies.
///
/// # Errors
/// Fails if it is empty: no name is.
pub fn tls_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("is empty (write the name of a client, such as CN=vm1 or a key's user)".to_owned()),
        text => Ok(text.to_owned()),
    }
}
