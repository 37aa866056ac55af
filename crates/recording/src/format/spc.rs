//! Traces of the Storage Performance Council: `ASU,LBA,Size,Opcode,Timestamp[,…]`.
//!
//! The unit (ASU) is a disk, whose name is its number. LBA counts sectors of 512 bytes, the size
//! is in bytes, `Opcode` is `R` or `W`, the time is in seconds since the start of the trace, with
//! a fraction. Further fields are specific to the recorder and ignored; fields may be surrounded
//! by blanks.
//!
//! Source: SPC Trace File Format Specification, revision 1.0.1, as used by the traces of UMass
//! (`Financial1.spc`, `WebSearch2.spc`).

use super::{
    super::{error::shown, fields, fields::LineFields, record::RequestOp},
    LineParser, RecordOutput, bytes,
};

#[derive(Default)]
pub(in super::super) struct Spc;

/// Distinguished from other CSV by the opcode in the fourth field and the time after it.
pub(super) fn is_line(line: &[u8]) -> bool {
    request(line).is_ok()
}

impl LineParser for Spc {
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        let (time_ns, unit, op, offset, length) = request(line)?;
        found.push(time_ns, unit, op, offset, length)
    }
}

fn request(line: &[u8]) -> Result<(u64, &[u8], RequestOp, u64, u64), String> {
    let mut fields = LineFields::new(line);
    let mut next = |field_name: &str| fields.text(field_name).map(<[u8]>::trim_ascii);
    let unit = next("ASU")?;
    fields::number(unit, "ASU")?;
    let offset = bytes(fields::number(next("LBA")?, "LBA")?)?;
    let length = fields::number(next("size")?, "size")?;
    let op = match next("opcode")? {
        b"R" | b"r" => RequestOp::Read,
        b"W" | b"w" => RequestOp::Write,
        other => return Err(format!("the opcode {} is neither R nor W", shown(other))),
    };
    let time_ns = fields::seconds(next("timestamp")?, "timestamp")?;
    Ok((time_ns, unit, op, offset, length))
}
