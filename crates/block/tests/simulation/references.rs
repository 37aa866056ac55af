//! References in a qcow2 file, compared with its refcounts. Deliberately simple, and independent of
//! weir's own check.

use std::collections::BTreeMap;

use image::qcow2::{
    bitmap::{BitmapCluster, decode_table},
    entry::{ClusterMapping, EntryFormat, L1Entry},
    header::Qcow2Header,
};

/// References to a file's clusters.
pub(crate) struct References {
    clusters: BTreeMap<u64, Uses>,
    /// Number of clusters whose refcount exceeds their references.
    pub(crate) leaks: usize,
}

/// References to one cluster.
#[derive(Debug, Default)]
struct Uses {
    uses: Vec<Use>,
    /// Refcount in the file.
    count: u64,
    /// True if an entry has the COPIED flag.
    is_copied: bool,
}

#[derive(Clone, Debug)]
struct Use {
    #[expect(dead_code, reason = "shown when the test fails")]
    label: String,
    /// Index of the L1 table that leads to it, 0 for the active one; `None` if it belongs to the
    /// image as a whole.
    tree: Option<usize>,
    /// True for compressed clusters, several of which may share it within a tree.
    is_compressed: bool,
}

/// Collects the references of a file.
///
/// # Panics
/// Panics if it is not a valid image.
pub(crate) fn of(file: &[u8]) -> References {
    let header = Qcow2Header::parse(file).expect("a valid header");
    let bits = header.cluster_bits;
    let mut walker = Walk { file, header: &header, clusters: BTreeMap::new() };
    walker.refer("header", 0, 1);
    let table_bytes = u64::from(header.refcount_table_clusters) << bits;
    walker.refer("refcount table", header.refcount_table_offset, table_bytes);
    let blocks = words(file, header.refcount_table_offset, table_bytes as usize);
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
        walker.refer(&format!("refcount block {index}"), *block, 1);
    }
    if let Some(encryption) = header.encryption {
        walker.refer("LUKS header", encryption.offset, encryption.length);
    }
    for (label, offset, length) in bitmaps(file, &header) {
        walker.refer(&label, offset, length);
    }
    walker.tree(0, header.l1_offset, u64::from(header.l1_entries) * 8);
    walker.snapshots();
    let mut clusters = walker.clusters;
    let refcount_bits = header.refcount_bits() as usize;
    let per_block = (8 << bits) / refcount_bits;
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
        let bytes = at(file, *block, 1 << bits);
        for number in 0..per_block {
            let value = number_at(&bytes, refcount_bits, number);
            if value > 0 {
                clusters.entry((index * per_block + number) as u64).or_default().count = value;
            }
        }
    }
    let leaks = clusters.values().filter(|uses| (uses.uses.len() as u64) < uses.count).count();
    References { clusters, leaks }
}

struct Walk<'a> {
    file: &'a [u8],
    header: &'a Qcow2Header,
    clusters: BTreeMap<u64, Uses>,
}

impl Walk<'_> {
    fn refer(&mut self, label: &str, offset: u64, length: u64) {
        self.add(offset, length, &Use { label: label.to_owned(), tree: None, is_compressed: false });
    }

    fn add(&mut self, offset: u64, length: u64, new: &Use) {
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..(offset + length).div_ceil(1 << bits) {
            self.clusters.entry(cluster).or_default().uses.push(new.clone());
        }
    }

    /// Adds an L1 table with everything below it. COPIED flags are valid for the active one only.
    fn tree(&mut self, tree: usize, offset: u64, length: u64) {
        self.refer(&format!("L1 table of tree {tree}"), offset, length);
        let shape = self.shape();
        for (index, entry_word) in words(self.file, offset, length as usize).iter().enumerate() {
            let entry = L1Entry::decode(*entry_word, shape).expect("a valid L1 entry");
            if entry.offset == 0 {
                continue;
            }
            let label = format!("L2 table {index} of tree {tree}");
            self.refer_from_tree(&label, tree, entry.offset, tree == 0 && entry.copied);
            let entries = words(self.file, entry.offset, 1 << self.header.cluster_bits);
            for (number, entry) in entries.chunks(shape.entry_bytes() / 8).enumerate() {
                let map = entry.get(1).copied().unwrap_or(0);
                let label = format!("guest cluster {number} of table {index} of tree {tree}");
                match shape.decode(entry[0], map).expect("a valid L2 entry") {
                    ClusterMapping::Standard(standard) => {
                        let host = standard.host.filter(|_| !shape.data_file);
                        host.inspect(|host| {
                            self.refer_from_tree(&label, tree, *host, tree == 0 && standard.copied);
                        });
                    }
                    ClusterMapping::Compressed { offset, length } => {
                        self.add(offset, length, &Use { label, tree: Some(tree), is_compressed: true });
                    }
                }
            }
        }
    }

    fn refer_from_tree(&mut self, label: &str, tree: usize, offset: u64, is_copied: bool) {
        self.add(offset, 1, &Use { label: label.to_owned(), tree: Some(tree), is_compressed: false });
        if is_copied {
            self.clusters.entry(offset >> self.header.cluster_bits).or_default().is_copied = true;
        }
    }

    /// Reads the snapshot table as the specification defines it: fixed parts of 40 bytes, extra
    /// data, id and name, and padding.
    fn snapshots(&mut self) {
        let mut at_entry = self.header.snapshots_offset as usize;
        for number in 0..self.header.snapshots as usize {
            let entry = at(self.file, at_entry as u64, 40);
            let field = |from: usize, to: usize| {
                entry[from..to].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
            };
            self.tree(number + 1, field(0, 8), field(8, 12) * 8);
            let length = 40 + field(36, 40) + field(12, 14) + field(14, 16);
            at_entry += (length as usize).next_multiple_of(8);
        }
        let length = at_entry as u64 - self.header.snapshots_offset;
        if length > 0 {
            self.refer("snapshot table", self.header.snapshots_offset, length);
        }
    }

    fn shape(&self) -> EntryFormat {
        EntryFormat {
            cluster_bits: self.header.cluster_bits,
            extended: self.header.has_subclusters(),
            data_file: self.header.has_data_file(),
            version: self.header.version,
        }
    }
}

/// Offset and length of the directory, tables and bits of the bitmaps. The fields of a directory
/// entry have the same offsets in every version.
fn bitmaps(file: &[u8], header: &Qcow2Header) -> Vec<(String, u64, u64)> {
    let Some(bitmaps) = header.bitmaps else { return Vec::new() };
    let mut ranges = vec![("bitmap directory".into(), bitmaps.directory.offset, bitmaps.directory.length)];
    let directory = at(file, bitmaps.directory.offset, bitmaps.directory.length as usize);
    let mut entry = 0;
    for number in 0..bitmaps.count {
        let field = |at: usize, length: usize| {
            let bytes = &directory[entry + at..entry + at + length];
            bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
        };
        let (offset, length) = (field(0, 8), field(8, 4) * 8);
        ranges.push((format!("table of bitmap {number}"), offset, length));
        let table = decode_table(&at(file, offset, length as usize), header.cluster_bytes());
        for cluster in table.expect("a valid bitmap table") {
            if let BitmapCluster::Stored(offset) = cluster {
                ranges.push((format!("bits of bitmap {number}"), offset, 1));
            }
        }
        entry += (24 + field(18, 2) as usize + field(20, 4) as usize).next_multiple_of(8);
    }
    ranges
}

impl References {
    /// Panics unless every refcount is at least the number of references, one for each tree that
    /// may share the cluster, and clusters with COPIED have one reference.
    pub(crate) fn check(&self) {
        for (cluster, uses) in &self.clusters {
            let Uses { uses: all_uses, count, is_copied } = uses;
            assert!(all_uses.len() as u64 <= *count, "cluster {cluster} is counted too low: {uses:?}");
            assert!(
                !is_copied || all_uses.len() == 1,
                "cluster {cluster} is marked as one owner's: {uses:?}"
            );
            for (index, first) in all_uses.iter().enumerate() {
                for second in &all_uses[index + 1..] {
                    let both_compressed = first.is_compressed && second.is_compressed;
                    // Two trees may share a cluster, and so may compressed clusters of one tree.
                    let may_share = first.is_compressed == second.is_compressed
                        && (first.tree != second.tree || both_compressed)
                        && first.tree.is_some()
                        && second.tree.is_some();
                    assert!(may_share, "cluster {cluster} is two things: {uses:?}");
                }
            }
        }
    }
}

fn number_at(bytes: &[u8], bits: usize, index: usize) -> u64 {
    // Below a byte from the lowest bit, else big-endian bytes.
    if bits < 8 {
        let at = index * bits;
        return u64::from(bytes[at / 8] >> (at % 8)) & ((1 << bits) - 1);
    }
    bytes[index * bits / 8..][..bits / 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Bytes at an offset, with zeroes beyond the end of the file.
fn at(file: &[u8], offset: u64, length: usize) -> Vec<u8> {
    let start = (offset as usize).min(file.len());
    let mut bytes = file[start..(start + length).min(file.len())].to_vec();
    bytes.resize(length, 0);
    bytes
}

fn words(file: &[u8], offset: u64, length: usize) -> Vec<u64> {
    let bytes = at(file, offset, length);
    bytes
        .chunks_exact(8)
        .map(|word| word.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
        .collect()
}
