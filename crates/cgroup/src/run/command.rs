//! The command: started inside a cgroup, sent weir's signals, awaited.
//!
//! ```text
//!   weir cgroup run ──spawns──► weir cgroup enter ──execs──► COMMAND
//!   signals blocked,            enters the cgroup,
//!   forwarded on arrival        unblocks signals
//! ```
//!
//! The command is in the cgroup before its first instruction, and weir itself never is: weir's I/O
//! is not counted, and the cgroup can be removed. Signals and the command's end arrive on one
//! signalfd, so no signal is sent to a pid that has been reaped and reused.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::Path,
    process::{Child, Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use console::{CommandFailure, print_error};
use nix::{
    errno::Errno,
    libc,
    sys::{
        signal::{SigHandler, SigSet, SigmaskHow, Signal, kill, signal},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::Pid,
};

use crate::{control_group::ControlGroup, run::arguments::EnterArgs, show::tasks};

/// Signals to weir that are meant for the command.
const FORWARDED: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// Exit statuses of env(1), nohup(1) and timeout(1): not found, cannot be run, the tool itself
/// failed.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;
const NOT_ENTERED: u8 = 125;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommandEnd {
    /// Exit status, or 128 plus the number of the signal that killed it, as in shells.
    pub(super) status: u8,
    /// Time that its first task waited for I/O, if the kernel counts it.
    pub(super) waited: Option<Duration>,
}

/// The forwarded signals and SIGCHLD, as messages.
pub(super) struct ForwardedSignals(SignalFd);

impl ForwardedSignals {
    /// Blocks them in this thread and in threads started later; must be called before any other
    /// thread starts.
    pub(super) fn block() -> io::Result<Self> {
        // A parent may have left SIGCHLD ignored (`trap '' CHLD`), which suppresses notifications.
        // SAFETY: restores the default action; no handler that could run at a bad moment is
        // installed.
        unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
        let set: SigSet = FORWARDED.into_iter().chain([Signal::SIGCHLD]).collect();
        set.thread_block()?;
        Ok(Self(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)?))
    }

    pub(super) fn await_end(&self, child: &mut Child, proc: &Path) -> io::Result<CommandEnd> {
        let pid = Pid::from_raw(child.id().cast_signed());
        loop {
            let signal = match self.0.read_signal() {
                Ok(Some(signal)) => signal,
                // Interrupted by SIGSTOP and SIGCONT.
                Ok(None) | Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if signal.ssi_signo == Signal::SIGCHLD as u32 {
                // Read before the child is reaped: its files in /proc disappear with it.
                let waited = tasks::zombie_io_wait(child.id(), proc);
                if let Some(status) = child.try_wait()? {
                    return Ok(CommandEnd { status: status_of(status), waited });
                }
                continue;
            }
            // Sent by the terminal, as for Ctrl-C, to the whole foreground group: the command has
            // received it already.
            if signal.ssi_code == libc::SI_KERNEL {
                continue;
            }
            let passed_on = Signal::try_from(signal.ssi_signo.cast_signed())?;
            // Fails if the command has just ended; SIGCHLD follows.
            let _ = kill(pid, passed_on);
        }
    }
}

fn status_of(status: ExitStatus) -> u8 {
    let status = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    // Statuses have eight bits, and signal numbers go up to 64.
    u8::try_from(status).unwrap_or(1)
}

/// Starts the command. Errors of the command itself appear in its exit status.
pub(super) fn start(group: &ControlGroup, command: &[OsString]) -> anyhow::Result<Child> {
    // The running program, even if its file has been replaced.
    let mut weir = Command::new("/proc/self/exe");
    weir.arg0("weir").args(["cgroup", "enter", "--directory"]).arg(&group.directory).arg("--").args(command);
    weir.spawn().context("the command: no process can be started")
}

/// `weir cgroup enter`: moves itself into a cgroup and becomes the command.
pub(crate) fn enter(arguments: EnterArgs) -> Result<(), CommandFailure> {
    let fail = |status, error| {
        print_error(&error);
        Err(CommandFailure::Found(status))
    };
    let procs = arguments.directory.join("cgroup.procs");
    // 0 stands for the writing process.
    if let Err(error) = fs::write(&procs, "0") {
        return fail(NOT_ENTERED, anyhow!("{}: the command cannot be moved there: {error}", procs.display()));
    }
    // The signal mask is inherited across exec; the command must receive signals as usual.
    let set: SigSet = FORWARDED.into_iter().chain([Signal::SIGCHLD]).collect();
    if let Err(error) = set.thread_swap_mask(SigmaskHow::SIG_UNBLOCK) {
        return fail(NOT_ENTERED, anyhow!("signals cannot be unblocked: {error}"));
    }
    let Some((program, rest)) = arguments.command.split_first() else {
        return fail(NOT_ENTERED, anyhow!("there is no command"));
    };
    let error = Command::new(program).args(rest).exec();
    let status = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN };
    fail(status, anyhow!("{}: cannot be run: {error}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_the_commands_or_128_plus_signal() {
        for (raw, status) in [(0, 0), (3 << 8, 3), (255 << 8, 255), (9, 137), (15, 143), (64, 192)] {
            assert_eq!(status_of(ExitStatus::from_raw(raw)), status, "{raw}");
        }
    }
}
