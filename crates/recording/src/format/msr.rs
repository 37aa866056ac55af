//! CSV of the servers of Microsoft Research in Cambridge:
//! `Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime`.
//!
//! `Timestamp` counts 100 ns since 1601, as Windows does; times before 1970 belong to an unknown
//! clock and are used unchanged. `Type` is `Read` or `Write`, offset and size are in bytes. A
//! header is skipped. The name of a disk is `hm.0`: host, dot, number.
//!
//! Source: README.txt of the traces (SNIA IOTTA, "MSR Cambridge Traces"; Narayanan, Donnelly and
//! Rowstron, *Write Off-Loading*, FAST 2008).

use super::{
    super::{error::shown, fields::LineFields, record::RequestOp},
    FirstLine, LineParser, RecordOutput, is_header, nanoseconds,
};

/// Unit of the timestamp in nanoseconds.
pub const TICK_NS: u64 = 100;
/// Timestamp of 1970, in ticks since 1601 (MS-DTYP, section 2.3.3).
pub const TICKS_OF_1970: u64 = 11_644_473_600 * (1_000_000_000 / TICK_NS);
const HEADER: &str = "Timestamp,Hostname,DiskNumber,Type,Offset,Size";

#[derive(Default)]
pub(in super::super) struct Msr {
    first: FirstLine,
    /// Buffer, so that a name costs no allocation.
    disk: Vec<u8>,
}

pub(super) fn is_line(line: &[u8]) -> bool {
    let mut fields = LineFields::new(line);
    let mut first = || {
        fields.number("time")?;
        fields.text("host")?;
        fields.number("disk")?;
        op(fields.text("type")?)
    };
    is_header(line, HEADER) || first().is_ok()
}

impl LineParser for Msr {
    #[inline]
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        if self.first.is_header(line, HEADER) {
            return Ok(());
        }
        let mut fields = LineFields::new(line);
        let ticks = fields.number("timestamp")?;
        let time_ns = nanoseconds(ticks.checked_sub(TICKS_OF_1970).unwrap_or(ticks), TICK_NS)?;
        self.disk.clear();
        self.disk.extend_from_slice(fields.text("host name")?);
        self.disk.push(b'.');
        self.disk.extend_from_slice(fields.text("disk number")?);
        let op = op(fields.text("type")?)?;
        let offset = fields.number("offset")?;
        let length = fields.number("size")?;
        fields.text("response time")?;
        fields.end()?;
        found.push(time_ns, &self.disk, op, offset, length)
    }
}

#[inline]
fn op(name: &[u8]) -> Result<RequestOp, String> {
    match name {
        b"Read" => Ok(RequestOp::Read),
        b"Write" => Ok(RequestOp::Write),
        _ if name.eq_ignore_ascii_case(b"read") => Ok(RequestOp::Read),
        _ if name.eq_ignore_ascii_case(b"write") => Ok(RequestOp::Write),
        _ => Err(format!("the type {} is neither Read nor Write", shown(name))),
    }
}
