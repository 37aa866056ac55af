//! A process that outlives whoever serves a device: once that has ended, and nobody has taken the
//! device over in time, it removes the device, so that nobody waits for it for ever.
//!
//! ```text
//!   server ──── pipe ────► guard      the pipe ends ──► waits ──► removes the device, if that waits too
//!     │                      ▲
//!     └─ next server: ends ──┘  and then looks how the device is doing
//! ```
//!
//! **Never under a newcomer.** The driver does not tell of a device that waits whether somebody has
//! begun to take it over. So whoever takes one over, or removes it, first ends its guard, and what
//! nobody guards nobody removes. A guard is found by a lock, at the byte of the device's number in
//! the driver's node: it is there as long as the process is, and nothing is left of either.
//!
//! It knows the device by its number and its [mark](super::mark), and needs the rights of whoever
//! serves it. A device that ends with its process needs no guard.

use std::{
    env, fs,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    process::{self, Child, Command, Stdio},
    thread,
    time::Duration,
};

use nix::sys::signal::SigSet;
use reactor::ublk::{Control, Info, State, feature};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::known::{begin_removal, path};

/// The hidden command that a guard is.
const COMMAND: &str = "ublk-guard";
/// Set for a server in the background: who started it waits until nobody has its standard error.
const IN_BACKGROUND: &str = "WEIR_IN_BACKGROUND";
/// How often it is looked whether the kernel has noticed the end of a process.
const LOOK: Duration = Duration::from_millis(100);

/// The process that guards a device; it begins when this is dropped, as it does when this process
/// ends.
#[derive(Debug)]
pub(super) struct Guard(Option<Child>);

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        // It ends by itself: at once where the device has gone.
        let wait = move || drop(child.wait());
        let _ = thread::Builder::new().name("guard's end".into()).spawn(wait);
    }
}

/// Has a device that outlives this process be guarded from here on, for so many seconds, or not at
/// all (0). Whoever guarded it before has ended when this returns: what was known of the device may
/// be so no more.
pub(super) fn replace(control: &Control, device: &Info, seconds: u32) -> io::Result<Option<Guard>> {
    if device.features & feature::USER_RECOVERY == 0 {
        return Ok(None);
    }
    dismiss(control, device.number)?;
    (seconds > 0).then(|| Guard::start(device, seconds)).transpose()
}

/// Ends the guard of a device, if it has one.
pub(super) fn dismiss(control: &Control, number: u32) -> io::Result<()> {
    while let Some(process) = control.guardian(number)? {
        let Some(pid) = Some(process).filter(|process| *process > 0).and_then(Pid::from_raw) else {
            return Err(io::Error::other(
                "a process guards it that is not to be seen from here (end `weir ublk-guard` where its weir ran)",
            ));
        };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => continue,
            handle => handle?,
        };
        // Another process may have had the number by then, but not this lock.
        if control.guardian(number)? != Some(process) {
            continue;
        }
        match pidfd_send_signal(&handle, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Not before whatever it has asked of the driver is over.
        while let Err(Errno::INTR) = poll(&mut [PollFd::new(&handle, PollFlags::IN)], None) {}
    }
    Ok(())
}

impl Guard {
    /// It has the lock when this returns.
    fn start(device: &Info, seconds: u32) -> io::Result<Self> {
        let is_in_background = env::var_os(IN_BACKGROUND).is_some();
        // This very program, even if its file was replaced.
        let mut child = Command::new("/proc/self/exe")
            .arg(COMMAND)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if is_in_background { Stdio::null() } else { Stdio::inherit() })
            .env_remove("NOTIFY_SOCKET")
            .process_group(0)
            .spawn()?;
        let (stdin, stdout) = (child.stdin.as_mut(), child.stdout.take());
        let (mut stdin, stdout) = stdin.zip(stdout).ok_or_else(|| io::Error::other("no pipe"))?;
        let orders = Orders {
            number: device.number,
            mark: device.mark,
            server: process::id(),
            patience: Duration::from_secs(seconds.into()),
        };
        let told = orders.write(&mut stdin);
        let guard = Self(Some(child));
        told?;
        let mut ready = String::new();
        BufReader::new(stdout).read_line(&mut ready)?;
        match ready.is_empty() {
            true => Err(io::Error::other("it has ended (the log may say why)")),
            false => Ok(guard),
        }
    }
}

/// What a guard is told, in one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Orders {
    number: u32,
    mark: u64,
    /// Who serves the device.
    server: u32,
    /// How long it may wait for who takes it over.
    patience: Duration,
}

impl Orders {
    fn write(self, to: &mut impl io::Write) -> io::Result<()> {
        let Self { number, mark, server, patience } = self;
        to.write_all(format!("{number} {mark} {server} {}\n", patience.as_secs()).as_bytes())
    }

    fn read(from: &mut impl io::BufRead) -> Option<Self> {
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        let [number, mark, server, seconds] = numbers[..] else { return None };
        let (number, server) = (number.try_into().ok()?, server.try_into().ok()?);
        Some(Self { number, mark, server, patience: Duration::from_secs(seconds) })
    }

    /// The device, if it is there and nobody has it but perhaps who served it: the kernel says so
    /// as long as it has not noticed the end of that.
    fn left(&self, control: &mut Control) -> Option<Info> {
        let info = control.info(self.number).ok().filter(|info| info.mark == self.mark)?;
        let is_left = match info.state() {
            State::Waiting => true,
            State::Live => u32::try_from(info.process) == Ok(self.server) || info.process <= 0,
            State::Dead | State::Failing => false,
        };
        is_left.then_some(info)
    }
}

/// Guards the device that standard input names, from the end of standard input on. Returns what
/// came of it, for the log; nothing where somebody has taken the device over, or it is gone.
///
/// # Errors
/// If nobody is there who says what to guard, or the driver refuses.
pub fn run() -> io::Result<Option<String>> {
    // What ends the server by its name, its terminal or its service spares this one.
    SigSet::all().thread_block()?;
    let mut stdin = io::stdin().lock();
    let orders = Orders::read(&mut stdin).ok_or_else(|| {
        io::Error::other(
            "this is a part of `weir serve --ublk=0,dead-timeout=SECONDS`, and nothing by itself",
        )
    })?;
    // 0 is the process that writes. Refused in a container, where all of it ends together.
    let _ = fs::write("/sys/fs/cgroup/cgroup.procs", "0");
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut control = Control::open()?;
    control.guard(orders.number)?;
    writeln!(io::stdout(), "guards")?;
    io::copy(&mut stdin, &mut io::sink())?;
    if orders.left(&mut control).is_none() {
        return Ok(None);
    }
    thread::sleep(orders.patience);
    loop {
        match orders.left(&mut control) {
            None => return Ok(None),
            Some(info) if info.state() == State::Waiting => {
                begin_removal(info)?;
                return Ok(Some(format!(
                    "{}: nobody has served it for {} s, so the device goes: what it was asked fails, and what was not written yet is lost",
                    path(orders.number).display(),
                    orders.patience.as_secs()
                )));
            }
            Some(_) => thread::sleep(LOOK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_as_they_were_written() {
        let orders = Orders { number: 7, mark: u64::MAX, server: 12, patience: Duration::from_secs(86_400) };
        let mut line = Vec::new();
        orders.write(&mut line).unwrap();
        assert_eq!(Orders::read(&mut &line[..]), Some(orders));
        for wrong in ["", "\n", "1 2 3\n", "1 2 3 4 5\n", "4294967296 2 3 4\n", "1 2 -3 4\n", "a 2 3 4\n"] {
            assert_eq!(Orders::read(&mut wrong.as_bytes()), None, "{wrong:?}");
        }
    }
}
