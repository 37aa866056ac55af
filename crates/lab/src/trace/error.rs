//! What is wrong with a trace, and where.
//!
//! Never repeats more of a file than a line of a terminal holds: what is in it may be anything.

use std::io;

/// How much of a line an error shows, in bytes before they are escaped.
const SHOWN_BYTES: usize = 60;

/// Why a trace cannot be read, or not to its end. Each names the file as the user did, and the line
/// where there is one, and says all there is to say: what the system says is part of the text, and
/// not a source that would be printed once more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// The file cannot be opened or read.
    #[error("{file}: {why}")]
    File { file: String, why: io::Error },
    /// The compressed data is cut off or damaged; so many whole lines came out before.
    #[error("{file}: the {compression} data is damaged or cut off after {lines} lines: {why}")]
    Compressed { file: String, compression: &'static str, lines: u64, why: io::Error },
    /// It unfolds only in more memory than a reader takes.
    #[error(
        "{file}: it was compressed with a zstd window above 128 MiB (decompress it first: zstd -dc --long=31 FILE, \
         and - as the trace)"
    )]
    Window { file: String },
    /// There is not a line in it.
    #[error("{file}: the trace is empty")]
    Empty { file: String },
    /// It looks like none of the formats; the hint says what it looks like instead, and what to do.
    #[error("{file}: not a trace of a known format: {hint}")]
    Unknown { file: String, hint: String },
    /// A line, counted from 1, is not one of its format.
    #[error("{file}:{line}: {why}")]
    Line { file: String, line: u64, why: String },
    /// The traces cannot be read as one, because of this file.
    #[error("{file}: {why}")]
    Together { file: String, why: String },
}

/// Bytes of a trace as an error shows them: in quotes, escaped and cut.
pub(super) fn shown(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(SHOWN_BYTES)];
    let more = if cut.len() < bytes.len() { "…" } else { "" };
    format!("'{}{more}'", cut.escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_escaped_and_cut() {
        assert_eq!(shown(b"a\tb\x1b\xff"), r"'a\tb\x1b\xff'");
        assert_eq!(shown(&[b'x'; 61]), format!("'{}…'", "x".repeat(60)));
    }
}
