//! `--workload`: requests of a generator instead of a trace's; the same seed gives the same.
//!
//! ```text
//!   random, zipf, hot-cold ─► requests that come by themselves, at random instants of a given rate   (Open)
//!   sequential ─────────────► clients that wait for their answers                                    (ClientSpec)
//!   two-streams, burst, group, depths ─► what the documents that weir grew from tell of             (scenarios)
//! ```
//!
//! Written as `name:key=value,…`; what is left out has a default. Never reads a clock: a generator is a function of its seed.

use std::str::FromStr;

use super::{client::ClientSpec, drive::Source, request::Op};
use crate::trace::{DiskId, Record};

/// What is generated.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Workload {
    Open(Open),
    Sequential(Sequential),
    /// What is told with its own limits and devices.
    Story(Tale),
}

/// What the documents that weir grew from tell of: see [`scenario`](super::scenario).
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tale {
    /// The two streams of io-throttle v16, in its eight cases.
    TwoStreams { cache_bytes: u64 },
    /// A disk of 100 IOPS that may burst to 2000 for a minute.
    Burst,
    /// Three disks that share a limit, two that share another, and one by itself.
    Group,
    /// Two clients that share a limit, one with a request at a time, the other with 64.
    Depths,
}

/// Requests that come by themselves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Open {
    pub(crate) places: Places,
    /// Requests a second to each disk, on average: they come at random instants, each independent of the others (Poisson).
    pub(crate) iops: u64,
    /// Bytes of each; not 0.
    pub(crate) length: u64,
    pub(crate) disks: usize,
    pub(crate) seconds: u64,
    /// Of a hundred, how many read.
    pub(crate) read: u64,
    /// Bytes of each disk that are used: at least one request.
    pub(crate) span: u64,
}

/// Where they go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Places {
    /// Anywhere alike.
    Random,
    /// The k-th most popular place as often as 1/k^theta.
    Zipf { theta: f64 },
    /// So many of a hundred requests to so many hundredths of the space.
    HotCold { requests: u64, space: u64 },
}

/// Clients that go from a disk's beginning to its end, each with a disk of its own.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sequential {
    pub(crate) op: Op,
    pub(crate) length: u64,
    pub(crate) depth: u32,
    pub(crate) think_ns: u64,
    pub(crate) disks: usize,
    pub(crate) seconds: u64,
    pub(crate) span: u64,
}

/// Disks of a generator at most, and requests a second, and so on: what keeps a sum within 64 bits.
const MOST_DISKS: u64 = 1000;
const MOST_IOPS: u64 = 100_000_000;
const MOST_SECONDS: u64 = 1_000_000;
const MOST_BYTES: u64 = 1 << 50;

/// What there is, as it is written: generators, then stories.
const GENERATORS: [&str; 8] =
    ["random", "zipf", "hot-cold", "sequential", "two-streams", "burst", "group", "depths"];

/// All names, for people.
pub(crate) fn generators() -> String {
    GENERATORS.join(", ")
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let mut keys = Keys::new(rest)?;
        let workload = match name {
            "random" => Self::Open(open(&mut keys, |_| Ok(Places::Random))?),
            "zipf" => Self::Open(open(&mut keys, zipf)?),
            "hot-cold" => Self::Open(open(&mut keys, hot_cold)?),
            "sequential" => Self::Sequential(sequential(&mut keys)?),
            "two-streams" => Self::Story(Tale::TwoStreams { cache_bytes: keys.bytes("cache", 64 << 20)? }),
            "burst" => Self::Story(Tale::Burst),
            "group" => Self::Story(Tale::Group),
            "depths" => Self::Story(Tale::Depths),
            _ => return Err(format!("{name:?} is no generator (there are {})", generators())),
        };
        keys.finish(name)?;
        Ok(workload)
    }
}

fn open(
    keys: &mut Keys<'_>,
    places: impl Fn(&mut Keys<'_>) -> Result<Places, String>,
) -> Result<Open, String> {
    let open = Open {
        places: places(keys)?,
        iops: keys.number("iops", 1000, 1..=MOST_IOPS)?,
        length: keys.bytes("size", 4096)?,
        disks: keys.number("disks", 1, 1..=MOST_DISKS)? as usize,
        seconds: keys.number("seconds", 10, 1..=MOST_SECONDS)?,
        read: keys.number("read", 100, 0..=100)?,
        span: keys.bytes("span", 1 << 30)?,
    };
    if open.span < open.length {
        return Err(format!("span={} is less than one request of {} bytes", open.span, open.length));
    }
    Ok(open)
}

fn zipf(keys: &mut Keys<'_>) -> Result<Places, String> {
    let theta = keys.take("theta").map_or(Ok(0.99), |text| {
        let theta = text.parse::<f64>().ok().filter(|theta| (0.01..=10.0).contains(theta));
        theta.ok_or_else(|| format!("theta={text} is not a number from 0.01 to 10"))
    })?;
    Ok(Places::Zipf { theta })
}

fn hot_cold(keys: &mut Keys<'_>) -> Result<Places, String> {
    Ok(Places::HotCold {
        requests: keys.number("requests", 80, 0..=100)?,
        space: keys.number("space", 20, 1..=99)?,
    })
}

fn sequential(keys: &mut Keys<'_>) -> Result<Sequential, String> {
    let sequential = Sequential {
        op: match keys.take("op").unwrap_or("read") {
            "read" => Op::Read,
            "write" => Op::Write,
            other => return Err(format!("op={other} is neither read nor write")),
        },
        length: keys.bytes("size", 64 << 10)?,
        depth: keys.number("depth", 1, 1..=65_536)? as u32,
        think_ns: keys.take("think").map_or(Ok(0), |text| {
            let think = settings::duration(text).map_err(|rule| format!("think={text} {rule}"))?;
            Ok::<_, String>(u64::try_from(think.as_nanos()).unwrap_or(u64::MAX))
        })?,
        disks: keys.number("disks", 1, 1..=MOST_DISKS)? as usize,
        seconds: keys.number("seconds", 10, 1..=MOST_SECONDS)?,
        span: keys.bytes("span", 1 << 30)?,
    };
    if sequential.span < sequential.length {
        return Err(format!(
            "span={} is less than one request of {} bytes",
            sequential.span, sequential.length
        ));
    }
    Ok(sequential)
}

/// `key=value,…` that are yet to be asked for.
struct Keys<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Keys<'a> {
    fn new(text: &'a str) -> Result<Self, String> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| format!("{pair:?} is not of the form key=value"))?;
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(format!("{key} is given twice (remove one)"));
            }
            pairs.push((key, value));
        }
        Ok(Self(pairs))
    }

    fn take(&mut self, key: &str) -> Option<&'a str> {
        let at = self.0.iter().position(|(known, _)| *known == key)?;
        Some(self.0.remove(at).1)
    }

    fn number(
        &mut self,
        key: &str,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<u64, String> {
        let Some(text) = self.take(key) else { return Ok(default) };
        let number = settings::count(text).map_err(|rule| format!("{key}={text} {rule}"))?;
        if !range.contains(&number) {
            return Err(format!("{key}={text} is not between {} and {}", range.start(), range.end()));
        }
        Ok(number)
    }

    fn bytes(&mut self, key: &str, default: u64) -> Result<u64, String> {
        let Some(text) = self.take(key) else { return Ok(default) };
        let bytes = settings::size(text).map_err(|rule| format!("{key}={text} {rule}"))?;
        if bytes == 0 || bytes > MOST_BYTES {
            return Err(format!("{key}={text} is not between 1 and 1024T"));
        }
        Ok(bytes)
    }

    fn finish(self, name: &str) -> Result<(), String> {
        match self.0.first() {
            Some((key, _)) => Err(format!("{key:?} is nothing that {name} knows")),
            None => Ok(()),
        }
    }
}

/// The names of so many disks.
pub(crate) fn names(disks: usize) -> Vec<String> {
    (1..=disks).map(|number| format!("disk{number}")).collect()
}

impl Sequential {
    /// Its clients, by the number of their disk.
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

/// A generator at work.
#[derive(Debug)]
pub(crate) struct Generator {
    open: Open,
    names: Vec<String>,
    random: fastrand::Rng,
    zipf: Option<Zipf>,
    /// When the last request came, in nanoseconds, and how many there have been.
    at: f64,
    count: u64,
}

impl Generator {
    pub(crate) fn new(open: &Open, seed: u64) -> Self {
        let blocks = open.span / open.length;
        let zipf = match open.places {
            Places::Zipf { theta } => Some(Zipf::new(blocks, theta)),
            Places::Random | Places::HotCold { .. } => None,
        };
        let names = names(open.disks);
        Self { names, random: fastrand::Rng::with_seed(seed), zipf, at: 0.0, count: 0, open: open.clone() }
    }

    /// Which of the blocks of a disk.
    fn block(&mut self) -> u64 {
        let (random, blocks) = (&mut self.random, self.open.span / self.open.length);
        match (self.open.places, &self.zipf) {
            (_, Some(zipf)) => scattered(zipf.rank(random) - 1, blocks),
            (Places::HotCold { requests, space }, _) => {
                let hot = (u128::from(blocks) * u128::from(space) / 100) as u64;
                let is_hot = random.u64(0..100) < requests;
                match if is_hot { 0..hot } else { hot..blocks } {
                    range if range.is_empty() => random.u64(0..blocks),
                    range => random.u64(range),
                }
            }
            _ => random.u64(0..blocks),
        }
    }
}

impl Source for Generator {
    fn fill(&mut self, records: &mut Vec<Record>, count: usize) -> anyhow::Result<()> {
        let Open { iops, length, disks, seconds, read, .. } = self.open;
        // Those of all disks together are as random as those of each (Kingman, *Poisson Processes*, 1993, section 2.2).
        let mean_ns = 1e9 / (iops as f64 * disks as f64);
        for _ in 0..count {
            // Above 0, so that the logarithm is finite.
            self.at -= (1.0 - self.random.f64()).ln() * mean_ns;
            if self.at >= seconds as f64 * 1e9 {
                break;
            }
            self.count += 1;
            let offset = self.block() * length;
            records.push(Record {
                time_ns: self.at as u64,
                offset,
                length,
                line: self.count,
                disk: DiskId(self.random.usize(0..disks) as u32),
                file: 0,
                op: if self.random.u64(0..100) < read { Op::Read } else { Op::Write },
            });
        }
        Ok(())
    }

    fn disks(&self) -> &[String] {
        &self.names
    }

    fn place(&self, record: &Record) -> String {
        format!("the workload's request {}", record.line)
    }
}

/// The place of a rank, so that popular places are not beside each other: a step that meets every block once.
fn scattered(rank: u64, blocks: u64) -> u64 {
    // The golden section of the blocks, made coprime with them.
    let mut step = ((blocks as f64 * 0.618) as u64).max(1);
    while gcd(step, blocks) != 1 {
        step += 1;
    }
    (u128::from(rank) * u128::from(step) % u128::from(blocks)) as u64
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// Ranks from 1 to n, rank k as often as 1/k^theta: rejection-inversion (Hörmann and Derflinger, *Rejection-inversion to generate variates from
/// monotone discrete distributions*, ACM TOMACS 6(3), 1996), which needs no table.
#[derive(Clone, Debug)]
struct Zipf {
    theta: f64,
    most: f64,
    /// The integral of 1/x^theta, up to 1.5 less what rank 1 has, and up to n + 0.5.
    from: f64,
    to: f64,
    near: f64,
}

impl Zipf {
    fn new(ranks: u64, theta: f64) -> Self {
        let mut zipf = Self { theta, most: ranks as f64, from: 0.0, to: 0.0, near: 0.0 };
        zipf.from = zipf.integral(1.5) - 1.0;
        zipf.to = zipf.integral(zipf.most + 0.5);
        zipf.near = 2.0 - zipf.inverse(zipf.integral(2.5) - 2.0_f64.powf(-theta));
        zipf
    }

    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let power = (1.0 - self.theta) * log;
        // Exact also where theta is 1 or nearly so.
        if power.abs() > 1e-8 { power.exp_m1() / power * log } else { log * (1.0 + power / 2.0) }
    }

    fn inverse(&self, area: f64) -> f64 {
        let part = (area * (1.0 - self.theta)).max(-1.0);
        if part.abs() > 1e-8 { (part.ln_1p() / part * area).exp() } else { (area * (1.0 - part / 2.0)).exp() }
    }

    fn rank(&self, random: &mut fastrand::Rng) -> u64 {
        loop {
            let area = self.to + random.f64() * (self.from - self.to);
            let x = self.inverse(area);
            let rank = x.round().clamp(1.0, self.most);
            if rank - x <= self.near || area >= self.integral(rank + 0.5) - rank.powf(-self.theta) {
                return rank as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generated(text: &str, seed: u64) -> Vec<Record> {
        let Workload::Open(open) = text.parse().unwrap() else { panic!("{text} is not open") };
        let mut generator = Generator::new(&open, seed);
        let mut records = Vec::new();
        generator.fill(&mut records, usize::MAX).unwrap();
        records
    }

    #[test]
    fn a_seed_gives_the_same_requests_again() {
        let text = "random:iops=5000,size=4K,disks=4,seconds=2,read=70";
        let records = generated(text, 7);
        assert_eq!(records, generated(text, 7));
        assert_ne!(records, generated(text, 8));
        let near = |value: usize, expected: f64| {
            assert!((value as f64 / expected - 1.0).abs() < 0.03, "{value} instead of {expected}");
        };
        near(records.len(), 40_000.0);
        near(records.iter().filter(|record| record.op == Op::Read).count(), 28_000.0);
        near(records.iter().filter(|record| record.disk == DiskId(3)).count(), 10_000.0);
        near(records.iter().filter(|record| record.time_ns < 1_000_000_000).count(), 20_000.0);
        assert!(records.is_sorted_by_key(|record| record.time_ns));
        assert!(
            records
                .iter()
                .all(|record| record.offset + record.length <= 1 << 30 && record.offset.is_multiple_of(4096))
        );
    }

    #[test]
    fn popular_places_are_as_popular_as_zipf_says() {
        let zipf = Zipf::new(1000, 0.99);
        let mut random = fastrand::Rng::with_seed(1);
        let mut counts = vec![0_u32; 1001];
        (0..1_000_000).for_each(|_| counts[zipf.rank(&mut random) as usize] += 1);
        let weight = |rank: usize| (rank as f64).powf(-0.99);
        let sum: f64 = (1..=1000).map(weight).sum();
        for rank in [1, 2, 3, 10, 100, 1000] {
            let expected = 1e6 * weight(rank) / sum;
            let off = (f64::from(counts[rank]) - expected).abs();
            assert!(off < 5.0 * expected.sqrt(), "rank {rank}: {} instead of {expected}", counts[rank]);
        }
    }

    #[test]
    fn ranks_have_a_place_each() {
        for blocks in [1, 2, 10, 1000, 262_144] {
            let mut seen = vec![false; blocks as usize];
            (0..blocks).for_each(|rank| seen[scattered(rank, blocks) as usize] = true);
            assert!(seen.iter().all(|seen| *seen), "{blocks}");
        }
    }

    #[test]
    fn hot_places_get_their_part() {
        let records = generated("hot-cold:iops=10000,seconds=2,requests=90,space=10,span=1M", 1);
        let hot = records.iter().filter(|record| record.offset < (1 << 20) / 10).count();
        assert!((hot as f64 / records.len() as f64 - 0.9).abs() < 0.01, "{hot} of {}", records.len());
    }

    #[test]
    fn what_is_no_workload_says_why() {
        let error = |text: &str| text.parse::<Workload>().unwrap_err();
        assert!(error("rnd").starts_with("\"rnd\" is no generator (there are random, "));
        assert_eq!(error("random:iops=0"), "iops=0 is not between 1 and 100000000");
        assert_eq!(error("random:depth=1"), "\"depth\" is nothing that random knows");
        assert_eq!(error("random:iops=1,iops=2"), "iops is given twice (remove one)");
        assert_eq!(error("random:fast"), "\"fast\" is not of the form key=value");
        assert_eq!(error("random:size=1M,span=4K"), "span=4096 is less than one request of 1048576 bytes");
        assert_eq!(error("burst:x=1"), "\"x\" is nothing that burst knows");
        assert!(error("zipf:theta=-1").starts_with("theta=-1 is not a number"));
        assert!(error("sequential:op=erase").starts_with("op=erase is neither"));
        assert!(error("sequential:think=5").starts_with("think=5 is not a duration"));
    }
}
