use std::{
    fs::File,
    io::Read,
    os::{fd::AsRawFd, unix::fs::FileExt},
    sync::atomic::Ordering::*,
};

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, memfd_create};
use smallvec::smallvec;

use super::*;

fn regions(bounds: &[(u64, usize)]) -> GuestMemory {
    let regions = bounds.iter().map(|&(start, bytes)| Region::on_heap(start, start + (1 << 40), bytes));
    GuestMemory::new(regions.collect()).unwrap()
}

/// A memfd of this size, and another handle to it.
fn memfd(bytes: u64) -> (File, OwnedFd) {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    let other = file.try_clone().unwrap();
    (file, other.into())
}

/// A quota above what any test maps.
fn large_quota() -> MappingQuota {
    MappingQuota::new(16, 1 << 47)
}

#[test]
fn finds_only_ranges_inside_regions() {
    let memory = regions(&[(0x10000, 0x1000), (0, 0x1000), (0x11000, 0x800)]);
    for (address, bytes, inside) in [
        (0, 0x1000, true),
        (0, 0x1001, false),
        (0xfff, 1, true),
        (0x1000, 1, false),
        (0x8000, 1, false),
        (0x10000, 0x1000, true),
        (0x10fff, 2, false),
        (0x117ff, 1, true),
        (0x117ff, 2, false),
        (u64::MAX, 1, false),
        (0x10, usize::MAX, false),
    ] {
        let range = memory.range(address, bytes);
        assert_eq!(range.is_some(), inside, "{bytes} at {address:#x}");
        let found = range.map(|place| (place.guest_address(), place.bytes()));
        assert_eq!(found.unwrap_or((address, bytes)), (address, bytes));
        let user = address.saturating_add(1 << 40);
        assert_eq!(memory.user_range(user, bytes).is_some(), inside, "{bytes} at user {user:#x}");
    }
    assert!(memory.user_range(0, 1).is_none());
    assert!(GuestMemory::default().range(0, 1).is_none());
}

#[test]
fn range_may_span_adjacent_regions() {
    let memory = regions(&[(0, 0x1000), (0x1000, 0x1000), (0x2000, 0x1000), (0x4000, 0x1000)]);
    let mut found = smallvec![memory.range(0, 1).unwrap()];
    assert!(memory.ranges(0xff0, 0x1020, &mut found));
    let bounds: Vec<_> = found.iter().map(|place| (place.guest_address(), place.bytes())).collect();
    assert_eq!(bounds, [(0, 1), (0xff0, 0x10), (0x1000, 0x1000), (0x2000, 0x10)]);
    for (address, bytes) in [(0xff0, 0x2020), (0x2fff, 0x1002), (0x3000, 1), (u64::MAX, 2), (0, usize::MAX)] {
        assert!(!memory.ranges(address, bytes, &mut found), "{bytes} at {address:#x}");
        assert_eq!(found.len(), 4, "segments before the hole were not dropped");
    }
    assert!(memory.ranges(0x3000, 0, &mut found) && found.len() == 4, "no bytes are nowhere");
}

#[test]
fn regions_can_be_added_and_removed_but_not_overlap() {
    let memory = regions(&[(0x1000, 0x1000), (0x3000, 0x1000)]);
    for (start, bytes, fits) in [
        (0x2000, 0x1000, true),
        (0, 0x1000, true),
        (0, 0x1010, false),
        (0x3ff0, 0x10, false),
        (0x4000, 1, true),
        (0x1000, 0x1000, false),
        (0, 0x10000, false),
    ] {
        assert_eq!(memory.with(Region::on_heap(start, 0, bytes)).is_ok(), fits, "{bytes:#x} at {start:#x}");
    }
    assert!(memory.without(0x1000, 0, 0x1000).is_none(), "another address in the front end");
    assert!(memory.without(0x1000, 0x100_0000_1000, 0x800).is_none(), "another length");
    let place = memory.range(0x1000, 4).unwrap();
    let remaining = memory.without(0x1000, 0x100_0000_1000, 0x1000).unwrap();
    drop(memory);
    assert!(remaining.range(0x1000, 4).is_none());
    place.write(0, b"held");
    let mut bytes = [0; 4];
    place.read(0, &mut bytes);
    assert_eq!(&bytes, b"held");
}

#[test]
fn regions_are_mapped_once_for_many_rings() {
    let memory = regions(&[(0, 0x1000), (0x1000, 0x1000)]);
    let rings: Vec<_> = (0..256).map(|_| memory.clone()).collect();
    for region in memory.regions() {
        assert_eq!(Arc::strong_count(&region.0), 1);
    }
    assert!(rings.iter().all(|ring| ring.whole_regions().as_ptr() == memory.whole_regions().as_ptr()));
}

#[test]
fn regions_may_overlap_in_front_end_addresses() {
    let region = |guest, user, bytes| Region::on_heap(guest, user, bytes);
    let regions = [region(0, 0x1000, 0x100), region(0x8000, 0, 0x4000), region(0x4000, 0x1000, 0x200)];
    let memory = GuestMemory::new(regions.into()).unwrap();
    for (user, bytes, guest) in [
        (0, 1, Some(0x8000)),
        (0xfff, 2, Some(0x8fff)),
        (0x1100, 0x100, Some(0x4100)),
        (0x1100, 0x101, Some(0x9100)),
        (0x3fff, 1, Some(0xbfff)),
        (0x3fff, 2, None),
        (0x4000, 1, None),
    ] {
        let found = memory.user_range(user, bytes).map(|place| place.guest_address());
        assert_eq!(found, guest, "{bytes} at {user:#x}");
    }
}

#[test]
fn maps_the_regions_of_the_front_end() {
    let (file, descriptor) = memfd(0x5000);
    // The offset lies inside a page.
    let region = Region::map(descriptor, 0x7010, 0x9010, 0x2000, 0x1010, &large_quota()).unwrap();
    let memory = GuestMemory::new(vec![region]).unwrap();
    let place = memory.range(0x7010, 0x2000).unwrap();
    file.write_all_at(b"hello", 0x1010).unwrap();
    let mut bytes = [0; 5];
    place.read(0, &mut bytes);
    assert_eq!(&bytes, b"hello");
    place.part(0x1ff0, 0x10).write(0xf, b"!");
    file.read_exact_at(&mut bytes[..2], 0x1010 + 0x1fff).unwrap();
    assert_eq!(&bytes[..2], b"!\0");
    assert!(!place.is_lost() && place.is_aligned(16));
}

#[test]
fn rejects_unmappable_regions() {
    let map =
        |guest, user, bytes, offset| Region::map(memfd(0x3000).1, guest, user, bytes, offset, &large_quota());
    assert!(matches!(map(0, 0, 0, 0), Err(RegionError::Empty)));
    assert!(matches!(map(0, 0, 0x3001, 0), Err(RegionError::TooShort { end: 0x3001, size: 0x3000 })));
    assert!(matches!(map(0, 0, 0x1001, 0x2000), Err(RegionError::TooShort { .. })));
    assert!(matches!(map(0, 0, 0x1000, 0x3000), Err(RegionError::TooShort { .. })));
    assert!(matches!(map(0, 0, 16, u64::MAX - 15), Err(RegionError::Overflow { .. })));
    assert!(matches!(map(u64::MAX - 15, 0, 16, 0), Err(RegionError::Overflow { .. })));
    assert!(matches!(map(0, u64::MAX - 15, 0x1000, 0), Err(RegionError::Overflow { .. })));
    assert!(matches!(map(0, 0, u64::MAX, 0), Err(RegionError::TooShort { .. })));
    assert!(matches!(map(8, 0, 16, 0), Err(RegionError::Unaligned)));
    assert!(matches!(map(0, 8, 16, 0), Err(RegionError::Unaligned)));
    assert!(matches!(map(0, 0, 16, 8), Err(RegionError::Unaligned)));
    assert!(map(8, 8, 16, 8).is_ok());
    let map_file = |file: File| Region::map(file.into(), 0, 0, 16, 0, &large_quota());
    for path in ["/dev/zero", "/proc/self/status", "/dev"] {
        let refused = map_file(File::open(path).unwrap());
        assert!(matches!(refused, Err(RegionError::NotInMemory | RegionError::NotAFile)), "{path}");
    }
    let pipe = io::pipe().unwrap().0;
    assert!(matches!(Region::map(pipe.into(), 0, 0, 16, 0, &large_quota()), Err(RegionError::NotInMemory)));
    let file = memfd(64).0;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    assert!(matches!(
        map_file(File::open(path).unwrap()),
        Err(RegionError::Map(error)) if error.kind() == io::ErrorKind::PermissionDenied
    ));
}

#[test]
fn one_front_end_maps_no_more_than_its_quota() {
    let quota = MappingQuota::new(3, 0x5000);
    let map = |bytes| Region::map(memfd(0x8000).1, 0, 0, bytes, 0, &quota);
    let first = map(0x2000).unwrap();
    let _second = map(1).unwrap();
    // The last page counts in full.
    assert!(matches!(map(0x2001), Err(RegionError::TooManyBytes(0x5000))));
    assert!(matches!(map(0x6000), Err(RegionError::TooManyBytes(0x5000))));
    let _log = DirtyLog::map(memfd(64).1, 64, 0, &quota).unwrap();
    assert!(matches!(map(1), Err(RegionError::TooManyMappings(3))), "a rejected mapping does not count");
    let memory = GuestMemory::new(vec![first]).unwrap();
    let held = memory.range(0, 1).unwrap();
    drop(memory.without(0, 0, 0x2000).unwrap());
    drop(memory);
    assert!(map(1).is_err(), "it is held by a request");
    drop(held);
    assert!(map(0x3000).is_ok());
}

#[test]
fn a_descriptor_that_is_refused_is_closed() {
    let (mut reader, writer) = io::pipe().unwrap();
    assert!(Region::map(writer.into(), 0, 0, 16, 0, &large_quota()).is_err());
    // A writer left open would hide the end of the pipe.
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn shrunk_file_loses_only_its_region() {
    let (file, descriptor) = memfd(0x8000);
    let (other_file, other_descriptor) = memfd(0x8000);
    let memory = GuestMemory::new(vec![
        Region::map(descriptor, 0, 0, 0x8000, 0, &large_quota()).unwrap(),
        Region::map(other_descriptor, 0x8000, 0x8000, 0x8000, 0, &large_quota()).unwrap(),
    ])
    .unwrap();
    let (place, other) = (memory.range(0, 0x8000).unwrap(), memory.range(0x8000, 0x8000).unwrap());
    place.fill(0, 0x8000, 7);
    other.fill(0, 0x8000, 9);
    file.set_len(0x2000).unwrap();
    let mut bytes = vec![1; 0x8000];
    place.read(0x100, &mut bytes[..0x1000]);
    assert!(!place.is_lost(), "the remaining bytes can be read");
    // Threads that have not had the signal yet.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut bytes = vec![1; 0x8000];
                place.read(0, &mut bytes);
                assert!(bytes[..0x2000].iter().all(|&byte| byte == 7));
                assert!(bytes[0x2000..].iter().all(|&byte| byte == 0));
            });
        }
    });
    assert!(place.is_lost() && memory.is_lost());
    place.write(0x7fff, b"x");
    place.fill(0x5000, 0x1000, 8);
    place.read(0, &mut bytes);
    assert!(bytes[0x2000..].iter().all(|&byte| byte == 0), "it would be memory of ours");
    place.store_u32(0x4000, 5, Release);
    assert_eq!(place.load_u32(0x4000, Acquire), 5, "the write stays private");
    other.read(0, &mut bytes);
    assert!(!other.is_lost() && bytes.iter().all(|&byte| byte == 9));
    other.write(0, b"y");
    other_file.read_exact_at(&mut bytes[..1], 0).unwrap();
    assert_eq!(bytes[0], b'y');
    drop((memory, place));
    let (_, descriptor) = memfd(0x1000);
    assert!(
        !Region::map(descriptor, 0, 0, 0x1000, 0, &large_quota()).unwrap().is_lost(),
        "a slot that is used again"
    );
}

#[test]
fn a_file_that_shrinks_is_survived_where_no_more_mappings_are_possible() {
    let (file, descriptor) = memfd(0x8000);
    let (_, other) = memfd(0x1000);
    let place = |descriptor, bytes| {
        let region = Region::map(descriptor, 0, 0, bytes, 0, &large_quota()).unwrap();
        GuestMemory::new(vec![region]).unwrap().range(0, bytes as usize).unwrap()
    };
    let (place, other) = (place(descriptor, 0x8000), place(other, 0x1000));
    other.fill(0, 0x1000, 9);
    file.set_len(0x1000).unwrap();
    // In a child process, because concurrent tests need mappings too.
    // SAFETY: the child makes system calls, accesses the places, and exits: it takes no lock.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut protection = libc::PROT_NONE;
        // SAFETY: new mappings, at addresses of the kernel's choice. The protection alternates so
        // that the kernel does not merge neighbours.
        let map = || unsafe {
            protection ^= libc::PROT_READ;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 1, protection, flags, -1, 0)
        };
        let _all = std::iter::repeat_with(map).find(|&page| page == libc::MAP_FAILED);
        let mut byte = [1; 2];
        place.read(0x5000, &mut byte[..1]);
        other.read(0, &mut byte[1..]);
        let survived = byte == [0, 9] && place.is_lost() && !other.is_lost();
        // SAFETY: ends the child only, without running the parent's destructors.
        unsafe { libc::_exit(if survived { 7 } else { 1 }) }
    }
    let mut status = 0;
    // SAFETY: the child from above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "status {status:#x}");
}

#[test]
fn integers_are_little_endian_and_dirty() {
    let log = DirtyLog::on_heap(8);
    let memory = regions(&[(0x4000, 0x4000)]).with_log(Some(log.clone()));
    let place = memory.range(0x4000, 0x4000).unwrap();
    place.store_u16(2, 0x0102, Relaxed);
    place.store_u32(0x1004, 0x0304_0506, Release);
    place.store_u64(0x2008, 0x0708_090a_0b0c_0d0e, SeqCst);
    let mut bytes = [0; 8];
    place.read(0x2008, &mut bytes);
    assert_eq!(bytes, [0x0e, 0x0d, 0x0c, 0x0b, 0x0a, 9, 8, 7]);
    place.read(2, &mut bytes[..2]);
    assert_eq!(bytes[..2], [2, 1]);
    assert_eq!(place.load_u16(2, Relaxed), 0x0102);
    assert_eq!(place.load_u32(0x1004, Acquire), 0x0304_0506);
    assert_eq!(place.load_u64(0x2008, SeqCst), 0x0708_090a_0b0c_0d0e);
    let marked = |log: &DirtyLog| (0..16).filter(|page| log.is_marked(page << 12)).collect::<Vec<_>>();
    assert_eq!(marked(&log), [4, 5, 6], "loads mark nothing");
    place.part(0x3000, 8).mark_dirty();
    assert_eq!(marked(&log), [4, 5, 6, 7]);
    let unlogged = memory.with_log(None).range(0x4000, 8).unwrap();
    let log = DirtyLog::on_heap(8);
    unlogged.write(0, b"quiet");
    let crossing = memory.with_log(Some(log.clone())).range(0x4ffe, 4).unwrap();
    crossing.write(1, b"ab");
    assert_eq!(marked(&log), [4, 5]);
}

#[test]
#[should_panic(expected = "not aligned")]
fn unaligned_integer_panics() {
    regions(&[(0, 64)]).range(0, 64).unwrap().load_u32(2, Relaxed);
}

#[test]
#[should_panic(expected = "9 bytes at 56 of 64")]
fn part_outside_panics() {
    let _ = regions(&[(0, 64)]).range(0, 64).unwrap().part(56, 9);
}

proptest! {
    /// Reads, writes and fills of any length and alignment have the same effect as on a vector.
    #[test]
    fn copies_are_exact(steps in prop::collection::vec((0..3_u8, 0..80_usize, copied(), any::<u8>()), 1..20)) {
        const ALL: usize = 4200;
        let place = regions(&[(0, ALL)]).range(0, ALL).unwrap();
        let mut model = vec![0_u8; ALL];
        for (kind, offset, bytes, seed) in steps {
            let range = offset..offset + bytes;
            match kind {
                0 => {
                    let data: Vec<u8> = (0..bytes).map(|at| seed.wrapping_add(at as u8)).collect();
                    place.write(offset, &data);
                    model[range].copy_from_slice(&data);
                }
                1 => {
                    place.fill(offset, bytes, seed);
                    model[range].fill(seed);
                }
                _ => {
                    let mut seen = vec![!seed; bytes];
                    place.part(offset, bytes).read(0, &mut seen);
                    prop_assert_eq!(&seen[..], &model[range]);
                }
            }
        }
        let mut all = vec![1; ALL];
        place.read(0, &mut all);
        prop_assert_eq!(all, model);
    }
}

/// Short lengths, and lengths that are copied by string instructions.
fn copied() -> impl Strategy<Value = usize> {
    prop_oneof![0..80_usize, 1000..1100_usize, 4000..4100_usize]
}
