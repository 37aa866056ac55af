//! Where a setting was written, for messages: file, line, key and value, or the option.

use std::fmt;

/// The beginning of a message: `weir.toml:7: disk.vm1.cache = "fast"`, or `--cache fast`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(String);

impl Place {
    /// A place as the user will read it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// An option of the command line with its value.
    pub fn option(name: &str, value: impl fmt::Display) -> Self {
        Self(format!("--{name} {value}"))
    }

    /// The complaint that what is written here breaks a rule.
    pub fn wrong(&self, rule: impl Into<String>) -> Wrong {
        Wrong { place: self.clone(), rule: rule.into() }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A value with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said<T> {
    /// What was said.
    pub value: T,
    /// Where.
    pub place: Place,
}

impl<T> Said<T> {
    /// `value`, said at `place`.
    pub fn new(value: T, place: Place) -> Self {
        Self { value, place }
    }

    /// The complaint that the value breaks a rule.
    pub fn wrong(&self, rule: impl Into<String>) -> Wrong {
        self.place.wrong(rule)
    }

    /// What the option `--name` said, if it was given. Its place does not show the value.
    pub fn option(name: &str, value: Option<T>) -> Option<Self> {
        value.map(|value| Self::new(value, Place::new(format!("--{name}"))))
    }
}

/// A setting that cannot stand: its place, and the rule it breaks with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {rule}")]
pub struct Wrong {
    place: Place,
    rule: String,
}
