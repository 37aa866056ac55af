//! A config with a table of keys, and the place of each given key.

use std::{
    borrow::Cow,
    ops::{Deref, DerefMut},
    path::Path,
};

use crate::{
    key::{Key, Unread},
    place::{Mistakes, Place, Wrong},
};

/// Config with a table of keys.
pub trait KeySet: Clone + Default + 'static {
    /// Keys of earlier versions, each with the rule that its use breaks.
    const REMOVED: &'static [(&'static str, &'static str)] = &[];

    /// Table of keys.
    fn keys() -> &'static [Key<Self>];

    /// Row of a name.
    #[must_use]
    fn key(name: &str) -> Option<&'static Key<Self>> {
        Self::keys().iter().find(|key| key.name == name)
    }

    /// Keys in which two configs differ, in the order of the table.
    fn differences<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'static Key<Self>> + 'a {
        Self::keys().iter().filter(|key| key.write(self) != key.write(other))
    }

    /// Reports broken rules between values of one config. Each value is in its range.
    fn judge(_: &Placed<Self>, _: &Mistakes) {}
}

/// Config with the place of each given key.
///
/// Messages use the places; comparing and serving use the config alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed<T> {
    config: T,
    /// Place of the config as a whole.
    own: Place,
    /// Places by key, with an index for a list (`fault[1]`), in the order of reading.
    places: Vec<(Cow<'static, str>, Place)>,
    /// Errors of values that are out of range; the config has defaults instead.
    out_of_range: Vec<Wrong>,
}

impl<T> Deref for Placed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.config
    }
}

impl<T> DerefMut for Placed<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.config
    }
}

impl<T: Default> Default for Placed<T> {
    /// The default config, without a place.
    fn default() -> Self {
        Self::new(T::default(), Place::new(""))
    }
}

impl<T> Placed<T> {
    /// A config without given keys, at this place.
    pub fn new(config: T, own: Place) -> Self {
        Self { config, own, places: Vec::new(), out_of_range: Vec::new() }
    }

    /// Place of the whole config, for example of its table.
    pub fn own_place(&self) -> &Place {
        &self.own
    }

    /// Place of a given key; for a list, of its first value.
    pub fn given(&self, key: &str) -> Option<&Place> {
        // The first value of a list has index 0.
        let is_it =
            |known: &str| known.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest == "[0]");
        self.places.iter().find(|(known, _)| is_it(known)).map(|(_, place)| place)
    }

    /// Place of a value of a list: `item("export", 0, ".name")`.
    pub fn item(&self, key: &str, index: usize, below: &str) -> Option<&Place> {
        let path = format!("{key}[{index}]{below}");
        self.places.iter().find(|(known, _)| *known == path).map(|(_, place)| place)
    }

    /// Place of a key, or of the whole config if the key was not given.
    pub fn place(&self, key: &str) -> &Place {
        self.given(key).unwrap_or(&self.own)
    }

    /// Error that the value of a key breaks a rule.
    pub fn wrong(&self, key: &str, rule: impl Into<String>) -> Wrong {
        self.place(key).wrong(rule)
    }

    /// Names and places of the given keys; lists have an index.
    pub fn all_given(&self) -> impl Iterator<Item = (&str, &Place)> {
        self.places.iter().map(|(key, place)| (&**key, place))
    }

    /// Records the place of a key.
    pub fn put(&mut self, key: impl Into<Cow<'static, str>>, place: Place) {
        self.places.push((key.into(), place));
    }

    /// The config alone.
    pub fn into_config(self) -> T {
        self.config
    }

    /// Reports the values that are out of range.
    pub(crate) fn tell_out_of_range(&self, mistakes: &Mistakes) {
        self.out_of_range.iter().for_each(|wrong| mistakes.tell(wrong.clone()));
    }
}

impl<T: KeySet> Placed<T> {
    /// Reads one value of a key. [`Placed::judge`] reports it if it is out of range.
    ///
    /// # Errors
    /// Fails if the text is malformed.
    pub fn set(
        &mut self,
        key: &'static Key<T>,
        text: &str,
        directory: &Path,
        place: Place,
    ) -> Result<(), Wrong> {
        match key.read(&mut self.config, text, directory) {
            Ok(()) => {}
            Err(Unread::Malformed(rule)) => return Err(place.wrong(rule)),
            // The default stays, so that the rest of the config can be checked.
            Err(Unread::OutOfRange(rule)) => self.out_of_range.push(place.wrong(rule)),
        }
        if key.is_list() {
            // Values of a list are adjacent, so the search ends at the previous one.
            let of_key = |known: &str| {
                known.strip_prefix(key.name)?.strip_prefix('[')?.split(']').next()?.parse().ok()
            };
            let before: Option<usize> = self.places.iter().rev().find_map(|(known, _)| of_key(known));
            let index = before.map_or(0, |before| before + 1);
            self.put(format!("{}[{index}]", key.name), place);
        } else {
            self.put(key.name, place);
        }
        Ok(())
    }

    /// Rows of the given keys, in the order of the table.
    pub fn given_keys(&self) -> impl Iterator<Item = &'static Key<T>> {
        T::keys().iter().filter(|key| self.given(key.name).is_some())
    }

    /// Reports the rules that the config breaks by itself.
    pub(crate) fn judge(&self, mistakes: &Mistakes) {
        self.tell_out_of_range(mistakes);
        // Rules between values are meaningful only if each value is in its range.
        if self.out_of_range.is_empty() {
            T::judge(self, mistakes);
        }
    }

    /// Returns the config if it breaks no rule by itself.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn checked(self) -> Result<Self, Wrong> {
        let mistakes = Mistakes::default();
        self.judge(&mistakes);
        mistakes.first_unless(self)
    }
}
