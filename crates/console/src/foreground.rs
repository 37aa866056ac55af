//! Terminal on standard error, drawn on only by foreground jobs. A background job of a shell would
//! overwrite the command line and the screens of foreground programs.
//!
//! Checked before each drawing, because a shell can move a job to the background and back. Never
//! reads from the terminal, and never changes its modes.

use std::io::{self, Write as _, stderr};

use indicatif::TermLike;
use nix::unistd::{getpgrp, tcgetpgrp};
use ratatui::crossterm::terminal;

/// True if this process group is the foreground group of the terminal (tcgetpgrp(3)), or if
/// standard error is not the controlling terminal of this process.
pub fn is_foreground() -> bool {
    // An error (ENOTTY) means that no shell's job control applies to this file: drawing is
    // harmless.
    tcgetpgrp(stderr()).map_or(true, |group| group == getpgrp())
}

/// Terminal for [`indicatif`] on standard error; discards output in the background.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForegroundTerminal;

impl ForegroundTerminal {
    fn put(self, text: &str) -> io::Result<()> {
        if is_foreground() { stderr().write_all(text.as_bytes()) } else { Ok(()) }
    }

    /// Moves the cursor (ECMA-48 control sequences CUU, CUD, CUF and CUB).
    fn move_cursor(self, count: usize, direction: char) -> io::Result<()> {
        // A count of 0 would move by 1: ECMA-48 takes 0 for the default.
        if count == 0 { Ok(()) } else { self.put(&format!("\x1b[{count}{direction}")) }
    }
}

impl TermLike for ForegroundTerminal {
    fn width(&self) -> u16 {
        // A pseudo-terminal without a window reports 0×0: 80×24 is the size of a VT100.
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
        // Carriage return, then EL 2 (ECMA-48): erases the whole line.
        self.put("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        stderr().flush()
    }
}
