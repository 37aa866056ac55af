//! Who else writes to the files that the cgroup's processes write to.
//!
//! Everything of a file that is written back is charged to one cgroup, whoever dirtied it
//! (cgroup-v2.rst, "Writeback"). Files are the same by inode and device, where fdinfo tells the
//! inode (since Linux 5.14), else by path. Shared mappings of others are not searched.

use std::{fs, path::Path};

use super::{Evidence, Other, Process, Way, mounts::MountTable, reader::Reader, uses};
use crate::{
    control_group::{ControlGroup, Version},
    kernel::proc_cgroup,
};

const MAX_PROCESSES: usize = 16_384;

pub(super) fn look(
    reader: &mut Reader<'_>,
    group: &ControlGroup,
    processes: &mut [Process],
    mounts: &mut MountTable,
) {
    let written = |process: &Process| process.uses.iter().any(|used| used.writes && cached(used.way));
    // Version 1 charges none of this to a limit.
    if group.version == Version::V1 || !processes.iter().any(written) {
        return;
    }
    let proc = reader.hierarchy.roots.proc.clone();
    let mut looked = 0;
    for entry in fs::read_dir(&proc).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if processes.iter().any(|process| process.pid == pid) {
            continue;
        }
        let directory = proc.join(name);
        let Some(other) = group_of(&directory).filter(|other| !below(other, group)) else {
            continue;
        };
        looked += 1;
        if looked > MAX_PROCESSES {
            let text = format!("more than {MAX_PROCESSES} processes: the others' files were not looked at");
            reader.gap(&proc, text);
            return;
        }
        compare(reader, &directory, pid, &other, processes, mounts);
    }
}

fn cached(way: Way) -> bool {
    matches!(way, Way::Buffered | Way::Synchronous | Way::Mapped)
}

fn group_of(process: &Path) -> Option<String> {
    let text = fs::read_to_string(process.join("cgroup")).ok()?;
    let memberships = proc_cgroup::parse(&text).ok()?;
    let two = memberships.into_iter().find(|membership| membership.hierarchy == 0)?;
    Some(two.path.display().to_string())
}

fn below(other: &str, group: &ControlGroup) -> bool {
    Path::new(other).starts_with(&group.name)
}

fn compare(
    reader: &mut Reader<'_>,
    directory: &Path,
    pid: i32,
    group: &str,
    processes: &mut [Process],
    mounts: &mut MountTable,
) {
    // What may not be read of others is no gap.
    let gaps = reader.gaps.len();
    let files = uses::open(reader, directory);
    reader.gaps.truncate(gaps);
    for open in files.into_iter().filter(|open| open.writes() && cached(open.way())) {
        let name = open.path.file_name().map(|name| name.to_string_lossy().into_owned());
        let uses = processes.iter_mut().flat_map(|process| &mut process.uses);
        let uses = uses.filter(|used| used.writes && cached(used.way));
        // A file keeps its name wherever its directory is mounted: most others are skipped without
        // a look.
        let mut alike = uses
            .filter(|used| {
                Path::new(&used.path).file_name().map(|name| name.to_string_lossy().into_owned()) == name
            })
            .peekable();
        if alike.peek().is_none() {
            continue;
        }
        let Some(identity) = uses::identify(reader, mounts, directory, &open) else {
            continue;
        };
        for used in alike.filter(|used| used.identity.as_ref() == Some(&identity)) {
            let value = format!("{} in {group}: {}", pid, open.evidence.value);
            let evidence = Evidence::new(open.evidence.file.clone(), value);
            used.others.push(Other { pid, group: group.to_owned(), evidence });
        }
    }
}
