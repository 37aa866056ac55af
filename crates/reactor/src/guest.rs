//! A guest's memory, passed by its front end as files that both sides map; and own memory that is
//! shared with the kernel in the same way ([`Region::shared_with_kernel`]).
//!
//! ```text
//!   GuestMemory   ▕─ region ──▏   ▕─ region ─▏▕─── region ────────▏     guest-physical addresses
//!   GuestBytes          ▕──▏              ▕──▏▕──▏                      bytes in one region
//! ```
//!
//! The guest may change every byte at any time, and the front end may remove a region at any time.
//! Three rules follow:
//! - No code ever has a `&[u8]` of it. A [`GuestBytes`] is read and written by volatile copies and
//!   atomics, and the kernel gets its address. Data that must be validated is copied first, and
//!   only the copy is validated and used.
//! - A [`GuestBytes`] keeps its region mapped, so a removed region is unmapped when the last one is
//!   dropped. The amount mapped for one front end is bounded: see [`MappingQuota`].
//! - A file that shrinks under its mapping affects that region only: see [`sigbus`]. The zeroes
//!   that replace it are private memory, so nothing more is copied to it.
//!
//! [`driver`] is the guest's side, for measuring servers.
//!
//! Never decides which addresses a guest may use, and does not handle rings or messages: that is
//! `export`.

mod dirty;
pub mod driver;
mod mapping;
mod quota;
mod range;
mod sigbus;

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use smallvec::SmallVec;

use self::mapping::MemoryMapping;
pub use self::{
    dirty::DirtyLog,
    quota::{MappingQuota, reserve_address_space},
    range::GuestBytes,
};

/// Modulus in which the addresses of a region and its offset in the file must agree, in bytes: the
/// strictest alignment of a part of a ring (the descriptor table, virtio 1.3 § 2.7). Data that is
/// aligned in the guest is then aligned in this mapping too.
pub const ALIGNMENT: u64 = 16;

/// Reason why memory is rejected.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The region is empty.
    #[error("a region of memory is empty")]
    Empty,
    /// The region ends beyond the last address.
    #[error("a region of {bytes} bytes at {start:#x} ends beyond the last address")]
    Overflow {
        /// First address, or offset in the file.
        start: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// Addresses and offset differ modulo [`ALIGNMENT`].
    #[error("a region's addresses and its offset in the file differ modulo {ALIGNMENT}")]
    Unaligned,
    /// The descriptor is neither a memfd nor a file of a tmpfs or hugetlbfs: see `fcntl(2)`,
    /// F_GET_SEALS.
    #[error(
        "a region's descriptor is not a file in memory (use memory-backend-memfd of QEMU, or \
         memory-backend-file with a path on /dev/shm or hugetlbfs)"
    )]
    NotInMemory,
    /// The descriptor is in memory, but not a regular file.
    #[error("a region's descriptor is not a regular file")]
    NotAFile,
    /// The file is shorter than the region, so that accesses would raise SIGBUS.
    #[error("a region ends at {end} of a file of {size} bytes")]
    TooShort {
        /// Required size of the file in bytes.
        end: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// Two regions overlap in guest addresses.
    #[error("a region at {0:#x} overlaps another")]
    Overlap(u64),
    /// The front end already has this maximum number of mappings.
    #[error(
        "{0} mappings of this front end are in use, which is the maximum (requests in flight may \
         still use mappings of an earlier memory table)"
    )]
    TooManyMappings(usize),
    /// The front end's mappings would exceed this number of bytes.
    #[error(
        "this front end's mappings would have more than {0} bytes in total (eight times the memory \
         and swap of the host, and 16 TiB at most)"
    )]
    TooManyBytes(u64),
    /// The address space limit of the process leaves no room for this number of bytes.
    #[error(
        "{0} bytes do not fit into the address space of this process (remove the limit `ulimit -v` \
         or LimitAS=, or raise it above --memory plus the memory of all virtual machines)"
    )]
    NoAddresses(u64),
    /// The kernel does not map the region.
    #[error("a region cannot be mapped: {0}")]
    Map(#[from] io::Error),
}

/// A mapped region of a guest's memory. Cheap to clone; unmapped when its last clone is dropped.
#[derive(Clone, Debug)]
pub struct Region(Arc<RegionInner>);

#[derive(Debug)]
struct RegionInner {
    guest_address: u64,
    user_address: u64,
    mapping: MemoryMapping,
}

impl Region {
    /// Maps `bytes` of `file` from `offset` on, for reading and writing, shared with all processes
    /// that map it. The guest refers to it by `guest_address`, the front end by `user_address`.
    /// Keeps the descriptor, and counts in `quota`, until it is unmapped.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn map(
        file: OwnedFd,
        guest_address: u64,
        user_address: u64,
        bytes: u64,
        offset: u64,
        quota: &MappingQuota,
    ) -> Result<Self, RegionError> {
        for start in [guest_address, user_address] {
            start.checked_add(bytes).ok_or(RegionError::Overflow { start, bytes })?;
        }
        if [guest_address, user_address].iter().any(|address| address % ALIGNMENT != offset % ALIGNMENT) {
            return Err(RegionError::Unaligned);
        }
        let mapping = MemoryMapping::of_file(file, bytes, offset, quota)?;
        Ok(Self(Arc::new(RegionInner { guest_address, user_address, mapping })))
    }

    /// Own pages that the kernel reads and writes while the process works with them. Memory is
    /// allocated at the first access. Addresses start at 0.
    ///
    /// # Errors
    /// As `mmap(2)`; `EINVAL` for zero bytes.
    pub fn shared_with_kernel(bytes: usize) -> io::Result<Self> {
        let mapping = MemoryMapping::anonymous(bytes)?;
        Ok(Self(Arc::new(RegionInner { guest_address: 0, user_address: 0, mapping })))
    }

    /// Zeroes on the heap, for tests, simulation, fuzzing and Miri.
    ///
    /// # Panics
    /// Panics if the region is empty, ends beyond the last address, or does not begin at multiples
    /// of [`ALIGNMENT`].
    pub fn on_heap(guest_address: u64, user_address: u64, bytes: usize) -> Self {
        for start in [guest_address, user_address] {
            assert!(start.checked_add(bytes as u64).is_some(), "{bytes} bytes at {start:#x}");
            assert_eq!(start % ALIGNMENT, 0, "a region at {start:#x}");
        }
        Self(Arc::new(RegionInner { guest_address, user_address, mapping: MemoryMapping::on_heap(bytes) }))
    }

    /// First guest-physical address.
    pub fn guest_address(&self) -> u64 {
        self.0.guest_address
    }

    /// First virtual address in the front end.
    pub fn user_address(&self) -> u64 {
        self.0.user_address
    }

    /// Length in bytes, never zero.
    pub fn bytes(&self) -> u64 {
        self.0.mapping.bytes() as u64
    }

    /// The file and the offset of the region in it; `None` for own memory.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.0.mapping.file()
    }

    /// True if the file has shrunk. The lost part reads as zeroes.
    pub fn is_lost(&self) -> bool {
        sigbus::is_any_lost() && self.0.mapping.is_lost()
    }

    /// Last guest-physical address.
    fn last_address(&self) -> u64 {
        self.0.guest_address + (self.bytes() - 1)
    }
}

/// All regions of one guest. Immutable; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    /// The regions by guest address. Shared by all clones, so each region has one reference.
    regions: Arc<[GuestBytes]>,
    /// First address in the front end and index of each region, by that address.
    by_user_address: Arc<[(u64, usize)]>,
    log: Option<DirtyLog>,
}

impl GuestMemory {
    /// Memory with these regions, in any order.
    ///
    /// # Errors
    /// [`RegionError::Overlap`] if two of them overlap in guest addresses.
    pub fn new(regions: Vec<Region>) -> Result<Self, RegionError> {
        Self::with_regions(regions, None)
    }

    fn with_regions(mut regions: Vec<Region>, log: Option<DirtyLog>) -> Result<Self, RegionError> {
        regions.sort_by_key(Region::guest_address);
        let overlap = regions.windows(2).find(|pair| pair[0].last_address() >= pair[1].guest_address());
        if let Some(pair) = overlap {
            return Err(RegionError::Overlap(pair[1].guest_address()));
        }
        let mut by_user_address: Vec<_> = regions.iter().map(Region::user_address).zip(0..).collect();
        by_user_address.sort_unstable();
        let wholes = regions.into_iter().map(|region| GuestBytes::whole(region, log.clone())).collect();
        Ok(Self { regions: wholes, by_user_address: by_user_address.into(), log })
    }

    /// This memory with an additional region.
    ///
    /// # Errors
    /// As [`GuestMemory::new`].
    pub fn with(&self, region: Region) -> Result<Self, RegionError> {
        let regions = self.regions().cloned().chain([region]).collect();
        Self::with_regions(regions, self.log.clone())
    }

    /// This memory without the region with these addresses and this length; `None` if there is
    /// none.
    pub fn without(&self, guest_address: u64, user_address: u64, bytes: u64) -> Option<Self> {
        let index = self.regions().position(|region| {
            region.guest_address() == guest_address
                && region.user_address() == user_address
                && region.bytes() == bytes
        })?;
        let mut regions: Vec<_> = self.regions().cloned().collect();
        regions.remove(index);
        Some(Self::with_regions(regions, self.log.clone()).expect("they did not overlap"))
    }

    /// This memory with writes recorded in `log` from now on, or not recorded.
    #[must_use]
    pub fn with_log(&self, log: Option<DirtyLog>) -> Self {
        Self::with_regions(self.regions().cloned().collect(), log).expect("they did not overlap")
    }

    /// The log of writes.
    pub fn log(&self) -> Option<&DirtyLog> {
        self.log.as_ref()
    }

    /// The regions by guest address.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Region> {
        self.regions.iter().map(GuestBytes::region)
    }

    /// Each region as a whole.
    pub fn whole_regions(&self) -> &[GuestBytes] {
        &self.regions
    }

    /// True if a file of a region or of the log has shrunk and the loss was detected.
    pub fn is_lost(&self) -> bool {
        sigbus::is_any_lost()
            && (self.regions().any(Region::is_lost) || self.log.as_ref().is_some_and(DirtyLog::is_lost))
    }

    /// Bytes at a guest-physical address, as in a descriptor. `None` if they are not entirely
    /// within one region.
    pub fn range(&self, address: u64, bytes: usize) -> Option<GuestBytes> {
        let region = self.region_at(address)?;
        GuestBytes::in_region(region, address - region.guest_address(), bytes, self.log.as_ref())
    }

    /// Bytes at an address in the front end, as in `VHOST_USER_SET_VRING_ADDR`. `None` if they are
    /// not entirely within one region.
    pub fn user_range(&self, address: u64, bytes: usize) -> Option<GuestBytes> {
        let end = self.by_user_address.partition_point(|(first, _)| *first <= address);
        // Regions may overlap in the front end's addresses, so earlier ones are candidates too.
        self.by_user_address[..end].iter().rev().find_map(|&(first, index)| {
            GuestBytes::in_region(self.regions[index].region(), address - first, bytes, self.log.as_ref())
        })
    }

    /// Appends a range that may span adjacent regions, one piece for each; nothing for zero bytes.
    /// Returns false, and appends nothing, if any byte is outside of all regions.
    pub fn ranges(&self, mut address: u64, bytes: usize, into: &mut SmallVec<[GuestBytes; 4]>) -> bool {
        let before = into.len();
        let mut left = bytes;
        while left > 0 {
            let piece = self.region_at(address).and_then(|region| {
                let offset = address - region.guest_address();
                let inside = usize::try_from(region.bytes().checked_sub(offset)?).ok()?;
                GuestBytes::in_region(region, offset, left.min(inside).max(1), self.log.as_ref())
            });
            let Some(piece) = piece else {
                into.truncate(before);
                return false;
            };
            left -= piece.bytes();
            // No region ends at the last address, so this cannot overflow.
            address += piece.bytes() as u64;
            into.push(piece);
        }
        true
    }

    /// The last region that does not begin after `address`.
    fn region_at(&self, address: u64) -> Option<&Region> {
        let end = self.regions.partition_point(|whole| whole.guest_address() <= address);
        self.regions.get(end.checked_sub(1)?).map(GuestBytes::region)
    }
}

#[cfg(test)]
mod tests;
