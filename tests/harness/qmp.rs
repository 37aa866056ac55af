//! A QMP client: one line per message, and every wait is bounded.
//!
//! Events that arrive between replies are queued in order.

use std::{
    collections::VecDeque,
    io::{BufRead as _, BufReader, IoSlice, Read as _, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _, RawFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};

use super::DEADLINE;

pub(crate) struct Qmp {
    lines: BufReader<UnixStream>,
    events: VecDeque<Value>,
}

impl Qmp {
    #[track_caller]
    pub(crate) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket has a timeout");
        stream.set_write_timeout(Some(DEADLINE)).expect("a socket has a timeout");
        Self { lines: BufReader::new(stream), events: VecDeque::new() }
    }

    #[track_caller]
    pub(crate) fn negotiated(path: &Path) -> Self {
        let mut client = Self::connect(path);
        let greeting = client.message();
        assert!(greeting["QMP"]["version"]["qemu"]["major"].is_u64(), "{greeting}");
        let mut reply = client.command_reply("qmp_capabilities", json!({}));
        let by_weir =
            greeting["QMP"]["version"]["package"].as_str().is_some_and(|name| name.starts_with("weir"));
        if reply.get("QMP").is_some() && !by_weir {
            // On a busy host qemu-storage-daemon 7.2 was observed to send its greeting twice.
            reply = client.next_reply();
        }
        assert_eq!(reply["return"], json!({}), "{reply}");
        client
    }

    /// Socket, for passing descriptors.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.lines.get_ref().as_raw_fd()
    }

    #[track_caller]
    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.lines.get_mut().write_all(bytes.as_ref()).expect("the server reads");
    }

    #[track_caller]
    pub(crate) fn message(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a message in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("no message: {error}: {line:?}"))
    }

    #[track_caller]
    pub(crate) fn next_reply(&mut self) -> Value {
        loop {
            let message = self.message();
            if message.get("event").is_none() {
                return message;
            }
            self.events.push_back(message);
        }
    }

    #[track_caller]
    pub(crate) fn event(&mut self, name: &str) -> Value {
        loop {
            let event = self.events.pop_front().unwrap_or_else(|| self.message());
            if event["event"] == name {
                assert!(event["timestamp"]["seconds"].as_u64() > Some(1_700_000_000), "{event}");
                return event["data"].clone();
            }
        }
    }

    /// Number of events of this type received before the last reply.
    pub(crate) fn count_events(&self, name: &str) -> usize {
        self.events.iter().filter(|event| event["event"] == name).count()
    }

    #[track_caller]
    pub(crate) fn command_reply(&mut self, command: &str, arguments: Value) -> Value {
        self.send(json!({ "execute": command, "arguments": arguments }).to_string());
        self.next_reply()
    }

    /// Sends a command with a descriptor; returns the reply.
    #[track_caller]
    pub(crate) fn command_with_descriptor(
        &mut self,
        descriptor: impl AsFd,
        command: &str,
        arguments: &Value,
    ) -> Value {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        let descriptors = [descriptor.as_fd().as_raw_fd()];
        let control = [ControlMessage::ScmRights(&descriptors)];
        let bytes = [IoSlice::new(line.as_bytes())];
        let sent = sendmsg::<()>(self.descriptor(), &bytes, &control, MsgFlags::empty(), None);
        assert_eq!(sent, Ok(line.len()));
        self.next_reply()
    }

    #[track_caller]
    pub(crate) fn command(&mut self, command: &str, arguments: Value) -> Value {
        let mut reply = self.command_reply(command, arguments);
        assert!(reply.get("return").is_some(), "{command}: {reply}");
        reply["return"].take()
    }

    /// Asserts that the command fails; returns class and description of the error.
    #[track_caller]
    pub(crate) fn command_error(&mut self, command: &str, arguments: Value) -> (String, String) {
        let reply = self.command_reply(command, arguments);
        let text = |key: &str| reply["error"][key].as_str().unwrap_or_default().to_owned();
        assert!(reply.get("error").is_some(), "{command} should have failed: {reply}");
        (text("class"), text("desc"))
    }

    /// Number of bytes until the server closes the connection.
    pub(crate) fn drain(mut self) -> usize {
        let mut rest = Vec::new();
        // A reset counts as an end as well.
        let _ = self.lines.read_to_end(&mut rest);
        rest.len()
    }
}
