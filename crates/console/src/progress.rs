//! What a long command is at: on standard error, a bar on a terminal, else a line for each step.
//! In the background of a terminal, nothing is drawn.

use std::{
    cell::RefCell,
    io::{IsTerminal as _, Write as _, stderr},
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{foreground::Foreground, say};

const TICK: Duration = Duration::from_millis(100);
const DRAWINGS_A_SECOND: u8 = 20;
/// After which somebody wonders.
const MOMENT: Duration = Duration::from_secs(2);
const SPINNER: &str = "{spinner} {msg} {elapsed}";

/// A bar of this length and form, in the standard one if the template is none.
pub fn bar(template: &str, length: u64) -> ProgressBar {
    styled(ProgressBar::new(length), template)
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    bar.set_draw_target(ProgressDrawTarget::term_like_with_hz(Box::new(Foreground), DRAWINGS_A_SECOND));
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// The telling of progress.
#[derive(Debug)]
pub struct Progress {
    how: How,
    bar: RefCell<Option<ProgressBar>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Bars,
    Lines,
    Silent,
}

impl Progress {
    /// Silent where the results are for a program.
    pub fn new(json: bool) -> Self {
        let how = match (json, stderr().is_terminal()) {
            (true, _) => How::Silent,
            (false, true) => How::Bars,
            (false, false) => How::Lines,
        };
        Self { how, bar: RefCell::default() }
    }

    /// A step of so many bytes begins.
    pub fn begin(&self, what: &str, bytes: u64) {
        let template = "{msg} {wide_bar} {bytes}/{total_bytes}";
        self.show(what, || ProgressBar::new(bytes), template);
    }

    /// So many of them are done.
    pub fn advance(&self, bytes: u64) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.set_position(bytes);
        }
    }

    /// A step begins of which only the time is known.
    pub fn step(&self, what: &str) {
        self.show(what, ProgressBar::new_spinner, SPINNER);
    }

    /// It has ended.
    pub fn end(&self) {
        if let Some(bar) = self.bar.borrow_mut().take() {
            bar.finish_and_clear();
        }
    }

    fn show(&self, what: &str, bar: impl Fn() -> ProgressBar, template: &str) {
        match self.how {
            How::Silent => {}
            How::Lines => {
                let _ = writeln!(stderr(), "{what}");
            }
            How::Bars => {
                let bar = styled(bar(), template).with_message(what.to_owned());
                bar.enable_steady_tick(TICK);
                *self.bar.borrow_mut() = Some(bar);
            }
        }
    }
}

/// A line that says what a command is at, on a terminal alone; gone when this is dropped.
#[derive(Debug)]
pub struct Spinner(Option<ProgressBar>);

impl Spinner {
    /// Begins.
    #[expect(clippy::new_without_default, reason = "it begins to be drawn")]
    pub fn new() -> Self {
        Self(stderr().is_terminal().then(|| {
            let bar = styled(ProgressBar::new_spinner(), SPINNER);
            bar.enable_steady_tick(TICK);
            bar
        }))
    }

    /// Shows another text.
    pub fn say(&self, text: impl FnOnce() -> String) {
        if let Some(bar) = &self.0 {
            bar.set_message(text());
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

/// Says on standard error what is waited for, once that has taken a moment; nothing where this is
/// dropped before.
#[derive(Debug)]
#[must_use]
pub struct IfLong(Option<(Sender<()>, JoinHandle<()>)>);

impl IfLong {
    /// The waiting begins.
    pub fn say(text: String) -> Self {
        let (end, ended) = channel();
        let telling = thread::spawn(move || {
            if ended.recv_timeout(MOMENT) == Err(RecvTimeoutError::Timeout) {
                say(&text);
            }
        });
        Self(Some((end, telling)))
    }
}

impl Drop for IfLong {
    fn drop(&mut self) {
        let Some((end, telling)) = self.0.take() else { return };
        drop(end);
        // What follows stands behind what was said.
        let _ = telling.join();
    }
}
