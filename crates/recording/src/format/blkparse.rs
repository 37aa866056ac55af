//! blktrace's events in the default output of `blkparse`.
//!
//! ```text
//!     8,0    3        1     0.000000000   697  Q  WS 223490 + 8 [kjournald]
//!   device  cpu  sequence         time    pid  │  │  sector + sectors
//!                                         action  RWBS
//! ```
//!
//! One action represents a request, the first of these that occurs in the first mebibyte: `Q`
//! (queued), `D` (issued to the device), `C` (completed). RWBS: a leading `F` is a flush before
//! the request, then `R`, `W` or `D` (discard) is the operation. `N` and requests without sectors
//! are skipped, except for `B` (a barrier of old kernels), which is then a flush. The name of a
//! device is its numbers, `8,0`.
//!
//! Source: blkparse(1), "OUTPUT DESCRIPTION AND FORMATTING"; blkparse 1.2.

use super::{
    super::{fields, record::RequestOp},
    LineParser, RecordOutput, bytes,
};

const S_NS: u64 = 1_000_000_000;

pub(in super::super) struct Blkparse {
    /// Action that represents a request.
    taken: u8,
    begun: bool,
    summary: bool,
}

struct BlkparseEvent<'a> {
    device: &'a [u8],
    time_ns: u64,
    /// Only its first letter is significant.
    action: &'a [u8],
    rwbs: &'a [u8],
    rest: &'a [u8],
}

impl Blkparse {
    /// `ahead` is the beginning of the trace; its last line may be incomplete.
    pub(in super::super) fn new(ahead: &[u8]) -> Self {
        let seen = |action: u8| {
            let mut lines = ahead.split(|&byte| byte == b'\n');
            lines.any(|line| event(line).is_some_and(|event| event.action == [action]))
        };
        // `C` occurs without `Q` and `D` if only completions were traced.
        let taken = [b'Q', b'D'].into_iter().find(|&action| seen(action)).unwrap_or(b'C');
        Self { taken, begun: false, summary: false }
    }
}

pub(super) fn is_event(line: &[u8]) -> bool {
    event(line).is_some()
}

/// True for blkparse's own messages, which may precede the first event.
pub(super) fn is_preface(line: &[u8]) -> bool {
    line.starts_with(b"Input file ")
}

impl LineParser for Blkparse {
    fn line(&mut self, line: &[u8], found: &mut RecordOutput<'_>) -> Result<(), String> {
        if self.summary || (!self.begun && is_preface(line)) {
            return Ok(());
        }
        let Some(event) = event(line) else {
            self.summary = self.begun && is_summary(line);
            return if self.summary {
                Ok(())
            } else {
                Err("not an event in blkparse's default output".to_owned())
            };
        };
        self.begun = true;
        // Mixing actions would count requests twice.
        if event.action == b"Q" && self.taken != b'Q' {
            return Err(format!(
                "an event Q after a mebibyte without one, in which {} stood for the requests \
                 (print one action only: blkparse -a queue)",
                char::from(self.taken)
            ));
        }
        if event.action != [self.taken] {
            return Ok(());
        }
        request(&event, found)
    }
}

fn request(event: &BlkparseEvent<'_>, found: &mut RecordOutput<'_>) -> Result<(), String> {
    let place = place(event.rest)?;
    let (flush, letters) = match event.rwbs {
        // `fill_rwbs` in the kernel's blktrace.c prints a leading F for PREFLUSH and a trailing
        // one for FUA.
        [b'F', letters @ ..] => (true, letters),
        letters => (letters.contains(&b'B') && place.is_none(), letters),
    };
    // REQ_PREFLUSH: the kernel flushes before the data.
    if flush {
        found.push(event.time_ns, event.device, RequestOp::Flush, 0, 0)?;
    }
    let op = match letters.first() {
        Some(b'R') => RequestOp::Read,
        Some(b'W') => RequestOp::Write,
        Some(b'D') => RequestOp::Discard,
        _ => return Ok(()),
    };
    match place {
        Some((offset, length)) => found.push(event.time_ns, event.device, op, offset, length),
        None => Ok(()),
    }
}

fn place(rest: &[u8]) -> Result<Option<(u64, u64)>, String> {
    let mut words = words(rest);
    let (Some(sector), Some(b"+"), Some(sectors)) = (words.next(), words.next(), words.next()) else {
        return Ok(None);
    };
    let offset = bytes(fields::number(sector, "sector")?)?;
    let length = bytes(fields::number(sectors, "number of sectors")?)?;
    Ok(Some((offset, length)))
}

fn event(line: &[u8]) -> Option<BlkparseEvent<'_>> {
    let (device, line) = word(line)?;
    let comma = memchr::memchr(b',', device)?;
    if !is_number(&device[..comma]) {
        return None;
    }
    let (device, line) = match &device[comma + 1..] {
        minor if is_number(minor) => (device, line),
        _ => return None,
    };
    let (cpu, line) = word(line)?;
    let (sequence, line) = word(line)?;
    let (time, line) = word(line)?;
    let (pid, line) = word(line)?;
    let (action, line) = word(line)?;
    let (rwbs, rest) = word(line)?;
    // All columns are checked: lines of other text may begin with two numbers.
    let counts = is_number(cpu) && is_number(sequence) && is_number(pid);
    let event = BlkparseEvent { device, time_ns: time_ns(time)?, action, rwbs, rest };
    counts.then_some(event)
}

/// Parses `<seconds>.<nine digits>`.
fn time_ns(time: &[u8]) -> Option<u64> {
    let (seconds, dot_fraction) = time.split_at_checked(time.len().checked_sub(10)?)?;
    let [b'.', fraction @ ..] = dot_fraction else { return None };
    let seconds = fields::number(seconds, "time").ok()?;
    let fraction = fields::number(fraction, "time").ok()?;
    seconds.checked_mul(S_NS)?.checked_add(fraction)
}

/// True for `CPU0 (sda):`, `Total (sda):`, or with `-s` `kjournald (697)`.
fn is_summary(line: &[u8]) -> bool {
    let line = line.trim_ascii_end();
    let total = line.starts_with(b"CPU") || line.starts_with(b"Total (");
    total && line.ends_with(b"):") || line.ends_with(b")") && memchr::memmem::find(line, b" (").is_some()
}

fn is_number(word: &[u8]) -> bool {
    !word.is_empty() && word.iter().all(u8::is_ascii_digit)
}

fn word(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let line = line.trim_ascii_start();
    let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
    (end > 0).then(|| line.split_at(end))
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty())
}
