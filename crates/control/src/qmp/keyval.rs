//! Arguments of a command in the syntax of a command line: JSON, or `key=value` separated by
//! commas, as for QEMU's `--blockdev`.
//!
//! ```text
//!   raw,node-name=r,file.driver=file,file.filename=a,,b
//!   {"driver": "raw", "node-name": "r", "file": {"driver": "file", "filename": "a,b"}}
//! ```
//!
//! A dot in a key selects a member of an object, keys that are numbers from 0 on make an array, and
//! two commas are one in a value. The first value may omit its key if the option has an implied
//! one. Source: QEMU's manual page, "Block device options", and the behaviour of its storage
//! daemon.

use std::collections::{BTreeMap, btree_map::Entry};

use serde_json::{Map, Value};
use settings::keyval;

use super::{arguments::QmpArguments, error::QmpError, json};

/// Maximum nesting; more than any command needs.
const MAX_LEVELS: usize = 64;

/// Parses `text`; `implied` is the key of a first value without one.
///
/// # Errors
/// The text has neither form, or contradicts itself.
pub(crate) fn parse_arguments(text: &str, implied: Option<&str>) -> Result<QmpArguments, QmpError> {
    // As in QEMU, a brace selects JSON.
    if text.trim_start().starts_with('{') {
        return match json::parse(text.as_bytes()).map_err(QmpError::generic)? {
            Value::Object(members) => Ok(QmpArguments::new(members)),
            _ => Err(QmpError::generic("is no JSON object")),
        };
    }
    let mut root = KeyvalNode::default();
    for (key, value) in keyval::pairs(text, implied).map_err(QmpError::generic)? {
        root.insert(&key, &key, value, MAX_LEVELS)?;
    }
    match root.into_value("")? {
        Value::Object(members) => Ok(QmpArguments::from_text(members)),
        _ => Err(QmpError::generic("begins with a number where a key is needed")),
    }
}

#[derive(Debug)]
enum KeyvalPart {
    Text(String),
    Inside(KeyvalNode),
}

#[derive(Debug, Default)]
struct KeyvalNode(BTreeMap<String, KeyvalPart>);

impl KeyvalNode {
    fn insert(&mut self, full_key: &str, key: &str, value: String, levels: usize) -> Result<(), QmpError> {
        let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
        // Bounds the recursion for any input.
        if first.is_empty() || levels == 0 {
            return Err(QmpError::generic(format!("Invalid parameter '{}'", json::excerpt(full_key))));
        }
        let used_twice = || QmpError::generic(format!("Parameters '{first}.*' used inconsistently"));
        match (self.0.entry(first.to_owned()), rest) {
            (Entry::Vacant(free), None) => drop(free.insert(KeyvalPart::Text(value))),
            (Entry::Vacant(free), Some(rest)) => {
                let mut inside = Self::default();
                inside.insert(full_key, rest, value, levels - 1)?;
                free.insert(KeyvalPart::Inside(inside));
            }
            (Entry::Occupied(mut existing), None) => match existing.get_mut() {
                // As in QEMU, the last value wins.
                KeyvalPart::Text(text) => *text = value,
                KeyvalPart::Inside(_) => return Err(used_twice()),
            },
            (Entry::Occupied(mut existing), Some(rest)) => match existing.get_mut() {
                KeyvalPart::Text(_) => return Err(used_twice()),
                KeyvalPart::Inside(inside) => inside.insert(full_key, rest, value, levels - 1)?,
            },
        }
        Ok(())
    }

    /// Converts to an object, or to an array if all keys are numbers.
    fn into_value(self, name: &str) -> Result<Value, QmpError> {
        let value = |key: &str, part: KeyvalPart| match part {
            KeyvalPart::Text(text) => Ok(Value::String(text)),
            KeyvalPart::Inside(node) => node.into_value(key),
        };
        let is_number = |key: &String| key.bytes().all(|byte| byte.is_ascii_digit());
        if self.0.is_empty() || !self.0.keys().any(is_number) {
            let members = self.0.into_iter().map(|(key, part)| Ok((key.clone(), value(&key, part)?)));
            return members.collect::<Result<Map<_, _>, QmpError>>().map(Value::Object);
        }
        let mut items = Vec::new();
        for index in 0..self.0.len() {
            items.push(index.to_string());
        }
        let mut parts = self.0;
        let missing = |index: &String| {
            QmpError::generic(format!(
                "Parameter '{name}.{index}' is missing (numbers begin with 0, without a gap)"
            ))
        };
        let item = |index: String| value(&index, parts.remove(&index).ok_or_else(|| missing(&index))?);
        items.into_iter().map(item).collect::<Result<Vec<_>, QmpError>>().map(Value::Array)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn same(text: &str, expect: Value) {
        let Value::Object(members) = expect else { panic!("an object") };
        assert_eq!(parse_arguments(text, Some("driver")), Ok(QmpArguments::from_text(members)), "{text}");
    }

    #[track_caller]
    fn refused(text: &str, expect: &str) {
        assert_eq!(parse_arguments(text, Some("driver")).unwrap_err().to_string(), expect, "{text}");
    }

    #[test]
    fn dotted_keys_make_objects_and_arrays() {
        same("raw,node-name=a", json!({"driver": "raw", "node-name": "a"}));
        same(
            "driver=raw,file.driver=file,file.filename=a,,b=c.d,file.locking=on",
            json!({"driver": "raw", "file": {"driver": "file", "filename": "a,b=c.d", "locking": "on"}}),
        );
        same("nbd,bitmaps.1=y,bitmaps.0=x", json!({"driver": "nbd", "bitmaps": ["x", "y"]}));
        same("a=1,a=2", json!({"a": "2"}));
        same("a=", json!({"a": ""}));
        let json = parse_arguments(r#" {"size": 1, "deep": {"a": true}}"#, None).unwrap();
        let Value::Object(members) = json!({"size": 1, "deep": {"a": true}}) else { panic!("an object") };
        assert_eq!(json, QmpArguments::new(members));
    }

    #[test]
    fn contradictory_keys_are_rejected() {
        refused("a=x,a.b=y", "Parameters 'a.*' used inconsistently");
        refused("a.b=x,a=y", "Parameters 'a.*' used inconsistently");
        refused("a..b=x", "Invalid parameter 'a..b'");
        refused(".a=x", "Invalid parameter '.a'");
        refused("b.1=x", "Parameter 'b.0' is missing (numbers begin with 0, without a gap)");
        refused("b.0=x,b.c=y", "Parameter 'b.1' is missing (numbers begin with 0, without a gap)");
        refused("0=x", "begins with a number where a key is needed");
        assert!(parse_arguments("{\"a\":1,\"a\":2}", None).is_err());
        assert!(parse_arguments("[1]", None).is_err());
        let deep = "a.".repeat(100_000) + "a=1";
        assert!(parse_arguments(&deep, None).unwrap_err().to_string().starts_with("Invalid parameter"));
    }
}
