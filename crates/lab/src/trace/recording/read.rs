//! Reading a recording, block by block.

use zstd::bulk::Decompressor;

use super::{Entry, MAGIC, MOST_BYTES, SKIPPABLE, block::Block};
use crate::trace::{disks::Disks, error::TraceError, lines::Lines};

const HEAD_BYTES: usize = SKIPPABLE.len() + 4;
const CLOCK_BYTES: usize = 8;

/// Whether a file that begins so is a recording.
pub(in crate::trace) fn is_beginning(bytes: &[u8]) -> bool {
    bytes.starts_with(&SKIPPABLE) && bytes.get(HEAD_BYTES..).is_some_and(|rest| rest.starts_with(MAGIC))
}

/// What comes out of a recording.
#[derive(Default)]
pub(in crate::trace) struct Blocks {
    /// Nanoseconds since 1970 at time 0; none before the first request.
    clock_ns: Option<u64>,
    decompressor: Decompressor<'static>,
    block: Block,
    /// Of `block`.
    taken: usize,
    /// Requests that were handed out.
    count: u64,
    /// Requests that could not be recorded, as far as was read.
    lost: u64,
    /// Of all blocks so far, which bounds what they take of whoever reads.
    disks: Disks,
    limits: Disks,
}

/// A request and the names that belong to it.
pub(in crate::trace) struct Told<'a> {
    pub(in crate::trace) entry: Entry,
    /// Nanoseconds since 1970.
    pub(in crate::trace) arrival_ns: u64,
    pub(in crate::trace) disk: &'a str,
    pub(in crate::trace) limit: Option<&'a str>,
    /// Which of the recording's requests it is, from 1.
    pub(in crate::trace) number: u64,
}

impl Blocks {
    /// Nanoseconds since 1970 at time 0.
    pub(in crate::trace) fn clock_ns(&mut self, lines: &mut Lines) -> Result<u64, TraceError> {
        match self.clock_ns {
            Some(clock_ns) => Ok(clock_ns),
            None => Ok(*self.clock_ns.insert(clock(lines)?)),
        }
    }

    pub(in crate::trace) fn next(&mut self, lines: &mut Lines) -> Result<Option<Told<'_>>, TraceError> {
        let clock_ns = self.clock_ns(lines)?;
        while self.taken == self.block.entries.len() {
            let Some(block) = self.read(lines)? else { return Ok(None) };
            self.lost = self.lost.saturating_add(block.lost);
            for (names, known) in [(&block.disks, &mut self.disks), (&block.limits, &mut self.limits)] {
                for name in names {
                    known.id(name.as_bytes()).map_err(|why| damaged(lines, &why))?;
                }
            }
            (self.block, self.taken) = (block, 0);
        }
        let entry = self.block.entries[self.taken];
        self.taken += 1;
        self.count += 1;
        let arrival_ns = clock_ns.checked_add(entry.arrival_ns);
        Ok(Some(Told {
            entry,
            arrival_ns: arrival_ns.ok_or_else(|| damaged(lines, "a time does not fit into 64 bits"))?,
            disk: &self.block.disks[entry.disk as usize],
            limit: entry.limit.map(|limit| &*self.block.limits[limit as usize]),
            number: self.count,
        }))
    }

    /// Whether the last request was the last of its block: the next may be long in coming.
    pub(in crate::trace) fn is_between(&self) -> bool {
        self.taken == self.block.entries.len()
    }

    /// Requests that could not be recorded, as far as was read.
    pub(in crate::trace) fn lost(&self) -> u64 {
        self.lost
    }

    fn read(&mut self, lines: &mut Lines) -> Result<Option<Block>, TraceError> {
        if lines.is_at_end()? {
            return Ok(None);
        }
        let length = frame(lines, 4)?.ok_or_else(|| self.cut_off(lines))?;
        let length = u32::from_le_bytes(length.try_into().expect("so many were asked for")) as usize;
        if length > MOST_BYTES {
            return Err(damaged(lines, "a block is larger than any that is written"));
        }
        let Some(frame) = lines.bytes(length)? else { return Err(self.cut_off(lines)) };
        let block = self.decompressor.decompress(&frame, MOST_BYTES).ok();
        let block = block.and_then(|bytes| Block::decode(&bytes));
        block.map(Some).ok_or_else(|| damaged(lines, "a block is not what was written"))
    }

    fn cut_off(&self, lines: &Lines) -> TraceError {
        TraceError::Torn { file: lines.name().to_owned(), requests: self.count }
    }
}

fn clock(lines: &mut Lines) -> Result<u64, TraceError> {
    let mark = frame(lines, MAGIC.len() + CLOCK_BYTES)?;
    let clock = mark.as_deref().and_then(|mark| mark.strip_prefix(MAGIC));
    let clock = clock.and_then(|clock| clock.try_into().ok());
    Ok(u64::from_le_bytes(clock.ok_or_else(|| damaged(lines, "it does not begin as a recording does"))?))
}

/// What a skippable frame of this length holds; `None` where the file ends in it.
fn frame(lines: &mut Lines, length: usize) -> Result<Option<Vec<u8>>, TraceError> {
    let Some(head) = lines.bytes(HEAD_BYTES)? else { return Ok(None) };
    let expected = u32::try_from(length).expect("they are short").to_le_bytes();
    if head != [SKIPPABLE, expected].concat() {
        return Err(damaged(lines, "a block does not begin where the one before it ends"));
    }
    lines.bytes(length)
}

fn damaged(lines: &Lines, why: &str) -> TraceError {
    let why = format!("{why} (it is damaged, or another version has made it)");
    TraceError::Together { file: lines.name().to_owned(), why }
}
