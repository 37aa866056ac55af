//! qcow2 in both directions: QEMU reads images written by weir and finds no errors; weir reads
//! images written by QEMU and continues to write them.
//!
//! Covers the product of version × cluster size × refcount width × extended L2 × data file ×
//! compression × backing file, as far as the format permits. For each combination, random
//! operations go to the image, alternately through weir (served over NBD) and through QEMU, and to
//! a flat model in memory; then every reader must see the content of the model.
//!
//! A plain run samples the combinations such that every single value occurs;
//! `WEIR_CONFORMANCE=all`, in `make soak`, covers all.

use std::{env, fmt::Write as _, fs, path::PathBuf};

use fastrand::Rng;

use crate::harness::{MIB, Scratch, Serve, TestClient, qemu_img, qemu_io, text, weir_image};

/// Interval of sampled combinations: coprime to the number of values of each property, so they mix.
const SAMPLE_INTERVAL: usize = 11;
const OPERATIONS: usize = 24;
/// Cluster sizes, each with its own test.
const CLUSTERS: [u64; 4] = [512, 4096, 65_536, 2 << 20];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataFileKind {
    None,
    Plain,
    Raw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ImageFeatures {
    version: u32,
    cluster: u64,
    refcount_bits: u32,
    extended: bool,
    data_file: DataFileKind,
    compression: Option<&'static str>,
    backing: bool,
}

impl ImageFeatures {
    const PLAIN: Self = Self {
        version: 3,
        cluster: 2 << 20,
        refcount_bits: 16,
        extended: false,
        data_file: DataFileKind::None,
        compression: None,
        backing: false,
    };

    fn all() -> Vec<Self> {
        fn each<T: Copy, const N: usize>(
            shapes: Vec<ImageFeatures>,
            values: [T; N],
            with: fn(ImageFeatures, T) -> ImageFeatures,
        ) -> Vec<ImageFeatures> {
            shapes.into_iter().flat_map(|shape| values.map(|value| with(shape, value))).collect()
        }
        let all = each(vec![Self::PLAIN], [2, 3], |shape, version| Self { version, ..shape });
        let all = each(all, CLUSTERS, |shape, cluster| Self { cluster, ..shape });
        let all = each(all, [1, 16, 64], |shape, refcount_bits| Self { refcount_bits, ..shape });
        let all = each(all, [false, true], |shape, extended| Self { extended, ..shape });
        let files = [DataFileKind::None, DataFileKind::Plain, DataFileKind::Raw];
        let all = each(all, files, |shape, data_file| Self { data_file, ..shape });
        let kinds = [None, Some("zlib"), Some("zstd")];
        let all = each(all, kinds, |shape, compression| Self { compression, ..shape });
        let all = each(all, [false, true], |shape, backing| Self { backing, ..shape });
        all.into_iter().filter(Self::is_possible).collect()
    }

    fn is_possible(&self) -> bool {
        let has_data_file = self.data_file != DataFileKind::None;
        let version_2 = self.refcount_bits == 16
            && !self.extended
            && !has_data_file
            && self.compression.is_none_or(|kind| kind == "zlib");
        (self.version == 3 || version_2)
            && (!self.extended || self.cluster >= 16_384)
            && !(has_data_file && self.compression.is_some())
            && !(self.data_file == DataFileKind::Raw && self.backing)
    }

    fn options(&self, data: &str) -> String {
        let compat = if self.version == 2 { "0.10" } else { "1.1" };
        let mut options = format!("compat={compat},cluster_size={}", self.cluster);
        if self.version == 3 {
            // Writing to a string cannot fail.
            let _ = write!(options, ",refcount_bits={}", self.refcount_bits);
        }
        if self.extended {
            options += ",extended_l2=on";
        }
        if self.compression == Some("zstd") {
            options += ",compression_type=zstd";
        }
        options += &match self.data_file {
            DataFileKind::None => String::new(),
            DataFileKind::Plain => format!(",data_file={data}"),
            DataFileKind::Raw => format!(",data_file={data},data_file_raw=on"),
        };
        options
    }

    /// Not a multiple of a cluster, and several clusters long.
    fn size(&self) -> u64 {
        if self.cluster >= MIB { 13 * MIB + 1536 } else { 3 * MIB + 1536 }
    }
}

struct ImageUnderTest {
    shape: ImageFeatures,
    scratch: Scratch,
    image: PathBuf,
    model: Vec<u8>,
    random: Rng,
}

impl ImageUnderTest {
    fn new(shape: ImageFeatures, seed: u64) -> Self {
        let scratch = Scratch::new();
        let image = scratch.path("image.qcow2");
        let mut created = Self {
            shape,
            scratch,
            image,
            model: vec![0; shape.size() as usize],
            random: Rng::with_seed(seed),
        };
        let by_weir = seed.is_multiple_of(2);
        let options = shape.options("data.raw");
        if shape.backing {
            created.make_backing();
        }
        if shape.compression.is_some() {
            created.fill_compressed(&options, by_weir);
        } else {
            let size = shape.size().to_string();
            let backing: &[&str] = if shape.backing { &["-b", "base.qcow2", "-F", "qcow2"] } else { &[] };
            created
                .tool(by_weir, &["create", "-q", "-f", "qcow2", "-o", &options])
                .args(backing)
                .args([text(&created.image), &size])
                .succeeds();
        }
        created
    }

    /// `weir image` or `qemu-img`, run in the image's directory: names in the image are relative.
    fn tool(&self, weir: bool, arguments: &[&str]) -> TestClient {
        let client = if weir { weir_image(arguments) } else { qemu_img(arguments) };
        client.inside(self.image.parent().expect("it lies in one"))
    }

    /// Creates a backing file that is shorter than the image and contains data.
    fn make_backing(&mut self) {
        let bytes = (self.shape.size() / 2) & !511;
        let base = self.scratch.path("base.qcow2");
        let size = bytes.to_string();
        self.tool(false, &["create", "-q", "-f", "qcow2", text(&base), &size]).succeeds();
        let (at, length) = (bytes / 4, bytes / 2);
        let write = format!("write -P 0xba {at} {length}");
        qemu_io(["-f", "qcow2"], [write], base);
        self.model[at as usize..(at + length) as usize].fill(0xba);
    }

    /// Fills the image with compressed clusters of data that compresses well, badly and not at all.
    fn fill_compressed(&mut self, options: &str, by_weir: bool) {
        let mut at = 0;
        while at < self.model.len() {
            let end = self.model.len().min(at + 70_000);
            let spread = [1, 4, 64, 256][self.random.u64(..4) as usize];
            for byte in &mut self.model[at..end] {
                *byte = 1 + self.random.u64(..spread).min(254) as u8;
            }
            at = end + 130_000;
        }
        if self.shape.backing {
            // Ranges that are not in the image's own layer are read from the backing file.
            self.model.fill(0x77);
        }
        let source = self.scratch.file("source.raw", &self.model);
        let backing: &[&str] = if self.shape.backing { &["-B", "base.qcow2", "-F", "qcow2"] } else { &[] };
        self.tool(by_weir, &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options])
            .args(backing)
            .args([text(&source), text(&self.image)])
            .succeeds();
    }

    /// Random commands of qemu-io that change the image; applies them to the model.
    fn operations(&mut self) -> Vec<String> {
        let size = self.model.len() as u64;
        let mut commands = Vec::new();
        for _ in 0..OPERATIONS {
            let longest = [700, 5_000, 70_000, size / 3][self.random.u64(..4) as usize];
            let length = 1 + self.random.u64(..longest);
            let offset = self.random.u64(..size - length + 1);
            let range = offset as usize..(offset + length) as usize;
            match self.random.u64(..10) {
                0..6 => {
                    let byte = 1 + self.random.u64(..254) as u8;
                    self.model[range].fill(byte);
                    commands.push(format!("write -P {byte} {offset} {length}"));
                }
                6..8 => {
                    self.model[range].fill(0);
                    let unmap = if self.random.u64(..2) == 0 { "-u " } else { "" };
                    commands.push(format!("write -z {unmap}{offset} {length}"));
                }
                8 => {
                    // The content after a discard is undefined, so zeroes follow.
                    self.model[range].fill(0);
                    commands.push(format!("discard {offset} {length}"));
                    commands.push(format!("write -z {offset} {length}"));
                }
                _ => commands.push("flush".to_owned()),
            }
        }
        commands
    }

    /// Commands of qemu-io that verify runs of equal bytes against the model.
    fn readings(&self) -> Vec<String> {
        let mut commands = Vec::new();
        let mut at = 0;
        while at < self.model.len() && commands.len() < 60 {
            let run = self.model[at..].iter().take_while(|&&byte| byte == self.model[at]).count();
            if run >= 512 {
                commands.push(format!("read -P {} {at} {run}", self.model[at]));
            }
            at += run;
        }
        commands
    }

    #[track_caller]
    fn qemu_io(&self, format: &str, target: &str, commands: &[String]) {
        // QEMU resolves the name of a data file relative to the working directory, not to the
        // image.
        let directory = self.image.parent().expect("it lies in one");
        let client = TestClient::new("qemu-io").describing(&format!("{:?}", self.shape)).inside(directory);
        client.args(["-f", format]).run_qemu_io(commands, target);
    }

    fn through_weir(&mut self) {
        let weir = Serve::new(&self.scratch).arg(&self.image).args(["--format", "qcow2"]).start();
        let uri = weir.uri("image");
        let commands = self.operations();
        self.qemu_io("raw", &uri, &commands);
        self.qemu_io("raw", &uri, &self.readings());
        weir.stop();
    }

    fn through_qemu(&mut self) {
        let image = text(&self.image).to_owned();
        let commands = self.operations();
        self.qemu_io("qcow2", &image, &commands);
    }

    /// Entries of `map`: start, length, depth, present, zero, offset.
    ///
    /// QEMU also reports holes of the underlying file within data; those count as data here.
    fn map(&self, weir: bool) -> Vec<(u64, u64, u64, bool, bool, Option<u64>)> {
        let entries = self.tool(weir, &["map", "--output=json", "-f", "qcow2", text(&self.image)]).json();
        let mut map: Vec<(u64, u64, u64, bool, bool, Option<u64>)> = Vec::new();
        for entry in entries.as_array().unwrap() {
            let number = |name: &str| entry[name].as_u64();
            let zero = entry["zero"] == true && entry["data"] == false;
            let (start, length) = (number("start").unwrap(), number("length").unwrap());
            let here =
                (start, length, number("depth").unwrap(), entry["present"] == true, zero, number("offset"));
            match map.last_mut() {
                Some(last)
                    if (last.2, last.3, last.4) == (here.2, here.3, here.4)
                        && last.5.map(|offset| offset + last.1) == here.5 =>
                {
                    last.1 += length;
                }
                _ => map.push(here),
            }
        }
        map
    }

    /// Asserts that both programs see the content of the model and find no errors.
    fn check(&self) {
        let label = format!("{:?}", self.shape);
        let (image, model) = (text(&self.image), self.scratch.file("model.raw", &self.model));
        for weir in [false, true] {
            self.tool(weir, &["check", "-f", "qcow2", image]).succeeds();
            self.tool(weir, &["compare", "-f", "qcow2", "-F", "raw", image, text(&model)]).succeeds();
        }
        self.qemu_io("qcow2", image, &self.readings());
        if !self.shape.extended {
            // QEMU reports offsets of preallocated subclusters that are not allocated.
            assert_eq!(self.map(true), self.map(false), "{label}");
        }
        if self.shape.data_file == DataFileKind::Raw {
            let data = fs::read(self.scratch.path("data.raw")).unwrap();
            assert!(data[..self.model.len()] == self.model, "{label}: the data file is not the disk");
        }
    }
}

/// Tests the images of one cluster size; separate tests run in parallel.
#[track_caller]
fn test_cluster_size(cluster: u64) {
    let all = env::var("WEIR_CONFORMANCE").is_ok_and(|value| value == "all");
    let shapes = ImageFeatures::all();
    assert!(shapes.len() > 150, "{} combinations", shapes.len());
    let mut tried = 0;
    for (number, shape) in shapes.into_iter().enumerate() {
        if shape.cluster != cluster || (!all && number % SAMPLE_INTERVAL != 3) {
            continue;
        }
        tried += 1;
        let mut image = ImageUnderTest::new(shape, number as u64 * 2 + 7 + (number as u64 / 3) % 2);
        image.check();
        image.through_weir();
        image.check();
        image.through_qemu();
        image.check();
        image.through_weir();
        image.check();
    }
    assert!(tried > 1, "{tried} combinations");
}

#[test]
fn images_are_interchangeable_with_clusters_of_512_bytes() {
    test_cluster_size(CLUSTERS[0]);
}

#[test]
fn images_are_interchangeable_with_clusters_of_4_kib() {
    test_cluster_size(CLUSTERS[1]);
}

#[test]
fn images_are_interchangeable_with_clusters_of_64_kib() {
    test_cluster_size(CLUSTERS[2]);
}

#[test]
fn images_are_interchangeable_with_clusters_of_2_mib() {
    test_cluster_size(CLUSTERS[3]);
}

#[test]
fn data_file_has_the_length_of_the_disk() {
    let shape = ImageFeatures { data_file: DataFileKind::Plain, ..ImageFeatures::PLAIN };
    let mut image = ImageUnderTest::new(shape, 1);
    // Writes into the last cluster, which QEMU's data file contains only partly.
    let offset = image.model.len() - 700;
    image.model[offset..offset + 300].fill(7);
    let weir = Serve::new(&image.scratch).arg(&image.image).args(["--format", "qcow2"]).start();
    image.qemu_io("raw", &weir.uri("image"), &[format!("write -P 7 {offset} 300")]);
    weir.stop();
    image.check();
}
