//! Parses `key=value,…`, the syntax of `--workload` and `--cluster`.
//!
//! Never ignores an unknown key.

use std::{fmt, ops::RangeInclusive, time::Duration};

/// Keeps sums within 64 bits.
const MAX_BYTES: u64 = 1 << 50;

/// Pairs that the caller has not read yet, and all keys that it has tried to read.
pub(super) struct SpecKeys<'a> {
    left: Vec<(&'a str, &'a str)>,
    known: Vec<String>,
}

impl<'a> SpecKeys<'a> {
    pub(super) fn new(text: &'a str) -> Result<Self, String> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| format!("{pair:?} is not of the form key=value"))?;
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(format!("{key} is given twice (remove one)"));
            }
            pairs.push((key, value));
        }
        Ok(Self { left: pairs, known: Vec::new() })
    }

    /// Accepts a key under its old name, with a notice.
    pub(super) fn accept_old_name(&mut self, old: &str, new: &'static str) {
        let is_new_given = self.left.iter().any(|(name, _)| *name == new);
        if let Some((name, _)) = self.left.iter_mut().find(|(said, _)| *said == old && !is_new_given) {
            *name = new;
            console::print_notice(&format!(
                "{old} is the old name of {new} (the next release refuses the old name)"
            ));
        }
    }

    pub(super) fn take(&mut self, key: &str) -> Option<&'a str> {
        // Every key that the caller reads counts as known, present or not.
        self.known.push(key.to_owned());
        let at = self.left.iter().position(|(name, _)| *name == key)?;
        Some(self.left.remove(at).1)
    }

    pub(super) fn number(
        &mut self,
        key: &str,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64, String> {
        let Some(text) = self.take(key) else { return Ok(default) };
        let number = settings::count(text)
            .map_err(|rule| format!("{key}={text} {rule}; it must be {}", bounds(&range)))?;
        within(key, text, number, &range)
    }

    pub(super) fn bytes(&mut self, key: &str, default: u64) -> Result<u64, String> {
        let Some(text) = self.take(key) else { return Ok(default) };
        let bytes = settings::size(text).map_err(|rule| format!("{key}={text} {rule}"))?;
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(format!("{key}={text} is not between 1 and 1024T"));
        }
        Ok(bytes)
    }

    pub(super) fn time(
        &mut self,
        key: &str,
        default: Duration,
        range: RangeInclusive<Duration>,
    ) -> Result<Duration, String> {
        let Some(text) = self.take(key) else { return Ok(default) };
        let time = settings::duration(text)
            .map_err(|rule| format!("{key}={text} {rule}; it must be {}", bounds(&range)))?;
        within(key, text, time, &range)
    }

    /// Takes a percentage, with or without the sign.
    pub(super) fn percent(&mut self, key: &str, default: u64) -> Result<u64, String> {
        let Some(text) = self.take(key) else { return Ok(default) };
        let number = settings::count(text.strip_suffix('%').unwrap_or(text)).ok();
        number
            .filter(|percent| *percent <= 100)
            .ok_or_else(|| format!("{key}={text} is not a percentage from 0% to 100%"))
    }

    pub(super) fn finish(self, name: &str) -> Result<(), String> {
        // A pair that the caller has not read has an unknown key.
        let Some((key, _)) = self.left.first() else { return Ok(()) };
        let advice = match settings::suggest::nearest(key, self.known.iter().map(String::as_str)) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("there are {}", self.known.join(", ")),
        };
        Err(format!("{key:?} is no key of {name} ({advice})"))
    }
}

fn within<T: PartialOrd + fmt::Debug>(
    key: &str,
    text: &str,
    value: T,
    range: &RangeInclusive<T>,
) -> Result<T, String> {
    if !range.contains(&value) {
        return Err(format!("{key}={text} is not {}", bounds(range)));
    }
    Ok(value)
}

fn bounds<T: fmt::Debug>(range: &RangeInclusive<T>) -> String {
    format!("between {:?} and {:?}", range.start(), range.end())
}
