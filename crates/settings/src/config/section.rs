//! One table of the config file, read key by key. Each value keeps its line and its full name.
//!
//! A section records which keys were requested: any other key in the file is an error that suggests
//! the nearest name. So no key is ignored. A wrong value is reported and then treated as absent.
//!
//! Values are passed as text to the parsers of the options: `1000` and `"1000"` are equivalent.

use std::{borrow::Cow, cell::RefCell, fmt, ops::Range};

use toml::{
    Spanned as TomlSpanned,
    de::{DeInteger, DeTable, DeValue},
};

use crate::{ConfigError, Diagnostics, Origin, Spanned, suggest};

/// Characters of a value in a message.
const MAX_SHOWN: usize = 60;

/// Text of a config file, for line numbers, and the mistakes found in it.
pub(super) struct ConfigText<'a> {
    name: &'a str,
    text: &'a str,
    line_starts: Vec<usize>,
    pub(super) diagnostics: &'a Diagnostics,
}

impl<'a> ConfigText<'a> {
    pub(super) fn new(name: &'a str, text: &'a str, diagnostics: &'a Diagnostics) -> Self {
        // Line numbers are found by binary search: files may have 100,000 disks.
        let line_starts = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        Self { name, text, line_starts, diagnostics }
    }

    /// Origin for a position in the text. A text without a name was generated, so its line numbers
    /// mean nothing to the user.
    pub(super) fn origin(&self, position: usize, key: impl fmt::Display) -> Origin {
        if self.name.is_empty() {
            return Origin::new(key.to_string());
        }
        let line = 1 + self.line_starts.partition_point(|&start| start <= position);
        Origin::at_line(line, format!("{}:{line}: {key}", self.name))
    }

    fn excerpt(&self, span: Range<usize>) -> Cow<'a, str> {
        let raw = self.text.get(span).unwrap_or_default();
        // A multi-line value is cut at its first line.
        let line = raw.lines().next().unwrap_or_default();
        match line.char_indices().nth(MAX_SHOWN) {
            Some((end, _)) => Cow::Owned(format!("{}…", &line[..end])),
            None if line.len() < raw.len() => Cow::Owned(format!("{line} …")),
            None => Cow::Borrowed(line),
        }
    }
}

pub(super) struct TomlSection<'a> {
    source: &'a ConfigText<'a>,
    /// Full name of the table; empty for the whole file.
    path: String,
    table: &'a DeTable<'a>,
    origin: Origin,
    requested: RefCell<Vec<&'static str>>,
}

pub(super) struct TomlEntry<'a> {
    source: &'a ConfigText<'a>,
    path: String,
    value: &'a TomlSpanned<DeValue<'a>>,
    key: Range<usize>,
}

impl<'a> TomlSection<'a> {
    pub(super) fn root(source: &'a ConfigText<'a>, table: &'a DeTable<'a>) -> Self {
        Self {
            source,
            path: String::new(),
            table,
            origin: Origin::new(source.name),
            requested: RefCell::default(),
        }
    }

    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    fn path_of(&self, key: &str) -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        // As in TOML: a key with other characters has to be quoted.
        let quoted =
            if !key.is_empty() && key.bytes().all(plain) { key.to_owned() } else { format!("{key:?}") };
        if self.path.is_empty() { quoted } else { format!("{}.{quoted}", self.path) }
    }

    /// True if the table has the key. The key does not count as known for this.
    pub(super) fn contains(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Value of a key. The key counts as known from now on.
    pub(super) fn request(&self, key: &'static str) -> Option<TomlEntry<'a>> {
        // Recorded even if the key is absent: it is known to this table.
        self.requested.borrow_mut().push(key);
        let (name, value) = self.table.get_key_value(key)?;
        Some(TomlEntry { source: self.source, path: self.path_of(key), value, key: name.span() })
    }

    /// Sections of a table whose keys are names, in the order of the file.
    pub(super) fn named_sections(&self) -> Vec<(Spanned<String>, Self)> {
        let mut entries: Vec<_> = self.table.iter().collect();
        // The TOML map is sorted by name; users expect the order of the file.
        entries.sort_by_key(|(key, _)| key.span().start);
        let section = |(key, value): (&'a TomlSpanned<Cow<'a, str>>, &'a TomlSpanned<DeValue<'a>>)| {
            let path = self.path_of(key.get_ref());
            let section = TomlEntry { source: self.source, path, value, key: key.span() }.section()?;
            Some((Spanned::new(key.get_ref().clone().into_owned(), section.origin.clone()), section))
        };
        entries.into_iter().filter_map(section).collect()
    }

    pub(super) fn parse<T>(
        &self,
        key: &'static str,
        parser: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Spanned<T>> {
        self.ok_or_report(self.request(key)?.parse(parser))
    }

    /// As [`Self::parse`], for keys whose value is text. A number in a base other than ten is
    /// rejected, because its decimal digits differ from the file's: `0o660` would become the mode
    /// `432`.
    pub(super) fn parse_text<T>(
        &self,
        key: &'static str,
        parser: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Spanned<T>> {
        let entry = self.request(key)?;
        let is_decimal = |integer: &DeInteger<'_>| integer.radix() == 10;
        if entry.value.get_ref().as_integer().is_some_and(|integer| !is_decimal(integer)) {
            let rule = "is not a decimal number (write it as text, such as \"0660\")";
            return self.ok_or_report(Err(entry.origin().error(rule)));
        }
        self.ok_or_report(entry.parse(parser))
    }

    /// Parses `true` or `false`.
    pub(super) fn flag(&self, key: &'static str) -> Option<Spanned<bool>> {
        let entry = self.request(key)?;
        let origin = entry.origin();
        match entry.value.get_ref().as_bool() {
            Some(value) => Some(Spanned::new(value, origin)),
            None => {
                self.report(origin.error("is not a flag; write true or false"));
                None
            }
        }
    }

    /// As [`Self::parse`], with `true` and `false` for `on` and `off`.
    pub(super) fn parse_switch<T>(
        &self,
        key: &'static str,
        parser: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<Spanned<T>> {
        self.ok_or_report(self.request(key)?.parse_switch(parser))
    }

    /// Parses one value or an array.
    pub(super) fn list<T>(
        &self,
        key: &'static str,
        parser: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<Spanned<T>> {
        self.items(key).into_iter().filter_map(|entry| self.ok_or_report(entry.parse(&parser))).collect()
    }

    /// Elements of an array; any other value is its only element.
    pub(super) fn items(&self, key: &'static str) -> Vec<TomlEntry<'a>> {
        let Some(entry) = self.request(key) else { return Vec::new() };
        let Some(array) = entry.value.get_ref().as_array() else { return vec![entry] };
        // Rejected: an empty list may be meant as "none" or as "the default".
        if array.is_empty() {
            self.report(entry.origin().error("is empty (remove the key, or set a value)"));
        }
        let item = |(index, value): (usize, &'a TomlSpanned<DeValue<'a>>)| TomlEntry {
            source: self.source,
            path: format!("{}[{index}]", entry.path),
            value,
            key: value.span(),
        };
        array.iter().enumerate().map(item).collect()
    }

    pub(super) fn report(&self, error: ConfigError) {
        self.source.diagnostics.report(error);
    }

    pub(super) fn ok_or_report<T>(&self, result: Result<T, ConfigError>) -> Option<T> {
        self.source.diagnostics.ok_or_report(result)
    }

    /// Reads a whole table and reports unknown keys. `None` if the table has a mistake.
    pub(super) fn read_all<T>(&self, read: impl FnOnce() -> Option<T>) -> Option<T> {
        let diagnostics = self.source.diagnostics;
        // Counts instead of checking the result: a mistake may be recorded while a value is
        // returned.
        let before = diagnostics.count();
        let value = read();
        self.report_unknown_keys();
        value.filter(|_| diagnostics.count() == before)
    }

    /// Reports keys that were not requested.
    pub(super) fn report_unknown_keys(&self) {
        let requested = self.requested.borrow();
        for key in self.table.keys().filter(|key| !requested.contains(&key.get_ref().as_ref())) {
            if self.source.diagnostics.is_full() {
                break;
            }
            self.report(self.unknown_key_error(key, &requested));
        }
    }

    fn unknown_key_error(&self, key: &TomlSpanned<Cow<'_, str>>, known: &[&str]) -> ConfigError {
        let name = key.get_ref().as_ref();
        let origin = self.source.origin(key.span().start, self.path_of(name));
        origin.error(match suggest::nearest(name, known.iter().copied()) {
            Some(nearest) => format!("unknown key (did you mean {nearest:?}?)"),
            None => format!("unknown key; known are {}", known.join(", ")),
        })
    }

    /// Returns a required value, or reports that it is missing, or that a misspelt key is probably
    /// meant.
    pub(super) fn require<T>(&self, key: &str, value: Option<T>, rule: impl Into<String>) -> Option<T> {
        if value.is_none() && !self.table.contains_key(key) {
            let requested = self.requested.borrow();
            // A misspelt key is reported as such; "missing" would be confusing beside it.
            let is_misspelling = |found: &&TomlSpanned<Cow<'_, str>>| {
                let name = found.get_ref().as_ref();
                !requested.contains(&name) && suggest::nearest(name, [key]).is_some()
            };
            self.report(
                match self.table.keys().filter(is_misspelling).min_by_key(|found| found.span().start) {
                    Some(found) => self.unknown_key_error(found, &[key]),
                    None => self.origin.error(rule),
                },
            );
        }
        value
    }
}

impl<'a> TomlEntry<'a> {
    fn origin(&self) -> Origin {
        let shown = self.source.excerpt(self.value.span());
        self.source.origin(self.key.start, format_args!("{} = {shown}", self.path))
    }

    /// Converts to a table, or reports that it is none.
    pub(super) fn section(self) -> Option<TomlSection<'a>> {
        self.section_or("is not a table; write its settings as KEY = VALUE lines below it")
    }

    /// The text, if the value is a string.
    pub(super) fn text(&self) -> Option<&'a str> {
        self.value.get_ref().as_str()
    }

    /// Converts to a table, or reports the rule.
    pub(super) fn section_or(self, rule: impl Into<String>) -> Option<TomlSection<'a>> {
        let Some(table) = self.value.get_ref().as_table() else {
            self.source.diagnostics.report(self.origin().error(rule));
            return None;
        };
        let origin = self.source.origin(self.key.start, &self.path);
        Some(TomlSection {
            source: self.source,
            path: self.path,
            table,
            origin,
            requested: RefCell::default(),
        })
    }

    /// As [`Self::parse`], with `true` and `false` for `on` and `off`.
    fn parse_switch<T>(
        &self,
        parser: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Spanned<T>, ConfigError> {
        let Some(on) = self.value.get_ref().as_bool() else { return self.parse(parser) };
        let origin = self.origin();
        let value = parser(if on { "on" } else { "off" }).map_err(|rule| origin.error(rule))?;
        Ok(Spanned::new(value, origin))
    }

    /// Parses the text that an option would have.
    fn parse<T>(&self, parser: impl FnOnce(&str) -> Result<T, String>) -> Result<Spanned<T>, ConfigError> {
        let origin = self.origin();
        // The TOML parser keeps the notation of numbers, so no precision is lost here.
        let text = match self.value.get_ref() {
            DeValue::String(text) => Cow::Borrowed(text.as_ref()),
            DeValue::Integer(integer) if integer.radix() == 10 => Cow::Borrowed(integer.as_str()),
            DeValue::Integer(integer) => match u64::from_str_radix(integer.as_str(), integer.radix()) {
                Ok(value) => Cow::Owned(value.to_string()),
                Err(_) => return Err(origin.error("is too large (write a smaller number)")),
            },
            DeValue::Float(float) => Cow::Borrowed(float.as_str()),
            other => {
                let kind = other.type_str();
                let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
                let advice = if kind == "array" { " (write one, without brackets)" } else { "" };
                return Err(
                    origin.error(format!("is {article} {kind}; a string or a number is required{advice}"))
                );
            }
        };
        parser(&text).map(|value| Spanned::new(value, origin.clone())).map_err(|rule| origin.error(rule))
    }
}
