//! The header of a qcow2 image: its first cluster, decoded to [`Qcow2Header`] and encoded from it.
//!
//! All bytes are untrusted. Everything that can be checked without further reads is checked here,
//! so users of a [`Qcow2Header`] can rely on it: sizes are in range, tables are aligned and below
//! the offset limit, names fit.
//!
//! Never accesses the file: the reader of a table checks that the table lies inside the file.
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Header". The limits beyond it are QEMU's own, so that
//! QEMU can open images that weir creates.

use super::{InvalidImage, big_endian::u32_at};

/// Signature at offset 0, "QFI\xfb".
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Valid values of [`Qcow2Header::cluster_bits`]: clusters of 512 bytes to 2 MiB.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Minimum of [`Qcow2Header::cluster_bits`] with extended L2 entries: 16 KiB.
pub const EXTENDED_CLUSTER_BITS: u32 = 14;
/// Exclusive bound of offsets in the file.
pub const OFFSET_LIMIT: u64 = 1 << 56;
/// Size limit of an L1 table in bytes, as in QEMU.
pub const MAX_L1: u64 = 32 << 20;
/// Size limit of a refcount table in bytes, as in QEMU.
pub const MAX_REFCOUNT_TABLE: u64 = 8 << 20;
/// Limit of internal snapshots, as in QEMU.
pub const MAX_SNAPSHOTS: u32 = 65_536;
/// Limit of bitmaps, as in QEMU.
pub const MAX_BITMAPS: u32 = 65_535;
/// Size limit of the bitmap directory in bytes: [`MAX_BITMAPS`] entries with names of 1023 bytes.
pub const MAX_BITMAP_DIRECTORY: u64 = MAX_BITMAPS as u64 * (24 + 1023 + 1);
/// Size limit of a LUKS header in bytes, generous: eight key slots with the longest keys of LUKS
/// need less than 4 MiB.
pub const MAX_LUKS: u64 = 64 << 20;
/// Length limit of a backing file's name, in bytes.
pub const MAX_BACKING_NAME: usize = 1023;

/// Bits of [`Qcow2Header::incompatible`].
pub mod incompatible {
    /// Refcounts may be inconsistent; set while lazy refcounts are in use.
    pub const DIRTY: u64 = 1 << 0;
    /// Any structure may be inconsistent; the image must not be written to.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest data is in an external data file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// The compression type is not zlib.
    pub const COMPRESSION: u64 = 1 << 3;
    /// L2 entries are extended: 16 bytes, with 32 subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// Bits that weir supports.
    pub const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2;
}

/// Bits of [`Qcow2Header::compatible`].
pub mod compatible {
    /// Refcount updates may be postponed while the image is marked dirty.
    pub const LAZY_REFCOUNTS: u64 = 1 << 0;
}

/// Bits of [`Qcow2Header::autoclear`].
pub mod autoclear {
    /// The bitmaps extension is consistent with the image.
    pub const BITMAPS: u64 = 1 << 0;
    /// The external data file is a consistent raw image.
    pub const RAW_DATA_FILE: u64 = 1 << 1;
    /// Bits that weir supports.
    pub const KNOWN: u64 = BITMAPS | RAW_DATA_FILE;
}

pub(super) mod extension {
    pub(in crate::qcow2) const END: u32 = 0;
    pub(in crate::qcow2) const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub(in crate::qcow2) const FEATURE_NAMES: u32 = 0x6803_f857;
    pub(in crate::qcow2) const BITMAPS: u32 = 0x2385_2875;
    pub(in crate::qcow2) const ENCRYPTION: u32 = 0x0537_be77;
    pub(in crate::qcow2) const DATA_FILE: u32 = 0x4441_5441;
}

const V2_LENGTH: usize = 72;
const V3_LENGTH: usize = 104;
// Length of a header of version 3 with the compression type and its padding.
const OWN_LENGTH: usize = 112;

/// Encryption method of guest data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncryptionMethod {
    /// Not encrypted.
    None,
    /// QEMU's legacy AES-CBC, which weir rejects as insecure.
    Aes,
    /// LUKS version 1, with its header inside the image.
    Luks,
}

/// Compression method of compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionType {
    /// Raw deflate without a zlib header, as written by QEMU.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// Backing file, the source of unallocated clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingReference {
    /// Name as stored in the image: relative to the directory of the image, unless absolute.
    pub name: String,
    /// Name of the format; `None` leaves it to probing, which weir rejects.
    pub format: Option<String>,
}

/// Location of a structure in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRegion {
    /// Offset in bytes, a multiple of the cluster size.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Content of the bitmaps extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Number of bitmaps.
    pub count: u32,
    /// Location of the bitmap directory.
    pub directory: FileRegion,
}

/// Decoded header. Fields have the meaning of the specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Header {
    /// 2 or 3.
    pub version: u32,
    /// A cluster is `1 << cluster_bits` bytes; in [`CLUSTER_BITS`].
    pub cluster_bits: u32,
    /// Size of the virtual disk in bytes.
    pub size_bytes: u64,
    /// Encryption method.
    pub crypt: EncryptionMethod,
    /// Entries of the active L1 table.
    pub l1_entries: u32,
    /// Offset of the active L1 table; 0 only if it has no entries.
    pub l1_offset: u64,
    /// Offset of the refcount table.
    pub refcount_table_offset: u64,
    /// Length of the refcount table in clusters.
    pub refcount_table_clusters: u32,
    /// Number of snapshots. Images with more than [`MAX_SNAPSHOTS`] can only be opened read-only.
    pub snapshots: u32,
    /// Offset of the snapshot table; 0 only without snapshots.
    pub snapshots_offset: u64,
    /// Bits of [`incompatible`]; unknown bits are rejected.
    pub incompatible: u64,
    /// Bits of [`compatible`]; unknown bits are preserved.
    pub compatible: u64,
    /// Bits of [`autoclear`]; unknown bits must be cleared before the first write.
    pub autoclear: u64,
    /// A refcount has `1 << refcount_order` bits; 0 to 6.
    pub refcount_order: u32,
    /// Compression method of compressed clusters.
    pub compression: CompressionType,
    /// The backing file.
    pub backing: Option<BackingReference>,
    /// Name of the external data file.
    pub data_file: Option<String>,
    /// Content of the bitmaps extension.
    pub bitmaps: Option<BitmapsExtension>,
    /// Location of the LUKS header.
    pub encryption: Option<FileRegion>,
    /// Unknown extensions as pairs of type and data; preserved.
    pub unknown_extensions: Vec<(u32, Vec<u8>)>,
    /// Unknown fields after the known ones; preserved.
    pub later_fields: Vec<u8>,
}

impl Qcow2Header {
    /// Decodes and checks the header. `bytes` begin at offset 0 and hold the first cluster, or all
    /// of a shorter file.
    ///
    /// # Errors
    /// The violated rule and its location.
    pub fn parse(bytes: &[u8]) -> Result<Self, InvalidImage> {
        let fields = HeaderFields(bytes);
        // Order: signature and version decide the layout, cluster size and length bound all
        // further reads.
        if bytes.get(..4) != Some(&MAGIC[..]) {
            return Err(InvalidImage::new("the signature of qcow2 is missing, \"QFI\\xfb\""));
        }
        let version = fields.u32(4)?;
        if !matches!(version, 2 | 3) {
            return Err(InvalidImage::new(format!(
                "version {version} of qcow2 is not supported; 2 and 3 are"
            )));
        }
        let cluster_bits = fields.u32(20)?;
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(InvalidImage::new(format!(
                "the cluster size is 2^{cluster_bits} bytes; the format allows 2^9 to 2^21"
            )));
        }
        let later = version >= 3;
        // Version 2 has neither feature bits nor a length field: 16-bit refcounts, no features.
        let length = if later { fields.u32(100)? as usize } else { V2_LENGTH };
        // QEMU requires a length that is a multiple of 8 and inside the first cluster.
        if later && (length < V3_LENGTH || !length.is_multiple_of(8)) || length > 1 << cluster_bits {
            return Err(InvalidImage::new(format!("the header length of {length} bytes is invalid")));
        }
        if bytes.len() < length {
            return Err(InvalidImage::new(format!(
                "the file ends inside the header, which has {length} bytes"
            )));
        }
        let mut header = Self {
            version,
            cluster_bits,
            size_bytes: fields.u64(24)?,
            crypt: match fields.u32(32)? {
                0 => EncryptionMethod::None,
                1 => EncryptionMethod::Aes,
                2 => EncryptionMethod::Luks,
                other => return Err(InvalidImage::new(format!("encryption method {other} is unknown"))),
            },
            l1_entries: fields.u32(36)?,
            l1_offset: fields.u64(40)?,
            refcount_table_offset: fields.u64(48)?,
            refcount_table_clusters: fields.u32(56)?,
            snapshots: fields.u32(60)?,
            snapshots_offset: fields.u64(64)?,
            incompatible: if later { fields.u64(72)? } else { 0 },
            compatible: if later { fields.u64(80)? } else { 0 },
            autoclear: if later { fields.u64(88)? } else { 0 },
            refcount_order: if later { fields.u32(96)? } else { 4 },
            compression: CompressionType::Zlib,
            backing: None,
            data_file: None,
            bitmaps: None,
            encryption: None,
            unknown_extensions: Vec::new(),
            later_fields: bytes.get(OWN_LENGTH..length).unwrap_or_default().to_vec(),
        };
        // Extensions first: the feature name table supplies names for the error about unknown
        // features.
        let names = header.read_extensions(&fields)?;
        header.check_features(&names, if length > V3_LENGTH { bytes[V3_LENGTH] } else { 0 })?;
        header.read_backing_name(&fields)?;
        header.check()?;
        Ok(header)
    }

    /// Encodes the first cluster: header, extensions and the backing file's name, padded with
    /// zeroes.
    ///
    /// # Errors
    /// Fails if it does not fit into a cluster or violates a rule.
    pub fn encode(&self) -> Result<Vec<u8>, InvalidImage> {
        let mut bytes = self.encode_front(true)?;
        if let Some(BackingReference { name, .. }) = &self.backing {
            let at = bytes.len() as u64;
            bytes[8..16].copy_from_slice(&at.to_be_bytes());
            bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
            bytes.extend(name.as_bytes());
        }
        if bytes.len() as u64 > self.cluster_bytes() {
            return Err(InvalidImage::new(format!(
                "the header needs {} bytes, but a cluster has {}",
                bytes.len(),
                self.cluster_bytes()
            )));
        }
        bytes.resize(self.cluster_bytes() as usize, 0);
        Ok(bytes)
    }

    /// Encodes the header and the extensions, the optional names of features included or not.
    /// Offset and length of the backing file's name, in bytes 8 to 20, are 0.
    ///
    /// # Errors
    /// Fails if it violates a rule.
    pub(super) fn encode_front(&self, has_feature_names: bool) -> Result<Vec<u8>, InvalidImage> {
        self.check()?;
        let mut bytes = Vec::with_capacity(self.cluster_bytes() as usize);
        let put_u64 = |bytes: &mut Vec<u8>, value: u64| bytes.extend(value.to_be_bytes());
        let put_u32 = |bytes: &mut Vec<u8>, value: u32| bytes.extend(value.to_be_bytes());
        bytes.extend(MAGIC);
        put_u32(&mut bytes, self.version);
        bytes.extend([0; 12]);
        put_u32(&mut bytes, self.cluster_bits);
        put_u64(&mut bytes, self.size_bytes);
        put_u32(
            &mut bytes,
            match self.crypt {
                EncryptionMethod::None => 0,
                EncryptionMethod::Aes => 1,
                EncryptionMethod::Luks => 2,
            },
        );
        put_u32(&mut bytes, self.l1_entries);
        put_u64(&mut bytes, self.l1_offset);
        put_u64(&mut bytes, self.refcount_table_offset);
        put_u32(&mut bytes, self.refcount_table_clusters);
        put_u32(&mut bytes, self.snapshots);
        put_u64(&mut bytes, self.snapshots_offset);
        if self.version >= 3 {
            put_u64(&mut bytes, self.incompatible);
            put_u64(&mut bytes, self.compatible);
            put_u64(&mut bytes, self.autoclear);
            put_u32(&mut bytes, self.refcount_order);
            put_u32(&mut bytes, (OWN_LENGTH + self.later_fields.len()) as u32);
            bytes.push(match self.compression {
                CompressionType::Zlib => 0,
                CompressionType::Zstd => 1,
            });
            bytes.extend([0; 7]);
            bytes.extend(&self.later_fields);
        }
        self.write_extensions(&mut bytes, has_feature_names);
        Ok(bytes)
    }

    /// Cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// True if L2 entries are extended, with subclusters.
    pub fn has_subclusters(&self) -> bool {
        self.incompatible & incompatible::EXTENDED_L2 != 0
    }

    /// True if guest data is in an external data file.
    pub fn has_data_file(&self) -> bool {
        self.incompatible & incompatible::DATA_FILE != 0
    }

    /// Width of a refcount in bits.
    pub fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// Guest clusters per L2 table, as a power of two.
    pub fn l2_bits(&self) -> u32 {
        self.cluster_bits - if self.has_subclusters() { 4 } else { 3 }
    }

    /// Number of L1 entries that a disk of this size needs.
    pub fn l1_entries_for(&self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(1 << (self.cluster_bits + self.l2_bits()))
    }

    fn read_extensions(&mut self, fields: &HeaderFields<'_>) -> Result<Vec<FeatureName>, InvalidImage> {
        let mut names = Vec::new();
        for extension in extensions(fields.0) {
            let (kind, _, data) = extension?;
            self.read_extension(kind, data, &mut names)?;
        }
        Ok(names)
    }

    fn read_extension(
        &mut self,
        kind: u32,
        data: &[u8],
        names: &mut Vec<FeatureName>,
    ) -> Result<(), InvalidImage> {
        let inner = HeaderFields(data);
        match kind {
            extension::BACKING_FORMAT => {
                let format = Some(text(data, "the backing file's format")?);
                // `read_backing_name` fills in the name, which is outside the extensions.
                self.backing = Some(BackingReference { name: String::new(), format });
            }
            extension::FEATURE_NAMES => names.extend(data.chunks_exact(48).map(FeatureName::parse)),
            extension::BITMAPS => {
                let directory = FileRegion { length: inner.u64(8)?, offset: inner.u64(16)? };
                self.bitmaps = Some(BitmapsExtension { count: inner.u32(0)?, directory });
            }
            extension::ENCRYPTION => {
                self.encryption = Some(FileRegion { offset: inner.u64(0)?, length: inner.u64(8)? });
            }
            extension::DATA_FILE => self.data_file = Some(text(data, "the data file's name")?),
            extension::END => {}
            _ => self.unknown_extensions.push((kind, data.to_vec())),
        }
        Ok(())
    }

    fn write_extensions(&self, bytes: &mut Vec<u8>, has_feature_names: bool) {
        let mut push_extension = |kind: u32, data: &[u8]| {
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        };
        if let Some(BackingReference { format: Some(format), .. }) = &self.backing {
            push_extension(extension::BACKING_FORMAT, format.as_bytes());
        }
        if let Some(name) = &self.data_file {
            push_extension(extension::DATA_FILE, name.as_bytes());
        }
        if let Some(FileRegion { offset, length }) = self.encryption {
            push_extension(extension::ENCRYPTION, &[offset.to_be_bytes(), length.to_be_bytes()].concat());
        }
        if let Some(bitmaps) = self.bitmaps {
            push_extension(extension::BITMAPS, &bitmaps_extension(bitmaps)[8..]);
        }
        // Optional, and clusters of 512 bytes have no space for it.
        let names = FeatureName::table();
        if has_feature_names && self.version >= 3 && self.cluster_bytes() >= 4096 {
            push_extension(extension::FEATURE_NAMES, &names);
        }
        for (kind, data) in &self.unknown_extensions {
            push_extension(*kind, data);
        }
        push_extension(extension::END, &[]);
    }

    fn read_backing_name(&mut self, fields: &HeaderFields<'_>) -> Result<(), InvalidImage> {
        let (offset, length) = (fields.u64(8)?, fields.u32(16)? as usize);
        if offset == 0 {
            // A format without a name has no effect.
            self.backing = None;
            return Ok(());
        }
        if length > MAX_BACKING_NAME {
            return Err(InvalidImage::new(format!(
                "the backing file's name has {length} bytes; the maximum is 1023"
            )));
        }
        if offset > self.cluster_bytes() || offset + length as u64 > self.cluster_bytes() {
            return Err(InvalidImage::new(format!(
                "the backing file's name at {offset:#x} is outside the first cluster"
            )));
        }
        let name = text(fields.bytes(offset as usize, length)?, "the backing file's name")?;
        let format = self.backing.take().and_then(|backing| backing.format);
        // QEMU treats an empty name as no backing file.
        self.backing = (!name.is_empty()).then_some(BackingReference { name, format });
        Ok(())
    }

    fn check_features(&mut self, names: &[FeatureName], compression: u8) -> Result<(), InvalidImage> {
        let unknown = self.incompatible & !incompatible::KNOWN;
        if unknown != 0 {
            let bits = (0..64).filter(|bit| unknown & 1 << bit != 0);
            let named = bits.map(|bit| FeatureName::find(names, bit)).collect::<Vec<_>>().join(", ");
            return Err(InvalidImage::new(format!(
                "it uses features that this version of weir does not support: {named}"
            )));
        }
        // The specification: zlib must not set the bit, every other type must.
        let is_marked = self.incompatible & incompatible::COMPRESSION != 0;
        self.compression = match (is_marked, compression) {
            (false, 0) => CompressionType::Zlib,
            (true, 1) => CompressionType::Zstd,
            (false, other) => {
                return Err(InvalidImage::new(format!(
                    "compression type {other} is set without its feature bit"
                )));
            }
            (true, other) => return Err(InvalidImage::new(format!("compression type {other} is unknown"))),
        };
        Ok(())
    }

    /// Checks all rules that need no access to the file.
    fn check(&self) -> Result<(), InvalidImage> {
        let cluster = self.cluster_bytes();
        let table = |structure: &str, offset: u64, length: u64| {
            if !offset.is_multiple_of(cluster) {
                return Err(InvalidImage::new(format!(
                    "{structure} at {offset:#x} is not aligned to a cluster"
                )));
            }
            if offset.checked_add(length).is_none_or(|end| end > OFFSET_LIMIT) {
                return Err(InvalidImage::new(format!(
                    "{structure} at {offset:#x} is beyond the largest offset"
                )));
            }
            if offset == 0 && length > 0 {
                return Err(InvalidImage::new(format!("{structure} overlaps the header")));
            }
            Ok(())
        };
        // From here on, rules of the specification and QEMU's limits, which bound the
        // allocations.
        if self.refcount_order > 6 {
            return Err(InvalidImage::new(format!(
                "a refcount has 2^{} bits; the maximum is 2^6",
                self.refcount_order
            )));
        }
        if self.has_subclusters() && self.cluster_bits < EXTENDED_CLUSTER_BITS {
            return Err(InvalidImage::new(format!(
                "extended L2 entries need clusters of at least 16 KiB, but these have {cluster} bytes"
            )));
        }
        if self.has_data_file() && self.snapshots > 0 {
            return Err(InvalidImage::new("an external data file and internal snapshots exclude each other"));
        }
        let raw_data = self.autoclear & autoclear::RAW_DATA_FILE != 0;
        if raw_data && self.has_data_file() && self.backing.is_some() {
            return Err(InvalidImage::new("a raw external data file and a backing file exclude each other"));
        }
        let l1_bytes = u64::from(self.l1_entries) * 8;
        if l1_bytes > MAX_L1 {
            return Err(InvalidImage::new(format!(
                "the L1 table has {l1_bytes} bytes; the maximum is {MAX_L1}"
            )));
        }
        table("the L1 table", self.l1_offset, l1_bytes)?;
        if u64::from(self.l1_entries) < self.l1_entries_for(self.size_bytes) {
            return Err(InvalidImage::new(format!(
                "an L1 table of {} entries is too small for a disk of {} bytes",
                self.l1_entries, self.size_bytes
            )));
        }
        let refcount_bytes = u64::from(self.refcount_table_clusters) << self.cluster_bits;
        if refcount_bytes > MAX_REFCOUNT_TABLE.max(cluster) {
            return Err(InvalidImage::new(format!(
                "the refcount table has {refcount_bytes} bytes; the maximum is {MAX_REFCOUNT_TABLE}"
            )));
        }
        if refcount_bytes == 0 {
            return Err(InvalidImage::new("it has no refcount table"));
        }
        table("the refcount table", self.refcount_table_offset, refcount_bytes)?;
        // The length of an entry is unknown before it is read: `snapshots` bytes is a lower bound.
        table("the snapshot table", self.snapshots_offset, u64::from(self.snapshots))?;
        if self.encryption.is_some() && self.crypt != EncryptionMethod::Luks {
            return Err(InvalidImage::new("it locates a LUKS header, but is not encrypted with LUKS"));
        }
        if self.crypt == EncryptionMethod::Luks {
            let Some(place) = self.encryption else {
                return Err(InvalidImage::new(
                    "it is encrypted with LUKS, but does not locate its LUKS header",
                ));
            };
            table("the LUKS header", place.offset, place.length)?;
            if place.length > MAX_LUKS {
                let length = place.length;
                return Err(InvalidImage::new(format!(
                    "the LUKS header has {length} bytes; the maximum is {MAX_LUKS}"
                )));
            }
        }
        self.check_bitmaps(table)
    }

    fn check_bitmaps(
        &self,
        table: impl Fn(&str, u64, u64) -> Result<(), InvalidImage>,
    ) -> Result<(), InvalidImage> {
        // Without the autoclear bit the extension may be stale and must be ignored.
        if self.autoclear & autoclear::BITMAPS == 0 {
            return Ok(());
        }
        let Some(BitmapsExtension { count, directory }) = self.bitmaps else {
            return Err(InvalidImage::new("bitmaps are marked consistent, but there are none"));
        };
        if !(1..=MAX_BITMAPS).contains(&count) || directory.length > MAX_BITMAP_DIRECTORY {
            return Err(InvalidImage::new(format!(
                "the bitmap directory has {count} entries in {} bytes; valid are 1 to {MAX_BITMAPS} \
                 entries in at most {MAX_BITMAP_DIRECTORY} bytes",
                directory.length
            )));
        }
        table("the bitmap directory", directory.offset, directory.length)
    }
}

/// Type, offset and data of each extension in the first cluster, including the end marker, whose
/// data is empty. The list also ends at the backing file's name or at the end of the cluster.
pub(super) fn extensions(bytes: &[u8]) -> impl Iterator<Item = Result<(u32, usize, &[u8]), InvalidImage>> {
    let fields = HeaderFields(bytes);
    let is_later = fields.u32(4).is_ok_and(|version| version >= 3);
    let start =
        if is_later { fields.u32(100).map_or(V3_LENGTH, |length| length as usize) } else { V2_LENGTH };
    let cluster_bits = fields.u32(20).unwrap_or(0).clamp(*CLUSTER_BITS.start(), *CLUSTER_BITS.end());
    let backing = fields.u64(8).ok().filter(|offset| *offset != 0).unwrap_or(u64::MAX);
    let end = backing.min(1 << cluster_bits).min(bytes.len() as u64) as usize;
    let bytes = &bytes[..end];
    let mut next = Some(start);
    std::iter::from_fn(move || {
        let at = next.take().filter(|at| at + 8 <= end)?;
        let read_u32 = |at: usize| u32_at(bytes, at);
        let (kind, length) = (read_u32(at), read_u32(at + 4) as usize);
        if kind == extension::END {
            return Some(Ok((kind, at, &bytes[at..at])));
        }
        let data = (at + 8).checked_add(length).and_then(|end| bytes.get(at + 8..end));
        let Some(data) = data else {
            let at = at + 8;
            let message =
                format!("header extension {kind:#x} at {at:#x} has {length} bytes, which do not fit");
            return Some(Err(InvalidImage::new(message)));
        };
        next = Some(at + 8 + length.next_multiple_of(8));
        Some(Ok((kind, at, data)))
    })
}

/// Reserved bytes after the compression type; empty if the header is too short to contain them.
pub(super) fn compression_padding(bytes: &[u8], version: u32) -> &[u8] {
    let has_type =
        version >= 3 && HeaderFields(bytes).u32(100).is_ok_and(|length| length as usize >= OWN_LENGTH);
    if has_type { bytes.get(V3_LENGTH + 1..OWN_LENGTH).unwrap_or_default() } else { &[] }
}

/// Encoded bitmaps extension, including its type and length.
pub(super) fn bitmaps_extension(BitmapsExtension { count, directory }: BitmapsExtension) -> Vec<u8> {
    let start = u64::from(extension::BITMAPS) << 32 | 24;
    [start, u64::from(count) << 32, directory.length, directory.offset].map(u64::to_be_bytes).concat()
}

/// An entry of the feature name table.
struct FeatureName {
    kind: u8,
    bit: u8,
    name: String,
}

impl FeatureName {
    /// Decodes an entry of 48 bytes.
    fn parse(bytes: &[u8]) -> Self {
        // Names are padded with zeroes; bytes after the first zero are ignored.
        let name = bytes[2..].split(|&byte| byte == 0).next().unwrap_or_default();
        Self { kind: bytes[0], bit: bytes[1], name: String::from_utf8_lossy(name).into_owned() }
    }

    fn find(names: &[Self], bit: u8) -> String {
        let known = names.iter().find(|name| name.kind == 0 && name.bit == bit && !name.name.is_empty());
        known.map_or_else(|| format!("incompatible feature bit {bit}"), |known| format!("{:?}", known.name))
    }

    /// Encoded names of the features that weir supports, for messages of programs that do not.
    fn table() -> Vec<u8> {
        const NAMES: [(u8, u8, &str); 8] = [
            (0, 0, "dirty bit"),
            (0, 1, "corrupt bit"),
            (0, 2, "external data file"),
            (0, 3, "compression type"),
            (0, 4, "extended L2 entries"),
            (1, 0, "lazy refcounts"),
            (2, 0, "bitmaps"),
            (2, 1, "raw external data"),
        ];
        let mut bytes = Vec::with_capacity(NAMES.len() * 48);
        for (kind, bit, name) in NAMES {
            let start = bytes.len();
            bytes.extend([kind, bit]);
            bytes.extend(name.as_bytes());
            bytes.resize(start + 48, 0);
        }
        bytes
    }
}

/// Bounds-checked access to fields of the header.
struct HeaderFields<'a>(&'a [u8]);

impl HeaderFields<'_> {
    fn bytes(&self, at: usize, length: usize) -> Result<&[u8], InvalidImage> {
        let end = at.checked_add(length);
        end.and_then(|end| self.0.get(at..end))
            .ok_or_else(|| InvalidImage::new(format!("the file ends inside the header, at {at:#x}")))
    }

    fn u32(&self, at: usize) -> Result<u32, InvalidImage> {
        let mut value = [0; 4];
        value.copy_from_slice(self.bytes(at, 4)?);
        Ok(u32::from_be_bytes(value))
    }

    fn u64(&self, at: usize) -> Result<u64, InvalidImage> {
        let mut value = [0; 8];
        value.copy_from_slice(self.bytes(at, 8)?);
        Ok(u64::from_be_bytes(value))
    }
}

fn text(bytes: &[u8], label: &str) -> Result<String, InvalidImage> {
    String::from_utf8(bytes.to_vec()).map_err(|_| InvalidImage::new(format!("{label} is not UTF-8")))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::qcow2) fn header() -> Qcow2Header {
        Qcow2Header {
            version: 3,
            cluster_bits: 16,
            size_bytes: 1 << 30,
            crypt: EncryptionMethod::None,
            l1_entries: 4,
            l1_offset: 0x30000,
            refcount_table_offset: 0x10000,
            refcount_table_clusters: 1,
            snapshots: 0,
            snapshots_offset: 0,
            incompatible: 0,
            compatible: compatible::LAZY_REFCOUNTS,
            autoclear: 0,
            refcount_order: 4,
            compression: CompressionType::Zlib,
            backing: Some(BackingReference { name: "base.raw".into(), format: Some("raw".into()) }),
            data_file: None,
            bitmaps: None,
            encryption: None,
            unknown_extensions: vec![(0x1234_5678, vec![1, 2, 3])],
            later_fields: vec![0; 8],
        }
    }

    #[test]
    fn header_round_trips() {
        let zstd = Qcow2Header {
            compression: CompressionType::Zstd,
            incompatible: incompatible::COMPRESSION | incompatible::EXTENDED_L2,
            ..header()
        };
        let bitmaps = BitmapsExtension { count: 1, directory: FileRegion { offset: 0x50000, length: 32 } };
        let luks = Qcow2Header {
            crypt: EncryptionMethod::Luks,
            encryption: Some(FileRegion { offset: 0x40000, length: 592 }),
            bitmaps: Some(bitmaps),
            autoclear: autoclear::BITMAPS,
            backing: None,
            ..header()
        };
        let data_file =
            Qcow2Header { incompatible: incompatible::DATA_FILE, data_file: Some("data".into()), ..header() };
        for header in [header(), zstd, luks, data_file] {
            let bytes = header.encode().expect("valid");
            assert_eq!(Qcow2Header::parse(&bytes), Ok(header));
        }
        let second = Qcow2Header { version: 2, compatible: 0, later_fields: Vec::new(), ..header() };
        assert_eq!(Qcow2Header::parse(&second.encode().expect("valid")), Ok(second));
    }

    #[test]
    fn invalid_headers_are_rejected() {
        type Change = fn(&mut Vec<u8>);
        let cases: [(&str, Change); 10] = [
            ("signature", |bytes| bytes[0] = 0),
            ("version 4", |bytes| bytes[7] = 4),
            ("2^22", |bytes| bytes[23] = 22),
            ("bit 9", |bytes| bytes[78] = 2),
            ("L1 table", |bytes| bytes[47] = 1),
            ("too small", |bytes| bytes[24] = 1),
            ("a refcount has 2^7 bits", |bytes| bytes[99] = 7),
            ("refcount table", |bytes| bytes[56] = 1),
            ("snapshot table overlaps the header", |bytes| bytes[60] = 1),
            ("not encrypted", |bytes| {
                // Turns the unknown extension of the test header into an encryption extension.
                let at = bytes.windows(4).position(|kind| kind == [0x12, 0x34, 0x56, 0x78]).expect("there");
                let extension = [0x0537_be77_0000_0010, 0x40000, 1_u64 << 50].map(u64::to_be_bytes);
                bytes[at..at + 24].copy_from_slice(&extension.concat());
            }),
        ];
        for (part, change) in cases {
            let mut bytes = header().encode().expect("valid");
            change(&mut bytes);
            let message = Qcow2Header::parse(&bytes).expect_err(part).to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn the_name_of_a_feature_ends_with_its_first_zero() {
        let mut entry = [0; 48];
        entry[..12].copy_from_slice(b"\0\x09later\0old\0");
        let names = [FeatureName::parse(&entry)];
        assert_eq!(FeatureName::find(&names, 9), "\"later\"");
        entry[2..].fill(b'x');
        assert_eq!(FeatureName::parse(&entry).name, "x".repeat(46), "all of them");
    }

    #[test]
    fn truncated_header_is_rejected_at_every_length() {
        let bytes = header().encode().expect("valid");
        for length in 0..112 {
            assert!(Qcow2Header::parse(&bytes[..length]).is_err(), "{length}");
        }
    }
}
