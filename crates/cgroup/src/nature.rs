//! Kinds of file systems, by where their data goes.

/// No block device of this machine is asked.
const NETWORK: [&str; 14] = [
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "9p", "afs", "coda", "lustre", "gpfs", "beegfs",
    "orangefs", "virtiofs",
];

const MEMORY: [&str; 3] = ["tmpfs", "ramfs", "rootfs"];

/// Nothing that is read or written there is block I/O.
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
pub(crate) enum Nature {
    /// To a disk of this machine, in the name of whoever sends it.
    Disk,
    Network,
    Fuse,
    /// To a disk, by threads of the file system's own.
    Zfs,
    Memory,
    Pseudo,
}

impl Nature {
    /// As mountinfo names it.
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
