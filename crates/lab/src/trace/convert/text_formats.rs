//! Writes requests in any of the text formats.
//!
//! A request that a format cannot represent is not written, and the caller receives the reason.

use std::{borrow::Cow, collections::HashMap, fmt, io::Write as _};

use recording::{
    DiskId, HEADER, MORE_COLUMNS, RequestOp, RequestOutcome, TraceFormat,
    format::{MIN_WAIT_US, SECTOR_BYTES, TICK_NS, TICKS_OF_1970},
    push_decimal,
    write::{push_request, quoted},
};

use crate::trace::info::is_since_1970;

const US_NS: u64 = 1000;
const S_NS: u64 = 1_000_000_000;

/// A request to write.
#[derive(Clone, Copy)]
pub(super) struct TraceRequest<'a> {
    /// Nanoseconds since the start of the trace (time 0).
    pub(super) time_ns: u64,
    pub(super) disk: DiskId,
    /// The disk's name.
    pub(super) name: &'a str,
    pub(super) op: RequestOp,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Result of the request, if known.
    pub(super) outcome: Option<RequestOutcome<'a>>,
}

/// Reason why a request was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NotWritten {
    /// The format has no code for this operation.
    Op(RequestOp),
    /// The format counts sectors, and offset or length is not a multiple of a sector.
    Unaligned,
}

/// Identification of disks in a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskNaming {
    ByName,
    /// By name, but without characters that separate columns, and with a suffix if the result is in
    /// use already.
    ByUniqueName,
    ByNumber,
    /// The format has one disk only.
    Unnamed,
}

pub(super) fn disk_naming(format: TraceFormat) -> DiskNaming {
    match format {
        TraceFormat::Blkparse | TraceFormat::Alibaba | TraceFormat::Spc | TraceFormat::Mqsim => {
            DiskNaming::ByNumber
        }
        TraceFormat::FioV2 | TraceFormat::FioV3 | TraceFormat::Msr => DiskNaming::ByUniqueName,
        TraceFormat::CloudPhysics => DiskNaming::Unnamed,
        TraceFormat::Weir | TraceFormat::Recording | TraceFormat::Columns => DiskNaming::ByName,
    }
}

/// Unique identifiers of disks that cannot keep their names.
#[derive(Default)]
pub(super) struct DiskIdentifiers {
    /// By disk number; `None` for disks without a request so far.
    disks: Vec<Option<DiskIdentifier>>,
    /// Identifiers in use, each with the last number appended to it.
    used: HashMap<String, u32>,
    /// The smallest number that may be free, in formats that number disks.
    free: u32,
}

/// A disk's name in the input, and its identifier in the output.
pub(super) struct DiskIdentifier {
    pub(super) name: String,
    pub(super) identifier: String,
}

impl DiskIdentifiers {
    /// Identifier of a disk in the format.
    fn of(&mut self, format: TraceFormat, disk: DiskId, name: &str) -> &str {
        let Self { disks, used, free } = self;
        if disks.len() <= disk.index() {
            disks.resize_with(disk.index() + 1, || None);
        }
        let entry = disks[disk.index()].get_or_insert_with(|| {
            let identifier = match disk_naming(format) {
                DiskNaming::ByNumber => number_of(format, name, used, free),
                _ => name_of(format, name, used),
            };
            used.insert(identifier.clone(), 1);
            DiskIdentifier { name: name.to_owned(), identifier }
        });
        &entry.identifier
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &DiskIdentifier> {
        self.disks.iter().flatten()
    }
}

/// A unique name: if it is in use, the next number is appended.
fn name_of(format: TraceFormat, name: &str, used: &mut HashMap<String, u32>) -> String {
    let wanted = name_with(format, name, "");
    let mut identifier = wanted.clone();
    // The count of each name is kept, so that many disks with one name do not take quadratic time.
    while used.contains_key(&identifier) {
        let number = used.entry(wanted.clone()).or_insert(1);
        *number += 1;
        identifier = name_with(format, name, &format!("_{number}"));
    }
    identifier
}

fn name_with(format: TraceFormat, name: &str, suffix: &str) -> String {
    match format {
        TraceFormat::Msr => {
            let (host, number) = host_and_number(name);
            format!("{}{suffix}.{number}", replace_characters(host, |letter| letter == ','))
        }
        _ => replace_characters(name, char::is_whitespace).into_owned() + suffix,
    }
}

/// The name if it is a valid number of the format and unused; else the next free number.
fn number_of(format: TraceFormat, name: &str, used: &HashMap<String, u32>, free: &mut u32) -> String {
    if is_number(format, name) && !used.contains_key(name) {
        return name.to_owned();
    }
    loop {
        let number = *free;
        *free += 1;
        let identifier =
            if format == TraceFormat::Blkparse { format!("8,{number}") } else { number.to_string() };
        if !used.contains_key(&identifier) {
            return identifier;
        }
    }
}

fn is_number(format: TraceFormat, name: &str) -> bool {
    let is_whole = |text: &str| text.parse::<u32>().is_ok_and(|number| number.to_string() == text);
    match format {
        TraceFormat::Blkparse => {
            name.split_once(',').is_some_and(|(major, minor)| is_whole(major) && is_whole(minor))
        }
        _ => is_whole(name),
    }
}

/// Information known before the first request.
#[derive(Clone, Copy)]
pub(super) struct TraceStart {
    /// Reading of the trace's clock at time 0, in nanoseconds: since 1970, or small if the clock
    /// started at boot or with the trace; 0 without a clock.
    pub(super) clock_ns: u64,
    /// True if requests have results.
    pub(super) with_outcomes: bool,
}

/// Writes the lines of one format.
pub(super) struct TextFormat {
    format: TraceFormat,
    start: TraceStart,
    pub(super) identifiers: DiskIdentifiers,
    /// By disk number; true if fio's `add` and `open` lines of the disk have been written.
    declared: Vec<bool>,
    waited_us: u64,
}

impl TextFormat {
    /// Starts the text with the header of the format. Recordings are binary and not written here.
    pub(super) fn begin(format: TraceFormat, start: TraceStart, text: &mut Vec<u8>) -> Self {
        // The remaining formats have no header.
        let header = match format {
            TraceFormat::Weir => Some(HEADER),
            TraceFormat::FioV2 => Some("fio version 2 iolog"),
            TraceFormat::FioV3 => Some("fio version 3 iolog"),
            TraceFormat::CloudPhysics => Some("version,time,op,size,lbn"),
            _ => None,
        };
        if let Some(header) = header {
            let more = if start.with_outcomes && format == TraceFormat::Weir { MORE_COLUMNS } else { "" };
            line(text, format_args!("{header}{more}"));
        }
        Self { format, start, identifiers: DiskIdentifiers::default(), declared: Vec::new(), waited_us: 0 }
    }

    pub(super) fn push(&mut self, text: &mut Vec<u8>, request: TraceRequest<'_>) -> Result<(), NotWritten> {
        let TraceRequest { time_ns, disk, name, op, offset, length, outcome } = request;
        let identifier = match disk_naming(self.format) {
            DiskNaming::ByName => name,
            _ => self.identifiers.of(self.format, disk, name),
        };
        let now_ns = self.start.clock_ns.saturating_add(time_ns);
        let (seconds, rest_ns) = (time_ns / S_NS, time_ns % S_NS);
        match self.format {
            TraceFormat::Weir => {
                push_request(text, now_ns, &quoted(name), op, offset, length);
                if self.start.with_outcomes {
                    push_outcome(text, now_ns, outcome);
                }
                text.push(b'\n');
            }
            TraceFormat::FioV2 | TraceFormat::FioV3 => self.push_fio(text, request)?,
            TraceFormat::Blkparse => {
                let letters = operation_code(op, "R", "W", Some("D"), Some("FN"))?;
                let head = format_args!("{identifier} 0 1 {seconds}.{rest_ns:09} 1 Q {letters}");
                // A flush has no sectors.
                if op == RequestOp::Flush {
                    line(text, format_args!("{head} [weir]"));
                } else {
                    let (sector, sectors) = (sectors(offset)?, sectors(length)?);
                    line(text, format_args!("{head} {sector} + {sectors} [weir]"));
                }
            }
            TraceFormat::Msr => {
                let kind = operation_code(op, "Read", "Write", None, None)?;
                let (host, number) =
                    identifier.rsplit_once('.').expect("MSR identifiers have the form host.number");
                // Ticks count from 1601. A clock that counts from 1970 is converted; one with
                // another epoch is written unchanged.
                let epoch = if is_since_1970(self.start.clock_ns) { TICKS_OF_1970 } else { 0 };
                let ticks = epoch + now_ns / TICK_NS;
                line(text, format_args!("{ticks},{host},{number},{kind},{offset},{length},0"));
            }
            TraceFormat::Alibaba => {
                let kind = operation_code(op, "R", "W", None, None)?;
                line(text, format_args!("{identifier},{kind},{offset},{length},{}", now_ns / US_NS));
            }
            TraceFormat::CloudPhysics => {
                let code = match op {
                    RequestOp::WriteZeroes => "41",
                    op => operation_code(op, "28", "2a", Some("42"), Some("35"))?,
                };
                line(text, format_args!("1,{seconds},{code},{length},{}", sectors(offset)?));
            }
            TraceFormat::Spc => {
                let kind = operation_code(op, "R", "W", None, None)?;
                let sector = sectors(offset)?;
                line(text, format_args!("{identifier},{sector},{length},{kind},{seconds}.{rest_ns:09}"));
            }
            TraceFormat::Mqsim => {
                let kind = operation_code(op, "1", "0", None, None)?;
                let (sector, sectors) = (sectors(offset)?, sectors(length)?);
                line(text, format_args!("{time_ns} {identifier} {sector} {sectors} {kind}"));
            }
            TraceFormat::Recording | TraceFormat::Columns => unreachable!("not a text format to write"),
        }
        Ok(())
    }

    /// True if the output expresses time by fio's wait lines.
    pub(super) fn has_waits(&self) -> bool {
        self.waited_us > 0
    }

    fn push_fio(&mut self, text: &mut Vec<u8>, request: TraceRequest<'_>) -> Result<(), NotWritten> {
        let TraceRequest { time_ns, disk, name, op, offset, length, .. } = request;
        let action = operation_code(op, "read", "write", Some("trim"), Some("sync"))?;
        let file = self.identifiers.of(self.format, disk, name);
        let us = time_ns / US_NS;
        let has_times = self.format == TraceFormat::FioV3;
        let time = if has_times { format!("{us} ") } else { String::new() };
        if self.declared.len() <= disk.index() {
            self.declared.resize(disk.index() + 1, false);
        }
        // fio needs every file declared and opened before its first request.
        if !std::mem::replace(&mut self.declared[disk.index()], true) {
            line(text, format_args!("{time}{file} add"));
            line(text, format_args!("{time}{file} open"));
        }
        // A wait that is too short is added to the next one, because only written waits advance
        // `waited_us`.
        let wait_us = us - self.waited_us;
        if !has_times && wait_us >= MIN_WAIT_US {
            line(text, format_args!("{file} wait {wait_us} 0"));
            self.waited_us = us;
        }
        line(text, format_args!("{time}{file} {action} {offset} {length}"));
        Ok(())
    }
}

/// Code of an operation, if there is one. A format with a code for write-zeroes handles it itself.
fn operation_code(
    op: RequestOp,
    read: &'static str,
    write: &'static str,
    discard: Option<&'static str>,
    flush: Option<&'static str>,
) -> Result<&'static str, NotWritten> {
    let code = match op {
        RequestOp::Read => Some(read),
        RequestOp::Write => Some(write),
        RequestOp::Discard => discard,
        RequestOp::Flush => flush,
        RequestOp::WriteZeroes => None,
    };
    code.ok_or(NotWritten::Op(op))
}

/// Appends a result; empty columns if it is unknown.
fn push_outcome(text: &mut Vec<u8>, time_ns: u64, outcome: Option<RequestOutcome<'_>>) {
    let admitted_ns = outcome.map(|outcome| time_ns.saturating_add(outcome.times.wait_ns));
    let completed_ns = outcome.map(|outcome| time_ns.saturating_add(outcome.times.latency_ns()));
    for time_ns in [admitted_ns, completed_ns] {
        text.push(b',');
        time_ns.into_iter().for_each(|time_ns| push_decimal(text, time_ns));
    }
    text.push(b',');
    let limit = outcome.and_then(|outcome| outcome.limit).unwrap_or_default();
    text.extend_from_slice(quoted(limit).as_bytes());
}

fn line(text: &mut Vec<u8>, line: fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("memory takes all");
}

fn sectors(bytes: u64) -> Result<u64, NotWritten> {
    if bytes.is_multiple_of(SECTOR_BYTES) { Ok(bytes / SECTOR_BYTES) } else { Err(NotWritten::Unaligned) }
}

/// `hm.0` is disk 0 of the host `hm`; any other name is disk 0 of a host with that name.
fn host_and_number(name: &str) -> (&str, u32) {
    let parts = name.rsplit_once('.').and_then(|(host, number)| Some((host, number.parse().ok()?)));
    parts.unwrap_or((name, 0))
}

/// Replaces each character that `ends` the name in the format by `_`.
fn replace_characters(name: &str, ends: impl Fn(char) -> bool) -> Cow<'_, str> {
    if name.contains(&ends) { name.replace(ends, "_").into() } else { name.into() }
}
