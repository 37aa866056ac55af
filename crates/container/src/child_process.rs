//! Child processes, run to completion under a deadline.
//!
//! The program's standard error becomes the error message. It is a file instead of a pipe, because
//! background processes of the program may keep a pipe open.
//!
//! Never waits for anything but the program itself.

use std::{
    fs::File,
    io::{ErrorKind, Read as _, Seek as _, SeekFrom},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use nix::{
    sys::wait::{Id, WaitPidFlag, waitid},
    unistd::Pid,
};

/// Timeout of short programs: Docker waits two minutes for a volume, which may need two programs.
pub(crate) const SHORT_TIMEOUT: Duration = Duration::from_secs(50);
/// Bytes of standard error to read.
const MAX_STDERR_BYTES: u64 = 16 << 10;

/// Runs a program, killed after `limit`. Its standard output is discarded.
///
/// # Errors
/// Returns its error message, or the reason why it could not be run.
pub(crate) fn run(command: &mut Command, limit: Duration) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut stderr_file = tempfile::tempfile().context("a temporary file cannot be created")?;
    let stderr = stderr_file.try_clone().context("a temporary file cannot be created")?;
    // No terminal: a program that asks a question fails instead of waiting.
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn();
    let mut child = child.map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!("{name}: is not installed"),
        _ => anyhow!("{name}: cannot be started: {error}"),
    })?;
    let in_time = exits_within(&child, limit).with_context(|| format!("{name}: cannot be waited for"))?;
    if !in_time {
        // A child in an uninterruptible system call dies only when that returns.
        child.kill().with_context(|| format!("{name}: cannot be killed"))?;
    }
    let status = child.wait().with_context(|| format!("{name}: cannot be waited for"))?;
    if !in_time {
        bail!("{name}: did not finish within {} s, and was killed", limit.as_secs());
    }
    if status.success() {
        return Ok(());
    }
    match error_line(&read(&mut stderr_file)) {
        Some(line) => bail!("{line}"),
        None => bail!("{name}: failed ({status}) without a message"),
    }
}

/// Waits without reaping the child, so that its pid cannot be reused before `kill`.
fn exits_within(child: &Child, limit: Duration) -> anyhow::Result<bool> {
    let pid = Pid::from_raw(child.id().cast_signed());
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().name("child".to_owned()).spawn(move || {
        let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        let _ = sender.send(());
    })?;
    Ok(receiver.recv_timeout(limit).is_ok())
}

fn read(stderr_file: &mut File) -> String {
    let mut bytes = Vec::new();
    let read = stderr_file
        .seek(SeekFrom::Start(0))
        .and_then(|_| stderr_file.take(MAX_STDERR_BYTES).read_to_end(&mut bytes));
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// Line of the error message: weir's last one; of another program the first that is not its name
/// and version.
fn error_line(stderr: &str) -> Option<&str> {
    // weir logs warnings before the error.
    let weir_error = stderr.lines().rev().find_map(|line| line.strip_prefix("weir: "));
    weir_error.or_else(|| {
        stderr.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("mke2fs "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn fails(script: &str) -> String {
        run(&mut shell(script), Duration::from_secs(60)).unwrap_err().to_string()
    }

    #[test]
    fn standard_error_becomes_the_error() {
        run(&mut shell("echo x >&2"), Duration::from_secs(60)).unwrap();
        assert_eq!(fails("echo weir: by ublk, as it is there >&2; echo weir: a: b >&2; exit 1"), "a: b");
        assert_eq!(
            fails("echo mke2fs 1.47 >&2; echo; echo too small >&2; echo usage >&2; exit 1"),
            "too small"
        );
        assert_eq!(fails("exit 3"), "sh: failed (exit status: 3) without a message");
        assert_eq!(fails("yes x | head -c 1000000 >&2; exit 1"), "x");
        let missing = run(&mut Command::new("/nonexistent/mkfs"), Duration::from_secs(60));
        assert_eq!(missing.unwrap_err().to_string(), "/nonexistent/mkfs: is not installed");
    }

    #[test]
    fn a_hanging_program_is_killed() {
        let error = run(&mut shell("exec sleep 1000"), Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.to_string(), "sh: did not finish within 0 s, and was killed");
    }

    #[test]
    fn background_processes_are_not_awaited() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // Keeps standard error open until the FIFO is opened for writing.
        run(&mut shell(&format!("cat {} & exit 0", fifo.display())), Duration::from_secs(60)).unwrap();
        File::options().write(true).open(&fifo).unwrap();
    }
}
