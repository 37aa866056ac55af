//! CSV of Alibaba's block traces: `device_id,opcode,offset,length,timestamp`.
//!
//! `opcode` is `R` or `W`, offset and length are in bytes, the time is in microseconds since 1970.
//! The published file has no header; a header is skipped. `device_id` is the name of the disk.
//!
//! Source: README of github.com/alibaba/block-traces, "Schema", `io_traces.csv`.

use super::{
    super::{error::shown, fields::LineFields, record::RequestOp},
    FirstLine, LineParser, RecordOutput, is_header, nanoseconds,
};

const US_NS: u64 = 1000;
const HEADER: &str = "device_id,opcode,offset,length,timestamp";

#[derive(Default)]
pub(in super::super) struct Alibaba {
    first: FirstLine,
}

pub(super) fn is_line(line: &[u8]) -> bool {
    let mut fields = LineFields::new(line);
    let mut first = || {
        fields.number("device")?;
        op(fields.text("opcode")?)?;
        fields.number("offset")?;
        fields.number("length")?;
        fields.number("timestamp")
    };
    is_header(line, HEADER) || first().is_ok()
}

impl LineParser for Alibaba {
    #[inline]
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        if self.first.is_header(line, HEADER) {
            return Ok(());
        }
        let mut fields = LineFields::new(line);
        let disk = fields.text("device_id")?;
        let op = op(fields.text("opcode")?)?;
        let offset = fields.number("offset")?;
        let length = fields.number("length")?;
        let time_ns = nanoseconds(fields.number("timestamp")?, US_NS)?;
        fields.end()?;
        found.push(time_ns, disk, op, offset, length)
    }
}

#[inline]
fn op(code: &[u8]) -> Result<RequestOp, String> {
    match code {
        b"R" => Ok(RequestOp::Read),
        b"W" => Ok(RequestOp::Write),
        _ => Err(format!("the opcode {} is neither R nor W", shown(code))),
    }
}
