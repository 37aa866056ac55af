//! A process that outlives the watch: when that dies or hangs, every limit is set as configured.
//!
//! ```text
//!   watch ──── pipe ────► guard          the pipe ends: the watch is dead ──► settle all ──► end
//!     ▲          ·  ·  ·    │            no sign of life for [`SILENCE`]: it is stopped ──► settle all, go on listening
//!     └── starts another ◄──┘ dies       the last word comes: the watch has settled all itself ──► end
//! ```
//!
//! The guard has a process group of its own, blocks signals and moves to the root cgroup, so what
//! kills the watch by name, terminal or service spares it. Who kills both one by one must call
//! `weir cgroup watch --settle`. It holds a lock that the next watch waits for before it grants a
//! burst.

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

/// Written every other second.
const ALIVE: u8 = b'.';
const DONE: u8 = b'!';
/// Milliseconds without a sign of life after which a watch is taken for stopped.
const SILENCE: u16 = 8000;

/// Two seconds altogether.
const LOOKS_AT_A_CHILD: usize = 100;
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Guard {
    limits: PathBuf,
    lock: Guarded,
    child: Child,
    pipe: ChildStdin,
}

impl Guard {
    /// Starts one for the limits in this file, once there is no other.
    pub(super) fn start(limits: &Path) -> anyhow::Result<Self> {
        let lock = Guarded::take(limits)?;
        let (child, pipe) = spawn(limits, &lock)?;
        Ok(Self { limits: limits.to_owned(), lock, child, pipe })
    }

    /// Sends a sign of life; starts another guard if it has died.
    pub(super) fn look_after(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait().context("the guard")? {
            tracing::warn!(%status, "the guard has ended; another is started");
            (self.child, self.pipe) = spawn(&self.limits, &self.lock)?;
        }
        self.pipe.write_all(&[ALIVE]).context("the guard")
    }

    /// Ends it, when all limits are settled.
    pub(super) fn dismiss(mut self) {
        // A dead one needs no telling; a stopped one is not waited for.
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
    // This very program, even if its file was replaced. Its output is where it holds the lock.
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
pub(crate) fn run(arguments: &GuardArgs) -> Result<(), Failure> {
    let _signals = Signals::block().context("signals cannot be blocked")?;
    let path = arguments.kept.path();
    let hierarchy = Hierarchy::discover(Roots::default())?;
    if let Ok(root) = hierarchy.root_group() {
        // 0 is the process that writes. Refused in a container, where all of it ends together.
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
