//! The causes there are, by the names that `--json` prints; what they mean is told in `wording`.

macro_rules! causes {
    ($($(#[$doc:meta])* $cause:ident = $name:literal,)*) => {
        /// Why something is as it was found.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Cause {
            $($(#[$doc])* $cause,)*
        }

        impl Cause {
            /// Its name in JSON.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$cause => $name,)*
                }
            }
        }
    };
}

causes! {
    /// The limit is kept.
    Covered = "covered",
    /// Version 1 charges what is written back to the root.
    VersionOne = "version-1",
    /// In version 1 a limit is for its own cgroup alone, not for those below.
    NotInherited = "not-inherited",
    /// The memory controller is in a hierarchy of version 1, so pages have no owner that the io
    /// controller knows.
    MemoryInVersionOne = "memory-in-version-1",
    /// There is no memory controller.
    NoMemoryController = "no-memory-controller",
    /// The cgroup has no io controller.
    IoNotEnabled = "io-not-enabled",
    /// It has, but the kernel was built without limits.
    NoThrottling = "no-throttling",
    /// The memory controller was not asked for, and the kernel enables it all the same.
    MemoryNotEnabled = "memory-not-enabled",
    /// The file system charges what is written back to the root.
    NoCgroupWriteback = "no-cgroup-writeback",
    /// ext4 with `data=journal` does.
    DataJournal = "data-journal",
    /// The file has one owner, but several cgroups write to it.
    SeveralCgroups = "several-cgroups",
    /// The file was there before, and what is cached of it belongs to others.
    EarlierOwner = "earlier-owner",
    /// The limit is on a disk that lies on this one.
    LimitAbove = "limit-above",
    /// The limit is on a disk below, and reaches up.
    LimitBelow = "limit-below",
    /// It is, and does not: dm-crypt writes by its own threads.
    CryptThreads = "crypt-threads",
    /// Nor for what is written back through device mapper, in kernels from 5.18 on that were not
    /// mended.
    MapperWriteback = "mapper-writeback",
    /// Nor through RAID with parity.
    RaidThreads = "raid-threads",
    /// Nor through a loop device, before Linux 5.14.
    OldLoop = "old-loop",
    /// A loop device's file is written through the page cache, in the name of its owner.
    BufferedLoop = "buffered-loop",
    /// The limit is on a disk without files of these processes.
    OtherDisk = "other-disk",
    /// Other disks have one.
    DiskWithoutLimit = "disk-without-limit",
    /// Only the other direction has one.
    OtherDirection = "other-direction",
    NoLimit = "no-limit",
    /// The root has none, by design.
    RootCgroup = "root-cgroup",
    /// There is no block device.
    NetworkFileSystem = "network-file-system",
    /// Another process does the I/O.
    Fuse = "fuse",
    /// ZFS's threads do.
    Zfs = "zfs",
    /// It is in memory.
    InMemory = "in-memory",
    /// The disk below was not found.
    UnknownDisk = "unknown-disk",
    /// What is swapped is not charged to the cgroup.
    SwapNotCharged = "swap-not-charged",
    /// The swap space is on a disk without a limit.
    SwapElsewhere = "swap-elsewhere",
    /// The files are on a layer over another file system.
    Overlay = "overlay",
    /// The limit is for all of the disk.
    Partition = "partition",
    /// What is in the page cache is not read from a disk.
    PageCache = "page-cache",
    /// Journals are written by a thread of the kernel.
    JournalThread = "journal-thread",
    /// A limit above is lower.
    LowerAbove = "lower-above",
    /// A kernel thread does I/O for others.
    KernelThread = "kernel-thread",
    /// What was dirtied here before is written in this cgroup's name.
    LeftDirty = "left-dirty",
    /// io.cost, io.latency or BFQ is active too.
    OtherControl = "other-control",
    /// A limit is for a disk that is not there.
    DiskGone = "disk-gone",
    /// Something could not be looked at.
    NotSeen = "not-seen",
}
