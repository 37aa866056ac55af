//! Failing syncs. They run on a pipe, which has no fsync(2): the kernel returns EINVAL, and the
//! file itself has no error to report afterwards, as after a lost write.

use std::{
    future::{Future, poll_fn},
    task::Poll,
};

use super::{CacheMode, FileOptions, FileStorage, open};
use reactor::{
    PollingMode,
    buffer::IoBuffer,
    error::{Error, Result},
    operation::Fd,
    run,
};

use crate::{Durability, align::AlignedDevice};

const SIZE: u64 = 64 << 10;
/// Not a multiple of a block.
const ODD_SIZE: u64 = SIZE + 1234;

/// Runs `test` on a file of `size_bytes`, unless its file system lacks the cache mode.
fn with_file<F: Future<Output = ()> + 'static>(
    size_bytes: u64,
    cache: CacheMode,
    test: impl FnOnce(FileStorage) -> F,
) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(size_bytes).expect("room for a test");
    match open(file.path(), &FileOptions { cache, ..FileOptions::default() }) {
        Ok((storage, _)) => run(PollingMode::Off, test(storage)).expect("io_uring works on a test machine"),
        Err(error) => assert!(error.why.contains("does not support O_DIRECT"), "{error}"),
    }
}

/// A descriptor that the kernel cannot sync.
fn unsyncable() -> Fd {
    let (reading, _) = nix::unistd::pipe().expect("a pipe");
    Fd::from(std::fs::File::from(reading))
}

async fn sync_that_fails(storage: &FileStorage) -> Result<()> {
    storage.syncs.run(&unsyncable(), &storage.isolation).await
}

#[test]
fn all_syncs_fail_after_a_failed_one_through_the_page_cache() {
    with_file(SIZE, CacheMode::Writeback, |storage| async move {
        assert_eq!(storage.flush().await, Ok(()));
        assert_eq!(sync_that_fails(&storage).await, Err(Error::INVALID));
        assert_eq!(storage.flush().await, Err(Error::INVALID), "although the kernel has no error");
    });
}

#[test]
fn a_failed_sync_of_a_cancelled_caller_fails_the_next_sync() {
    with_file(SIZE, CacheMode::Writeback, |storage| async move {
        let mut sync = Box::pin(sync_that_fails(&storage));
        let is_pending = poll_fn(|context| Poll::Ready(sync.as_mut().poll(context).is_pending())).await;
        assert!(is_pending);
        drop(sync);
        assert_eq!(storage.flush().await, Err(Error::INVALID));
    });
}

#[test]
fn in_a_direct_mode_only_the_tail_keeps_a_failed_sync() {
    with_file(ODD_SIZE, CacheMode::None, |storage| async move {
        let block = || IoBuffer::zeroed(4096).into();
        assert_eq!(storage.write(0, block(), Durability::Cached).await, Ok(()));
        assert_eq!(sync_that_fails(&storage).await, Err(Error::INVALID));
        assert_eq!(storage.flush().await, Ok(()), "the device has the block");
        let tail = IoBuffer::copy_of(&[7; 100]).into();
        assert_eq!(storage.write_buffered(ODD_SIZE - 100, tail, Durability::Cached).await, Ok(()));
        assert_eq!(sync_that_fails(&storage).await, Err(Error::INVALID));
        assert_eq!(storage.flush().await, Err(Error::INVALID), "the tail may be lost");
    });
}

#[test]
fn in_a_direct_mode_a_truncation_inside_a_page_keeps_a_failed_sync() {
    // Pages of all architectures are multiples of 4 KiB and divide 64 KiB.
    for (before, after, flushed) in [
        (2 * SIZE, SIZE, Ok(())),
        (2 * SIZE, SIZE + 512, Err(Error::INVALID)),
        (SIZE + 512, 2 * SIZE, Err(Error::INVALID)),
    ] {
        with_file(before, CacheMode::None, |storage| async move {
            assert!(storage.set_size(after).await.is_ok());
            assert_eq!(sync_that_fails(&storage).await, Err(Error::INVALID));
            assert_eq!(storage.flush().await, flushed, "{before} to {after} bytes");
        });
    }
}
