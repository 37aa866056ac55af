//! Progress of a long command: a bar on a terminal, or with `-p` the lines of `qemu-img -p`.
//!
//! Never prints to anything but a terminal unless requested.

use std::{
    fmt,
    io::{IsTerminal as _, Write as _, stderr, stdout},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use clap::Args;
use console::progress::bar;
use indicatif::ProgressBar;

// `-p` prints at most one line per percent, as qemu-img does.
const STEPS: u64 = 100;

const TEMPLATE: &str = "{msg} {wide_bar} {bytes}/{total_bytes} {eta}";

#[derive(Clone, Copy, Debug, Default, Args)]
pub(super) struct ProgressArgs {
    /// Show the progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    pub(super) quiet: bool,
}

impl ProgressArgs {
    pub(super) fn progress(self, label: &str, total: u64) -> CommandProgress {
        let output = match (stderr().is_terminal(), self.progress) {
            _ if self.quiet => ProgressOutput::Silent,
            (true, _) => ProgressOutput::Bar(bar(TEMPLATE, total).with_message(label.to_owned())),
            (false, true) => {
                print(0);
                ProgressOutput::Lines(Mutex::new(0))
            }
            (false, false) => ProgressOutput::Silent,
        };
        CommandProgress { output, total, done: AtomicU64::new(0) }
    }
}

pub(super) struct CommandProgress {
    output: ProgressOutput,
    total: u64,
    done: AtomicU64,
}

enum ProgressOutput {
    Bar(ProgressBar),
    Lines(Mutex<u64>),
    Silent,
}

impl fmt::Debug for CommandProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Progress({} of {})", self.done.load(Ordering::Relaxed), self.total)
    }
}

impl CommandProgress {
    pub(super) fn advance(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        match &self.output {
            ProgressOutput::Bar(bar) => bar.set_position(done),
            ProgressOutput::Lines(printed) => {
                let step = (u128::from(done) * u128::from(STEPS) / u128::from(self.total.max(1))) as u64;
                let mut printed = printed.lock().unwrap_or_else(PoisonError::into_inner);
                if step > *printed {
                    *printed = step;
                    print(step);
                }
            }
            ProgressOutput::Silent => {}
        }
    }

    pub(super) fn end(&self) {
        match &self.output {
            ProgressOutput::Bar(bar) => bar.finish_and_clear(),
            ProgressOutput::Lines(_) => {
                print(STEPS);
                let _ = writeln!(stdout());
            }
            ProgressOutput::Silent => {}
        }
    }
}

fn print(step: u64) {
    let mut stdout = stdout();
    let _ = write!(stdout, "    ({:.2}/100%)\r", step as f64);
    let _ = stdout.flush();
}
