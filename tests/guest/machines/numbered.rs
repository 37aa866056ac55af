//! Writes numbered blocks to a disk and verifies that each read returns the last acknowledged
//! write: a program for the guest of `tests/guest/virtual-machines`, compiled with `rustc` alone.
//!
//!     numbered write DISK MIB THREADS BLOCKS REPORTS STOP
//!     numbered check DISK MIB THREADS BLOCKS
//!
//! From offset MIB on, each thread owns BLOCKS blocks of 4 KiB, and has one request in flight,
//! which bypasses the guest's page cache. In a round it visits its blocks in pieces of 1 to 8 and
//! in random order: it reads a piece, which must hold the last acknowledged write, neither older
//! nor newer, and writes it with the round's number. Then it flushes and appends a line `THREAD
//! ROUND` to REPORTS: from then on all blocks of that thread must have that number or a later one.
//! A thread that finds an error reports `wrong` and the error, and all threads end.
//!
//! `write` ends after the round in which a file STOP exists, having read everything once more. It
//! prints `ok ROUNDS REQUESTS`, or the errors with status 1. It continues from the numbers on the
//! disk. `check` prints `THREAD LOWEST HIGHEST` for each thread.
//!
//! Never waits, never retries.

use std::{
    alloc::{self, Layout},
    env, fmt,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    ops::Range,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
    process::ExitCode,
    slice,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

const BLOCK: usize = 4096;
const PIECE: u64 = 8;
/// Value on x86-64 (asm/fcntl.h).
const O_DIRECT: i32 = 0o40000;

/// Parameters of all threads.
struct Job {
    disk: String,
    /// Offset in bytes.
    start: u64,
    threads: u64,
    blocks: u64,
    /// True once a thread has found an error.
    failed: AtomicBool,
}

/// An error message.
struct Wrong(String);

impl From<io::Error> for Wrong {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// Memory aligned for O_DIRECT.
struct Buffer(*mut u8, Layout);

impl Buffer {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, BLOCK).expect("a size of no more than a few pages");
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        assert!(!start.is_null(), "no memory");
        Self(start, layout)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `layout.size()` bytes were allocated and zeroed, and the slice borrows their
        // owner.
        unsafe { slice::from_raw_parts_mut(self.0, self.1.size()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `alloc_zeroed` with this layout.
        unsafe { alloc::dealloc(self.0, self.1) }
    }
}

/// xorshift64*: deterministic for a seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// Fills a block with its index, its round, and words derived from both. Unwritten blocks are
/// zeroes.
fn fill(block: &mut [u8], index: u64, round: u64) {
    let mut random = Random::new(index << 32 ^ round);
    for (number, word) in block.chunks_exact_mut(8).enumerate() {
        let value = match number {
            0 => index,
            1 => round,
            _ => random.next(),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The round of a block; `None` if the block is torn or misplaced.
fn round_of(block: &[u8], index: u64) -> Option<u64> {
    if block.iter().all(|byte| *byte == 0) {
        return Some(0);
    }
    let round = u64::from_le_bytes(block[8..16].try_into().ok()?);
    let mut expected = [0; BLOCK];
    fill(&mut expected, index, round);
    (block == expected).then_some(round)
}

impl Job {
    fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(&self.disk)
    }

    fn blocks_of(&self, thread: u64) -> Range<u64> {
        thread * self.blocks..(thread + 1) * self.blocks
    }

    fn place(&self, index: u64) -> u64 {
        self.start + index * BLOCK as u64
    }

    /// The rounds of all blocks of a thread.
    fn rounds(&self, disk: &File, thread: u64) -> Result<Vec<u64>, Wrong> {
        let mut buffer = Buffer::new(self.blocks as usize * BLOCK);
        let blocks = self.blocks_of(thread);
        disk.read_exact_at(buffer.bytes(), self.place(blocks.start))?;
        let both = blocks.zip(buffer.bytes().chunks_exact(BLOCK));
        both.map(|(index, block)| round_of(block, index).ok_or_else(|| damaged(index, block))).collect()
    }

    /// Runs rounds until the file `stop` exists; returns the numbers of rounds and requests.
    fn write(&self, thread: u64, reports: &File, stop: &Path) -> Result<(u64, u64), Wrong> {
        let disk = self.open()?;
        let mut known = self.rounds(&disk, thread)?;
        let first = self.blocks_of(thread).start;
        let mut random = Random::new(thread + 1);
        let mut round = known.iter().max().copied().unwrap_or(0);
        let (mut rounds, mut requests) = (0, 0);
        while !stop.exists() && !self.failed.load(Ordering::Relaxed) {
            round += 1;
            for piece in pieces(self.blocks, &mut random) {
                let mut buffer = Buffer::new((piece.end - piece.start) as usize * BLOCK);
                let place = self.place(first + piece.start);
                disk.read_exact_at(buffer.bytes(), place)?;
                for (number, block) in piece.clone().zip(buffer.bytes().chunks_exact_mut(BLOCK)) {
                    let (index, acknowledged) = (first + number, known[number as usize]);
                    let found = round_of(block, index).ok_or_else(|| damaged(index, block))?;
                    if found != acknowledged {
                        return Err(differs(index, found, acknowledged));
                    }
                    fill(block, index, round);
                    known[number as usize] = round;
                }
                disk.write_all_at(buffer.bytes(), place)?;
                requests += 2;
            }
            disk.sync_data()?;
            // A single write, so that lines of different threads do not mix.
            let mut reports = reports;
            reports.write_all(format!("{thread} {round}\n").as_bytes())?;
            rounds += 1;
        }
        for ((index, found), acknowledged) in
            self.blocks_of(thread).zip(self.rounds(&disk, thread)?).zip(known)
        {
            if found != acknowledged {
                return Err(differs(index, found, acknowledged));
            }
        }
        Ok((rounds, requests))
    }
}

/// All blocks in pieces, in random order.
fn pieces(blocks: u64, random: &mut Random) -> Vec<Range<u64>> {
    let mut all = Vec::new();
    let mut next = 0;
    while next < blocks {
        let end = blocks.min(next + 1 + random.next() % PIECE);
        all.push(next..end);
        next = end;
    }
    for last in (1..all.len()).rev() {
        all.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
    all
}

fn damaged(index: u64, block: &[u8]) -> Wrong {
    let (start, zero) = (&block[..16], block.iter().filter(|byte| **byte == 0).count());
    Wrong(format!("block {index} is damaged: begins with {start:02x?}, {zero} bytes are zero"))
}

fn differs(index: u64, found: u64, acknowledged: u64) -> Wrong {
    Wrong(format!("block {index} has round {found}; round {acknowledged} was acknowledged last"))
}

/// Runs `work` in all threads; returns the results, or the errors.
fn each<T: Send>(job: &Job, work: impl Fn(u64) -> Result<T, Wrong> + Sync) -> Result<Vec<T>, Wrong> {
    let all: Vec<Result<T, Wrong>> = thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..job.threads).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread panicked")).collect()
    });
    let wrong: Vec<String> = (0_u64..)
        .zip(&all)
        .filter_map(|(thread, result)| {
            result.as_ref().err().map(|Wrong(text)| format!("thread {thread}: {text}"))
        })
        .collect();
    if wrong.is_empty() { Ok(all.into_iter().flatten().collect()) } else { Err(Wrong(wrong.join("\n"))) }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn run(words: &[String]) -> Result<String, Wrong> {
    let number = |text: &String| text.parse::<u64>().map_err(|error| Wrong(format!("{text}: {error}")));
    let [what, disk, mib, threads, blocks, rest @ ..] = words else {
        return Err(Wrong("wrong number of arguments".to_owned()));
    };
    let job = Job {
        disk: disk.clone(),
        start: number(mib)? << 20,
        threads: number(threads)?,
        blocks: number(blocks)?,
        failed: AtomicBool::new(false),
    };
    match (what.as_str(), rest) {
        ("write", [reports, stop]) => {
            let reports = OpenOptions::new().append(true).open(reports)?;
            let done = each(&job, |thread| {
                job.write(thread, &reports, Path::new(stop)).inspect_err(|wrong| {
                    job.failed.store(true, Ordering::Relaxed);
                    // If this fails too, the error is printed at the end.
                    let _ = (&reports).write_all(format!("wrong {wrong}\n").as_bytes());
                })
            })?;
            let (rounds, requests) = done.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            Ok(format!("ok {rounds} {requests}"))
        }
        ("check", []) => {
            let found = each(&job, |thread| job.rounds(&job.open()?, thread))?;
            let line = |(thread, rounds): (usize, &Vec<u64>)| {
                let lowest = rounds.iter().min().copied().unwrap_or(0);
                let highest = rounds.iter().max().copied().unwrap_or(0);
                format!("{thread} {lowest} {highest}")
            };
            Ok(found.iter().enumerate().map(line).collect::<Vec<_>>().join("\n"))
        }
        _ => Err(Wrong("neither write nor check, or too few arguments".to_owned())),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    match run(&words) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(wrong) => {
            println!("{wrong}");
            ExitCode::FAILURE
        }
    }
}
