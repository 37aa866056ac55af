//! `on-event` at work: a process beside the daemon that hands events on, one at a time.
//!
//! ```text
//!   serve::run ─► Runner::start ── forks, before anything is opened ──► run: confined
//!      │                                                                  │
//!   deliver: the last events ── one, as a line of JSON ── socket ────────►├─► command: standard input
//!            waits for its answer ◄─────────── "" or the error ───────────┘
//! ```
//!
//! The daemon cannot start programs once it is in the sandbox. This process can, and has no image,
//! no key and no socket of a client: it is started before the daemon has any. `sandbox::runner`
//! confines it.
//!
//! A target that hangs is given up after [`PATIENCE`]; a command is ended then, with all that it
//! has started. Meanwhile events wait in the daemon's ring, the last of them, and nothing else
//! waits.
//!
//! Never sends an event twice, and never keeps one for later.

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
use console::{Failure, IN_BACKGROUND};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use settings::{OnEvent, Owner, Sandbox, Service};

/// How long a target may take for one event.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the process may take to be ready: it may look a name up, and read certificates.
const TO_BE_READY: Duration = Duration::from_secs(15);
/// Bytes of a line either way: an event has less than a tenth of it.
const MOST_LINE: u64 = 64 << 10;
/// The hidden command that it is.
const COMMAND: &str = "on-event-runner";

/// What it is told first.
#[derive(Debug, Serialize, Deserialize)]
struct Orders {
    target: String,
    user: Option<String>,
    sandboxed: bool,
}

/// The process, ready.
#[derive(Debug)]
pub(crate) struct Runner {
    socket: UnixStream,
    target: OnEvent,
}

/// Whether there is what events are to be handed to, as far as that can be known without trying.
///
/// # Errors
/// With what to do about it.
pub(crate) fn check(target: &OnEvent) -> anyhow::Result<()> {
    command::check(&target.words[0])
}

impl Runner {
    /// Starts it. To be called while this process has nothing that another should not have.
    ///
    /// # Errors
    /// If it cannot be started, or cannot do what it is for.
    pub(crate) fn start(target: &OnEvent, service: &Service) -> anyhow::Result<Self> {
        Self::spawn(target, service).with_context(|| format!("on-event: {}", shown(target)))
    }

    fn spawn(target: &OnEvent, service: &Service) -> anyhow::Result<Self> {
        check(target)?;
        let (ours, theirs) = UnixStream::pair()?;
        // This very program, even if its file was replaced.
        process::Command::new("/proc/self/exe")
            .arg(COMMAND)
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(if env::var_os(IN_BACKGROUND).is_some() { Stdio::null() } else { Stdio::inherit() })
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_PID")
            .env_remove("LISTEN_FDNAMES")
            // What ends the daemon at a terminal is not for it: it ends with the daemon.
            .process_group(0)
            .spawn()
            .context("its process cannot be started")?;
        let user = service.user.as_ref().map(Owner::to_string);
        let orders = Orders { target: target.to_string(), user, sandboxed: service.sandbox != Sandbox::Off };
        ours.set_read_timeout(Some(TO_BE_READY))?;
        say(&ours, &serde_json::to_string(&orders)?).context("its process has ended")?;
        let answer = hear(&mut BufReader::new(&ours)).context("its process does not answer")?;
        match answer.as_deref() {
            Some("") => Ok(Self { socket: ours, target: target.clone() }),
            Some(why) => bail!("{why}"),
            None => bail!("its process has ended"),
        }
    }
}

/// The program without its arguments, which may contain secrets.
fn shown(target: &OnEvent) -> &str {
    &target.words[0]
}

/// A line, which has no other in it.
fn say(mut socket: &UnixStream, line: &str) -> io::Result<()> {
    let line = line.replace('\n', " ");
    socket.write_all(format!("{line}\n").as_bytes())
}

/// The next line; none once the other is gone.
fn hear(socket: &mut BufReader<&UnixStream>) -> io::Result<Option<String>> {
    let mut line = String::new();
    socket.by_ref().take(MOST_LINE).read_line(&mut line)?;
    Ok(line.strip_suffix('\n').map(str::to_owned))
}

/// Does what a daemon says on standard input, until that ends.
///
/// # Errors
/// If nobody is there who says what to do.
pub fn run() -> Result<(), Failure> {
    // A service manager that ends all of a service's processes ends the daemon, and that this one.
    let _signals = console::signals::Signals::block().context("signals cannot be blocked")?;
    let stdin = std::os::fd::AsFd::as_fd(&io::stdin()).try_clone_to_owned().context("standard input")?;
    let socket = UnixStream::from(stdin);
    let mut lines = BufReader::new(&socket);
    let orders = hear(&mut lines).ok().flatten().and_then(|line| serde_json::from_str::<Orders>(&line).ok());
    let orders = orders.context("this is a part of `weir serve --on-event`, and nothing by itself")?;
    let mut command = match prepare(&orders) {
        Ok(command) => command,
        Err(error) => {
            let _ = say(&socket, &format!("{error:#}"));
            return Ok(());
        }
    };
    // Whatever fails from here on is that the daemon is gone.
    let _ = say(&socket, "");
    while let Ok(Some(event)) = hear(&mut lines) {
        let result = command.run(event.as_bytes(), Instant::now() + PATIENCE);
        let answer = result.err().unwrap_or_default();
        if say(&socket, &answer).is_err() {
            break;
        }
    }
    let _ = socket.shutdown(Shutdown::Both);
    Ok(())
}

/// Looks at all that is needed, and gives up what is not.
fn prepare(orders: &Orders) -> anyhow::Result<command::Command> {
    let target: OnEvent = orders.target.parse().map_err(anyhow::Error::msg)?;
    let user = orders.user.as_deref().map(str::parse::<Owner>).transpose().map_err(anyhow::Error::msg)?;
    let command = command::Command::new(&target.words)?;
    sandbox::runner::confine(user.as_ref(), orders.sandboxed)?;
    Ok(command)
}

/// An event as it is handed on: what was left out before it is a part of it.
fn handed(mut event: Value, skipped: u64) -> String {
    if skipped > 0 {
        event["skipped"] = skipped.into();
    }
    event.to_string()
}
