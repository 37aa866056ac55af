//! Input events of a full-screen program: keys, changes of the terminal's size, and signals. One
//! thread waits for the keys and one for the signals. Never interprets a key.

use std::{io, thread};

use nix::sys::signal::{SigSet, Signal};
use ratatui::crossterm::event::{self, KeyEvent, KeyEventKind};

/// Event for the main loop.
#[derive(Debug)]
pub enum TerminalEvent {
    /// Key press or repeat.
    Key(KeyEvent),
    /// The size of the terminal changed.
    Resized,
    /// SIGTSTP: the program should stop.
    Stop,
    /// SIGTERM, SIGINT or SIGHUP, or the terminal can no longer be read.
    End,
}

/// Calls `on_event` for each event, on two threads, until it returns false. Blocks the signals in
/// the calling thread and in all threads that it starts afterwards. Call it before other threads
/// exist: the kernel delivers a signal to any thread that does not block it.
///
/// # Errors
/// Fails if the signals cannot be blocked or a thread cannot be started.
pub fn listen(on_event: impl Fn(TerminalEvent) -> bool + Clone + Send + 'static) -> io::Result<()> {
    let set: SigSet =
        [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGTSTP].into_iter().collect();
    // Before the threads start, because they inherit the mask.
    set.thread_block()?;
    let on_signal = on_event.clone();
    let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
        thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
    };
    spawn("signals", Box::new(move || await_signals(set, on_signal)))?;
    spawn("keys", Box::new(move || await_keys(on_event)))
}

fn await_signals(set: SigSet, on_event: impl Fn(TerminalEvent) -> bool) {
    while let Ok(signal) = set.wait() {
        let input = if signal == Signal::SIGTSTP { TerminalEvent::Stop } else { TerminalEvent::End };
        if !on_event(input) {
            return;
        }
    }
}

fn await_keys(on_event: impl Fn(TerminalEvent) -> bool) {
    loop {
        let input = match event::read() {
            // Terminals with the kitty keyboard protocol also report releases.
            Ok(event::Event::Key(key)) if key.kind != KeyEventKind::Release => TerminalEvent::Key(key),
            Ok(event::Event::Resize(..)) => TerminalEvent::Resized,
            Ok(_) => continue,
            Err(_) => TerminalEvent::End,
        };
        let is_end = matches!(input, TerminalEvent::End);
        if !on_event(input) || is_end {
            return;
        }
    }
}
