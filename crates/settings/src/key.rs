//! Tables of keys: parsing, writing, comparing and describing a config.
//!
//! ```text
//!   Key { name, value, default, help, change, transfer, read, write }
//!     ├─ config file, options of the command line, options of a volume      read
//!     ├─ saved configs, migration, upgrade, comparison                      write
//!     └─ help                                                               the rest
//! ```
//!
//! A row is the only definition of a key. All code that needs the keys of a disk or a group
//! iterates over the table ([`crate::disk`], [`crate::group`]).

mod values;

use std::{fmt, path::Path};

use serde_json::Value;

pub(crate) use values::{seconds_or_time, write_seconds};

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    /// True or false; an option without a value.
    Flag,
    /// One of these words. If `on` and `off` are among them, a file may have true and false.
    Word(&'static [&'static str]),
    /// One of these words, or text in the form that the help describes.
    WordOr(&'static [&'static str]),
    /// A plain number.
    Count,
    /// A plain number that the row parses itself, because its range and its notation are one rule.
    Integer,
    /// A number of bytes.
    Size,
    /// A number of seconds, without a unit.
    Seconds,
    /// A number of seconds, or a time with a unit of whole seconds.
    Time,
    /// Text in the form that the help describes.
    Text,
    /// A path, relative to the directory of the config file.
    Path,
    /// A table.
    Table,
}

/// Effect of a changed key on a running disk or group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangePolicy {
    /// Applied at once.
    Apply,
    /// Applied by closing and reopening the exports; rejected while clients are connected.
    Reexport,
    /// Rejected: the disk has to be removed and added again.
    Reject,
}

/// Treatment of a key when a disk migrates to another host or an upgrade transfers it to the new
/// process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferPolicy {
    /// The value is transferred.
    Transferred,
    /// Meaningful on this host only. A disk with such a value cannot migrate.
    HostOnly,
    /// Transferred by another mechanism, or set again when the disk is opened.
    Separate,
}

/// Value in the form that TOML, JSON or text have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyLiteral {
    /// `true`, `false`.
    Flag(bool),
    /// A number without a unit.
    Number(u64),
    /// A string.
    Text(String),
    /// Several values, in order.
    List(Vec<Self>),
    /// A table: its keys with their values, in order.
    Table(Vec<(&'static str, Self)>),
}

impl KeyLiteral {
    /// Text that parses as this value; for a list, one for each value.
    #[must_use]
    pub fn texts(&self) -> Vec<String> {
        match self {
            Self::List(all) => all.iter().flat_map(Self::texts).collect(),
            other => vec![other.to_string()],
        }
    }
}

impl fmt::Display for KeyLiteral {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(value) => value.fmt(f),
            Self::Number(value) => value.fmt(f),
            Self::Text(text) => text.fmt(f),
            Self::List(_) => f.write_str(&self.texts().join(", ")),
            Self::Table(keys) => {
                let keys: Vec<_> = keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
                f.write_str(&keys.join(","))
            }
        }
    }
}

impl From<&KeyLiteral> for Value {
    fn from(literal: &KeyLiteral) -> Self {
        match literal {
            KeyLiteral::Flag(value) => (*value).into(),
            KeyLiteral::Number(value) => (*value).into(),
            KeyLiteral::Text(text) => text.as_str().into(),
            KeyLiteral::List(all) => all.iter().map(Self::from).collect(),
            KeyLiteral::Table(keys) => keys.iter().map(|(key, value)| (*key, Self::from(value))).collect(),
        }
    }
}

/// Input of a key's reader.
#[derive(Clone, Copy, Debug)]
pub struct KeyInput<'a> {
    /// The text.
    pub text: &'a str,
    /// The parsed number, for numeric kinds; else 0.
    pub number: u64,
    /// Base directory of relative paths.
    pub directory: &'a Path,
}

type Read<T> = Box<dyn Fn(&mut T, KeyInput<'_>) -> Result<(), String> + Send + Sync>;
type Write<T> = Box<dyn Fn(&T) -> Option<KeyLiteral> + Send + Sync>;

/// Access to a key's field in `T`.
pub struct KeyField<T> {
    read: Read<T>,
    write: Write<T>,
    is_list: bool,
}

impl<T> KeyField<T> {
    /// A field with a custom reader and writer. The reader of a list appends a value; the writer
    /// returns `None` if there is no value.
    pub fn new(
        read: impl Fn(&mut T, KeyInput<'_>) -> Result<(), String> + Send + Sync + 'static,
        write: impl Fn(&T) -> Option<KeyLiteral> + Send + Sync + 'static,
    ) -> Self {
        Self { read: Box::new(read), write: Box::new(write), is_list: false }
    }

    /// Marks the field as a list, whose reader appends one value at a time.
    #[must_use]
    pub fn list(self) -> Self {
        Self { is_list: true, ..self }
    }
}

/// Type of a key's value.
pub trait ConfigValue: Sized {
    /// Parses a value.
    ///
    /// # Errors
    /// Returns the rule that the text breaks.
    fn read(given: KeyInput<'_>) -> Result<Self, String>;

    /// Writes the value so that [`ConfigValue::read`] returns it again.
    fn write(&self) -> KeyLiteral;
}

/// Access to a field that always has a value. `Config` has to name the table's type in the caller's
/// scope. The second argument, here and in the macros below, is a parser instead of the type's.
macro_rules! one {
    ($($field:ident).+) => {
        $crate::key::KeyField::new(
            |config: &mut Config, given| { config.$($field).+ = $crate::key::ConfigValue::read(given)?; Ok(()) },
            |config: &Config| Some($crate::key::ConfigValue::write(&config.$($field).+)),
        )
    };
    ($($field:ident).+, $read:expr) => {
        $crate::key::KeyField::new(
            |config: &mut Config, given: $crate::key::KeyInput<'_>| { config.$($field).+ = ($read)(given.text)?; Ok(()) },
            |config: &Config| Some($crate::key::ConfigValue::write(&config.$($field).+)),
        )
    };
}

/// Access to a field that may have no value.
macro_rules! maybe {
    ($($field:ident).+) => {
        $crate::key::KeyField::new(
            |config: &mut Config, given| { config.$($field).+ = Some($crate::key::ConfigValue::read(given)?); Ok(()) },
            |config: &Config| config.$($field).+.as_ref().map($crate::key::ConfigValue::write),
        )
    };
    ($($field:ident).+, $read:expr) => {
        $crate::key::KeyField::new(
            |config: &mut Config, given: $crate::key::KeyInput<'_>| { config.$($field).+ = Some(($read)(given.text)?); Ok(()) },
            |config: &Config| config.$($field).+.as_ref().map($crate::key::ConfigValue::write),
        )
    };
}

/// Access to a field with several values.
macro_rules! each {
    ($($field:ident).+) => {
        $crate::key::KeyField::new(
            |config: &mut Config, given| { config.$($field).+.push($crate::key::ConfigValue::read(given)?); Ok(()) },
            |config: &Config| $crate::key::list(&config.$($field).+),
        )
        .list()
    };
    ($($field:ident).+, $read:expr) => {
        $crate::key::KeyField::new(
            |config: &mut Config, given: $crate::key::KeyInput<'_>| { config.$($field).+.push(($read)(given.text)?); Ok(()) },
            |config: &Config| $crate::key::list(&config.$($field).+),
        )
        .list()
    };
}

/// Rows of a table, by heading: name, value, placeholder, field, default, change, transfer and
/// help.
macro_rules! table {
    ($($heading:literal { $(
        $name:literal, $value:expr, $placeholder:literal, $field:expr, $default:literal,
        $change:ident, $transfer:ident, $help:expr;
    )* })*) => {
        vec![$($($crate::key::ConfigKey {
            name: $name,
            heading: $heading,
            value: $value,
            placeholder: $placeholder,
            default: $default,
            help: $help.to_owned(),
            change: $crate::key::ChangePolicy::$change,
            transfer: $crate::key::TransferPolicy::$transfer,
            field: $field,
        },)*)*]
    };
}

pub(crate) use {each, maybe, one, table};

/// Literal of a list; `None` if it is empty.
pub(crate) fn list<V: ConfigValue>(values: &[V]) -> Option<KeyLiteral> {
    (!values.is_empty()).then(|| KeyLiteral::List(values.iter().map(ConfigValue::write).collect()))
}

/// One row of a table.
pub struct ConfigKey<T: 'static> {
    /// Name in the config file, and of the option with `--` before it.
    pub name: &'static str,
    /// Heading of the option in the help.
    pub heading: &'static str,
    /// Type of the value.
    pub value: KeyType,
    /// Placeholder of the value in the help.
    pub placeholder: &'static str,
    /// Default in words. Empty if the help states it; `required` if a table of the config file
    /// needs the key.
    pub default: &'static str,
    /// Description in one sentence.
    pub help: String,
    /// Effect of a change at run time.
    pub change: ChangePolicy,
    /// Treatment at a migration or an upgrade.
    pub transfer: TransferPolicy,
    /// Access to the value.
    pub field: KeyField<T>,
}

impl<T: Default> ConfigKey<T> {
    /// Parses one value into the config; a list is extended.
    ///
    /// # Errors
    /// Fails if the text is malformed or the value is out of range.
    pub fn read(&self, config: &mut T, text: &str, directory: &Path) -> Result<(), ValueError> {
        // Two classes of errors: clap rejects malformed text at once. A value out of range is
        // collected with all mistakes.
        let number = self.number(text).map_err(ValueError::Malformed)?;
        let read = (self.field.read)(config, KeyInput { text, number, directory });
        read.map_err(if self.is_number() { ValueError::OutOfRange } else { ValueError::Malformed })
    }

    /// Literal of the value; `None` if there is none.
    #[must_use]
    pub fn write(&self, config: &T) -> Option<KeyLiteral> {
        (self.field.write)(config)
    }

    /// True if the config has the default.
    #[must_use]
    pub fn is_default(&self, config: &T) -> bool {
        self.write(config) == self.write(&T::default())
    }

    /// Checks that the text is well formed, regardless of its range, for the parser of an option.
    ///
    /// # Errors
    /// Returns the rule that it breaks.
    pub fn check(&self, text: &str) -> Result<String, String> {
        match self.read(&mut T::default(), text, Path::new("")) {
            // The range is checked later with the origin, so only the form matters to clap.
            Err(ValueError::Malformed(rule)) => Err(rule),
            Ok(()) | Err(ValueError::OutOfRange(_)) => Ok(text.to_owned()),
        }
    }

    /// True if a config file may have `true` and `false` in place of `on` and `off`.
    #[must_use]
    pub fn accepts_bool(&self) -> bool {
        // `unmap` includes `discard`: `true` then fails with the rule of that key.
        let is_on_or_off = |word: &&str| ["on", "off", "unmap"].contains(word);
        matches!(self.value, KeyType::Word(words) | KeyType::WordOr(words) if words.iter().any(is_on_or_off))
    }

    /// True if there may be several values.
    #[must_use]
    pub fn is_list(&self) -> bool {
        self.field.is_list
    }

    /// True if a number of this key is a size.
    #[must_use]
    pub fn is_size(&self) -> bool {
        self.placeholder == "SIZE"
    }

    fn is_number(&self) -> bool {
        matches!(self.value, KeyType::Count | KeyType::Size | KeyType::Seconds | KeyType::Time)
    }

    fn number(&self, text: &str) -> Result<u64, String> {
        match self.value {
            KeyType::Count => crate::count(text),
            KeyType::Size => crate::size(text),
            KeyType::Seconds => crate::seconds(text),
            KeyType::Time => crate::whole_seconds(text),
            // The row parses the text itself.
            _ => Ok(0),
        }
    }
}

impl<T> fmt::Debug for ConfigKey<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Reason why a value was rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueError {
    /// The text is malformed, with the rule.
    Malformed(String),
    /// The number is too small or too large, with the rule.
    OutOfRange(String),
}
