//! A storage with injected failures: by kind, range, count and probability.
//!
//! `kind=read,offset=1M-2M,error=EIO,count=3` fails the first three reads that touch the second
//! mebibyte. Of several rules, the first that applies decides. A failed request does not reach the
//! storage below. Random decisions use the rule's own seed, so the same requests in the same order
//! fail in the same way.

use std::{
    fmt,
    ops::Range,
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use nix::errno::Errno;

use super::{
    InvalidOption,
    options::{OptionPair, pairs},
    spec::parse_size,
};
use reactor::error::{Error, Result};

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageRequestKind {
    /// Reads.
    Read,
    /// Writes of data.
    Write,
    /// Writes of zeroes.
    Zero,
    /// Discards.
    Discard,
    /// Flushes, which have no range: a rule with a range does not apply to them.
    Flush,
    /// Queries of the allocation status.
    Status,
}

impl StorageRequestKind {
    const ALL: [Self; 6] = [Self::Read, Self::Write, Self::Zero, Self::Discard, Self::Flush, Self::Status];

    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Zero => "zero",
            Self::Discard => "discard",
            Self::Flush => "flush",
            Self::Status => "status",
        }
    }
}

/// A rule that injects failures.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultRule {
    /// Kind of requests; `None` is any.
    pub kind: Option<StorageRequestKind>,
    /// Byte range: the rule applies to requests that overlap it; `None` is the whole disk.
    pub range: Option<Range<u64>>,
    /// Error of the failed requests.
    pub error: Error,
    /// Number of failures before the rule is used up; `None` is unlimited.
    pub count: Option<u64>,
    /// Probability of each failure, above 0 and up to 1.
    pub probability: f64,
    /// Seed of the random decisions.
    pub seed: u64,
}

impl FromStr for FaultRule {
    type Err = InvalidOption;
    /// Parses `kind=read,offset=1M-2M,error=EIO,count=3,probability=0.1,seed=1`, each optional. The
    /// range's end is exclusive. Default error: EIO; default probability: 1.
    fn from_str(text: &str) -> std::result::Result<Self, InvalidOption> {
        let mut rule =
            Self { kind: None, range: None, error: Error::IO, count: None, probability: 1.0, seed: 0 };
        for pair in pairs("fault", text)? {
            match pair.key {
                "kind" => rule.kind = parse_kind(&pair)?,
                "offset" => rule.range = Some(parse_range(&pair)?),
                "error" => rule.error = parse_error(&pair)?,
                "count" => rule.count = Some(pair.number(1)?),
                "seed" => rule.seed = pair.number(0)?,
                "probability" => {
                    rule.probability = match pair.value.parse::<f64>() {
                        Ok(probability) if probability > 0.0 && probability <= 1.0 => probability,
                        _ => return Err(pair.error("is not a number above 0 and up to 1")),
                    }
                }
                _ => return Err(pair.unknown("kind, offset, error, count, probability, seed")),
            }
        }
        Ok(rule)
    }
}

/// Formats the rule so that [`FromStr`] reads it.
impl fmt::Display for FaultRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, range, error, count, probability, seed } = self;
        write!(f, "kind={}", kind.map_or("any", StorageRequestKind::name))?;
        match range {
            Some(Range { start, end: u64::MAX }) => write!(f, ",offset={start}-")?,
            Some(Range { start, end }) => write!(f, ",offset={start}-{end}")?,
            None => {}
        }
        write!(f, ",error={}", error.errno())?;
        if let Some(count) = count {
            write!(f, ",count={count}")?;
        }
        write!(f, ",probability={probability},seed={seed}")
    }
}

fn parse_kind(pair: &OptionPair<'_>) -> std::result::Result<Option<StorageRequestKind>, InvalidOption> {
    let kind = StorageRequestKind::ALL.into_iter().find(|kind| kind.name() == pair.value);
    match pair.value {
        "any" => Ok(None),
        _ if kind.is_some() => Ok(kind),
        _ => Err(pair.error("is none of any, read, write, zero, discard, flush and status")),
    }
}

fn parse_range(pair: &OptionPair<'_>) -> std::result::Result<Range<u64>, InvalidOption> {
    let rule = "is not a range of bytes (1M-2M, or 1M- up to the end)";
    let (start, end) = pair.value.split_once('-').ok_or_else(|| pair.error(rule))?;
    let start = parse_size(start).map_err(|_| pair.error(rule))?;
    let end = if end.is_empty() { u64::MAX } else { parse_size(end).map_err(|_| pair.error(rule))? };
    if start >= end { Err(pair.error("is an empty range")) } else { Ok(start..end) }
}

/// Parses the symbol (`EIO`) or number of an error.
fn parse_error(pair: &OptionPair<'_>) -> std::result::Result<Error, InvalidOption> {
    const LARGEST: i32 = 133; // EHWPOISON, the last of Linux's asm-generic/errno.h
    let is_known = |number: &i32| Errno::from_raw(*number) != Errno::UnknownErrno;
    let number = match pair.value.parse() {
        Ok(number) => Some(number).filter(|number| (1..=LARGEST).contains(number)).filter(is_known),
        // Errno's Debug form is the symbol.
        Err(_) => (1..=LARGEST)
            .filter(is_known)
            .find(|&number| format!("{:?}", Errno::from_raw(number)) == pair.value),
    };
    number.map(Error::from_errno).ok_or_else(|| pair.error("is not an error (EIO, ENOSPC, …, or its number)"))
}

#[derive(Debug)]
struct ArmedRule {
    rule: FaultRule,
    /// Number of requests that the rule could have failed so far: each has its own random decision.
    matches: AtomicU64,
    remaining: AtomicU64,
}

impl ArmedRule {
    fn triggers(&self, kind: StorageRequestKind, range: Option<&Range<u64>>) -> bool {
        if self.rule.kind.is_some_and(|rule_kind| rule_kind != kind) {
            return false;
        }
        if let Some(rule_range) = &self.rule.range
            && !range.is_some_and(|range| range.start < rule_range.end && rule_range.start < range.end)
        {
            return false;
        }
        // Counted before the decision, so that the n-th request has the same result in every run.
        let match_index = self.matches.fetch_add(1, Relaxed);
        if self.rule.probability < 1.0 {
            // Multiplied by an odd constant (2⁶⁴ over the golden ratio), so that the sequences of
            // neighbouring seeds do not coincide.
            let seed = self.rule.seed.wrapping_add(match_index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            if fastrand::Rng::with_seed(seed).f64() >= self.rule.probability {
                return false;
            }
        }
        self.rule.count.is_none()
            || self.remaining.fetch_update(Relaxed, Relaxed, |remaining| remaining.checked_sub(1)).is_ok()
    }
}

/// The rules of a storage, in order.
#[derive(Debug)]
pub(super) struct FaultInjector(Vec<ArmedRule>);

impl FaultInjector {
    pub(super) fn new(rules: Vec<FaultRule>) -> Self {
        let arm = |rule: FaultRule| ArmedRule {
            matches: AtomicU64::new(0),
            remaining: AtomicU64::new(rule.count.unwrap_or(0)),
            rule,
        };
        Self(rules.into_iter().map(arm).collect())
    }

    /// Applies the first rule that matches a request; returns its error.
    pub(super) fn check(&self, kind: StorageRequestKind, range: Option<&Range<u64>>) -> Result<()> {
        let triggered = self.0.iter().find(|armed| armed.triggers(kind, range));
        triggered.map_or(Ok(()), |armed| Err(armed.rule.error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Durability, Storage};
    use reactor::{buffer::IoBuffer, sim};

    fn faulty(rules: &[&str]) -> Storage {
        let rules = rules.iter().map(|rule| rule.parse().expect("valid")).collect();
        Storage::memory(4 << 20).with_faults(rules)
    }

    async fn read(fault: &Storage, offset: u64) -> Result<()> {
        fault.read(offset, IoBuffer::new(4096)).await.map(drop)
    }

    #[test]
    fn rule_fails_only_matching_requests() {
        sim::run(1, async {
            let fault = faulty(&["kind=read,offset=1M-2M,error=ENOSPC,count=2"]);
            assert_eq!(read(&fault, 0).await, Ok(()));
            assert_eq!(read(&fault, 2 << 20).await, Ok(()), "the end is not part of the range");
            assert_eq!(fault.discard(1 << 20, 1).await, Ok(()), "another kind");
            assert_eq!(
                read(&fault, (1 << 20) - 1).await,
                Err(Error::NO_SPACE),
                "overlaps by all but one byte"
            );
            assert_eq!(read(&fault, 1 << 20).await, Err(Error::NO_SPACE));
            assert_eq!(read(&fault, 1 << 20).await, Ok(()), "used up");
        });
    }

    #[test]
    fn the_first_rule_that_applies_decides() {
        sim::run(1, async {
            let fault = faulty(&["kind=flush,error=28,count=1", "error=EPERM"]);
            assert_eq!(fault.flush().await, Err(Error::NO_SPACE));
            assert_eq!(fault.flush().await, Err(Error::NOT_PERMITTED));
        });
    }

    #[test]
    fn a_failed_write_does_not_reach_the_storage() {
        sim::run(1, async {
            let fault = faulty(&["kind=write"]);
            let data = IoBuffer::copy_of(&[1; 512]).into();
            assert_eq!(fault.write(0, data, Durability::Cached).await, Err(Error::IO));
            let read = fault.read(0, IoBuffer::new(512)).await.expect("reads work");
            assert!(read.iter().all(|&byte| byte == 0));
        });
    }

    #[test]
    fn chances_come_from_the_seed() {
        let outcomes = |seed: u64| {
            sim::run(1, async move {
                let fault = faulty(&[&format!("probability=0.1,seed={seed}")]);
                let mut outcomes = Vec::new();
                for _ in 0..5000 {
                    outcomes.push(read(&fault, 0).await.is_err());
                }
                outcomes
            })
        };
        assert_eq!(outcomes(1), outcomes(1));
        assert_ne!(outcomes(1), outcomes(2));
        let failed = outcomes(1).into_iter().filter(|&failed| failed).count();
        assert!((400..600).contains(&failed), "{failed} of 5000 at 0.1");
    }

    #[test]
    fn errors_name_key_value_and_rule() {
        for (text, message) in [
            ("kind=reed", "fault: kind=reed: is none of any, read, write, zero, discard, flush and status"),
            ("offset=5", "fault: offset=5: is not a range of bytes (1M-2M, or 1M- up to the end)"),
            ("offset=2M-1M", "fault: offset=2M-1M: is an empty range"),
            ("error=EBAD1", "fault: error=EBAD1: is not an error (EIO, ENOSPC, …, or its number)"),
            ("error=0", "fault: error=0: is not an error (EIO, ENOSPC, …, or its number)"),
            ("probability=NaN", "fault: probability=NaN: is not a number above 0 and up to 1"),
            ("count=0", "fault: count=0: is not a whole number of at least 1"),
        ] {
            assert_eq!(text.parse::<FaultRule>().expect_err(text).to_string(), message);
        }
    }
}
