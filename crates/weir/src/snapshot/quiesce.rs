//! The command that freezes and thaws the file systems of guests.
//!
//! ```text
//!   helper:        COMMAND freeze ─► status ─► end of the pipe, or the time is over ─► COMMAND thaw
//!                                      │             ▲
//!   this process:                      └► snapshot ──┘
//! ```
//!
//! The kernel closes the pipe when this process ends, so the helper thaws after a kill as well. One
//! process runs both, so a thaw never precedes the end of the freeze. Never kills a thaw.

use std::{
    io::{self, BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::time::{ClockId, clock_gettime};

/// Interval at which the end of a command is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Script of the helper, with the command and a time in seconds. The output of the command is not
/// mixed with the statuses, nor with the result of `weir snapshot`. The statuses are written by
/// subshells: without a reader, SIGPIPE must not end the helper. The end of the freeze is read
/// there, because this process may be late: the time until the thaw has begun already.
const SCRIPT: &str = r#"
timeout -s KILL "$2" /bin/sh -c "$1 freeze" </dev/null >&2
status=$?
read -r uptime _ </proc/uptime
(echo "$status $uptime")
timeout -s KILL "$2" cat >/dev/null
(echo $?)
exec /bin/sh -c "$1 thaw" </dev/null >&2
"#;

/// Exit status that the shell reports after SIGKILL.
const KILLED: u8 = 128 + 9;

/// Guests whose file systems are frozen. A drop thaws them too, without waiting.
pub(super) struct FrozenGuests {
    helper: Child,
    statuses: BufReader<ChildStdout>,
    command: String,
    timeout: Duration,
    /// Instant at which the freeze had not ended, or had just ended.
    since: Instant,
}

impl FrozenGuests {
    /// Runs the command with `freeze`. If that fails, the guests are thawed. Otherwise they are
    /// thawed after `timeout` at the latest.
    ///
    /// # Errors
    /// The command fails or takes longer than `timeout`, or cannot be run.
    pub(super) fn freeze(command: &str, timeout: Duration, disks: &[String]) -> anyhow::Result<Self> {
        let cannot = || format!("--quiesce-command {command}: cannot be run");
        // timeout(1) takes 0 for no limit.
        let seconds = timeout.as_secs_f64().max(0.001).to_string();
        let mut helper = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "sh", command, &seconds])
            .env("WEIR_DISKS", disks.join(" "))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A group of its own: Ctrl-C on the terminal must not end it.
            .process_group(0)
            .spawn()
            .with_context(cannot)?;
        let statuses = BufReader::new(helper.stdout.take().expect("it is a pipe"));
        let began = Instant::now();
        let mut guests = Self { helper, statuses, command: command.to_owned(), timeout, since: began };
        let (status, uptime) = guests.status().with_context(cannot)?;
        guests.since =
            uptime.and_then(time_since).map_or(began, |elapsed| began.max(Instant::now() - elapsed));
        let why = match status {
            0 => return Ok(guests),
            KILLED if began.elapsed() >= timeout => {
                format!("has not ended within {} s, and was killed", timeout.as_secs_f64())
            }
            status => format!("failed: exit status {status}"),
        };
        let thawed = match guests.thaw() {
            Ok(()) => "the guests were thawed".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        bail!("`{command} freeze` {why}; no snapshot was taken, and {thawed}")
    }

    /// Time until the guests are thawed without a call of [`FrozenGuests::thaw`], and the uptime of
    /// this host then.
    pub(super) fn deadline(&self) -> (Duration, Option<Duration>) {
        let uptime = now();
        let remaining = self.timeout.saturating_sub(self.since.elapsed());
        (remaining, uptime.map(|uptime| uptime + remaining))
    }

    /// Runs the command with `thaw`, which continues if it takes longer than the timeout.
    ///
    /// # Errors
    /// The command fails or has not ended: the guests may still be frozen. Or they were thawed
    /// before this call, because the timeout was over.
    pub(super) fn thaw(mut self) -> anyhow::Result<()> {
        drop(self.helper.stdin.take());
        let held = self.status();
        let (command, seconds) = (&self.command, self.timeout.as_secs_f64());
        let why = match end_within(&mut self.helper, self.timeout) {
            Ok(Some(status)) if status.success() => {
                ensure!(
                    matches!(held, Ok((0, _))),
                    "the guests were thawed before, because the snapshots took longer than {seconds} s (use \
                     a longer --quiesce-timeout)"
                );
                return Ok(());
            }
            Ok(Some(status)) => format!("failed: {status}"),
            Ok(None) => format!("has not ended within {seconds} s, and continues"),
            Err(error) => format!("cannot be awaited: {error}"),
        };
        bail!("`{command} thaw` {why} (thaw the guests, which may still be frozen)")
    }

    /// The next exit status that the helper reports, and the uptime of this host.
    fn status(&mut self) -> anyhow::Result<(u8, Option<Duration>)> {
        let mut line = String::new();
        self.statuses.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let status = words.next().and_then(|status| status.parse().ok());
        let uptime = words.next().and_then(|seconds| Duration::try_from_secs_f64(seconds.parse().ok()?).ok());
        Ok((status.context("its shell has ended (thaw the guests, which may be frozen)")?, uptime))
    }
}

/// Time since this uptime of the host, which is rounded down.
fn time_since(uptime: Duration) -> Option<Duration> {
    now()?.checked_sub(uptime)
}

/// Uptime of this host, as in `/proc/uptime`.
fn now() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_BOOTTIME).ok().map(Duration::from)
}

/// Waits for the end of a child, at most for the timeout.
fn end_within(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        let ended = child.try_wait()?;
        if ended.is_some() || Instant::now() >= deadline {
            return Ok(ended);
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
    fn the_thaw_follows_after_the_timeout_without_a_call() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("log");
        // Long enough for the freeze on a busy machine.
        let timeout = Duration::from_secs(2);
        let mut frozen = FrozenGuests::freeze(&command(&log, ""), timeout, &[]).expect("it succeeds");
        while !fs::read_to_string(&log).expect("written").contains("thaw") {
            thread::sleep(POLL_INTERVAL);
        }
        frozen.timeout = TIMEOUT;
        let error = frozen.thaw().expect_err("it was too late");
        assert!(error.to_string().contains("thawed before"), "{error}");
    }

    #[test]
    fn a_thaw_that_takes_long_is_not_killed() {
        let directory = tempfile::tempdir().expect("a directory");
        let (pipe, log) = (directory.path().join("pipe"), directory.path().join("log"));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let (from, to) = (pipe.display(), log.display());
        let slow = format!("f() {{ [ $1 = freeze ] || {{ cat {from}; echo thawed >{to}; }}; }}; f");
        let mut frozen = FrozenGuests::freeze(&slow, TIMEOUT, &[]).expect("it succeeds");
        frozen.timeout = Duration::from_millis(50);
        let error = frozen.thaw().expect_err("it waits for the pipe");
        assert!(error.to_string().contains("and continues"), "{error}");
        // Waits until the thaw reads.
        drop(fs::OpenOptions::new().write(true).open(&pipe).expect("a reader"));
        while fs::read_to_string(&log).unwrap_or_default() != "thawed\n" {
            thread::sleep(POLL_INTERVAL);
        }
    }

    #[test]
    fn a_freeze_that_hangs_is_killed() {
        let hanging = "f() { [ $1 = thaw ] || sleep 1000; }; f";
        let error = FrozenGuests::freeze(hanging, Duration::from_millis(500), &[]).err().expect("it hangs");
        assert!(error.to_string().contains("was killed"), "{error}");
    }
}
