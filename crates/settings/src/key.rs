//! Tables of keys: how a config is read from text, written back, compared and described.
//!
//! ```text
//!   Key { name, value, default, help, change, transfer, read, write }
//!     ├─ config file, options of the command line, options of a volume      read
//!     ├─ what is saved, sent to another host or process, or compared        write
//!     └─ help                                                               the rest
//! ```
//!
//! A row is all that is written about a key. Everything that needs the keys of a disk or a group
//! walks the table ([`crate::disk`], [`crate::group`]).

mod values;

use std::{fmt, path::Path};

use serde_json::Value;

pub(crate) use values::{seconds_or_time, write_seconds};

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// True or false; an option without a value.
    Flag,
    /// One of these words. Where `on` and `off` are among them, a file may have true and false.
    Word(&'static [&'static str]),
    /// One of these words, or text in the form that the help describes.
    WordOr(&'static [&'static str]),
    /// A plain number.
    Count,
    /// A plain number that the row reads itself, because its range and its form are one rule.
    Integer,
    /// A number of bytes.
    Size,
    /// A number of seconds, without a unit.
    Seconds,
    /// Text in the form that the help describes.
    Text,
    /// A path, relative to the directory of the config file.
    Path,
    /// A table.
    Table,
}

/// What a change of a key does while the disk or the group is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is in force at once.
    Live,
    /// The exports are closed and opened again, if no client uses them.
    Reexport,
    /// It is refused: the disk has to be removed and added again.
    Never,
}

/// What happens to a key when a disk goes to another host, or to the next process on this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Its value goes along.
    Moves,
    /// It has a meaning on this host alone: a disk with a value of it cannot be moved.
    Stays,
    /// It goes along by a way of its own, or is set where the disk is opened again.
    Apart,
}

/// A value as it is written: in TOML, in JSON, or as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Literal {
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

impl Literal {
    /// The text that reads as this value; of a list, one for each value.
    #[must_use]
    pub fn texts(&self) -> Vec<String> {
        match self {
            Self::List(all) => all.iter().flat_map(Self::texts).collect(),
            other => vec![other.to_string()],
        }
    }
}

impl fmt::Display for Literal {
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

impl From<&Literal> for Value {
    fn from(literal: &Literal) -> Self {
        match literal {
            Literal::Flag(value) => (*value).into(),
            Literal::Number(value) => (*value).into(),
            Literal::Text(text) => text.as_str().into(),
            Literal::List(all) => all.iter().map(Self::from).collect(),
            Literal::Table(keys) => keys.iter().map(|(key, value)| (*key, Self::from(value))).collect(),
        }
    }
}

/// One value as a key's row reads it.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The text.
    pub text: &'a str,
    /// The number that it is, of the kinds that are numbers; else 0.
    pub number: u64,
    /// The directory that relative paths start at.
    pub directory: &'a Path,
}

type Read<T> = Box<dyn Fn(&mut T, Given<'_>) -> Result<(), String> + Send + Sync>;
type Write<T> = Box<dyn Fn(&T) -> Option<Literal> + Send + Sync>;

/// How a key reaches its field in `T`.
pub struct Field<T> {
    read: Read<T>,
    write: Write<T>,
    is_list: bool,
}

impl<T> Field<T> {
    /// A field with a reader and a writer of its own. The reader of a list adds a value; the writer
    /// returns `None` where there is no value.
    pub fn new(
        read: impl Fn(&mut T, Given<'_>) -> Result<(), String> + Send + Sync + 'static,
        write: impl Fn(&T) -> Option<Literal> + Send + Sync + 'static,
    ) -> Self {
        Self { read: Box::new(read), write: Box::new(write), is_list: false }
    }

    /// The same field, of which the reader adds one value at a time.
    #[must_use]
    pub fn list(self) -> Self {
        Self { is_list: true, ..self }
    }
}

/// A type that a key's value has.
pub trait KeyValue: Sized {
    /// Reads a value.
    ///
    /// # Errors
    /// The rule that it breaks.
    fn read(given: Given<'_>) -> Result<Self, String>;

    /// Writes the value so that [`KeyValue::read`] returns it again.
    fn write(&self) -> Literal;
}

/// Access to a field of `Config`, a name in scope for the type of the table, that always has a
/// value. The second argument, here and in the macros below, is a parser in place of the type's.
macro_rules! one {
    ($($field:ident).+) => {
        $crate::key::Field::new(
            |config: &mut Config, given| { config.$($field).+ = $crate::key::KeyValue::read(given)?; Ok(()) },
            |config: &Config| Some($crate::key::KeyValue::write(&config.$($field).+)),
        )
    };
    ($($field:ident).+, $read:expr) => {
        $crate::key::Field::new(
            |config: &mut Config, given: $crate::key::Given<'_>| { config.$($field).+ = ($read)(given.text)?; Ok(()) },
            |config: &Config| Some($crate::key::KeyValue::write(&config.$($field).+)),
        )
    };
}

/// Access to a field that may have no value.
macro_rules! maybe {
    ($($field:ident).+) => {
        $crate::key::Field::new(
            |config: &mut Config, given| { config.$($field).+ = Some($crate::key::KeyValue::read(given)?); Ok(()) },
            |config: &Config| config.$($field).+.as_ref().map($crate::key::KeyValue::write),
        )
    };
    ($($field:ident).+, $read:expr) => {
        $crate::key::Field::new(
            |config: &mut Config, given: $crate::key::Given<'_>| { config.$($field).+ = Some(($read)(given.text)?); Ok(()) },
            |config: &Config| config.$($field).+.as_ref().map($crate::key::KeyValue::write),
        )
    };
}

/// Access to a field with several values.
macro_rules! each {
    ($($field:ident).+) => {
        $crate::key::Field::new(
            |config: &mut Config, given| { config.$($field).+.push($crate::key::KeyValue::read(given)?); Ok(()) },
            |config: &Config| $crate::key::list(&config.$($field).+),
        )
        .list()
    };
    ($($field:ident).+, $read:expr) => {
        $crate::key::Field::new(
            |config: &mut Config, given: $crate::key::Given<'_>| { config.$($field).+.push(($read)(given.text)?); Ok(()) },
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
        vec![$($($crate::key::Key {
            name: $name,
            heading: $heading,
            value: $value,
            placeholder: $placeholder,
            default: $default,
            help: $help.to_owned(),
            change: $crate::key::Change::$change,
            transfer: $crate::key::Transfer::$transfer,
            field: $field,
        },)*)*]
    };
}

pub(crate) use {each, maybe, one, table};

/// The literal of several values; `None` of none.
pub(crate) fn list<V: KeyValue>(values: &[V]) -> Option<Literal> {
    (!values.is_empty()).then(|| Literal::List(values.iter().map(KeyValue::write).collect()))
}

/// One row of a table.
pub struct Key<T: 'static> {
    /// Name in the config file, and of the option with `--` before it.
    pub name: &'static str,
    /// Heading of the option in the help.
    pub heading: &'static str,
    /// Type of the value.
    pub value: ValueKind,
    /// Placeholder of the value in the help.
    pub placeholder: &'static str,
    /// The default in words; empty if the help has it, `required` if a table of the config file
    /// needs the key.
    pub default: &'static str,
    /// What it does, in one sentence.
    pub help: String,
    /// Effect of a change at run time.
    pub change: Change,
    /// Whether another host or process receives it.
    pub transfer: Transfer,
    /// Access to the value.
    pub field: Field<T>,
}

impl<T: Default> Key<T> {
    /// Reads one value into the config: of a list, adds it.
    ///
    /// # Errors
    /// Why the text is not well formed, or the value is out of its range.
    pub fn read(&self, config: &mut T, text: &str, directory: &Path) -> Result<(), Unread> {
        let number = self.number(text).map_err(Unread::Malformed)?;
        let read = (self.field.read)(config, Given { text, number, directory });
        read.map_err(if self.is_number() { Unread::OutOfRange } else { Unread::Malformed })
    }

    /// The value as it is written; `None` if there is none.
    #[must_use]
    pub fn write(&self, config: &T) -> Option<Literal> {
        (self.field.write)(config)
    }

    /// True if the config has the default.
    #[must_use]
    pub fn is_default(&self, config: &T) -> bool {
        self.write(config) == self.write(&T::default())
    }

    /// Checks that the text is well formed, whatever its range, for the parser of an option.
    ///
    /// # Errors
    /// The rule that it breaks.
    pub fn check(&self, text: &str) -> Result<String, String> {
        match self.read(&mut T::default(), text, Path::new("")) {
            Err(Unread::Malformed(rule)) => Err(rule),
            Ok(()) | Err(Unread::OutOfRange(_)) => Ok(text.to_owned()),
        }
    }

    /// True if a config file may have `true` and `false` in place of `on` and `off`.
    #[must_use]
    pub fn is_switch(&self) -> bool {
        let is_on_or_off = |word: &&str| ["on", "off", "unmap"].contains(word);
        matches!(self.value, ValueKind::Word(words) | ValueKind::WordOr(words) if words.iter().any(is_on_or_off))
    }

    /// True if there may be several values.
    #[must_use]
    pub fn is_list(&self) -> bool {
        self.field.is_list
    }

    /// True if a number of it is a size.
    #[must_use]
    pub fn is_size(&self) -> bool {
        self.placeholder == "SIZE"
    }

    fn is_number(&self) -> bool {
        matches!(self.value, ValueKind::Count | ValueKind::Size | ValueKind::Seconds)
    }

    fn number(&self, text: &str) -> Result<u64, String> {
        match self.value {
            ValueKind::Count => crate::count(text),
            ValueKind::Size => crate::size(text),
            ValueKind::Seconds => crate::seconds(text),
            _ => Ok(0),
        }
    }
}

impl<T> fmt::Debug for Key<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Why a value cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unread {
    /// It is not of its form, with the rule.
    Malformed(String),
    /// It is a number that is too small or too large, with the rule.
    OutOfRange(String),
}
