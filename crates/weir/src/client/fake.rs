//! A daemon for tests: a socket that sends scripted responses and records the commands.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    thread::{self, JoinHandle},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::ControlAddress;

pub(crate) const GREETING: &str = r#"{"QMP": {"version": {"package": "weir 0.1.0"}, "capabilities": []}}"#;

pub(crate) struct FakeDaemon {
    _directory: TempDir,
    target: ControlAddress,
    thread: JoinHandle<Vec<Value>>,
}

impl FakeDaemon {
    /// Responds to the commands after `qmp_capabilities` with `responses`, then closes the
    /// connection.
    pub(crate) fn start(greeting: &'static str, responses: Vec<String>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = thread::spawn(move || serve(listener.accept().unwrap().0, greeting, responses));
        Self { _directory: directory, target: ControlAddress(path), thread }
    }

    pub(crate) fn returning(value: &Value) -> Self {
        Self::start(GREETING, vec![json!({ "return": value }).to_string()])
    }

    pub(crate) fn target(&self) -> &ControlAddress {
        &self.target
    }

    /// All received commands, after the client has disconnected.
    pub(crate) fn commands(self) -> Vec<Value> {
        self.thread.join().unwrap()
    }
}

fn serve(mut stream: UnixStream, greeting: &str, responses: Vec<String>) -> Vec<Value> {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut requests = Vec::new();
    // A client may disconnect before the last response.
    let mut send = |text: &str| stream.write_all(format!("{text}\n").as_bytes()).is_ok();
    send(greeting);
    for response in [r#"{"return": {}}"#.to_owned()].into_iter().chain(responses) {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || !send(&response) {
            break;
        }
        requests.push(serde_json::from_str(&line).unwrap());
    }
    requests
}
