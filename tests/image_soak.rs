//! `weir image` beside `qemu-img`: random histories of an image in which each command is run by
//! either program, compared with the same history run by qemu-img alone. Both must yield the same
//! disk, and succeed or fail at the same commands; qemu-img must find no errors, and at most a
//! tenth more space in use on the host.
//!
//! A history depends only on its seed: `WEIR_SEED=N WEIR_SEQUENCES=1` repeats one. A plain run
//! tries a few, `make soak` 2,000.
//!
//! Excluded are known defects and gaps of qemu-img:
//! - In version 2, `rebase` of an image without a backing file exposes the content of the new one,
//!   and an image with a backing file cannot grow.
//! - It does not revert to a snapshot while a bitmap is enabled; weir marks the whole bitmap dirty.
//! - `check -r all` loses the snapshots of an image that also has bitmaps.
//! - `convert -l` gives the copy the current size of the disk.
//! - An image that grows with preallocated metadata exposes old content if clusters were freed
//!   before, or if it was shrunk inside a cluster; so histories shrink images by whole clusters.
//!
//! Sizes are not compared after `convert -c -B`: qemu-img copies and compresses the content of the
//! backing file, weir leaves it there, and a later `rebase` by qemu-img copies it uncompressed.

use std::{
    env,
    fmt::Write as _,
    fs,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use fastrand::Rng;

use crate::harness::{Scratch, TestClient, qemu_img, weir_image};

const STEPS: u32 = 14;
/// Space that a history may use on the host beyond a tenth more, and beyond one cluster, which one
/// program may write in full and its peer by sectors: a few blocks of metadata, and preallocation
/// by the file system.
const SPARE_BYTES: u64 = 512 << 10;
/// The backing files.
const BASES: [&str; 3] = ["base.raw", "base.qcow2", "other.qcow2"];

fn number(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn weir_and_qemu_img_yield_the_same_disk() {
    let (first, many) = (number("WEIR_SEED", 1), number("WEIR_SEQUENCES", 6));
    let next = AtomicU64::new(first);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + many {
                        return;
                    }
                    ImageHistory::new(seed).run();
                }
            });
        }
    });
}

/// One of the two directories in which the commands of a history run, with equal file names.
struct ImageDirectory {
    directory: PathBuf,
}

impl ImageDirectory {
    fn new(scratch: &Scratch, name: &str) -> Self {
        let directory = scratch.path(name);
        fs::create_dir(&directory).expect("the directory can be created");
        Self { directory }
    }

    fn execute(&self, weir: bool, arguments: &[&str]) -> (bool, String) {
        let client = if weir { weir_image(arguments) } else { qemu_img(arguments) };
        let outcome = client.inside(&self.directory).run();
        let code = outcome.code();
        (code == 0, format!("{}{}({code})", outcome.stdout(), outcome.stderr()))
    }

    fn io(&self, format: &str, file: &str, commands: &[String]) {
        TestClient::new("qemu-io").inside(&self.directory).args(["-f", format]).run_qemu_io(commands, file);
    }

    /// Space that the images of the directory use on the host.
    fn bytes(&self) -> u64 {
        let entries = fs::read_dir(&self.directory).expect("the directory can be read");
        entries
            .map(|entry| entry.and_then(|entry| entry.metadata()).expect("a file of ours").blocks() * 512)
            .sum()
    }
}

struct ImageHistory {
    seed: u64,
    random: Rng,
    _scratch: Scratch,
    mixed: ImageDirectory,
    qemu: ImageDirectory,
    log: String,
    /// The generator's model of the image, so that most commands are possible.
    version: u32,
    cluster: u64,
    size: u64,
    snapshots: Vec<String>,
    bitmaps: Vec<String>,
    /// The size has changed, so a snapshot may have a different size than the disk.
    resized: bool,
    backing: Option<&'static str>,
    /// Created or converted and not changed since: no cluster was freed.
    fresh: bool,
    /// weir's copy omits content of the backing file that qemu-img's copy has compressed.
    leaner: bool,
    /// qemu-img's `rebase` fills the last cluster from the backing file past the end of the disk,
    /// which becomes visible when the disk grows. weir writes zeroes there.
    spilled: bool,
    names: u32,
}

impl ImageHistory {
    fn new(seed: u64) -> Self {
        let scratch = Scratch::new();
        let (mixed, qemu) = (ImageDirectory::new(&scratch, "mixed"), ImageDirectory::new(&scratch, "qemu"));
        Self {
            seed,
            random: Rng::with_seed(seed),
            _scratch: scratch,
            mixed,
            qemu,
            log: String::new(),
            version: 3,
            cluster: 65_536,
            size: 0,
            snapshots: Vec::new(),
            bitmaps: Vec::new(),
            resized: false,
            backing: None,
            fresh: true,
            leaner: false,
            spilled: false,
            names: 0,
        }
    }

    fn run(mut self) {
        self.make_bases();
        self.create();
        for _ in 0..STEPS {
            let step = self.random.u32(..16);
            match step {
                0..5 => self.write(),
                5 | 6 => self.snapshot(),
                7 => self.resize(),
                8 | 9 => self.convert(),
                10 | 11 => self.rebase(),
                12 => self.commit(),
                13 => self.repair(),
                _ => self.bitmap(),
            }
            self.fresh = matches!(step, 8 | 9);
            self.check_images();
        }
    }

    fn one_in(&mut self, many: u32) -> bool {
        self.random.u32(..many) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.random.usize(..from.len())]
    }

    fn random_size(&mut self) -> u64 {
        (1 + self.random.u64(..6)) * (1 << 20) + self.random.u64(..3) * 512
    }

    fn name(&mut self, prefix: &str) -> String {
        self.names += 1;
        format!("{prefix}{}", self.names)
    }

    /// Runs the command in both directories, in the mixed one by either program; true if it
    /// succeeded.
    #[track_caller]
    fn run_on_both(&mut self, arguments: &[&str]) -> bool {
        let weir = self.random.bool();
        let (mixed, mixed_output) = self.mixed.execute(weir, arguments);
        let (qemu, qemu_output) = self.qemu.execute(false, arguments);
        let program = if weir { "weir image" } else { "qemu-img" };
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.log,
            "{program} {}: {}",
            arguments.join(" "),
            if mixed { "done" } else { "failed" }
        );
        assert!(
            mixed == qemu,
            "{}{program} printed:\n{mixed_output}\nqemu-img printed:\n{qemu_output}",
            self.transcript()
        );
        mixed
    }

    fn transcript(&self) -> String {
        format!("seed {} (WEIR_SEED={} WEIR_SEQUENCES=1), so far:\n{}", self.seed, self.seed, self.log)
    }

    /// Writes the same data to both, with qemu-io.
    fn io(&mut self, format: &str, file: &str, commands: &[String]) {
        let _ = writeln!(self.log, "qemu-io -f {format} {file}: {}", commands.join("; "));
        self.mixed.io(format, file, commands);
        self.qemu.io(format, file, commands);
    }

    fn make_bases(&mut self) {
        for base in BASES {
            let format = format_of(base);
            let size = self.random_size();
            assert!(
                self.run_on_both(&["create", "-f", format, base, &size.to_string()]),
                "{}",
                self.transcript()
            );
            let commands: Vec<String> = (0..3).map(|_| self.pattern(size)).collect();
            self.io(format, base, &commands);
        }
    }

    fn range(&mut self, size: u64) -> (u64, u64) {
        let longest = self.pick(&[512, 5_000, 70_000, 1 << 20]).min(size);
        let length = 1 + self.random.u64(..longest);
        let offset = self.random.u64(..size - length + 1);
        // Half of the ranges are whole clusters.
        if self.random.bool() && length > self.cluster {
            (offset / self.cluster * self.cluster, length / self.cluster * self.cluster)
        } else {
            (offset, length)
        }
    }

    fn pattern(&mut self, size: u64) -> String {
        let (offset, length) = self.range(size);
        format!("write -P {} {offset} {length}", 1 + self.random.u32(..250))
    }

    /// Options of a new image.
    fn options(&mut self) -> String {
        self.version = if self.one_in(4) { 2 } else { 3 };
        self.cluster = self.pick(&[512, 4096, 65_536, 65_536, 2 << 20]);
        let mut options = format!("cluster_size={}", self.cluster);
        if self.version == 2 {
            return options + ",compat=0.10";
        }
        if self.cluster >= 16_384 && self.one_in(3) {
            options += ",extended_l2=on";
        }
        if self.one_in(4) {
            options += ",lazy_refcounts=on";
        }
        if self.one_in(3) {
            options += &format!(",refcount_bits={}", self.pick(&[8, 64]));
        }
        if self.one_in(4) {
            options += ",compression_type=zstd";
        }
        options
    }

    fn create(&mut self) {
        let mut options = self.options();
        self.size = self.random_size();
        self.backing = self.random.bool().then(|| self.pick(&BASES));
        if self.backing.is_none() {
            options += self.pick(&["", "", ",preallocation=metadata", ",preallocation=falloc"]);
        }
        let size = self.size.to_string();
        let mut arguments = vec!["create", "-f", "qcow2", "-o", &options];
        if let Some(base) = self.backing {
            arguments.extend(["-b", base, "-F", format_of(base)]);
        }
        arguments.extend(["image", &size]);
        assert!(self.run_on_both(&arguments), "{}", self.transcript());
    }

    fn write(&mut self) {
        let mut commands = Vec::new();
        for _ in 0..1 + self.random.u32(..4) {
            let (offset, length) = self.range(self.size);
            commands.push(match self.random.u32(..6) {
                0 => format!("write -z {offset} {length}"),
                1 => format!("write -z -u {offset} {length}"),
                // Zero bytes in allocated clusters.
                2 => format!("write -P 0 {offset} {length}"),
                _ => self.pattern(self.size),
            });
        }
        self.io("qcow2", "image", &commands);
    }

    fn snapshot(&mut self) {
        let known =
            if self.snapshots.is_empty() { None } else { Some(self.random.usize(..self.snapshots.len())) };
        match (self.random.u32(..4), known) {
            (0, Some(at)) if self.bitmaps.is_empty() => {
                let name = self.snapshots[at].clone();
                self.run_on_both(&["snapshot", "-a", &name, "image"]);
            }
            (1, Some(at)) => {
                let name = self.snapshots.remove(at);
                self.run_on_both(&["snapshot", "-d", &name, "image"]);
            }
            (2, None) => drop(self.run_on_both(&["snapshot", "-d", "nothing", "image"])),
            _ => {
                let name = self.name("s");
                if self.run_on_both(&["snapshot", "-c", &name, "image"]) {
                    self.snapshots.push(name);
                }
            }
        }
        self.update_model();
    }

    /// Updates the model after a command that may have changed the size.
    fn update_model(&mut self) {
        let [mixed, qemu] = [&self.mixed, &self.qemu].map(|side| {
            let info = qemu_img(["info", "--output=json", "-f", "qcow2", "image"]);
            info.inside(&side.directory).json()["virtual-size"].as_u64().expect("a size")
        });
        assert_eq!(mixed, qemu, "{}", self.transcript());
        self.size = qemu;
    }

    fn resize(&mut self) {
        let size = self.random_size();
        if (self.spilled || self.version < 3 && self.backing.is_some()) && size > self.size {
            return;
        }
        self.resized = true;
        let is_shorter = size < self.size;
        let size = if is_shorter { size.next_multiple_of(self.cluster) } else { size }.to_string();
        if self.one_in(3) && self.fresh {
            self.run_on_both(&["resize", "-f", "qcow2", "--preallocation=metadata", "image", &size]);
        } else {
            self.run_on_both(&["resize", "-f", "qcow2", "--shrink", "image", &size]);
        }
        self.update_model();
    }

    fn convert(&mut self) {
        let from = (self.version, self.cluster);
        let mut options = self.options();
        let compressed = self.one_in(3);
        if compressed {
            // Dozens of compressed clusters share one cluster of the file: with a few snapshots,
            // more references than eight bits can count.
            options = options.replace("refcount_bits=8", "refcount_bits=32");
        }
        let parallel = format!("{}", 1 + self.random.u32(..8));
        let mut arguments = vec!["convert", "-f", "qcow2", "-O", "qcow2", "-o", &options, "-m", &parallel];
        if self.random.bool() {
            arguments.push("-W");
        }
        if compressed {
            arguments.push("-c");
        } else if self.one_in(3) {
            arguments.extend(["-S", self.pick(&["0", "512", "64k"])]);
        }
        let backing = self.backing.filter(|_| self.random.bool());
        if let Some(base) = backing {
            arguments.extend(["-B", base, "-F", format_of(base)]);
        }
        let snapshot = if self.snapshots.is_empty() || self.resized || backing.is_some() {
            None
        } else {
            let at = self.random.usize(..self.snapshots.len());
            self.one_in(3).then(|| self.snapshots[at].clone())
        };
        if let Some(name) = &snapshot {
            arguments.extend(["-l", name]);
        }
        arguments.extend(["image", "new"]);
        if !self.run_on_both(&arguments) {
            (self.version, self.cluster) = from;
            return;
        }
        for side in [&self.mixed, &self.qemu] {
            fs::rename(side.directory.join("new"), side.directory.join("image"))
                .expect("both files are in the test's directory");
        }
        self.backing = backing;
        self.leaner |= backing.is_some() && compressed;
        (self.resized, self.spilled) = (false, false);
        self.snapshots.clear();
        self.bitmaps.clear();
        self.update_model();
    }

    fn rebase(&mut self) {
        let may_have_base = self.version > 2 || self.backing.is_some();
        let base = (may_have_base && self.random.bool()).then(|| self.pick(&BASES));
        let mut arguments = vec!["rebase", "-f", "qcow2", "-b", base.unwrap_or("")];
        if let Some(base) = base {
            arguments.extend(["-F", format_of(base)]);
        }
        arguments.push("image");
        self.spilled |= self.backing.is_some() && !self.size.is_multiple_of(self.cluster);
        if self.run_on_both(&arguments) {
            self.backing = base;
        }
    }

    fn commit(&mut self) {
        let mut arguments = vec!["commit", "-f", "qcow2"];
        if self.random.bool() {
            arguments.push("-d");
        }
        arguments.push("image");
        self.run_on_both(&arguments);
    }

    fn repair(&mut self) {
        if !self.snapshots.is_empty() && !self.bitmaps.is_empty() {
            return;
        }
        let repair = self.pick(&["all", "leaks"]);
        self.run_on_both(&["check", "-r", repair, "-f", "qcow2", "image"]);
    }

    fn bitmap(&mut self) {
        let known =
            if self.bitmaps.is_empty() { None } else { Some(self.random.usize(..self.bitmaps.len())) };
        match (self.random.u32(..5), known) {
            (0, Some(at)) => {
                let name = self.bitmaps.remove(at);
                self.run_on_both(&["bitmap", "--remove", "-f", "qcow2", "image", &name]);
            }
            (action @ 1..4, Some(at)) => {
                let name = self.bitmaps[at].clone();
                let action = ["--clear", "--enable", "--disable"][action as usize - 1];
                self.run_on_both(&["bitmap", action, "-f", "qcow2", "image", &name]);
            }
            _ => {
                let name = self.name("b");
                if self.run_on_both(&["bitmap", "--add", "-f", "qcow2", "image", &name]) {
                    self.bitmaps.push(name);
                }
            }
        }
    }

    /// Asserts that both disks are equal, that `check` finds no errors, and that the mixed image is
    /// not much larger.
    fn check_images(&mut self) {
        let (mixed, qemu) = (self.mixed.directory.join("image"), self.qemu.directory.join("image"));
        let (mixed, qemu) = (mixed.to_str().expect("UTF-8"), qemu.to_str().expect("UTF-8"));
        let mut commands = vec![vec!["compare", "-f", "qcow2", "-F", "qcow2", mixed, qemu]];
        commands.push(vec!["check", "-f", "qcow2", mixed]);
        for weir in [false, true] {
            for arguments in &commands {
                let (succeeded, output) = self.mixed.execute(weir, arguments);
                let program = if weir { "weir image" } else { "qemu-img" };
                assert!(
                    succeeded,
                    "{}{program} {} printed:\n{output}",
                    self.transcript(),
                    arguments.join(" ")
                );
            }
        }
        let (ours, theirs) = (self.mixed.bytes(), self.qemu.bytes());
        assert!(
            self.leaner || ours <= theirs + theirs / 10 + self.cluster + SPARE_BYTES,
            "{}{ours} bytes on the host's disk, and {theirs} by qemu-img alone",
            self.transcript()
        );
    }
}

fn format_of(base: &str) -> &'static str {
    if base.ends_with(".raw") { "raw" } else { "qcow2" }
}
