//! The terminal on standard error, drawn on by foreground jobs alone: a shell's job in the
//! background would overwrite the command line and the screens of foreground programs.
//!
//! Looked at before each drawing, because a job can be moved to the background and back. Never
//! reads, and never changes the terminal's modes.

use std::io::{self, Write as _, stderr};

use indicatif::TermLike;
use nix::unistd::{getpgrp, tcgetpgrp};
use ratatui::crossterm::terminal;

/// True if this process group is the terminal's foreground group (tcgetpgrp(3)), or if standard
/// error is a terminal that controls no session of this process.
pub fn is_foreground() -> bool {
    tcgetpgrp(stderr()).map_or(true, |group| group == getpgrp())
}

/// Standard error for [`indicatif`], silent in the background.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Foreground;

impl Foreground {
    fn put(self, text: &str) -> io::Result<()> {
        if is_foreground() { stderr().write_all(text.as_bytes()) } else { Ok(()) }
    }

    /// A control sequence that moves the cursor (ECMA-48, CUU to CUB).
    fn move_cursor(self, count: usize, direction: char) -> io::Result<()> {
        if count == 0 { Ok(()) } else { self.put(&format!("\x1b[{count}{direction}")) }
    }
}

impl TermLike for Foreground {
    fn width(&self) -> u16 {
        terminal::size().ok().map(|(columns, _)| columns).filter(|columns| *columns > 0).unwrap_or(80)
    }

    fn height(&self) -> u16 {
        terminal::size().ok().map(|(_, rows)| rows).filter(|rows| *rows > 0).unwrap_or(24)
    }

    fn move_cursor_up(&self, count: usize) -> io::Result<()> {
        self.move_cursor(count, 'A')
    }

    fn move_cursor_down(&self, count: usize) -> io::Result<()> {
        self.move_cursor(count, 'B')
    }

    fn move_cursor_right(&self, count: usize) -> io::Result<()> {
        self.move_cursor(count, 'C')
    }

    fn move_cursor_left(&self, count: usize) -> io::Result<()> {
        self.move_cursor(count, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.put(&format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.put(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        // To the first column, then everything of the line.
        self.put("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        stderr().flush()
    }
}
