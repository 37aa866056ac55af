//! Configs in the notation of an address followed by keys: exports and recordings.
//!
//! ```text
//!   --ublk=3,queues=2               an option                  read_options, write_options
//!   { type = "ublk", queues = 2 }   a table of the config file config
//!   {"type": "x-ublk", "queues": 2} QMP                        control::qmp
//! ```
//!
//! All three follow from the table of keys.

use std::{fmt, path::Path};

use crate::{
    key::{ConfigKey, KeyLiteral, KeyType, ValueError},
    origins::KeyTable,
};

/// A config with an address, which is the first part of an option.
pub trait AddressedConfig: KeyTable {
    /// Key of the address.
    const ADDRESS: &'static str;
    /// Error of a table without the address; `None` if it is optional.
    const MISSING_ADDRESS: Option<&'static str>;

    /// Rows of the keys after the address.
    fn options() -> impl Iterator<Item = &'static ConfigKey<Self>> {
        Self::keys().iter().filter(|key| key.name != Self::ADDRESS)
    }

    /// Names and values of the keys that differ from their defaults, the address first.
    #[must_use]
    fn literals(&self) -> Vec<(&'static str, KeyLiteral)> {
        let default = Self::default();
        let literal = |key: &'static ConfigKey<Self>| {
            let literal = key.write(self)?;
            let is_default = key.write(&default).as_ref() == Some(&literal);
            (key.name == Self::ADDRESS || !is_default).then_some((key.name, literal))
        };
        Self::keys().iter().filter_map(literal).collect()
    }
}

/// Reads `key=value`s, each once; a flag without a value is on.
///
/// # Errors
/// Returns the malformed part and the rule.
pub(crate) fn read_options<'a, T: AddressedConfig>(
    config: &mut T,
    parts: impl IntoIterator<Item = &'a str>,
) -> Result<(), String> {
    let mut seen: Vec<&str> = Vec::new();
    for part in parts {
        // A flag alone is on, as in QEMU's short notation.
        let (name, value) = part.split_once('=').unwrap_or((part, "on"));
        if seen.contains(&name) {
            return Err(format!("{name} is given twice (remove one)"));
        }
        seen.push(name);
        if let Some(key) = T::options().find(|key| key.name == name) {
            read_option(key, config, value).map_err(|rule| format!("{part}: {rule}"))?;
        // Keys of earlier versions get a specific message.
        } else if let Some((_, rule)) = T::REMOVED.iter().find(|(removed, _)| *removed == name) {
            return Err(format!("{part}: {rule}"));
        } else if name.is_empty() {
            return Err("has a trailing comma (remove it)".to_owned());
        } else {
            return Err(format!("{part}: no such key (there {})", option_names::<T>()));
        }
    }
    Ok(())
}

/// Reads the value of an option; `true` and `false` stand for `on` and `off`, as in a config file.
fn read_option<T: KeyTable>(key: &ConfigKey<T>, config: &mut T, value: &str) -> Result<(), String> {
    let value = match (key.value, value) {
        (KeyType::Flag, "on" | "true") => "true",
        (KeyType::Flag, "off" | "false") => "false",
        (KeyType::Flag, _) => return Err("is neither on nor off".to_owned()),
        (_, "true") if key.accepts_bool() => "on",
        (_, "false") if key.accepts_bool() => "off",
        _ => value,
    };
    match key.read(config, value, Path::new("")) {
        Ok(()) => Ok(()),
        Err(ValueError::Malformed(rule) | ValueError::OutOfRange(rule)) => Err(rule),
    }
}

/// `are queues, read-only and client`.
fn option_names<T: AddressedConfig>() -> String {
    let mut names: Vec<_> = T::options().map(|key| key.name).collect();
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { format!("is {last}") } else { format!("are {} and {last}", names.join(", ")) }
}

/// Writes the keys that differ from their defaults, each after a comma.
pub(crate) fn write_options<T: AddressedConfig>(config: &T, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (name, literal) in config.literals().into_iter().filter(|(name, _)| *name != T::ADDRESS) {
        match literal {
            KeyLiteral::Flag(on) => write!(f, ",{name}={}", if on { "on" } else { "off" })?,
            other => write!(f, ",{name}={other}")?,
        }
    }
    Ok(())
}
