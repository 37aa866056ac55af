//! A pseudo-terminal for a program: the screens it shows are recorded, keys are sent. A program
//! draws only changes, so its raw output may not contain a shown word in one piece.

use std::{
    ffi::OsStr,
    fs::File,
    io::{Read as _, Write as _},
    mem,
    num::NonZero,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Instant,
};

use nix::{
    pty::{OpenptyResult, Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::{DEADLINE, WEIR};

#[derive(PartialEq)]
struct ScreenContents {
    text: String,
    /// True while the program uses the alternate screen.
    is_alternate: bool,
}

#[derive(Default)]
struct RecordedScreens {
    screens: Vec<ScreenContents>,
    ended: bool,
}

const ROWS: NonZero<u16> = NonZero::new(24).unwrap();
const COLUMNS: NonZero<u16> = NonZero::new(80).unwrap();

/// A program on a terminal. Dropping it ends the program.
pub(crate) struct Terminal {
    child: Child,
    keys: File,
    drawn: Arc<(Mutex<RecordedScreens>, Condvar)>,
}

impl Terminal {
    pub(crate) fn weir<T: AsRef<OsStr>>(arguments: impl IntoIterator<Item = T>) -> Self {
        let size = Winsize { ws_row: ROWS.get(), ws_col: COLUMNS.get(), ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } =
            openpty(Some(&size), None).expect("pseudo-terminals are available");
        let end = || Stdio::from(slave.try_clone().expect("descriptors are available"));
        let mut command = Command::new(WEIR);
        command.args(arguments).env("TERM", "xterm-256color").env_remove("WEIR_QMP");
        let child =
            command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("cargo built the program");
        // The command holds the slave open, so that reads would never end.
        drop((command, slave));
        let drawn = Arc::new((Mutex::new(RecordedScreens::default()), Condvar::new()));
        let screen = File::from(master);
        let keys = screen.try_clone().expect("descriptors are available");
        let collected = Arc::clone(&drawn);
        thread::spawn(move || gather(screen, &collected));
        Self { child, keys, drawn }
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, expected: &str) {
        self.wait_until(&format!("{expected:?} was not drawn"), |shown| shown.text.contains(expected));
    }

    #[track_caller]
    pub(crate) fn wait_until_gone(&self, text: &str) {
        self.wait_until(&format!("{text:?} is still drawn"), |shown| !shown.text.contains(text));
    }

    #[track_caller]
    pub(crate) fn wait_until_restored(&self) {
        self.wait_until("the screen was not restored", |shown| !shown.is_alternate);
    }

    #[track_caller]
    fn wait_until(&self, failure: &str, is_wanted: impl Fn(&ScreenContents) -> bool) {
        let until = Instant::now() + DEADLINE;
        let (drawn, changed) = &*self.drawn;
        let mut drawn = drawn.lock().expect("no holder panics");
        loop {
            if let Some(index) = drawn.screens.iter().position(&is_wanted) {
                drawn.screens.drain(..index);
                return;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || drawn.ended {
                let screens = mem::take(&mut drawn.screens);
                // Release the mutex first: a panic would poison it for the reader thread.
                drop(drawn);
                let last = screens.last().map(|shown| shown.text.as_str()).unwrap_or_default();
                panic!("{failure} on {} screens, of which this is the last:\n{last}", screens.len());
            }
            drawn = changed.wait_timeout(drawn, left).expect("no holder panics").0;
        }
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal is open");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("the child was not waited for");
    }

    #[track_caller]
    pub(crate) fn wait_for_stop(&self) {
        let status = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).expect("the child is ours");
        assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    }

    #[track_caller]
    pub(crate) fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("the child was not waited for")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn gather(mut screen: File, drawn: &(Mutex<RecordedScreens>, Condvar)) {
    let mut terminal = vt100::Parser::new(ROWS, COLUMNS, 0);
    let mut buffer = [0; 4096];
    loop {
        // EIO: the slave side was closed.
        let read = screen.read(&mut buffer).unwrap_or(0);
        terminal.process(&buffer[..read]);
        let shown = ScreenContents {
            text: terminal.screen().contents(),
            is_alternate: terminal.screen().alternate_screen(),
        };
        let mut recorded = drawn.0.lock().expect("no holder panics");
        if recorded.screens.last() != Some(&shown) {
            recorded.screens.push(shown);
        }
        recorded.ended = read == 0;
        drawn.1.notify_all();
        if read == 0 {
            return;
        }
    }
}
