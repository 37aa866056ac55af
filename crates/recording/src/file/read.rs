//! Reads a recording block by block.

use zstd::bulk::Decompressor;

use super::{
    LIMITS, LimitChange, MAGIC, MAX_BYTES, REQUESTS, RecordingEntry, SKIPPABLE, VERSION,
    block::{RecordingBlock, take_column},
    limits,
};
use crate::{disks::TraceDisks, error::TraceError, lines::LineReader};

const HEAD_BYTES: usize = SKIPPABLE.len() + 4;
// A digit and a line break.
const VERSION_BYTES: usize = 2;
const CLOCK_BYTES: usize = 8;

/// True if a file with these first bytes is a recording.
pub(crate) fn is_beginning(bytes: &[u8]) -> bool {
    bytes.starts_with(&SKIPPABLE) && bytes.get(HEAD_BYTES..).is_some_and(|rest| rest.starts_with(MAGIC))
}

/// Decoder of a recording.
#[derive(Default)]
pub struct RecordingReader {
    /// `None` before the first request.
    mark: Option<RecordingHeader>,
    decompressor: Decompressor<'static>,
    block: RecordingBlock,
    /// Number of requests of `block` that were returned.
    taken: usize,
    /// Number of requests that were returned.
    count: u64,
    /// Number of requests that were lost, in the part that was read.
    lost: u64,
    /// Names of all blocks so far; bounds the memory that names can take.
    disks: TraceDisks,
    limits: TraceDisks,
}

/// The beginning of a recording.
#[derive(Clone, Copy)]
struct RecordingHeader {
    version: u8,
    /// Nanoseconds since 1970 at time 0.
    clock_ns: u64,
}

/// Content of a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BlockContent {
    Requests(RecordingBlock),
    Limits(Vec<LimitChange>),
}

/// A request with the names that it refers to.
pub struct RecordedRequest<'a> {
    /// The request.
    pub entry: RecordingEntry,
    /// Arrival in nanoseconds since 1970.
    pub arrival_ns: u64,
    /// Name of its disk.
    pub disk: &'a str,
    /// Name of the limit that it waited for last.
    pub limit: Option<&'a str>,
    /// Number of the request in the recording, from 1.
    pub number: u64,
}

impl RecordingReader {
    /// Nanoseconds since 1970 at time 0.
    pub fn clock_ns(&mut self, lines: &mut LineReader) -> Result<u64, TraceError> {
        self.mark(lines).map(|mark| mark.clock_ns)
    }

    fn mark(&mut self, lines: &mut LineReader) -> Result<RecordingHeader, TraceError> {
        match self.mark {
            Some(mark) => Ok(mark),
            None => Ok(*self.mark.insert(mark(lines)?)),
        }
    }

    /// Next request. `limits` receives the changes of limits that precede it in the file, which
    /// are not necessarily earlier.
    pub fn next(
        &mut self,
        lines: &mut LineReader,
        limits: &mut dyn FnMut(LimitChange),
    ) -> Result<Option<RecordedRequest<'_>>, TraceError> {
        let RecordingHeader { version, clock_ns } = self.mark(lines)?;
        // A loop, because a block may hold limits only, or only a number of lost requests.
        while self.taken == self.block.entries.len() {
            let block = match self.read(lines, version)? {
                None => return Ok(None),
                Some(BlockContent::Limits(changes)) => {
                    changes.into_iter().for_each(&mut *limits);
                    continue;
                }
                Some(BlockContent::Requests(block)) => block,
            };
            self.lost = self.lost.saturating_add(block.lost);
            // Blocks are bounded, but a hostile file of many blocks could hold any number of
            // different names.
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
        Ok(Some(RecordedRequest {
            entry,
            arrival_ns: arrival_ns.ok_or_else(|| damaged(lines, "a time does not fit into 64 bits"))?,
            disk: &self.block.disks[entry.disk as usize],
            limit: entry.limit.map(|limit| &*self.block.limits[limit as usize]),
            number: self.count,
        }))
    }

    /// True if the last request was the last of its block, so that a live recording may pause
    /// here.
    pub fn is_between_blocks(&self) -> bool {
        self.taken == self.block.entries.len()
    }

    /// Number of requests that were lost, in the part that was read.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    fn read(&mut self, lines: &mut LineReader, version: u8) -> Result<Option<BlockContent>, TraceError> {
        if lines.is_at_end()? {
            return Ok(None);
        }
        let length = frame(lines, 4)?.ok_or_else(|| self.cut_off(lines))?;
        let length = u32::from_le_bytes(length.try_into().expect("the slice has this length")) as usize;
        if length > MAX_BYTES {
            return Err(damaged(lines, "a block exceeds the largest size"));
        }
        let Some(frame) = lines.bytes(length)? else { return Err(self.cut_off(lines)) };
        // The bound also limits the memory: the size in the frame's header is not trusted.
        let block = self.decompressor.decompress(&frame, MAX_BYTES).ok();
        let block = block.and_then(|bytes| BlockContent::decode(&bytes, version));
        block.map(Some).ok_or_else(|| damaged(lines, "a block cannot be decoded"))
    }

    fn cut_off(&self, lines: &LineReader) -> TraceError {
        TraceError::Torn { file: lines.name().to_owned(), requests: self.count }
    }
}

impl BlockContent {
    /// Decodes a block; `None` if the bytes are invalid.
    pub(super) fn decode(bytes: &[u8], version: u8) -> Option<Self> {
        // Version 1 has no kinds of blocks: each holds requests.
        if version < 2 {
            return RecordingBlock::decode(bytes).map(Self::Requests);
        }
        let mut rest = bytes;
        match take_column(&mut rest)? {
            REQUESTS => RecordingBlock::decode(rest).map(Self::Requests),
            LIMITS => limits::decode(rest).map(Self::Limits),
            _ => None,
        }
    }
}

fn mark(lines: &mut LineReader) -> Result<RecordingHeader, TraceError> {
    let head = frame(lines, MAGIC.len() + VERSION_BYTES + CLOCK_BYTES)?;
    let rest = head.as_deref().and_then(|head| head.strip_prefix(MAGIC));
    let mark = rest.and_then(|rest| {
        let (&version, rest) = rest.split_first().filter(|(version, _)| version.is_ascii_digit())?;
        let clock_ns = u64::from_le_bytes(rest.strip_prefix(b"\n")?.try_into().ok()?);
        Some(RecordingHeader { version: version - b'0', clock_ns })
    });
    match mark {
        Some(mark) if mark.version > VERSION => {
            let RecordingHeader { version, .. } = mark;
            let why = format!(
                "the recording has version {version}, but this weir reads only up to {VERSION} \
                 (use a newer weir)"
            );
            Err(TraceError::Whole { file: lines.name().to_owned(), why })
        }
        Some(mark) => Ok(mark),
        None => Err(damaged(lines, "the header of a recording is missing")),
    }
}

/// Content of a skippable frame of this length; `None` if the file ends inside it.
fn frame(lines: &mut LineReader, length: usize) -> Result<Option<Vec<u8>>, TraceError> {
    let Some(head) = lines.bytes(HEAD_BYTES)? else { return Ok(None) };
    let expected = u32::try_from(length).expect("they are short").to_le_bytes();
    // zstd's skippable frames carry the lengths: `zstd -d` passes over them, and decompresses the
    // rest.
    if head != [SKIPPABLE, expected].concat() {
        return Err(damaged(lines, "a block does not begin where the one before it ends"));
    }
    lines.bytes(length)
}

fn damaged(lines: &LineReader, why: &str) -> TraceError {
    let why = format!("{why} (the recording is damaged, or of another version)");
    TraceError::Whole { file: lines.name().to_owned(), why }
}
