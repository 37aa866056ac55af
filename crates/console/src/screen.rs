//! The terminal while it is ours, and giving it back.

use std::{
    io::{self, IsTerminal as _, Stdout, stdin, stdout},
    panic,
};

use nix::sys::signal::{Signal, raise};
use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor::Show,
        execute,
        terminal::{
            Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
        },
    },
};

/// Whether there is a terminal to draw on and to read keys from.
pub fn is_possible() -> bool {
    stdin().is_terminal() && stdout().is_terminal()
}

/// A terminal in raw mode with an empty screen of its own. Dropped, it is as it was.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// If it cannot be set up; it is then as it was.
    pub fn enter() -> io::Result<Self> {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |information| {
            // First, or the message would be drawn over, in a terminal that does not even break lines.
            leave();
            before(information);
        }));
        take().inspect_err(|_| leave())?;
        let terminal = Terminal::new(CrosstermBackend::new(stdout())).inspect_err(|_| leave())?;
        Ok(Self { terminal })
    }

    /// Shows what `draw` draws.
    ///
    /// # Errors
    /// If the terminal is gone.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }

    /// Gives the terminal back and stops, as Ctrl-Z does elsewhere; takes it again when continued.
    ///
    /// # Errors
    /// If the terminal is gone by then.
    pub fn stop(&mut self) -> io::Result<()> {
        leave();
        // Not SIGTSTP, which is awaited like the others: this cannot be.
        raise(Signal::SIGSTOP)?;
        take()?;
        // A new one, which draws everything. `Terminal::clear` would ask the terminal where its cursor is, and the
        // answer would go to whoever reads the keys.
        self.terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

fn take() -> io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))
}

/// A terminal that is gone cannot be given back, and nobody is there to be told.
fn leave() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
