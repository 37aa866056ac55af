//! weir's own CSV: `time_ns,disk,op,offset,length`.
//!
//! `op` is one of `read`, `write`, `flush`, `discard`, `write-zeroes`. Further columns are
//! ignored, so the output of `weir simulate --events` is a trace; its columns contain the outcome
//! of each request, and are empty if that is unknown. Names with commas or quotes are quoted (RFC
//! 4180): `"8,0"`.

use super::{
    super::{
        error::shown,
        fields::{self, LineFields},
        file::RecordedTimes,
        outcome::ParsedOutcome,
        record::RequestOp,
    },
    LineParser, RecordOutput,
};

/// First line of weir's CSV, without further columns.
pub const HEADER: &str = "time_ns,disk,op,offset,length";
/// Optional columns after the five: times of admission and completion, and the limit that
/// throttled the request longest.
pub const MORE_COLUMNS: &str = ",admitted_ns,completed_ns,bucket";

#[derive(Default)]
pub(in super::super) struct WeirCsv {
    begun: bool,
    has_more_columns: bool,
    has_outcomes: bool,
    /// Buffer, so that a quoted name costs no allocation.
    unquoted: Vec<u8>,
    bucket: Vec<u8>,
}

/// Returns true if the header has further columns, false if not; `None` if the line is not the
/// header.
pub(super) fn header(line: &[u8]) -> Option<bool> {
    match line.strip_prefix(HEADER.as_bytes())? {
        [] => Some(false),
        [b',', ..] => Some(true),
        _ => None,
    }
}

/// True if the header has the columns with the outcomes of requests.
pub(in super::super) fn has_outcomes(line: &[u8]) -> bool {
    let rest = line.strip_prefix(HEADER.as_bytes());
    let rest = rest.and_then(|rest| rest.strip_prefix(MORE_COLUMNS.as_bytes()));
    rest.is_some_and(|rest| matches!(rest, [] | [b',' | b'\r' | b'\n', ..]))
}

/// Parses the outcome of a request that arrived at `time_ns`; `None` if it is unknown.
fn outcome<'a>(
    fields: &mut LineFields<'a>,
    time_ns: u64,
    bucket: &'a mut Vec<u8>,
) -> Result<Option<ParsedOutcome<'a>>, String> {
    let mut until_ns = [None; 2];
    for (until_ns, field_name) in until_ns.iter_mut().zip(["admitted_ns", "completed_ns"]) {
        let field = fields.text(field_name)?;
        *until_ns = (!field.is_empty()).then(|| fields::number(field, field_name)).transpose()?;
    }
    let limit = Some(fields.quotable("bucket", bucket)?).filter(|name| !name.is_empty() && *name != b"-");
    // Empty columns: weir has not measured this request.
    let [Some(admitted_ns), Some(completed_ns)] = until_ns else { return Ok(None) };
    // The three times must be in order: they become unsigned differences.
    let after = |later_ns: u64, earlier_ns: u64| {
        let why = || {
            format!(
                "{time_ns}, {admitted_ns}, {completed_ns}: a request is admitted before its \
                 arrival, or completed before its admission"
            )
        };
        later_ns.checked_sub(earlier_ns).ok_or_else(why)
    };
    let times = RecordedTimes {
        wait_ns: after(admitted_ns, time_ns)?,
        service_ns: after(completed_ns, admitted_ns)?,
    };
    Ok(Some(ParsedOutcome { times, has_failed: false, limit }))
}

impl LineParser for WeirCsv {
    #[inline]
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        if !self.begun {
            self.has_more_columns =
                header(line).ok_or_else(|| format!("the header '{HEADER}' is missing"))?;
            self.has_outcomes = has_outcomes(line);
            self.begun = true;
            return Ok(());
        }
        let mut fields = LineFields::new(line);
        let time_ns = fields.number("time_ns")?;
        let disk = fields.quotable("disk", &mut self.unquoted)?;
        let op = op(fields.text("op")?)?;
        let offset = fields.number("offset")?;
        let length = fields.number("length")?;
        // Without further columns in the header, more fields are an error.
        if !self.has_more_columns {
            fields.end()?;
        }
        let parsed = match found.outcomes {
            Some(_) if self.has_outcomes => outcome(&mut fields, time_ns, &mut self.bucket)?,
            _ => None,
        };
        found.push(time_ns, disk, op, offset, length)?;
        match (parsed, &mut found.outcomes) {
            (Some(parsed), Some(outcomes)) => outcomes.push(found.line, parsed),
            _ => Ok(()),
        }
    }
}

#[inline]
fn op(name: &[u8]) -> Result<RequestOp, String> {
    match name {
        b"read" => Ok(RequestOp::Read),
        b"write" => Ok(RequestOp::Write),
        b"flush" => Ok(RequestOp::Flush),
        b"discard" => Ok(RequestOp::Discard),
        b"write-zeroes" => Ok(RequestOp::WriteZeroes),
        _ => Err(format!(
            "the op {} is none of {}",
            shown(name),
            RequestOp::ALL.map(RequestOp::name).join(", ")
        )),
    }
}
