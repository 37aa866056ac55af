//! A command for each event: started with the event on standard input, waited for, and killed with
//! all its descendants if it does not end.

use std::{
    fs,
    io::{self, Write as _},
    os::{
        fd::AsFd as _,
        unix::{fs::PermissionsExt as _, process::CommandExt as _},
    },
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, kill_process_group, pidfd_open, set_child_subreaper,
    wait,
};

/// Number of rounds of killing descendants: each round ends one generation.
const KILL_ROUNDS: usize = 50;
/// Pause between two rounds, for the kernel to end the processes.
const KILL_PAUSE: Duration = Duration::from_millis(10);

pub(super) struct OnEventCommand {
    arguments: Vec<String>,
}

/// Checks that the program exists and is executable.
///
/// # Errors
/// Returns a message with the remedy.
pub(super) fn check(program: &str) -> anyhow::Result<()> {
    let file = fs::metadata(program).with_context(|| format!("{program}: no such program"))?;
    let is_program = file.is_file() && file.permissions().mode() & 0o111 != 0;
    ensure!(is_program, "{program}: is not an executable file (`chmod +x` for a script)");
    Ok(())
}

impl OnEventCommand {
    pub(super) fn new(arguments: &[String]) -> anyhow::Result<Self> {
        // Subreaper: orphaned descendants become children of this process, which can then kill
        // them.
        set_child_subreaper(Some(Pid::INIT))
            .context("processes that a command leaves behind could not be ended")?;
        Ok(Self { arguments: arguments.to_vec() })
    }

    /// Runs the command once.
    ///
    /// # Errors
    /// Returns the reason why it was not started, or how it has ended.
    pub(super) fn run(&mut self, event: &[u8], deadline: Instant) -> Result<(), String> {
        let spawned = std::process::Command::new(&self.arguments[0])
            .args(&self.arguments[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let mut child = spawned.map_err(|error| format!("it cannot be started: {error}"))?;
        let outcome = wait_for_command(&mut child, event, deadline);
        // Also after success: background processes of a command must not pile up.
        kill_descendants(&mut child);
        outcome
    }
}

fn wait_for_command(child: &mut Child, event: &[u8], deadline: Instant) -> Result<(), String> {
    if let Some(mut stdin) = child.stdin.take() {
        // An event fits into a pipe's buffer; a command that shrinks its pipe is not waited for.
        let _ = fcntl(&stdin, FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
        // Fails if the command ends without reading; its status tells whether that was intended.
        let _ = stdin.write_all(event).and_then(|()| stdin.write_all(b"\n"));
    }
    if !has_ended(child, deadline).map_err(|error| format!("it cannot be waited for: {error}"))? {
        return Err(format!("it did not end within {} s, and was killed", super::TARGET_TIMEOUT.as_secs()));
    }
    match child.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("it has ended with {status}")),
        Err(error) => Err(format!("it cannot be waited for: {error}")),
    }
}

/// Waits for the end of the child; false after the deadline.
fn has_ended(child: &Child, deadline: Instant) -> io::Result<bool> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Kills the child, its process group, and descendants that have left the group: they become
/// children of this process once their parents have ended. A process that the kernel cannot kill
/// stays, and does not delay the next event further.
fn kill_descendants(child: &mut Child) {
    let group = Pid::from_child(child);
    for round in 0..KILL_ROUNDS {
        // The process ID is not reused before `wait`, or while its group has members.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = child.try_wait();
        for left in children() {
            let _ = kill_process(left, Signal::KILL);
        }
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        if children().is_empty() {
            return;
        }
        if round > 0 {
            std::thread::sleep(KILL_PAUSE);
        }
    }
}

/// Children of this process, which starts nothing but commands.
fn children() -> Vec<Pid> {
    let path = format!("/proc/self/task/{}/children", std::process::id());
    let listed = fs::read_to_string(path).unwrap_or_default();
    listed.split_ascii_whitespace().filter_map(|number| Pid::from_raw(number.parse().ok()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_that_is_no_program_is_rejected() {
        assert!(check("/nowhere/at/all").unwrap_err().to_string().contains("no such program"));
        assert!(check("/etc/passwd").unwrap_err().to_string().contains("is not an executable file"));
        check("/bin/sh").unwrap();
    }
}
