//! The server over real sockets, with trivial commands.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    thread,
};

use reactor::PollingMode;
use serde_json::Value;

use super::*;
use crate::qmp::error::QmpErrorClass;

/// Commands: `echo` returns its argument, `wait` yields first, `big` returns a mebibyte, `emit`
/// emits an event, `quit` stops the server.
#[derive(Debug)]
struct TestCommands {
    events: QmpEvents,
    quit: Rc<reactor::Signal>,
}

impl CommandExecutor for TestCommands {
    fn execute(&self, name: &str, mut arguments: QmpArguments) -> Result<RunningCommand, QmpError> {
        let (events, quit) = (self.events.clone(), Rc::clone(&self.quit));
        let value = arguments.optional::<Value>("value")?;
        arguments.finish()?;
        let answer = Ok(CommandResult::Value(json!(value)));
        Ok(match name {
            "echo" => Box::pin(async { answer }),
            "wait" => Box::pin(async {
                reactor::yield_now().await;
                answer
            }),
            "big" => Box::pin(async { Ok(CommandResult::Value(json!("x".repeat(1 << 20)))) }),
            "emit" => Box::pin(async move {
                events.emit("X", json!({ "data": "x".repeat(1_000_000) }));
                answer
            }),
            "quit" => Box::pin(async move {
                quit.raise();
                Ok(CommandResult::Value(json!({})))
            }),
            _ => {
                return Err(QmpError::new(
                    QmpErrorClass::CommandNotFound,
                    format!("The command {name} has not been found"),
                ));
            }
        })
    }
}

/// Runs a server, with `clients` on a thread, and stops it after they have ended.
fn serve(clients: impl FnOnce(&dyn Fn() -> QmpTestClient) + Send + 'static) {
    serve_until_quit(|connect| {
        clients(connect);
        admitted(connect).ask("quit", json!(null));
    });
}

/// As [`serve`], for clients that send `quit` themselves.
fn serve_until_quit(clients: impl FnOnce(&dyn Fn() -> QmpTestClient) + Send + 'static) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).expect("a socket");
    let thread = thread::spawn(move || {
        clients(&|| QmpTestClient::new(UnixStream::connect(&path).expect("the server listens")));
    });
    reactor::run(PollingMode::Off, async move {
        let (events, quit) = (QmpEvents::default(), Rc::new(reactor::Signal::default()));
        let commands = Rc::new(TestCommands { events: events.clone(), quit: Rc::clone(&quit) });
        let server = QmpServer::new(commands, events);
        let listening = reactor::spawn_joinable(Rc::clone(&server).listen(Fd::from(OwnedFd::from(listener))));
        quit.wait().await;
        drop(listening);
        server.stop(ShutdownCause::Quit).await;
        assert_eq!(server.clients(), 0);
    })
    .expect("io_uring works on a test machine");
    thread.join().expect("the clients saw what they expected");
}

/// Client that fails the test if a reply does not arrive.
struct QmpTestClient {
    lines: BufReader<UnixStream>,
}

impl QmpTestClient {
    fn new(socket: UnixStream) -> Self {
        socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        Self { lines: BufReader::new(socket) }
    }

    fn send(&mut self, text: &str) {
        self.lines.get_mut().write_all(text.as_bytes()).expect("the server reads");
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("an answer in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn ask(&mut self, command: &str, value: Value) -> Value {
        let mut request = json!({ "execute": command });
        if !value.is_null() {
            request["arguments"] = json!({ "value": value });
        }
        self.send(&request.to_string());
        self.line()
    }

    fn assert_ended(&mut self) {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).expect("the end");
        assert_eq!(rest, "");
    }
}

/// Client with a negotiated session; retries while the server is full.
fn admitted(connect: &dyn Fn() -> QmpTestClient) -> QmpTestClient {
    loop {
        let mut peer = connect();
        let greeting = peer.line();
        if greeting.get("QMP").is_some() {
            assert_eq!(peer.ask("qmp_capabilities", json!(null)), json!({"return": {}}));
            return peer;
        }
    }
}

#[test]
fn commands_are_answered_in_order() {
    serve(|connect| {
        let mut peer = connect();
        peer.line();
        peer.send(r#"{"execute":"qmp_capabilities"}{"execute":"wait","id":1}{"execute":"echo","id":2} {"ex"#);
        assert_eq!(peer.line(), json!({"return": {}}));
        assert_eq!(peer.line()["id"], 1);
        assert_eq!(peer.line()["id"], 2);
        peer.send(r#"ecute":"nope","id":3}"#);
        let error = json!({"class": "CommandNotFound", "desc": "The command nope has not been found"});
        assert_eq!(peer.line(), json!({"error": error, "id": 3}));
    });
}

#[test]
fn client_that_never_reads_does_not_delay_others() {
    serve(|connect| {
        let mut deaf = connect();
        deaf.send(r#"{"execute":"qmp_capabilities"}"#);
        // 50 MiB of replies that the client never reads.
        deaf.send(&r#"{"execute":"big"}"#.repeat(50));
        let mut other = admitted(connect);
        for number in 0..20 {
            assert_eq!(other.ask("echo", json!(number)), json!({"return": number}));
        }
        // More events than a client may leave unread: the first client is disconnected.
        for _ in 0..30 {
            other.send(r#"{"execute":"emit"}"#);
            assert_eq!(other.line()["event"], "X");
            assert_eq!(other.line(), json!({"return": null}));
        }
        let mut rest = Vec::new();
        // The connection ends, orderly or by a reset; both show that the server closed it.
        let _ = deaf.lines.read_to_end(&mut rest);
        assert!(rest.len() < 10 << 20, "{} bytes", rest.len());
    });
}

#[test]
fn events_require_negotiation() {
    serve(|connect| {
        let mut unnegotiated = connect();
        unnegotiated.line();
        let mut negotiated = admitted(connect);
        admitted(connect).ask("emit", json!(null));
        assert_eq!(negotiated.line()["event"], "X");
        let refused = unnegotiated.ask("echo", json!(null));
        assert_eq!(refused["error"]["class"], "CommandNotFound");
    });
}

#[test]
fn excess_client_receives_an_error() {
    serve(|connect| {
        let mut peers: Vec<_> = (0..MAX_CLIENTS).map(|_| connect()).collect();
        for peer in &mut peers {
            peer.line();
        }
        let mut last = connect();
        let error = last.line();
        assert_eq!(error["error"]["desc"], "there are 64 clients already (end one of them first)");
        last.assert_ended();
        // A disconnect frees a place.
        drop(peers.pop());
        admitted(connect);
    });
}

#[test]
fn quit_is_answered_before_the_end_is_announced() {
    serve_until_quit(|connect| {
        let mut other = admitted(connect);
        let mut peer = connect();
        peer.line();
        peer.send(r#"{"execute":"qmp_capabilities"}{"execute":"quit","id":"q"}"#);
        assert_eq!(peer.line(), json!({"return": {}}));
        assert_eq!(peer.line(), json!({"return": {}, "id": "q"}));
        for peer in [&mut peer, &mut other] {
            let event = peer.line();
            assert_eq!(event["event"], "SHUTDOWN");
            assert_eq!(event["data"], json!({"guest": false, "reason": "host-qmp-quit"}));
            peer.assert_ended();
        }
    });
}
