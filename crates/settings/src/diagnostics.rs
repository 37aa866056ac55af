//! Origin of a setting, for messages: file, line, key and value, or the option.

use std::{cell::RefCell, collections::HashSet, fmt};

/// Maximum number of mistakes collected from one file.
const MAX_ERRORS: usize = 100;

/// Beginning of a message: `weir.toml:7: disk.vm1.cache = "fast"`, or `--cache fast`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    text: String,
    /// Line in the config file, from 1; 0 if not applicable.
    line: usize,
}

impl Origin {
    /// Origin with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), line: 0 }
    }

    /// Origin in this line of the config file.
    pub(crate) fn at_line(line: usize, text: impl Into<String>) -> Self {
        Self { text: text.into(), line }
    }

    /// A command-line option with its value.
    pub fn option(name: &str, value: impl fmt::Display) -> Self {
        Self::new(format!("--{name} {value}"))
    }

    /// Config file, line and path of the key; `None` if the setting is not in a file.
    pub fn in_file(&self) -> Option<(&str, usize, &str)> {
        let (file, key) = self.text.split_once(&format!(":{}: ", self.line))?;
        Some((file, self.line, key.split(" = ").next().unwrap_or(key)))
    }

    /// Error that the setting here breaks a rule.
    pub fn error(&self, rule: impl Into<String>) -> ConfigError {
        ConfigError { place: self.clone(), rule: rule.into() }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Value with its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spanned<T> {
    pub(crate) value: T,
    pub(crate) origin: Origin,
}

impl<T> Spanned<T> {
    /// Value with this origin.
    pub(crate) fn new(value: T, origin: Origin) -> Self {
        Self { value, origin }
    }
}

/// Error of a setting: its origin, the rule, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {rule}")]
pub struct ConfigError {
    place: Origin,
    rule: String,
}

impl ConfigError {
    /// Origin of the setting.
    pub fn origin(&self) -> &Origin {
        &self.place
    }
}

/// Collected mistakes of a config.
///
/// A reader that finds a mistake records it here and continues with the default value, so that all
/// mistakes are found in one run. The resulting config is valid only if none was recorded.
#[derive(Debug, Default)]
pub struct Diagnostics(RefCell<Vec<ConfigError>>);

impl Diagnostics {
    /// Records a mistake, up to the bound.
    pub fn report(&self, error: ConfigError) {
        // Bounded: a wrong file could fill the memory and the terminal.
        if !self.is_full() {
            self.0.borrow_mut().push(error);
        }
    }

    /// Returns the value, or records the error.
    pub fn ok_or_report<T>(&self, result: Result<T, ConfigError>) -> Option<T> {
        result.map_err(|error| self.report(error)).ok()
    }

    /// Number of recorded mistakes.
    pub fn count(&self) -> usize {
        self.0.borrow().len()
    }

    /// True if the bound is reached, so that further checks are pointless.
    pub fn is_full(&self) -> bool {
        self.count() >= MAX_ERRORS
    }

    /// Returns `value` if no mistake was recorded.
    ///
    /// # Errors
    /// Returns all mistakes in the order of the file, only the first for each origin.
    pub fn finish<T>(self, value: T) -> Result<T, Vec<ConfigError>> {
        let mut all = self.0.into_inner();
        // A stable sort: mistakes without a line come first, in the order of discovery.
        all.sort_by_key(|error| error.place.line);
        let mut seen = HashSet::new();
        // Later mistakes of the same setting are usually consequences.
        all.retain(|error| seen.insert(error.place.text.clone()));
        if all.is_empty() { Ok(value) } else { Err(all) }
    }

    /// Returns `value` if no mistake was recorded.
    ///
    /// # Errors
    /// Returns the first mistake of the file.
    pub fn finish_first<T>(self, value: T) -> Result<T, ConfigError> {
        self.finish(value).map_err(|all| all.into_iter().next().expect("there is one"))
    }
}
