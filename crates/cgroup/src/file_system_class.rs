//! Classes of file systems by the destination of their data.

/// File systems that use no block device of this machine.
const NETWORK: [&str; 14] = [
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "9p", "afs", "coda", "lustre", "gpfs", "beegfs",
    "orangefs", "virtiofs",
];

const MEMORY: [&str; 3] = ["tmpfs", "ramfs", "rootfs"];

/// File systems whose reads and writes are no block I/O.
const PSEUDO: [&str; 25] = [
    "proc",
    "sysfs",
    "cgroup",
    "cgroup2",
    "devpts",
    "devtmpfs",
    "debugfs",
    "tracefs",
    "securityfs",
    "pstore",
    "bpf",
    "configfs",
    "fusectl",
    "mqueue",
    "binfmt_misc",
    "efivarfs",
    "autofs",
    "rpc_pipefs",
    "nsfs",
    "selinuxfs",
    "pipefs",
    "nfsd",
    "hugetlbfs",
    "resctrl",
    "anon_inodefs",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileSystemClass {
    /// On a disk of this machine; I/O is charged to its submitter.
    Disk,
    Network,
    Fuse,
    /// On a disk, through threads of the file system.
    Zfs,
    Memory,
    Pseudo,
}

impl FileSystemClass {
    /// Classifies a file system type of mountinfo.
    pub(crate) fn of(kind: &str) -> Self {
        match kind {
            "zfs" => Self::Zfs,
            "fuse" | "fuseblk" => Self::Fuse,
            kind if kind.starts_with("fuse.") => Self::Fuse,
            kind if NETWORK.contains(&kind) => Self::Network,
            kind if MEMORY.contains(&kind) => Self::Memory,
            kind if PSEUDO.contains(&kind) => Self::Pseudo,
            _ => Self::Disk,
        }
    }
}
