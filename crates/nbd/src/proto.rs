//! The constants of the NBD specification, by their names without the `NBD_` prefix.
//!
//! Sections "Values", "Request message", "Structured reply chunk message" of doc/proto.md; those of
//! extended headers from its branch `extension-ext-header`. Everything on the wire is big-endian.

#![allow(missing_docs, reason = "the specification explains its own names")]

/// First eight bytes of every server ("Newstyle negotiation"; ASCII `NBDMAGIC`).
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Announces newstyle negotiation, and starts each option a client sends (ASCII `IHAVEOPT`).
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

pub const REQUEST_BYTES: usize = 28;
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// Bytes of an option's header: magic, option, length.
pub const OPTION_BYTES: usize = 16;
/// Maximum length of a string, in bytes ("Conventions": MUST be no longer than 4096 bytes).
pub const MAX_STRING_BYTES: usize = 4096;
/// Maximum payload without negotiated block sizes, in bytes: servers should accept it, and may
/// treat a longer one as an attack ("Size constraints").
pub const DEFAULT_MAX_PAYLOAD: u32 = 1 << 25;
/// Maximum of a server's minimum block size, in bytes ("Size constraints").
pub const MAX_MINIMUM_BLOCK: u32 = 64 << 10;
/// Maximum number of extents in one block status chunk ("Structured reply types").
pub const MAX_EXTENTS: usize = 1 << 20;
/// Zeroes after the reply to EXPORT_NAME, unless both sides agreed to omit them.
pub const EXPORT_NAME_PADDING: usize = 124;

/// "Handshake flags": the server's capabilities in the negotiation.
pub mod handshake_flag {
    pub const FIXED_NEWSTYLE: u16 = 1;
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// "Client flags": the client's reply to the handshake flags.
pub mod client_flag {
    pub const FIXED_NEWSTYLE: u32 = 1;
    pub const NO_ZEROES: u32 = 1 << 1;
}

/// "Option types".
pub mod opt {
    /// Select an export and start transmission; cannot report an error.
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use 32-byte headers with 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// "Option reply types".
pub mod rep {
    /// Success, and the last reply to an option.
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    pub const ERR_POLICY: u32 = 0x8000_0002;
    pub const ERR_INVALID: u32 = 0x8000_0003;
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Types of information about an export (`NBD_REP_INFO`).
pub mod info {
    /// Size and transmission flags; always sent.
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    /// Minimum and preferred block size, maximum payload.
    pub const BLOCK_SIZE: u16 = 3;
}

/// "Transmission flags": capabilities of an export.
pub mod export_flag {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const ROTATIONAL: u16 = 1 << 4;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// READ accepts the DF flag; only with structured replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes of all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// BLOCK_STATUS may select contexts; only with extended headers.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// "Request types".
pub mod cmd {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    /// End of the connection; no reply.
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// "Command flags".
pub mod cmd_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1;
    /// WRITE_ZEROES: leave the range allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// READ: one content chunk.
    pub const DF: u16 = 1 << 2;
    /// BLOCK_STATUS: one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// WRITE_ZEROES: fail rather than write slowly.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// Extended headers: the length is that of a payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// "Structured reply flags".
pub mod reply_flag {
    pub const DONE: u16 = 1;
}

/// "Structured reply types".
pub mod reply_type {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths; only with extended headers.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    pub const ERROR: u16 = 0x8001;
    pub const ERROR_OFFSET: u16 = 0x8002;
}

/// Status flags of the context `base:allocation`.
pub mod state {
    pub const HOLE: u32 = 1;
    pub const ZERO: u32 = 1 << 1;
}

/// Linux error number for an error on the wire; EINVAL for an unknown one ("Error values").
pub const fn to_linux(code: u32) -> i32 {
    match code {
        1 => libc::EPERM,
        5 => libc::EIO,
        12 => libc::ENOMEM,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        108 => libc::ESHUTDOWN,
        _ => libc::EINVAL,
    }
}
