//! Raw images in real files, on the file system of the temporary directory and on tmpfs, in every
//! cache mode.

use std::{
    future::Future,
    io::Write,
    os::unix::fs::{FileExt, symlink},
    path::{Path, PathBuf},
    rc::Rc,
};

use image::{Image, open_raw};
use nix::sys::memfd::{MFdFlags, memfd_create};
use reactor::{
    PollingMode,
    buffer::{IoBuffer, ReadTarget, Segments, guest_copies},
    error::Error,
    guest::{DirtyLog, GuestMemory, MappingQuota, Region},
    run, spawn_joinable,
};
use storage::{CacheMode, Durability, Extent, ImageFormat, OpenError, OpenOptions, ResizeError, ZeroOptions};

/// Not a multiple of a block or a page, to get an unaligned tail.
const ODD_SIZE: usize = (256 << 10) + 1234;

const KEEP: ZeroOptions =
    ZeroOptions { may_unmap: false, only_if_fast: false, durability: Durability::Cached };

const UNMAP: ZeroOptions = ZeroOptions { may_unmap: true, ..KEEP };

fn run_on_reactor<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    run(PollingMode::Off, future).expect("io_uring works on a test machine")
}

fn directories() -> Vec<PathBuf> {
    let mut directories = vec![std::env::temp_dir()];
    if Path::new("/dev/shm").is_dir() {
        directories.push("/dev/shm".into());
    }
    directories
}

/// A file of pseudorandom bytes.
fn image(directory: &Path, size: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
    let mut file = tempfile::NamedTempFile::new_in(directory).expect("a temporary file");
    let mut content = vec![0; size];
    fastrand::Rng::with_seed(size as u64).fill(&mut content);
    file.write_all(&content).expect("room for a test");
    (file, content)
}

fn open_with(path: &Path, cache: CacheMode) -> Result<Image, OpenError> {
    open_raw(path.to_str().expect("UTF-8"), OpenOptions { cache, ..OpenOptions::default() })
}

/// Runs `test` on an image of `size` bytes in every valid combination of directory and cache mode.
fn in_every_mode<F: Future<Output = ()>>(
    size: usize,
    test: impl Fn(Rc<Image>, Vec<u8>, PathBuf) -> F + Clone + 'static,
) {
    for directory in directories() {
        for cache in CacheMode::ALL {
            let (file, content) = image(&directory, size);
            let image = match open_with(file.path(), cache) {
                Ok(image) => Rc::new(image),
                // tmpfs has O_DIRECT since Linux 6.6.
                Err(error) if cache.is_direct() && error.why.contains("does not support O_DIRECT") => {
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let (test, path) = (test.clone(), file.path().to_owned());
            run_on_reactor(async move { test(image, content, path).await });
        }
    }
}

/// Guest memory of `bytes` bytes, and the file behind it.
fn guest(bytes: usize) -> (GuestMemory, std::fs::File) {
    let file = std::fs::File::from(memfd_create("guest", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
    file.set_len(bytes as u64).expect("room");
    let descriptor = file.try_clone().expect("a descriptor").into();
    let region =
        Region::map(descriptor, 0, 0, bytes as u64, 0, &MappingQuota::new(1, u64::MAX)).expect("maps");
    (GuestMemory::new(vec![region]).expect("one region"), file)
}

/// Reads into our own memory and, at several alignments, into guest memory.
async fn read(image: &Image, offset: usize, length: usize) -> Vec<u8> {
    let bytes = image.read(offset as u64, length).await.expect("reads").to_vec();
    for (skew, gap) in [(0, 0), (1, 0), (512, 4096), (4096, 7)] {
        let log = DirtyLog::on_heap(length / 4096 / 8 + 2);
        let memory = guest(skew + length + gap + 1).0.with_log(Some(log.clone()));
        let half = (length / 2).next_multiple_of(512).min(length);
        let ranges = [(skew, half), (skew + half + gap, length - half)];
        let ranges = ranges.map(|(at, bytes)| memory.range(at as u64, bytes).expect("inside"));
        let target = ReadTarget::Segments(ranges.into_iter().collect());
        let read = image.read_to(offset as u64, target).await.expect("reads");
        assert!(read.to_vec() == bytes, "{length} bytes at {offset}, in memory at {skew}, {gap} between");
        assert!(length == 0 || log.is_marked(skew as u64));
        let mut last = [1];
        memory.range((skew + length + gap) as u64, 1).expect("inside").read(0, &mut last);
        assert_eq!(last, [0], "read too far");
    }
    bytes
}

/// Bytes in guest memory, at an offset of `skew`.
fn in_guest(bytes: &[u8], skew: usize) -> Segments {
    let (memory, _) = guest(skew + bytes.len() + 1);
    let place = memory.range(skew as u64, bytes.len()).expect("inside");
    place.write(0, bytes);
    place.into()
}

/// Applies one random change to both image and model.
async fn change(image: &Image, random: &mut fastrand::Rng, model: &mut [u8], offset: usize, length: usize) {
    let range = offset..offset + length;
    let (at, long) = (offset as u64, length as u64);
    match random.u8(..6) {
        0 => {
            image.write_zeroes(at, long, UNMAP).await.expect("zeroes");
            model[range].fill(0);
        }
        1 => {
            image.write_zeroes(at, long, KEEP).await.expect("zeroes");
            model[range].fill(0);
        }
        2 => {
            image.discard(at, long).await.expect("discards");
            let after = read(image, offset, length).await;
            let kept_or_zero =
                after.iter().zip(&model[range.clone()]).all(|(new, old)| *new == 0 || new == old);
            assert!(kept_or_zero, "a discard may zero, nothing else");
            model[range].copy_from_slice(&after);
        }
        kind => {
            random.fill(&mut model[range.clone()]);
            let mut data = Segments::from(IoBuffer::copy_of(&model[range.clone()]));
            let rest = data.split_off(random.usize(..=length));
            for part in rest.iter() {
                match random.usize(..4) {
                    0 => data.push(IoBuffer::copy_of(&part.bytes())),
                    skew => data.append(in_guest(&part.bytes(), (skew - 1) * 256)),
                }
            }
            let durability = if kind == 3 { Durability::Synchronous } else { Durability::Cached };
            image.write(at, data, durability).await.expect("writes");
        }
    }
}

#[test]
fn a_file_is_an_array_of_bytes_in_every_cache_mode() {
    in_every_mode(ODD_SIZE, |image, mut model, path| async move {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..60 {
            let offset = random.usize(..ODD_SIZE);
            let limit = if random.bool() { 3000 } else { ODD_SIZE };
            let length = random.usize(1..=(ODD_SIZE - offset).min(limit));
            change(&image, &mut random, &mut model, offset, length).await;
            let offset = random.usize(..ODD_SIZE);
            let length = random.usize(1..=(ODD_SIZE - offset).min(20_000));
            assert!(read(&image, offset, length).await == model[offset..offset + length]);
        }
        image.flush().await.expect("flushes");
        drop(image);
        let stored = std::fs::read(&path).expect("readable");
        assert_eq!(stored.len(), ODD_SIZE, "never longer");
        assert!(stored == model, "{}", path.display());
    });
}

#[test]
fn aligned_requests_are_not_copied() {
    in_every_mode(1 << 20, |image, _, _| async move {
        let (memory, _) = guest(20_000);
        let needs_alignment = image.block_size().minimum > 1;
        for (skew, copies) in [(0, 0), (4096, 0), (1, if needs_alignment { 2 } else { 0 })] {
            let place = || memory.range(skew, 8192).expect("inside");
            let before = guest_copies().count;
            image.read_to(65_536, ReadTarget::Segments(place().into())).await.expect("reads");
            image.write(65_536, place().into(), Durability::Cached).await.expect("writes");
            assert_eq!(guest_copies().count - before, copies, "at {skew}: {}", image.description());
        }
    });
}

#[test]
fn lost_guest_memory_fails_only_its_request() {
    in_every_mode(1 << 20, |image, content, _| async move {
        let (memory, file) = guest(8192);
        let place = || memory.range(0, 8192).expect("inside");
        place().fill(0, 8192, 7);
        image.write(4096, place().into(), Durability::Cached).await.expect("writes");
        file.set_len(0).expect("shrinks");
        let target = ReadTarget::Segments(place().into());
        assert_eq!(image.read_to(4096, target).await.err(), Some(Error::FAULT));
        assert_eq!(image.write(65_536, place().into(), Durability::Cached).await, Err(Error::FAULT));
        // The lost region reads as zeroes if a copy is made, and stays lost.
        match image.write(100_001, place().part(0, 100).into(), Durability::Cached).await {
            Ok(()) => assert!(memory.is_lost() && read(&image, 100_001, 100).await == [0; 100]),
            Err(error) => assert_eq!(error, Error::FAULT),
        }
        assert_eq!(read(&image, 4096, 8192).await, [7; 8192]);
        assert_eq!(read(&image, 200_000, 5000).await, content[200_000..205_000]);
    });
}

#[test]
fn concurrent_writes_to_one_block_are_independent() {
    in_every_mode(ODD_SIZE, |image, mut model, _| async move {
        // 300 bytes each, so that several writes touch each block and the start of the tail.
        let first = ODD_SIZE - 40 * 300;
        for round in 0..4_u8 {
            let writes: Vec<_> = (0..40_u8)
                .map(|index| {
                    let image = Rc::clone(&image);
                    let offset = first + usize::from(index) * 300;
                    model[offset..offset + 300].fill(index ^ round);
                    spawn_joinable(async move {
                        let data = IoBuffer::copy_of(&[index ^ round; 300]);
                        image.write(offset as u64, data.into(), Durability::Cached).await
                    })
                })
                .collect();
            for write in writes {
                write.await.expect("writes");
            }
            assert!(read(&image, 0, ODD_SIZE).await == model);
        }
    });
}

#[test]
fn holes_are_reported_as_they_are_made() {
    in_every_mode(1 << 20, |image, _, _| async move {
        image.write_zeroes(256 << 10, 512 << 10, UNMAP).await.expect("zeroes");
        image.flush().await.expect("flushes");
        let extents = image.block_status(0, 1 << 20).await.expect("status");
        let data = Extent { length: 256 << 10, hole: false, zero: false };
        assert_eq!(extents, [data, Extent { length: 512 << 10, hole: true, zero: true }, data]);
        let inside = image.block_status((256 << 10) + 1, 10).await.expect("status");
        assert_eq!(inside, [Extent { length: 10, hole: true, zero: true }]);
        assert_eq!(image.block_status(1 << 20, 1).await, Err(Error::INVALID));
    });
}

#[test]
fn fast_zeroes_are_zeroes_or_refused() {
    in_every_mode(ODD_SIZE, |image, mut model, _| async move {
        for may_unmap in [true, false] {
            let options = ZeroOptions { may_unmap, only_if_fast: true, ..KEEP };
            match image.write_zeroes(100, 50_000, options).await {
                Ok(()) => model[100..50_100].fill(0),
                Err(error) => assert_eq!(error, Error::UNSUPPORTED),
            }
            assert!(read(&image, 0, ODD_SIZE).await == model);
        }
        assert!(image.can_zero_fast(), "ext4, xfs, btrfs and tmpfs all punch holes");
    });
}

#[test]
fn growing_is_noticed_and_shrinking_fails_reads() {
    in_every_mode(1 << 20, |image, content, path| async move {
        let file = std::fs::OpenOptions::new().write(true).open(path).expect("opens");
        file.set_len(2 << 20).expect("grows");
        assert_eq!(image.size_bytes(), 1 << 20);
        assert_eq!(image.refresh_size().await, Ok(2 << 20));
        assert_eq!(read(&image, (2 << 20) - 10, 10).await, [0; 10]);
        file.set_len(1000).expect("shrinks");
        assert_eq!(read(&image, 0, 512).await, content[..512], "a block that is still whole");
        let beyond = image.read(0, 4096).await;
        assert_eq!(beyond.err(), Some(Error::IO));
        assert_eq!(image.refresh_size().await, Ok(1000));
    });
}

#[test]
fn a_file_is_resized_while_it_is_used() {
    in_every_mode(ODD_SIZE, |image, content, path| async move {
        let length = || std::fs::metadata(&path).expect("is there").len();
        assert_eq!(image.resize(1 << 20).await, Ok(()));
        assert_eq!((image.size_bytes(), length()), (1 << 20, 1 << 20));
        assert!(read(&image, 0, ODD_SIZE).await == content, "also the end, which was half a block");
        assert_eq!(read(&image, (1 << 20) - 4096, 4096).await, [0; 4096]);
        let late = IoBuffer::copy_of(&[5; 4096]).into();
        image.write((1 << 20) - 4096, late, Durability::Cached).await.expect("inside");
        assert_eq!(image.resize(64 << 10).await, Ok(()));
        assert_eq!((image.size_bytes(), length()), (64 << 10, 64 << 10));
        let block = IoBuffer::copy_of(&[5; 4096]).into();
        assert_eq!(image.write(64 << 10, block, Durability::Cached).await, Err(Error::INVALID));
        assert_eq!(length(), 64 << 10, "nothing makes it longer");
        assert!(image.resize(u64::MAX << 12).await.is_err(), "no file system has room");
        assert_eq!((image.size_bytes(), length()), (64 << 10, 64 << 10));
        assert!(read(&image, 0, 64 << 10).await == content[..64 << 10]);
    });
}

#[test]
fn a_file_is_cut_at_any_byte_and_grows_with_zeroes() {
    in_every_mode(ODD_SIZE, |image, mut model, path| async move {
        let sizes = [ODD_SIZE - 1, ODD_SIZE + 4097, 50_001, 50_003, 4097, 4096, 8192, 511, 513, 2, 70_000];
        for (number, size) in sizes.into_iter().enumerate() {
            assert_eq!(image.resize(size as u64).await, Ok(()));
            model.resize(size, 0);
            assert_eq!(image.size_bytes(), size as u64);
            assert_eq!(std::fs::metadata(&path).expect("is there").len(), size as u64);
            assert!(read(&image, 0, size).await == model, "of {size} bytes");
            // Across the last blocks, so that part of it is cut off.
            let first = size.saturating_sub(5000);
            let data = IoBuffer::copy_of(&vec![number as u8 + 1; size - first]);
            model[first..].fill(number as u8 + 1);
            image.write(first as u64, data.into(), Durability::Cached).await.expect("inside");
            assert!(read(&image, 0, size).await == model, "of {size} bytes");
        }
    });
}

#[test]
fn space_is_reserved_and_counted() {
    let (file, _) = image(&std::env::temp_dir(), 4096);
    run_on_reactor(async move {
        let image = open_raw(file.path().to_str().expect("UTF-8"), OpenOptions::default()).expect("opens");
        assert_eq!(image.reserve(1 << 20, 1 << 20).await, Ok(()));
        assert!(image.allocated_bytes().await.expect("known") >= 1 << 20);
        assert_eq!(image.size_bytes(), 4096);
        assert_eq!(image.resize(4095).await, Ok(()));
        assert!(image.allocated_bytes().await.expect("known") < 1 << 20, "a cut gives it back");
        let memory = open_raw("memory:1M", OpenOptions::default()).expect("opens");
        assert_eq!(memory.reserve(0, 1).await, Err(Error::UNSUPPORTED));
        assert_eq!(memory.allocated_bytes().await, Ok(0));
    });
}

#[test]
fn read_only_image_keeps_its_size() {
    let (file, _) = image(&std::env::temp_dir(), 4096);
    run_on_reactor(async move {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let image = open_raw(file.path().to_str().expect("UTF-8"), options).expect("opens");
        assert_eq!(image.resize(8192).await, Err(ResizeError::ReadOnly));
        assert_eq!(std::fs::metadata(file.path()).expect("is there").len(), 4096);
    });
}

#[test]
fn more_than_iov_max_segments_are_written() {
    in_every_mode(ODD_SIZE, |image, mut model, _| async move {
        let mut data = Segments::default();
        for index in 0..3000_usize {
            data.push(IoBuffer::copy_of(&[index as u8; 7]));
            model[index * 7..(index + 1) * 7].fill(index as u8);
        }
        image.write(0, data, Durability::Cached).await.expect("writes");
        assert!(read(&image, 0, ODD_SIZE).await == model);
    });
}

#[test]
fn read_only_image_rejects_changes() {
    let (file, content) = image(&std::env::temp_dir(), ODD_SIZE);
    let options = OpenOptions { read_only: true, cache: CacheMode::None, ..OpenOptions::default() };
    let image = open_raw(file.path().to_str().expect("UTF-8"), options).expect("opens");
    run_on_reactor(async move {
        assert_eq!(read(&image, 1, ODD_SIZE - 1).await, content[1..]);
        let data = IoBuffer::copy_of(&[1]).into();
        assert_eq!(image.write(0, data, Durability::Cached).await, Err(Error::NOT_PERMITTED));
        assert_eq!(image.write_zeroes(0, 1, KEEP).await, Err(Error::NOT_PERMITTED));
        assert_eq!(image.discard(0, 1).await, Err(Error::NOT_PERMITTED));
        assert_eq!(image.flush().await, Ok(()));
    });
}

fn refusal(spec: &str, options: OpenOptions) -> String {
    open_raw(spec, options).expect_err("refused").to_string()
}

#[test]
fn open_errors_name_cause_and_remedy() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).to_str().expect("UTF-8").to_owned();
    std::fs::File::create(path("empty")).expect("created");
    nix::unistd::mkfifo(&*path("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("created");
    symlink("nowhere", path("dangling")).expect("created");
    std::fs::write(path("other"), b"QFI\xfb").expect("written");
    for (spec, why) in [
        (path("missing"), "no such file"),
        (path("dangling"), "no such file"),
        (path("empty"), "is empty, so there is no disk"),
        (path("pipe"), "is a pipe or a socket"),
        (path("."), "is a directory"),
        ("/dev/zero".to_owned(), "is a character device"),
        (path("other"), "is not a raw image"),
        ("memory:0".to_owned(), "has size zero"),
        ("memory:1P".to_owned(), "is too large for memory"),
        ("null:much".to_owned(), "'much' is not a size"),
    ] {
        let error = refusal(&spec, OpenOptions::default());
        assert!(error.starts_with(&format!("{spec}: {why}")), "{error}");
        assert!(error.ends_with(')'), "what to do: {error}");
    }
    let error = refusal(&path("empty"), OpenOptions { force_share: true, ..OpenOptions::default() });
    assert!(error.contains("--read-only"), "{error}");
}

#[test]
fn one_image_is_served_once() {
    let (file, _) = image(&std::env::temp_dir(), 4096);
    let spec = file.path().to_str().expect("UTF-8");
    let reading = |force_share| OpenOptions { read_only: true, force_share, ..OpenOptions::default() };
    let served = open_raw(spec, OpenOptions::default()).expect("opens");
    assert!(refusal(spec, OpenOptions::default()).contains("locked for writing by this process"));
    assert!(refusal(spec, reading(false)).contains("it is open already"));
    open_raw(spec, reading(true)).expect("shares");
    drop(served);
    open_raw(spec, OpenOptions::default()).expect("the lock has gone with the image");
}

#[test]
fn header_of_a_probed_image_cannot_be_forged() {
    let (file, _) = image(&std::env::temp_dir(), 4096);
    file.as_file().write_all_at(&[0; 512], 0).expect("written");
    let path = file.path().to_owned();
    run_on_reactor(async move {
        let header = || Segments::from(IoBuffer::copy_of(b"QFI\xfb\0\0\0\x03"));
        let probed = open_with(&path, CacheMode::None).expect("opens");
        assert_eq!(probed.write(0, header(), Durability::Cached).await, Err(Error::NOT_PERMITTED));
        drop(probed);
        let options = OpenOptions { format: Some(ImageFormat::Raw), ..OpenOptions::default() };
        let given = open_raw(path.to_str().expect("UTF-8"), options).expect("opens");
        assert_eq!(given.write(0, header(), Durability::Cached).await, Ok(()));
    });
}
