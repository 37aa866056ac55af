//! A config with a table of keys, and the origin of each given key.

use std::{
    borrow::Cow,
    ops::{Deref, DerefMut},
    path::Path,
};

use crate::{
    diagnostics::{ConfigError, Diagnostics, Origin},
    key::{ConfigKey, ValueError},
};

/// Config with a table of keys.
pub trait KeyTable: Clone + Default + 'static {
    /// Keys of earlier versions, each with the rule that its use breaks.
    const REMOVED: &'static [(&'static str, &'static str)] = &[];

    /// Keys with a new name: the old name, the new one, and the warning that the old one causes.
    const RENAMED: &'static [(&'static str, &'static str, &'static str)] = &[];

    /// Table of keys.
    fn keys() -> &'static [ConfigKey<Self>];

    /// Row of a name.
    #[must_use]
    fn key(name: &str) -> Option<&'static ConfigKey<Self>> {
        Self::keys().iter().find(|key| key.name == name)
    }

    /// Keys in which two configs differ, in the order of the table.
    fn differences<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'static ConfigKey<Self>> + 'a {
        Self::keys().iter().filter(|key| key.write(self) != key.write(other))
    }

    /// Reports broken rules between values of one config. Each value is in its range.
    fn check_rules(_: &ConfigWithOrigins<Self>, _: &Diagnostics) {}
}

/// Config with the origin of each given key.
///
/// Messages use the origins; comparing and serving use the config alone.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigWithOrigins<T> {
    config: T,
    /// Origin of the config as a whole.
    own_origin: Origin,
    /// Origins by key, with an index for a list (`fault[1]`), in the order of reading.
    origins: Vec<(Cow<'static, str>, Origin)>,
    /// Errors of values that are out of range; the config has defaults instead.
    out_of_range: Vec<ConfigError>,
}

impl<T> Deref for ConfigWithOrigins<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.config
    }
}

impl<T> DerefMut for ConfigWithOrigins<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.config
    }
}

impl<T: Default> Default for ConfigWithOrigins<T> {
    /// Default config, without an origin.
    fn default() -> Self {
        Self::new(T::default(), Origin::new(""))
    }
}

impl<T> ConfigWithOrigins<T> {
    /// Config without given keys, with this origin.
    pub fn new(config: T, own_origin: Origin) -> Self {
        Self { config, own_origin, origins: Vec::new(), out_of_range: Vec::new() }
    }

    /// Origin of the whole config, for example of its table.
    pub fn own_origin(&self) -> &Origin {
        &self.own_origin
    }

    /// Origin of a given key; for a list, of its first value.
    pub fn origin_of_given(&self, key: &str) -> Option<&Origin> {
        // The first value of a list has index 0.
        let is_key =
            |known: &str| known.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest == "[0]");
        self.origins.iter().find(|(known, _)| is_key(known)).map(|(_, origin)| origin)
    }

    /// Origin of a value of a list: `item("export", 0, ".name")`.
    pub fn item_origin(&self, key: &str, index: usize, below: &str) -> Option<&Origin> {
        let path = format!("{key}[{index}]{below}");
        self.origins.iter().find(|(known, _)| *known == path).map(|(_, origin)| origin)
    }

    /// Origin of a key, or of the whole config if the key was not given.
    pub fn origin(&self, key: &str) -> &Origin {
        self.origin_of_given(key).unwrap_or(&self.own_origin)
    }

    /// Error that the value of a key breaks a rule.
    pub fn error(&self, key: &str, rule: impl Into<String>) -> ConfigError {
        self.origin(key).error(rule)
    }

    /// Names and origins of the given keys; lists have an index.
    pub fn given_origins(&self) -> impl Iterator<Item = (&str, &Origin)> {
        self.origins.iter().map(|(key, origin)| (&**key, origin))
    }

    /// Records the origin of a key.
    pub fn record_origin(&mut self, key: impl Into<Cow<'static, str>>, origin: Origin) {
        self.origins.push((key.into(), origin));
    }

    /// The config alone.
    pub fn into_config(self) -> T {
        self.config
    }

    /// Reports the values that are out of range.
    pub(crate) fn report_out_of_range(&self, diagnostics: &Diagnostics) {
        self.out_of_range.iter().for_each(|error| diagnostics.report(error.clone()));
    }
}

impl<T: KeyTable> ConfigWithOrigins<T> {
    /// Reads one value of a key. [`ConfigWithOrigins::check_rules`] reports it if it is out of
    /// range.
    ///
    /// # Errors
    /// Fails if the text is malformed.
    pub fn set(
        &mut self,
        key: &'static ConfigKey<T>,
        text: &str,
        directory: &Path,
        origin: Origin,
    ) -> Result<(), ConfigError> {
        match key.read(&mut self.config, text, directory) {
            Ok(()) => {}
            Err(ValueError::Malformed(rule)) => return Err(origin.error(rule)),
            // The default stays, so that the rest of the config can be checked.
            Err(ValueError::OutOfRange(rule)) => self.out_of_range.push(origin.error(rule)),
        }
        if key.is_list() {
            // Values of a list are adjacent, so the search ends at the previous one.
            let of_key = |known: &str| {
                known.strip_prefix(key.name)?.strip_prefix('[')?.split(']').next()?.parse().ok()
            };
            let before: Option<usize> = self.origins.iter().rev().find_map(|(known, _)| of_key(known));
            let index = before.map_or(0, |before| before + 1);
            self.record_origin(format!("{}[{index}]", key.name), origin);
        } else {
            self.record_origin(key.name, origin);
        }
        Ok(())
    }

    /// Warnings about keys that were given under their old names.
    pub(crate) fn rename_warnings(&self) -> impl Iterator<Item = &'static str> {
        let old = T::RENAMED.iter().filter(move |(old, ..)| self.origin_of_given(old).is_some());
        old.map(|(.., warning)| *warning)
    }

    /// Rows of the given keys, in the order of the table.
    pub fn given_keys(&self) -> impl Iterator<Item = &'static ConfigKey<T>> {
        T::keys().iter().filter(|key| self.origin_of_given(key.name).is_some())
    }

    /// Reports the rules that the config breaks by itself.
    pub(crate) fn check_rules(&self, diagnostics: &Diagnostics) {
        self.report_out_of_range(diagnostics);
        // Rules between values are meaningful only if each value is in its range.
        if self.out_of_range.is_empty() {
            T::check_rules(self, diagnostics);
        }
    }

    /// Returns the config if it breaks no rule by itself.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn into_checked(self) -> Result<Self, ConfigError> {
        let diagnostics = Diagnostics::default();
        self.check_rules(&diagnostics);
        diagnostics.finish_first(self)
    }
}
