//! Messages of QMP: a command of the client; a response, an error or an event of the server.

use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

/// A command of the client.
#[derive(Serialize)]
pub(super) struct QmpRequest<'a> {
    execute: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<Value>,
}

impl QmpRequest<'_> {
    /// A command as a line. Arguments without members are omitted.
    pub(super) fn line(execute: &str, arguments: Value) -> String {
        let has_members = arguments.as_object().is_some_and(|arguments| !arguments.is_empty());
        let arguments = has_members.then_some(arguments);
        serde_json::to_string(&QmpRequest { execute, arguments }).expect("all keys are strings") + "\n"
    }
}

#[derive(Debug)]
pub(super) enum QmpServerMessage {
    Return(Box<RawValue>),
    Error(QmpServerError),
    Event(QmpServerEvent),
}

/// An event and the object it concerns.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QmpServerEvent {
    /// Name of the event, such as `BLOCK_EXPORT_DELETED`.
    pub(super) name: String,
    /// Id of the object, if the event has one.
    pub(super) id: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct QmpServerError {
    /// One of QEMU's error classes, such as `CommandNotFound`.
    pub(super) class: String,
    pub(super) description: String,
}

/// Members of a message that this client reads; `return` stays text.
#[derive(Deserialize)]
struct RawQmpMessage {
    event: Option<Value>,
    data: Option<Value>,
    #[serde(rename = "return")]
    value: Option<Box<RawValue>>,
    error: Option<Value>,
}

impl QmpServerMessage {
    /// Parses a message; `None` if the line is JSON but not a QMP message.
    ///
    /// # Errors
    /// If the line is not JSON.
    pub(super) fn read(line: &[u8]) -> Result<Option<Self>, serde_json::Error> {
        // serde deserializes a struct from a list as well, and its error would not distinguish a
        // wrong type from malformed JSON.
        let is_object = line.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
        if !is_object {
            return serde_json::from_slice::<Value>(line).map(|_| None);
        }
        let RawQmpMessage { event, data, value, error } = serde_json::from_slice(line)?;
        if let Some(event) = event {
            let id = data.as_ref().and_then(|data| data.get("id")).and_then(Value::as_str);
            let name = event.as_str().unwrap_or_default().to_owned();
            return Ok(Some(Self::Event(QmpServerEvent { name, id: id.map(str::to_owned) })));
        }
        if let Some(value) = value {
            return Ok(Some(Self::Return(value)));
        }
        let text = |key: &str| error.as_ref()?.get(key).and_then(Value::as_str).map(str::to_owned);
        let refusal = text("class").zip(text("desc"));
        Ok(refusal.map(|(class, description)| Self::Error(QmpServerError { class, description })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_distinguished() {
        let read = |text: &str| QmpServerMessage::read(text.as_bytes()).unwrap();
        assert!(
            matches!(read(r#"{"return": {"a": 1}}"#), Some(QmpServerMessage::Return(text)) if text.get() == r#"{"a": 1}"#)
        );
        let event = |text: &str| match read(text) {
            Some(QmpServerMessage::Event(QmpServerEvent { name, id })) => (name, id),
            other => panic!("{other:?}"),
        };
        assert_eq!(event(r#"{"event": "SHUTDOWN", "timestamp": {}}"#), ("SHUTDOWN".to_owned(), None));
        let deleted = r#"{"event": "BLOCK_EXPORT_DELETED", "data": {"id": "e"}}"#;
        assert_eq!(event(deleted), ("BLOCK_EXPORT_DELETED".to_owned(), Some("e".to_owned())));
        let error = r#"{"error": {"class": "GenericError", "desc": "no"}}"#;
        let Some(QmpServerMessage::Error(refusal)) = read(error) else { panic!("{error}") };
        assert_eq!((refusal.class.as_str(), refusal.description.as_str()), ("GenericError", "no"));
        for nonsense in ["1", "[]", "{}", r#"{"error": 1}"#, r#"{"error": {"class": "GenericError"}}"#] {
            assert!(read(nonsense).is_none(), "{nonsense}");
        }
        for broken in ["", "{", "[1", "x"] {
            assert!(QmpServerMessage::read(broken.as_bytes()).is_err(), "{broken}");
        }
    }
}
