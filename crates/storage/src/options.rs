//! Parser of `key=value,key=value`: the options of the wrappers, on the command line and in the
//! config.
//!
//! Never ignores anything: a key that is unknown, repeated or empty is an error that names it.

use std::str::FromStr;

use super::InvalidValue;

/// An invalid option: key, value and the violated rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {key}={value}: {rule}")]
pub struct InvalidOption {
    /// The wrapper: `delay`, `rate`, `fault`.
    pub option: &'static str,
    /// The key as written.
    pub key: String,
    /// The value as written.
    pub value: String,
    /// The violated rule.
    pub rule: String,
}

/// One pair, with the option's name for error messages.
#[derive(Clone, Copy)]
pub(super) struct OptionPair<'a> {
    option: &'static str,
    pub(super) key: &'a str,
    pub(super) value: &'a str,
}

impl OptionPair<'_> {
    pub(super) fn error(&self, rule: impl Into<String>) -> InvalidOption {
        InvalidOption {
            option: self.option,
            key: self.key.to_owned(),
            value: self.value.to_owned(),
            rule: rule.into(),
        }
    }

    /// The value, parsed by `parse`.
    pub(super) fn parse<T>(
        &self,
        parse: impl FnOnce(&str) -> Result<T, InvalidValue>,
    ) -> Result<T, InvalidOption> {
        parse(self.value).map_err(|error| self.error(error.rule))
    }

    /// The value as a number of at least `min`.
    pub(super) fn number<T: FromStr + PartialOrd + std::fmt::Display>(
        &self,
        min: T,
    ) -> Result<T, InvalidOption> {
        match self.value.parse() {
            Ok(number) if number >= min => Ok(number),
            _ => Err(self.error(format!("is not a whole number of at least {min}"))),
        }
    }

    /// The error for an unknown key.
    pub(super) fn unknown(&self, known_keys: &str) -> InvalidOption {
        self.error(format!("no such key (there are {known_keys})"))
    }
}

/// Splits `text` into pairs. Keys and values are not empty, and no key is repeated.
pub(super) fn pairs<'a>(option: &'static str, text: &'a str) -> Result<Vec<OptionPair<'a>>, InvalidOption> {
    let mut seen: Vec<OptionPair<'a>> = Vec::new();
    for part in text.split(',') {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let pair = OptionPair { option, key, value };
        if key.is_empty() || value.is_empty() {
            return Err(pair.error("is not of the form key=value"));
        }
        if seen.iter().any(|other| other.key == key) {
            return Err(pair.error("is given twice"));
        }
        seen.push(pair);
    }
    Ok(seen)
}
