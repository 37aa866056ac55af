//! A server that goes on in the background once it serves. Until then it is as if it were whoever
//! started it: what it complains of and its exit status are that one's.
//!
//! ```text
//!   started ──► itself again ──────────────────────────► serves, in a session of its own
//!      │          │ standard error, until it is ready        │
//!      └──────────┴──────── exits with 0, or as it did ◄─────┘ "ready" on its standard output
//! ```
//!
//! The program is started again rather than forked: threads do not survive a fork.

use std::{
    env,
    fs::File,
    io::{self, Read as _, Write as _},
    os::unix::process::CommandExt as _,
    process::{Command, ExitCode, Stdio},
};

use anyhow::Context as _;
use console::{IN_BACKGROUND, print_notice};
use nix::unistd::{dup2_stderr, dup2_stdout, setsid};

const READY: &str = "ready";

/// Whether this is the process in the background.
pub(crate) fn is_here() -> bool {
    env::var_os(IN_BACKGROUND).is_some()
}

/// Starts this command line again in the background; the status to exit with once that serves, or
/// has ended.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn start() -> anyhow::Result<ExitCode> {
    let mut words = env::args_os();
    let name = words.next().context("this program has no name")?;
    let program = env::current_exe().context("this program cannot find itself")?;
    let mut command = Command::new(program);
    command.arg0(name).args(words).env(IN_BACKGROUND, "1");
    if env::var("LISTEN_PID").is_ok_and(|number| number == std::process::id().to_string()) {
        // What the service manager passed is for that process.
        command.env_remove("LISTEN_PID");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("no process can be started")?;
    let mut said = child.stderr.take().context("no pipe")?;
    // Until it lets go of it, because it serves or has ended.
    io::copy(&mut said, &mut io::stderr()).context("what it says")?;
    let mut told = String::new();
    child.stdout.take().context("no pipe")?.read_to_string(&mut told).context("whether it serves")?;
    if told == READY {
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait().context("the process in the background")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.filter(|code| *code != 0).unwrap_or(1)))
}

/// In the background, tells whoever started this that it serves, and lets go of what it has of
/// that.
pub(crate) fn tell_ready() {
    if !is_here() {
        return;
    }
    let let_go = || -> io::Result<()> {
        // Fails where it leads a session already.
        let _ = setsid();
        let nothing = File::options().read(true).write(true).open("/dev/null")?;
        dup2_stderr(&nothing)?;
        io::stdout().write_all(READY.as_bytes())?;
        io::stdout().flush()?;
        dup2_stdout(&nothing)?;
        Ok(())
    };
    if let Err(error) = let_go() {
        print_notice(&format!("whoever started this cannot be told that it serves: {error}"));
    }
}
