//! Splits a stream into lines, or returns raw bytes, in blocks of 1 MiB.
//!
//! Never holds more than a block and a line, however long the lines of the input are.

use std::io::{self, Read as _};

use super::{
    error::TraceError,
    input::{self, TraceInput},
};

const BLOCK_BYTES: usize = 1 << 20;
// A file that is not a trace may have no line break at all.
const MAX_LINE_BYTES: usize = 64 << 10;

/// Lines of a trace, read in large blocks.
pub struct LineReader {
    input: TraceInput,
    buffer: Box<[u8]>,
    /// `start..end` of the buffer was not returned yet.
    start: usize,
    end: usize,
    ended: bool,
    /// Reported after everything read before it was returned.
    failed: Option<io::Error>,
    /// Number of the last line that was returned, from 1.
    number: u64,
}

impl LineReader {
    /// Creates the lines without reading.
    pub fn new(input: TraceInput) -> Self {
        let buffer = vec![0; BLOCK_BYTES].into_boxed_slice();
        Self { input, buffer, start: 0, end: 0, ended: false, failed: None, number: 0 }
    }

    pub(super) fn name(&self) -> &str {
        &self.input.name
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn line_error(&self, why: String) -> TraceError {
        self.line_error_at(self.number, why)
    }

    /// Error at a line; in a recording, requests count as lines.
    pub fn line_error_at(&self, line: u64, why: String) -> TraceError {
        TraceError::Line { file: self.input.name.clone(), line, why }
    }

    /// Unread text, up to 1 MiB. A read error is reported after it.
    pub(super) fn ahead(&mut self) -> Result<&[u8], TraceError> {
        while !self.ended && self.failed.is_none() && self.end - self.start < self.buffer.len() {
            // Not returned yet: the text before it may suffice to detect the format.
            self.failed = self.read().err();
        }
        if self.start == self.end {
            self.refill()?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// Next line without its line break; `None` after the last.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, TraceError> {
        // The buffer is larger than the longest line, so a complete line fits in any case.
        let rest = &self.buffer[self.start..self.end];
        // The fast path: the line is complete in the buffer.
        let found = match memchr::memchr(b'\n', rest) {
            Some(length) if length <= MAX_LINE_BYTES => Some((length, 1)),
            _ => self.search()?,
        };
        let Some((length, newline)) = found else { return Ok(None) };
        self.number += 1;
        let line = &self.buffer[self.start..self.start + length];
        self.start += length + newline;
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }

    pub(super) fn is_at_end(&mut self) -> Result<bool, TraceError> {
        // A read may return no text without being at the end.
        while self.start == self.end && !self.ended {
            self.refill()?;
        }
        Ok(self.start == self.end)
    }

    /// Next `count` raw bytes; `None` if fewer remain, which are then lost.
    pub(super) fn bytes(&mut self, count: usize) -> Result<Option<Vec<u8>>, TraceError> {
        let mut bytes = Vec::new();
        while bytes.len() < count {
            if self.is_at_end()? {
                return Ok(None);
            }
            // The vector grows with the bytes that exist: `count` may come from a damaged file.
            let part = (count - bytes.len()).min(self.end - self.start);
            bytes.extend_from_slice(&self.buffer[self.start..self.start + part]);
            self.start += part;
        }
        Ok(Some(bytes))
    }

    /// Length of a line that is not completely in the buffer, and of its line break.
    #[cold]
    fn search(&mut self) -> Result<Option<(usize, usize)>, TraceError> {
        let mut searched = 0;
        loop {
            let rest = &self.buffer[self.start..self.end];
            let found = memchr::memchr(b'\n', &rest[searched..]).map(|more| searched + more);
            if found.unwrap_or(rest.len()) > MAX_LINE_BYTES {
                self.number += 1;
                return Err(self.line_error(format!("the line is longer than {MAX_LINE_BYTES} bytes")));
            }
            if let Some(length) = found {
                return Ok(Some((length, 1)));
            }
            // Bytes that were searched before are not searched again.
            searched = rest.len();
            if self.ended {
                return Ok((searched > 0).then_some((searched, 0)));
            }
            self.refill()?;
        }
    }

    fn refill(&mut self) -> Result<(), TraceError> {
        let read = self.failed.take().map_or_else(|| self.read(), Err);
        read.map_err(|error| self.unreadable(error))
    }

    fn read(&mut self) -> io::Result<()> {
        // Makes space by moving the unread rest, at most a line, to the front.
        if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let bytes = loop {
            match self.input.text.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.ended = bytes == 0;
        self.end += bytes;
        Ok(())
    }

    fn unreadable(&self, why: io::Error) -> TraceError {
        let file = self.input.name.clone();
        match self.input.compression {
            Some(_) if input::is_window(&why) => TraceError::Window { file },
            Some(compression) => TraceError::Compressed { file, compression, lines: self.number, why },
            None => TraceError::File { file, why },
        }
    }
}
