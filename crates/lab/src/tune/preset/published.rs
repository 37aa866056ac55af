//! The published measurements: their tables and conclusions.
//!
//! | Preset | Source |
//! | --- | --- |
//! | `cache-modes` | "IO throttling in QEMU & Cache influence" (SUSE, 2017): random requests by cache mode; and "IO performance tuning" (Shaken Fist): dd and hdparm by cache mode |
//! | `cluster-size` | "IO performance tuning": dd and hdparm by cluster size, with writethrough |
//! | `l2-cache` | "IO throttling in QEMU & Cache influence": an L2 cache for all of the disk, and for 1/128; it has charts without figures |
//! | `pcache` | "I/O Prefetch Cache as QEMU Block Filter Driver" (KVM Forum 2016): qemu-img bench, and the guest's random reads |
//!
//! Figures are ratios to a row of the same table, because machines differ. dd wrote 1 GiB at a time
//! and flushed: here that is a slice of 1 MiB writes with a flush at its end.

use policy::prefetch::Mode;
use storage::CacheMode;

use super::{Claim, Column, Figure, Published, Relation, Row};
use crate::tune::matrix::{CLUSTERS, Configuration, L2Share, Operation, Order, Pattern, Qcow2};

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;

fn pattern(order: Order, operation: Operation, block_bytes: u64, depth: u32) -> Pattern {
    Pattern { order, operation, block_bytes, depth }
}

fn qcow2(cache: CacheMode, cluster_bytes: u64, l2: L2Share, prefetch: bool) -> Configuration {
    let prefetch = if prefetch { Mode::On } else { Mode::Off };
    Configuration { cache, qcow2: Some(Qcow2 { cluster_bytes, l2 }), prefetch }
}

fn row(name: &str, configuration: Configuration, published: &[f64]) -> Row {
    Row { name: name.to_owned(), configuration, published: published.to_vec() }
}

/// With clusters of 64 KiB and the whole mapping cached.
fn mode(cache: CacheMode, published: &[f64]) -> Row {
    row(cache.name(), qcow2(cache, 64 * K, L2Share::Full, false), published)
}

fn claim(text: &'static str, pairs: &[(&str, &str)], column: usize, relation: Relation) -> Claim {
    let pairs = pairs.iter().map(|&(one, other)| (one.to_owned(), other.to_owned())).collect();
    Claim { text, pairs, column, relation }
}

/// Reads of modes with a page cache were served from it.
pub(super) fn random_by_cache_mode() -> Published {
    Published {
        title: "Cache modes: random requests of 4 KiB",
        columns: random_columns(Operation::Reread),
        rows: vec![
            mode(CacheMode::Writeback, &[14_286.67, 139.76]),
            mode(CacheMode::Writethrough, &[2146.72, 59.93]),
            mode(CacheMode::None, &[104.72, 104.33]),
            mode(CacheMode::Directsync, &[107.61, 51.58]),
        ],
        reference: "none",
        claims: vec![
            claim(
                "read performance is better with the page cache",
                &[("writeback", "none"), ("writethrough", "directsync")],
                0,
                Relation::Higher,
            ),
            claim(
                "guaranteed data integrity means that write performance is not good",
                &[("writethrough", "writeback"), ("directsync", "none")],
                1,
                Relation::Lower,
            ),
        ],
    }
}

fn random_columns(read: Operation) -> Vec<Column> {
    let column =
        |name, operation| Column::new(name, pattern(Order::Random, operation, 4 * K, 1), Figure::Median);
    vec![column("random read", read), column("random write", Operation::Write)]
}

fn dd_and_hdparm() -> Vec<Column> {
    let sequential = |operation| pattern(Order::Sequential, operation, M, 1);
    vec![
        Column::new("first write", sequential(Operation::FirstWrite), Figure::Median)
            .of_raw(sequential(Operation::Write)),
        Column::new("write", sequential(Operation::Write), Figure::FastestThree),
        Column::new("read", sequential(Operation::Read), Figure::FastestThree),
    ]
}

/// Only one figure was published for its writes: a raw disk has no first writes.
fn raw() -> Row {
    row(
        "raw",
        Configuration { cache: CacheMode::None, qcow2: None, prefetch: Mode::Off },
        &[1229.0, 1229.0, 2572.0],
    )
}

pub(super) fn streams_by_cache_mode() -> Published {
    Published {
        title: "Cache modes: sequential requests beside the raw disk",
        columns: dd_and_hdparm(),
        rows: vec![
            raw(),
            mode(CacheMode::None, &[958.0, 987.0, 849.0]),
            mode(CacheMode::Writethrough, &[499.0, 656.0, 1352.0]),
            mode(CacheMode::Writeback, &[606.0, 677.0, 1589.12]),
            mode(CacheMode::Directsync, &[626.0, 823.0, 1038.69]),
            mode(CacheMode::Unsafe, &[857.0, 1012.0, 1272.0]),
        ],
        reference: "raw",
        claims: vec![
            claim(
                "none has slower reads",
                &[("none", "writethrough"), ("none", "writeback")],
                2,
                Relation::Lower,
            ),
            claim(
                "none has much better writes",
                &[("none", "writethrough"), ("none", "writeback")],
                1,
                Relation::Higher,
            ),
        ],
    }
}

pub(super) fn streams_by_cluster_size() -> Published {
    let published = [
        [611.0, 655.0, 1283.0],
        [631.0, 654.0, 2742.0],
        [630.0, 651.0, 3378.0],
        [630.0, 643.0, 2575.0],
        [632.0, 631.0, 2631.0],
        [648.0, 704.0, 2402.0],
    ];
    let names = ["64K", "128K", "256K", "512K", "1M", "2M"];
    let rows = CLUSTERS.iter().zip(names).zip(published).map(|((&cluster_bytes, name), published)| {
        row(name, qcow2(CacheMode::Writethrough, cluster_bytes, L2Share::Full, false), &published)
    });
    Published {
        title: "Cluster sizes: sequential requests beside the raw disk",
        columns: dd_and_hdparm(),
        rows: std::iter::once(raw()).chain(rows).collect(),
        reference: "raw",
        claims: vec![
            claim("clusters of 2 MiB improve reads", &[("2M", "64K")], 2, Relation::Higher),
            claim("clusters of 2 MiB improve writes", &[("2M", "64K")], 1, Relation::Higher),
        ],
    }
}

/// With O_DIRECT, and an L2 cache for the whole disk and for 1/128 of it.
pub(super) fn random_by_l2_cache() -> Published {
    let of = |name: &str, l2| row(name, qcow2(CacheMode::None, 64 * K, l2, false), &[]);
    Published {
        title: "L2 cache: random requests of 4 KiB past the page cache",
        columns: random_columns(Operation::Read),
        rows: vec![of("full", L2Share::Full), of("1/128", L2Share::Part(128))],
        reference: "full",
        claims: vec![
            claim(
                "a cache for 1/128 of the disk makes reads slower",
                &[("1/128", "full")],
                0,
                Relation::Lower,
            ),
            claim(
                "a cache for 1/128 of the disk makes writes slower",
                &[("1/128", "full")],
                1,
                Relation::Lower,
            ),
        ],
    }
}

/// Sequential reads in operations per second (262,144 divided by the published seconds); and a
/// guest's random reads, published as a gain only.
pub(super) fn reads_by_prefetch() -> Published {
    let of = |name: &str, prefetch, values: &[f64]| {
        row(name, qcow2(CacheMode::None, 64 * K, L2Share::Full, prefetch), values)
    };
    let sequential = |depth| pattern(Order::Sequential, Operation::Read, 4 * K, depth);
    let random = |depth| pattern(Order::Random, Operation::Read, 4 * K, depth);
    let rate = |seconds: f64| 262_144.0 / seconds;
    Published {
        title: "Prefetch: reads of 4 KiB past the page cache",
        columns: vec![
            Column::new("sequential ×1", sequential(1), Figure::Median),
            Column::new("sequential ×8", sequential(8), Figure::Median),
            Column::new("sequential ×64", sequential(64), Figure::Median),
            Column::new("random ×1", random(1), Figure::Median),
            Column::new("random ×32", random(32), Figure::Median),
        ],
        rows: vec![
            of("without", false, &[rate(19.594), rate(5.933), rate(4.659), 1.0, 1.0]),
            of("with", true, &[rate(4.378), rate(4.356), rate(4.204), 1.030, 1.001]),
        ],
        reference: "without",
        claims: vec![
            claim(
                "one sequential reader is several times as fast",
                &[("with", "without")],
                0,
                Relation::Higher,
            ),
            claim("with 8 in flight it still gains", &[("with", "without")], 1, Relation::Higher),
            claim("with 64 in flight it does no harm", &[("with", "without")], 2, Relation::NotLower),
            claim(
                "random reads are not made slower, one at a time",
                &[("with", "without")],
                3,
                Relation::NotLower,
            ),
            claim(
                "random reads are not made slower, 32 at a time",
                &[("with", "without")],
                4,
                Relation::NotLower,
            ),
        ],
    }
}
