//! The guard: a process that outlives the server of a device. If the server has ended and no
//! process takes the device over in time, the guard removes the device, so that its openers do not
//! wait forever.
//!
//! ```text
//!   server ──── pipe ────► guard      the pipe ends ──► waits ──► removes the device if it is still orphaned
//!     │                      ▲
//!     └─ next server: ends ──┘  and then examines the device
//! ```
//!
//! **Never removes a device that is being taken over.** The driver does not show whether a process
//! has begun to take over an orphaned device. So a process that takes one over, or removes it, ends
//! its guard first; only the guard removes a device by itself. A guard is found by its lock on the
//! driver's node, at the byte of the device's number: the lock exists as long as the process, and
//! leaves nothing behind.
//!
//! The guard identifies the device by its number and its [mark](super::mark), and needs the rights
//! of its server. A device that ends with its process needs no guard.

use std::{
    env, fs,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    process::{self, Child, Command, Stdio},
    thread,
    time::Duration,
};

use nix::sys::signal::SigSet;
use reactor::ublk::{UblkControl, UblkInfo, UblkState, feature};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::devices::{begin_removal, path};

/// The hidden command of a guard.
const COMMAND: &str = "ublk-guard";
/// Set for a server in the background: its parent waits until standard error is closed.
const IN_BACKGROUND: &str = "WEIR_IN_BACKGROUND";
/// Interval of checking whether the kernel has noticed the end of a process.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The guard of a device; it becomes active when this is dropped, as when this process ends.
#[derive(Debug)]
pub(super) struct UblkGuard(Option<Child>);

impl Drop for UblkGuard {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        // The guard exits by itself: at once if the device is gone.
        let wait = move || drop(child.wait());
        let _ = thread::Builder::new().name("guard's end".into()).spawn(wait);
    }
}

/// Starts a guard for a device that outlives this process, with a timeout in seconds; 0 for none.
/// The former guard has ended when this returns, so state of the device read before may be stale.
pub(super) fn replace(
    control: &UblkControl,
    device: &UblkInfo,
    seconds: u32,
) -> io::Result<Option<UblkGuard>> {
    if device.features & feature::USER_RECOVERY == 0 {
        return Ok(None);
    }
    dismiss(control, device.number)?;
    (seconds > 0).then(|| UblkGuard::start(device, seconds)).transpose()
}

/// Ends the guard of a device, if it has one.
pub(super) fn dismiss(control: &UblkControl, number: u32) -> io::Result<()> {
    while let Some(process) = control.keeper(number)? {
        let Some(pid) = Some(process).filter(|process| *process > 0).and_then(Pid::from_raw) else {
            return Err(io::Error::other(
                "its guard is not visible in this PID namespace (end `weir ublk-guard` where its weir ran)",
            ));
        };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => continue,
            handle => handle?,
        };
        // The process ID may have been reused before pidfd_open, but only a guard has the lock.
        if control.keeper(number)? != Some(process) {
            continue;
        }
        match pidfd_send_signal(&handle, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Waits for the exit: the guard may be in the middle of a request to the driver.
        while let Err(Errno::INTR) = poll(&mut [PollFd::new(&handle, PollFlags::IN)], None) {}
    }
    Ok(())
}

impl UblkGuard {
    /// Starts a guard; it holds the lock when this returns.
    fn start(device: &UblkInfo, seconds: u32) -> io::Result<Self> {
        let is_in_background = env::var_os(IN_BACKGROUND).is_some();
        // /proc/self/exe is this very program, even if its file was replaced.
        let mut child = Command::new("/proc/self/exe")
            .arg(COMMAND)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if is_in_background { Stdio::null() } else { Stdio::inherit() })
            .env_remove("NOTIFY_SOCKET")
            // Own process group and no notification socket: the guard outlives the service's main
            // process.
            .process_group(0)
            .spawn()?;
        let (stdin, stdout) = (child.stdin.as_mut(), child.stdout.take());
        let (mut stdin, stdout) = stdin.zip(stdout).ok_or_else(|| io::Error::other("no pipe"))?;
        let orders = UblkGuardOrders {
            number: device.number,
            mark: device.user_data,
            server: process::id(),
            timeout: Duration::from_secs(seconds.into()),
        };
        let written = orders.write(&mut stdin);
        let guard = Self(Some(child));
        // After the `UblkGuard` owns the child, so that an error still reaps it.
        written?;
        let mut ready = String::new();
        BufReader::new(stdout).read_line(&mut ready)?;
        match ready.is_empty() {
            true => Err(io::Error::other("it has ended (see the log)")),
            false => Ok(guard),
        }
    }
}

/// Orders of a guard, sent as one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UblkGuardOrders {
    number: u32,
    mark: u64,
    /// Process ID of the server.
    server: u32,
    /// Time for which the device may wait for another server.
    timeout: Duration,
}

impl UblkGuardOrders {
    fn write(self, to: &mut impl io::Write) -> io::Result<()> {
        let Self { number, mark, server, timeout: patience } = self;
        to.write_all(format!("{number} {mark} {server} {}\n", patience.as_secs()).as_bytes())
    }

    fn read(from: &mut impl io::BufRead) -> Option<Self> {
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        let [number, mark, server, seconds] = numbers[..] else { return None };
        let (number, server) = (number.try_into().ok()?, server.try_into().ok()?);
        Some(Self { number, mark, server, timeout: Duration::from_secs(seconds) })
    }

    /// The device, if it is orphaned, or its only server is the one that has ended: the kernel may
    /// not have noticed that end yet.
    fn orphaned_device(&self, control: &mut UblkControl) -> Option<UblkInfo> {
        let info = control.info(self.number).ok().filter(|info| info.user_data == self.mark)?;
        let is_left = match info.state() {
            UblkState::Quiesced => true,
            UblkState::Live => u32::try_from(info.process) == Ok(self.server) || info.process <= 0,
            UblkState::Dead | UblkState::FailIo => false,
        };
        is_left.then_some(info)
    }
}

/// Guards the device named on standard input after the end of standard input. Returns a result for
/// the log; `None` if another process has taken the device over, or it is gone.
///
/// # Errors
/// Fails if standard input has no orders, or the driver fails.
pub fn run() -> io::Result<Option<String>> {
    // Signals that end the server by name, terminal or service must not end the guard.
    SigSet::all().thread_block()?;
    let mut stdin = io::stdin().lock();
    let orders = UblkGuardOrders::read(&mut stdin).ok_or_else(|| {
        io::Error::other("this command is internal to `weir serve --ublk=0,dead-timeout=SECONDS`")
    })?;
    // 0 means the writing process. Fails in a container, where the guard ends with the container.
    let _ = fs::write("/sys/fs/cgroup/cgroup.procs", "0");
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut control = UblkControl::open()?;
    control.lock_as_keeper(orders.number)?;
    writeln!(io::stdout(), "guards")?;
    io::copy(&mut stdin, &mut io::sink())?;
    if orders.orphaned_device(&mut control).is_none() {
        return Ok(None);
    }
    thread::sleep(orders.timeout);
    loop {
        match orders.orphaned_device(&mut control) {
            None => return Ok(None),
            Some(info) if info.state() == UblkState::Quiesced => {
                begin_removal(info)?;
                return Ok(Some(format!(
                    "{}: no process has served it for {} s, so the device is removed: its pending \
                     requests fail, and unwritten data is lost",
                    path(orders.number).display(),
                    orders.timeout.as_secs()
                )));
            }
            Some(_) => thread::sleep(CHECK_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_round_trip() {
        let orders =
            UblkGuardOrders { number: 7, mark: u64::MAX, server: 12, timeout: Duration::from_secs(86_400) };
        let mut line = Vec::new();
        orders.write(&mut line).unwrap();
        assert_eq!(UblkGuardOrders::read(&mut &line[..]), Some(orders));
        for wrong in ["", "\n", "1 2 3\n", "1 2 3 4 5\n", "4294967296 2 3 4\n", "1 2 -3 4\n", "a 2 3 4\n"] {
            assert_eq!(UblkGuardOrders::read(&mut wrong.as_bytes()), None, "{wrong:?}");
        }
    }
}
