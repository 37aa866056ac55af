//! Harness of fuzz targets and tests for bytes of a client, with the properties that hold for any
//! input. Commands run on disks in memory, on a simulated reactor.

use std::rc::Rc;

use block::layer::throttle::{GroupSettings, ThrottleGroup};
use serde_json::Value;

use super::{
    arguments::QmpArguments,
    command::CommandTable,
    commands::TABLE,
    error::{QmpError, QmpErrorClass},
    json,
    server::CommandExecutor as _,
    session::{CommandResult, QmpSession, SessionStep},
    stream::{JsonStream, MAX_MESSAGE_BYTES, StreamItem},
};
use crate::registry::{Registry, RunningDisk};

/// Commands with effects outside the process: they open files and listen on sockets.
const EXTERNAL_COMMANDS: [&str; 6] = [
    "blockdev-add",
    "block-export-add",
    "block_resize",
    "nbd-server-start",
    "nbd-server-stop",
    "x-weir-add-disk",
];
/// Maximum length of an error for any input: client text is quoted in part only.
const MAX_ERROR_BYTES: usize = 4096;

/// Checks that bytes parse to the same values however they are split. The first byte sets the size
/// of the pieces.
pub fn qmp_stream(data: &[u8]) {
    let Some((&piece, text)) = data.split_first() else { return };
    let unsplit = stream_items(text, text.len().max(1));
    let split = stream_items(text, usize::from(piece).max(1));
    assert_eq!(unsplit, split, "in pieces of {piece}");
    for item in &unsplit {
        match item {
            // Serializing and parsing a value again yields the same value.
            StreamItem::Value(value) => {
                assert_eq!(json::parse(value.to_string().as_bytes()).as_ref(), Ok(value));
            }
            StreamItem::Broken(why) => assert!(why.len() < MAX_ERROR_BYTES, "{} bytes", why.len()),
        }
    }
}

fn stream_items(text: &[u8], piece: usize) -> Vec<StreamItem> {
    let mut stream = JsonStream::default();
    let mut items = Vec::new();
    for mut input in text.chunks(piece) {
        while let Some(item) = stream.advance(&mut input) {
            items.push(item);
        }
        assert!(stream.buffered_bytes() <= MAX_MESSAGE_BYTES);
    }
    items
}

/// Checks that every request of a session has one well-formed reply, and that the running state
/// stays consistent.
pub fn qmp_session(data: &[u8]) {
    let text = [br#"{"execute":"qmp_capabilities"}"#, data].concat();
    reactor::sim::run(0, async move {
        let registry = registry();
        let commands = CommandTable { table: TABLE, registry: Rc::clone(&registry) };
        let mut session = QmpSession::default();
        let mut input = &text[..];
        while let Some(step) = session.advance(&mut input) {
            let answer = match step {
                SessionStep::Answer(answer) => answer,
                SessionStep::Execute(call) if EXTERNAL_COMMANDS.contains(&call.name.as_str()) => continue,
                SessionStep::Execute(call) => {
                    let result = execute(&commands, &call.name, call.arguments).await;
                    call.id.answer(result)
                }
            };
            check_answer(&serde_json::to_value(answer).expect("all keys are strings"));
        }
        check_registry(&registry, &commands).await;
    });
}

async fn execute(
    commands: &CommandTable,
    name: &str,
    arguments: QmpArguments,
) -> Result<CommandResult, QmpError> {
    commands.execute(name, arguments)?.await
}

/// Two disks, one in a nested group.
fn registry() -> Rc<Registry> {
    let registry = Registry::new(None, Rc::new(|_| ()));
    let outer = ThrottleGroup::new("outer", GroupSettings::default(), None).expect("no settings");
    let inner = ThrottleGroup::new("inner", GroupSettings::default(), Some(&outer)).expect("no settings");
    for group in [&outer, &inner] {
        registry.add_group(group).expect("a new name");
    }
    for (name, group) in [("a", Some(&inner)), ("b", None)] {
        registry.add_disk(RunningDisk::in_memory(name, group)).expect("a new name");
    }
    registry
}

/// Checks for exactly one of `return` and `error`, an optional `id`, and nothing else; an error has
/// a known class and a bounded length.
fn check_answer(answer: &Value) {
    let members = answer.as_object().expect("an object");
    assert!(members.keys().all(|key| ["return", "error", "id"].contains(&key.as_str())), "{answer}");
    assert_ne!(members.contains_key("return"), members.contains_key("error"), "{answer}");
    let Some(error) = members.get("error") else { return };
    let classes = [
        QmpErrorClass::Generic,
        QmpErrorClass::CommandNotFound,
        QmpErrorClass::DeviceNotFound,
        QmpErrorClass::DeviceNotActive,
    ]
    .map(QmpErrorClass::name);
    assert!(classes.contains(&error["class"].as_str().unwrap_or_default()), "{answer}");
    let description = error["desc"].as_str().expect("a text");
    assert!(!description.is_empty() && description.len() < MAX_ERROR_BYTES, "{answer}");
}

/// Checks that limits are valid and every query succeeds.
async fn check_registry(registry: &Rc<Registry>, commands: &CommandTable) {
    for group in registry.groups.all() {
        group.settings().limits.validate().expect("limits in force are valid");
    }
    for running in registry.disks.all() {
        running.disk.throttle().settings().limits.validate().expect("limits in force are valid");
        running.disk.prefetch().settings().validate().expect("settings in force are valid");
    }
    for question in [
        "query-block",
        "query-named-block-nodes",
        "query-blockstats",
        "query-commands",
        "x-weir-query-status",
    ] {
        execute(commands, question, QmpArguments::default()).await.expect("an answer");
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    /// Fragments of sessions, valid and invalid.
    const MARKS: [&str; 18] = [
        "{", "}", "[", "]", ",", ":", "\"", "\\", " ", "\n", "\u{1}", "null", "true", "1", "-1", "1.5",
        "1e99", "é",
    ];
    const WORDS: [&str; 5] =
        ["18446744073709551615", "\"execute\":", "\"arguments\":", "\"id\":7", "{\"execute\":\""];
    /// Complete requests, one per line.
    const REQUESTS: &str = r#"
{"execute":"query-block"}
{"execute":"quit"}
{"execute":"nope"}
{"execute":"qom-list","arguments":{"path":"/objects"}}
{"execute":"qom-get","arguments":{"path":"inner","property":"limits"}}
{"execute":"qom-set","arguments":{"path":"inner","property":"limits","value":{"iops-total":5}}}
{"execute":"qom-set","arguments":{"path":"outer","property":"x-weir-weight","value":0}}
{"execute":"object-add","arguments":{"qom-type":"throttle-group","id":"g","x-weir-parent":"inner","x-weir-iops-reservation":3}}
{"execute":"object-del","arguments":{"id":"g"}}
{"execute":"block_set_io_throttle","arguments":{"device":"a","bps":0,"bps_rd":0,"bps_wr":0,"iops":9,"iops_rd":0,"iops_wr":0}}
{"execute":"block_set_io_throttle","arguments":{"id":"b","bps":5,"bps_rd":0,"bps_wr":0,"iops":9,"iops_rd":0,"iops_wr":0,"group":"new"}}
{"execute":"block_set_io_throttle","arguments":{"id":"b","bps":0,"bps_rd":0,"bps_wr":0,"iops":0,"iops_rd":0,"iops_wr":0}}
{"execute":"x-weir-set","arguments":{"name":"a","group":"g","iops-reservation":2}}
{"execute":"x-weir-set","arguments":{"name":"b","group":"inner","iops-reservation":4,"weight":7}}
{"execute":"x-weir-set","arguments":{"name":"a","group":""}}
{"execute":"x-weir-set","arguments":{"name":"inner","watermark":90,"bps-read":1}}
{"execute":"x-weir-set","arguments":{"name":"a","prefetch":"on","prefetch-window-min":4194304}}
{"execute":"x-weir-set","arguments":{"name":"b","prefetch":"off","prefetch-window-max":65536,"prefetch-memory":262144}}
{"execute":"x-weir-add-group","arguments":{"name":"h","keys":{"group":"inner","iops-total":"2K"}}}
{"execute":"x-weir-add-group","arguments":{"name":"..","keys":{"watermark":101,"weights":[null]}}}
{"execute":"object-del","arguments":{"id":"h"}}
{"execute":"x-weir-query-status"}
"#;

    fn piece() -> impl Strategy<Value = &'static str> {
        prop_oneof![18 => select(&MARKS[..]), 5 => select(&WORDS[..]), 23 => request()]
    }

    fn request() -> impl Strategy<Value = &'static str> {
        select(REQUESTS.trim().lines().collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn stream_parses_in_any_pieces(piece: u8, pieces in vec(piece(), 0..40), tail in vec(any::<u8>(), 0..20)) {
            qmp_stream(&[&[piece], pieces.concat().as_bytes(), &tail].concat());
        }

        #[test]
        fn session_survives_any_input(pieces in vec(piece(), 0..40)) {
            qmp_session(pieces.concat().as_bytes());
        }

        #[test]
        fn session_survives_commands_in_any_order(pieces in vec(request(), 0..60)) {
            qmp_session(pieces.concat().as_bytes());
        }
    }
}
