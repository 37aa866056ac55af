//! Session of one client, without its socket: bytes in, requests and replies out, in order.
//!
//! ```text
//!   greeting ─► negotiating ── qmp_capabilities ─► commands
//! ```
//!
//! The caller executes and answers each request before it calls [`QmpSession::advance`] again, so
//! the commands of a client run in order. Independent of all commands except the negotiation.

use serde::Serialize;
use serde_json::{Map, Value, json, value::RawValue};

use super::{
    arguments::QmpArguments,
    error::{QmpError, QmpErrorClass},
    json::excerpt,
    stream::{JsonStream, StreamItem},
};

/// Release of QEMU whose schema the commands follow; clients such as libvirt check it.
const QEMU_VERSION: (u32, u32, u32) = (10, 2, 0);

/// That release, in the form that QEMU's programs print.
pub fn qemu_release() -> String {
    let (major, minor, micro) = QEMU_VERSION;
    format!("{major}.{minor}.{micro}")
}

pub(super) const NEGOTIATE: &str = "qmp_capabilities";

pub(super) fn version() -> Value {
    let (major, minor, micro) = QEMU_VERSION;
    json!({
        "qemu": { "major": major, "minor": minor, "micro": micro },
        "package": concat!("weir ", env!("CARGO_PKG_VERSION")),
    })
}

/// Offers no capability: commands never run out of order.
pub(super) fn greeting() -> Value {
    json!({ "QMP": { "version": version(), "capabilities": [] } })
}

#[derive(Debug)]
pub(super) enum SessionStep {
    Answer(QmpReply),
    Execute(CommandCall),
}

#[derive(Debug)]
pub(super) struct CommandCall {
    pub(super) name: String,
    pub(super) arguments: QmpArguments,
    pub(super) id: RequestId,
}

/// Client's `id` of a request, by which it recognizes the reply; optional, of any type.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RequestId(Option<Value>);

impl RequestId {
    pub(super) fn answer(self, result: Result<CommandResult, QmpError>) -> QmpReply {
        let (value, error) = match result {
            Ok(reply) => (Some(reply), None),
            Err(error) => (None, Some(error.to_json())),
        };
        QmpReply { error, id: self.0, value }
    }
}

/// Result of a command.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum CommandResult {
    Value(Value),
    /// Serialized by the command.
    Text(Box<RawValue>),
}

/// Reply: one of `return` and `error`, and the client's `id`.
#[derive(Debug, Serialize)]
pub(super) struct QmpReply {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    #[serde(rename = "return", skip_serializing_if = "Option::is_none")]
    value: Option<CommandResult>,
}

#[derive(Debug, Default)]
pub(super) struct QmpSession {
    stream: JsonStream,
    negotiated: bool,
}

impl QmpSession {
    /// Consumes bytes of `input` up to the next request or reply; `None` after all are consumed.
    pub(super) fn advance(&mut self, input: &mut &[u8]) -> Option<SessionStep> {
        let item = self.stream.advance(input)?;
        Some(match item {
            StreamItem::Value(value) => self.request(value),
            StreamItem::Broken(reason) => {
                SessionStep::Answer(RequestId::default().answer(Err(QmpError::generic(reason))))
            }
        })
    }

    pub(super) fn is_negotiated(&self) -> bool {
        self.negotiated
    }

    fn request(&mut self, value: Value) -> SessionStep {
        let Value::Object(mut members) = value else {
            let error = QmpError::generic("QMP input must be a JSON object");
            return SessionStep::Answer(RequestId::default().answer(Err(error)));
        };
        // Taken first: errors carry the id, too.
        let id = RequestId(members.remove("id"));
        match read_request(members) {
            Err(error) => SessionStep::Answer(id.answer(Err(error))),
            // The only command that works without negotiation.
            Ok((name, arguments)) if name == NEGOTIATE => SessionStep::Answer(
                id.answer(self.negotiate(arguments).map(|()| CommandResult::Value(json!({})))),
            ),
            Ok((name, arguments)) if self.negotiated => {
                SessionStep::Execute(CommandCall { name, arguments, id })
            }
            Ok(_) => SessionStep::Answer(id.answer(Err(QmpError::new(
                QmpErrorClass::CommandNotFound,
                "Expecting capabilities negotiation with 'qmp_capabilities'",
            )))),
        }
    }

    fn negotiate(&mut self, mut arguments: QmpArguments) -> Result<(), QmpError> {
        if self.negotiated {
            let why = "Capabilities negotiation is already complete, command ignored";
            return Err(QmpError::new(QmpErrorClass::CommandNotFound, why));
        }
        let wanted: Vec<String> = arguments.optional("enable")?.unwrap_or_default();
        arguments.finish()?;
        if let Some(capability) = wanted.first() {
            let rule = format!("asks for '{}', which the greeting does not offer", excerpt(capability));
            return Err(QmpError::rule("enable", rule));
        }
        self.negotiated = true;
        Ok(())
    }
}

fn read_request(mut members: Map<String, Value>) -> Result<(String, QmpArguments), QmpError> {
    let member = |name: &str, rule: &str| QmpError::generic(format!("QMP input member '{name}' {rule}"));
    let name = members.remove("execute");
    let arguments = members.remove("arguments");
    if members.contains_key("exec-oob") {
        let rule = "is unexpected, because the greeting does not offer 'oob' (use 'execute')";
        return Err(member("exec-oob", rule));
    }
    if let Some(key) = members.keys().next() {
        return Err(member(&excerpt(key), "is unexpected"));
    }
    let name = match name {
        Some(Value::String(name)) => name,
        Some(_) => return Err(member("execute", "must be a string")),
        None => return Err(QmpError::generic("QMP input lacks member 'execute'")),
    };
    match arguments {
        None => Ok((name, QmpArguments::default())),
        Some(Value::Object(arguments)) => Ok((name, QmpArguments::new(arguments))),
        Some(_) => Err(member("arguments", "must be an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replies of a session; a command that would be executed is answered with its name.
    fn answers(session: &mut QmpSession, text: &str) -> Vec<Value> {
        let mut input = text.as_bytes();
        let mut answers = Vec::new();
        while let Some(step) = session.advance(&mut input) {
            let answer = match step {
                SessionStep::Answer(answer) => answer,
                SessionStep::Execute(call) => call.id.answer(Ok(CommandResult::Value(json!(call.name)))),
            };
            answers.push(serde_json::to_value(answer).unwrap());
        }
        answers
    }

    #[track_caller]
    fn check(text: &str, expected: Value) {
        let mut session = QmpSession::default();
        answers(&mut session, r#"{"execute":"qmp_capabilities"}"#);
        assert_eq!(answers(&mut session, text), [expected], "{text}");
    }

    fn error(class: &str, description: &str) -> Value {
        json!({ "error": { "class": class, "desc": description } })
    }

    #[test]
    fn commands_require_negotiation() {
        let mut session = QmpSession::default();
        let expecting =
            error("CommandNotFound", "Expecting capabilities negotiation with 'qmp_capabilities'");
        assert_eq!(answers(&mut session, r#"{"execute":"quit"}"#), [expecting]);
        assert!(!session.is_negotiated());
        let enable = r#"{"execute":"qmp_capabilities","arguments":{"enable":["oob"]}}"#;
        let refused = "Parameter 'enable' asks for 'oob', which the greeting does not offer";
        assert_eq!(answers(&mut session, enable), [error("GenericError", refused)]);
        let unexpected = r#"{"execute":"qmp_capabilities","arguments":{"x":1}}"#;
        assert_eq!(answers(&mut session, unexpected), [error("GenericError", "Parameter 'x' is unexpected")]);
        assert!(!session.is_negotiated());
        let no_capabilities = r#"{"execute":"qmp_capabilities","arguments":{"enable":[]},"id":0}"#;
        assert_eq!(answers(&mut session, no_capabilities), [json!({"return": {}, "id": 0})]);
        assert!(session.is_negotiated());
        let already_complete = "Capabilities negotiation is already complete, command ignored";
        let replies = answers(&mut session, r#"{"execute":"qmp_capabilities"}"#);
        assert_eq!(replies, [error("CommandNotFound", already_complete)]);
        assert_eq!(answers(&mut session, r#"{"execute":"quit"}"#), [json!({"return": "quit"})]);
    }

    #[test]
    fn reply_has_the_id_of_its_request() {
        let id = json!({"a": [1, 2.5, "x", null, false]});
        check(&format!(r#"{{"execute":"x","id":{id}}}"#), json!({"return": "x", "id": id}));
        check(
            r#"{"id":null}"#,
            json!({"id": null, "error": {"class": "GenericError", "desc": "QMP input lacks member 'execute'"}}),
        );
    }

    #[test]
    fn invalid_requests_have_qemus_errors() {
        let generic = |description: &str| error("GenericError", description);
        check("[1]", generic("QMP input must be a JSON object"));
        check("5 ", generic("QMP input must be a JSON object"));
        check(r#"{"execute":5}"#, generic("QMP input member 'execute' must be a string"));
        check(r#"{"execute":"x","arguments":5}"#, generic("QMP input member 'arguments' must be an object"));
        check(r#"{"execute":"x","foo":1}"#, generic("QMP input member 'foo' is unexpected"));
        check(
            r#"{"exec-oob":"x"}"#,
            generic(
                "QMP input member 'exec-oob' is unexpected, because the greeting does not offer \
                 'oob' (use 'execute')",
            ),
        );
        check(
            r#"{"execute":"x","execute":"x"}"#,
            generic("JSON parse error, duplicate key 'execute' at line 1 column 24"),
        );
    }

    #[test]
    fn request_after_a_parse_error_is_answered() {
        let mut session = QmpSession::default();
        let both = answers(&mut session, "{\"execute\": '}\n{\"execute\":\"qmp_capabilities\",\"id\":1}");
        assert_eq!(
            both,
            [error("GenericError", "JSON parse error, stray '''"), json!({"return": {}, "id": 1})]
        );
    }
}
