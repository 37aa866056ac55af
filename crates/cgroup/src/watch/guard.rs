//! A process that outlives the watch: when that dies or hangs, every limit is set as configured.
//!
//! ```text
//!   watch ──── pipe ────► guard          the pipe ends: the watch is dead ──► settle all ──► end
//!     ▲          ·  ·  ·    │            no sign of life for [`SILENCE`]: it is stopped ──► settle all, go on listening
//!     │                     │            a lease ends, and no word of another: settle what is lent, go on listening
//!     └── starts another ◄──┘ dies       the last word comes: the watch has settled all itself ──► end
//! ```
//!
//! The guard has a process group of its own, blocks signals and moves to the root cgroup, so what
//! kills the watch by name, terminal or service spares it; so does a kernel that is short of
//! memory. Who kills both one by one must call `weir cgroup watch --settle`. It holds a lock that
//! the next watch waits for before it grants a burst.

use std::{
    fs,
    io::{self, Write as _},
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
};

use anyhow::{Context as _, ensure};
use console::{Failure, complain, signals::Signals};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use policy::time::{Duration, Instant};

use super::now;
use crate::{
    hierarchy::{Hierarchy, Roots},
    limit::{kept::Kept, locks::Guarded, settling},
    watch::arguments::GuardArgs,
};

/// Written every other second.
const ALIVE: u8 = b'.';
const DONE: u8 = b'!';
/// With the nanosecond of [`now`] at which what is lent is to be taken back; 0 is none.
const LENT: u8 = b'<';
/// One of these, and a number. The pipe takes it whole or not at all.
type Word = [u8; 9];
/// Without a sign of life for so long a watch is taken for stopped.
const SILENCE: Duration = Duration::from_secs(8);

/// The kernel's name for the first namespace of processes (PROC_PID_INIT_INO).
const FIRST_PIDS: &str = "pid:[4026531836]";
/// Two seconds altogether.
const LOOKS_AT_A_CHILD: usize = 100;
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Guard {
    limits: PathBuf,
    lock: Guarded,
    child: Child,
    pipe: ChildStdin,
    /// When it is to take back what is lent.
    lent: Option<Instant>,
}

impl Guard {
    /// Starts one for the limits in this file, once there is no other.
    pub(super) fn start(limits: &Path) -> anyhow::Result<Self> {
        let lock = Guarded::take(limits)?;
        let (child, pipe) = spawn(limits, &lock)?;
        Ok(Self { limits: limits.to_owned(), lock, child, pipe, lent: None })
    }

    /// Sends a sign of life; starts another guard if it has died.
    pub(super) fn look_after(&mut self) -> anyhow::Result<()> {
        let lent = self.lent;
        self.revive()?;
        self.say(ALIVE, 0)?;
        self.takes_back_at(lent)
    }

    /// It settles what a cluster has lent at that instant of [`now`], unless it is told another
    /// before.
    ///
    /// # Errors
    /// Where no guard listens: then nothing may be lent.
    pub(super) fn takes_back_at(&mut self, at: Option<Instant>) -> anyhow::Result<()> {
        if self.lent == at {
            return Ok(());
        }
        self.revive()?;
        self.say(LENT, at.map_or(0, Instant::as_nanos))?;
        self.lent = at;
        Ok(())
    }

    fn revive(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait().context("the guard")? {
            tracing::warn!(%status, "the guard has ended; another is started");
            self.lent = None;
            (self.child, self.pipe) = spawn(&self.limits, &self.lock)?;
        }
        Ok(())
    }

    fn say(&mut self, what: u8, number: u64) -> anyhow::Result<()> {
        let said = self.pipe.write_all(&word(what, number));
        if said.is_err() {
            self.lent = None;
        }
        said.context("the guard does not listen (is the process `weir cgroup guard` stopped?)")
    }

    /// Ends it, when all limits are settled.
    pub(super) fn dismiss(mut self) {
        // A dead one needs no telling; a stopped one is not waited for.
        let _ = self.say(DONE, 0);
        for _ in 0..LOOKS_AT_A_CHILD {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(LOOK);
        }
        tracing::warn!("the guard does not end; it has nothing left to do (is it stopped?)");
    }
}

/// That a guard outlives whoever steers, or all that is limited ends with them: what others have by
/// then must not be in force here.
pub(super) fn check(hierarchy: &Hierarchy) -> anyhow::Result<()> {
    // Those that are not the topmost have this file, and are all of a container.
    let is_topmost = !hierarchy.root_group()?.directory.join("cgroup.type").exists();
    let pids = fs::read_link(hierarchy.roots.proc.join("self/ns/pid"));
    let ends_together = pids.is_ok_and(|pids| pids != Path::new(FIRST_PIDS));
    ensure!(
        !(is_topmost && ends_together),
        "[cluster]: control-groups: these are the machine's control groups, and the guard, which takes back what was lent, would end with this container (start it with the machine's processes, as `--pid=host` of docker and podman or hostPID of Kubernetes)"
    );
    Ok(())
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
    // Whoever steers does not wait for a guard that is stopped.
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context("the pipe to the guard")?;
    Ok((child, pipe))
}

fn word(what: u8, number: u64) -> Word {
    let mut word = [what; size_of::<Word>()];
    word[1..].copy_from_slice(&number.to_le_bytes());
    word
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
    // Refused in a container without that right.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    // As the watch has adopted it; when it dies, the file may be broken.
    let mut kept = Kept::load(path)?;
    let (mut heard_at, mut is_settled, mut lent) = (now(), false, None);
    loop {
        let silence = (!is_settled).then(|| heard_at + SILENCE);
        match heard(silence.into_iter().chain(lent).min()).context("standard input")? {
            Heard::Word([DONE, ..]) => return Ok(()),
            Heard::Word([what, number @ ..]) => {
                (heard_at, is_settled) = (now(), false);
                kept = Kept::latest(path, &kept);
                if what == LENT {
                    lent = Some(u64::from_le_bytes(number)).filter(|at| *at > 0).map(Instant::from_nanos);
                }
            }
            Heard::End => return Ok(settling::settle_latest(&hierarchy, path, &kept)?),
            Heard::Nothing if lent.is_some_and(|at| at <= now()) => {
                lent = None;
                settling::settle_lent(&hierarchy, path, &kept).unwrap_or_else(|error| complain(&error));
            }
            Heard::Nothing => {
                is_settled = true;
                settling::settle_latest(&hierarchy, path, &kept).unwrap_or_else(|error| complain(&error));
            }
        }
    }
}

enum Heard {
    Word(Word),
    /// By the instant that was given.
    Nothing,
    End,
}

fn heard(until: Option<Instant>) -> io::Result<Heard> {
    let stdin = io::stdin().lock();
    let ready = loop {
        let left = until.map(|until| (until - now()).as_nanos().div_ceil(1_000_000));
        let timeout = left.map_or(PollTimeout::NONE, |left| left.try_into().unwrap_or(PollTimeout::MAX));
        let ready = poll(&mut [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)], timeout)?;
        if ready > 0 || until.is_some_and(|until| until <= now()) {
            break ready;
        }
    };
    if ready == 0 {
        return Ok(Heard::Nothing);
    }
    let (mut word, mut read) = (Word::default(), 0);
    while read < word.len() {
        match nix::unistd::read(stdin.as_fd(), &mut word[read..])? {
            0 => return Ok(Heard::End),
            more => read += more,
        }
    }
    Ok(Heard::Word(word))
}
