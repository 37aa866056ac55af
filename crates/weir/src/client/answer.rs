//! What a QMP server may say: an answer, a refusal, or an event.

use serde_json::Value;

#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    Return(Value),
    Error(Refusal),
    Event,
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
        if message.contains_key("event") {
            return Some(Self::Event);
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
        assert_eq!(read(r#"{"event": "SHUTDOWN", "timestamp": {}}"#), Some(Answer::Event));
        let refusal = Refusal { class: "GenericError".to_owned(), description: "no".to_owned() };
        let error = r#"{"error": {"class": "GenericError", "desc": "no"}}"#;
        assert_eq!(read(error), Some(Answer::Error(refusal)));
        for nonsense in ["1", "[]", "{}", r#"{"error": 1}"#, r#"{"error": {"class": "GenericError"}}"#] {
            assert_eq!(read(nonsense), None, "{nonsense}");
        }
    }
}
