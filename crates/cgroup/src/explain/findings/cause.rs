//! The causes, by the names that `--json` prints; `wording` says what they mean.

macro_rules! causes {
    ($($(#[$doc:meta])* $cause:ident = $name:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Cause {
            $($(#[$doc])* $cause,)*
        }

        impl Cause {
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$cause => $name,)*
                }
            }
        }
    };
}

causes! {
    Covered = "covered",
    VersionOne = "version-1",
    NotInherited = "not-inherited",
    MemoryInVersionOne = "memory-in-version-1",
    NoMemoryController = "no-memory-controller",
    IoNotEnabled = "io-not-enabled",
    NoThrottling = "no-throttling",
    MemoryNotEnabled = "memory-not-enabled",
    NoCgroupWriteback = "no-cgroup-writeback",
    /// ext4 with `data=journal` does.
    DataJournal = "data-journal",
    SeveralCgroups = "several-cgroups",
    EarlierOwner = "earlier-owner",
    LimitAbove = "limit-above",
    LimitBelow = "limit-below",
    /// The limit is below dm-crypt, which writes by its own threads.
    CryptThreads = "crypt-threads",
    /// Writeback through device mapper loses its owner, in kernels from 5.18 on that were not
    /// mended.
    MapperWriteback = "mapper-writeback",
    RaidThreads = "raid-threads",
    OldLoop = "old-loop",
    BufferedLoop = "buffered-loop",
    OtherDisk = "other-disk",
    DiskWithoutLimit = "disk-without-limit",
    OtherDirection = "other-direction",
    NoLimit = "no-limit",
    RootCgroup = "root-cgroup",
    NetworkFileSystem = "network-file-system",
    Fuse = "fuse",
    Zfs = "zfs",
    InMemory = "in-memory",
    UnknownDisk = "unknown-disk",
    SwapNotCharged = "swap-not-charged",
    SwapElsewhere = "swap-elsewhere",
    Overlay = "overlay",
    Partition = "partition",
    PageCache = "page-cache",
    JournalThread = "journal-thread",
    LowerAbove = "lower-above",
    KernelThread = "kernel-thread",
    LeftDirty = "left-dirty",
    OtherControl = "other-control",
    DiskGone = "disk-gone",
    NotSeen = "not-seen",
}
