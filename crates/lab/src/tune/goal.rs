//! Goals of tuning: the patterns that count, and the cache modes that may be recommended.
//!
//! QEMU's documentation of `cache` (qemu-system-x86_64(1)) defines which modes are safe: with
//! flushes, all but `unsafe` survive a power failure; without, only those that make every write
//! durable.

use clap::ValueEnum;
use storage::CacheMode;

use super::configurations::{ConfigurationSpace, DiskConfiguration, PatternOperation, RequestPattern};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum TuneGoal {
    /// Large requests, and many in flight
    Throughput,
    /// Latency of small requests, one in flight
    Latency,
    /// Safe even for a guest that sends no flushes
    Integrity,
    /// All patterns with equal weight
    Balanced,
}

impl TuneGoal {
    pub(super) const ALL: [Self; 4] = [Self::Throughput, Self::Latency, Self::Integrity, Self::Balanced];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Latency => "latency",
            Self::Integrity => "integrity",
            Self::Balanced => "balanced",
        }
    }

    /// True if a pattern counts. Reads from the host's memory count for no goal: a guest has its
    /// own cache.
    pub(super) fn counts(self, pattern: &RequestPattern) -> bool {
        let RequestPattern { operation, block_bytes, depth, .. } = *pattern;
        if operation == PatternOperation::Reread {
            return false;
        }
        // First writes count only where everything does: a disk has each of them once.
        let is_large = block_bytes >= 1 << 20;
        match self {
            Self::Throughput => (is_large || depth > 1) && operation != PatternOperation::FirstWrite,
            Self::Latency => !is_large && depth == 1 && operation != PatternOperation::FirstWrite,
            Self::Integrity | Self::Balanced => true,
        }
    }

    pub(super) fn allows(self, cache: CacheMode) -> bool {
        match self {
            Self::Integrity => CacheSafety::of(cache) == CacheSafety::Always,
            _ => CacheSafety::of(cache) != CacheSafety::Never,
        }
    }

    /// The allowed configuration closest to the default.
    pub(super) fn base(self, space: &ConfigurationSpace) -> Option<DiskConfiguration> {
        let cache = space.caches.iter().copied().find(|&cache| self.allows(cache))?;
        Some(DiskConfiguration { cache, ..space.default_configuration() })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheSafety {
    Always,
    WithFlushes,
    Never,
}

impl CacheSafety {
    pub(super) fn of(cache: CacheMode) -> Self {
        match cache {
            CacheMode::Writethrough | CacheMode::Directsync => Self::Always,
            CacheMode::Writeback | CacheMode::None => Self::WithFlushes,
            CacheMode::Unsafe => Self::Never,
        }
    }

    /// Data lost in a power failure of the host.
    pub(super) fn loses(self) -> &'static str {
        match self {
            Self::Always => "nothing",
            Self::WithFlushes => "what was not flushed",
            Self::Never => "perhaps the whole disk",
        }
    }

    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Always => {
                "survives a power failure of the host also with guests that send no flushes: a \
                 write is durable when it is answered"
            }
            Self::WithFlushes => {
                "survives a power failure of the host with guests that flush, as every current \
                 system does; one that sends no flushes may lose what it wrote last"
            }
            Self::Never => {
                "flushes are ignored: a power failure or a crash of the host may lose the whole disk"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_mode_unsafe_is_never_recommended() {
        for goal in TuneGoal::ALL {
            assert!(!goal.allows(CacheMode::Unsafe), "{goal:?}");
        }
        let allowed: Vec<_> =
            CacheMode::ALL.into_iter().filter(|&cache| TuneGoal::Integrity.allows(cache)).collect();
        assert_eq!(allowed, [CacheMode::Writethrough, CacheMode::Directsync]);
        let base = TuneGoal::Integrity.base(&ConfigurationSpace::of_made_images(1 << 30)).unwrap();
        assert_eq!(base.to_string(), "writethrough, 64K");
        assert_eq!(
            TuneGoal::Latency.base(&ConfigurationSpace::of_made_images(1 << 30)).unwrap().to_string(),
            "writeback, 64K"
        );
    }

    #[test]
    fn each_goal_has_reads_and_writes_but_no_rereads() {
        for goal in TuneGoal::ALL {
            let patterns: Vec<_> =
                RequestPattern::all().into_iter().filter(|pattern| goal.counts(pattern)).collect();
            assert!(patterns.iter().any(RequestPattern::writes), "{goal:?}");
            assert!(patterns.iter().any(|pattern| pattern.operation == PatternOperation::Read), "{goal:?}");
            assert!(
                !patterns.iter().any(|pattern| pattern.operation == PatternOperation::Reread),
                "{goal:?}"
            );
        }
    }
}
