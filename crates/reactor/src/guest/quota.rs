//! How much one front end may have mapped here.
//!
//! It counts what is mapped, not what the front end has lent at the moment: requests keep a region
//! mapped that has been taken back. Without a bound one front end would use up the addresses, the
//! mappings or the page tables of this process, and every other disk with them.
//!
//! Addresses have a limit of their own where the process has one (`ulimit -v`). There, what may be
//! mapped for all front ends together is what leaves room for the process itself: it could not go
//! on without.

use std::{
    mem::MaybeUninit,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::RegionError;

/// What one front end may have mapped, in parts of the host's memory and swap. Its page tables, a
/// 512th of that, then take a 64th of the host's memory at most; and a guest may be several times
/// as large as its host, as one is that has room to grow.
const HOST_MEMORIES: u64 = 8;
/// And so many bytes at most, 16 TiB: an eighth of the addresses of a process on x86-64.
const MOST_BYTES: u64 = 1 << 44;

/// What one front end has mapped: memory, logs of writes and in-flight areas. Clones count
/// together.
#[derive(Clone, Debug)]
pub struct Quota(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    most_mappings: usize,
    most_bytes: u64,
    mappings: AtomicUsize,
    bytes: AtomicU64,
}

/// The part of one mapping. Given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
    quota: Quota,
    bytes: u64,
}

impl Quota {
    /// For so many mappings at a time, of so many bytes together.
    pub fn new(most_mappings: usize, most_bytes: u64) -> Self {
        let (mappings, bytes) = Default::default();
        Self(Arc::new(Inner { most_mappings, most_bytes, mappings, bytes }))
    }

    /// For so many mappings at a time, of as many bytes as one front end may have on this host.
    pub fn of_front_end(most_mappings: usize) -> Self {
        let most_bytes = host_memory().saturating_mul(HOST_MEMORIES).clamp(1, MOST_BYTES);
        Self::new(most_mappings, most_bytes)
    }

    pub(super) fn take(&self, bytes: u64) -> Result<Share, RegionError> {
        let &Inner { most_mappings, most_bytes, .. } = &*self.0;
        if bytes > most_bytes {
            return Err(RegionError::TooManyBytes(most_bytes));
        }
        let mappings = self.0.mappings.fetch_add(1, Relaxed) + 1;
        let sum = self.0.bytes.fetch_add(bytes, Relaxed) + bytes;
        // Gives back what is refused.
        let share = Share { quota: self.clone(), bytes };
        if mappings > most_mappings {
            return Err(RegionError::TooManyMappings(most_mappings));
        }
        if sum > most_bytes {
            return Err(RegionError::TooManyBytes(most_bytes));
        }
        Ok(share)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.quota.0.mappings.fetch_sub(1, Relaxed);
        self.quota.0.bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// Memory and swap, in bytes.
fn host_memory() -> u64 {
    let mut info = MaybeUninit::<libc::sysinfo>::uninit();
    // SAFETY: the kernel fills it in, or fails.
    let info = match unsafe { libc::sysinfo(info.as_mut_ptr()) } {
        // SAFETY: it was filled in.
        0 => unsafe { info.assume_init() },
        _ => return MOST_BYTES,
    };
    (info.totalram + info.totalswap).saturating_mul(info.mem_unit.into())
}

/// How many addresses the process may have, in bytes, if that has a limit.
pub(super) fn addresses() -> Option<u64> {
    let (limit, _) = getrlimit(Resource::RLIMIT_AS).ok()?;
    (limit != RLIM_INFINITY).then_some(limit)
}

/// Bytes of addresses that the process itself may need.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// Where addresses have a limit (`ulimit -v`), keeps so many bytes of them for the process itself:
/// memory of a front end that has no room beside that is refused from now on.
pub fn keep_addresses(bytes: u64) {
    KEPT.store(bytes, Relaxed);
}

/// Whether the process still has the addresses that are kept for it.
pub(super) fn leaves_room() -> bool {
    addresses().is_none_or(|limit| is_free(KEPT.load(Relaxed).min(limit)))
}

/// Whether so many bytes could be mapped.
fn is_free(bytes: u64) -> bool {
    let Ok(length) = usize::try_from(bytes.max(1)) else { return false };
    // SAFETY: a new mapping, at an address of the kernel's choice, that nobody touches.
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
    fn a_front_end_may_have_a_multiple_of_what_the_host_has() {
        let text = std::fs::read_to_string("/proc/meminfo").expect("it is there");
        let kib = |name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
            line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
        };
        let host = (kib("MemTotal:") + kib("SwapTotal:")) << 10;
        assert_eq!(host_memory(), host);
        assert_eq!(Quota::of_front_end(1).0.most_bytes, (8 * host).min(MOST_BYTES));
    }

    #[test]
    fn room_is_what_the_kernel_would_map() {
        assert!(is_free(0) && is_free(1 << 30));
        assert!(!is_free(1 << 62));
        assert!(leaves_room(), "a test has no limit");
    }
}
