//! Disks and groups as JSON objects with the keys and values of the config file.
//!
//! Clients of the control socket, other hosts and the old process of an upgrade describe disks in
//! this form. The object is converted to a config file of one table and parsed as such, so that
//! both forms accept the same keys and report the same mistakes.

use std::path::Path;

use serde_json::{Map, Value};

use super::parse_with_options;
use crate::{ConfigWithOrigins, Diagnostics, DiskConfig, GroupConfig, Origin, ParsedConfig};

/// Reads the disk `name` with these keys; `export` is an array of tables. Paths are relative to
/// `directory`.
///
/// Rules between keys are not checked: see [`crate::DesiredState::of_disk`]. Returns `None` if a
/// mistake was reported.
pub fn disk_from_json(
    name: &str,
    keys: &Map<String, Value>,
    directory: &Path,
    diagnostics: &Diagnostics,
) -> Option<ConfigWithOrigins<DiskConfig>> {
    parse_table("disk", name, keys, directory, diagnostics)?.disks.pop()
}

/// Reads the group `name` with these keys, and checks its own rules. Returns `None` if a mistake
/// was reported.
pub fn group_from_json(
    name: &str,
    keys: &Map<String, Value>,
    diagnostics: &Diagnostics,
) -> Option<ConfigWithOrigins<GroupConfig>> {
    let group = parse_table("group", name, keys, Path::new(""), diagnostics)?.groups.pop()?;
    // For disks `DesiredState::of_disk` checks the name.
    diagnostics
        .ok_or_report(crate::check::check_object_name(name).map_err(|rule| group.own_origin().error(rule)));
    group.check_rules(diagnostics);
    (diagnostics.count() == 0).then_some(group)
}

fn parse_table(
    kind: &str,
    name: &str,
    keys: &Map<String, Value>,
    directory: &Path,
    diagnostics: &Diagnostics,
) -> Option<ParsedConfig> {
    // Quoting prevents injection: a name or value cannot end its string or start another table.
    let mut text = format!("[{kind}.{}]\n", quoted(name));
    for (key, value) in keys {
        match to_toml(value) {
            Ok(value) => text += &format!("{} = {value}\n", quoted(key)),
            Err(rule) => diagnostics.report(Origin::new(format!("{kind}.{name}.{key}")).error(rule)),
        }
    }
    // A value has no TOML form. Parsing the other keys would report mistakes that only follow from
    // its absence.
    if diagnostics.count() > 0 {
        return None;
    }
    let config = parse_with_options("", &text, directory, &ConfigWithOrigins::default(), diagnostics);
    (diagnostics.count() == 0).then_some(config)
}

/// Converts a value to TOML in one line.
fn to_toml(value: &Value) -> Result<String, &'static str> {
    Ok(match value {
        Value::Null => return Err("is null (remove the key, or set a value)"),
        Value::Bool(flag) => flag.to_string(),
        // TOML has 64-bit signed integers. Larger numbers and fractions are written as strings,
        // which the keys' parsers treat alike.
        Value::Number(number) if number.as_i64().is_some() => number.to_string(),
        Value::Number(number) => quoted(&number.to_string()),
        Value::String(text) => quoted(text),
        Value::Array(values) => {
            let values: Vec<_> = values.iter().map(to_toml).collect::<Result<_, _>>()?;
            format!("[{}]", values.join(", "))
        }
        Value::Object(keys) => {
            let pair = |(key, value): (&String, &Value)| Ok(format!("{} = {}", quoted(key), to_toml(value)?));
            let pairs: Vec<_> = keys.iter().map(pair).collect::<Result<_, _>>()?;
            format!("{{ {} }}", pairs.join(", "))
        }
    })
}

/// Quotes a TOML basic string. JSON's escapes are valid in TOML, but JSON leaves DEL unescaped,
/// which TOML forbids.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::KeyTable as _;

    fn disk(keys: &Value) -> Result<ConfigWithOrigins<DiskConfig>, Vec<String>> {
        let diagnostics = Diagnostics::default();
        let keys = keys.as_object().expect("an object");
        let disk = disk_from_json("vm1", keys, Path::new("/images"), &diagnostics);
        let all =
            diagnostics.finish(disk).map_err(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>());
        Ok(all?.expect("no mistakes"))
    }

    #[test]
    fn written_tables_parse_as_equal() {
        let keys = json!({
            "image": "vm1.raw", "cache": "none", "read-only": true, "iops-total": "2000", "allow": ["10.0.0.0/8"],
            "description": "a \"b\"\u{7f}\\", "weight": 200, "bps-total": 1_000_000_000_000_000_u64,
            "export": [{ "type": "ublk", "number": 3, "discard": false }, { "type": "nbd", "listen": "unix:s" }],
        });
        let config = disk(&keys).expect("a disk").into_config();
        assert_eq!(config.image.to_string(), "/images/vm1.raw");
        assert_eq!((config.settings.weight, config.exports.len()), (200, 2));
        let mut keys = Map::new();
        for key in DiskConfig::keys().iter().filter(|key| !key.is_default(&config)) {
            keys.insert(key.name.to_owned(), Value::from(&key.write(&config).expect("a value")));
        }
        assert_eq!(disk(&keys.into()).expect("a disk").into_config(), config);
    }

    #[test]
    fn all_mistakes_are_reported_by_key() {
        let errors =
            disk(&json!({ "image": "a", "cach": "none", "weight": "x", "export": [{ "type": "usb" }] }));
        let expect = [
            "disk.vm1.weight = \"x\": is not a whole number",
            "disk.vm1.export[0].type = \"usb\": is not an export type",
            "disk.vm1.cach: unknown key (did you mean \"cache\"?)",
        ];
        let errors = errors.expect_err("three mistakes");
        assert_eq!(errors.len(), expect.len(), "{errors:?}");
        for (error, expect) in errors.iter().zip(expect) {
            assert!(error.starts_with(expect), "{error}");
        }
        assert!(
            disk(&json!({ "image": null })).is_err_and(|errors| errors[0].contains("vm1.image: is null"))
        );
        assert!(disk(&json!({})).is_err_and(|errors| errors[0].contains("no image")));
    }

    #[test]
    fn names_cannot_inject_tables() {
        let diagnostics = Diagnostics::default();
        let keys = json!({ "image = \"x\"\n[daemon]": 1 });
        let read =
            disk_from_json("a]\n[b", keys.as_object().expect("an object"), Path::new(""), &diagnostics);
        assert!(read.is_none() && diagnostics.count() > 0);
        let group = group_from_json("a]\n[b", &Map::new(), &Diagnostics::default());
        assert!(group.is_none(), "a name has no control characters");
    }
}
