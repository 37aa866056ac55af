//! The command that freezes and thaws the file systems of guests.
//!
//! ```text
//!   this process ── pipe ──► helper: waits for the end of the pipe, then COMMAND thaw
//!        └─ COMMAND freeze ─► snapshot ─► pipe closed
//! ```
//!
//! The kernel closes the pipe when this process ends, so the helper thaws after a kill as well. It
//! is started before anything is frozen.

use std::{
    io,
    os::unix::process::CommandExt as _,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

/// Interval at which the end of a command is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Guests whose file systems are frozen. A drop thaws them too, without waiting.
pub(super) struct FrozenGuests {
    helper: Child,
    command: String,
    timeout: Duration,
}

impl FrozenGuests {
    /// Runs the command with `freeze`. If that fails, the guests are thawed.
    ///
    /// # Errors
    /// The command fails or takes too long, or cannot be run.
    pub(super) fn freeze(command: &str, timeout: Duration, disks: &[String]) -> anyhow::Result<Self> {
        let shell = |script: &str| {
            let mut shell = Command::new("/bin/sh");
            // A group of its own: Ctrl-C on the terminal must not end it.
            shell.args(["-c", script, "sh", command]).env("WEIR_DISKS", disks.join(" ")).process_group(0);
            shell
        };
        let cannot = || format!("--quiesce-command {command}: cannot be run");
        let helper = shell("read -r _; exec /bin/sh -c \"$1 thaw\"").stdin(Stdio::piped()).spawn();
        let guests = Self { helper: helper.with_context(cannot)?, command: command.to_owned(), timeout };
        let mut freezing =
            shell("exec /bin/sh -c \"$1 freeze\"").stdin(Stdio::null()).spawn().with_context(cannot)?;
        let why = match end_within(&mut freezing, timeout).with_context(cannot)? {
            Some(status) if status.success() => return Ok(guests),
            Some(status) => format!("failed: {status}"),
            None => format!("has not ended within {} s, and was killed", timeout.as_secs_f64()),
        };
        let thawed = match guests.thaw() {
            Ok(()) => "the guests were thawed".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        bail!("`{command} freeze` {why}; no snapshot was taken, and {thawed}")
    }

    /// Runs the command with `thaw`.
    ///
    /// # Errors
    /// The command fails or takes too long: the guests may still be frozen.
    pub(super) fn thaw(mut self) -> anyhow::Result<()> {
        drop(self.helper.stdin.take());
        let why = match end_within(&mut self.helper, self.timeout) {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => format!("failed: {status}"),
            Ok(None) => format!("has not ended within {} s, and was killed", self.timeout.as_secs_f64()),
            Err(error) => format!("cannot be awaited: {error}"),
        };
        bail!("`{} thaw` {why} (thaw the guests, which may still be frozen)", self.command)
    }
}

/// Waits for the end of a child; kills it and its group after the timeout, and returns `None`.
fn end_within(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            // It has started this group; the process may have ended in the meantime.
            let _ = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// A command that appends its word and the disks to a file.
    fn command(log: &std::path::Path, before: &str) -> String {
        format!("{before} log() {{ echo \"$1 $WEIR_DISKS\" >>{}; }}; log", log.display())
    }

    #[test]
    fn freeze_precedes_thaw() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("log");
        let disks = ["a".to_owned(), "b".to_owned()];
        let frozen = FrozenGuests::freeze(&command(&log, ""), TIMEOUT, &disks).expect("it succeeds");
        assert_eq!(fs::read_to_string(&log).expect("written"), "freeze a b\n");
        frozen.thaw().expect("it succeeds");
        assert_eq!(fs::read_to_string(&log).expect("written"), "freeze a b\nthaw a b\n");
    }

    #[test]
    fn a_failed_freeze_is_followed_by_a_thaw() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("log");
        let failing = format!("f() {{ echo $1 >>{}; [ $1 = thaw ]; }}; f", log.display());
        let error = FrozenGuests::freeze(&failing, TIMEOUT, &[]).err().expect("it fails");
        assert!(error.to_string().contains("the guests were thawed"), "{error}");
        assert_eq!(fs::read_to_string(&log).expect("written"), "freeze\nthaw\n");
    }

    #[test]
    fn a_freeze_that_hangs_is_killed() {
        let hanging = "f() { [ $1 = thaw ] || sleep 1000; }; f";
        let error = FrozenGuests::freeze(hanging, Duration::from_millis(50), &[]).err().expect("it hangs");
        assert!(error.to_string().contains("was killed"), "{error}");
    }
}
