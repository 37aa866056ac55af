//! One table of the config file, read key by key, each value with its line and its full name.
//!
//! A section remembers which keys it was asked for: any other in the file is an error that names
//! the nearest. So a key that is read is a key that is known, and none is ignored. What is wrong is
//! told, and then as if it were not there.
//!
//! Values are handed on as text to the parsers of the options: `1000` and `"1000"` are the same.

use std::{borrow::Cow, cell::RefCell, fmt, ops::Range};

use toml::{
    Spanned,
    de::{DeInteger, DeTable, DeValue},
};

use crate::{Mistakes, Place, Said, Wrong, suggest};

/// Characters of a value that a message shows.
const MAX_SHOWN: usize = 60;

/// The text of a config file, to turn positions into lines, and what is wrong with it.
pub(super) struct Source<'a> {
    name: &'a str,
    text: &'a str,
    line_starts: Vec<usize>,
    pub(super) mistakes: &'a Mistakes,
}

impl<'a> Source<'a> {
    pub(super) fn new(name: &'a str, text: &'a str, mistakes: &'a Mistakes) -> Self {
        let line_starts = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        Self { name, text, line_starts, mistakes }
    }

    /// What is at this position of the text. Text without a name is not the user's, who wrote no
    /// lines.
    pub(super) fn place(&self, position: usize, what: impl fmt::Display) -> Place {
        if self.name.is_empty() {
            return Place::new(what.to_string());
        }
        let line = 1 + self.line_starts.partition_point(|&start| start <= position);
        Place::in_line(line, format!("{}:{line}: {what}", self.name))
    }

    fn shown(&self, span: Range<usize>) -> Cow<'a, str> {
        let raw = self.text.get(span).unwrap_or_default();
        let line = raw.lines().next().unwrap_or_default();
        match line.char_indices().nth(MAX_SHOWN) {
            Some((end, _)) => Cow::Owned(format!("{}…", &line[..end])),
            None if line.len() < raw.len() => Cow::Owned(format!("{line} …")),
            None => Cow::Borrowed(line),
        }
    }
}

pub(super) struct Section<'a> {
    source: &'a Source<'a>,
    /// Empty for the whole file.
    path: String,
    table: &'a DeTable<'a>,
    place: Place,
    asked: RefCell<Vec<&'static str>>,
}

pub(super) struct Entry<'a> {
    source: &'a Source<'a>,
    path: String,
    value: &'a Spanned<DeValue<'a>>,
    key: Range<usize>,
}

impl<'a> Section<'a> {
    pub(super) fn root(source: &'a Source<'a>, table: &'a DeTable<'a>) -> Self {
        Self { source, path: String::new(), table, place: Place::new(source.name), asked: RefCell::default() }
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    fn path_of(&self, key: &str) -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let quoted =
            if !key.is_empty() && key.bytes().all(plain) { key.to_owned() } else { format!("{key:?}") };
        if self.path.is_empty() { quoted } else { format!("{}.{quoted}", self.path) }
    }

    /// The value of a key, which is known from now on.
    pub(super) fn get(&self, key: &'static str) -> Option<Entry<'a>> {
        self.asked.borrow_mut().push(key);
        let (name, value) = self.table.get_key_value(key)?;
        Some(Entry { source: self.source, path: self.path_of(key), value, key: name.span() })
    }

    /// For tables whose keys are names, in the order of the file.
    pub(super) fn named_sections(&self) -> Vec<(Said<String>, Self)> {
        let mut entries: Vec<_> = self.table.iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        let section = |(key, value): (&'a Spanned<Cow<'a, str>>, &'a Spanned<DeValue<'a>>)| {
            let path = self.path_of(key.get_ref());
            let section = Entry { source: self.source, path, value, key: key.span() }.section()?;
            Some((Said::new(key.get_ref().clone().into_owned(), section.place.clone()), section))
        };
        entries.into_iter().filter_map(section).collect()
    }

    pub(super) fn parse<T>(
        &self,
        key: &'static str,
        parser: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Said<T>> {
        self.keep(self.get(key)?.parse(parser))
    }

    /// As [`Self::parse`], for keys whose value is text. A number in another base than ten is
    /// refused, because its digits are not those of the file: `0o660` would be the mode `432`.
    pub(super) fn parse_text<T>(
        &self,
        key: &'static str,
        parser: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Said<T>> {
        let entry = self.get(key)?;
        let is_decimal = |integer: &DeInteger<'_>| integer.radix() == 10;
        if entry.value.get_ref().as_integer().is_some_and(|integer| !is_decimal(integer)) {
            let rule = "is a number in another base than ten (write it as text, such as \"0660\")";
            return self.keep(Err(entry.place().wrong(rule)));
        }
        self.keep(entry.parse(parser))
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, key: &'static str) -> Option<Said<bool>> {
        let entry = self.get(key)?;
        let place = entry.place();
        match entry.value.get_ref().as_bool() {
            Some(value) => Some(Said::new(value, place)),
            None => {
                self.tell(place.wrong("is not a flag; write true or false"));
                None
            }
        }
    }

    /// As [`Self::parse`], where `true` means `on` and `false` means `off`.
    pub(super) fn parse_switch<T>(
        &self,
        key: &'static str,
        parser: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<Said<T>> {
        self.keep(self.get(key)?.parse_switch(parser))
    }

    /// One value or an array of them.
    pub(super) fn list<T>(
        &self,
        key: &'static str,
        parser: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<Said<T>> {
        self.items(key).into_iter().filter_map(|entry| self.keep(entry.parse(&parser))).collect()
    }

    /// An array, value by value; what is no array is its only value.
    pub(super) fn items(&self, key: &'static str) -> Vec<Entry<'a>> {
        let Some(entry) = self.get(key) else { return Vec::new() };
        let Some(array) = entry.value.get_ref().as_array() else { return vec![entry] };
        if array.is_empty() {
            self.tell(entry.place().wrong("is empty (leave the key out, or give a value)"));
        }
        let item = |(index, value): (usize, &'a Spanned<DeValue<'a>>)| Entry {
            source: self.source,
            path: format!("{}[{index}]", entry.path),
            value,
            key: value.span(),
        };
        array.iter().enumerate().map(item).collect()
    }

    pub(super) fn tell(&self, wrong: Wrong) {
        self.source.mistakes.tell(wrong);
    }

    pub(super) fn keep<T>(&self, result: Result<T, Wrong>) -> Option<T> {
        self.source.mistakes.keep(result)
    }

    /// Reads the table to its end, and reports unknown keys. None if anything is wrong in it.
    pub(super) fn whole<T>(&self, read: impl FnOnce() -> Option<T>) -> Option<T> {
        let mistakes = self.source.mistakes;
        let before = mistakes.count();
        let value = read();
        self.finish();
        value.filter(|_| mistakes.count() == before)
    }

    /// Tells of keys in the table that nobody asked for.
    pub(super) fn finish(&self) {
        let asked = self.asked.borrow();
        for key in self.table.keys().filter(|key| !asked.contains(&key.get_ref().as_ref())) {
            if self.source.mistakes.is_full() {
                break;
            }
            self.tell(self.unknown(key, &asked));
        }
    }

    fn unknown(&self, key: &Spanned<Cow<'_, str>>, known: &[&str]) -> Wrong {
        let name = key.get_ref().as_ref();
        let place = self.source.place(key.span().start, self.path_of(name));
        place.wrong(match suggest::nearest(name, known.iter().copied()) {
            Some(near) => format!("unknown key (did you mean {near:?}?)"),
            None => format!("unknown key; here may be {}", known.join(", ")),
        })
    }

    /// What was said of a key, without which the table says nothing. Tells that it is missing, if
    /// it is; or of one that is probably it, misspelt.
    pub(super) fn need<T>(&self, key: &str, said: Option<T>, rule: impl Into<String>) -> Option<T> {
        if said.is_none() && !self.table.contains_key(key) {
            let asked = self.asked.borrow();
            let slip = |found: &&Spanned<Cow<'_, str>>| {
                let name = found.get_ref().as_ref();
                !asked.contains(&name) && suggest::nearest(name, [key]).is_some()
            };
            self.tell(match self.table.keys().filter(slip).min_by_key(|found| found.span().start) {
                Some(found) => self.unknown(found, &[key]),
                None => self.place.wrong(rule),
            });
        }
        said
    }
}

impl<'a> Entry<'a> {
    fn place(&self) -> Place {
        let shown = self.source.shown(self.value.span());
        self.source.place(self.key.start, format_args!("{} = {shown}", self.path))
    }

    /// The table that it is; tells if it is none.
    pub(super) fn section(self) -> Option<Section<'a>> {
        self.section_or("is not a table; write its settings as KEY = VALUE lines below it")
    }

    /// The text that it is, if it is one.
    pub(super) fn text(&self) -> Option<&'a str> {
        self.value.get_ref().as_str()
    }

    /// The table that it is; tells the rule if it is none.
    pub(super) fn section_or(self, rule: impl Into<String>) -> Option<Section<'a>> {
        let Some(table) = self.value.get_ref().as_table() else {
            self.source.mistakes.tell(self.place().wrong(rule));
            return None;
        };
        let place = self.source.place(self.key.start, &self.path);
        Some(Section { source: self.source, path: self.path, table, place, asked: RefCell::default() })
    }

    /// As [`Self::parse`], where `true` means `on` and `false` means `off`.
    fn parse_switch<T>(&self, parser: impl FnOnce(&str) -> Result<T, String>) -> Result<Said<T>, Wrong> {
        let Some(on) = self.value.get_ref().as_bool() else { return self.parse(parser) };
        let place = self.place();
        let value = parser(if on { "on" } else { "off" }).map_err(|rule| place.wrong(rule))?;
        Ok(Said::new(value, place))
    }

    /// The value as the text an option would have.
    fn parse<T>(&self, parser: impl FnOnce(&str) -> Result<T, String>) -> Result<Said<T>, Wrong> {
        let place = self.place();
        let text = match self.value.get_ref() {
            DeValue::String(text) => Cow::Borrowed(text.as_ref()),
            DeValue::Integer(integer) if integer.radix() == 10 => Cow::Borrowed(integer.as_str()),
            DeValue::Integer(integer) => match u64::from_str_radix(integer.as_str(), integer.radix()) {
                Ok(value) => Cow::Owned(value.to_string()),
                Err(_) => return Err(place.wrong("is too large (write a smaller number)")),
            },
            DeValue::Float(float) => Cow::Borrowed(float.as_str()),
            other => {
                let kind = other.type_str();
                let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
                let one = if kind == "array" { " (write one, without brackets)" } else { "" };
                return Err(place.wrong(format!("is {article} {kind}; a string or a number is needed{one}")));
            }
        };
        parser(&text).map(|value| Said::new(value, place.clone())).map_err(|rule| place.wrong(rule))
    }
}
