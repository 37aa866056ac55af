//! Transfers between guest memory and files that may be abandoned.

use std::{
    future::{Future, poll_fn},
    os::fd::AsFd as _,
    sync::Arc,
    task::Poll,
};

use super::{File, FileOptions, lane::Lane, open, tests::guest};
use reactor::{
    Polling,
    buffer::{Segments, guest_copies},
    error::Error,
    guest::{Memory, Region},
    run,
};

use crate::{Durability, align::Device};

const BYTES: usize = 8192;

/// Runs `test` on a file with the lane of a remote file system.
fn with_remote_file<F: Future<Output = ()> + 'static>(test: impl FnOnce(File) -> F) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(BYTES as u64).expect("room for a test");
    let (mut storage, looked_at) = open(file.path(), &FileOptions::default()).expect("opens");
    storage.lane = Arc::new(Lane::remote(&looked_at));
    run(Polling::Off, test(storage)).expect("io_uring works on a test machine");
}

/// Guest memory filled with `byte`.
fn memory(byte: u8) -> Segments {
    let memory = Memory::new(vec![Region::on_heap(0, 0, BYTES)]).expect("one region");
    let place = memory.place(0, BYTES).expect("inside");
    place.fill(0, BYTES, byte);
    place.into()
}

/// The kernel may read the memory of a write after the write has failed, when the guest already
/// stores other data there.
#[test]
fn the_kernel_reads_no_memory_of_a_guest_that_may_change_after_a_failure() {
    with_remote_file(|storage| async move {
        let slots = storage.lane.take_all_slots().await;
        let before = guest_copies().count;
        let mut write = Box::pin(storage.write(0, memory(7), Durability::Cached));
        let is_pending = poll_fn(|context| Poll::Ready(write.as_mut().poll(context).is_pending())).await;
        assert!(is_pending);
        assert_eq!(guest_copies().count, before, "a request without a slot has no buffer");
        drop(slots);
        assert_eq!(write.await, Ok(()));
        assert_eq!(guest_copies().count, before + 1, "the kernel has a copy");
        let read = storage.read(0, memory(0)).await.expect("reads");
        assert_eq!(read.to_vec(), [7; BYTES]);
    });
}

#[test]
fn a_write_from_memory_that_is_gone_fails() {
    with_remote_file(|storage| async move {
        let (memory, file) = guest(BYTES);
        file.set_len(0).expect("shrinks");
        let place = memory.place(0, BYTES).expect("inside");
        assert_eq!(storage.write(0, place.into(), Durability::Cached).await, Err(Error::FAULT));
    });
}

#[test]
fn a_write_that_is_given_up_reaches_no_file() {
    with_remote_file(|storage| async move {
        let _slots = storage.lane.take_all_slots().await;
        let mut write = Box::pin(storage.write(0, memory(7), Durability::Cached));
        let is_pending = poll_fn(|context| Poll::Ready(write.as_mut().poll(context).is_pending())).await;
        assert!(is_pending);
        storage.give_up();
        assert_eq!(write.await, Err(Error::TIMED_OUT));
        let stored =
            std::fs::File::from(storage.buffered.as_fd().try_clone_to_owned().expect("a descriptor"));
        let mut content = vec![1; BYTES];
        std::os::unix::fs::FileExt::read_exact_at(&stored, &mut content, 0).expect("readable");
        assert_eq!(content, [0; BYTES]);
    });
}
