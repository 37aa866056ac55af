//! Open files: the locks that they hold, and the errors of opening and of the kernel.

use std::{future::Future, os::fd::AsFd};

use reactor::{
    PollingMode,
    buffer::IoBuffer,
    error::Error,
    guest::{GuestMemory, MappingQuota, Region},
    run,
};
use rustix::fs::{MemfdFlags, memfd_create};

use super::{CacheMode, FileOptions, open as open_file, open::describe};
use crate::{Durability, align::AlignedDevice};

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    run(PollingMode::Off, future).expect("io_uring works on a test machine")
}

#[test]
fn image_is_unlocked_once_dropped_and_idle() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    let options = FileOptions::default();
    let locked = || open_file(file.path(), &options).is_err();
    let (image, _) = open_file(file.path(), &options).unwrap();
    // The kernel briefly holds a reference like this after an operation.
    let held = image.fd.as_fd().try_clone_to_owned().unwrap();
    drop(image);
    assert!(!locked());
    drop(held);
    let (image, _) = open_file(file.path(), &options).unwrap();
    let in_flight = image.fd.clone();
    drop(image);
    assert!(locked(), "it may still write");
    drop(in_flight);
    assert!(!locked());
}

/// Guest memory of this many bytes, and the file behind it.
pub(super) fn guest(bytes: usize) -> (GuestMemory, std::fs::File) {
    let file = std::fs::File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd"));
    file.set_len(bytes as u64).expect("room");
    let descriptor = file.try_clone().expect("a descriptor").into();
    let region =
        Region::map(descriptor, 0, 0, bytes as u64, 0, &MappingQuota::new(1, u64::MAX)).expect("maps");
    (GuestMemory::new(vec![region]).expect("one region"), file)
}

#[test]
fn error_numbers_arrive_as_they_are() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(4096).expect("room for a test");
    let options = FileOptions { read_only: true, force_share: true, ..FileOptions::default() };
    let (storage, _) = open_file(file.path(), &options).expect("opens");
    real(async move {
        // Bypasses `Align`, which would reject the write: the descriptor is read-only.
        let data = IoBuffer::copy_of(&[1]).into();
        let result = storage.write(0, data, Durability::Cached).await;
        assert_eq!(result, Err(Error::from_errno(libc::EBADF)));
    });
}

#[test]
fn permission_error_suggests_read_only() {
    // The error is constructed: the test runs as root, which may open any file.
    let error = std::io::Error::from_raw_os_error(libc::EACCES);
    let writing = describe("a.raw", &error, false).to_string();
    assert_eq!(
        writing,
        "a.raw: no permission to read and write (check its owner and mode, or serve it --read-only)"
    );
    assert!(!describe("a.raw", &error, true).to_string().contains("--read-only"));
}

#[test]
fn emfile_error_suggests_a_higher_limit() {
    let error = std::io::Error::from_raw_os_error(libc::EMFILE);
    let message = describe("a.raw", &error, false).to_string();
    assert!(message.contains("`ulimit -n`, or LimitNOFILE="), "{message}");
}

#[test]
fn locks_last_until_the_last_operation_on_either_descriptor_has_ended() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(4096).expect("room for a test");
    for cache in [CacheMode::Writeback, CacheMode::None] {
        let options = FileOptions { cache, ..FileOptions::default() };
        let (storage, _) = open_file(file.path(), &options).expect("opens");
        assert!(!storage.is_busy());
        // Stands for a truncate, or a write of the tail, that the file system has not finished.
        let in_flight = storage.buffered.clone();
        assert!(storage.is_busy());
        drop(storage);
        assert!(open_file(file.path(), &options).is_err(), "{cache}: it may still be changed");
        drop(in_flight);
        open_file(file.path(), &options).expect("the locks have gone with the last operation");
    }
}
