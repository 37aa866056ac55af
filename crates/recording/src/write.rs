//! Writes weir's CSV, for `weir simulate --events` and for tests.
//!
//! `format/weir.rs` reads it. Never writes a name that the reader would reject.

use std::{
    borrow::Cow,
    io::{self, Write},
};

use super::{fields::push_decimal, format::HEADER, record::RequestOp};

const BUFFER_BYTES: usize = 256 << 10;

/// Appends the columns of a request, without the line break, so that more columns can follow.
/// `quoted_disk` is the result of [`quoted`].
#[inline]
pub fn push_request(
    text: &mut Vec<u8>,
    time_ns: u64,
    quoted_disk: &str,
    op: RequestOp,
    offset: u64,
    length: u64,
) {
    push_decimal(text, time_ns);
    text.push(b',');
    text.extend_from_slice(quoted_disk.as_bytes());
    text.push(b',');
    text.extend_from_slice(op.name().as_bytes());
    text.push(b',');
    push_decimal(text, offset);
    text.push(b',');
    push_decimal(text, length);
}

/// Quotes a field if necessary (RFC 4180, section 2).
pub fn quoted(text: &str) -> Cow<'_, str> {
    if text.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\"")).into()
    } else {
        text.into()
    }
}

/// Writer of CSV. The output is complete only after [`finish`](Self::finish).
pub(crate) struct CsvWriter<W> {
    out: W,
    text: Vec<u8>,
}

impl<W: Write> CsvWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        let mut text = Vec::with_capacity(BUFFER_BYTES + 1024);
        text.extend_from_slice(HEADER.as_bytes());
        text.push(b'\n');
        Self { out, text }
    }

    pub(crate) fn write(
        &mut self,
        time_ns: u64,
        disk: &str,
        op: RequestOp,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        if disk.is_empty() || disk.contains(char::is_control) {
            let why = format!("the disk name '{}' is empty or has control characters", disk.escape_debug());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        push_request(&mut self.text, time_ns, &quoted(disk), op, offset, length);
        self.text.push(b'\n');
        if self.text.len() >= BUFFER_BYTES {
            self.out.write_all(&self.text)?;
            self.text.clear();
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&self.text)?;
        self.out.flush()?;
        Ok(self.out)
    }
}
