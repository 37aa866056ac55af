//! A process that outlives the one that steers: when that dies, or does nothing any more, every
//! limit falls back to what was configured.
//!
//! ```text
//!   watch ──── pipe ────► guard          the pipe ends: the watch is dead ──► settle all ──► end
//!     ▲          ·  ·  ·    │            no sign of life for [`SILENCE`]: it is stopped ──► settle all, go on listening
//!     └── starts another ◄──┘ dies       the last word comes: the watch has settled all itself ──► end
//! ```
//!
//! A kernel file keeps what was written last, and nobody else would take a burst back. The guard
//! has a process group of its own and waits for no signal, so what ends the watch by name or by
//! terminal leaves it alone. And it moves to the root of the control groups, so that what kills all
//! of a service, systemd or the kernel where memory is short, does too. Who kills both one by one
//! must call `weir cgroup watch --settle`.
//!
//! While it may still write, nobody else grants a burst: it holds a lock that the next watch waits
//! for.
//!
//! Never steers anything.

use std::{
    io::{self, Write as _},
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use console::{Failure, complain, signals::Signals};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    hierarchy::{Hierarchy, Roots},
    limit::{kept::Kept, locks::Guarded, settling},
    watch::arguments::GuardArgs,
};

/// A sign of life, as it is written every other second.
const ALIVE: u8 = b'.';
const DONE: u8 = b'!';
/// Milliseconds without a sign of life after which a watch is taken for stopped.
const SILENCE: u16 = 8000;

/// How often, and how far apart, one that was dismissed is looked at: for two seconds.
const LOOKS_AT_A_CHILD: usize = 100;
const LOOK: Duration = Duration::from_millis(20);

/// A guard that runs, as long as this is held.
#[derive(Debug)]
pub(super) struct Guard {
    limits: PathBuf,
    lock: Guarded,
    child: Child,
    pipe: ChildStdin,
}

impl Guard {
    /// Starts one for the limits in this file, once there is no other.
    ///
    /// # Errors
    /// If no process can be started.
    pub(super) fn start(limits: &Path) -> anyhow::Result<Self> {
        let lock = Guarded::take(limits)?;
        let (child, pipe) = spawn(limits, &lock)?;
        Ok(Self { limits: limits.to_owned(), lock, child, pipe })
    }

    /// Says that somebody lives here; starts another guard if it has died.
    pub(super) fn look_after(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait().context("the guard")? {
            tracing::warn!(%status, "the guard has ended; another is started");
            (self.child, self.pipe) = spawn(&self.limits, &self.lock)?;
        }
        self.pipe.write_all(&[ALIVE]).context("the guard")
    }

    /// Ends it, when all limits are settled.
    pub(super) fn dismiss(mut self) {
        // If it is dead, it needs no telling; if somebody has stopped it, nobody waits for it.
        let _ = self.pipe.write_all(&[DONE]);
        for _ in 0..LOOKS_AT_A_CHILD {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(LOOK);
        }
        tracing::warn!("the guard does not end; it has nothing left to do (is it stopped?)");
    }
}

fn spawn(limits: &Path, lock: &Guarded) -> anyhow::Result<(Child, ChildStdin)> {
    // This very program, also where its file has been replaced since. It prints nothing: its output
    // is where it holds the lock.
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
        spawned.context("the guard, which takes bursts back if this process dies, cannot be started")?;
    let pipe = child.stdin.take().context("a pipe that was asked for")?;
    Ok((child, pipe))
}

/// Listens on standard input for signs of life, and settles all limits when there are none.
///
/// # Errors
/// If they cannot be settled.
pub(crate) fn run(arguments: &GuardArgs) -> Result<(), Failure> {
    // Blocked and never waited for.
    let _signals = Signals::block().context("signals cannot be blocked")?;
    let path = arguments.kept.path();
    let hierarchy = Hierarchy::discover(Roots::default())?;
    if let Ok(root) = hierarchy.root_group() {
        // 0 is who writes it. Refused in a container, whose root is none: there all of it ends
        // together.
        let _ = root.write("cgroup.procs", "0");
    }
    // As the watch has adopted it; when it dies, the file may be broken.
    let mut kept = Kept::load(path)?;
    let mut is_settled = false;
    loop {
        let mut word = [0];
        match heard(&mut word).context("standard input")? {
            Heard::Word if word[0] == DONE => return Ok(()),
            Heard::Word => {
                is_settled = false;
                kept = Kept::latest(path, &kept);
            }
            Heard::End => return Ok(settling::settle_latest(&hierarchy, path, &kept)?),
            Heard::Nothing if is_settled => {}
            Heard::Nothing => {
                is_settled = true;
                if let Err(error) = settling::settle_latest(&hierarchy, path, &kept) {
                    complain(&error);
                }
            }
        }
    }
}

enum Heard {
    Word,
    Nothing,
    End,
}

fn heard(word: &mut [u8; 1]) -> io::Result<Heard> {
    let stdin = io::stdin().lock();
    let ready = poll(&mut [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)], PollTimeout::from(SILENCE))?;
    if ready == 0 {
        return Ok(Heard::Nothing);
    }
    Ok(if nix::unistd::read(stdin.as_fd(), word)? == 0 { Heard::End } else { Heard::Word })
}
