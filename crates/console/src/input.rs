//! What comes from the terminal and the system while the whole screen is ours: keys, a new size,
//! signals, each awaited by a thread. Never decides what a key means.

use std::{io, thread};

use nix::sys::signal::{SigSet, Signal};
use ratatui::crossterm::event::{self, KeyEvent, KeyEventKind};

/// Something that came.
#[derive(Debug)]
pub enum Input {
    /// A key was pressed.
    Key(KeyEvent),
    /// The terminal has another size.
    Resized,
    /// SIGTSTP.
    Stop,
    /// SIGTERM, SIGINT or SIGHUP, or there are no more keys to come.
    End,
}

/// Calls `hear` for all that comes, until it returns false. Blocks the signals in this thread and
/// those it starts, so call it before there is another: a signal goes to any that does not block
/// it.
///
/// # Errors
/// Where no thread can be had.
pub fn listen(hear: impl Fn(Input) -> bool + Clone + Send + 'static) -> io::Result<()> {
    let set: SigSet =
        [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGTSTP].into_iter().collect();
    set.thread_block()?;
    let hear_signals = hear.clone();
    let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
        thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
    };
    spawn("signals", Box::new(move || await_signals(set, hear_signals)))?;
    spawn("keys", Box::new(move || await_keys(hear)))
}

fn await_signals(set: SigSet, hear: impl Fn(Input) -> bool) {
    while let Ok(signal) = set.wait() {
        let input = if signal == Signal::SIGTSTP { Input::Stop } else { Input::End };
        if !hear(input) {
            return;
        }
    }
}

fn await_keys(hear: impl Fn(Input) -> bool) {
    loop {
        let input = match event::read() {
            Ok(event::Event::Key(key)) if key.kind != KeyEventKind::Release => Input::Key(key),
            Ok(event::Event::Resize(..)) => Input::Resized,
            Ok(_) => continue,
            Err(_) => Input::End,
        };
        let is_end = matches!(input, Input::End);
        if !hear(input) || is_end {
            return;
        }
    }
}
