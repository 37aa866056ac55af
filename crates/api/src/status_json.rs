//! A status as JSON text.
//!
//! Reading and writing are functions of this crate, not generic calls of its users: a status of
//! 10,000 disks is 20 MB of JSON, and a generic call is compiled where it is used, in crates that
//! are built for size.

use serde_json::value::{RawValue, to_raw_value};

use super::DaemonStatus;

impl DaemonStatus {
    /// Parses a response.
    ///
    /// # Errors
    /// Fails if the text is no JSON object, or a key has a value of another type.
    pub fn from_json(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }

    /// The response as JSON on one line.
    ///
    /// # Panics
    /// Never: all keys are strings.
    pub fn to_json(&self) -> Box<RawValue> {
        to_raw_value(self).expect("all keys are strings")
    }

    /// The response as indented JSON.
    ///
    /// # Panics
    /// Never: all keys are strings.
    pub fn to_indented_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("all keys are strings")
    }
}
