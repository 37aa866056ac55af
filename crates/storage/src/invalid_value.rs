//! The error of parsing a value that a user typed.

use std::borrow::Cow;

/// A value that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{value}' {rule}")]
pub struct InvalidValue {
    /// The value as written.
    pub value: String,
    /// The violated rule; the message is the value followed by this text.
    pub rule: Cow<'static, str>,
}

impl InvalidValue {
    pub(super) fn new(value: &str, rule: impl Into<Cow<'static, str>>) -> Self {
        Self { value: value.to_owned(), rule: rule.into() }
    }
}
