//! The bytes of a trace, from a file or standard input, decompressed if necessary.
//!
//! Everything streams: neither a trace nor its decompressed content is ever held in memory as a
//! whole.

use std::{
    fs::File,
    io::{self, BufReader, Cursor, Read},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;
use zstd::stream::read::Decoder;

// 128 MiB, as `zstd` without `--long` (RFC 8878, section 3.1.1.1.2, recommends 8 MiB).
const ZSTD_WINDOW_LOG: u32 = 27;
const COMPRESSED_BYTES: usize = 256 << 10;
// Length of zstd's magic number, the longest.
const MAGIC_BYTES: usize = 4;
// RFC 1952, section 2.3.1.
const GZIP: &[u8] = &[0x1f, 0x8b];
// RFC 8878, section 3.1.1: 0xFD2FB528, little-endian.
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// A trace as decompressed bytes.
pub struct TraceInput {
    pub(super) name: String,
    pub(super) text: Box<dyn Read + Send>,
    pub(super) compression: Option<&'static str>,
}

impl TraceInput {
    pub(super) fn open(path: &Path) -> Result<Self, (String, io::Error)> {
        let standard = path == Path::new("-");
        let name = if standard { "standard input".to_owned() } else { path.display().to_string() };
        let bytes: io::Result<Box<dyn Read + Send>> = if standard {
            Ok(Box::new(io::stdin()))
        } else {
            File::open(path).map(|file| Box::new(file) as _)
        };
        bytes.and_then(|bytes| Self::new(name.clone(), bytes)).map_err(|error| (name, error))
    }

    /// Detects gzip and zstd by their magic numbers. `name` is for messages.
    ///
    /// # Errors
    /// The first bytes cannot be read.
    pub fn new(name: String, mut bytes: Box<dyn Read + Send>) -> io::Result<Self> {
        let mut head = Vec::with_capacity(MAGIC_BYTES);
        bytes.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut head)?;
        let (gzip, zstd) = (head.starts_with(GZIP), head.starts_with(ZSTD));
        let bytes = Cursor::new(head).chain(bytes);
        if gzip {
            // Parallel compressors write several members.
            let text = MultiGzDecoder::new(BufReader::with_capacity(COMPRESSED_BYTES, bytes));
            return Ok(Self { name, text: Box::new(text), compression: Some("gzip") });
        }
        if zstd {
            let mut text = Decoder::with_buffer(BufReader::with_capacity(COMPRESSED_BYTES, bytes))?;
            text.window_log_max(ZSTD_WINDOW_LOG)?;
            return Ok(Self { name, text: Box::new(text), compression: Some("zstd") });
        }
        Ok(Self { name, text: Box::new(bytes), compression: None })
    }
}

pub(super) fn is_window(error: &io::Error) -> bool {
    // ZSTD_error_frameParameter_windowTooLarge, which is only available as text.
    error.to_string().contains("too much memory")
}
