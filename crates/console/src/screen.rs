//! The terminal while it is ours, and giving it back.

use std::{
    env,
    io::{self, IsTerminal as _, Stdout, stdin, stdout},
    panic,
};

use nix::sys::signal::{Signal, raise};
use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    buffer::Buffer,
    crossterm::{
        cursor::Show,
        execute,
        terminal::{
            Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
        },
    },
    layout::{Constraint, Rect},
    style::{Color, Modifier, Style},
    text::Text,
    widgets::{self, Block, Paragraph, Wrap},
};

/// The least that all of a screen fits into.
pub const LEAST: (u16, u16) = (80, 24);

/// What stands back.
pub const DIM: Style = Style::new().fg(Color::DarkGray);
/// What is held back, and the limits that do it.
pub const HELD: Style = Style::new().fg(Color::Yellow);
/// What is wrong.
pub const WRONG: Style = Style::new().fg(Color::Red);

/// Whether the user wants no colours (<https://no-color.org>).
pub fn is_plain() -> bool {
    env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Makes bold what is told by a colour alone, and leaves all other attributes.
///
/// Crossterm leaves colours away by itself, but then resets the attributes with them.
pub fn without_colours(buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        if [HELD.fg, WRONG.fg].contains(&Some(cell.fg)) {
            cell.modifier |= Modifier::BOLD;
        }
        (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
    }
}

/// Whether the terminal has room for `command`'s screen; if not, that is drawn.
pub fn has_room(frame: &mut Frame<'_>, command: &str) -> bool {
    let (area, (width, height)) = (frame.area(), LEAST);
    if area.width >= width && area.height >= height {
        return true;
    }
    let text = format!(
        "{command} needs {width}×{height}; this terminal is {}×{} (make it larger, or press q)",
        area.width, area.height
    );
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
    false
}

/// An empty window of this size in the middle; returns the area inside its border.
pub fn window(frame: &mut Frame<'_>, area: Rect, width: u16, height: u16, title: String) -> Rect {
    let place = area.centered(Constraint::Length(width), Constraint::Length(height));
    let block = Block::bordered().title(title).border_style(Style::new().fg(Color::Cyan));
    let inner = block.inner(place);
    frame.render_widget(widgets::Clear, place);
    frame.render_widget(block, place);
    inner
}

/// A window that explains the keys.
pub fn help(frame: &mut Frame<'_>, text: &str) {
    let height = text.lines().count() as u16 + 2;
    let inside = window(frame, frame.area(), LEAST.0, height, " keys; any key closes ".to_owned());
    frame.render_widget(Text::from(text), inside);
}

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
            // First, or the message would be drawn over.
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
        let draw = |frame: &mut Frame<'_>| {
            draw(frame);
            if is_plain() {
                without_colours(frame.buffer_mut());
            }
        };
        self.terminal.draw(draw).map(drop)
    }

    /// Gives the terminal back and stops, as Ctrl-Z does elsewhere; takes it again when continued.
    ///
    /// # Errors
    /// If the terminal is gone by then.
    pub fn stop(&mut self) -> io::Result<()> {
        leave();
        // SIGTSTP is awaited like the others; this cannot be.
        raise(Signal::SIGSTOP)?;
        take()?;
        // A new one draws everything. `Terminal::clear` would ask the terminal where its cursor is,
        // and the answer would go to whoever reads the keys.
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
