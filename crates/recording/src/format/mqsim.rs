//! Traces of the flash simulators MQSim and SSDsim: `time device sector sectors type`.
//!
//! Words are separated by blanks. The time is in nanoseconds, sectors have 512 bytes, `type` is 1
//! for a read and 0 for a write. The name of a device is its number.
//!
//! Source: README of SSDsim, note 1; ASCII_Trace_Definition.h of github.com/CMU-SAFARI/MQSim (its
//! default unit of time).

use super::{
    super::{error::shown, fields, record::RequestOp},
    LineParser, RecordOutput, bytes,
};

#[derive(Default)]
pub(in super::super) struct Mqsim;

pub(super) fn is_line(line: &[u8]) -> bool {
    request(line).is_ok()
}

impl LineParser for Mqsim {
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        let (time_ns, device, op, offset, length) = request(line)?;
        found.push(time_ns, device, op, offset, length)
    }
}

fn request(line: &[u8]) -> Result<(u64, &[u8], RequestOp, u64, u64), String> {
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let mut next = |field_name: &str| {
        words.next().ok_or_else(|| format!("the {field_name} is missing (a truncated line?)"))
    };
    let time_ns = fields::number(next("time")?, "time")?;
    let device = next("device")?;
    fields::number(device, "device")?;
    let offset = bytes(fields::number(next("sector")?, "sector")?)?;
    let length = bytes(fields::number(next("number of sectors")?, "number of sectors")?)?;
    let op = match next("type")? {
        b"0" => RequestOp::Write,
        b"1" => RequestOp::Read,
        other => return Err(format!("the type {} is neither 0 (write) nor 1 (read)", shown(other))),
    };
    match words.next() {
        None => Ok((time_ns, device, op, offset, length)),
        Some(more) => Err(format!("the line has more words than the format: {}", shown(more))),
    }
}
