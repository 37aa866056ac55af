//! Access rules for NBD clients, by network and by the name that TLS verifies, for the daemon and
//! for single disks. Checks only the settings.

use std::collections::HashSet;

use policy::access::{AccessRules, NameRules, Network, NetworkRules};

use super::{TlsConfig, TlsCredentialFiles};
use crate::{
    diagnostics::ConfigError,
    key::{self, ConfigValue as _, KeyField, KeyLiteral},
    origins::ConfigWithOrigins,
};

/// Field of the allowed networks of a config.
pub(crate) fn allow<T: 'static>(
    access: fn(&T) -> &AccessRules,
    access_mut: fn(&mut T) -> &mut AccessRules,
) -> KeyField<T> {
    networks(
        move |config| &access(config).networks.allow,
        move |config| &mut access_mut(config).networks.allow,
    )
}

/// Field of the denied networks of a config.
pub(crate) fn deny<T: 'static>(
    access: fn(&T) -> &AccessRules,
    access_mut: fn(&mut T) -> &mut AccessRules,
) -> KeyField<T> {
    networks(move |config| &access(config).networks.deny, move |config| &mut access_mut(config).networks.deny)
}

fn networks<T: 'static>(
    networks: impl Fn(&T) -> &Vec<Network> + Send + Sync + 'static,
    networks_mut: impl Fn(&mut T) -> &mut Vec<Network> + Send + Sync + 'static,
) -> KeyField<T> {
    KeyField::new(
        move |config: &mut T, given| {
            networks_mut(config).push(crate::parse(given.text)?);
            Ok(())
        },
        move |config| key::list(networks(config)),
    )
    .list()
}

/// Field of the allowed name patterns of a config.
pub(crate) fn names<T: 'static>(
    access: fn(&T) -> &AccessRules,
    access_mut: fn(&mut T) -> &mut AccessRules,
) -> KeyField<T> {
    KeyField::new(
        move |config: &mut T, given| {
            let name = parse_tls_name(given.text)?;
            // The first rule changes the default from "any name" to "these names".
            let names = access_mut(config).names.get_or_insert_with(|| NameRules::any_of([]));
            names.rules.extend(NameRules::any_of([name]).rules);
            Ok(())
        },
        move |config| {
            let rules = access(config).names.as_ref().map(|names| &names.rules)?;
            Some(KeyLiteral::List(rules.iter().map(|rule| rule.pattern.write()).collect()))
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
    config: &ConfigWithOrigins<T>,
    access: &AccessRules,
    tls: &TlsConfig,
    for_all: bool,
) -> Result<(), ConfigError> {
    let origin = |key: &str, index| config.item_origin(key, index, "").unwrap_or(config.own_origin());
    let mut seen = HashSet::new();
    let NetworkRules { allow, deny } = &access.networks;
    for (key, networks) in [("allow", allow), ("deny", deny)] {
        // One set for both lists: a network cannot be allowed and denied.
        if let Some(duplicate) = networks.iter().position(|network| !seen.insert(network)) {
            return Err(origin(key, duplicate).error("this network is given twice (remove one)"));
        }
    }
    if access.names.is_none() {
        return Ok(());
    }
    let rule = match tls {
        TlsConfig::Off => "is not used, because tls is off (set tls to required)",
        // With optional TLS, a client without TLS has no name.
        TlsConfig::On(_) if for_all => {
            "needs tls = required, because a client without TLS has no name (set that)"
        }
        TlsConfig::On(TlsCredentialFiles::Certificates { verify_peer: false, .. })
        | TlsConfig::Required(TlsCredentialFiles::Certificates { verify_peer: false, .. }) => {
            "needs tls-verify-peer, because clients show no certificate without it (add that)"
        }
        TlsConfig::On(_) | TlsConfig::Required(_) => return Ok(()),
    };
    Err(origin("tls-authz", 0).error(rule))
}

/// Checks a pattern for the names that TLS verifies.
///
/// # Errors
/// Fails if it is empty, because no client has an empty name.
pub fn parse_tls_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("is empty (write the name of a client, such as CN=vm1 or a key's user)".to_owned()),
        text => Ok(text.to_owned()),
    }
}
