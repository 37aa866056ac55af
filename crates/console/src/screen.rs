//! Terminal of a full-screen command: raw mode and alternate screen, and their restoration.

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

/// Smallest terminal, in columns and rows, that all screens fit in.
pub const MIN_SIZE: (u16, u16) = (80, 24);

/// Secondary text.
pub const DIMMED: Style = Style::new().fg(Color::DarkGray);
/// Throttled devices, and the limits that throttle them.
pub const THROTTLED: Style = Style::new().fg(Color::Yellow);
/// Faults.
pub const FAULT: Style = Style::new().fg(Color::Red);

/// True if the user disabled colours (`NO_COLOR`, <https://no-color.org>).
pub fn has_no_colours() -> bool {
    env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Removes all colours. Text whose only mark is a colour (throttled, faulty) becomes bold; other
/// attributes remain.
///
/// Crossterm itself omits colours under `NO_COLOR`, but its reset sequences then also clear the
/// attributes.
pub fn without_colours(buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        if [THROTTLED.fg, FAULT.fg].contains(&Some(cell.fg)) {
            cell.modifier |= Modifier::BOLD;
        }
        (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
    }
}

/// True if the terminal is large enough for the screen of `command`. Otherwise draws a message
/// that reports this.
pub fn has_room(frame: &mut Frame<'_>, command: &str) -> bool {
    let (area, (width, height)) = (frame.area(), MIN_SIZE);
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

/// Draws an empty window of this size in the centre. Returns the area inside its border.
pub fn window(frame: &mut Frame<'_>, area: Rect, width: u16, height: u16, title: String) -> Rect {
    let place = area.centered(Constraint::Length(width), Constraint::Length(height));
    let block = Block::bordered().title(title).border_style(Style::new().fg(Color::Cyan));
    let inner = block.inner(place);
    frame.render_widget(widgets::Clear, place);
    frame.render_widget(block, place);
    inner
}

/// Draws a window with help for the keys.
pub fn help(frame: &mut Frame<'_>, text: &str) {
    let height = text.lines().count() as u16 + 2;
    let inside = window(frame, frame.area(), MIN_SIZE.0, height, " keys; any key closes ".to_owned());
    frame.render_widget(Text::from(text), inside);
}

/// True if standard input and output are terminals.
pub fn is_possible() -> bool {
    stdin().is_terminal() && stdout().is_terminal()
}

/// Terminal in raw mode on the alternate screen. Restored on drop.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Enters raw mode and the alternate screen.
    ///
    /// # Errors
    /// Fails if the terminal cannot be set up; it is then restored.
    pub fn enter() -> io::Result<Self> {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |information| {
            // Before the message, which would otherwise be printed on the alternate screen and
            // vanish with it.
            restore();
            before(information);
        }));
        set_up().inspect_err(|_| restore())?;
        let terminal = Terminal::new(CrosstermBackend::new(stdout())).inspect_err(|_| restore())?;
        Ok(Self { terminal })
    }

    /// Draws one frame.
    ///
    /// # Errors
    /// Fails if the terminal cannot be written.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let draw = |frame: &mut Frame<'_>| {
            draw(frame);
            if has_no_colours() {
                without_colours(frame.buffer_mut());
            }
        };
        self.terminal.draw(draw).map(drop)
    }

    /// Restores the terminal and stops the process, as Ctrl-Z does in other programs. Sets the
    /// terminal up again after SIGCONT.
    ///
    /// # Errors
    /// Fails if the terminal cannot be written after SIGCONT.
    pub fn suspend(&mut self) -> io::Result<()> {
        restore();
        // SIGTSTP is blocked and would reach the signal thread; SIGSTOP can be neither blocked nor
        // caught.
        raise(Signal::SIGSTOP)?;
        set_up()?;
        // A new `Terminal` draws every cell. `Terminal::clear` would query the cursor's position,
        // and the thread that reads keys would receive the reply.
        self.terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn set_up() -> io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))
}

// Ignores errors: a closed terminal can neither be restored nor show a message.
fn restore() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
