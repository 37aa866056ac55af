//! The schema of a config file (JSON Schema, draft 2020-12), for editors.
//!
//! Contains the keys, their types and words, and required keys. `weir check-config` checks ranges
//! and the rules between keys.

use serde_json::{Map, Value, json};
use settings::key::KeyType;

use super::keys::{KeyRow, KeySection, as_keys, sections};

/// File below docs/reference.
pub(super) const FILE: &str = "config.schema.json";

/// The text of the file.
pub(super) fn text() -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(&schema())? + "\n")
}

/// JSON Schema of a config file, from the tables of keys.
pub(super) fn schema() -> Value {
    let sections = sections();
    let exports: Vec<_> = sections.iter().filter(|section| section.kind.is_some()).collect();
    let mut definitions: Map<_, _> =
        sections.iter().map(|section| (section.name.to_owned(), object(section))).collect();
    let references: Vec<_> = exports.iter().map(|section| reference(section.name)).collect();
    definitions.insert("export".to_owned(), json!({ "type": "object", "oneOf": references }));
    let named = |name| json!({ "type": "object", "additionalProperties": reference(name) });
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Config file of weir",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "daemon": reference("daemon"),
            "cluster": reference("cluster"),
            "group": named("group"),
            "disk": named("disk"),
        },
        "$defs": definitions,
    })
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/$defs/{name}") })
}

fn object(section: &KeySection) -> Value {
    let mut properties: Map<_, _> =
        section.rows.iter().map(|row| (row.name.to_owned(), property(row))).collect();
    let is_required = |row: &&KeyRow| row.default == "required";
    let mut required: Vec<_> = section.rows.iter().filter(is_required).map(|row| row.name).collect();
    if let Some(kind) = section.kind {
        properties.insert("type".to_owned(), json!({ "const": kind }));
        required.insert(0, "type");
    }
    json!({
        "type": "object",
        "description": section.about,
        "additionalProperties": false,
        "properties": properties,
        "required": required,
    })
}

fn property(row: &KeyRow) -> Value {
    let help = row.meaning();
    let description = match row.default {
        "" => help,
        default => format!("{help} [default: {}]", as_keys(default)),
    };
    let value = match row.value {
        KeyType::Table => reference(row.name),
        _ => value(row.value),
    };
    let mut property = match row.is_list {
        // The reader of the file accepts a single value in place of a list of one.
        true => json!({ "anyOf": [value, { "type": "array", "minItems": 1, "items": value }] }),
        false => value,
    };
    property["description"] = description.into();
    property
}

/// Type of a value. The reader of the file accepts numbers in strings, and a number as a text.
fn value(kind: KeyType) -> Value {
    match kind {
        KeyType::Flag => json!({ "type": "boolean" }),
        KeyType::Word(values) => json!({ "enum": with_flags(values) }),
        KeyType::WordOr(values) => {
            json!({ "anyOf": [{ "enum": with_flags(values) }, { "type": ["string", "number"] }] })
        }
        KeyType::Count | KeyType::Integer | KeyType::Seconds => {
            json!({ "type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+$" })
        }
        KeyType::Time => {
            json!({ "type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+(ns|us|ms|s|m|h)?$" })
        }
        KeyType::Size => json!({
            "type": ["integer", "string"],
            "minimum": 0,
            "pattern": "^(0[xX][0-9a-fA-F]+|[0-9]+(\\.[0-9]*)?([kKmMgGtTpPeE]?[bB]?|[kKmMgGtTpPeE][iI][bB]?))$",
        }),
        KeyType::Path => json!({ "type": "string", "minLength": 1 }),
        KeyType::Text => json!({ "type": ["string", "number"] }),
        KeyType::Table => unreachable!("a table has a definition of its own"),
    }
}

/// The words, with `true` and `false` if they include `on` and `off`.
fn with_flags(values: &[&str]) -> Vec<Value> {
    let flags = [("on", true), ("off", false)].into_iter().filter(|(value, _)| values.contains(value));
    values.iter().map(|value| json!(value)).chain(flags.map(|(_, flag)| json!(flag))).collect()
}
