//! Texts of the causes and remedies, in one place for a consistent wording.
//!
//! A remedy is a command or a change of configuration; `None` if there is none.

use policy::steering::IoMaxRates;

use super::Cause;
use crate::explain::facts::{CgroupFacts, IoLocation};

pub(super) fn location_text(facts: &CgroupFacts, location: IoLocation) -> String {
    match location {
        IoLocation::Disk(number) => facts.node(number),
        IoLocation::FileSystem(index) => {
            let file_system = &facts.file_systems[index];
            let disk = facts.disk_of(location).map(|number| format!(" ({})", facts.node(number)));
            format!("{} on {}{}", file_system.kind, file_system.mount_point, disk.unwrap_or_default())
        }
    }
}

/// Formats rates, such as `read 20M/s, write 100 operations/s`.
pub(crate) fn rates(rates: IoMaxRates) -> String {
    lowest([rates].into_iter())
}

pub(crate) fn lowest_of(all: impl Iterator<Item = IoMaxRates>) -> IoMaxRates {
    let lower = |one: [Option<u64>; 2], other: [Option<u64>; 2]| {
        [0, 1].map(|index| [one[index], other[index]].into_iter().flatten().min())
    };
    all.reduce(|one, other| IoMaxRates { bps: lower(one.bps, other.bps), iops: lower(one.iops, other.iops) })
        .unwrap_or_default()
}

pub(super) fn lowest(all: impl Iterator<Item = IoMaxRates>) -> String {
    let IoMaxRates { bps, iops } = lowest_of(all);
    let directions = ["read", "write"];
    let bytes = directions
        .iter()
        .zip(bps)
        .filter_map(|(direction, rate)| Some(format!("{direction} {}/s", settings::exact_size(rate?))));
    let operations = directions
        .iter()
        .zip(iops)
        .filter_map(|(direction, rate)| Some(format!("{direction} {} operations/s", rate?)));
    bytes.chain(operations).collect::<Vec<_>>().join(", ")
}

pub(super) fn cause_and_remedy(facts: &CgroupFacts, cause: Cause, detail: &str) -> (String, Option<String>) {
    let (explanation, remedy): (String, Option<&str>) = match cause {
        Cause::Covered => (format!("charged to the cgroup, which may {detail}"), None),
        Cause::VersionOne => (
            "cgroup v1 does not attribute writeback: it is charged to the root cgroup, and the \
             limit applies only to writes that the process submits itself, by O_DIRECT, O_SYNC or \
             fsync"
                .to_owned(),
            Some(
                "use cgroup v2 (boot with systemd.unified_cgroup_hierarchy=1 or cgroup_no_v1=all), \
                 or write with O_DIRECT",
            ),
        ),
        Cause::NotInherited => (
            "in cgroup v1 a limit applies only to processes of the cgroup itself, not to \
             descendants"
                .to_owned(),
            Some("set the limit on the cgroup that the processes are in, or use cgroup v2"),
        ),
        Cause::MemoryInVersionOne => (
            "the memory controller is in a hierarchy of cgroup v1, so the io controller of v2 \
             cannot attribute writeback: it is charged to the root cgroup"
                .to_owned(),
            Some("boot with cgroup_no_v1=memory, so that both are in cgroup v2"),
        ),
        Cause::NoMemoryController => (
            "there is no memory controller to attribute writeback: it is charged to the root cgroup"
                .to_owned(),
            Some("boot without cgroup_disable=memory, on a kernel with CONFIG_MEMCG"),
        ),
        Cause::IoNotEnabled => (
            match detail {
                "" => "no cgroup of this hierarchy has the io controller: it is bound to cgroup \
                       v1, or disabled"
                    .to_owned(),
                "threaded" => {
                    "the cgroup is threaded, and the io controller is for whole processes".to_owned()
                }
                level => format!("{level} does not enable the io controller for its children"),
            },
            Some(match detail {
                "" => "boot with cgroup_no_v1=blkio, or without cgroup_disable=io",
                "threaded" => {
                    "set the limit on the nearest cgroup above whose cgroup.type is `domain \
                     threaded`"
                }
                _ => {
                    "write `+io +memory` to that level's cgroup.subtree_control; under systemd, \
                     set IOAccounting=yes on the unit"
                }
            }),
        ),
        Cause::NoThrottling => (
            "the cgroup has the io controller, but no io.max: the kernel was built without limits".to_owned(),
            Some("use a kernel with CONFIG_BLK_DEV_THROTTLING"),
        ),
        Cause::MemoryNotEnabled => (
            format!(
                "{detail} has io but not memory; the kernel enables memory implicitly, so written \
                 back pages are charged nevertheless"
            ),
            None,
        ),
        Cause::RootCgroup => (
            "the root cgroup has no limits, by design".to_owned(),
            Some("move the processes into a cgroup and limit that, as `weir cgroup run` does"),
        ),
        Cause::NoLimit => (
            format!("neither {} nor a cgroup above it limits anything", facts.name),
            Some("set a limit: `weir cgroup limit CGROUP --device DEV --bps-write 20M`"),
        ),
        Cause::LimitAbove => (
            format!("the limit is on a disk stacked on {detail}, which these requests do not pass"),
            Some("set the limit on this disk, which everything above it passes"),
        ),
        Cause::LimitBelow => (
            format!(
                "the limit is on a lower disk, where the requests are charged to the cgroup: it \
                 may {detail}"
            ),
            None,
        ),
        Cause::CryptThreads => (
            "this kernel's dm-crypt writes in kernel threads, so the lower disk charges its writes \
             to the root cgroup"
                .to_owned(),
            Some(
                "set the limit on the encrypted device (dm-N) or on what lies on it, or use Linux \
                 7.0, 6.18.16, 6.12.75, 6.6.128 or 6.1.165",
            ),
        ),
        Cause::MapperWriteback => (
            "this kernel's device mapper charges writeback on the lower disk to the root cgroup".to_owned(),
            Some(
                "set the limit on the mapped device (dm-N), or use Linux 7.0, 6.18.16, 6.12.75, \
                 6.6.128 or 6.1.165",
            ),
        ),
        Cause::RaidThreads => (
            "RAID does I/O on its members in a kernel thread, charged to the root cgroup: always \
             with parity, in part without"
                .to_owned(),
            Some("set the limit on the array (mdN, or LVM's dm-N)"),
        ),
        Cause::OldLoop => (
            "this kernel's loop devices charge I/O on their file to the root cgroup (since 5.14 to \
             the submitter)"
                .to_owned(),
            Some("set the limit on the loop device"),
        ),
        Cause::BufferedLoop => (
            "the loop device writes its file through the page cache, charged to the file's owner: \
             the root, or the cgroup that wrote to it first"
                .to_owned(),
            Some("set the limit on the loop device, or attach it with `losetup --direct-io=on`"),
        ),
        Cause::OtherDisk => (
            format!("the limit is for another disk than {detail}, on which no process has a file"),
            Some(
                "set the limit on this disk: `weir cgroup limit CGROUP --device DEV` takes the \
                 path of a file on it",
            ),
        ),
        Cause::DiskWithoutLimit => (format!("{detail} has no limit; others have"), None),
        Cause::OtherDirection => (format!("the limit on {detail} applies to the other direction only"), None),
        Cause::Partition => (
            format!(
                "{detail} is on a partition; limits are for the whole disk, and all of its \
                 partitions share them"
            ),
            None,
        ),
        Cause::DiskGone => (
            format!("{detail} has a limit for an absent disk, which has no effect"),
            Some("set it again for the disk's present number, which `lsblk` shows"),
        ),
        Cause::NoCgroupWriteback => (
            "this file system does not support cgroup writeback: written-back pages are charged to \
             the root cgroup"
                .to_owned(),
            Some("put the files on ext4, XFS, Btrfs or f2fs, or write with O_DIRECT or O_SYNC"),
        ),
        Cause::DataJournal => (
            "with data=journal ext4 writes data in its journal thread, charged to the root cgroup, \
             and has no direct I/O"
                .to_owned(),
            Some("mount it with data=ordered, the default"),
        ),
        Cause::SeveralCgroups => (
            "other cgroups write to the same file, which has one owner at a time: all writeback is \
             charged to that owner"
                .to_owned(),
            Some("use separate files for each cgroup, or limit a common ancestor"),
        ),
        Cause::EarlierOwner => (
            "the file existed before: while its old pages are cached, writes to them are charged \
             to the cgroup that used them first"
                .to_owned(),
            Some(
                "drop its pages from the cache once (`dd of=FILE oflag=nocache \
                 conv=notrunc,fdatasync count=0`), or write a new file",
            ),
        ),
        Cause::NetworkFileSystem => (
            "a network file system uses no block device of this machine, so there is nothing to \
             limit here"
                .to_owned(),
            Some("limit the server's disk, or the network (tc)"),
        ),
        Cause::Fuse => (
            "a FUSE file system's I/O is done by its daemon, in the daemon's cgroup".to_owned(),
            Some("limit the cgroup of the daemon"),
        ),
        Cause::Zfs => (
            "ZFS does its I/O in kernel threads, which are charged to the root cgroup".to_owned(),
            Some("put the files on a zvol with another file system on it, and limit that disk"),
        ),
        Cause::InMemory => ("it is in memory and does no I/O, unless it is swapped out".to_owned(), None),
        Cause::UnknownDisk => {
            (format!("the disk below {detail} was not found, so its limits are unknown"), None)
        }
        Cause::Overlay => (
            format!(
                "an overlay's changed files are in its upper directory, on {detail}; unchanged \
                 ones are read from the lower ones"
            ),
            None,
        ),
        Cause::JournalThread => (
            format!(
                "the journal of {detail}, and data that a commit has to write first, are written \
                 by the thread jbd2, charged to the root cgroup"
            ),
            None,
        ),
        Cause::SwapNotCharged => (
            "swap-out is charged to the task that reclaims memory, mostly a kernel thread".to_owned(),
            Some(
                "use cgroup v2 with io and memory, on Linux 4.19 or newer, or keep the cgroup from swapping",
            ),
        ),
        Cause::SwapElsewhere => (
            format!("swap space is on {detail}, for which the cgroup has no limit"),
            Some("set a limit on that disk too, or set memory.swap.max"),
        ),
        Cause::PageCache => {
            ("reads that the page cache answers are no I/O: a limit delays those that miss".to_owned(), None)
        }
        Cause::LowerAbove => {
            (format!("{detail}, a cgroup above, has a lower limit, which takes effect first"), None)
        }
        Cause::KernelThread => (
            format!(
                "kernel threads ({detail}) are not examined: their writeback is charged to the \
                 owners of the pages"
            ),
            None,
        ),
        Cause::LeftDirty => (
            format!(
                "{detail} has no process, but dirty pages: the processes that dirtied them have \
                 ended or moved, and the pages stay charged here"
            ),
            None,
        ),
        Cause::OtherControl => {
            (format!("{detail} is active on this disk too, and may throttle I/O below the limit"), None)
        }
        Cause::LatencyTarget => (
            "io.latency: while this cgroup exceeds its target on this disk, the kernel throttles its \
             siblings, by queue depth. It looks at windows of 100 ms or more (their mean latency on \
             rotational disks, a tenth of late requests on others), and keeps no percentile"
                .to_owned(),
            None,
        ),
        Cause::SiblingLatencyTarget => (
            "io.latency: this cgroup has a sibling, or a sibling of an ancestor, with a latency target \
             on this disk; the kernel may throttle this cgroup for it, also below its limit"
                .to_owned(),
            None,
        ),
        Cause::NotSeen => (
            format!(
                "not everything could be examined (unreadable files: {detail}), so more may escape \
                 than listed here"
            ),
            Some("run it as root, in the host's namespaces"),
        ),
    };
    (explanation, remedy.map(str::to_owned))
}
