//! Result of a finished handshake.
//!
//! A session never changes. An export's size may, so it is passed with each request instead.

use super::context::MetaContexts;
use super::proto;

/// Headers that both sides use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStyle {
    /// No negotiation: 28-byte requests, 16-byte replies.
    Simple,
    /// STRUCTURED_REPLY: 28-byte requests, replies in chunks.
    Structured,
    /// EXTENDED_HEADERS: 32-byte requests and reply chunks, 64-bit lengths.
    Extended,
}

impl ReplyStyle {
    /// Length of a request's header.
    pub const fn request_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => proto::REQUEST_BYTES,
            Self::Extended => proto::EXTENDED_REQUEST_BYTES,
        }
    }

    /// True if replies are chunks, which holes, block status and error messages need.
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }
}

/// Parameters of the transmission phase.
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdSession {
    /// Number of the export, as [`super::ExportCatalog::find`] returned it.
    pub export: usize,
    pub style: ReplyStyle,
    /// [`proto::export_flag`]s sent to the client; requests that need others are rejected.
    pub flags: u16,
    pub contexts: MetaContexts,
    /// True if the client requested the block sizes with GO, which binds it to them ("Size
    /// constraints").
    pub sizes_acknowledged: bool,
    /// In bytes; 1 unless the client acknowledged the sizes.
    pub minimum_block: u32,
    /// Longest payload of a READ or WRITE, in bytes.
    pub maximum_payload: u32,
}

impl NbdSession {
    /// True if this [`proto::export_flag`] was sent to the client.
    pub const fn offers(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Identification of a request in its replies. Extended headers repeat the offset as it was sent.
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTag {
    pub cookie: u64,
    pub offset: u64,
}
