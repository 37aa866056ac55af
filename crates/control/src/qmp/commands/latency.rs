//! `x-weir-query-latencies`: histograms of each disk's latencies and of its throttling.
//!
//! Counting starts with the first query: a client that measures an interval queries at both ends.
//! Not part of the status, which is queried every second and is large already.

use api::{DiskHistograms, HistogramBucket};
use block::{
    disk::Disk,
    measures::{HistogramSnapshot, OperationClass},
};
use policy::request::Direction;

use crate::qmp::command::response;

query!(QueryLatencies, "x-weir-query-latencies", |registry| {
    response(registry.disks.all().iter().map(|running| histograms(&running.disk)).collect::<Vec<_>>())
});

/// Returns the histograms of a disk, of reads and writes together.
fn histograms(disk: &Disk) -> DiskHistograms {
    // Starts measuring at the first call.
    let measures = disk.measure();
    let classes = [OperationClass::Read, OperationClass::Write];
    DiskHistograms {
        name: disk.name().to_string(),
        latencies: buckets(classes.map(|class| measures.latency(class))),
        waits: buckets(Direction::ALL.map(|direction| measures.waits(direction))),
    }
}

/// Returns the nonempty buckets of the sum of both.
fn buckets([reads, writes]: [HistogramSnapshot; 2]) -> Vec<HistogramBucket> {
    let both = reads.counts().iter().zip(writes.counts()).map(|(reads, writes)| reads.wrapping_add(*writes));
    let bucket = |(index, requests): (usize, u64)| {
        let (above_ns, at_most_ns) = HistogramSnapshot::bounds_ns(index);
        HistogramBucket { above_ns, at_most_ns, requests }
    };
    both.enumerate().filter(|(_, requests)| *requests > 0).map(bucket).collect()
}
