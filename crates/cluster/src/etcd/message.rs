//! Messages of etcd's gateway: protocol buffers as JSON. Bytes are base64, 64-bit numbers are
//! strings, and zero values are omitted.

use openssl::base64;
use serde_json::{Value, json};

/// Key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EtcdKeyValue {
    pub(crate) key: String,
    pub(crate) value: Vec<u8>,
    pub(crate) create_revision: i64,
    pub(crate) mod_revision: i64,
    /// Lease that deletes the key; 0 for none.
    pub(crate) lease: i64,
}

/// One key, or all keys with a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyRange {
    Key(String),
    Prefix(String),
}

/// Change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EtcdEvent {
    Put(EtcdKeyValue),
    Deleted(String),
}

/// Condition of a transaction.
#[derive(Clone, Debug)]
pub(crate) enum TransactionCondition {
    /// The key does not exist.
    Absent(String),
    /// The key was created at this revision.
    Created(String, i64),
    /// The key has this value.
    Value(String, Vec<u8>),
    /// The key was last changed at this revision.
    Changed(String, i64),
    /// No key of the range changed after this revision.
    UnchangedSince(KeyRange, i64),
}

/// Operation of a transaction.
#[derive(Clone, Debug)]
pub(crate) enum EtcdOperation {
    Put {
        key: String,
        value: Vec<u8>,
        lease: Option<i64>,
    },
    Get(KeyRange),
    /// Keys without their values.
    Keys(KeyRange),
    Delete(KeyRange),
}

pub(super) fn encode(bytes: &[u8]) -> String {
    base64::encode_block(bytes)
}

/// Decodes base64; empty if it is invalid or absent.
pub(super) fn decode(value: &Value) -> Vec<u8> {
    value.as_str().and_then(|text| base64::decode_block(text).ok()).unwrap_or_default()
}

/// Parses a 64-bit number, which is a string in JSON.
pub(super) fn number(value: &Value) -> Option<i64> {
    match value {
        Value::String(text) => text.parse().ok(),
        other => other.as_i64(),
    }
}

impl EtcdKeyValue {
    /// Entries of an array with UTF-8 keys. weir writes no other keys.
    pub(super) fn all(values: &Value) -> Vec<Self> {
        values.as_array().into_iter().flatten().filter_map(Self::read).collect()
    }

    pub(super) fn read(value: &Value) -> Option<Self> {
        let revision = |name: &str| number(&value[name]).unwrap_or(0);
        Some(Self {
            key: String::from_utf8(decode(&value["key"])).ok().filter(|key| !key.is_empty())?,
            value: decode(&value["value"]),
            create_revision: revision("create_revision"),
            mod_revision: revision("mod_revision"),
            lease: revision("lease"),
        })
    }
}

impl KeyRange {
    /// `range_end` is the first key after the prefix.
    pub(super) fn body(&self) -> Value {
        match self {
            Self::Key(key) => json!({ "key": encode(key.as_bytes()) }),
            Self::Prefix(prefix) => {
                let mut end = prefix.clone().into_bytes();
                // Keys are text, so no byte is 0xff and the addition cannot overflow.
                if let Some(last) = end.last_mut() {
                    *last += 1;
                }
                json!({ "key": encode(prefix.as_bytes()), "range_end": encode(&end) })
            }
        }
    }
}

impl TransactionCondition {
    pub(super) fn body(&self) -> Value {
        let condition = |range: &KeyRange, result: &str, target: &str, name: &str, value: Value| {
            let mut body = range.body();
            body["result"] = json!(result);
            body["target"] = json!(target);
            body[name] = value;
            body
        };
        let key = |key: &String| KeyRange::Key(key.clone());
        match self {
            Self::Absent(name) => condition(&key(name), "EQUAL", "CREATE", "create_revision", json!("0")),
            Self::Created(name, revision) => {
                condition(&key(name), "EQUAL", "CREATE", "create_revision", json!(revision.to_string()))
            }
            Self::Value(name, value) => {
                condition(&key(name), "EQUAL", "VALUE", "value", json!(encode(value)))
            }
            Self::Changed(name, revision) => {
                condition(&key(name), "EQUAL", "MOD", "mod_revision", json!(revision.to_string()))
            }
            Self::UnchangedSince(range, revision) => {
                // etcd has LESS but no LESS-OR-EQUAL.
                condition(range, "LESS", "MOD", "mod_revision", json!((revision + 1).to_string()))
            }
        }
    }
}

impl EtcdOperation {
    pub(crate) fn put(key: &str, value: &[u8], lease: Option<i64>) -> Self {
        Self::Put { key: key.to_owned(), value: value.to_vec(), lease }
    }

    pub(super) fn body(&self) -> Value {
        match self {
            Self::Put { .. } => json!({ "request_put": self.put_body() }),
            Self::Get(range) => json!({ "request_range": range.body() }),
            Self::Keys(range) => {
                let mut body = range.body();
                body["keys_only"] = json!(true);
                json!({ "request_range": body })
            }
            Self::Delete(range) => json!({ "request_delete_range": range.body() }),
        }
    }

    pub(super) fn put_body(&self) -> Value {
        let Self::Put { key, value, lease } = self else { return Value::Null };
        let mut body = json!({ "key": encode(key.as_bytes()), "value": encode(value) });
        if let Some(lease) = lease {
            body["lease"] = json!(lease.to_string());
        }
        body
    }
}

impl EtcdEvent {
    pub(super) fn read(value: &Value) -> Option<Self> {
        let key_value = EtcdKeyValue::read(&value["kv"])?;
        Some(if value["type"] == "DELETE" { Self::Deleted(key_value.key) } else { Self::Put(key_value) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_end_follows_the_prefix() {
        let body = KeyRange::Prefix("/weir/".to_owned()).body();
        assert_eq!(body, json!({ "key": encode(b"/weir/"), "range_end": encode(b"/weir0") }));
    }

    #[test]
    fn messages_parse_and_garbage_is_ignored() {
        let sent = json!({ "key": encode(b"k"), "value": encode(b"v"), "create_revision": "3", "mod_revision": "7" });
        let read = EtcdKeyValue::read(&sent).unwrap();
        let expect = EtcdKeyValue {
            key: "k".to_owned(),
            value: b"v".to_vec(),
            create_revision: 3,
            mod_revision: 7,
            lease: 0,
        };
        assert_eq!(read, expect);
        assert_eq!(EtcdEvent::read(&json!({ "kv": sent })), Some(EtcdEvent::Put(expect)));
        let deleted = json!({ "type": "DELETE", "kv": { "key": encode(b"k") } });
        assert_eq!(EtcdEvent::read(&deleted), Some(EtcdEvent::Deleted("k".to_owned())));
        for garbage in
            [json!(null), json!({ "key": 7 }), json!({ "key": "?" }), json!({ "key": encode(b"\xff") })]
        {
            assert_eq!(EtcdKeyValue::read(&garbage), None, "{garbage}");
        }
    }

    #[test]
    fn conditions_are_encoded() {
        let body = TransactionCondition::UnchangedSince(KeyRange::Key("a".to_owned()), 7).body();
        let expect = json!({ "key": "YQ==", "result": "LESS", "target": "MOD", "mod_revision": "8" });
        assert_eq!(body, expect);
    }
}
