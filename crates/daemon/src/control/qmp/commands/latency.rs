//! `x-weir-query-latencies`: how many requests of each disk took how long.
//!
//! Counted from the first time that somebody asks: whoever wants to know of a time asks at both of
//! its ends. Never told with the state of all, which is asked for each second and is long already.

use block::{
    disk::Disk,
    measures::{Spread, Timed},
};
use serde_json::{Value, json};

query!(QueryLatencies, "x-weir-query-latencies", |inventory| {
    inventory.disks().iter().map(|running| told(&running.disk)).collect()
});

/// Of reads and writes together, what is not 0.
fn told(disk: &Disk) -> Value {
    let measures = disk.measure();
    let [reads, writes] = [Timed::Read, Timed::Write].map(|of| measures.latency(of));
    let both = reads.counts().iter().zip(writes.counts()).map(|(reads, writes)| reads.wrapping_add(*writes));
    let bucket = |(place, requests): (usize, u64)| {
        let (above_ns, at_most_ns) = Spread::bounds_ns(place);
        let mut bucket = json!({ "above-ns": above_ns, "requests": requests });
        if let Some(at_most_ns) = at_most_ns {
            bucket["at-most-ns"] = json!(at_most_ns);
        }
        bucket
    };
    let latencies: Vec<_> = both.enumerate().filter(|(_, requests)| *requests > 0).map(bucket).collect();
    json!({ "name": &**disk.name(), "latencies": latencies })
}
