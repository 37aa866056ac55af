//! Where requests go, and what became of them.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use console::figures;
use flate2::write::GzEncoder;

use super::forms::{Called, Form, NotWritten, Request, called};
use crate::trace::{
    Format, HEADER, MORE_COLUMNS, Output, push_decimal, push_request, quoted,
    record::DiskId,
    recording::{Entry, Told, Writer},
};

const BUFFER_BYTES: usize = 256 << 10;
const ZSTD_LEVEL: i32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// As a file's name ends, and the name without that.
    pub(super) fn of(name: &str) -> (Self, &str) {
        let endings = [(Self::Gzip, ".gz"), (Self::Zstd, ".zst")];
        let found = endings.iter().find_map(|(one, ending)| Some((*one, name.strip_suffix(ending)?)));
        found.unwrap_or((Self::None, name))
    }
}

pub(super) struct Sink {
    to: To,
    written: u64,
    not_written: BTreeMap<NotWritten, u64>,
    format: Format,
    /// The names of disks that were written without them, in the order of their numbers.
    nameless: Vec<String>,
}

enum To {
    Lines { file: File, form: Form, text: Vec<u8> },
    Recording(Writer<Output>),
}

enum File {
    Plain(Output),
    Gzip(GzEncoder<Output>),
    Zstd(zstd::Encoder<'static, Output>),
}

impl File {
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

    fn finish(self) -> io::Result<Output> {
        match self {
            Self::Plain(out) => Ok(out),
            Self::Gzip(out) => out.finish(),
            Self::Zstd(out) => out.finish(),
        }
    }
}

impl Sink {
    pub(super) fn new(format: Format, compression: Compression, out: Output) -> io::Result<Self> {
        let to = if format == Format::Recording {
            // Other formats' times count from the trace's beginning.
            To::Recording(Writer::new(out, 0)?)
        } else {
            let mut text = Vec::with_capacity(BUFFER_BYTES + 1024);
            let form = Form::begin(format, &mut text);
            let file = match compression {
                Compression::None => File::Plain(out),
                Compression::Gzip => File::Gzip(GzEncoder::new(out, flate2::Compression::default())),
                Compression::Zstd => File::Zstd(zstd::Encoder::new(out, ZSTD_LEVEL)?),
            };
            To::Lines { file, form, text }
        };
        Ok(Self { to, written: 0, not_written: BTreeMap::new(), format, nameless: Vec::new() })
    }

    pub(super) fn put(&mut self, request: Request<'_>) -> io::Result<()> {
        let Self { to, written, not_written, nameless, .. } = self;
        match to {
            To::Recording(writer) => {
                let Request { time_ns, disk: DiskId(disk), name, op, offset, length } = request;
                let (wait_ns, service_ns, has_failed, limit) = (0, 0, false, None);
                let arrival_ns = time_ns;
                let entry =
                    Entry { arrival_ns, wait_ns, service_ns, offset, length, op, has_failed, disk, limit };
                writer.push(entry, || name, || "")?;
                *written += 1;
                Ok(())
            }
            To::Lines { file, form, text } => {
                match form.push(text, request) {
                    Ok(()) => *written += 1,
                    Err(why) => *not_written.entry(why).or_default() += 1,
                }
                // The number first: it is asked of each request, and the other makes a text.
                if request.disk.index() == nameless.len() && form.has_no_names() {
                    nameless.push(request.name.to_owned());
                }
                flush(file, text, BUFFER_BYTES)
            }
        }
    }

    /// Makes the header of weir's CSV name what a recording tells beyond it.
    pub(super) fn begin_with_times(&mut self) {
        if let To::Lines { text, .. } = &mut self.to {
            *text = [HEADER, MORE_COLUMNS, "\n"].concat().into_bytes();
        }
    }

    pub(super) fn put_with_times(&mut self, told: &Told<'_>) -> io::Result<()> {
        let To::Lines { file, text, .. } = &mut self.to else { unreachable!("it was begun with times") };
        let Told { entry, disk, limit, .. } = told;
        push_request(text, entry.arrival_ns, &quoted(disk), entry.op, entry.offset, entry.length);
        let admitted_ns = entry.arrival_ns.saturating_add(entry.wait_ns);
        for time_ns in [admitted_ns, admitted_ns.saturating_add(entry.service_ns)] {
            text.push(b',');
            push_decimal(text, time_ns);
        }
        text.push(b',');
        text.extend_from_slice(quoted(limit.unwrap_or_default()).as_bytes());
        text.push(b'\n');
        self.written += 1;
        flush(file, text, BUFFER_BYTES)
    }

    /// Has all that was put so far written, so that it is there whatever happens to this process.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            To::Recording(_) => Ok(()),
            To::Lines { file, text, .. } => {
                flush(file, text, 0)?;
                file.flush()
            }
        }
    }

    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// What is lost in this format, a line each.
    pub(super) fn left_out(&self) -> Vec<String> {
        let format = self.format.name();
        let line = |(why, count): (&NotWritten, &u64)| match why {
            NotWritten::Op(op) => {
                format!("left out: {count} of {}, for which {format} has no word", op.name())
            }
            NotWritten::Unaligned => {
                format!(
                    "left out: {} not of whole sectors of 512 bytes, as {format} counts them",
                    figures::counted(*count, "request")
                )
            }
        };
        self.not_written.iter().map(line).chain(self.lost_names()).collect()
    }

    /// What became of the disks' names, if they are lost.
    fn lost_names(&self) -> Option<String> {
        let format = self.format.name();
        let more = if self.nameless.len() > MOST_NAMED { ", …" } else { "" };
        if called(self.format, 0) == Called::Nothing {
            let names =
                self.nameless.iter().take(MOST_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
            let told = format!("{format} has whole seconds and one disk: {names}{more} are one now");
            return (self.nameless.len() > 1).then_some(told);
        }
        let numbered = self.nameless.iter().enumerate().take(MOST_NAMED);
        let told: Vec<_> = numbered
            .filter_map(|(number, name)| match called(self.format, number) {
                Called::By(other) if other != *name => Some(format!("{other} is {name}")),
                _ => None,
            })
            .collect();
        (!told.is_empty()).then(|| format!("{format} calls disks by numbers: {}{more}", told.join(", ")))
    }

    /// Writes the rest and gives the file its name.
    pub(super) fn finish(self) -> io::Result<()> {
        match self.to {
            To::Recording(writer) => writer.finish()?.finish(),
            To::Lines { mut file, mut text, .. } => {
                flush(&mut file, &mut text, 0)?;
                file.finish()?.finish()
            }
        }
    }
}

/// Disks whose numbers are told.
const MOST_NAMED: usize = 16;

fn flush(file: &mut File, text: &mut Vec<u8>, from_bytes: usize) -> io::Result<()> {
    if text.len() >= from_bytes {
        file.all(text)?;
        text.clear();
    }
    Ok(())
}
