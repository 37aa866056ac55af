//! Time per chain. Asserts nothing: run it manually, optimized, and read the output.
//!
//! ```text
//! cargo test --release -p weir-virtio --lib ring::tests::cost -- --ignored --nocapture
//! ```

use std::time::Instant;

use super::world::{BUFFERS, RingShape, layout, memory, ring_with_inflight};
use crate::{
    block::{BlkDeviceConfig, BlkStatus, parse},
    ring::{
        Virtqueue,
        driver::{DriverBuffer, RingDriver},
    },
};

const ROUNDS: u32 = 20_000;
const BATCH: u16 = 32;

/// Time of the device for one indirect chain of three descriptors, with or without parsing its
/// request, in nanoseconds: the median, because of other load on the machine.
fn cost(packed: bool, inflight: bool, requests: bool) -> u128 {
    let shape = RingShape { size: 128, packed, event_idx: true, indirect: true };
    let memory = memory();
    let layout = layout(&memory, shape);
    let device = BlkDeviceConfig {
        bytes: 1 << 30,
        block_bytes: 512,
        read_only: false,
        max_segments: 126,
        discard: None,
        write_zeroes: None,
    };
    let mut driver = RingDriver::new(&layout);
    let mut ring = if inflight {
        ring_with_inflight(&layout, &memory, shape.start())
    } else {
        Virtqueue::new(layout, memory.clone(), shape.start()).expect("a good ring")
    };
    let tables: Vec<_> =
        (0..u64::from(BATCH)).map(|n| memory.range(BUFFERS + 64 * n, 48).expect("inside")).collect();
    let buffer = |address, bytes, writable| DriverBuffer { address, bytes, writable };
    let buffers = [
        buffer(BUFFERS + 0x1000, 16, false),
        buffer(BUFFERS + 0x2000, 4096, true),
        buffer(BUFFERS + 0x3800, 1, true),
    ];
    let mut run_batch = || {
        for table in &tables {
            driver.add_indirect(table, &buffers).expect("there is room");
        }
        let start = Instant::now();
        for _ in 0..BATCH {
            let chain = ring.take().expect("a good ring").expect("a chain");
            if requests {
                let (ticket, request) = parse(chain, &device);
                let written = request.expect("room for an answer").finish(BlkStatus::Ok);
                ring.complete(ticket, written);
            } else {
                ring.complete(chain.ticket, 0);
            }
        }
        let _call = ring.wants_call();
        let elapsed = start.elapsed();
        while driver.next_used().expect("it was out").is_some() {}
        elapsed.as_nanos() / u128::from(BATCH)
    };
    let mut costs: Vec<_> = (0..ROUNDS).map(|_| run_batch()).collect();
    costs.sort_unstable();
    costs[costs.len() / 2]
}

#[test]
#[ignore = "prints, and judges nothing"]
#[allow(clippy::print_stdout, reason = "the test prints its result")]
fn an_indirect_chain_of_three() {
    for (packed, inflight) in [(false, false), (true, false), (false, true), (true, true)] {
        let [ring, request] = [false, true].map(|requests| cost(packed, inflight, requests));
        println!("packed {packed}, in-flight area {inflight}: {ring} ns, with its request {request} ns");
    }
}
