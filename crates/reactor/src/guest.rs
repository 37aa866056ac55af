//! Memory of a guest, lent to us by its front end as files that both sides map; and memory of ours
//! that we lend to the kernel in the same way ([`Region::lent`]).
//!
//! ```text
//!   Memory    ▕─ Region ──▏   ▕─ Region ─▏▕─── Region ────────▏     guest-physical addresses
//!   Place           ▕──▏              ▕──▏▕──▏                      bytes in one region
//! ```
//!
//! The guest may change every byte of it while we look, and the front end may take a region back
//! at any time. Three rules follow:
//! - Nobody ever has a `&[u8]` of it. A [`Place`] is read and written by volatile copies and
//!   atomics, and the kernel is given its address; what is to be judged is copied first and judged
//!   in the copy.
//! - A place keeps its region mapped, so a region that is taken back ends with its last place. How
//!   much is mapped for one front end has a bound: see [`Quota`].
//! - A file that shrinks under its mapping costs that region and nothing else: see [`sigbus`]. The
//!   zeroes in its place are memory of ours, so nothing more is copied there.
//!
//! [`driver`] is the other side, a guest's, for measuring servers.
//!
//! Never decides which addresses a guest may name, and knows nothing of rings or messages: that is
//! `export`.

mod dirty;
pub mod driver;
mod mapping;
mod place;
mod quota;
mod sigbus;

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use smallvec::SmallVec;

use self::mapping::Mapping;
pub use self::{
    dirty::DirtyLog,
    place::Place,
    quota::{Quota, keep_addresses},
};

/// What the addresses of a region and its offset in the file must agree in, in bytes: the strictest
/// alignment of a part of a ring (the descriptor table, virtio 1.3 § 2.7). What is aligned in the
/// guest is then aligned in our mapping too.
pub const ALIGNMENT: u64 = 16;

/// Why memory is not taken.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// It has no bytes.
    #[error("a region of memory has no bytes")]
    Empty,
    /// It ends behind the last address.
    #[error("a region of {bytes} bytes at {start:#x} ends behind the last address")]
    Overflow {
        /// Where it begins: an address, or the offset in its file.
        start: u64,
        /// Its length in bytes.
        bytes: u64,
    },
    /// Its addresses and its offset differ in their last bits: see [`ALIGNMENT`].
    #[error("a region's addresses and its offset in the file differ modulo {ALIGNMENT}")]
    Unaligned,
    /// It is neither a memfd, nor a file of a tmpfs or of huge pages: see `fcntl(2)`, F_GET_SEALS.
    #[error(
        "a region's descriptor is no file in memory (QEMU has memory-backend-memfd, and memory-backend-file with a path on /dev/shm or of huge pages)"
    )]
    NotInMemory,
    /// It is in memory, and no regular file.
    #[error("a region's descriptor is no regular file")]
    NotAFile,
    /// Its file is shorter: touching the rest would be SIGBUS.
    #[error("a region ends at {end} of a file of {size} bytes")]
    TooShort {
        /// Bytes that the file must have at least.
        end: u64,
        /// Bytes that it has.
        size: u64,
    },
    /// Two regions have guest addresses in common.
    #[error("a region at {0:#x} overlaps another")]
    Overlap(u64),
    /// So many are mapped for its front end.
    #[error(
        "{0} mappings of this front end are in use, some perhaps by requests in flight; no more are possible"
    )]
    TooManyMappings(usize),
    /// More than this would be mapped for its front end.
    #[error(
        "this front end's mappings would have more than {0} bytes together (a front end may have eight times the memory and swap of its host, and 16 TiB at most)"
    )]
    TooManyBytes(u64),
    /// The process has a limit, and would have too few left for itself.
    #[error(
        "{0} bytes have no room among the addresses of this process (`ulimit -v` or LimitAS= must be more than --memory and all memory of all machines, or unlimited)"
    )]
    NoAddresses(u64),
    /// The kernel does not map it.
    #[error("a region cannot be mapped: {0}")]
    Map(#[from] io::Error),
}

/// A piece of a guest's memory, mapped. Cheap to clone; unmapped when its last holder goes.
#[derive(Clone, Debug)]
pub struct Region(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    guest_address: u64,
    user_address: u64,
    mapping: Mapping,
}

impl Region {
    /// Maps `bytes` of `file` from `offset` on, for reading and writing, shared with all who map
    /// it. The guest names it by `guest_address`, the front end by `user_address`. Keeps the
    /// descriptor, and counts in `quota`, until it is unmapped.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn map(
        file: OwnedFd,
        guest_address: u64,
        user_address: u64,
        bytes: u64,
        offset: u64,
        quota: &Quota,
    ) -> Result<Self, RegionError> {
        for start in [guest_address, user_address] {
            start.checked_add(bytes).ok_or(RegionError::Overflow { start, bytes })?;
        }
        if [guest_address, user_address].iter().any(|address| address % ALIGNMENT != offset % ALIGNMENT) {
            return Err(RegionError::Unaligned);
        }
        let mapping = Mapping::of_file(file, bytes, offset, quota)?;
        Ok(Self(Arc::new(Inner { guest_address, user_address, mapping })))
    }

    /// Pages of ours for the kernel to put data into and to take it from while we work with them.
    /// They take no memory before they are touched. Places in it are counted from 0.
    ///
    /// # Errors
    /// As `mmap(2)`; no bytes are `EINVAL`.
    pub fn lent(bytes: usize) -> io::Result<Self> {
        let mapping = Mapping::anonymous(bytes)?;
        Ok(Self(Arc::new(Inner { guest_address: 0, user_address: 0, mapping })))
    }

    /// Zeroes on the heap: for tests, simulation, fuzzing and Miri.
    ///
    /// # Panics
    /// If it has no bytes, ends behind the last address, or begins at addresses that are no
    /// multiples of [`ALIGNMENT`].
    pub fn on_heap(guest_address: u64, user_address: u64, bytes: usize) -> Self {
        for start in [guest_address, user_address] {
            assert!(start.checked_add(bytes as u64).is_some(), "{bytes} bytes at {start:#x}");
            assert_eq!(start % ALIGNMENT, 0, "a region at {start:#x}");
        }
        Self(Arc::new(Inner { guest_address, user_address, mapping: Mapping::on_heap(bytes) }))
    }

    /// Where the guest has it: its first guest-physical address.
    pub fn guest_address(&self) -> u64 {
        self.0.guest_address
    }

    /// Where the front end has it: its first virtual address there.
    pub fn user_address(&self) -> u64 {
        self.0.user_address
    }

    /// Its length in bytes, never zero.
    pub fn bytes(&self) -> u64 {
        self.0.mapping.bytes() as u64
    }

    /// Its file, and where in it it begins; `None` of memory that nobody has passed.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.0.mapping.file()
    }

    /// Whether its file shrank under us. What was there is gone and reads as zeroes.
    pub fn is_lost(&self) -> bool {
        sigbus::is_any_lost() && self.0.mapping.is_lost()
    }

    /// The last guest-physical address of it.
    fn last_address(&self) -> u64 {
        self.0.guest_address + (self.bytes() - 1)
    }
}

/// All regions of one guest at one time. A value that does not change; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Each region, by guest address. However many look into them, they are held once.
    wholes: Arc<[Place]>,
    /// The same by the front end's addresses: where each begins there, and which it is.
    by_user_address: Arc<[(u64, usize)]>,
    log: Option<DirtyLog>,
}

impl Memory {
    /// Memory of these regions, in any order.
    ///
    /// # Errors
    /// [`RegionError::Overlap`]: two of them have a guest address in common.
    pub fn new(regions: Vec<Region>) -> Result<Self, RegionError> {
        Self::of(regions, None)
    }

    fn of(mut regions: Vec<Region>, log: Option<DirtyLog>) -> Result<Self, RegionError> {
        regions.sort_by_key(Region::guest_address);
        let overlap = regions.windows(2).find(|pair| pair[0].last_address() >= pair[1].guest_address());
        if let Some(pair) = overlap {
            return Err(RegionError::Overlap(pair[1].guest_address()));
        }
        let mut by_user_address: Vec<_> = regions.iter().map(Region::user_address).zip(0..).collect();
        by_user_address.sort_unstable();
        let wholes = regions.into_iter().map(|region| Place::whole(region, log.clone())).collect();
        Ok(Self { wholes, by_user_address: by_user_address.into(), log })
    }

    /// The same with one region more.
    ///
    /// # Errors
    /// As [`Memory::new`].
    pub fn with(&self, region: Region) -> Result<Self, RegionError> {
        let regions = self.regions().cloned().chain([region]).collect();
        Self::of(regions, self.log.clone())
    }

    /// The same without the region of these addresses and this length; `None` if there is none.
    pub fn without(&self, guest_address: u64, user_address: u64, bytes: u64) -> Option<Self> {
        let index = self.regions().position(|region| {
            region.guest_address() == guest_address
                && region.user_address() == user_address
                && region.bytes() == bytes
        })?;
        let mut regions: Vec<_> = self.regions().cloned().collect();
        regions.remove(index);
        Some(Self::of(regions, self.log.clone()).expect("they did not overlap"))
    }

    /// The same, with what is written from now on recorded in `log`, or not recorded.
    #[must_use]
    pub fn with_log(&self, log: Option<DirtyLog>) -> Self {
        Self::of(self.regions().cloned().collect(), log).expect("they did not overlap")
    }

    /// Where what is written is recorded.
    pub fn log(&self) -> Option<&DirtyLog> {
        self.log.as_ref()
    }

    /// Its regions by guest address.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Region> {
        self.wholes.iter().map(Place::region)
    }

    /// The same, each as a place.
    pub fn wholes(&self) -> &[Place] {
        &self.wholes
    }

    /// Whether a file under it, or under its log, has shrunk and this was met.
    pub fn is_lost(&self) -> bool {
        sigbus::is_any_lost()
            && (self.regions().any(Region::is_lost) || self.log.as_ref().is_some_and(DirtyLog::is_lost))
    }

    /// Bytes by their guest-physical address, as in a descriptor. `None`: they are not wholly
    /// within one region.
    pub fn place(&self, address: u64, bytes: usize) -> Option<Place> {
        let region = self.region_at(address)?;
        Place::within(region, address - region.guest_address(), bytes, self.log.as_ref())
    }

    /// Bytes by their address in the front end, as in `VHOST_USER_SET_VRING_ADDR`. `None`: they are
    /// not wholly within one region.
    pub fn user_place(&self, address: u64, bytes: usize) -> Option<Place> {
        let behind = self.by_user_address.partition_point(|(first, _)| *first <= address);
        // The last of these has it, unless they overlap there.
        self.by_user_address[..behind].iter().rev().find_map(|&(first, index)| {
            Place::within(self.wholes[index].region(), address - first, bytes, self.log.as_ref())
        })
    }

    /// Appends the places of bytes that may cross from a region into one that adjoins it, in order;
    /// none for no bytes. False, and nothing appended, if any byte is outside.
    pub fn places(&self, mut address: u64, bytes: usize, into: &mut SmallVec<[Place; 4]>) -> bool {
        let before = into.len();
        let mut left = bytes;
        while left > 0 {
            let piece = self.region_at(address).and_then(|region| {
                let offset = address - region.guest_address();
                let inside = usize::try_from(region.bytes().checked_sub(offset)?).ok()?;
                Place::within(region, offset, left.min(inside).max(1), self.log.as_ref())
            });
            let Some(piece) = piece else {
                into.truncate(before);
                return false;
            };
            left -= piece.bytes();
            // No region ends at the last address, so the next byte has one.
            address += piece.bytes() as u64;
            into.push(piece);
        }
        true
    }

    /// The last region that does not begin behind `address`.
    fn region_at(&self, address: u64) -> Option<&Region> {
        let behind = self.wholes.partition_point(|whole| whole.guest_address() <= address);
        self.wholes.get(behind.checked_sub(1)?).map(Place::region)
    }
}

#[cfg(test)]
mod tests;
