//! A daemon under test, and a directory of the test's own; both are gone when dropped.

use std::{
    env, fs,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{self, Child, ChildStderr, Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// The program, without the environment of a service manager that may run the test.
pub(crate) fn weir() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    for variable in ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"] {
        command.env_remove(variable);
    }
    command
}

/// Exit status and standard error of a command that ends by itself.
pub(crate) fn failure(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// A running daemon.
pub(crate) struct Daemon {
    child: Child,
    log: BufReader<ChildStderr>,
    /// The line that said so.
    pub(crate) ready: String,
}

impl Daemon {
    /// Starts it and waits until it is ready.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut daemon = Self { child, log, ready: String::new() };
        daemon.ready = daemon.line_with("ready");
        daemon
    }

    /// The next line of the log that holds `text`.
    pub(crate) fn line_with(&mut self, text: &str) -> String {
        let mut before = String::new();
        loop {
            let mut line = String::new();
            let length = self.log.read_line(&mut line).unwrap();
            assert!(length > 0, "the daemon ended without saying {text:?}:\n{before}");
            if line.contains(text) {
                return line.trim_end().to_owned();
            }
            before += &line;
        }
    }

    /// The process's number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.id()).unwrap()), signal).unwrap();
    }

    /// Waits for the end; the exit status, or `None` if a signal ended it.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Fails where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory that is removed in the end.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// An empty directory, named after the test.
    pub(crate) fn new(test: &str) -> Self {
        let path = env::temp_dir().join(format!("weir-{test}-{}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A path in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The address of a Unix socket in it.
    pub(crate) fn address(&self, name: &str) -> String {
        format!("unix:{}", self.path(name).display())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
