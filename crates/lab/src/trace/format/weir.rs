//! weir's own CSV: `time_ns,disk,op,offset,length`.
//!
//! `op` is one of `read`, `write`, `flush`, `discard`, `write-zeroes`. Further columns are ignored,
//! so the output of `weir simulate --events` is a trace. Names with commas or quotes are quoted
//! (RFC 4180): `"8,0"`.

use super::{
    super::{error::shown, fields::Fields, record::Op},
    Found, Parse,
};

pub(crate) const HEADER: &str = "time_ns,disk,op,offset,length";

#[derive(Default)]
pub(in super::super) struct Weir {
    begun: bool,
    more: bool,
    /// Kept, so that a quoted name costs no allocation.
    unquoted: Vec<u8>,
}

/// Whether a line is the header, and if so whether it has further columns.
pub(super) fn header(line: &[u8]) -> Option<bool> {
    match line.strip_prefix(HEADER.as_bytes())? {
        [] => Some(false),
        [b',', ..] => Some(true),
        _ => None,
    }
}

impl Parse for Weir {
    #[inline]
    fn line(&mut self, line: &[u8], found: &mut Found<'_>) -> Result<(), String> {
        if !self.begun {
            self.more = header(line).ok_or_else(|| format!("the header '{HEADER}' is missing"))?;
            self.begun = true;
            return Ok(());
        }
        let mut fields = Fields::new(line);
        let time_ns = fields.number("time_ns")?;
        let disk = fields.quotable("disk", &mut self.unquoted)?;
        let op = op(fields.text("op")?)?;
        let offset = fields.number("offset")?;
        let length = fields.number("length")?;
        if !self.more {
            fields.end()?;
        }
        found.push(time_ns, disk, op, offset, length)
    }
}

#[inline]
fn op(name: &[u8]) -> Result<Op, String> {
    match name {
        b"read" => Ok(Op::Read),
        b"write" => Ok(Op::Write),
        b"flush" => Ok(Op::Flush),
        b"discard" => Ok(Op::Discard),
        b"write-zeroes" => Ok(Op::WriteZeroes),
        _ => Err(format!("the op {} is none of {}", shown(name), Op::ALL.map(Op::name).join(", "))),
    }
}
