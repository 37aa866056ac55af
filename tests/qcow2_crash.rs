//! `kill -9` of a daemon that serves qcow2, under load: no flushed data is lost, and QEMU finds no
//! corruption.
//!
//! Two clients write continuously, each to its own half of the disk, and record the permitted
//! contents of every block: the content at the last completed flush, and all writes sent since. The
//! daemon is killed after a number of flushes by the first client; the second client is then at a
//! random point.
//!
//! 20 times in a plain run, `WEIR_KILLS=200` in `make soak`.

use std::{env, fs, path::Path, sync::mpsc, thread};

use fastrand::Rng;

use crate::harness::{
    MIB, RawNbdClient, Scratch, Serve, qemu_img, text, weir_image,
    wire::{CMD_FLUSH, CMD_WRITE, CMD_WRITE_ZEROES, RawNbdRequest},
};

const DISK_BYTES: u64 = 16 * MIB;
const BLOCK: u64 = 4096;
const BLOCKS: usize = (DISK_BYTES / BLOCK) as usize;
/// Requests between two flushes.
const BATCH: usize = 24;
/// Options of the images, each of which survives several kills.
const IMAGES: [&str; 4] = [
    "cluster_size=64k",
    "cluster_size=512,refcount_bits=1",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=2M",
];
/// Kills per image.
const KILLS_PER_IMAGE: usize = 5;

/// Permitted contents of a block: the number of a write, 0 for zeroes.
#[derive(Clone, Debug)]
struct CrashBlock {
    /// Contents at the last flush; several if parts of the block differ.
    flushed: Vec<u32>,
    since: Vec<u32>,
}

struct CrashLedger {
    first: usize,
    blocks: Vec<CrashBlock>,
    random: Rng,
}

impl CrashLedger {
    fn new(half: usize, seed: u64) -> Self {
        let first = half * BLOCKS / 2;
        Self {
            first,
            blocks: vec![CrashBlock { flushed: vec![0], since: Vec::new() }; BLOCKS / 2],
            random: Rng::with_seed(seed),
        }
    }

    /// Sends a batch that writes each block at most once; false if the daemon is gone.
    fn send(&mut self, wire: &mut RawNbdClient, number: &mut u32) -> bool {
        let room = self.blocks.len() / BATCH;
        for slot in 0..BATCH {
            let length = 1 + self.random.u64(..room as u64 / 2) as usize;
            let at = slot * room + self.random.u64(..(room - length + 1) as u64) as usize;
            *number += 1;
            let zero = self.random.u64(..8) == 0;
            let content = if zero { 0 } else { *number };
            for block in &mut self.blocks[at..at + length] {
                block.since.push(content);
            }
            let kind = if zero { CMD_WRITE_ZEROES } else { CMD_WRITE };
            let bytes = length as u64 * BLOCK;
            let offset = (self.first + at) as u64 * BLOCK;
            let mut message =
                RawNbdRequest { flags: 0, kind, cookie: u64::from(*number), offset, length: bytes }.compact();
            if !zero {
                message.extend(content.to_le_bytes().repeat(bytes as usize / 4));
            }
            if !wire.try_send(&message) {
                return false;
            }
        }
        true
    }

    /// Writes until the daemon is gone; reports each flush on the channel.
    fn write(&mut self, wire: &mut RawNbdClient, number: &mut u32, flushed: &mpsc::Sender<()>) {
        loop {
            if !self.send(wire, number) {
                return;
            }
            if !(0..BATCH).all(|_| is_done(wire)) {
                return;
            }
            let flush = RawNbdRequest { flags: 0, kind: CMD_FLUSH, cookie: 0, offset: 0, length: 0 };
            if !wire.try_send(&flush.compact()) || !is_done(wire) {
                return;
            }
            for block in &mut self.blocks {
                if let Some(&last) = block.since.last() {
                    *block = CrashBlock { flushed: vec![last], since: Vec::new() };
                }
            }
            let _ = flushed.send(());
        }
    }

    /// Checks the content of the disk, and continues from it.
    fn check(&mut self, disk: &[u8], label: &str) {
        for (index, block) in self.blocks.iter_mut().enumerate() {
            let at = (self.first + index) * BLOCK as usize;
            let bytes = &disk[at..at + BLOCK as usize];
            let allowed = |content: u32| block.flushed.contains(&content) || block.since.contains(&content);
            // Clusters may be smaller than a block, so an unfinished write may be partly present.
            let mut present = Vec::new();
            for word in bytes.chunks(4) {
                let word = u32::from_le_bytes(word.try_into().unwrap());
                assert!(allowed(word), "{label}: block at {at} holds {word}; allowed are {block:?}");
                if !present.contains(&word) {
                    present.push(word);
                }
            }
            *block = CrashBlock { flushed: present, since: Vec::new() };
        }
    }
}

/// True if the next request is answered, false if the daemon is gone.
fn is_done(wire: &mut RawNbdClient) -> bool {
    let reply = wire.next_simple_reply();
    assert!(reply.is_none_or(|(error, _)| error == 0), "a request failed: {reply:?}");
    reply.is_some()
}

fn number(name: &str, default: usize) -> usize {
    env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: no number")))
}

fn check(path: &Path, label: &str) {
    let outcome = qemu_img(["check", "-f", "qcow2"]).arg(path).run();
    // Status 3 of qemu-img: leaked clusters only.
    assert!([0, 3].contains(&outcome.code()), "{label}: {}", outcome.stderr());
}

#[test]
fn kill_under_load_keeps_flushed_data_and_consistency() {
    let kills = number("WEIR_KILLS", 20);
    let scratch = Scratch::new();
    for (round, first) in (0..kills).step_by(KILLS_PER_IMAGE).enumerate() {
        let options = IMAGES[round % IMAGES.len()];
        let path = scratch.path("disk.qcow2");
        weir_image(&["create", "-q", "-f", "qcow2", "-o", options])
            .arg(&path)
            .arg(DISK_BYTES.to_string())
            .succeeds();
        let mut ledgers = [0, 1].map(|half| CrashLedger::new(half, (first * 2 + half + 1) as u64));
        let mut numbers = [1_u32, 1 << 30];
        for kill in first..kills.min(first + KILLS_PER_IMAGE) {
            let label = format!("kill {kill} of an image with {options}");
            kill_once(&scratch, &path, &mut ledgers, &mut numbers, kill);
            check(&path, &label);
            let raw = scratch.path("disk.raw");
            let convert = ["convert", "-f", "qcow2", "-O", "raw", text(&path), text(&raw)];
            qemu_img(convert).succeeds();
            let disk = fs::read(&raw).unwrap();
            for ledger in &mut ledgers {
                ledger.check(&disk, &label);
            }
        }
    }
}

fn kill_once(
    scratch: &Scratch,
    path: &Path,
    ledgers: &mut [CrashLedger; 2],
    numbers: &mut [u32; 2],
    kill: usize,
) {
    let weir = Serve::new(scratch).arg(path).args(["--format", "qcow2"]).start();
    let (flushed, flushes) = mpsc::channel();
    thread::scope(|scope| {
        for (index, (ledger, number)) in ledgers.iter_mut().zip(numbers).enumerate() {
            let (mut wire, size) = RawNbdClient::negotiated(weir.socket(), "disk");
            assert_eq!(size, DISK_BYTES);
            let flushed = if index == 0 { flushed.clone() } else { mpsc::channel().0 };
            scope.spawn(move || ledger.write(&mut wire, number, &flushed));
        }
        drop(flushed);
        for _ in 0..kill % 7 {
            flushes.recv().expect("the first client is still writing");
        }
        weir.crash();
    });
}
