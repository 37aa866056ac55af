//! `--workload`: generated requests instead of a trace; the same seed gives the same requests.
//!
//! ```text
//!   random, zipf, hot-cold ─► an open loop: random arrivals at a given rate          (OpenWorkload)
//!   sequential ─────────────► a closed loop: clients that wait for completions       (ClientSpec)
//!   two-streams, burst, group, depths ─► scenarios with published results            (scenario)
//! ```
//!
//! Syntax: `name:key=value,…`, with defaults. Never reads a clock: a generator is a function of its
//! seed.

use std::str::FromStr;

use simulator::{client::ClientSpec, request::RequestOp};

use super::keys::SpecKeys;
use crate::load::Locality;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Workload {
    Open(OpenWorkload),
    Sequential(SequentialWorkload),
    Scenario(Scenario),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scenario {
    TwoStreams { cache_bytes: u64 },
    Burst,
    Group,
    Depths,
}

/// Open-loop requests.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OpenWorkload {
    pub(crate) locality: Locality,
    /// Mean requests per second to each disk, with Poisson arrivals.
    pub(crate) iops: u64,
    pub(crate) length: u64,
    pub(crate) disks: usize,
    pub(crate) seconds: u64,
    /// Percentage of reads.
    pub(crate) read: u64,
    /// Used bytes of each disk: at least one request.
    pub(crate) span: u64,
}

/// Clients that read or write their disk from start to end.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SequentialWorkload {
    pub(crate) op: RequestOp,
    pub(crate) length: u64,
    pub(crate) depth: u32,
    pub(crate) think_ns: u64,
    pub(crate) disks: usize,
    pub(crate) seconds: u64,
    pub(crate) span: u64,
}

/// Bounds that keep sums within 64 bits.
const MAX_DISKS: u64 = 1000;
const MAX_IOPS: u64 = 100_000_000;
const MAX_SECONDS: u64 = 1_000_000;

/// Generators, then scenarios.
const GENERATORS: [&str; 8] =
    ["random", "zipf", "hot-cold", "sequential", "two-streams", "burst", "group", "depths"];

pub(crate) fn generators() -> String {
    GENERATORS.join(", ")
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let mut keys = SpecKeys::new(rest)?;
        let workload = match name {
            "random" => Self::Open(open(&mut keys, |_| Ok(Locality::Even))?),
            "zipf" => Self::Open(open(&mut keys, zipf)?),
            "hot-cold" => Self::Open(open(&mut keys, hot_cold)?),
            "sequential" => Self::Sequential(sequential(&mut keys)?),
            "two-streams" => {
                Self::Scenario(Scenario::TwoStreams { cache_bytes: keys.bytes("cache", 64 << 20)? })
            }
            "burst" => Self::Scenario(Scenario::Burst),
            "group" => Self::Scenario(Scenario::Group),
            "depths" => Self::Scenario(Scenario::Depths),
            _ => return Err(format!("{name:?} is no generator (there are {})", generators())),
        };
        // Rejects keys that this generator did not read.
        keys.finish(name)?;
        Ok(workload)
    }
}

fn open(
    keys: &mut SpecKeys<'_>,
    locality: impl Fn(&mut SpecKeys<'_>) -> Result<Locality, String>,
) -> Result<OpenWorkload, String> {
    let open = OpenWorkload {
        locality: locality(keys)?,
        iops: keys.number("iops", 1000, 1..=MAX_IOPS)?,
        length: keys.bytes("size", 4096)?,
        disks: keys.number("disks", 1, 1..=MAX_DISKS)? as usize,
        seconds: keys.number("seconds", 10, 1..=MAX_SECONDS)?,
        read: keys.number("read", 100, 0..=100)?,
        span: keys.bytes("span", 1 << 30)?,
    };
    holds_one(open.span, open.length).map(|()| open)
}

fn zipf(keys: &mut SpecKeys<'_>) -> Result<Locality, String> {
    let theta = keys.take("theta").map_or(Ok(0.99), |text| {
        let theta = text.parse::<f64>().ok().filter(|theta| (0.01..=10.0).contains(theta));
        theta.ok_or_else(|| format!("theta={text} is not a number from 0.01 to 10"))
    })?;
    Ok(Locality::Zipf(theta))
}

fn hot_cold(keys: &mut SpecKeys<'_>) -> Result<Locality, String> {
    Ok(Locality::Hot {
        requests: keys.number("requests", 80, 0..=100)? as u8,
        places: keys.number("space", 20, 1..=99)? as u8,
    })
}

fn sequential(keys: &mut SpecKeys<'_>) -> Result<SequentialWorkload, String> {
    let sequential = SequentialWorkload {
        op: match keys.take("op").unwrap_or("read") {
            "read" => RequestOp::Read,
            "write" => RequestOp::Write,
            other => return Err(format!("op={other} is neither read nor write")),
        },
        length: keys.bytes("size", 64 << 10)?,
        depth: keys.number("depth", 1, 1..=65_536)? as u32,
        think_ns: keys.take("think").map_or(Ok(0), |text| {
            let think = settings::duration(text).map_err(|rule| format!("think={text} {rule}"))?;
            Ok::<_, String>(u64::try_from(think.as_nanos()).unwrap_or(u64::MAX))
        })?,
        disks: keys.number("disks", 1, 1..=MAX_DISKS)? as usize,
        seconds: keys.number("seconds", 10, 1..=MAX_SECONDS)?,
        span: keys.bytes("span", 1 << 30)?,
    };
    holds_one(sequential.span, sequential.length).map(|()| sequential)
}

fn holds_one(span: u64, length: u64) -> Result<(), String> {
    if span < length {
        return Err(format!("span={span} is less than one request of {length} bytes"));
    }
    Ok(())
}

pub(crate) fn names(disks: usize) -> Vec<String> {
    (1..=disks).map(|number| format!("disk{number}")).collect()
}

impl SequentialWorkload {
    pub(crate) fn clients(&self) -> Vec<ClientSpec> {
        let Self { op, length, depth, think_ns, disks, seconds, span } = *self;
        let client = |disk| ClientSpec {
            disk,
            op,
            length,
            region: 0..span,
            random: None,
            depth,
            think_ns,
            count: None,
            time: 0..seconds * 1_000_000_000,
        };
        (0..disks).map(client).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_workload_is_rejected() {
        let error = |text: &str| text.parse::<Workload>().unwrap_err();
        assert!(error("rnd").starts_with("\"rnd\" is no generator (there are random, "));
        assert_eq!(error("random:iops=0"), "iops=0 is not between 1 and 100000000");
        assert!(error("random:depth=1").starts_with("\"depth\" is no key of random (there are "));
        assert_eq!(error("random:iops=1,iops=2"), "iops is given twice (remove one)");
        assert_eq!(error("random:fast"), "\"fast\" is not of the form key=value");
        assert_eq!(error("random:size=1M,span=4K"), "span=4096 is less than one request of 1048576 bytes");
        assert!(error("burst:x=1").starts_with("\"x\" is no key of burst (there are "));
        assert!(error("zipf:theta=-1").starts_with("theta=-1 is not a number"));
        assert!(error("sequential:op=erase").starts_with("op=erase is neither"));
        assert!(error("sequential:think=5").starts_with("think=5 has no unit (write 5s"));
    }
}
