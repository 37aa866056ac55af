//! Progress of a long command on standard error: a bar on a terminal, otherwise one line for each
//! step. Nothing is drawn by a background job.

use std::{
    cell::RefCell,
    io::{IsTerminal as _, Write as _, stderr},
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{foreground::ForegroundTerminal, print_notice};

const TICK: Duration = Duration::from_millis(100);
const DRAWINGS_A_SECOND: u8 = 20;
// Delay before the reason of a wait is printed.
const NOTICE_DELAY: Duration = Duration::from_secs(2);
const SPINNER: &str = "{spinner} {msg} {elapsed}";

/// Progress bar of this length; an invalid template falls back to the default style.
pub fn bar(template: &str, length: u64) -> ProgressBar {
    styled(ProgressBar::new(length), template)
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    bar.set_draw_target(ProgressDrawTarget::term_like_with_hz(
        Box::new(ForegroundTerminal),
        DRAWINGS_A_SECOND,
    ));
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Progress of a command in steps.
#[derive(Debug)]
pub struct StepProgress {
    mode: ProgressMode,
    bar: RefCell<Option<ProgressBar>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProgressMode {
    Bars,
    Lines,
    Silent,
}

impl StepProgress {
    /// Draws nothing with `json`: the output is for a program.
    pub fn new(json: bool) -> Self {
        let mode = match (json, stderr().is_terminal()) {
            (true, _) => ProgressMode::Silent,
            (false, true) => ProgressMode::Bars,
            (false, false) => ProgressMode::Lines,
        };
        Self { mode, bar: RefCell::default() }
    }

    /// Begins a step of this number of bytes.
    pub fn begin(&self, label: &str, bytes: u64) {
        let template = "{msg} {wide_bar} {bytes}/{total_bytes}";
        self.show(label, || ProgressBar::new(bytes), template);
    }

    /// Sets the number of bytes completed in this step.
    pub fn advance(&self, bytes: u64) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.set_position(bytes);
        }
    }

    /// Begins a step of unknown length; only the elapsed time is shown.
    pub fn step(&self, label: &str) {
        self.show(label, ProgressBar::new_spinner, SPINNER);
    }

    /// Ends the step and removes its bar.
    pub fn end(&self) {
        if let Some(bar) = self.bar.borrow_mut().take() {
            bar.finish_and_clear();
        }
    }

    fn show(&self, label: &str, bar: impl Fn() -> ProgressBar, template: &str) {
        match self.mode {
            ProgressMode::Silent => {}
            ProgressMode::Lines => {
                let _ = writeln!(stderr(), "{label}");
            }
            ProgressMode::Bars => {
                let bar = styled(bar(), template).with_message(label.to_owned());
                // A separate thread draws: the command may block in a system call.
                bar.enable_steady_tick(TICK);
                *self.bar.borrow_mut() = Some(bar);
            }
        }
    }
}

/// Line with the current activity of a command, only on a terminal. Removed on drop.
#[derive(Debug)]
pub struct ActivitySpinner(Option<ProgressBar>);

impl ActivitySpinner {
    /// Starts to draw, if standard error is a terminal.
    #[expect(clippy::new_without_default, reason = "it begins to be drawn")]
    pub fn new() -> Self {
        Self(stderr().is_terminal().then(|| {
            let bar = styled(ProgressBar::new_spinner(), SPINNER);
            bar.enable_steady_tick(TICK);
            bar
        }))
    }

    /// Replaces the text. `text` is called only if there is a terminal.
    pub fn set_message(&self, text: impl FnOnce() -> String) {
        if let Some(bar) = &self.0 {
            bar.set_message(text());
        }
    }
}

impl Drop for ActivitySpinner {
    fn drop(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

/// Notice on standard error of a wait that takes longer than two seconds. Prints nothing if
/// dropped earlier.
#[derive(Debug)]
#[must_use]
pub struct DelayedNotice(Option<(Sender<()>, JoinHandle<()>)>);

impl DelayedNotice {
    /// Starts the delay.
    pub fn start(text: String) -> Self {
        let (end, cancelled) = channel();
        // A thread, because the caller blocks in the operation that it waits for.
        let printer = thread::spawn(move || {
            if cancelled.recv_timeout(NOTICE_DELAY) == Err(RecvTimeoutError::Timeout) {
                print_notice(&text);
            }
        });
        Self(Some((end, printer)))
    }
}

impl Drop for DelayedNotice {
    fn drop(&mut self) {
        let Some((end, printer)) = self.0.take() else { return };
        drop(end);
        // So that a notice that is being printed precedes the caller's next output.
        let _ = printer.join();
    }
}
