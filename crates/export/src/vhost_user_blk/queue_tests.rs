//! Number of requests that a queue takes in one turn.

use super::*;
use crate::vhost_user_blk::{VhostUserExport, VhostUserOffer};
use ::virtio::ring::{
    RingParts,
    driver::{DriverBuffer, RingDriver},
};
use block::{disk::Disk, layer::throttle::DiskSettings};
use image::{Image, RawImage};
use reactor::guest::Region;
use storage::Storage;

const SIZE: u16 = 8;
const BYTES: usize = 1 << 15;

#[test]
fn the_longest_chains_are_taken_two_at_a_time() {
    reactor::sim::run(1, async { take_the_longest_chains() });
}

fn take_the_longest_chains() {
    let image = Image::Raw(RawImage::new(Storage::memory(1 << 20)));
    let disk = Disk::new("disk", image, DiskSettings::default(), None).expect("no limits");
    let offer = VhostUserOffer::default();
    let export = VhostUserExport { id: "vm1".into(), disk: Arc::new(disk), offer, serial: "disk".into() };
    let memory = GuestMemory::new(vec![Region::on_heap(0, 0, BYTES)]).expect("one region");
    let bytes_at = |at, bytes| memory.range(at, bytes).expect("inside");
    let parts = RingParts::of(SIZE, false, false);
    let areas = RingAreas {
        descriptors: bytes_at(0, parts.descriptors.0),
        driver: bytes_at(0x1000, parts.driver.0),
        device: bytes_at(0x2000, parts.device.0),
    };
    let RingAreas { descriptors, driver, device } = areas.clone();
    let (packed, event_idx, indirect) = (false, false, true);
    let mut driver =
        RingDriver::new(&RingLayout { size: SIZE, descriptors, driver, device, packed, event_idx, indirect });
    // Chains of empty buffers: each is completed at once.
    let empty_buffer = DriverBuffer { address: 0, bytes: 0, writable: false };
    for _ in 0..5 {
        let table = bytes_at(0x4000, MAX_DESCRIPTORS * 16);
        driver.add_indirect(&table, &[empty_buffer; MAX_DESCRIPTORS]).expect("there is room");
    }
    let settings = RingSettings {
        size: SIZE,
        areas,
        memory: memory.clone(),
        features: virtio::INDIRECT_DESC,
        base: 0,
        inflight: None,
        loss: None,
        kick: None,
        call: None,
        error: None,
    };
    let queue =
        VhostUserQueue::new(0, settings, Arc::new(VhostUserDevice::new(export))).expect("a good ring");
    let mut batch = MergeBatch::default();
    assert_eq!([0; 4].map(|_| queue.take_requests(&mut batch)), [Ok(2), Ok(2), Ok(1), Ok(0)]);
}
