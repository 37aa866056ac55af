//! A daemon (`weir serve` or another command that serves): started until it reports that it is
//! ready, and ended with SIGTERM, cleanly.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::ExitStatusExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{DEADLINE, Scratch, client, log::LogCollector, pause, scratch::text};

#[derive(Clone)]
enum ListenMode {
    Unix(PathBuf),
    Tcp,
    Explicit,
}

pub(crate) struct Serve {
    subcommand: &'static str,
    /// Command before the program, such as `unshare` or `setpriv`.
    before: Vec<OsString>,
    arguments: Vec<OsString>,
    listen: ListenMode,
    /// Default address of its control socket.
    control: PathBuf,
    /// Standard input and environment.
    input: Option<OwnedFd>,
    environment: Vec<(&'static str, OsString)>,
    /// Scratch directories that are removed with the daemon.
    scratch: Option<Scratch>,
}

impl Serve {
    pub(crate) fn new(scratch: &Scratch) -> Self {
        // A test may run several daemons.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self {
            subcommand: "serve",
            before: Vec::new(),
            arguments: Vec::new(),
            listen: ListenMode::Unix(scratch.socket("nbd")),
            control: scratch.socket(&format!("control{number}")),
            input: None,
            environment: Vec::new(),
            scratch: None,
        }
    }

    /// A different command that serves, with addresses in its arguments.
    pub(crate) fn subcommand(subcommand: &'static str) -> Self {
        let serve = Self::with_own_scratch();
        Self { subcommand, listen: ListenMode::Explicit, ..serve }
    }

    pub(crate) fn owning(scratch: Scratch) -> Self {
        let serve = Self::new(&scratch);
        Self { scratch: Some(scratch), ..serve }
    }

    /// A daemon with its own scratch directories.
    pub(crate) fn with_own_scratch() -> Self {
        Self::owning(Scratch::new())
    }

    /// Serves the image `disk.raw`, filled with [`pattern`](super::pattern), in its own scratch
    /// directories.
    pub(crate) fn filled(bytes: u64) -> Self {
        let scratch = Scratch::new();
        let image = scratch.filled("disk.raw", bytes);
        Self::owning(scratch).arg(image)
    }

    /// Like [`Self::filled`], with a sparse image.
    pub(crate) fn sparse(bytes: u64) -> Self {
        let scratch = Scratch::new();
        let image = scratch.sparse("disk.raw", bytes);
        Self::owning(scratch).arg(image)
    }

    pub(crate) fn reading(self, input: impl Into<OwnedFd>) -> Self {
        Self { input: Some(input.into()), ..self }
    }

    pub(crate) fn env(mut self, name: &'static str, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name, value.as_ref().to_owned()));
        self
    }

    pub(crate) fn on_tcp(self) -> Self {
        Self { listen: ListenMode::Tcp, ..self }
    }

    pub(crate) fn at_given_addresses(self) -> Self {
        Self { listen: ListenMode::Explicit, ..self }
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    pub(crate) fn args<T: AsRef<OsStr>>(self, arguments: impl IntoIterator<Item = T>) -> Self {
        arguments.into_iter().fold(self, Self::arg)
    }

    /// Started by another program, which becomes weir by `exec`.
    pub(crate) fn wrapped_by<T: AsRef<OsStr>>(mut self, before: impl IntoIterator<Item = T>) -> Self {
        self.before.extend(before.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    fn command(&mut self) -> Command {
        let weir = OsStr::new(client::WEIR);
        let mut command = match self.before.split_first() {
            Some((program, arguments)) => {
                client::need(text(Path::new(program)));
                let mut command = Command::new(program);
                command.args(arguments).arg(weir);
                command
            }
            None => Command::new(weir),
        };
        command.arg(self.subcommand).args(&self.arguments);
        match &self.listen {
            ListenMode::Unix(path) => {
                command.arg("--nbd").arg(format!("unix:{}", text(path)));
            }
            ListenMode::Tcp => {
                // Port 0: the kernel chooses a free port, which the ready line contains.
                command.args(["--nbd", "127.0.0.1:0"]);
            }
            ListenMode::Explicit => {}
        }
        let input = self.input.take().map_or_else(Stdio::null, Stdio::from);
        command.stdin(input).stdout(Stdio::null()).stderr(Stdio::piped());
        // The developer's environment must not influence a test.
        for variable in ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "RUST_LOG"] {
            command.env_remove(variable);
        }
        // The default control socket must not be the host's.
        command.env("WEIR_QMP", format!("unix:{}", text(&self.control)));
        command.envs(self.environment.drain(..));
        command
    }

    fn spawn(&mut self) -> (Child, LogCollector) {
        let mut child = self.command().spawn().expect("cargo built the program");
        let log = LogCollector::gather(child.stderr.take().expect("standard error is piped"));
        (child, log)
    }

    #[track_caller]
    pub(crate) fn start(mut self) -> Weir {
        let (mut child, log) = self.spawn();
        // `None` at the end of the log as well: a start that fails does not wait for the deadline.
        let Some(ready) = log.wait_for(DEADLINE, |line| line.contains("ready")) else {
            let _ = child.kill();
            let _ = child.wait();
            panic!("weir did not become ready; its log:\n{}", log.text());
        };
        Weir { child, log, ready, listen: self.listen, ended: false, _scratch: self.scratch }
    }

    /// Does not wait until the daemon is ready.
    pub(crate) fn spawn_unready(mut self) -> Weir {
        let (child, log) = self.spawn();
        let ready = String::new();
        Weir { child, log, ready, listen: self.listen, ended: false, _scratch: self.scratch }
    }

    /// Runs the daemon to its end; fails if it does not exit on its own.
    #[track_caller]
    fn run(mut self) -> (ExitStatus, String) {
        let (mut child, log) = self.spawn();
        // The log ends when the process has closed standard error.
        if !log.wait_for_end(DEADLINE) {
            let _ = child.kill();
            let _ = child.wait();
            panic!("weir should have ended; its log:\n{}", log.text());
        }
        let status = child.wait().expect("the child is ours");
        assert!(!log.text().contains("panicked"), "weir panicked:\n{}", log.text());
        (status, log.text())
    }

    /// Asserts exit status 1 (failure); returns its messages.
    #[track_caller]
    pub(crate) fn fails(self) -> String {
        self.ends_with(1)
    }

    /// Asserts exit status 2 (wrong usage); returns its messages.
    #[track_caller]
    pub(crate) fn rejects_usage(self) -> String {
        self.ends_with(2)
    }

    #[track_caller]
    fn ends_with(self, expected: i32) -> String {
        let (status, outcome) = self.run();
        assert_eq!(status.code(), Some(expected), "exit status; standard error:\n{outcome}");
        assert!(outcome.starts_with("weir: "), "an error begins with the program's name:\n{outcome}");
        outcome
    }
}

/// A running daemon. Dropping it sends SIGTERM and asserts exit status 0 and no panic in the log.
pub(crate) struct Weir {
    child: Child,
    log: LogCollector,
    ready: String,
    listen: ListenMode,
    ended: bool,
    _scratch: Option<Scratch>,
}

impl Weir {
    pub(crate) fn socket(&self) -> &Path {
        match &self.listen {
            ListenMode::Unix(path) => path,
            ListenMode::Tcp | ListenMode::Explicit => panic!("this daemon has no socket of the harness"),
        }
    }

    /// The port on 127.0.0.1, from the line that reports readiness.
    pub(crate) fn port(&self) -> u16 {
        let after = self.ready.split("127.0.0.1:").nth(1).unwrap_or_default();
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap_or_else(|_| panic!("no port in {:?}", self.ready))
    }

    pub(crate) fn uri(&self, export: &str) -> String {
        match &self.listen {
            ListenMode::Unix(path) => format!("nbd+unix:///{export}?socket={}", text(path)),
            ListenMode::Tcp => format!("nbd://127.0.0.1:{}/{export}", self.port()),
            ListenMode::Explicit => panic!("the test knows where it listens"),
        }
    }

    /// Runs a Python script: `h` is connected to the export, and `arguments` contains its URI.
    #[track_caller]
    pub(crate) fn nbdsh(&self, export: &str, script: &str) {
        client::nbdsh(&format!("h.connect_uri(arguments[0])\n{script}"), [self.uri(export)]);
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(crate) fn ready_line(&self) -> &str {
        &self.ready
    }

    /// Resident memory in bytes: VmRSS of proc_pid_status(5).
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("the daemon runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("every process has it");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of KiB") << 10
    }

    #[track_caller]
    pub(crate) fn wait_for_log(&self, text_in_line: &str) -> String {
        let line = self.log.wait_for(DEADLINE, |line| line.contains(text_in_line));
        line.unwrap_or_else(|| panic!("{text_in_line:?} is missing in the log:\n{}", self.log.text()))
    }

    /// The log so far.
    pub(crate) fn log_text(&self) -> String {
        self.log.text()
    }

    /// Waits until `count` lines of the log contain the text.
    #[track_caller]
    pub(crate) fn wait_for_logs(&self, text_in_line: &str, count: usize) {
        let seen = std::cell::Cell::new(0);
        let is_last = |line: &str| {
            seen.set(seen.get() + usize::from(line.contains(text_in_line)));
            seen.get() >= count
        };
        let line = self.log.wait_for(DEADLINE, is_last);
        assert!(line.is_some(), "{text_in_line:?} is not there {count} times:\n{}", self.log.text());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("the daemon is a child that was not waited for");
    }

    /// Sends the signal repeatedly until the daemon has ended.
    #[track_caller]
    pub(crate) fn wait_signalling(self, signal: Signal) -> (ExitStatus, String) {
        let until = Instant::now() + DEADLINE;
        while Instant::now() < until && !self.log.wait_for_end(Duration::from_millis(50)) {
            self.signal(signal);
        }
        self.wait()
    }

    #[track_caller]
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        // Drop must not wait for the child a second time.
        self.ended = true;
        let in_time = self.log.wait_for_end(DEADLINE);
        if !in_time {
            let _ = self.child.kill();
        }
        let status = self.child.wait().expect("the daemon is a child that was not waited for");
        assert!(in_time, "weir did not end; its log:\n{}", self.log.text());
        (status, self.log.text())
    }

    #[track_caller]
    pub(crate) fn stop(self) -> String {
        self.signal(Signal::SIGTERM);
        let (status, log) = self.wait();
        assert_clean(status, &log);
        log
    }

    /// Kills it with SIGKILL, without waiting for its kernel resources.
    pub(crate) fn kill(mut self) {
        self.ended = true;
        self.child.kill().expect("the daemon is a child that was not waited for");
        self.child.wait().expect("the daemon is a child that was not waited for");
    }

    /// Kills it with SIGKILL, and waits until its socket and the locks on its images are gone.
    pub(crate) fn crash(mut self) {
        self.ended = true;
        // Before the kill, while /proc/PID/fd exists.
        let locked = self.open_files();
        self.child.kill().expect("the daemon is a child that was not waited for");
        let status = self.child.wait().expect("the daemon is a child that was not waited for");
        assert_eq!(status.signal(), Some(Signal::SIGKILL as i32));
        // The kernel tears down the io_uring of a dead process asynchronously, without a
        // notification.
        let until = Instant::now() + DEADLINE;
        while Instant::now() < until && (self.is_listening() || locked.iter().any(is_locked)) {
            pause();
        }
    }

    fn open_files(&self) -> Vec<File> {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the daemon runs");
        let paths = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        paths.filter(|path| path.is_file()).filter_map(|path| File::open(path).ok()).collect()
    }

    fn is_listening(&self) -> bool {
        matches!(&self.listen, ListenMode::Unix(path) if UnixStream::connect(path).is_ok())
    }
}

impl Drop for Weir {
    #[allow(clippy::print_stderr, reason = "the test framework shows it with the failing test alone")]
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // If it has died already, the exit status below shows how.
        let _ = kill(self.pid(), Signal::SIGTERM);
        let in_time = self.log.wait_for_end(DEADLINE);
        if !in_time {
            let _ = self.child.kill();
        }
        let status = self.child.wait().expect("the daemon is a child that was not waited for");
        // A second panic would abort the test process: print the log only.
        if thread::panicking() {
            eprintln!("weir's log ({status}):\n{}", self.log.text());
            return;
        }
        assert!(in_time, "weir did not end after SIGTERM; its log:\n{}", self.log.text());
        assert_clean(status, &self.log.text());
    }
}

#[track_caller]
fn assert_clean(status: ExitStatus, log: &str) {
    assert!(status.success() && !log.contains("panicked"), "weir ended with {status}; its log:\n{log}");
}

/// True if another descriptor holds a lock on any byte: fcntl(2), open file description locks.
fn is_locked(file: &File) -> bool {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // F_UNLCK is returned if no other open file description has a conflicting lock.
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)).expect("the locks of a file can be queried");
    lock.l_type != libc::F_UNLCK as i16
}
