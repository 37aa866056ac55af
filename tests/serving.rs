//! The daemon from outside: how it starts, what it says, how it ends. Each test runs the real program.
//!
//! Nothing here sleeps: what is waited for is a line of the log, a byte on a socket, or the end of the process.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::net::{UnixDatagram, UnixListener, UnixStream},
    process::Command,
};

use nix::sys::signal::Signal;

use crate::harness::plain::{Daemon, Scratch, failure, weir};

/// The first bytes of every NBD server.
fn greeting(mut socket: impl std::io::Read) -> [u8; 16] {
    let mut bytes = [0; 16];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const READ: u16 = 0;
/// A command that no specification knows, so that its answer comes at once.
const UNKNOWN: u16 = 0x7fff;

/// A connection past the handshake, in the oldest style, with simple replies.
fn connected(path: &std::path::Path, export: &str) -> UnixStream {
    let mut socket = UnixStream::connect(path).unwrap();
    assert_eq!(&greeting(&socket), GREETING);
    socket.read_exact(&mut [0; 2]).unwrap();
    // Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME.
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT");
    bytes.extend(1_u32.to_be_bytes());
    bytes.extend(u32::try_from(export.len()).unwrap().to_be_bytes());
    bytes.extend(export.as_bytes());
    socket.write_all(&bytes).unwrap();
    socket.read_exact(&mut [0; 10]).unwrap();
    socket
}

/// Sends a request for the first byte.
fn request(socket: &mut UnixStream, command: u16, cookie: u64) {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(0_u64.to_be_bytes());
    bytes.extend(1_u32.to_be_bytes());
    socket.write_all(&bytes).unwrap();
}

/// The cookie and error of the next reply.
fn reply(socket: &mut UnixStream) -> (u64, u32) {
    let mut bytes = [0; 16];
    socket.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..4], 0x6744_6698_u32.to_be_bytes());
    let cookie = u64::from_be_bytes(bytes[8..].try_into().unwrap());
    (cookie, u32::from_be_bytes(bytes[4..8].try_into().unwrap()))
}

#[test]
fn it_serves_until_asked_to_end_and_leaves_nothing_behind() {
    let scratch = Scratch::new("serves");
    let (socket, pid) = (scratch.path("s"), scratch.path("pid"));
    let mut daemon = Daemon::start(weir().args(["serve", "memory:1G", "--name", "vm 1"]).args([
        "--nbd".into(),
        format!("unix:{}", socket.display()),
        "--pid-file".into(),
        pid.display().to_string(),
    ]));
    assert!(
        daemon.ready.ends_with(&format!("exports=nbd+unix:///vm%201?socket={}", socket.display())),
        "{}",
        daemon.ready
    );
    assert_eq!(fs::read_to_string(&pid).unwrap(), format!("{}\n", daemon.id()));
    assert_eq!(&greeting(UnixStream::connect(&socket).unwrap()), GREETING);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
    assert!(!socket.exists() && !pid.exists());
}

#[test]
fn sigint_ends_it_and_sighup_does_not() {
    let mut daemon = Daemon::start(weir().args(["serve", "null:1G", "--nbd", "localhost:0"]));
    let port = daemon.ready.rsplit_once("localhost:").unwrap().1.split('/').next().unwrap();
    assert_eq!(&greeting(TcpStream::connect(("localhost", port.parse().unwrap())).unwrap()), GREETING);
    daemon.signal(Signal::SIGHUP);
    daemon.line_with("SIGHUP ignored");
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn what_is_in_flight_is_finished_first() {
    let scratch = Scratch::new("inflight");
    let mut daemon = Daemon::start(
        weir().args(["serve", "memory:1M", "--delay", "read=5s", "--nbd"]).arg(scratch.address("s")),
    );
    let mut client = connected(&scratch.path("s"), "memory");
    request(&mut client, READ, 1);
    // Its answer says that the read has been taken in.
    request(&mut client, UNKNOWN, 2);
    assert_eq!(reply(&mut client), (2, 22));
    daemon.signal(Signal::SIGTERM);
    assert_eq!(reply(&mut client), (1, 0));
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let scratch = Scratch::new("twice");
    let mut daemon = Daemon::start(
        weir().args(["serve", "memory:1M", "--delay", "read=3600s", "--nbd"]).arg(scratch.address("s")),
    );
    let mut client = connected(&scratch.path("s"), "memory");
    request(&mut client, READ, 1);
    request(&mut client, UNKNOWN, 2);
    assert_eq!(reply(&mut client), (2, 22));
    daemon.signal(Signal::SIGTERM);
    daemon.line_with("stopping");
    daemon.signal(Signal::SIGTERM);
    daemon.line_with("weir: SIGTERM: ended at once, as asked twice");
    assert_eq!(daemon.wait(), Some(1));
}

#[test]
fn a_socket_left_by_a_killed_daemon_is_replaced_and_one_in_use_is_not() {
    let scratch = Scratch::new("stale");
    let serve = || {
        let mut command = weir();
        command.args(["serve", "null:1M", "--nbd"]).arg(scratch.address("s"));
        command
    };
    let mut first = Daemon::start(&mut serve());
    first.signal(Signal::SIGKILL);
    assert_eq!(first.wait(), None);
    assert!(scratch.path("s").exists());
    let _second = Daemon::start(&mut serve());
    let refused = format!(
        "weir: unix:{}: in use: another program listens there (stop it, or choose another path)\n",
        scratch.path("s").display()
    );
    assert_eq!(failure(&mut serve()), (Some(1), refused));
    UnixStream::connect(scratch.path("s")).unwrap();
}

#[test]
fn sockets_of_the_service_manager_are_taken_and_it_is_told() {
    let scratch = Scratch::new("activated");
    let (path, notify) = (scratch.path("s"), scratch.path("notify"));
    let listener = UnixListener::bind(&path).unwrap();
    let manager = UnixDatagram::bind(&notify).unwrap();
    // The shell moves the socket to where the protocol wants it, as a service manager does.
    let script = "exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" serve null:1M";
    let mut daemon = Daemon::start(
        Command::new("sh")
            .args(["-c", script, env!("CARGO_BIN_EXE_weir")])
            .stdin(std::os::fd::OwnedFd::from(listener.try_clone().unwrap()))
            .env("NOTIFY_SOCKET", &notify),
    );
    assert!(
        daemon.ready.ends_with(&format!("nbd+unix:///null?socket={}", path.display())),
        "{}",
        daemon.ready
    );
    let told = || {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..length]).trim().to_owned()
    };
    assert_eq!(told(), "READY=1");
    assert_eq!(&greeting(UnixStream::connect(&path).unwrap()), GREETING);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(told(), "STOPPING=1");
    assert_eq!(daemon.wait(), Some(0));
    assert!(path.exists(), "the socket is its maker's");
    drop(UnixStream::connect(&path).unwrap());
    listener.accept().expect("and still listens");
}

#[test]
fn a_config_file_serves_disks_from_its_own_directory() {
    let scratch = Scratch::new("config");
    fs::write(scratch.path("vm1.raw"), [7; 4096]).unwrap();
    let text = "[daemon]\nnbd = \"unix:all\"\n[disk.vm1]\nimage = \"vm1.raw\"\n[disk.vm2]\nimage = \"null:1M\"\n\
                export = [{ type = \"nbd\", listen = \"unix:two\" }]\n";
    fs::write(scratch.path("weir.toml"), text).unwrap();
    let mut daemon = Daemon::start(weir().args(["serve", "--config"]).arg(scratch.path("weir.toml")));
    let mut client = connected(&scratch.path("all"), "vm1");
    request(&mut client, READ, 9);
    assert_eq!(reply(&mut client), (9, 0));
    let mut byte = [0];
    client.read_exact(&mut byte).unwrap();
    assert_eq!(byte, [7]);
    connected(&scratch.path("two"), "vm2");
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn failures_have_status_1_and_say_what_to_do() {
    let scratch = Scratch::new("failures");
    let config = scratch.path("weir.toml");
    fs::write(&config, "[disk.vm1]\nimage = \"null:1\"\ncahce = \"none\"\n").unwrap();
    let expect =
        format!("weir: {}:3: disk.vm1.cahce: unknown key (did you mean \"cache\"?)\n", config.display());
    assert_eq!(failure(weir().args(["serve", "--config"]).arg(&config)), (Some(1), expect));
    let (status, text) = failure(weir().args(["serve", "/nonexistent/vm1.raw"]));
    assert_eq!(status, Some(1));
    assert!(text.starts_with("weir: /nonexistent/vm1.raw: ") && text.ends_with(")\n"), "{text}");
    let (status, text) =
        failure(weir().args(["serve", "null:1", "--tls", "on", "--tls-psk", "/nonexistent/keys"]));
    assert_eq!(status, Some(1));
    assert!(text.starts_with("weir: TLS: /nonexistent/keys: No such file"), "{text}");
}

#[test]
fn wrong_use_has_status_2() {
    let (status, text) = failure(weir().args(["serve", "vm1.raw", "--iops-totl", "5"]));
    assert_eq!(status, Some(2));
    assert!(text.starts_with("weir: unexpected argument '--iops-totl' found"), "{text}");
    let contradiction = weir().args(["serve", "null:1", "--iops-total-max", "5"]).output().unwrap();
    assert_eq!(contradiction.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&contradiction.stderr),
        "weir: --iops-total-max 5: is set without iops-total; set iops-total too\n"
    );
    let (status, text) = failure(&mut weir());
    assert_eq!(status, Some(2));
    assert!(text.starts_with("weir: 'weir' requires a subcommand"), "{text}");
    let version = weir().arg("--version").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&version.stdout), concat!("weir ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn the_log_speaks_json_if_asked() {
    let scratch = Scratch::new("json");
    let daemon = Daemon::start(
        weir().args(["serve", "null:1M", "--log-format", "json", "--nbd"]).arg(scratch.address("s")),
    );
    assert!(
        daemon.ready.starts_with('{') && daemon.ready.contains("\"message\":\"ready\""),
        "{}",
        daemon.ready
    );
}
