//! CloudPhysics' traces of virtual disks as CSV, from libCacheSim: `version,time,op,size,lbn`.
//!
//! `time` is in seconds, `op` a SCSI command in hexadecimal (`28` is READ(10), `2a` is WRITE(10)),
//! `size` in bytes, `lbn` in sectors of 512 bytes. Columns may be in any order. A file is one
//! disk, named after the file without extensions.
//!
//! Source: data/cloudPhysicsIO.csv of github.com/1a1a11a/libCacheSim and its vscsi reader; SBC-4,
//! SPC-5.

use super::{
    super::{error::shown, fields, record::RequestOp},
    LineParser, RecordOutput, bytes, nanoseconds, stem,
};

const S_NS: u64 = 1_000_000_000;
const MAX_COLUMNS: usize = 64;
// In the order of `CloudPhysics::columns`.
const NEEDED: [&str; 4] = ["time", "op", "size", "lbn"];

pub(in super::super) struct CloudPhysics {
    disk: String,
    columns: Option<[usize; 4]>,
}

impl CloudPhysics {
    pub(in super::super) fn new(file: &str) -> Self {
        Self { disk: stem(file).to_owned(), columns: None }
    }
}

pub(super) fn columns(line: &[u8]) -> Option<[usize; 4]> {
    let place = |needed: &str| {
        let mut names = line.split(|&byte| byte == b',').take(MAX_COLUMNS);
        names.position(|name| name.trim_ascii().eq_ignore_ascii_case(needed.as_bytes()))
    };
    let [time, op, size, lbn] = NEEDED.map(place);
    Some([time?, op?, size?, lbn?])
}

impl LineParser for CloudPhysics {
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        let Some(columns) = self.columns else {
            let columns = columns(line);
            self.columns =
                Some(columns.ok_or("the header with the columns time, op, size and lbn is missing")?);
            return Ok(());
        };
        let mut values: [Option<&[u8]>; 4] = [None; 4];
        for (at, field) in line.split(|&byte| byte == b',').enumerate().take(MAX_COLUMNS) {
            if let Some(index) = columns.iter().position(|&column| column == at) {
                values[index] = Some(field);
            }
        }
        let number = |index: usize| fields::number(values[index].unwrap_or_default(), NEEDED[index]);
        let time_ns = nanoseconds(number(0)?, S_NS)?;
        let Some(op) = op(values[1].unwrap_or_default())? else { return Ok(()) };
        found.push(time_ns, self.disk.as_bytes(), op, bytes(number(3)?)?, number(2)?)
    }
}

/// Operation of a SCSI command; `None` for commands that neither transfer nor flush data.
fn op(code: &[u8]) -> Result<Option<RequestOp>, String> {
    let text = std::str::from_utf8(code).ok().filter(|text| (1..=2).contains(&text.len()));
    let code = text
        .and_then(|text| u8::from_str_radix(text, 16).ok())
        .ok_or_else(|| format!("the op {} is not a SCSI command in hexadecimal", shown(code)))?;
    Ok(match code {
        // READ (6), (10), (12), (16).
        0x08 | 0x28 | 0xa8 | 0x88 => Some(RequestOp::Read),
        // WRITE (6), (10), (12), (16); WRITE AND VERIFY (10), (12), (16).
        0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e => Some(RequestOp::Write),
        // WRITE SAME (10), (16): the repeated data is zeroes in practice.
        0x41 | 0x93 => Some(RequestOp::WriteZeroes),
        // UNMAP.
        0x42 => Some(RequestOp::Discard),
        // SYNCHRONIZE CACHE (10), (16).
        0x35 | 0x91 => Some(RequestOp::Flush),
        _ => None,
    })
}
