//! fio's iolog, versions 2 and 3, as written by `fio --write_iolog` and replayed by
//! `--read_iolog`.
//!
//! ```text
//!   version 2:             <file> <action> [<offset> <length>]      action: add, open, close; read, write, trim,
//!   version 3:      <time> <file> <action> [<offset> <length>]              sync, datasync, wait (version 2 only)
//! ```
//!
//! Source: fio's HOWTO, "Trace file format v2" and "v3". Times of version 3 are microseconds
//! (`utime_since_now` in iolog.c). In version 2 requests follow each other immediately, except for
//! `wait`. A file is a disk.

use super::{
    super::{
        error::shown,
        fields::{self},
        record::RequestOp,
    },
    LineParser, RecordOutput, nanoseconds,
};

const US_NS: u64 = 1000;
/// Minimum of a wait, in microseconds. fio's HOWTO: "Wait for `offset` microseconds. Everything
/// below 100 is discarded."
pub const MIN_WAIT_US: u64 = 100;

pub(super) const HEADERS: [(&str, u8); 2] = [("fio version 2 iolog", 2), ("fio version 3 iolog", 3)];

pub(in super::super) struct Fio {
    version: u8,
    begun: bool,
    waited_ns: u64,
}

impl Fio {
    pub(in super::super) fn new(version: u8) -> Self {
        Self { version, begun: false, waited_ns: 0 }
    }

    fn begin(&mut self, line: &[u8]) -> Result<(), String> {
        let version = HEADERS.iter().find(|(header, _)| line.trim_ascii() == header.as_bytes());
        if version.map(|&(_, version)| version) != Some(self.version) {
            return Err(format!("the first line is not 'fio version {} iolog'", self.version));
        }
        self.begun = true;
        Ok(())
    }

    fn wait(&mut self, us: u64) -> Result<(), String> {
        if self.version == 3 {
            return Err("version 3 of fio's iolog has no wait action: every line has a time".to_owned());
        }
        if us >= MIN_WAIT_US {
            let waited_ns = self.waited_ns.checked_add(nanoseconds(us, US_NS)?);
            self.waited_ns = waited_ns.ok_or("the waits together do not fit into 64 bits of nanoseconds")?;
        }
        Ok(())
    }
}

impl LineParser for Fio {
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        if !self.begun {
            return self.begin(line);
        }
        let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let mut next = |field_name: &str| {
            words.next().ok_or_else(|| format!("the {field_name} is missing (a truncated line?)"))
        };
        let time_ns = match self.version {
            2 => self.waited_ns,
            _ => nanoseconds(fields::number(next("time")?, "time")?, US_NS)?,
        };
        let (file, action) = (next("file")?, next("action")?);
        let op = match action {
            b"add" | b"open" | b"close" => None,
            b"wait" => None,
            b"read" => Some(RequestOp::Read),
            b"write" => Some(RequestOp::Write),
            b"trim" => Some(RequestOp::Discard),
            b"sync" | b"datasync" | b"sync_file_range" | b"syncfs" => Some(RequestOp::Flush),
            _ => return Err(format!("the action {} is not one of fio's iolog", shown(action))),
        };
        if op.is_none() && action != b"wait" {
            return Ok(());
        }
        let offset = fields::number(next("offset")?, "offset")?;
        let length = fields::number(next("length")?, "length")?;
        match op {
            Some(op) => found.push(time_ns, file, op, offset, length),
            None => self.wait(offset),
        }
    }
}
