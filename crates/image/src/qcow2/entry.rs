//! Entries of the L1 and L2 tables, decoded and encoded.
//!
//! Entries are untrusted: one that violates the specification is rejected with [`InvalidImage`].
//! Decoded offsets are below the offset limit, and those of L2 tables and standard clusters are
//! multiples of the cluster size.
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Cluster mapping" and "Extended L2 Entries".

use super::InvalidImage;

/// Bits 9 to 55: offset in the file.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the refcount is exactly one, so the target may be written in place.
pub(super) const COPIED: u64 = 1 << 63;
/// Bit 62: the cluster is compressed.
pub(super) const COMPRESSED: u64 = 1 << 62;
/// Bit 0: the cluster reads as zeroes; reserved in extended entries.
pub(super) const ZERO: u64 = 1;

/// Number of subclusters in a cluster with extended entries.
pub const SUBCLUSTERS: u32 = 32;

/// Parameters of the header that entries are decoded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryFormat {
    /// A cluster has `1 << cluster_bits` bytes.
    pub cluster_bits: u32,
    /// True if L2 entries are extended, with subclusters.
    pub extended: bool,
    /// True if guest data is in an external data file, where offset 0 is valid.
    pub data_file: bool,
    /// Version of the format; version 2 has no zero flag.
    pub version: u32,
}

/// An L1 entry: the offset of an L2 table, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L1Entry {
    /// Offset of the L2 table in the file; 0 for none.
    pub offset: u64,
    /// True if only the active L1 table refers to this L2 table.
    pub copied: bool,
}

impl L1Entry {
    /// Entry without an L2 table.
    pub const NONE: Self = Self { offset: 0, copied: false };

    /// Decodes an entry.
    ///
    /// # Errors
    /// The offset is not a multiple of the cluster size, or reserved bits are set.
    pub fn decode(raw: u64, shape: EntryFormat) -> Result<Self, InvalidImage> {
        let offset = raw & OFFSET;
        if raw & !(OFFSET | COPIED) != 0 || offset & ((1 << shape.cluster_bits) - 1) != 0 {
            return Err(InvalidImage::new(format!(
                "L1 entry {raw:#x} does not point to the start of a cluster"
            )));
        }
        // The flag is ignored without a table: otherwise `writable_l2_table` would assume that the
        // table exists, and not allocate it.
        Ok(Self { offset, copied: raw & COPIED != 0 && offset != 0 })
    }

    /// Encodes the entry.
    pub fn encode(self) -> u64 {
        self.offset | if self.copied { COPIED } else { 0 }
    }
}

/// A decoded L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterMapping {
    /// A standard cluster, possibly unallocated or allocated in part.
    Standard(StandardCluster),
    /// Compressed data.
    Compressed {
        /// Offset of the data in the file; any byte.
        offset: u64,
        /// Upper bound of its length: it counts whole sectors, and the data may end earlier.
        length: u64,
    },
}

/// A cluster that is not compressed.
///
/// A cluster without extended entries is a single subcluster that uses bit 0 of both maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandardCluster {
    /// Host cluster assigned to it.
    pub host: Option<u64>,
    /// True if no snapshot shares the host cluster; it may be written in place.
    pub copied: bool,
    /// Bitmap of subclusters that are read from the host cluster.
    pub allocated: u32,
    /// Bitmap of subclusters that read as zeroes; disjoint from `allocated`.
    pub zero: u32,
}

impl StandardCluster {
    /// Unallocated: read from the backing file.
    pub const UNALLOCATED: Self = Self { host: None, copied: false, allocated: 0, zero: 0 };
}

impl EntryFormat {
    /// Size of an L2 entry in bytes.
    pub fn entry_bytes(self) -> usize {
        if self.extended { 16 } else { 8 }
    }

    /// Number of subclusters in a cluster: 32, or 1 without extended entries.
    pub fn subclusters(self) -> u32 {
        if self.extended { SUBCLUSTERS } else { 1 }
    }

    /// Size of a subcluster, as a power of two.
    pub fn subcluster_bits(self) -> u32 {
        if self.extended { self.cluster_bits - 5 } else { self.cluster_bits }
    }

    /// Bitmap of all subclusters.
    pub fn all(self) -> u32 {
        if self.extended { u32::MAX } else { 1 }
    }

    /// Decodes an L2 entry; `map` is the second half of an extended one, 0 otherwise.
    ///
    /// # Errors
    /// The violated rule.
    pub fn decode(self, raw: u64, map: u64) -> Result<ClusterMapping, InvalidImage> {
        if raw & COMPRESSED != 0 {
            return self.decode_compressed(raw);
        }
        let offset = raw & OFFSET;
        let copied = raw & COPIED != 0;
        let wrong = |why: &str| Err(InvalidImage::new(format!("L2 entry {raw:#x} {why}")));
        if offset & ((1 << self.cluster_bits) - 1) != 0 {
            return wrong("has an offset that is not aligned to a cluster");
        }
        // Reserved bits other than the zero flag are ignored, as in QEMU.
        // Offset 0 is valid in a data file. The copied flag distinguishes it from an unallocated
        // cluster.
        let host = (offset != 0 || copied && self.data_file).then_some(offset);
        let (allocated, zero) = if self.extended {
            (map as u32, (map >> 32) as u32)
        } else if raw & ZERO != 0 && self.version >= 3 {
            (0, 1)
        } else {
            (u32::from(host.is_some()), 0)
        };
        if allocated & zero != 0 {
            return wrong("has subclusters that are both allocated and zero");
        }
        if allocated != 0 && host.is_none() {
            return wrong("has allocated subclusters but no cluster");
        }
        Ok(ClusterMapping::Standard(StandardCluster {
            host,
            copied: copied && host.is_some(),
            allocated,
            zero,
        }))
    }

    /// Checks that a cluster in an external data file lies at its guest offset. QEMU has the same
    /// check.
    ///
    /// # Errors
    /// Fails if the cluster lies elsewhere.
    pub fn check_host_offset(self, cluster: ClusterMapping, offset: u64) -> Result<(), InvalidImage> {
        let cluster_start = offset >> self.cluster_bits << self.cluster_bits;
        match cluster {
            ClusterMapping::Standard(StandardCluster { host: Some(host), .. })
                if self.data_file && host != cluster_start =>
            {
                Err(InvalidImage::new(format!(
                    "the guest cluster at {cluster_start:#x} is mapped to {host:#x} of the data file instead \
                     of the same offset"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Encodes an entry: the first word, and the bitmap of an extended one.
    pub fn encode(self, cluster: ClusterMapping) -> (u64, u64) {
        match cluster {
            ClusterMapping::Standard(StandardCluster { host, copied, allocated, zero }) => {
                let raw = host.unwrap_or(0) | if copied { COPIED } else { 0 };
                if self.extended {
                    (raw, u64::from(allocated) | u64::from(zero) << 32)
                } else {
                    (raw | if zero != 0 { ZERO } else { 0 }, 0)
                }
            }
            ClusterMapping::Compressed { offset, length } => {
                // The count excludes the sector in which the data begins.
                let sectors = (offset % 512 + length).div_ceil(512) - 1;
                (COMPRESSED | offset | sectors << self.compressed_offset_bits(), 0)
            }
        }
    }

    /// Length limit of compressed data in bytes, given by the width of its sector count.
    pub fn longest_compressed(self) -> u64 {
        512 << (self.cluster_bits - 8)
    }

    /// First bit of the sector count in a compressed entry; the offset is below it.
    fn compressed_offset_bits(self) -> u32 {
        62 - (self.cluster_bits - 8)
    }

    fn decode_compressed(self, raw: u64) -> Result<ClusterMapping, InvalidImage> {
        let bits = self.compressed_offset_bits();
        let field = raw & ((1 << bits) - 1);
        if self.data_file {
            return Err(InvalidImage::new(format!(
                "L2 entry {raw:#x} is compressed, with an external data file"
            )));
        }
        if field >> 56 != 0 {
            return Err(InvalidImage::new(format!("L2 entry {raw:#x} points past the largest offset")));
        }
        let sectors = (raw & !(COPIED | COMPRESSED)) >> bits;
        Ok(ClusterMapping::Compressed { offset: field, length: (sectors + 1) * 512 - field % 512 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: EntryFormat =
        EntryFormat { cluster_bits: 16, extended: false, data_file: false, version: 3 };
    const EXTENDED: EntryFormat = EntryFormat { extended: true, ..PLAIN };

    fn standard(host: Option<u64>, allocated: u32, zero: u32) -> ClusterMapping {
        ClusterMapping::Standard(StandardCluster { host, copied: host.is_some(), allocated, zero })
    }

    #[test]
    fn entries_survive_encoding_and_decoding() {
        for (shape, cluster) in [
            (PLAIN, standard(None, 0, 0)),
            (PLAIN, standard(Some(0x50000), 1, 0)),
            (PLAIN, standard(Some(0x50000), 0, 1)),
            (PLAIN, standard(None, 0, 1)),
            (EXTENDED, standard(Some(0x50000), 0xffff, 0xff_0000)),
            (EXTENDED, standard(None, 0, u32::MAX)),
            (PLAIN, ClusterMapping::Compressed { offset: 0x51234, length: 3 * 512 - 0x34 }),
        ] {
            let (raw, map) = shape.encode(cluster);
            assert_eq!(shape.decode(raw, map), Ok(cluster));
        }
    }

    #[test]
    fn invalid_entries_are_rejected() {
        assert!(PLAIN.decode(0x5_1000, 0).is_err(), "inside a cluster");
        assert!(EXTENDED.decode(0, 1).is_err(), "allocated nowhere");
        assert!(EXTENDED.decode(0x5_0000, 1 << 32 | 1).is_err(), "allocated and zero");
        assert!(L1Entry::decode(0x5_1000, PLAIN).is_err(), "inside a cluster");
        let compressed = PLAIN.encode(ClusterMapping::Compressed { offset: 512, length: 512 }).0;
        assert!(EntryFormat { data_file: true, ..PLAIN }.decode(compressed, 0).is_err());
    }

    #[test]
    fn unallocated_table_is_not_copied() {
        assert_eq!(L1Entry::decode(COPIED, PLAIN), Ok(L1Entry::NONE));
    }

    #[test]
    fn version_2_has_no_zero_flag() {
        let shape = EntryFormat { version: 2, ..PLAIN };
        assert_eq!(
            shape.decode(0x5_0001, 0),
            Ok(ClusterMapping::Standard(StandardCluster {
                host: Some(0x5_0000),
                copied: false,
                allocated: 1,
                zero: 0
            }))
        );
    }
}
