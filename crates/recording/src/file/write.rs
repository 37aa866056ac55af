//! Writes a recording: requests are collected until they fill a block.

use std::io::{self, Write};

use zstd::stream::raw::CParameter;

use super::{
    LIMITS, LimitChange, MAGIC, MAX_BYTES, MAX_ENTRIES, REQUESTS, RecordingEntry, SKIPPABLE, VERSION,
    block::{RecordingBlock, push_column},
    limits::{self, MAX_CHANGES},
};

// zstd's default. On requests at random offsets, level 1 is a tenth faster and its output a tenth
// larger; level 9 is three times slower without a gain.
const LEVEL: i32 = 3;

// Bytes of the two numbers before the changes of a block.
const MAX_NUMBER_BYTES: usize = 20;

/// Writer of a recording. Requests may be added in any order; each block is sorted by arrival.
pub struct RecordingWriter<W> {
    out: W,
    compressor: zstd::bulk::Compressor<'static>,
    block: RecordingBlock,
    /// Changes since the last block.
    changes: Vec<LimitChange>,
    /// Upper bound of their encoded size.
    change_bytes: usize,
    /// Indices of the caller's names in the present block.
    disks: NameIndex,
    limits: NameIndex,
    bytes: Vec<u8>,
}

/// Maps the caller's numbers of names to indices in the block.
#[derive(Default)]
struct NameIndex {
    indices: Vec<Option<u32>>,
}

impl NameIndex {
    /// Index in the block of the caller's name `number`, which is added if it is new.
    fn place<'a>(&mut self, number: u32, name: impl FnOnce() -> &'a str, names: &mut Vec<String>) -> u32 {
        let index = number as usize;
        if self.indices.len() <= index {
            self.indices.resize(index + 1, None);
        }
        *self.indices[index].get_or_insert_with(|| {
            names.push(name().to_owned());
            u32::try_from(names.len() - 1).expect("no more than requests")
        })
    }
}

impl<W: Write> RecordingWriter<W> {
    /// Creates a writer; `clock_ns` is the time 0 in nanoseconds since 1970.
    ///
    /// # Errors
    /// Errors of the output.
    pub fn new(mut out: W, clock_ns: u64) -> io::Result<Self> {
        let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
        // A damaged block must be detected: most damaged numbers would still decode.
        compressor.set_parameter(CParameter::ChecksumFlag(true))?;
        let version = format!("{VERSION}\n");
        out.write_all(&skippable(&[MAGIC, version.as_bytes(), &clock_ns.to_le_bytes()].concat()))?;
        let (disks, limits) = (NameIndex::default(), NameIndex::default());
        let (block, changes) = (RecordingBlock::default(), Vec::new());
        Ok(Self { out, compressor, block, changes, change_bytes: 0, disks, limits, bytes: Vec::new() })
    }

    /// Adds a request. `entry.disk` and `entry.limit` are numbers of the caller; `disk` and
    /// `limit` return their names.
    ///
    /// # Errors
    /// Errors of the output, to which a full block is written.
    pub fn push<'a>(
        &mut self,
        mut entry: RecordingEntry,
        disk: impl FnOnce() -> &'a str,
        limit: impl FnOnce() -> &'a str,
    ) -> io::Result<()> {
        entry.disk = self.disks.place(entry.disk, disk, &mut self.block.disks);
        if let Some(number) = entry.limit {
            entry.limit = Some(self.limits.place(number, limit, &mut self.block.limits));
        }
        self.block.entries.push(entry);
        if self.block.entries.len() == MAX_ENTRIES { self.end_block() } else { Ok(()) }
    }

    /// Adds a change of limits. The changes of an owner must be in order of time.
    ///
    /// # Errors
    /// Errors of the output, to which a full block is written.
    pub fn change_limits(&mut self, change: LimitChange) -> io::Result<()> {
        let bytes = limits::max_encoded_bytes(&change);
        // Both bounds are those of the reader.
        if self.changes.len() == MAX_CHANGES || self.change_bytes + bytes > MAX_BYTES - MAX_NUMBER_BYTES {
            self.end_change_block()?;
        }
        self.changes.push(change);
        self.change_bytes += bytes;
        Ok(())
    }

    /// True if nothing waits for the next block.
    pub fn is_block_empty(&self) -> bool {
        self.block.entries.is_empty() && self.block.lost == 0 && self.changes.is_empty()
    }

    /// Adds to the number of dropped requests, which the next block contains.
    pub fn add_lost(&mut self, requests: u64) {
        self.block.lost = self.block.lost.saturating_add(requests);
    }

    /// The underlying writer.
    pub fn output(&self) -> &W {
        &self.out
    }

    /// The underlying writer, mutable.
    pub fn output_mut(&mut self) -> &mut W {
        &mut self.out
    }

    /// Writes everything so far as a block.
    ///
    /// # Errors
    /// Errors of the output.
    pub fn end_block(&mut self) -> io::Result<()> {
        self.end_change_block()?;
        if self.block.entries.is_empty() && self.block.lost == 0 {
            return Ok(());
        }
        // Requests are added when they complete. Sorted arrivals make small differences.
        self.block.entries.sort_by_key(|entry| entry.arrival_ns);
        self.bytes.clear();
        push_column(&mut self.bytes, REQUESTS);
        self.block.encode(&mut self.bytes);
        self.write_block()?;
        // Names are per block, so that a reader can start at any block.
        self.block.lost = 0;
        self.block.entries.clear();
        self.block.disks.clear();
        self.block.limits.clear();
        self.disks.indices.fill(None);
        self.limits.indices.fill(None);
        Ok(())
    }

    /// Writes the changes of limits as a block.
    fn end_change_block(&mut self) -> io::Result<()> {
        if self.changes.is_empty() {
            return Ok(());
        }
        self.bytes.clear();
        push_column(&mut self.bytes, LIMITS);
        limits::encode(&self.changes, &mut self.bytes);
        self.write_block()?;
        self.changes.clear();
        self.change_bytes = 0;
        Ok(())
    }

    /// Compresses `bytes` and writes them as a block.
    fn write_block(&mut self) -> io::Result<()> {
        let frame = self.compressor.compress(&self.bytes)?;
        let length = u32::try_from(frame.len()).expect("a block is bounded");
        // One write: a concurrent reader mostly sees either the whole block or none of it.
        self.out.write_all(&[skippable(&length.to_le_bytes()), frame].concat())
    }

    /// Writes the last block and flushes.
    ///
    /// # Errors
    /// Errors of the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.end_block()?;
        self.out.flush()?;
        Ok(self.out)
    }
}

fn skippable(content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).expect("it is short");
    [&SKIPPABLE, &length.to_le_bytes()[..], content].concat()
}
