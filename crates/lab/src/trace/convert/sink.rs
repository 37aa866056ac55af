//! Destination of converted requests, with counts of information that was lost.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
};

use console::figures;
use flate2::write::GzEncoder;
use recording::{DiskId, LimitChange, RecordingEntry, RecordingWriter, TraceFormat};

use super::text_formats::{
    DiskIdentifier, DiskNaming, NotWritten, TextFormat, TraceRequest, TraceStart, disk_naming,
};
use crate::trace::TraceOutput;

const BUFFER_BYTES: usize = 256 << 10;
const ZSTD_LEVEL: i32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TraceCompression {
    None,
    Gzip,
    Zstd,
}

impl TraceCompression {
    /// Compression by a file name's extension, and the name without it.
    pub(super) fn of(name: &str) -> (Self, &str) {
        let endings = [(Self::Gzip, ".gz"), (Self::Zstd, ".zst")];
        let found = endings.iter().find_map(|(one, ending)| Some((*one, name.strip_suffix(ending)?)));
        found.unwrap_or((Self::None, name))
    }
}

pub(super) struct ConvertSink {
    to: SinkOutput,
    written: u64,
    not_written: BTreeMap<NotWritten, u64>,
    /// Requests written without their results.
    without_outcome: u64,
    /// Requests that the recorder dropped.
    lost: u64,
    /// Changes of limits that were dropped while reading, because their number is bounded.
    dropped_limit_changes: u64,
    format: TraceFormat,
}

enum SinkOutput {
    Lines { file: CompressedOutput, text_format: TextFormat, text: Vec<u8> },
    Recording { writer: RecordingWriter<TraceOutput>, limits: HashMap<String, u32> },
}

enum CompressedOutput {
    Plain(TraceOutput),
    Gzip(GzEncoder<TraceOutput>),
    Zstd(zstd::Encoder<'static, TraceOutput>),
}

impl CompressedOutput {
    fn all(&mut self, text: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.write_all(text),
            Self::Gzip(out) => out.write_all(text),
            Self::Zstd(out) => out.write_all(text),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.flush(),
            Self::Gzip(out) => out.flush(),
            Self::Zstd(out) => out.flush(),
        }
    }

    fn finish(self) -> io::Result<TraceOutput> {
        match self {
            Self::Plain(out) => Ok(out),
            Self::Gzip(out) => out.finish(),
            Self::Zstd(out) => out.finish(),
        }
    }
}

impl ConvertSink {
    pub(super) fn new(
        format: TraceFormat,
        compression: TraceCompression,
        out: TraceOutput,
        start: TraceStart,
    ) -> io::Result<Self> {
        let to = if format == TraceFormat::Recording {
            SinkOutput::Recording {
                writer: RecordingWriter::new(out, start.clock_ns)?,
                limits: HashMap::new(),
            }
        } else {
            // A line may exceed the size at which the buffer is written out.
            let mut text = Vec::with_capacity(BUFFER_BYTES + 1024);
            let text_format = TextFormat::begin(format, start, &mut text);
            let file = match compression {
                TraceCompression::None => CompressedOutput::Plain(out),
                TraceCompression::Gzip => {
                    CompressedOutput::Gzip(GzEncoder::new(out, flate2::Compression::default()))
                }
                TraceCompression::Zstd => CompressedOutput::Zstd(zstd::Encoder::new(out, ZSTD_LEVEL)?),
            };
            SinkOutput::Lines { file, text_format, text }
        };
        let not_written = BTreeMap::new();
        Ok(Self {
            to,
            written: 0,
            not_written,
            without_outcome: 0,
            lost: 0,
            dropped_limit_changes: 0,
            format,
        })
    }

    pub(super) fn write_request(&mut self, request: TraceRequest<'_>) -> io::Result<()> {
        let Self { to, written, not_written, without_outcome, format, .. } = self;
        match to {
            SinkOutput::Recording { writer, limits } => {
                let TraceRequest { time_ns, disk: DiskId(disk), name, op, offset, length, outcome } = request;
                let limit = outcome.and_then(|outcome| outcome.limit);
                let entry = RecordingEntry {
                    arrival_ns: time_ns,
                    times: outcome.map(|outcome| outcome.times),
                    offset,
                    length,
                    op,
                    has_failed: outcome.is_some_and(|outcome| outcome.has_failed),
                    disk,
                    limit: limit.map(|name| number_of(limits, name)),
                };
                writer.push(entry, || name, || limit.unwrap_or_default())?;
                *written += 1;
                Ok(())
            }
            SinkOutput::Lines { file, text_format, text } => {
                match text_format.push(text, request) {
                    Ok(()) => {
                        *written += 1;
                        // Of the text formats, only weir's own has columns for results.
                        let is_lost = request.outcome.is_some() && *format != TraceFormat::Weir;
                        *without_outcome += u64::from(is_lost);
                    }
                    Err(why) => *not_written.entry(why).or_default() += 1,
                }
                flush(file, text, BUFFER_BYTES)
            }
        }
    }

    /// Adds a change of limits; recordings only.
    pub(super) fn change_limits(&mut self, change: LimitChange) -> io::Result<()> {
        match &mut self.to {
            SinkOutput::Recording { writer, .. } => writer.change_limits(change),
            SinkOutput::Lines { .. } => Ok(()),
        }
    }

    /// Counts changes of limits that were dropped while reading.
    pub(super) fn drop_limit_changes(&mut self, changes: u64) {
        self.dropped_limit_changes += changes;
    }

    /// Counts requests that were lost while recording; a recording stores the number.
    pub(super) fn add_lost(&mut self, requests: u64) {
        self.lost += requests;
        if let SinkOutput::Recording { writer, .. } = &mut self.to {
            writer.add_lost(requests);
        }
    }

    /// Writes out all lines so far, so that they survive a crash of this process. A recording is
    /// written by its blocks instead.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            SinkOutput::Recording { .. } => Ok(()),
            SinkOutput::Lines { file, text, .. } => {
                flush(file, text, 0)?;
                file.flush()
            }
        }
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Information that the format cannot represent, one line each.
    pub(super) fn left_out(&self) -> Vec<String> {
        let format = self.format.name();
        let line = |(why, count): (&NotWritten, &u64)| match why {
            NotWritten::Op(op) => {
                let requests = figures::counted(*count, &format!("{} request", op.name()));
                format!("left out: {requests}, which {format} cannot represent")
            }
            NotWritten::Unaligned => {
                format!(
                    "left out: {} not of whole sectors of 512 bytes, as {format} counts them",
                    figures::counted(*count, "request")
                )
            }
        };
        let outcomes = (self.without_outcome > 0).then(|| {
            format!(
                "left out: waiting and service times of {} (only weir's CSV and recordings store \
                 them)",
                figures::counted(self.without_outcome, "request")
            )
        });
        // Only recordings have limits.
        let has_limits = matches!(self.to, SinkOutput::Recording { .. });
        let limits = (has_limits && self.dropped_limit_changes > 0).then(|| {
            format!(
                "left out: {} of limits, because the traces have more than weir can store",
                figures::counted(self.dropped_limit_changes, "change")
            )
        });
        self.not_written
            .iter()
            .map(line)
            .chain(outcomes)
            .chain(limits)
            .chain(self.lost_names())
            .chain(self.waits())
            .collect()
    }

    /// Note on fio's interpretation of times.
    fn waits(&self) -> Option<String> {
        let SinkOutput::Lines { text_format, .. } = &self.to else { return None };
        let text = "fio replays waits of fio-v2 differently from its documentation (write fio-v3 instead)";
        text_format.has_waits().then(|| text.to_owned())
    }

    /// Note on changed names of disks.
    fn lost_names(&self) -> Option<String> {
        let SinkOutput::Lines { text_format, .. } = &self.to else { return None };
        let format = self.format.name();
        let is_unnamed = disk_naming(self.format) == DiskNaming::Unnamed;
        let other = text_format.identifiers.iter().filter(|disk| is_unnamed || disk.identifier != disk.name);
        let mut names: Vec<_> = other
            // One name more than is listed shows that an ellipsis is needed.
            .take(MAX_NAMED + 1)
            .map(
                |DiskIdentifier { name, identifier }| {
                    if is_unnamed { name.clone() } else { format!("{identifier} is {name}") }
                },
            )
            .collect();
        if names.len() > MAX_NAMED {
            names[MAX_NAMED] = "…".to_owned();
        }
        let (count, names) = (names.len(), names.join(", "));
        match disk_naming(self.format) {
            DiskNaming::Unnamed if count > 1 => {
                Some(format!("{format} has whole seconds and one disk: {names} are merged"))
            }
            DiskNaming::ByNumber if count > 0 => {
                Some(format!("{format} identifies disks by number: {names}"))
            }
            DiskNaming::ByUniqueName if count > 0 => Some(format!("{format} renames disks: {names}")),
            _ => None,
        }
    }

    /// Writes the rest and renames the file to its final name.
    pub(super) fn finish(self) -> io::Result<()> {
        match self.to {
            SinkOutput::Recording { writer, .. } => writer.finish()?.finish(),
            SinkOutput::Lines { mut file, mut text, .. } => {
                flush(&mut file, &mut text, 0)?;
                file.finish()?.finish()
            }
        }
    }
}

fn number_of(limits: &mut HashMap<String, u32>, name: &str) -> u32 {
    if let Some(&number) = limits.get(name) {
        return number;
    }
    let number = u32::try_from(limits.len()).expect("their reader bounds them");
    limits.insert(name.to_owned(), number);
    number
}

/// Number of disks whose changed names are listed.
const MAX_NAMED: usize = 16;

fn flush(file: &mut CompressedOutput, text: &mut Vec<u8>, from_bytes: usize) -> io::Result<()> {
    if text.len() >= from_bytes {
        file.all(text)?;
        text.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_limit_changes_are_reported() {
        let left_out = |format| {
            let out = TraceOutput::InPlace(tempfile::tempfile().unwrap());
            let start = TraceStart { clock_ns: 0, with_outcomes: true };
            let mut sink = ConvertSink::new(format, TraceCompression::None, out, start).unwrap();
            sink.drop_limit_changes(0);
            assert_eq!(sink.left_out(), [""; 0]);
            sink.drop_limit_changes(5);
            sink.left_out()
        };
        let expected = ["left out: 5 changes of limits, because the traces have more than weir can store"];
        assert_eq!(left_out(TraceFormat::Recording), expected);
        assert_eq!(left_out(TraceFormat::Weir), [""; 0]);
    }
}
