//! `on-event`: a process beside the daemon that delivers events, one at a time.
//!
//! ```text
//!   serve::run ─► EventRunner::start ── forks, before anything is opened ──► run: confined
//!      │                                                                  │
//!   deliver: recent events ── one, as a line of JSON ──── socket ────────►├─► command: standard input
//!            waits for its answer ◄─────────── "" or the error ───────────┘
//! ```
//!
//! The daemon cannot start programs once it is in the sandbox. This process can, and holds no
//! image, key or client's socket, because it is started before the daemon opens any.
//! `sandbox::runner` confines it.
//!
//! A target that hangs is abandoned after [`TARGET_TIMEOUT`]; a command is then killed with all its
//! descendants. Meanwhile the most recent events wait in the daemon's ring, and nothing else waits.
//!
//! Never sends an event twice, and never stores one for later.

mod command;
mod deliver;

use std::{
    env,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::Shutdown,
    os::unix::{net::UnixStream, process::CommandExt as _},
    process::{self, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use console::{CommandFailure, IN_BACKGROUND};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use settings::{EventCommand, FileOwner, ProcessSpec, SandboxMode};

/// Time for a target to process one event.
const TARGET_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the process to become ready: it may resolve a name and read certificates.
const READY_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest line in either direction, in bytes; an event has less than a tenth of it.
const MAX_LINE_BYTES: u64 = 64 << 10;
/// The hidden command of the process.
const COMMAND: &str = "on-event-runner";

/// First line of input of the process that delivers events.
#[derive(Debug, Serialize, Deserialize)]
struct RunnerOrders {
    target: String,
    user: Option<String>,
    sandboxed: bool,
}

/// The ready process.
#[derive(Debug)]
pub(crate) struct EventRunner {
    socket: UnixStream,
    target: EventCommand,
}

/// Checks the target as far as possible without running it.
///
/// # Errors
/// Returns a message with the remedy.
pub(crate) fn check(target: &EventCommand) -> anyhow::Result<()> {
    command::check(&target.arguments[0])
}

impl EventRunner {
    /// Starts the process. Call it while this process holds nothing that the child must not
    /// inherit.
    ///
    /// # Errors
    /// Fails if the process cannot be started, or cannot prepare its target.
    pub(crate) fn start(target: &EventCommand, service: &ProcessSpec) -> anyhow::Result<Self> {
        Self::spawn(target, service).with_context(|| format!("on-event: {}", shown(target)))
    }

    fn spawn(target: &EventCommand, service: &ProcessSpec) -> anyhow::Result<Self> {
        check(target)?;
        let (ours, runner_end) = UnixStream::pair()?;
        // /proc/self/exe is this very program, even if its file was replaced.
        process::Command::new("/proc/self/exe")
            .arg(COMMAND)
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(runner_end)))
            .stdout(Stdio::null())
            .stderr(if env::var_os(IN_BACKGROUND).is_some() { Stdio::null() } else { Stdio::inherit() })
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_PID")
            .env_remove("LISTEN_FDNAMES")
            // Own process group: a signal from the terminal does not reach it. It ends with the
            // daemon.
            .process_group(0)
            .spawn()
            .context("its process cannot be started")?;
        let user = service.user.as_ref().map(FileOwner::to_string);
        let orders =
            RunnerOrders { target: target.to_string(), user, sandboxed: service.sandbox != SandboxMode::Off };
        ours.set_read_timeout(Some(READY_TIMEOUT))?;
        send_line(&ours, &serde_json::to_string(&orders)?).context("its process has ended")?;
        let answer = receive_line(&mut BufReader::new(&ours)).context("its process does not answer")?;
        match answer.as_deref() {
            Some("") => Ok(Self { socket: ours, target: target.clone() }),
            Some(why) => bail!("{why}"),
            None => bail!("its process has ended"),
        }
    }
}

/// The program without its arguments, which may contain secrets.
fn shown(target: &EventCommand) -> &str {
    &target.arguments[0]
}

/// Sends a text as one line.
fn send_line(mut socket: &UnixStream, line: &str) -> io::Result<()> {
    let line = line.replace('\n', " ");
    socket.write_all(format!("{line}\n").as_bytes())
}

/// The next line; `None` once the peer has closed.
fn receive_line(socket: &mut BufReader<&UnixStream>) -> io::Result<Option<String>> {
    let mut line = String::new();
    socket.by_ref().take(MAX_LINE_BYTES).read_line(&mut line)?;
    Ok(line.strip_suffix('\n').map(str::to_owned))
}

/// Executes the daemon's orders from standard input, until end of file.
///
/// # Errors
/// Fails if standard input has no orders.
pub fn run() -> Result<(), CommandFailure> {
    // A service manager that signals all processes of a service ends the daemon, which ends this
    // one.
    let _signals = console::signals::BlockedSignals::block().context("signals cannot be blocked")?;
    let stdin = std::os::fd::AsFd::as_fd(&io::stdin()).try_clone_to_owned().context("standard input")?;
    let socket = UnixStream::from(stdin);
    let mut lines = BufReader::new(&socket);
    let orders = receive_line(&mut lines)
        .ok()
        .flatten()
        .and_then(|line| serde_json::from_str::<RunnerOrders>(&line).ok());
    let orders = orders.context("this command is internal to `weir serve --on-event`")?;
    let mut command = match prepare(&orders) {
        Ok(command) => command,
        Err(error) => {
            let _ = send_line(&socket, &format!("{error:#}"));
            return Ok(());
        }
    };
    // Later failures mean that the daemon has ended.
    let _ = send_line(&socket, "");
    while let Ok(Some(event)) = receive_line(&mut lines) {
        let result = command.run(event.as_bytes(), Instant::now() + TARGET_TIMEOUT);
        let answer = result.err().unwrap_or_default();
        if send_line(&socket, &answer).is_err() {
            break;
        }
    }
    let _ = socket.shutdown(Shutdown::Both);
    Ok(())
}

/// Checks everything that is needed, and drops all other rights.
fn prepare(orders: &RunnerOrders) -> anyhow::Result<command::OnEventCommand> {
    let target: EventCommand = orders.target.parse().map_err(anyhow::Error::msg)?;
    let user = orders.user.as_deref().map(str::parse::<FileOwner>).transpose().map_err(anyhow::Error::msg)?;
    let command = command::OnEventCommand::new(&target.arguments)?;
    sandbox::runner::confine(user.as_ref(), orders.sandboxed)?;
    Ok(command)
}

/// Encodes an event with the number of events skipped before it.
fn encode_event(mut event: Value, skipped: u64) -> String {
    if skipped > 0 {
        event["skipped"] = skipped.into();
    }
    event.to_string()
}
