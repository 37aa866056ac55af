//! What a qcow2 file without snapshots refers to, against what it counts. Deliberately simple, and apart from weir's own check.

use std::collections::BTreeMap;

use block::image::qcow2::{
    bitmap::{Bits, decode_table},
    entry::{Cluster, L1Entry, Shape},
    header::Header,
};

/// References to a file's clusters.
pub(crate) struct References {
    /// By cluster: who refers to it, and the number that the file has.
    clusters: BTreeMap<u64, (Vec<String>, u64)>,
    /// Clusters that are counted and that nothing refers to.
    pub(crate) leaks: usize,
}

/// Walks the file.
///
/// # Panics
/// If it is not a valid image.
pub(crate) fn of(file: &[u8]) -> References {
    let header = Header::parse(file).expect("a valid header");
    let bits = header.cluster_bits;
    let cluster_bytes = header.cluster_bytes() as usize;
    let mut clusters: BTreeMap<u64, (Vec<String>, u64)> = BTreeMap::new();
    let mut refer = |what: String, offset: u64, length: u64| {
        for cluster in offset >> bits..(offset + length).div_ceil(1 << bits) {
            clusters.entry(cluster).or_default().0.push(what.clone());
        }
    };
    refer("header".into(), 0, 1);
    let l1_bytes = u64::from(header.l1_entries) * 8;
    refer("L1 table".into(), header.l1_offset, l1_bytes);
    let table_bytes = u64::from(header.refcount_table_clusters) << bits;
    refer("refcount table".into(), header.refcount_table_offset, table_bytes);
    let blocks = words(file, header.refcount_table_offset, table_bytes as usize);
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
        refer(format!("refcount block {index}"), *block, 1);
    }
    let shape = Shape {
        cluster_bits: bits,
        extended: header.has_subclusters(),
        data_file: false,
        version: header.version,
    };
    for (index, word) in words(file, header.l1_offset, l1_bytes as usize).iter().enumerate() {
        let table = L1Entry::decode(*word, shape).expect("a valid L1 entry").offset;
        if table == 0 {
            continue;
        }
        refer(format!("L2 table {index}"), table, 1);
        let entries = words(file, table, cluster_bytes);
        for (number, entry) in entries.chunks(shape.entry_bytes() / 8).enumerate() {
            let map = entry.get(1).copied().unwrap_or(0);
            let Cluster::Standard(standard) = shape.decode(entry[0], map).expect("a valid L2 entry") else {
                continue;
            };
            if let Some(host) = standard.host {
                refer(format!("guest cluster {number} of table {index}"), host, 1);
            }
        }
    }
    for (name, offset, length) in bitmaps(file, &header) {
        refer(name, offset, length);
    }
    let refcount_bits = header.refcount_bits() as usize;
    let per_block = cluster_bytes * 8 / refcount_bits;
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
        let bytes = at(file, *block, cluster_bytes);
        for number in 0..per_block {
            let value = number_at(&bytes, refcount_bits, number);
            if value > 0 {
                clusters.entry((index * per_block + number) as u64).or_default().1 = value;
            }
        }
    }
    let leaks = clusters.values().filter(|(who, count)| (who.len() as u64) < *count).count();
    References { clusters, leaks }
}

/// Directory, tables and bits of the bitmaps: where, and how many bytes. What a directory entry holds is where it is in every version.
fn bitmaps(file: &[u8], header: &Header) -> Vec<(String, u64, u64)> {
    let Some(bitmaps) = header.bitmaps else { return Vec::new() };
    let mut places = vec![("bitmap directory".into(), bitmaps.directory.offset, bitmaps.directory.length)];
    let directory = at(file, bitmaps.directory.offset, bitmaps.directory.length as usize);
    let mut entry = 0;
    for number in 0..bitmaps.count {
        let field = |at: usize, length: usize| {
            let bytes = &directory[entry + at..entry + at + length];
            bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
        };
        let (offset, length) = (field(0, 8), field(8, 4) * 8);
        places.push((format!("table of bitmap {number}"), offset, length));
        let table = decode_table(&at(file, offset, length as usize), header.cluster_bytes());
        for part in table.expect("a valid bitmap table") {
            if let Bits::Stored(offset) = part {
                places.push((format!("bits of bitmap {number}"), offset, 1));
            }
        }
        entry += (24 + field(18, 2) as usize + field(20, 4) as usize).next_multiple_of(8);
    }
    places
}

impl References {
    /// Panics unless every cluster is counted at least as often as it is referred to, and only once.
    pub(crate) fn check(&self) {
        for (cluster, (who, count)) in &self.clusters {
            assert!(who.len() as u64 <= *count, "cluster {cluster} has {who:?} and is counted {count} times");
            assert!(who.len() <= 1, "cluster {cluster} has {who:?}");
        }
    }
}

fn number_at(bytes: &[u8], bits: usize, index: usize) -> u64 {
    // Bit by bit: below a byte from the lowest, else bytes from the highest.
    if bits < 8 {
        let at = index * bits;
        return u64::from(bytes[at / 8] >> (at % 8)) & ((1 << bits) - 1);
    }
    bytes[index * bits / 8..][..bits / 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// What is there, and zeroes behind the end of the file.
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
