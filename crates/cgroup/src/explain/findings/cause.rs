//! The causes there are, by the names that `--json` prints; what they mean is told in `wording`.

/// Why something is as it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The limit is kept.
    Covered,
    /// Version 1 charges what is written back to the root.
    VersionOne,
    /// In version 1 a limit is for its own cgroup alone, not for those below.
    NotInherited,
    /// The memory controller is in a hierarchy of version 1, so pages have no owner that the io controller knows.
    MemoryInVersionOne,
    /// There is no memory controller.
    NoMemoryController,
    /// The cgroup has no io controller.
    IoNotEnabled,
    /// It has, but the kernel was built without limits.
    NoThrottling,
    /// The memory controller was not asked for, and the kernel enables it all the same.
    MemoryNotEnabled,
    /// The file system charges what is written back to the root.
    NoCgroupWriteback,
    /// ext4 with `data=journal` does.
    DataJournal,
    /// The file has one owner, but several cgroups write to it.
    SeveralCgroups,
    /// The file was there before, and what is cached of it belongs to others.
    EarlierOwner,
    /// The limit is on a disk that lies on this one.
    LimitAbove,
    /// The limit is on a disk below, and reaches up.
    LimitBelow,
    /// It is, and does not: dm-crypt writes by its own threads.
    CryptThreads,
    /// Nor for what is written back through device mapper, in kernels from 5.18 on that were not mended.
    MapperWriteback,
    /// Nor through RAID with parity.
    RaidThreads,
    /// Nor through a loop device, before Linux 5.14.
    OldLoop,
    /// A loop device's file is written through the page cache, in the name of its owner.
    BufferedLoop,
    /// The limit is on a disk without files of these processes.
    OtherDisk,
    /// Other disks have one.
    DiskWithoutLimit,
    /// Only the other direction has one.
    OtherDirection,
    /// There is none at all.
    NoLimit,
    /// The root has none, by design.
    RootCgroup,
    /// There is no block device.
    NetworkFileSystem,
    /// Another process does the I/O.
    Fuse,
    /// ZFS's threads do.
    Zfs,
    /// It is in memory.
    InMemory,
    /// The disk below was not found.
    UnknownDisk,
    /// What is swapped is not charged to the cgroup.
    SwapNotCharged,
    /// The swap space is on a disk without a limit.
    SwapElsewhere,
    /// The files are on a layer over another file system.
    Overlay,
    /// The limit is for all of the disk.
    Partition,
    /// What is in the page cache is not read from a disk.
    PageCache,
    /// Journals are written by a thread of the kernel.
    JournalThread,
    /// A limit above is lower.
    LowerAbove,
    /// A kernel thread does I/O for others.
    KernelThread,
    /// What was dirtied here before is written in this cgroup's name.
    LeftDirty,
    /// io.cost, io.latency or BFQ is active too.
    OtherControl,
    /// A limit is for a disk that is not there.
    DiskGone,
    /// Something could not be looked at.
    NotSeen,
}

impl Cause {
    /// Its name in JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Covered => "covered",
            Self::VersionOne => "version-1",
            Self::NotInherited => "not-inherited",
            Self::MemoryInVersionOne => "memory-in-version-1",
            Self::NoMemoryController => "no-memory-controller",
            Self::IoNotEnabled => "io-not-enabled",
            Self::NoThrottling => "no-throttling",
            Self::MemoryNotEnabled => "memory-not-enabled",
            Self::NoCgroupWriteback => "no-cgroup-writeback",
            Self::DataJournal => "data-journal",
            Self::SeveralCgroups => "several-cgroups",
            Self::EarlierOwner => "earlier-owner",
            Self::LimitAbove => "limit-above",
            Self::LimitBelow => "limit-below",
            Self::CryptThreads => "crypt-threads",
            Self::MapperWriteback => "mapper-writeback",
            Self::RaidThreads => "raid-threads",
            Self::OldLoop => "old-loop",
            Self::BufferedLoop => "buffered-loop",
            Self::OtherDisk => "other-disk",
            Self::DiskWithoutLimit => "disk-without-limit",
            Self::OtherDirection => "other-direction",
            Self::NoLimit => "no-limit",
            Self::RootCgroup => "root-cgroup",
            Self::NetworkFileSystem => "network-file-system",
            Self::Fuse => "fuse",
            Self::Zfs => "zfs",
            Self::InMemory => "in-memory",
            Self::UnknownDisk => "unknown-disk",
            Self::SwapNotCharged => "swap-not-charged",
            Self::SwapElsewhere => "swap-elsewhere",
            Self::Overlay => "overlay",
            Self::Partition => "partition",
            Self::PageCache => "page-cache",
            Self::JournalThread => "journal-thread",
            Self::LowerAbove => "lower-above",
            Self::KernelThread => "kernel-thread",
            Self::LeftDirty => "left-dirty",
            Self::OtherControl => "other-control",
            Self::DiskGone => "disk-gone",
            Self::NotSeen => "not-seen",
        }
    }
}
