//! Small images with every feature, made by QEMU, and damage to their metadata.
//!
//! Damage follows rules (a bit of an entry, an offset inside a cluster, a copy of another entry,
//! the offset of other metadata, a truncated file) or is random. It depends only on the seed.

use std::{fs, ops::Range, path::Path};

use fastrand::Rng;

use crate::harness::{TestClient, qemu_img, weir_image};

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The backing file of all images that have one.
pub(super) const BASE: &str = "base.raw";
/// Name of the file with the passphrase.
pub(super) const KEY: &str = "key";
const SECRET: &str = "secret,id=key,file=key";
const LUKS: &str = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10,\
                    encrypt.cipher-alg=aes-128,encrypt.cipher-mode=cbc";

/// An image before it is damaged.
pub(super) struct ImageTemplate {
    pub(super) options: &'static str,
    pub(super) content: Vec<u8>,
    /// Name and content of the external data file.
    pub(super) data: Option<(String, Vec<u8>)>,
    pub(super) is_encrypted: bool,
    /// Size of the unit that an entry describes: a subcluster, or a cluster.
    pub(super) grain: u64,
    cluster: u64,
    /// The parts of the file that hold metadata.
    tables: Vec<Range<usize>>,
    /// The LUKS header, which a check does not examine.
    keys: Range<usize>,
}

/// Creation options and features: (b)acking file, (c)ompressed clusters, (s)napshots, (d)irty
/// bitmaps, (e)ncryption.
const KINDS: [(&str, &str); 17] = [
    ("cluster_size=512", "bc"),
    ("cluster_size=512", "s"),
    ("cluster_size=512", "bds"),
    ("cluster_size=512,compat=0.10", "bc"),
    ("cluster_size=512,compat=0.10", "s"),
    ("cluster_size=4k,compat=0.10", ""),
    ("cluster_size=512,refcount_bits=1", "b"),
    ("cluster_size=4k,refcount_bits=64,lazy_refcounts=on", "bc"),
    ("cluster_size=4k,compression_type=zstd", "bcs"),
    ("cluster_size=4k,preallocation=metadata", "d"),
    ("cluster_size=64k", "bs"),
    ("cluster_size=16k,extended_l2=on", "b"),
    ("cluster_size=16k,extended_l2=on", "bcs"),
    ("cluster_size=16k,extended_l2=on,preallocation=metadata", ""),
    ("cluster_size=4k,data_file=data-plain.raw", ""),
    ("cluster_size=16k,extended_l2=on,data_file=data-raw.raw,data_file_raw=on", ""),
    ("cluster_size=512,ENCRYPT", "e"),
];

/// Creates all images in a directory, together with the backing file.
pub(super) fn templates(directory: &Path) -> Vec<ImageTemplate> {
    let base: Vec<u8> = (0..300_u32 << 10).map(|at| 0x80 | (at >> 9) as u8).collect();
    fs::write(directory.join(BASE), base).expect("the file can be written");
    fs::write(directory.join(KEY), "abc").expect("the file can be written");
    KINDS
        .iter()
        .enumerate()
        .map(|(number, kind)| ImageTemplate::new(directory, number as u64, *kind))
        .collect()
}

fn number(text: &str) -> u64 {
    let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
    let unit = if text[digits.len()..].starts_with('k') { 1024 } else { 1 };
    digits.parse::<u64>().expect("a number") * unit
}

impl ImageTemplate {
    fn new(directory: &Path, seed: u64, (options, has): (&'static str, &str)) -> Self {
        let cluster = number(options.strip_prefix("cluster_size=").expect("the first option"));
        let is_extended = options.contains("extended_l2");
        let size: u64 = if cluster == 512 { 96 << 10 } else { (256 << 10).max(cluster * 8) };
        let create_options = options.replace("ENCRYPT", LUKS);
        let is_encrypted = has.contains('e');
        let command = ["create", "-q", "-f", "qcow2"];
        // QEMU benchmarks the key derivation, which takes a varying time.
        let create = if is_encrypted { weir_image(&command) } else { qemu_img(command) };
        let mut create = create.inside(directory);
        if has.contains('b') {
            create = create.args(["-b", BASE, "-F", "raw"]);
        }
        if is_encrypted {
            create = create.args(["--object", SECRET]);
        }
        create.args(["-o", &create_options, "image", &size.to_string()]).succeeds();
        let mut random = Rng::with_seed(seed);
        let mut write = |many: usize| {
            let grain = if is_extended { cluster / 32 } else { cluster };
            let mut commands: Vec<String> = (0..many)
                .map(|_| {
                    let offset = random.u64(..size / grain) * grain;
                    let length = (1 + random.u64(..3)) * grain;
                    let length = length.min(size - offset);
                    match random.u32(..4) {
                        0 if !options.contains("compat") => format!("write -z {offset} {length}"),
                        _ => format!("write -P {} {offset} {length}", 1 + random.u32(..120)),
                    }
                })
                .collect();
            if has.contains('c') {
                let offset = random.u64(..size / cluster) * cluster;
                commands.push(format!("discard {offset} {cluster}"));
                commands.push(format!("write -c -P 77 {offset} {cluster}"));
            }
            let mut io = TestClient::new("qemu-io").inside(directory);
            for command in &commands {
                io = io.args(["-c", command]);
            }
            io.args(open_arguments("image", is_encrypted)).succeeds();
        };
        write(24);
        if has.contains('d') {
            qemu_img(["bitmap", "--add", "-g", "512", "image", "changes"]).inside(directory).succeeds();
            write(6);
        }
        for name in ["one", "two"].into_iter().filter(|_| has.contains('s')) {
            qemu_img(["snapshot", "-c", name, "image"]).inside(directory).succeeds();
            write(8);
        }
        let content = fs::read(directory.join("image")).expect("it was just made");
        let data = options.split(',').find_map(|option| option.strip_prefix("data_file=")).map(|name| {
            let content = fs::read(directory.join(name)).expect("it was just made");
            (name.to_owned(), content)
        });
        let grain = if is_extended { cluster / 32 } else { cluster };
        let mut template =
            Self { options, content, data, is_encrypted, grain, cluster, tables: Vec::new(), keys: 0..0 };
        template.find_tables();
        template
    }

    fn read_u64(&self, at: usize) -> u64 {
        let bytes =
            self.content.get(at..at + 8).map_or([0; 8], |bytes| bytes.try_into().expect("eight bytes"));
        u64::from_be_bytes(bytes)
    }

    fn read_u32(&self, at: usize) -> usize {
        (self.read_u64(at) >> 32) as usize
    }

    /// Finds all metadata that the header leads to.
    fn find_tables(&mut self) {
        let cluster = self.cluster as usize;
        let mut tables = vec![0..112, 112..cluster.min(512)];
        let mut l1_tables = vec![(self.read_u64(40) as usize, self.read_u32(36))];
        let (blocks, refcount_bytes) = (self.read_u64(48) as usize, self.read_u32(56) * cluster);
        tables.push(blocks..blocks + refcount_bytes.min(64));
        for at in (blocks..blocks + refcount_bytes).step_by(8) {
            let block = self.read_u64(at) as usize;
            if block != 0 {
                tables.push(block..block + cluster.min(self.content.len() / cluster * 2 + 8));
            }
        }
        let mut at = self.read_u64(64) as usize;
        let start = at;
        for _ in 0..self.read_u32(60) {
            l1_tables.push((self.read_u64(at) as usize, self.read_u32(at + 8)));
            let names = self.read_u32(at + 12);
            at += (40 + self.read_u32(at + 36) + (names >> 16) + (names & 0xffff)).next_multiple_of(8);
        }
        tables.push(start..at);
        for (offset, entries) in l1_tables {
            tables.push(offset..offset + entries * 8);
            for at in (offset..offset + entries * 8).step_by(8) {
                let table = (self.read_u64(at) & OFFSET) as usize;
                if table != 0 {
                    // A disk of this size uses only the first part of the table.
                    tables.push(table..table + cluster.min(1024));
                }
            }
        }
        let extension = 0x2385_2875_0000_0018_u64.to_be_bytes();
        if let Some(at) = self.content[..cluster].windows(8).position(|window| window == extension) {
            let (length, offset) = (self.read_u64(at + 16) as usize, self.read_u64(at + 24) as usize);
            tables.push(offset..offset + length);
            let table = self.read_u64(offset) as usize;
            tables.push(table..table + self.read_u32(offset + 8) * 8);
        }
        let extension = 0x0537_be77_0000_0010_u64.to_be_bytes();
        if let Some(at) = self.content[..cluster].windows(8).position(|window| window == extension) {
            let (offset, length) = (self.read_u64(at + 8) as usize, self.read_u64(at + 16) as usize);
            self.keys = offset..offset + length;
        }
        tables.retain(|table| !table.is_empty() && table.end <= self.content.len());
        self.tables = tables;
    }

    /// A damaged copy, and a description of the damage.
    pub(super) fn damaged(&self, random: &mut Rng) -> (Vec<u8>, String) {
        let mut content = self.content.clone();
        let mut description = String::new();
        for _ in 0..[1, 1, 1, 2, 3][random.usize(..5)] {
            description += &self.damage(&mut content, random);
            description += "; ";
        }
        let end = self.keys.end.min(content.len());
        let keys = self.keys.start.min(end)..end;
        content[keys.clone()].copy_from_slice(&self.content[keys]);
        (content, description)
    }

    fn damage(&self, content: &mut Vec<u8>, random: &mut Rng) -> String {
        let table = self.tables[random.usize(..self.tables.len())].clone();
        let in_table = |random: &mut Rng| {
            let entries = table.len() / 8;
            table.start + random.usize(..entries.max(1)) * 8
        };
        match random.u32(..20) {
            0 => {
                let longest = if random.bool() { content.len() } else { (64 << 10).min(content.len()) };
                let mut end = (1 + random.usize(..longest)).next_multiple_of(512).min(content.len());
                if random.bool() {
                    end = end.next_multiple_of(self.cluster as usize).min(content.len());
                }
                content.truncate(end);
                format!("cut off at {end:#x}")
            }
            1 => {
                let (at, byte) = (random.usize(..content.len()), random.u8(..));
                content[at] = byte;
                format!("byte {at:#x} is {byte:#x}")
            }
            2 | 3 => {
                let at = table.start + random.usize(..table.len());
                let many = 1 + random.usize(..16);
                let end = (at + many).min(content.len());
                for byte in content.get_mut(at.min(end)..end).into_iter().flatten() {
                    *byte = random.u8(..);
                }
                format!("random bytes from {at:#x} to {end:#x}")
            }
            4 => {
                let clusters = content.len() / self.cluster as usize;
                let [from, to] =
                    std::array::from_fn(|_| random.usize(..clusters.max(1)) * self.cluster as usize);
                let end = (from + self.cluster as usize).min(content.len());
                if to + (end - from) <= content.len() {
                    content.copy_within(from..end, to);
                }
                format!("cluster {from:#x} copied to {to:#x}")
            }
            _ => {
                let mut at = in_table(random);
                // Prefer entries in use.
                for _ in 0..8 {
                    if u64_at(content, at) != 0 {
                        break;
                    }
                    at = in_table(random);
                }
                let old = u64_at(content, at);
                let other = u64_at(content, in_table(random));
                let new = self.wrong_entry(old, other, content.len(), random);
                if let Some(entry) = content.get_mut(at..at + 8) {
                    entry.copy_from_slice(&new.to_be_bytes());
                }
                format!("{old:#x} at {at:#x} is {new:#x}")
            }
        }
    }

    /// A wrong value for an entry.
    fn wrong_entry(&self, old: u64, other: u64, length: usize, random: &mut Rng) -> u64 {
        let with_offset = |offset: u64| old & !OFFSET | offset;
        match random.u32(..16) {
            0..4 => old ^ 1 << random.u32(..64),
            4 => old | 0x200,
            5 => 0,
            6 => u64::MAX,
            7 => COPIED,
            8 => old | 1,
            9 => old ^ COMPRESSED,
            10 => old.wrapping_add(self.cluster),
            11 => with_offset((length as u64 & !(self.cluster - 1)) + random.u64(..4) * self.cluster),
            12 => other,
            13 => {
                with_offset(self.tables[random.usize(..self.tables.len())].start as u64 & !(self.cluster - 1))
            }
            14 => with_offset(random.u64(..length as u64) & !(self.cluster - 1)),
            _ => random.u64(..),
        }
    }
}

fn u64_at(content: &[u8], at: usize) -> u64 {
    content.get(at..at + 8).map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().expect("eight bytes")))
}

/// Arguments by which QEMU's programs open an image.
pub(super) fn open_arguments(name: &str, is_encrypted: bool) -> Vec<String> {
    let arguments: Vec<&str> =
        if is_encrypted { vec!["--object", SECRET, "--image-opts"] } else { vec!["-f", "qcow2"] };
    let mut arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
    arguments.push(if is_encrypted {
        format!("driver=qcow2,file.driver=file,file.filename={name},encrypt.key-secret=key")
    } else {
        name.to_owned()
    });
    arguments
}
