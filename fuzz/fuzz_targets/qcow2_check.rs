//! An image of any bytes: checking it ends, repairing it ends, and what a repair calls consistent is.
#![no_main]

use block::{
    buffer::Buffer,
    image::qcow2::check::{Repair, check},
    reactor::sim,
    storage::{Durability, Storage, memory::Memory},
};
use libfuzzer_sys::fuzz_target;

/// Larger images only take longer.
const LARGEST: usize = 4 << 20;

async fn storage(content: &[u8]) -> Storage {
    let storage = Storage::Memory(Memory::new(content.len() as u64).expect("small"));
    storage.write(0, Buffer::copy_of(content).into(), Durability::Cached).await.expect("inside");
    storage
}

fuzz_target!(|data: &[u8]| {
    if data.is_empty() || data.len() > LARGEST {
        return;
    }
    let data = data.to_vec();
    sim::run(1, async move {
        let image = storage(&data).await;
        let Ok(found) = check(&image, Repair::Nothing).await else { return };
        for repair in [Repair::Leaks, Repair::All] {
            let image = storage(&data).await;
            let Ok(repaired) = check(&image, repair).await else { continue };
            if repaired.corruptions + repaired.check_errors > 0 {
                continue;
            }
            let again = check(&image, Repair::Nothing).await.expect("its header was read before");
            assert_eq!((again.corruptions, again.check_errors, again.leaks), (0, 0, repaired.leaks), "{found:?}");
        }
    });
});
