//! A server that continues in the background once it is ready. Until then its messages and its exit
//! status are those of the foreground process.
//!
//! ```text
//!   foreground ──► the same program again ──────────────► serves, in a new session
//!      │          │ standard error, until it is ready        │
//!      └──────────┴──────── exits with 0, or its status ◄────┘ "ready" on its standard output
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

/// True in the background process.
pub(crate) fn is_background() -> bool {
    env::var_os(IN_BACKGROUND).is_some()
}

/// Starts this command line again in the background. Returns the exit status once that serves or
/// has ended.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn start() -> anyhow::Result<ExitCode> {
    let mut arguments = env::args_os();
    let name = arguments.next().context("this program has no name")?;
    let program = env::current_exe().context("this program cannot find itself")?;
    let mut command = Command::new(program);
    command.arg0(name).args(arguments).env(IN_BACKGROUND, "1");
    if env::var("LISTEN_PID").is_ok_and(|number| number == std::process::id().to_string()) {
        // The service manager's descriptors are meant for this process only.
        command.env_remove("LISTEN_PID");
    }
    // Its own pipes: the terminal must not stay open in the background process.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("no process can be started")?;
    let mut stderr = child.stderr.take().context("no pipe")?;
    // Returns when the child closes its standard error: it is ready, or it has ended.
    io::copy(&mut stderr, &mut io::stderr()).context("messages of the background process")?;
    let mut output = String::new();
    child
        .stdout
        .take()
        .context("no pipe")?
        .read_to_string(&mut output)
        .context("readiness of the background process")?;
    if output == READY {
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait().context("the process in the background")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.filter(|code| *code != 0).unwrap_or(1)))
}

/// In the background process, reports readiness to the foreground process and closes the
/// descriptors that it inherited.
pub(crate) fn report_ready() {
    if !is_background() {
        return;
    }
    let detach = || -> io::Result<()> {
        // Fails if it already leads a session.
        let _ = setsid();
        let null = File::options().read(true).write(true).open("/dev/null")?;
        // Standard error first: the foreground process reads it to the end before it reads READY.
        dup2_stderr(&null)?;
        io::stdout().write_all(READY.as_bytes())?;
        io::stdout().flush()?;
        dup2_stdout(&null)?;
        Ok(())
    };
    if let Err(error) = detach() {
        print_notice(&format!("readiness cannot be reported to the foreground process: {error}"));
    }
}
