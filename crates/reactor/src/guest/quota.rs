//! Bounds on the memory mapped for one front end.
//!
//! Mappings are counted, not the regions that the front end currently shares, because requests keep
//! removed regions mapped. Without a bound one front end could exhaust the address space, the
//! mappings or the page tables of this process, and affect all other disks.
//!
//! If the process has an address space limit (`ulimit -v`), the mappings of all front ends together
//! must leave room for the process itself, which could not continue otherwise.

use std::{
    mem::MaybeUninit,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::RegionError;

/// Maximum mapped by one front end, as a multiple of the host's memory and swap. Its page tables, a
/// 512th of that, then take at most a 64th of the host's memory. A guest may be several times as
/// large as its host, for example if it is configured to grow.
const MAX_HOST_MEMORIES: u64 = 8;
/// Absolute maximum: 16 TiB, an eighth of a process's address space on x86-64.
const MAX_MAPPED_BYTES: u64 = 1 << 44;

/// Counts the mappings of one front end: memory, dirty logs and in-flight areas. Clones share the
/// counters.
#[derive(Clone, Debug)]
pub struct MappingQuota(Arc<QuotaCounters>);

#[derive(Debug)]
struct QuotaCounters {
    max_mappings: usize,
    max_bytes: u64,
    mappings: AtomicUsize,
    bytes: AtomicU64,
}

/// The quota used by one mapping, returned on drop.
#[derive(Debug)]
pub(super) struct QuotaUse {
    quota: MappingQuota,
    bytes: u64,
}

impl MappingQuota {
    /// A quota for a number of concurrent mappings and their total bytes.
    pub fn new(max_mappings: usize, max_bytes: u64) -> Self {
        let (mappings, bytes) = Default::default();
        Self(Arc::new(QuotaCounters { max_mappings, max_bytes, mappings, bytes }))
    }

    /// A quota for a number of concurrent mappings with the maximum bytes of a front end on this
    /// host.
    pub fn of_front_end(max_mappings: usize) -> Self {
        let max_bytes = host_memory().saturating_mul(MAX_HOST_MEMORIES).clamp(1, MAX_MAPPED_BYTES);
        Self::new(max_mappings, max_bytes)
    }

    pub(super) fn charge(&self, bytes: u64) -> Result<QuotaUse, RegionError> {
        let &QuotaCounters { max_mappings: most_mappings, max_bytes: most_bytes, .. } = &*self.0;
        if bytes > most_bytes {
            return Err(RegionError::TooManyBytes(most_bytes));
        }
        let mappings = self.0.mappings.fetch_add(1, Relaxed) + 1;
        let sum = self.0.bytes.fetch_add(bytes, Relaxed) + bytes;
        // Constructed before the checks, so that a rejected share is returned on drop.
        let share = QuotaUse { quota: self.clone(), bytes };
        if mappings > most_mappings {
            return Err(RegionError::TooManyMappings(most_mappings));
        }
        if sum > most_bytes {
            return Err(RegionError::TooManyBytes(most_bytes));
        }
        Ok(share)
    }
}

impl Drop for QuotaUse {
    fn drop(&mut self) {
        self.quota.0.mappings.fetch_sub(1, Relaxed);
        self.quota.0.bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// Memory and swap of the host in bytes.
fn host_memory() -> u64 {
    let mut info = MaybeUninit::<libc::sysinfo>::uninit();
    // SAFETY: the kernel fills it in, or fails.
    let info = match unsafe { libc::sysinfo(info.as_mut_ptr()) } {
        // SAFETY: the call succeeded and filled it in.
        0 => unsafe { info.assume_init() },
        _ => return MAX_MAPPED_BYTES,
    };
    (info.totalram + info.totalswap).saturating_mul(info.mem_unit.into())
}

/// Address space limit of the process in bytes, if any.
pub(super) fn address_space_limit() -> Option<u64> {
    let (limit, _) = getrlimit(Resource::RLIMIT_AS).ok()?;
    (limit != RLIM_INFINITY).then_some(limit)
}

/// Address space reserved for the process itself, in bytes.
static RESERVED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Reserves address space for the process itself if there is a limit (`ulimit -v`). Mappings for
/// front ends that would not leave it free fail from now on.
pub fn reserve_address_space(bytes: u64) {
    RESERVED_BYTES.store(bytes, Relaxed);
}

/// True if the reserved address space is still free.
pub(super) fn is_reserve_free() -> bool {
    address_space_limit().is_none_or(|limit| is_free(RESERVED_BYTES.load(Relaxed).min(limit)))
}

/// True if a mapping of this size would succeed.
fn is_free(bytes: u64) -> bool {
    let Ok(length) = usize::try_from(bytes.max(1)) else { return false };
    // SAFETY: a new mapping, at an address of the kernel's choice, that is never accessed.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let pages = libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0);
        pages != libc::MAP_FAILED && libc::munmap(pages, length) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_is_a_multiple_of_host_memory() {
        let text = std::fs::read_to_string("/proc/meminfo").expect("it is there");
        let kib = |name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
            line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
        };
        let host = (kib("MemTotal:") + kib("SwapTotal:")) << 10;
        assert_eq!(host_memory(), host);
        assert_eq!(MappingQuota::of_front_end(1).0.max_bytes, (8 * host).min(MAX_MAPPED_BYTES));
    }

    #[test]
    fn free_space_can_be_mapped() {
        assert!(is_free(0) && is_free(1 << 30));
        assert!(!is_free(1 << 62));
        assert!(is_reserve_free(), "a test has no limit");
    }
}
