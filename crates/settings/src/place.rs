//! Where a setting was written, for messages: file, line, key and value, or the option.

use std::{cell::RefCell, collections::HashSet, fmt};

/// Mistakes that are kept of one file: the rest is told once these are mended.
const MOST_MISTAKES: usize = 100;

/// The beginning of a message: `weir.toml:7: disk.vm1.cache = "fast"`, or `--cache fast`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    text: String,
    /// Of the config file, from 1; 0 for what is in none, or is all of it.
    line: usize,
}

impl Place {
    /// A place as the user will read it.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), line: 0 }
    }

    /// The same, with the line of the config file that it begins with.
    pub(crate) fn in_line(line: usize, text: impl Into<String>) -> Self {
        Self { text: text.into(), line }
    }

    /// An option of the command line with its value.
    pub fn option(name: &str, value: impl fmt::Display) -> Self {
        Self::new(format!("--{name} {value}"))
    }

    /// The complaint that what is written here breaks a rule.
    pub fn wrong(&self, rule: impl Into<String>) -> Wrong {
        Wrong { place: self.clone(), rule: rule.into() }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A value with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said<T> {
    pub(crate) value: T,
    pub(crate) place: Place,
}

impl<T> Said<T> {
    /// `value`, said at `place`.
    pub(crate) fn new(value: T, place: Place) -> Self {
        Self { value, place }
    }
}

/// A setting that cannot stand: its place, and the rule it breaks with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {rule}")]
pub struct Wrong {
    place: Place,
    rule: String,
}

/// What is wrong with what was said, as far as it is found.
///
/// Whoever finds something tells it here and goes on with what is left: where a value is needed,
/// with its default. So what comes out at the end counts only if nothing was told.
#[derive(Debug, Default)]
pub struct Mistakes(RefCell<Vec<Wrong>>);

impl Mistakes {
    /// One more.
    pub fn tell(&self, wrong: Wrong) {
        if !self.is_full() {
            self.0.borrow_mut().push(wrong);
        }
    }

    /// The value, if there is one; else tells what is wrong.
    pub fn keep<T>(&self, result: Result<T, Wrong>) -> Option<T> {
        result.map_err(|wrong| self.tell(wrong)).ok()
    }

    /// How many have been told.
    pub fn count(&self) -> usize {
        self.0.borrow().len()
    }

    /// Whether more would not be kept, so that nobody need look for them.
    pub fn is_full(&self) -> bool {
        self.count() >= MOST_MISTAKES
    }

    /// `value`, if nothing is wrong.
    ///
    /// # Errors
    /// All mistakes, in the order of the file, and one for each place: what was told of it first.
    pub fn unless<T>(self, value: T) -> Result<T, Vec<Wrong>> {
        let mut all = self.0.into_inner();
        all.sort_by_key(|wrong| wrong.place.line);
        let mut seen = HashSet::new();
        all.retain(|wrong| seen.insert(wrong.place.text.clone()));
        if all.is_empty() { Ok(value) } else { Err(all) }
    }

    /// `value`, if nothing is wrong.
    ///
    /// # Errors
    /// The first mistake of the file.
    pub fn first_unless<T>(self, value: T) -> Result<T, Wrong> {
        self.unless(value).map_err(|all| all.into_iter().next().expect("there is one"))
    }
}
