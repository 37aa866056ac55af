//! Which clients of NBD are let in, by their networks and by the names that TLS proves: of the
//! whole daemon, and of one disk. Only the settings are judged here.

use std::collections::HashSet;

use policy::access::{Access, Names, Network, Networks};

use super::{Credentials, Tls};
use crate::{
    key::{self, Field, KeyValue as _, Literal},
    place::Wrong,
    placed::Placed,
};

/// Access to the networks that a config allows.
pub(crate) fn allow<T: 'static>(
    access: fn(&T) -> &Access,
    access_mut: fn(&mut T) -> &mut Access,
) -> Field<T> {
    networks(
        move |config| &access(config).networks.allow,
        move |config| &mut access_mut(config).networks.allow,
    )
}

/// Access to the networks that a config denies.
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

/// Access to the patterns of names that a config allows.
pub(crate) fn names<T: 'static>(
    access: fn(&T) -> &Access,
    access_mut: fn(&mut T) -> &mut Access,
) -> Field<T> {
    Field::new(
        move |config: &mut T, given| {
            let name = tls_name(given.text)?;
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

/// Checks which clients may connect, with the TLS that the daemon has. `for_all`: a client must
/// have one of these names, whatever disk it connects to.
///
/// # Errors
/// A network twice; names that no client would be asked for.
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
