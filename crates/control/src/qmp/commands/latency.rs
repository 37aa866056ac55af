//! `x-weir-query-latencies`: histograms of each disk's latencies and of its throttling.
//!
//! Counting starts with the first query: a client that measures an interval queries at both ends.
//! Not part of the status, which is queried every second and is large already.

use block::{
    disk::Disk,
    measures::{HistogramSnapshot, OperationClass},
};
use policy::request::Direction;
use serde_json::{Value, json};

query!(QueryLatencies, "x-weir-query-latencies", |registry| {
    registry.disks.all().iter().map(|running| histograms(&running.disk)).collect()
});

/// Returns the histograms of a disk, of reads and writes together.
fn histograms(disk: &Disk) -> Value {
    // Starts measuring at the first call.
    let measures = disk.measure();
    json!({
        "name": &**disk.name(),
        "latencies": buckets([OperationClass::Read, OperationClass::Write].map(|class| measures.latency(class))),
        "waits": buckets(Direction::ALL.map(|direction| measures.waits(direction))),
    })
}

/// Returns the nonempty buckets of the sum of both.
fn buckets([reads, writes]: [HistogramSnapshot; 2]) -> Value {
    let both = reads.counts().iter().zip(writes.counts()).map(|(reads, writes)| reads.wrapping_add(*writes));
    let bucket = |(index, requests): (usize, u64)| {
        let (above_ns, at_most_ns) = HistogramSnapshot::bounds_ns(index);
        let mut bucket = json!({ "above-ns": above_ns, "requests": requests });
        if let Some(at_most_ns) = at_most_ns {
            bucket["at-most-ns"] = json!(at_most_ns);
        }
        bucket
    };
    both.enumerate().filter(|(_, requests)| *requests > 0).map(bucket).collect()
}
