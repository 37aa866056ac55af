//! Exports as the handshake sees them: name, description, size, features.
//!
//! The handshake looks an export up in an [`ExportCatalog`] each time that it needs one, so exports
//! may be added, removed and resized during negotiation. Nothing here depends on what an export
//! consists of.

use super::proto::{self, export_flag};
use super::session::ReplyStyle;
use std::collections::HashMap;
use std::sync::Arc;

/// Transmission flags of an export. A read-only export offers neither trim nor write-zeroes.
#[allow(missing_docs, reason = "the names are the flags'")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    pub read_only: bool,
    pub flush: bool,
    pub fua: bool,
    pub trim: bool,
    pub write_zeroes: bool,
    /// Ignored without `write_zeroes`.
    pub fast_zero: bool,
    /// Offered only with structured replies.
    pub dont_fragment: bool,
    pub cache: bool,
    /// True if a flush on any connection covers the answered writes of all connections.
    pub multi_conn: bool,
    pub rotational: bool,
}

impl Features {
    /// Flags on the wire. `block_status`: the client selected metadata contexts for this export.
    pub fn flags(self, style: ReplyStyle, block_status: bool) -> u16 {
        let writable = !self.read_only;
        [
            (self.read_only, export_flag::READ_ONLY),
            (self.flush, export_flag::SEND_FLUSH),
            (self.fua, export_flag::SEND_FUA),
            (self.rotational, export_flag::ROTATIONAL),
            (writable && self.trim, export_flag::SEND_TRIM),
            (writable && self.write_zeroes, export_flag::SEND_WRITE_ZEROES),
            (writable && self.write_zeroes && self.fast_zero, export_flag::SEND_FAST_ZERO),
            // DF makes no sense without chunks ("Transmission flags", NBD_FLAG_SEND_DF).
            (self.dont_fragment && style.has_chunks(), export_flag::SEND_DF),
            (self.multi_conn, export_flag::CAN_MULTI_CONN),
            (self.cache, export_flag::SEND_CACHE),
            (block_status && style == ReplyStyle::Extended, export_flag::BLOCK_STATUS_PAYLOAD),
        ]
        .into_iter()
        // HAS_FLAGS is always set: without it a client ignores all other flags.
        .filter(|(offered, _)| *offered)
        .fold(export_flag::HAS_FLAGS, |flags, (_, flag)| flags | flag)
    }
}

/// An export's block sizes in bytes, as NBD_INFO_BLOCK_SIZE carries them ("Size constraints").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    minimum: u32,
    /// The smallest request that needs no read-modify-write.
    pub(super) preferred: u32,
    /// The longest payload of a READ or WRITE.
    pub(super) maximum: u32,
}

/// Block sizes that the specification does not allow.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockSizeError {
    #[error("minimum block size {0}: not a power of two from 1 to 65536")]
    Minimum(u32),
    #[error("preferred block size {0}: not a power of two of at least 512 and the minimum block size")]
    Preferred(u32),
    #[error("maximum payload {0}: below the preferred block size")]
    Maximum(u32),
}

impl BlockSizes {
    /// `minimum` is a power of two up to 64 KiB; `preferred` is a power of two, at least 512 and at
    /// least the minimum; `maximum` (the longest payload of a READ or WRITE) is at least
    /// `preferred`.
    pub fn new(minimum: u32, preferred: u32, maximum: u32) -> Result<Self, BlockSizeError> {
        if !minimum.is_power_of_two() || minimum > 1 << 16 {
            Err(BlockSizeError::Minimum(minimum))
        } else if !preferred.is_power_of_two() || preferred < minimum.max(512) {
            Err(BlockSizeError::Preferred(preferred))
        } else if maximum < preferred {
            Err(BlockSizeError::Maximum(maximum))
        } else {
            Ok(Self { minimum, preferred, maximum })
        }
    }

    /// Minimum block size for an export of this size. It is below the configured one if the size is
    /// no multiple of that, because a client could otherwise never reach the last bytes.
    pub fn minimum_for(self, size_bytes: u64) -> u32 {
        if size_bytes == 0 {
            return self.minimum;
        }
        // The shift is at most 16 because a minimum is at most 64 KiB.
        self.minimum.min(1 << size_bytes.trailing_zeros().min(16))
    }
}

impl Default for BlockSizes {
    /// The sizes that a client may assume without negotiation ("Size constraints").
    fn default() -> Self {
        Self { minimum: 1, preferred: 4096, maximum: proto::DEFAULT_MAX_PAYLOAD }
    }
}

/// Properties of an export at one moment.
#[allow(missing_docs, reason = "the types are self-explanatory")]
#[derive(Clone, Debug)]
pub struct ExportInfo {
    /// Canonical name. Only names of at most 4096 bytes without NUL are sent.
    pub name: Arc<str>,
    /// One line for display, possibly empty; clipped to 4096 bytes.
    pub description: Arc<str>,
    pub size_bytes: u64,
    pub features: Features,
    pub sizes: BlockSizes,
    /// Names of the bitmaps that the export offers. They never change during the life of an export.
    pub bitmaps: Arc<[Arc<str>]>,
}

/// The exports of a server. A number refers to one export for the life of the server; after the
/// export is removed, the number yields `None`, never another export.
pub trait ExportCatalog {
    /// Number of the export with this name; the empty name means the default export.
    fn find(&self, name: &str) -> Option<usize>;

    /// Current properties of the export with this number.
    fn get(&self, export: usize) -> Option<ExportInfo>;

    /// First export with a number of at least `from`, for listing.
    fn next(&self, from: usize) -> Option<(usize, ExportInfo)>;
}

/// A fixed set of exports.
#[derive(Debug, Default)]
pub struct ExportTable {
    exports: Vec<ExportInfo>,
    by_name: HashMap<Arc<str>, usize>,
    default: Option<usize>,
}

impl ExportTable {
    /// Numbers the exports in order. A duplicate name refers to its first export. The default
    /// export is the one named "", or the only one.
    pub fn new(exports: Vec<ExportInfo>) -> Self {
        let mut by_name = HashMap::with_capacity(exports.len());
        for (number, export) in exports.iter().enumerate() {
            // or_insert: of two exports with one name, the first is found.
            by_name.entry(export.name.clone()).or_insert(number);
        }
        let default = by_name.get("").copied().or((exports.len() == 1).then_some(0));
        Self { exports, by_name, default }
    }
}

impl ExportCatalog for ExportTable {
    fn find(&self, name: &str) -> Option<usize> {
        if name.is_empty() { self.default } else { self.by_name.get(name).copied() }
    }

    fn get(&self, export: usize) -> Option<ExportInfo> {
        self.exports.get(export).cloned()
    }

    fn next(&self, from: usize) -> Option<(usize, ExportInfo)> {
        self.get(from).map(|info| (from, info))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> ExportTable {
        let export = |name: &&str| ExportInfo {
            name: Arc::from(*name),
            description: Arc::from(""),
            size_bytes: 0,
            features: Features::default(),
            sizes: BlockSizes::default(),
            bitmaps: Arc::default(),
        };
        ExportTable::new(names.iter().map(export).collect())
    }

    #[test]
    fn default_export_has_no_name_or_is_the_only_one() {
        assert_eq!(named(&["a"]).find(""), Some(0));
        assert_eq!(named(&["a", "b"]).find(""), None);
        assert_eq!(named(&["a", ""]).find(""), Some(1));
        assert_eq!(named(&[]).find(""), None);
    }

    #[test]
    fn block_sizes_follow_the_specification() {
        assert!(BlockSizes::new(1, 512, 512).is_ok());
        assert!(BlockSizes::new(65536, 65536, 1 << 20).is_ok());
        assert_eq!(BlockSizes::new(0, 512, 512), Err(BlockSizeError::Minimum(0)));
        assert_eq!(BlockSizes::new(131_072, 131_072, 1 << 20), Err(BlockSizeError::Minimum(131_072)));
        assert_eq!(BlockSizes::new(3, 512, 512), Err(BlockSizeError::Minimum(3)));
        assert_eq!(BlockSizes::new(1, 256, 512), Err(BlockSizeError::Preferred(256)));
        assert_eq!(BlockSizes::new(4096, 512, 4096), Err(BlockSizeError::Preferred(512)));
        assert_eq!(BlockSizes::new(1, 4096, 4095), Err(BlockSizeError::Maximum(4095)));
    }

    #[test]
    fn minimum_block_shrinks_to_reach_the_last_byte() {
        let sizes = BlockSizes::new(4096, 4096, 1 << 20).unwrap();
        assert_eq!(sizes.minimum_for(0), 4096);
        assert_eq!(sizes.minimum_for(1 << 40), 4096);
        assert_eq!(sizes.minimum_for(4096 + 512), 512);
        assert_eq!(sizes.minimum_for(4097), 1);
    }

    #[test]
    fn a_read_only_export_offers_no_command_that_writes() {
        let features = Features {
            read_only: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            flush: true,
            ..Features::default()
        };
        let expected = export_flag::HAS_FLAGS | export_flag::READ_ONLY | export_flag::SEND_FLUSH;
        assert_eq!(features.flags(ReplyStyle::Extended, false), expected);
    }

    #[test]
    fn chunk_flags_are_offered_only_with_chunks() {
        let features = Features { dont_fragment: true, ..Features::default() };
        assert_eq!(features.flags(ReplyStyle::Simple, true), export_flag::HAS_FLAGS);
        let structured = export_flag::HAS_FLAGS | export_flag::SEND_DF;
        assert_eq!(features.flags(ReplyStyle::Structured, true), structured);
        assert_eq!(
            features.flags(ReplyStyle::Extended, true),
            structured | export_flag::BLOCK_STATUS_PAYLOAD
        );
        assert_eq!(features.flags(ReplyStyle::Extended, false), structured);
    }

    #[test]
    fn fast_zero_needs_write_zeroes() {
        let features = Features { fast_zero: true, ..Features::default() };
        assert_eq!(features.flags(ReplyStyle::Simple, false), export_flag::HAS_FLAGS);
    }
}
