//! The command: started inside of a cgroup, told what weir is told, awaited.
//!
//! ```text
//!   weir cgroup run ──spawns──► weir cgroup enter ──becomes──► COMMAND
//!   signals blocked,            in the cgroup from its
//!   passed on as they come      first moment; signals as usual
//! ```
//!
//! The command is in the cgroup before its first instruction, and weir never is: its own I/O is not
//! counted, and the cgroup can be removed. Signals and the command's end come on one descriptor, so
//! none is sent to a process that was waited for, whose number may be another's.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::Path,
    process::{Child, Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use console::{Failure, complain};
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

/// What somebody sends weir and means for the command.
const PASSED_ON: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// The statuses of env(1), nohup(1) and timeout(1): not found, cannot be run, the tool itself
/// failed.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;
const NOT_ENTERED: u8 = 125;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// Its exit status, or 128 and the number of the signal that killed it, as shells have it.
    pub(super) status: u8,
    /// How long its first task waited for I/O, where the kernel counts that.
    pub(super) waited: Option<Duration>,
}

/// Those passed on and SIGCHLD, as messages.
pub(super) struct Signals(SignalFd);

impl Signals {
    /// Blocks them in this thread and its later threads. To be called before other threads start.
    pub(super) fn block() -> io::Result<Self> {
        // Who ignores SIGCHLD is not told of children's ends, and a parent may have left it so
        // (`trap '' CHLD`). SAFETY: no function is installed that could run at a bad moment.
        unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
        let set: SigSet = PASSED_ON.into_iter().chain([Signal::SIGCHLD]).collect();
        set.thread_block()?;
        Ok(Self(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)?))
    }

    pub(super) fn await_end(&self, child: &mut Child, proc: &Path) -> io::Result<Ended> {
        let pid = Pid::from_raw(child.id().cast_signed());
        loop {
            let signal = match self.0.read_signal() {
                Ok(Some(signal)) => signal,
                // It was stopped and continued meanwhile.
                Ok(None) | Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if signal.ssi_signo == Signal::SIGCHLD as u32 {
                // Before it is waited for: then nothing of it is left to be read.
                let waited = tasks::waited(child.id(), proc);
                if let Some(status) = child.try_wait()? {
                    return Ok(Ended { status: status_of(status), waited });
                }
                continue;
            }
            // The terminal's own, as from Ctrl-C, go to everybody in the foreground: the command
            // has it.
            if signal.ssi_code == libc::SI_KERNEL {
                continue;
            }
            let passed_on = Signal::try_from(signal.ssi_signo.cast_signed())?;
            // It may have ended just now; that comes next.
            let _ = kill(pid, passed_on);
        }
    }
}

fn status_of(status: ExitStatus) -> u8 {
    let status = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    // Statuses have eight bits, and signals numbers up to 64.
    u8::try_from(status).unwrap_or(1)
}

/// What is wrong with the command itself shows in its status.
pub(super) fn start(group: &ControlGroup, command: &[OsString]) -> anyhow::Result<Child> {
    // The very program that runs, even if its file was replaced.
    let mut weir = Command::new("/proc/self/exe");
    weir.arg0("weir").args(["cgroup", "enter", "--directory"]).arg(&group.directory).arg("--").args(command);
    weir.spawn().context("the command: no process can be started")
}

/// `weir cgroup enter`: moves itself into a cgroup and becomes the command.
pub(crate) fn enter(arguments: EnterArgs) -> Result<(), Failure> {
    let fail = |status, error| {
        complain(&error);
        Err(Failure::Found(status))
    };
    let procs = arguments.directory.join("cgroup.procs");
    // 0 is the process that writes.
    if let Err(error) = fs::write(&procs, "0") {
        return fail(NOT_ENTERED, anyhow!("{}: the command cannot be moved there: {error}", procs.display()));
    }
    // The blocked set is inherited; the command gets signals as any program does.
    let set: SigSet = PASSED_ON.into_iter().chain([Signal::SIGCHLD]).collect();
    if let Err(error) = set.thread_swap_mask(SigmaskHow::SIG_UNBLOCK) {
        return fail(NOT_ENTERED, anyhow!("signals cannot be let through: {error}"));
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
    fn a_status_is_the_command_s_or_128_and_its_signal() {
        for (raw, status) in [(0, 0), (3 << 8, 3), (255 << 8, 255), (9, 137), (15, 143), (64, 192)] {
            assert_eq!(status_of(ExitStatus::from_raw(raw)), status, "{raw}");
        }
    }
}
