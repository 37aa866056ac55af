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

use policy::prefetch::PrefetchMode;
use storage::CacheMode;

use super::{ClaimRelation, PublishedClaim, PublishedColumn, PublishedFigure, PublishedRow, PublishedTable};
use crate::tune::configurations::{
    AccessOrder, CLUSTERS, DiskConfiguration, L2Share, PatternOperation, Qcow2Choice, RequestPattern,
};

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;

fn pattern(order: AccessOrder, operation: PatternOperation, block_bytes: u64, depth: u32) -> RequestPattern {
    RequestPattern { order, operation, block_bytes, depth }
}

fn qcow2(cache: CacheMode, cluster_bytes: u64, l2: L2Share, prefetch: bool) -> DiskConfiguration {
    let prefetch = if prefetch { PrefetchMode::On } else { PrefetchMode::Off };
    DiskConfiguration { cache, qcow2: Some(Qcow2Choice { cluster_bytes, l2 }), prefetch }
}

fn row(name: &str, configuration: DiskConfiguration, published: &[f64]) -> PublishedRow {
    PublishedRow { name: name.to_owned(), configuration, published: published.to_vec() }
}

/// Row for a cache mode, with clusters of 64 KiB and the whole mapping cached.
fn mode(cache: CacheMode, published: &[f64]) -> PublishedRow {
    row(cache.name(), qcow2(cache, 64 * K, L2Share::Full, false), published)
}

fn claim(
    text: &'static str,
    pairs: &[(&str, &str)],
    column: usize,
    relation: ClaimRelation,
) -> PublishedClaim {
    let pairs = pairs.iter().map(|&(one, other)| (one.to_owned(), other.to_owned())).collect();
    PublishedClaim { text, pairs, column, relation }
}

/// Reads of modes with a page cache were served from it.
pub(super) fn random_by_cache_mode() -> PublishedTable {
    PublishedTable {
        title: "Cache modes: random requests of 4 KiB",
        columns: random_columns(PatternOperation::Reread),
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
                ClaimRelation::Higher,
            ),
            claim(
                "guaranteed data integrity means that write performance is not good",
                &[("writethrough", "writeback"), ("directsync", "none")],
                1,
                ClaimRelation::Lower,
            ),
        ],
    }
}

fn random_columns(read: PatternOperation) -> Vec<PublishedColumn> {
    let column = |name, operation| {
        PublishedColumn::new(name, pattern(AccessOrder::Random, operation, 4 * K, 1), PublishedFigure::Median)
    };
    vec![column("random read", read), column("random write", PatternOperation::Write)]
}

fn dd_and_hdparm() -> Vec<PublishedColumn> {
    let sequential = |operation| pattern(AccessOrder::Sequential, operation, M, 1);
    vec![
        PublishedColumn::new(
            "first write",
            sequential(PatternOperation::FirstWrite),
            PublishedFigure::Median,
        )
        .of_raw(sequential(PatternOperation::Write)),
        PublishedColumn::new("write", sequential(PatternOperation::Write), PublishedFigure::FastestThree),
        PublishedColumn::new("read", sequential(PatternOperation::Read), PublishedFigure::FastestThree),
    ]
}

/// Row of the raw disk. Only one figure was published for its writes, because a raw disk has no
/// first writes.
fn raw() -> PublishedRow {
    row(
        "raw",
        DiskConfiguration { cache: CacheMode::None, qcow2: None, prefetch: PrefetchMode::Off },
        &[1229.0, 1229.0, 2572.0],
    )
}

pub(super) fn streams_by_cache_mode() -> PublishedTable {
    PublishedTable {
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
                ClaimRelation::Lower,
            ),
            claim(
                "none has much better writes",
                &[("none", "writethrough"), ("none", "writeback")],
                1,
                ClaimRelation::Higher,
            ),
        ],
    }
}

pub(super) fn streams_by_cluster_size() -> PublishedTable {
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
    PublishedTable {
        title: "Cluster sizes: sequential requests beside the raw disk",
        columns: dd_and_hdparm(),
        rows: std::iter::once(raw()).chain(rows).collect(),
        reference: "raw",
        claims: vec![
            claim("clusters of 2 MiB improve reads", &[("2M", "64K")], 2, ClaimRelation::Higher),
            claim("clusters of 2 MiB improve writes", &[("2M", "64K")], 1, ClaimRelation::Higher),
        ],
    }
}

/// Table of random requests with O_DIRECT, and an L2 cache for the whole disk and for 1/128 of it.
pub(super) fn random_by_l2_cache() -> PublishedTable {
    let l2_row = |name: &str, l2| row(name, qcow2(CacheMode::None, 64 * K, l2, false), &[]);
    PublishedTable {
        title: "L2 cache: random requests of 4 KiB past the page cache",
        columns: random_columns(PatternOperation::Read),
        rows: vec![l2_row("full", L2Share::Full), l2_row("1/128", L2Share::Part(128))],
        reference: "full",
        claims: vec![
            claim(
                "a cache for 1/128 of the disk makes reads slower",
                &[("1/128", "full")],
                0,
                ClaimRelation::Lower,
            ),
            claim(
                "a cache for 1/128 of the disk makes writes slower",
                &[("1/128", "full")],
                1,
                ClaimRelation::Lower,
            ),
        ],
    }
}

/// Sequential reads in operations per second (262,144 divided by the published seconds); and a
/// guest's random reads, published as a gain only.
pub(super) fn reads_by_prefetch() -> PublishedTable {
    let prefetch_row = |name: &str, prefetch, values: &[f64]| {
        row(name, qcow2(CacheMode::None, 64 * K, L2Share::Full, prefetch), values)
    };
    let sequential = |depth| pattern(AccessOrder::Sequential, PatternOperation::Read, 4 * K, depth);
    let random = |depth| pattern(AccessOrder::Random, PatternOperation::Read, 4 * K, depth);
    let rate = |seconds: f64| 262_144.0 / seconds;
    PublishedTable {
        title: "Prefetch: reads of 4 KiB past the page cache",
        columns: vec![
            PublishedColumn::new("sequential ×1", sequential(1), PublishedFigure::Median),
            PublishedColumn::new("sequential ×8", sequential(8), PublishedFigure::Median),
            PublishedColumn::new("sequential ×64", sequential(64), PublishedFigure::Median),
            PublishedColumn::new("random ×1", random(1), PublishedFigure::Median),
            PublishedColumn::new("random ×32", random(32), PublishedFigure::Median),
        ],
        rows: vec![
            prefetch_row("without", false, &[rate(19.594), rate(5.933), rate(4.659), 1.0, 1.0]),
            prefetch_row("with", true, &[rate(4.378), rate(4.356), rate(4.204), 1.030, 1.001]),
        ],
        reference: "without",
        claims: vec![
            claim(
                "one sequential reader is several times as fast",
                &[("with", "without")],
                0,
                ClaimRelation::Higher,
            ),
            claim("with 8 in flight it still gains", &[("with", "without")], 1, ClaimRelation::Higher),
            claim("with 64 in flight it does no harm", &[("with", "without")], 2, ClaimRelation::NotLower),
            claim(
                "random reads are not made slower, one at a time",
                &[("with", "without")],
                3,
                ClaimRelation::NotLower,
            ),
            claim(
                "random reads are not made slower, 32 at a time",
                &[("with", "without")],
                4,
                ClaimRelation::NotLower,
            ),
        ],
    }
}
