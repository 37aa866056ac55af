//! What is wrong with something that a user typed.

use std::borrow::Cow;

/// A value that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{value}' {rule}")]
pub struct InvalidValue {
    /// The value as written.
    pub value: String,
    /// What it is not, to follow the value in a message.
    pub rule: Cow<'static, str>,
}

impl InvalidValue {
    pub(super) fn new(value: &str, rule: impl Into<Cow<'static, str>>) -> Self {
        Self { value: value.to_owned(), rule: rule.into() }
    }
}
