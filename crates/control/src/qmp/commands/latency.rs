//! `x-weir-query-latencies`: histograms of each disk's latencies and of its waits for limits.
//!
//! Counted from the first time that somebody asks: whoever wants to know of a time asks at both of
//! its ends. Never told with the state of all, which is asked for each second and is long already.

use block::{
    disk::Disk,
    measures::{HistogramSnapshot, OperationClass},
};
use policy::request::Direction;
use serde_json::{Value, json};

query!(QueryLatencies, "x-weir-query-latencies", |registry| {
    registry.disks.all().iter().map(|running| told(&running.disk)).collect()
});

/// Returns the histograms of a disk, of reads and writes together.
fn told(disk: &Disk) -> Value {
    let measures = disk.measure();
    json!({
        "name": &**disk.name(),
        "latencies": buckets([OperationClass::Read, OperationClass::Write].map(|of| measures.latency(of))),
        "waits": buckets(Direction::ALL.map(|direction| measures.waits(direction))),
    })
}

/// Returns the non-empty buckets of the sum of both.
fn buckets([reads, writes]: [HistogramSnapshot; 2]) -> Value {
    let both = reads.counts().iter().zip(writes.counts()).map(|(reads, writes)| reads.wrapping_add(*writes));
    let bucket = |(place, requests): (usize, u64)| {
        let (above_ns, at_most_ns) = HistogramSnapshot::bounds_ns(place);
        let mut bucket = json!({ "above-ns": above_ns, "requests": requests });
        if let Some(at_most_ns) = at_most_ns {
            bucket["at-most-ns"] = json!(at_most_ns);
        }
        bucket
    };
    both.enumerate().filter(|(_, requests)| *requests > 0).map(bucket).collect()
}
