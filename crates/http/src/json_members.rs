//! Parsing of a request body's members: each key once, and strings as numbers, as in
//! `weir throttle`.
//!
//! A string that would become an unintended limit, such as `"0.4"` operations, is rejected and
//! never rounded: 0 means no limit.

use std::fmt;

use control::qmp;
use policy::throttle::LimitSetting;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::Value;
use settings::{LatencySetting, QuotaSetting};

/// Members of a JSON object, in order.
pub(super) struct JsonMembers(pub(super) Vec<(String, Value)>);

impl<'de> Deserialize<'de> for JsonMembers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = JsonMembers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonMembers, A::Error> {
                let mut members: Vec<(String, Value)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    // Ambiguous, so it is an error. A linear search is enough for a short body.
                    if members.iter().any(|(before, _)| *before == key) {
                        return Err(A::Error::custom(format!("{key:?} is given twice")));
                    }
                    members.push((key, value));
                }
                Ok(JsonMembers(members))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

/// Converts strings and whole floating-point numbers to integers; returns other values unchanged.
///
/// # Errors
/// Returns the rule that the string breaks.
pub(super) fn parse_number(key: &str, value: Value) -> Result<Value, String> {
    // Settings of latency and quotas are texts and numbers in the form of the config file.
    if LatencySetting::from_name(key).is_some() || QuotaSetting::from_name(key).is_some() {
        return Ok(value);
    }
    let text = match value {
        Value::String(text) => text,
        Value::Number(number) if number.is_f64() => {
            let integer = number.as_f64().and_then(qmp::whole_number);
            return Ok(integer.map_or(Value::Number(number), Value::from));
        }
        other => return Ok(other),
    };
    // Sizes accept units (`10M`), counts do not.
    let read = match LimitSetting::from_name(key) {
        Some(LimitSetting::BurstFor) => settings::whole_seconds(&text),
        Some(setting) if setting.is_size() => settings::size(&text),
        None if key == "bps-reservation" => settings::size(&text),
        _ => settings::count(&text),
    };
    read.map(Value::from).map_err(|rule| format!("{key}={text} {rule}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_take_no_units_and_no_fractions() {
        let parsed = |key, text: &str| parse_number(key, json!(text));
        for key in ["iops-total", "iops-total-max-length", "weight", "iops-reservation", "watermark"] {
            assert_eq!(parsed(key, "300"), Ok(json!(300)), "{key}");
            for text in ["1.5", "8M", "7KB"] {
                let rule = parsed(key, text).unwrap_err();
                assert!(rule.contains("a count takes no suffix and no fraction"), "{rule}");
            }
            for text in ["0.4", "-1", "lots", ""] {
                let rule = parsed(key, text).unwrap_err();
                assert!(rule.ends_with("is not a whole number of 0 or more"), "{rule}");
            }
        }
    }

    #[test]
    fn whole_floats_are_integers() {
        for (value, expected) in
            [(json!(10.0), json!(10)), (json!(1e3), json!(1000)), (json!(-1.0), json!(-1))]
        {
            assert_eq!(parse_number("iops-total", value), Ok(expected));
        }
        for value in [json!(0.4), json!(1e30), json!(true)] {
            assert_eq!(
                parse_number("iops-total", value.clone()),
                Ok(value),
                "the value itself is refused later"
            );
        }
    }

    #[test]
    fn burst_for_takes_a_time() {
        for value in ["30s", "30"] {
            assert_eq!(parse_number("burst-for", json!(value)), Ok(json!(30)));
        }
        let rule = parse_number("burst-for", json!("1.5s")).unwrap_err();
        assert_eq!(rule, "burst-for=1.5s has a fraction of a second (use whole seconds)");
    }

    #[test]
    fn sizes_take_units() {
        for key in ["bps-total", "bps-read-max", "bps-reservation", "iops-size"] {
            assert_eq!(parse_number(key, json!("1.5K")), Ok(json!(1536)), "{key}");
        }
        let rule = parse_number("bps-total", json!("0.4")).unwrap_err();
        assert!(rule.starts_with("bps-total=0.4 is less than a byte"), "{rule}");
    }
}
