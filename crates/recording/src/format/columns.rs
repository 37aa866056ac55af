//! Any text with one line per request, by the meaning of its columns.
//!
//! ```text
//!   --columns time=1:us,disk=2,op=3,offset=4:sectors,length=5
//! ```
//!
//! Columns count from 1. Without `op` all requests are reads; without `disk` all are of one disk,
//! named after the file without extensions. The separator is a comma unless `separator=` selects
//! another.

use std::str::FromStr;

use super::{
    super::{error::shown, fields, record::RequestOp},
    LineParser, RecordOutput, SECTOR_BYTES, nanoseconds, stem,
};

const MAX_COLUMNS: usize = 64;
const MAX_SKIPPED: u64 = 1000;
const READS: &str = "read r rs 0x28 rd";
const WRITES: &str = "write w ws 0x2a wr";
const FLUSHES: &str = "flush f fsync sync";
const DISCARDS: &str = "discard d trim unmap";

/// Value of `--columns`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnSpec {
    time: ScaledColumn,
    offset: ScaledColumn,
    length: ScaledColumn,
    op: Option<usize>,
    disk: Option<usize>,
    /// Words for read and write, for files that use numbers or other words.
    reads: Option<String>,
    writes: Option<String>,
    separator: FieldSeparator,
    /// Number of lines before the first request.
    skip: u64,
}

/// A column of numbers, from 0, and their unit in nanoseconds or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ScaledColumn {
    column: usize,
    unit: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldSeparator {
    Byte(u8),
    /// Any number of blanks and tabs.
    Blanks,
}

impl FromStr for ColumnSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut time, mut offset, mut length) = (None, None, None);
        let (mut op, mut disk, mut reads, mut writes) = (None, None, None, None);
        let (mut separator, mut skip) = (FieldSeparator::Byte(b','), 0);
        for pair in text.split(',') {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("{pair:?} is not KEY=VALUE (such as time=1:us)"))?;
            match key {
                "time" => time = Some(ScaledColumn::read(value, TIMES)?),
                "offset" => offset = Some(ScaledColumn::read(value, SIZES)?),
                "length" => length = Some(ScaledColumn::read(value, SIZES)?),
                "op" => op = Some(column(value)?),
                "disk" => disk = Some(column(value)?),
                "reads" => reads = Some(value.to_owned()),
                "writes" => writes = Some(value.to_owned()),
                "separator" => separator = value.parse()?,
                "skip" => {
                    let lines = value.parse().ok().filter(|lines| *lines <= MAX_SKIPPED);
                    skip = lines.ok_or_else(|| {
                        format!("skip={value} is not a number of lines up to {MAX_SKIPPED}")
                    })?;
                }
                _ => {
                    return Err(format!(
                        "{key:?} is not a known key (use time, offset, length, op, disk, reads, \
                         writes, separator or skip)"
                    ));
                }
            }
        }
        let needed = |found: Option<ScaledColumn>, name: &str| {
            found.ok_or_else(|| format!("has no {name} (add its column: {name}=N)"))
        };
        Ok(Self {
            time: needed(time, "time")?,
            offset: needed(offset, "offset")?,
            length: needed(length, "length")?,
            op,
            disk,
            reads,
            writes,
            separator,
            skip,
        })
    }
}

type ColumnUnit = (&'static str, u64);
// The first unit is the default.
const TIMES: &[ColumnUnit] = &[("ns", 1), ("us", 1000), ("ms", 1_000_000), ("s", S_NS)];
const SIZES: &[ColumnUnit] = &[("bytes", 1), ("sectors", SECTOR_BYTES), ("KiB", 1024), ("pages", 4096)];
const S_NS: u64 = 1_000_000_000;

impl ScaledColumn {
    fn read(value: &str, units: &[ColumnUnit]) -> Result<Self, String> {
        let (number, unit) = value.split_once(':').unwrap_or((value, units[0].0));
        let known = units.iter().find(|(name, _)| *name == unit);
        let &(_, unit) = known.ok_or_else(|| {
            let names: Vec<_> = units.iter().map(|(name, _)| *name).collect();
            format!("{unit:?} is not a valid unit (use one of {})", names.join(", "))
        })?;
        Ok(Self { column: column(number)?, unit })
    }
}

fn column(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| (1..=MAX_COLUMNS).contains(number));
    let number = number.ok_or_else(|| format!("{text:?} is not a column number from 1 to {MAX_COLUMNS}"))?;
    Ok(number - 1)
}

impl FromStr for FieldSeparator {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "comma" => Ok(Self::Byte(b',')),
            "semicolon" | ";" => Ok(Self::Byte(b';')),
            "tab" => Ok(Self::Byte(b'\t')),
            "blanks" | "space" => Ok(Self::Blanks),
            _ => Err(format!("separator={text} is none of comma, semicolon, tab, blanks")),
        }
    }
}

/// Parser of lines by columns.
pub(in super::super) struct ByColumns {
    columns: ColumnSpec,
    skipped: u64,
    /// Disk of all requests if there is no column for it.
    disk: String,
}

impl ByColumns {
    pub(in super::super) fn new(columns: ColumnSpec, file: &str) -> Self {
        Self { columns, skipped: 0, disk: stem(file).to_owned() }
    }
}

impl LineParser for ByColumns {
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        let Self { columns, skipped, disk } = self;
        if *skipped < columns.skip {
            *skipped += 1;
            return Ok(());
        }
        let mut all: [&[u8]; MAX_COLUMNS] = [b""; MAX_COLUMNS];
        match columns.separator {
            FieldSeparator::Byte(separator) => fill(&mut all, line.split(|&byte| byte == separator)),
            FieldSeparator::Blanks => {
                let words = line.split(u8::is_ascii_whitespace);
                fill(&mut all, words.filter(|word| !word.is_empty()));
            }
        }
        let time_ns = match columns.time.unit {
            S_NS => fields::seconds(all[columns.time.column], "time")?,
            unit => nanoseconds(fields::number(all[columns.time.column], "time")?, unit)?,
        };
        let op = match columns.op {
            Some(column) => columns.op(all[column])?,
            None => RequestOp::Read,
        };
        let number = |place: ScaledColumn, field_name: &str| {
            let number = fields::number(all[place.column], field_name)?;
            let bytes = number.checked_mul(place.unit);
            bytes.ok_or_else(|| format!("the {field_name} {number} does not fit into 64 bits of bytes"))
        };
        let (offset, length) = match op {
            RequestOp::Flush => (0, 0),
            _ => (number(columns.offset, "offset")?, number(columns.length, "length")?),
        };
        let disk = columns.disk.map_or(disk.as_bytes(), |column| all[column]);
        found.push(time_ns, disk, op, offset, length)
    }
}

fn fill<'a>(all: &mut [&'a [u8]], fields: impl Iterator<Item = &'a [u8]>) {
    for (place, field) in all.iter_mut().zip(fields) {
        *place = field.trim_ascii();
    }
}

impl ColumnSpec {
    fn op(&self, word: &[u8]) -> Result<RequestOp, String> {
        let is_own = |own: &Option<String>| own.as_ref().is_some_and(|own| own.as_bytes() == word);
        let is_one_of = |words: &str| words.split(' ').any(|one| one.as_bytes().eq_ignore_ascii_case(word));
        if is_own(&self.reads) {
            return Ok(RequestOp::Read);
        }
        if is_own(&self.writes) {
            return Ok(RequestOp::Write);
        }
        let known = [
            (READS, RequestOp::Read),
            (WRITES, RequestOp::Write),
            (FLUSHES, RequestOp::Flush),
            (DISCARDS, RequestOp::Discard),
        ];
        let op = known.iter().find(|(words, _)| is_one_of(words));
        op.map(|&(_, op)| op)
            .ok_or_else(|| format!("the op {} is unknown (define it: reads=WORD, writes=WORD)", shown(word)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_column_specs_are_rejected() {
        let error = |text: &str| text.parse::<ColumnSpec>().unwrap_err();
        assert_eq!(error("time=1,length=2"), "has no offset (add its column: offset=N)");
        assert_eq!(error("time"), "\"time\" is not KEY=VALUE (such as time=1:us)");
        assert_eq!(error("time=0"), "\"0\" is not a column number from 1 to 64");
        assert_eq!(error("time=1:h"), "\"h\" is not a valid unit (use one of ns, us, ms, s)");
        assert_eq!(
            error("offset=1:us"),
            "\"us\" is not a valid unit (use one of bytes, sectors, KiB, pages)"
        );
        assert!(error("tme=1").starts_with("\"tme\" is not a known key"));
        assert_eq!(error("skip=-1"), "skip=-1 is not a number of lines up to 1000");
        assert_eq!(error("separator=x"), "separator=x is none of comma, semicolon, tab, blanks");
    }
}
