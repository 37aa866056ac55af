//! What a QMP server may say: an answer, a refusal, or an event.

use serde_json::Value;

#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    Return(Value),
    Error(Refusal),
    Event(Event),
}

/// Something that happened, and to what.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// Such as `BLOCK_EXPORT_DELETED`.
    pub(super) name: String,
    /// What it is about, where it says that.
    pub(super) id: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// One of QEMU's classes, such as `CommandNotFound`.
    pub(super) class: String,
    pub(super) description: String,
}

impl Answer {
    pub(super) fn read(mut message: Value) -> Option<Self> {
        let message = message.as_object_mut()?;
        if let Some(event) = message.get("event") {
            let id = message.get("data").and_then(|data| data.get("id")).and_then(Value::as_str);
            let name = event.as_str().unwrap_or_default().to_owned();
            return Some(Self::Event(Event { name, id: id.map(str::to_owned) }));
        }
        if let Some(value) = message.remove("return") {
            return Some(Self::Return(value));
        }
        let error = message.get("error")?;
        let text = |key: &str| error.get(key).and_then(Value::as_str).map(str::to_owned);
        Some(Self::Error(Refusal { class: text("class")?, description: text("desc")? }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart() {
        let read = |text: &str| Answer::read(serde_json::from_str(text).unwrap());
        assert_eq!(read(r#"{"return": {}}"#), Some(Answer::Return(Value::Object(Default::default()))));
        let event = |name: &str, id: Option<&str>| {
            Some(Answer::Event(Event { name: name.to_owned(), id: id.map(str::to_owned) }))
        };
        assert_eq!(read(r#"{"event": "SHUTDOWN", "timestamp": {}}"#), event("SHUTDOWN", None));
        let deleted = r#"{"event": "BLOCK_EXPORT_DELETED", "data": {"id": "e"}}"#;
        assert_eq!(read(deleted), event("BLOCK_EXPORT_DELETED", Some("e")));
        let refusal = Refusal { class: "GenericError".to_owned(), description: "no".to_owned() };
        let error = r#"{"error": {"class": "GenericError", "desc": "no"}}"#;
        assert_eq!(read(error), Some(Answer::Error(refusal)));
        for nonsense in ["1", "[]", "{}", r#"{"error": 1}"#, r#"{"error": {"class": "GenericError"}}"#] {
            assert_eq!(read(nonsense), None, "{nonsense}");
        }
    }
}
