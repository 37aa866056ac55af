//! Transfers between guest memory and files that may be abandoned.

use std::{
    future::{Future, poll_fn},
    os::fd::AsFd as _,
    sync::Arc,
    task::Poll,
};

use super::{FileOptions, FileStorage, isolation::FileIsolation, open, tests::guest};
use reactor::{
    PollingMode,
    buffer::{Segments, guest_copies},
    error::Error,
    guest::{GuestMemory, Region},
    run,
};

use crate::{Durability, align::AlignedDevice};

const BYTES: usize = 8192;

/// Runs `test` on a file with the isolation of a remote file system.
fn with_remote_file<F: Future<Output = ()> + 'static>(test: impl FnOnce(FileStorage) -> F) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(BYTES as u64).expect("room for a test");
    let (mut storage, plain_file) = open(file.path(), &FileOptions::default()).expect("opens");
    storage.isolation = Arc::new(FileIsolation::remote(&plain_file));
    run(PollingMode::Off, test(storage)).expect("io_uring works on a test machine");
}

/// Guest memory filled with `byte`.
fn memory(byte: u8) -> Segments {
    let memory = GuestMemory::new(vec![Region::on_heap(0, 0, BYTES)]).expect("one region");
    let guest_bytes = memory.range(0, BYTES).expect("inside");
    guest_bytes.fill(0, BYTES, byte);
    guest_bytes.into()
}

/// The kernel may read the memory of a write after the write has failed, when the guest already
/// stores other data there.
#[test]
fn abandonable_files_copy_guest_memory() {
    with_remote_file(|storage| async move {
        let slots = storage.isolation.take_all_slots().await;
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
fn write_from_truncated_guest_memory_fails() {
    with_remote_file(|storage| async move {
        let (memory, file) = guest(BYTES);
        file.set_len(0).expect("shrinks");
        let guest_bytes = memory.range(0, BYTES).expect("inside");
        assert_eq!(storage.write(0, guest_bytes.into(), Durability::Cached).await, Err(Error::FAULT));
    });
}

#[test]
fn abandoned_write_does_not_reach_the_file() {
    with_remote_file(|storage| async move {
        let _slots = storage.isolation.take_all_slots().await;
        let mut write = Box::pin(storage.write(0, memory(7), Durability::Cached));
        let is_pending = poll_fn(|context| Poll::Ready(write.as_mut().poll(context).is_pending())).await;
        assert!(is_pending);
        storage.abandon();
        assert_eq!(write.await, Err(Error::TIMED_OUT));
        let stored =
            std::fs::File::from(storage.buffered.as_fd().try_clone_to_owned().expect("a descriptor"));
        let mut content = vec![1; BYTES];
        std::os::unix::fs::FileExt::read_exact_at(&stored, &mut content, 0).expect("readable");
        assert_eq!(content, [0; BYTES]);
    });
}
