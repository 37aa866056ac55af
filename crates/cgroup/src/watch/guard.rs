//! A process that outlives the watch and settles every limit if the watch dies or hangs.
//!
//! ```text
//!   watch ──── pipe ────► guard          end of file: the watch is dead ──► settle all ──► exit
//!     ▲          ·  ·  ·    │            no heartbeat for [`HEARTBEAT_TIMEOUT`]: it is stopped ──► settle all, continue listening
//!     │                     │            a lease ends without renewal: settle leased quota, continue listening
//!     └── starts another ◄──┘ dies       the final message: the watch has settled all itself ──► exit
//! ```
//!
//! The guard has its own process group, blocks signals and moves to the root cgroup. It survives
//! signals sent by name, the end of the watch's terminal or service, and the OOM killer. After
//! SIGKILL to both processes, an operator must run `weir cgroup watch --settle`. The guard holds a
//! lock that the next watch waits for before it grants a burst.

use std::{
    fs,
    io::{self, Write as _},
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
};

use anyhow::{Context as _, ensure};
use console::{CommandFailure, print_error, signals::BlockedSignals};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use policy::time::{Duration, Instant};

use super::now;
use crate::{
    hierarchy::{CgroupHierarchy, KernelRoots},
    limit::{limits_file::LimitsFile, locks::GuardLock, settling},
    watch::arguments::GuardArgs,
};

/// Heartbeat, written every other second.
const HEARTBEAT: u8 = b'.';
const DONE: u8 = b'!';
/// Code of the time, in nanoseconds of [`now`], at which leased quota must be revoked; 0 for none.
const LEASED: u8 = b'<';
/// Message: one of these codes and a number. Shorter than PIPE_BUF, so the pipe accepts it whole or
/// not at all.
type GuardMessage = [u8; 9];
/// Time without a heartbeat after which the watch counts as stopped.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(8);

/// The kernel's name of the initial PID namespace (PROC_PID_INIT_INO).
const FIRST_PIDS: &str = "pid:[4026531836]";
/// Number of checks for the guard's exit, [`CHECK_INTERVAL`] apart: two seconds in total.
const EXIT_ATTEMPTS: usize = 100;
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct SettlingGuard {
    limits: PathBuf,
    lock: GuardLock,
    child: Child,
    pipe: ChildStdin,
    /// Time at which the guard revokes leased quota.
    revokes_at: Option<Instant>,
}

impl SettlingGuard {
    /// Starts a guard for this limits file, after any earlier guard has ended.
    pub(super) fn start(limits: &Path) -> anyhow::Result<Self> {
        let lock = GuardLock::take(limits)?;
        let (child, pipe) = spawn(limits, &lock)?;
        Ok(Self { limits: limits.to_owned(), lock, child, pipe, revokes_at: None })
    }

    /// Sends a heartbeat; restarts the guard if it has died.
    pub(super) fn heartbeat(&mut self) -> anyhow::Result<()> {
        let revokes_at = self.revokes_at;
        self.restart_if_dead()?;
        self.send(HEARTBEAT, 0)?;
        self.set_revocation(revokes_at)
    }

    /// Sets the time, by [`now`], at which the guard revokes leased quota, unless it is set again
    /// before.
    ///
    /// # Errors
    /// Fails if no guard listens: then nothing may be leased.
    pub(super) fn set_revocation(&mut self, at: Option<Instant>) -> anyhow::Result<()> {
        if self.revokes_at == at {
            return Ok(());
        }
        self.restart_if_dead()?;
        self.send(LEASED, at.map_or(0, Instant::as_nanos))?;
        self.revokes_at = at;
        Ok(())
    }

    fn restart_if_dead(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait().context("the guard")? {
            tracing::warn!(%status, "the guard has ended; starting another");
            self.revokes_at = None;
            (self.child, self.pipe) = spawn(&self.limits, &self.lock)?;
        }
        Ok(())
    }

    fn send(&mut self, kind: u8, number: u64) -> anyhow::Result<()> {
        let result = self.pipe.write_all(&message(kind, number));
        // The guard may have missed a deadline, so it must be sent again.
        if result.is_err() {
            self.revokes_at = None;
        }
        result.context("the guard does not read its messages (is the process `weir cgroup guard` stopped?)")
    }

    /// Ends the guard after all limits are settled.
    pub(super) fn dismiss(mut self) {
        // Fails if the guard is dead. A stopped guard is not waited for longer than the loop below.
        let _ = self.send(DONE, 0);
        for _ in 0..EXIT_ATTEMPTS {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(CHECK_INTERVAL);
        }
        tracing::warn!("the guard does not exit, with nothing left to do (is it stopped?)");
    }
}

/// Fails if the guard would end together with the daemon although the limits would not: quota that
/// other hosts lease by then would still be in force here.
pub(super) fn check(hierarchy: &CgroupHierarchy) -> anyhow::Result<()> {
    // cgroup.type is absent in the root of the hierarchy only; a container with a cgroup namespace
    // has it, and its cgroups end with the container.
    let is_topmost = !hierarchy.root_group()?.directory.join("cgroup.type").exists();
    let pids = fs::read_link(hierarchy.roots.proc.join("self/ns/pid"));
    let ends_together = pids.is_ok_and(|pids| pids != Path::new(FIRST_PIDS));
    ensure!(
        !(is_topmost && ends_together),
        "[cluster]: control-groups: these are the machine's control groups, and the guard, which \
         revokes leased quota, would end with this container (start it with the machine's \
         processes, as `--pid=host` of docker and podman or hostPID of Kubernetes)"
    );
    Ok(())
}

fn spawn(limits: &Path, lock: &GuardLock) -> anyhow::Result<(Child, ChildStdin)> {
    // The running program, even if its file has been replaced. The lock is inherited as its
    // standard output.
    let spawned = lock.share().and_then(|lock| {
        Command::new("/proc/self/exe")
            .args(["cgroup", "guard", "--limits"])
            .arg(limits)
            .stdin(Stdio::piped())
            .stdout(Stdio::from(lock))
            .process_group(0)
            .spawn()
    });
    let mut child =
        spawned.context("the guard, which ends bursts if this process dies, cannot be started")?;
    let pipe = child.stdin.take().context("the guard has no pipe")?;
    // A stopped guard must not block the watch when the pipe is full.
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context("the pipe to the guard")?;
    Ok((child, pipe))
}

fn message(kind: u8, number: u64) -> GuardMessage {
    let mut bytes = [kind; size_of::<GuardMessage>()];
    bytes[1..].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Reads heartbeats from standard input, and settles all limits in their absence.
pub(crate) fn run(arguments: &GuardArgs) -> Result<(), CommandFailure> {
    let _signals = BlockedSignals::block().context("signals cannot be blocked")?;
    let path = arguments.limits_file.path();
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
    if let Ok(root) = hierarchy.root_group() {
        // 0 stands for the writing process. Fails in a container, which ends as a whole anyway.
        let _ = root.write("cgroup.procs", "0");
    }
    // Fails in a container without the privilege.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    // The limits as the watch adopted them; the file may be corrupt by the time the watch dies.
    let mut limits_file = LimitsFile::load(path)?;
    let (mut last_message_at, mut is_settled, mut revokes_at) = (now(), false, None);
    loop {
        let silence = (!is_settled).then(|| last_message_at + HEARTBEAT_TIMEOUT);
        match read_message(silence.into_iter().chain(revokes_at).min()).context("standard input")? {
            GuardInput::Message([DONE, ..]) => return Ok(()),
            // Any message is a heartbeat. After silence, the watch steers again, so settling is due
            // again.
            GuardInput::Message([kind, number @ ..]) => {
                (last_message_at, is_settled) = (now(), false);
                limits_file = LimitsFile::latest(path, &limits_file);
                if kind == LEASED {
                    revokes_at =
                        Some(u64::from_le_bytes(number)).filter(|at| *at > 0).map(Instant::from_nanos);
                }
            }
            GuardInput::End => return Ok(settling::settle_latest(&hierarchy, path, &limits_file)?),
            GuardInput::Nothing if revokes_at.is_some_and(|at| at <= now()) => {
                revokes_at = None;
                settling::settle_leased(&hierarchy, path, &limits_file)
                    .unwrap_or_else(|error| print_error(&error));
            }
            // Settled once per silence: the watch may be stopped for long, and users may set other
            // limits.
            GuardInput::Nothing => {
                is_settled = true;
                settling::settle_latest(&hierarchy, path, &limits_file)
                    .unwrap_or_else(|error| print_error(&error));
            }
        }
    }
}

enum GuardInput {
    Message(GuardMessage),
    /// No message arrived by the given time.
    Nothing,
    End,
}

fn read_message(until: Option<Instant>) -> io::Result<GuardInput> {
    let stdin = io::stdin().lock();
    let ready = loop {
        let remaining_ms = until.map(|until| (until - now()).as_nanos().div_ceil(1_000_000));
        let timeout = remaining_ms
            .map_or(PollTimeout::NONE, |milliseconds| milliseconds.try_into().unwrap_or(PollTimeout::MAX));
        let ready = poll(&mut [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)], timeout)?;
        if ready > 0 || until.is_some_and(|until| until <= now()) {
            break ready;
        }
    };
    if ready == 0 {
        return Ok(GuardInput::Nothing);
    }
    let (mut buffer, mut read) = (GuardMessage::default(), 0);
    // The pipe may deliver a message in parts.
    while read < buffer.len() {
        match nix::unistd::read(stdin.as_fd(), &mut buffer[read..])? {
            0 => return Ok(GuardInput::End),
            more => read += more,
        }
    }
    Ok(GuardInput::Message(buffer))
}
