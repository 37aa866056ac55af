//! JSON parser, stricter than `serde_json` alone: a duplicate key in an object is an error.
//! [`stream`](super::stream) has bounded the length and depth of a message.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

pub(super) fn parse(text: &[u8]) -> Result<Value, String> {
    serde_json::from_slice::<StrictJson>(text).map(|strict| strict.0).map_err(|error| error.to_string())
}

/// Converts a float to an integer if it is one: in JSON `10`, `10.0` and `1e1` are equal. `None`
/// for fractions, and for values beyond 2⁵³, where adjacent integers are not distinguishable.
pub fn whole_number(number: f64) -> Option<i64> {
    const MOST: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;
    (number.fract() == 0.0 && number.abs() < MOST).then_some(number as i64)
}

struct StrictJson(Value);

impl<'de> Deserialize<'de> for StrictJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictJsonVisitor).map(Self)
    }
}

struct StrictJsonVisitor;

impl<'de> Visitor<'de> for StrictJsonVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        // Clients that only have doubles send `10.0` for an integer.
        let number = whole_number(value).map(Number::from).or_else(|| Number::from_f64(value));
        number.map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(StrictJson(item)) = items.next_element()? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            // `serde_json` would keep the last value silently.
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("duplicate key '{}'", excerpt(&key))));
            }
            let StrictJson(value) = entries.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

const MAX_SHOWN: usize = 100;

/// Excerpt of a client's text for an error.
pub(super) fn excerpt(text: &str) -> String {
    // Counted in characters, so that no character is split.
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_parsed() {
        let text = br#" {"a": [1, -2, 2.5, 18446744073709551615, true, null, "\u00e9\n"], "b": {}} "#;
        let expected = json!({"a": [1, -2, 2.5, u64::MAX, true, null, "é\n"], "b": {}});
        assert_eq!(parse(text), Ok(expected));
    }

    #[test]
    fn whole_floats_are_integers() {
        let expected = json!([10, 1000, 0, -3, 9_007_199_254_740_991_u64, 1_000_000_000_000_000_u64]);
        assert_eq!(parse(b"[10.0, 1e3, -0.0, -3.0, 9007199254740991.0, 1E15]"), Ok(expected));
        for number in [0.5, 1e30, 9_007_199_254_740_992.0, f64::NAN, f64::INFINITY] {
            assert_eq!(whole_number(number), None);
        }
    }

    #[test]
    fn large_number_round_trips() {
        let value = parse(b"118446744073709551615").unwrap();
        assert_eq!(parse(value.to_string().as_bytes()), Ok(value));
    }

    #[test]
    fn duplicate_key_is_reported() {
        for text in ["{\"a\":1,\"a\":1}", "[{\"b\":{\"a\":1,\"\\u0061\":2}}]"] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.starts_with("duplicate key 'a'"), "{error}");
        }
        assert!(parse(br#"{"a":{"a":1},"b":{"a":1}}"#).is_ok());
    }

    #[test]
    fn long_key_is_truncated_in_errors() {
        let key = "ü".repeat(5000);
        let error = parse(format!("{{\"{key}\":1,\"{key}\":1}}").as_bytes()).unwrap_err();
        assert!(error.len() < 400, "{} bytes", error.len());
    }

    #[test]
    fn invalid_json_is_rejected() {
        for text in ["{\"a\":1,}", "{'a':1}", "1 2", "01", "nul", "\"\\ud800\"", "1e999", "", "[1"] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(parse(b"\"\xc3\"").is_err());
    }
}
