//! Errors of traces, with their location.
//!
//! An error quotes at most 60 bytes of a file's content, escaped: no line breaks, and no control
//! sequences of a terminal.

use std::io;

// In bytes, before escaping.
const SHOWN_BYTES: usize = 60;

/// Reason why a trace cannot be read. The system's error is part of the text, so it is not a
/// source.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages name variants and fields")]
pub enum TraceError {
    #[error("{file}: {why}")]
    File { file: String, why: io::Error },
    #[error("{file}: the {compression} data is damaged or truncated after {lines} lines: {why}")]
    Compressed { file: String, compression: &'static str, lines: u64, why: io::Error },
    #[error(
        "{file}: it was compressed with a zstd window above 128 MiB (decompress it first: zstd -dc \
         --long=31 FILE, and - as the trace)"
    )]
    Window { file: String },
    #[error("{file}: the trace is empty")]
    Empty { file: String },
    /// `hint`: the format it resembles, and the remedy.
    #[error("{file}: not a trace of a known format: {hint}")]
    Unknown { file: String, hint: String },
    #[error("{file}:{line}: {why}")]
    Line { file: String, line: u64, why: String },
    #[error(
        "{file}: the recording ends within a block (was the daemon killed, or its disk full?); the \
         {requests} requests before it are complete"
    )]
    Torn { file: String, requests: u64 },
    /// Error of the whole file, or of several traces together, without a line.
    #[error("{file}: {why}")]
    Whole { file: String, why: String },
}

pub(super) fn shown(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(SHOWN_BYTES)];
    let more = if cut.len() < bytes.len() { "…" } else { "" };
    format!("'{}{more}'", cut.escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_text_is_escaped_and_truncated() {
        assert_eq!(shown(b"a\tb\x1b\xff"), r"'a\tb\x1b\xff'");
        assert_eq!(shown(&[b'x'; 61]), format!("'{}…'", "x".repeat(60)));
    }
}
