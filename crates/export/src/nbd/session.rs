//! What a finished handshake agreed on.
//!
//! A session never changes; an export's size, which may, is passed with each request instead.

use super::context::MetaContexts;
use super::proto;

/// Which headers the two sides use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStyle {
    /// Nothing was negotiated: 28-byte requests, 16-byte replies.
    Simple,
    /// STRUCTURED_REPLY: 28-byte requests, replies in chunks.
    Structured,
    /// EXTENDED_HEADERS: 32-byte requests and reply chunks, 64-bit lengths.
    Extended,
}

impl ReplyStyle {
    /// Of a request's header.
    pub const fn request_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => proto::REQUEST_BYTES,
            Self::Extended => proto::EXTENDED_REQUEST_BYTES,
        }
    }

    /// Whether replies come in chunks, which holes, block status and error messages need.
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }
}

/// The transmission phase's terms.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// The export, as [`super::Exports::find`] named it.
    pub export: usize,
    pub style: ReplyStyle,
    /// [`proto::export_flag`]s the client was told; what they do not offer is refused.
    pub flags: u16,
    pub contexts: MetaContexts,
    /// The client asked for the block sizes with GO, which binds it to them ("Size constraints").
    pub sizes_acknowledged: bool,
    /// In bytes; 1 unless the client acknowledged the sizes.
    pub minimum_block: u32,
    /// Longest payload of a READ or WRITE, in bytes.
    pub maximum_payload: u32,
}

impl Session {
    /// Whether the client was told of this [`proto::export_flag`].
    pub const fn offers(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// What identifies a request in its replies. Extended headers repeat the offset as it was sent.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    pub cookie: u64,
    pub offset: u64,
}
