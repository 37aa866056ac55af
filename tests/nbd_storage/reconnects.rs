//! Servers that disconnect and return with fewer features, without data that was not flushed, or
//! rejecting the requests that were in flight.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
};

use serde_json::json;

use super::{BackgroundNbdServer, half_filled, in_front, uri};
use crate::harness::{
    DEADLINE, MIB, Scratch, Serve, WEIR, Weir, assert_contains,
    operator::{find, socket, wait_until},
    text,
};

const READ: u16 = 0;
const WRITE: u16 = 1;
const CMD_DISC: u16 = 2;
const FLUSH: u16 = 3;
const ZEROES: u16 = 6;
/// Flags of an export: flush, FUA and write zeroes.
const DEFAULT_FLAGS: u16 = 1 | 4 | 8 | 1 << 6;
const WITH_FLUSH: u16 = 4;
const READ_ONLY: u16 = 2;
const MULTI_CONN: u16 = 1 << 8;
const FAST_ZERO: u16 = 1 << 11;

/// Behaviour of a server.
#[derive(Clone, Copy)]
struct ScriptedServerBehaviour {
    flags: u16,
    size: u64,
    /// Minimum, preferred and maximum block size.
    blocks: [u32; 3],
    /// A command that is rejected, with its error.
    refuses: Option<(u16, u32)>,
    /// A command that is carried out, with its reply delayed until the test permits it.
    holds: Option<u16>,
    /// A command on which the server disconnects.
    breaks: Option<u16>,
}

const DEFAULT_BEHAVIOUR: ScriptedServerBehaviour = ScriptedServerBehaviour {
    flags: DEFAULT_FLAGS,
    size: MIB,
    blocks: [1, 4096, 32 << 20],
    refuses: None,
    holds: None,
    breaks: None,
};

#[derive(Default)]
struct ScriptedServerState {
    disk: Vec<u8>,
    /// Open connections to the export, with their numbers.
    streams: Vec<(usize, UnixStream)>,
    next_number: usize,
    /// Number of the connection whose request is held.
    held: Option<usize>,
    may_answer: bool,
    stopped: bool,
    /// Number of requests, except the last one of each connection.
    request_count: u64,
}

#[derive(Default)]
struct ScriptedServerShared {
    state: Mutex<ScriptedServerState>,
    changed: Condvar,
}

impl ScriptedServerShared {
    fn lock(&self) -> MutexGuard<'_, ScriptedServerState> {
        self.state.lock().unwrap()
    }

    fn wait_until(
        &self,
        mut condition: impl FnMut(&mut ScriptedServerState) -> bool,
    ) -> MutexGuard<'_, ScriptedServerState> {
        let waiting = self.changed.wait_timeout_while(self.lock(), DEADLINE, |state| !condition(state));
        let (state, waited) = waiting.unwrap();
        assert!(!waited.timed_out(), "the condition did not become true");
        state
    }
}

/// A server in this process, with its disk in memory. It sends simple replies only.
struct ScriptedNbdServer {
    at: PathBuf,
    shared: Arc<ScriptedServerShared>,
    listening: thread::JoinHandle<()>,
}

impl ScriptedNbdServer {
    fn start(at: &Path, disk: Vec<u8>, behaviour: ScriptedServerBehaviour) -> Self {
        let _ = fs::remove_file(at);
        let listener = UnixListener::bind(at).unwrap();
        let shared = Arc::new(ScriptedServerShared {
            state: Mutex::new(ScriptedServerState { disk, ..ScriptedServerState::default() }),
            ..ScriptedServerShared::default()
        });
        let thread_shared = Arc::clone(&shared);
        let listening = thread::spawn(move || {
            let mut serving = Vec::new();
            while let Ok((stream, _)) = listener.accept() {
                if thread_shared.lock().stopped {
                    break;
                }
                let session_shared = Arc::clone(&thread_shared);
                serving.push(thread::spawn(move || drop(serve(stream, &session_shared, behaviour))));
            }
            drop(listener);
            serving.into_iter().for_each(|serving| serving.join().expect("its client follows the protocol"));
        });
        Self { at: at.to_owned(), shared, listening }
    }

    /// Disconnects and ends; returns the content of its disk.
    fn stop(self) -> Vec<u8> {
        {
            let mut state = self.shared.lock();
            state.stopped = true;
            state.streams.iter().for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Both)));
        }
        self.shared.changed.notify_all();
        drop(UnixStream::connect(&self.at));
        let _ = fs::remove_file(&self.at);
        self.listening.join().expect("its client follows the protocol");
        std::mem::take(&mut self.shared.lock().disk)
    }
}

/// Serves a connection until it ends.
fn serve(
    mut stream: UnixStream,
    shared: &ScriptedServerShared,
    behaviour: ScriptedServerBehaviour,
) -> std::io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        stream.read_exact(&mut vec![0; u32::from_be_bytes(header[12..].try_into().unwrap()) as usize])?;
        let reply = |kind: u32, data: &[u8]| {
            let head = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
            [&0x0003_e889_0455_65a9_u64.to_be_bytes()[..], &head, data].concat()
        };
        if option != 7 {
            stream.write_all(&reply(0x8000_0001, &[]))?;
            continue;
        }
        let export = [&[0, 0][..], &behaviour.size.to_be_bytes(), &behaviour.flags.to_be_bytes()].concat();
        let blocks = [&[0, 3][..], &behaviour.blocks.map(u32::to_be_bytes).concat()].concat();
        stream.write_all(&[reply(3, &export), reply(3, &blocks), reply(1, &[])].concat())?;
        break;
    }
    let number = {
        let mut state = shared.lock();
        state.next_number += 1;
        let number = state.next_number;
        state.streams.push((number, stream.try_clone()?));
        number
    };
    shared.changed.notify_all();
    let outcome = serve_requests(&mut stream, shared, behaviour, number);
    shared.lock().streams.retain(|(other, _)| *other != number);
    shared.changed.notify_all();
    outcome
}

fn serve_requests(
    stream: &mut UnixStream,
    shared: &ScriptedServerShared,
    behaviour: ScriptedServerBehaviour,
    number: usize,
) -> std::io::Result<()> {
    loop {
        let mut header = [0; 28];
        stream.read_exact(&mut header)?;
        let command = u16::from_be_bytes(header[6..8].try_into().unwrap());
        let offset = u64::from_be_bytes(header[16..24].try_into().unwrap()) as usize;
        let length = u32::from_be_bytes(header[24..].try_into().unwrap()) as usize;
        if command == CMD_DISC || behaviour.breaks == Some(command) {
            return Ok(());
        }
        let mut data = vec![0; if command == WRITE { length } else { 0 }];
        stream.read_exact(&mut data)?;
        let range = offset..offset + length;
        let is_too_long = command < CMD_DISC && length > behaviour.blocks[2] as usize;
        let error = match behaviour.refuses {
            _ if is_too_long => 22,
            Some((refused, error)) if refused == command => error,
            _ => 0,
        };
        let mut state = shared.lock();
        state.request_count += 1;
        match command {
            _ if error != 0 => {}
            READ => data = state.disk[range].to_vec(),
            WRITE => state.disk[range].copy_from_slice(&std::mem::take(&mut data)),
            ZEROES => state.disk[range].fill(0),
            FLUSH => assert_ne!(behaviour.flags & WITH_FLUSH, 0, "the server does not support flush"),
            _ => {}
        }
        if behaviour.holds == Some(command) && state.held.is_none() {
            state.held = Some(number);
            shared.changed.notify_all();
            state = shared.changed.wait_while(state, |state| !state.may_answer && !state.stopped).unwrap();
        }
        drop(state);
        let head = [0x6744_6698, error].map(u32::to_be_bytes).concat();
        let data = if error == 0 { &data[..] } else { &[] };
        stream.write_all(&[&head, &header[8..16], data].concat())?;
    }
}

fn is_connected(scratch: &Scratch, expected: bool) {
    wait_until(scratch, |status| find(status, "disks", "front")["server"]["connected"] == expected);
}

fn start_in_front(scratch: &Scratch, at: &Path, more: &[&str]) -> Weir {
    in_front(scratch, &uri(at, ""), &[&["-f", "raw", "--reconnect-delay", "1m"], more].concat())
}

/// A request is in flight when the server disconnects; the next server rejects it.
fn rejected_after_reconnect(command: u16, errno: u32, request: &str, name: &str) {
    let (scratch, empty) = (Scratch::new(), vec![0; MIB as usize]);
    let at = scratch.socket("back");
    let behaviour = ScriptedServerBehaviour { flags: DEFAULT_FLAGS | FAST_ZERO, ..DEFAULT_BEHAVIOUR };
    let first =
        ScriptedNbdServer::start(&at, empty, ScriptedServerBehaviour { holds: Some(command), ..behaviour });
    let weir = start_in_front(&scratch, &at, &[]);
    let script = format!(
        "import errno\nh.flush()\ntry:\n    {request}\n    raise SystemExit('it was not refused')\n\
         except nbd.Error as e:\n    assert e.errnum == errno.{name}, e\nh.flush()"
    );
    let second = thread::scope(|scope| {
        let client = scope.spawn(|| weir.nbdsh("front", &script));
        drop(first.shared.wait_until(|state| state.held.is_some()));
        let disk = first.stop();
        let second = ScriptedNbdServer::start(
            &at,
            disk,
            ScriptedServerBehaviour { refuses: Some((command, errno)), ..behaviour },
        );
        client.join().expect("a client may fail only in this request");
        second
    });
    weir.nbdsh("front", "h.flush()");
    weir.stop();
    second.stop();
}

#[test]
fn resent_request_that_fails_affects_only_its_client() {
    rejected_after_reconnect(ZEROES, 95, "h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO)", "EOPNOTSUPP");
    rejected_after_reconnect(WRITE, 28, "h.pwrite(b'z' * 4096, 0)", "ENOSPC");
}

#[test]
fn request_that_breaks_every_connection_fails() {
    let (scratch, disk) = (Scratch::new(), vec![0; MIB as usize]);
    let at = scratch.socket("back");
    let server = ScriptedNbdServer::start(
        &at,
        disk,
        ScriptedServerBehaviour { breaks: Some(READ), ..DEFAULT_BEHAVIOUR },
    );
    let weir = in_front(&scratch, &uri(&at, ""), &["-f", "raw", "--reconnect-delay", "2s"]);
    let expect_error = "import errno\ntry:\n    h.pread(4096, 0)\n    raise SystemExit('it was answered')\n\
                   except nbd.Error as e:\n    assert e.errnum == errno.EIO, e";
    weir.nbdsh("front", expect_error);
    // Reconnects after 0.2, 0.4, and then 0.5 s each.
    let connections = server.shared.lock().next_number;
    assert!(connections <= 8, "{connections} connections");
    weir.nbdsh("front", "h.pwrite(b'x' * 4096, 0)\nh.flush()");
    weir.stop();
    server.stop();
}

#[test]
fn eshutdown_reconnects_to_the_next_server() {
    let (scratch, disk) = (Scratch::new(), vec![7; MIB as usize]);
    let at = scratch.socket("back");
    let shutting_down = ScriptedNbdServer::start(
        &at,
        disk,
        ScriptedServerBehaviour { refuses: Some((READ, 108)), ..DEFAULT_BEHAVIOUR },
    );
    let weir = start_in_front(&scratch, &at, &[]);
    let second = thread::scope(|scope| {
        let reading = scope.spawn(|| weir.nbdsh("front", "assert h.pread(4096, 0) == b'\\x07' * 4096"));
        weir.wait_for_log("the server is shutting down");
        let second = ScriptedNbdServer::start(&at, shutting_down.stop(), DEFAULT_BEHAVIOUR);
        reading.join().expect("it waits for the server");
        second
    });
    weir.stop();
    second.stop();
}

#[test]
fn acknowledged_writes_wait_for_a_server_that_accepts_them() {
    let (scratch, empty) = (Scratch::new(), vec![0; MIB as usize]);
    let at = scratch.socket("back");
    let first = ScriptedNbdServer::start(&at, empty.clone(), DEFAULT_BEHAVIOUR);
    let weir = start_in_front(&scratch, &at, &[]);
    weir.nbdsh("front", "h.pwrite(b'a' * 4096, 0)");
    first.stop();
    let second = ScriptedNbdServer::start(
        &at,
        empty.clone(),
        ScriptedServerBehaviour { refuses: Some((WRITE, 28)), ..DEFAULT_BEHAVIOUR },
    );
    weir.wait_for_log("it rejects the replay of unflushed writes that it had acknowledged");
    is_connected(&scratch, false);
    second.stop();
    let third = ScriptedNbdServer::start(&at, empty, DEFAULT_BEHAVIOUR);
    weir.nbdsh("front", "assert h.pread(4096, 0) == b'a' * 4096\nh.flush()");
    weir.stop();
    assert!(third.stop()[..4096].iter().all(|&byte| byte == b'a'));
}

#[test]
fn smaller_maximum_after_a_reconnect_splits_requests() {
    let (scratch, empty) = (Scratch::new(), vec![0; MIB as usize]);
    let at = scratch.socket("back");
    let first = ScriptedNbdServer::start(&at, empty.clone(), DEFAULT_BEHAVIOUR);
    let weir = start_in_front(&scratch, &at, &[]);
    weir.nbdsh("front", "h.pwrite(b'a' * 262144, 4096)");
    first.stop();
    // The second server has an empty disk, and does not support write zeroes.
    let flags = DEFAULT_FLAGS & !(1 << 6);
    let second = ScriptedNbdServer::start(
        &at,
        empty,
        ScriptedServerBehaviour { flags, blocks: [1, 4096, 64 << 10], ..DEFAULT_BEHAVIOUR },
    );
    weir.nbdsh(
        "front",
        "assert h.pread(262144, 4096) == b'a' * 262144\n\
         h.pwrite(b'b' * 262144, 500000)\n\
         h.zero(100000, 5000)\n\
         h.flush()\n\
         assert h.pread(262144, 500000) == b'b' * 262144",
    );
    weir.stop();
    let disk = second.stop();
    let is = |range: std::ops::Range<usize>, expect: u8| disk[range].iter().all(|&byte| byte == expect);
    assert!(is(4096..5000, b'a') && is(5000..105_000, 0) && is(105_000..266_240, b'a'));
    assert!(is(500_000..762_144, b'b') && is(762_144..MIB as usize, 0));
}

#[test]
fn incompatible_server_is_not_used_after_a_reconnect() {
    let (scratch, mut disk) = (Scratch::new(), vec![0; MIB as usize]);
    let at = scratch.socket("back");
    // The first server has more features than the later ones need to have.
    let mut server = ScriptedNbdServer::start(&at, disk.clone(), DEFAULT_BEHAVIOUR);
    let weir = start_in_front(&scratch, &at, &[]);
    for (byte, behaviour, why) in [
        (
            'a',
            ScriptedServerBehaviour { flags: DEFAULT_FLAGS & !WITH_FLUSH, ..DEFAULT_BEHAVIOUR },
            "it no longer supports flushes",
        ),
        (
            'b',
            ScriptedServerBehaviour { flags: DEFAULT_FLAGS | READ_ONLY, ..DEFAULT_BEHAVIOUR },
            "the export is read-only now",
        ),
        (
            'c',
            ScriptedServerBehaviour { size: MIB - 4096, ..DEFAULT_BEHAVIOUR },
            "the export has 1044480 bytes now, but the disk has 1048576",
        ),
        (
            'd',
            ScriptedServerBehaviour { blocks: [512, 4096, 1 << 20], ..DEFAULT_BEHAVIOUR },
            "its minimum block is 512 bytes now",
        ),
    ] {
        weir.nbdsh("front", &format!("h.pwrite(b'{byte}' * 4096, 0)"));
        // A server like the first one, without the data that was not flushed.
        server.stop();
        let unfit = ScriptedNbdServer::start(&at, disk.clone(), behaviour);
        weir.wait_for_log(why);
        is_connected(&scratch, false);
        assert_eq!(unfit.shared.lock().request_count, 0, "{why}");
        unfit.stop();
        server = ScriptedNbdServer::start(
            &at,
            disk.clone(),
            ScriptedServerBehaviour { size: 2 * MIB, ..DEFAULT_BEHAVIOUR },
        );
        server.shared.lock().disk.resize(2 * MIB as usize, 0);
        weir.nbdsh("front", &format!("assert h.pread(4096, 0) == b'{byte}' * 4096\nh.flush()"));
        disk = server.stop();
        disk.truncate(MIB as usize);
        server = ScriptedNbdServer::start(&at, disk.clone(), DEFAULT_BEHAVIOUR);
        is_connected(&scratch, true);
    }
    weir.nbdsh("front", "assert h.pread(4096, 0) == b'd' * 4096");
    weir.stop();
    server.stop();
}

#[test]
fn late_replies_of_an_old_connection_are_ignored() {
    let scratch = Scratch::new();
    let at = scratch.socket("back");
    let behaviour = ScriptedServerBehaviour {
        flags: DEFAULT_FLAGS | MULTI_CONN,
        holds: Some(ZEROES),
        ..DEFAULT_BEHAVIOUR
    };
    let server = ScriptedNbdServer::start(&at, vec![0; MIB as usize], behaviour);
    let weir = start_in_front(&scratch, &at, &["--workers", "2"]);
    // Clients of both workers, each of which then has a connection. Then zeroes over unflushed
    // data.
    let script = "clients = [nbd.NBD() for _ in range(6)]\nfor c in clients:\n    \
                  c.connect_uri(arguments[0])\n    c.pread(512, 0)\nh.pwrite(b'w' * 4096, \
                  0)\nh.zero(4096, 0)\nassert h.pread(4096, 0) == bytes(4096)\nh.flush()";
    thread::scope(|scope| {
        let client = scope.spawn(|| weir.nbdsh("front", script));
        let holder = {
            let state = server.shared.wait_until(|state| state.held.is_some() && state.streams.len() > 1);
            let holder = state.held.unwrap();
            let other_streams = state.streams.iter().filter(|(number, _)| *number != holder);
            other_streams.for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Both)));
            holder
        };
        wait_until(&scratch, |status| find(status, "disks", "front")["server"]["reconnections"] == json!(1));
        {
            let mut state = server.shared.lock();
            assert!(
                state.disk[..4096].iter().all(|&byte| byte == b'w'),
                "the unflushed write was not repeated"
            );
            assert!(
                state.streams.iter().any(|(number, _)| *number == holder),
                "the connection of the held request was closed"
            );
            state.may_answer = true;
        }
        server.shared.changed.notify_all();
        client.join().expect("the zeroes are there");
    });
    weir.stop();
    assert!(server.stop()[..4096].iter().all(|&byte| byte == 0));
}

#[test]
fn tiny_maximum_is_rejected_and_a_small_one_is_cheap() {
    let scratch = Scratch::new();
    let at = scratch.socket("back");
    for max_block in [1, 512, 2048] {
        let server = ScriptedNbdServer::start(
            &at,
            vec![0; MIB as usize],
            ScriptedServerBehaviour { blocks: [1, 1, max_block], ..DEFAULT_BEHAVIOUR },
        );
        let stderr = Serve::new(&scratch).args(["-f", "raw"]).arg(uri(&at, "")).fails();
        assert_contains(&stderr, &["its maximum payload is smaller than 4096 bytes"]);
        server.stop();
    }
    let behaviour = ScriptedServerBehaviour { size: 64 * MIB, blocks: [1, 4096, 4096], ..DEFAULT_BEHAVIOUR };
    let server = ScriptedNbdServer::start(&at, vec![7; 64 * MIB as usize], behaviour);
    let weir = start_in_front(&scratch, &at, &["--memory", "128M"]);
    let before = weir.resident_bytes();
    weir.nbdsh("front", "assert h.pread(32 << 20, 4096) == b'\\x07' * (32 << 20)");
    assert!(weir.resident_bytes() < before + 160 * MIB, "{} bytes", weir.resident_bytes());
    weir.stop();
    server.stop();
}

#[test]
fn requests_of_other_workers_end_when_the_only_connection_breaks() {
    let scratch = Scratch::new();
    let (file, at) = (half_filled(&scratch), scratch.socket("back"));
    let arguments = ["--filter=multi-conn", "file", text(&file), "multi-conn-mode=disable"];
    let mut server = Some(BackgroundNbdServer::nbdkit(&scratch, &at, &arguments));
    let weir = start_in_front(&scratch, &at, &["--workers", "3"]);
    let stop = scratch.path("stop");
    let script = format!(
        "import os\nwhile not os.path.exists({:?}):\n    for at in range(64):\n        \
         h.pwrite(b'x' * 4096, at * 4096)",
        text(&stop)
    );
    thread::scope(|scope| {
        let clients: Vec<_> = (0..6).map(|_| scope.spawn(|| weir.nbdsh("front", &script))).collect();
        let writes =
            |status: &serde_json::Value| find(status, "disks", "front")["writes"]["requests"].as_u64();
        for round in 1..=6_u64 {
            wait_until(&scratch, |status| writes(status) > Some(1000 * round));
            server.take().unwrap().crash();
            server = Some(BackgroundNbdServer::nbdkit(&scratch, &at, &arguments));
            wait_until(&scratch, |status| {
                find(status, "disks", "front")["server"]["reconnections"].as_u64() >= Some(round)
            });
        }
        fs::write(&stop, "").unwrap();
        clients.into_iter().for_each(|client| client.join().expect("every request ends"));
    });
    weir.stop();
}

#[test]
fn open_waits_for_a_late_server() {
    let scratch = Scratch::new();
    let (file, at) = (half_filled(&scratch), scratch.socket("back"));
    // The first server disconnects immediately; then the server with the disk starts.
    let listener = UnixListener::bind(&at).unwrap();
    let starting = thread::scope(|scope| {
        let starting =
            scope.spawn(|| in_front(&scratch, &uri(&at, ""), &["-f", "raw", "--open-timeout", "1m"]));
        drop(listener.accept().unwrap());
        drop(listener);
        let server = BackgroundNbdServer::nbdkit(&scratch, &at, &["file", text(&file)]);
        (starting.join().expect("it starts once the server is there"), server)
    });
    let (weir, server) = starting;
    weir.nbdsh("front", "h.pwrite(b'l' * 4096, 0)\nh.flush()");
    weir.stop();
    server.crash();
    assert!(fs::read(&file).unwrap()[..4096].iter().all(|&byte| byte == b'l'));
}

#[test]
fn removal_reports_pending_writes() {
    let scratch = Scratch::new();
    let at = scratch.socket("back");
    let server = ScriptedNbdServer::start(
        &at,
        vec![0; MIB as usize],
        ScriptedServerBehaviour { holds: Some(FLUSH), ..DEFAULT_BEHAVIOUR },
    );
    let weir = start_in_front(&scratch, &at, &["memory:1M", "--name", "back"]);
    weir.nbdsh("back", "h.pwrite(b'a' * 4096, 0)");
    let remove = |disk: &str| {
        let mut command = Command::new(WEIR);
        command.args(["disk", "remove", disk, "--qmp", &socket(&scratch)]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut removing = remove("back");
    drop(server.shared.wait_until(|state| state.held.is_some()));
    let mut line = String::new();
    BufReader::new(removing.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    let expect = format!("back: waiting until {} is closed (Ctrl-C ends only this command", uri(&at, ""));
    assert_contains(&line, &[&expect]);
    // Removing a different disk prints nothing and does not wait.
    let output = remove("front").wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]));
    wait_until(&scratch, |status| status["disks"].as_array().is_some_and(Vec::is_empty));
    removing.kill().unwrap();
    removing.wait().unwrap();
    server.shared.lock().may_answer = true;
    server.shared.changed.notify_all();
    drop(server.shared.wait_until(|state| state.streams.is_empty()));
    weir.stop();
    server.stop();
}
