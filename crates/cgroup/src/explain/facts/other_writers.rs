//! Other processes that write to the same files as the cgroup's processes.
//!
//! Writeback of an inode is charged to one cgroup, even for pages that other cgroups dirtied
//! (cgroup-v2.rst, "Writeback"). Two descriptors refer to the same file if device and inode match.
//! Before Linux 5.14 fdinfo has no inode, and paths are compared instead. Shared mappings of other
//! processes are not searched.

use std::{fs, path::Path};

use super::{
    AccessMode, Evidence, ExaminedProcess, OtherWriter, mounts::MountTable, reader::FactReader, uses,
};
use crate::{
    control_group::{ControlGroup, Version},
    kernel::proc_cgroup,
};

/// Maximum number of processes outside the cgroup whose files are examined.
const MAX_PROCESSES: usize = 16_384;

pub(super) fn find_other_writers(
    reader: &mut FactReader<'_>,
    group: &ControlGroup,
    processes: &mut [ExaminedProcess],
    mounts: &mut MountTable,
) {
    let writes_through_cache = |process: &ExaminedProcess| {
        process.uses.iter().any(|used| used.writes && uses_page_cache(used.access_mode))
    };
    // Version 1 does not limit writeback, so the cgroup that is charged makes no difference.
    if group.version == Version::V1 || !processes.iter().any(writes_through_cache) {
        return;
    }
    let proc = reader.hierarchy.roots.proc.clone();
    let mut examined = 0;
    for entry in fs::read_dir(&proc).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if processes.iter().any(|process| process.pid == pid) {
            continue;
        }
        let directory = proc.join(name);
        // A process in a descendant cgroup is subject to the same limits.
        let Some(other) = group_of(&directory).filter(|other| !is_in_group(other, group)) else {
            continue;
        };
        examined += 1;
        if examined > MAX_PROCESSES {
            let text = format!("only {MAX_PROCESSES} processes were examined for other writers");
            reader.gap(&proc, text);
            return;
        }
        add_shared_files(reader, &directory, pid, &other, processes, mounts);
    }
}

fn uses_page_cache(access_mode: AccessMode) -> bool {
    matches!(access_mode, AccessMode::Buffered | AccessMode::Synchronous | AccessMode::Mapped)
}

fn group_of(process: &Path) -> Option<String> {
    let text = fs::read_to_string(process.join("cgroup")).ok()?;
    let memberships = proc_cgroup::parse(&text).ok()?;
    let membership_v2 = memberships.into_iter().find(|membership| membership.hierarchy == 0)?;
    Some(membership_v2.path.display().to_string())
}

fn is_in_group(other: &str, group: &ControlGroup) -> bool {
    Path::new(other).starts_with(&group.name)
}

fn add_shared_files(
    reader: &mut FactReader<'_>,
    directory: &Path,
    pid: i32,
    group: &str,
    processes: &mut [ExaminedProcess],
    mounts: &mut MountTable,
) {
    // Unreadable files of unrelated processes are no gap in the facts about this cgroup.
    let gaps = reader.gaps.len();
    let files = uses::open_files(reader, directory);
    reader.gaps.truncate(gaps);
    for open in files.into_iter().filter(|open| open.writes() && uses_page_cache(open.access_mode())) {
        let name = open.path.file_name().map(|name| name.to_string_lossy().into_owned());
        let uses = processes.iter_mut().flat_map(|process| &mut process.uses);
        let uses = uses.filter(|used| used.writes && uses_page_cache(used.access_mode));
        // Compare file names first: they are the same wherever the directory is mounted, and
        // `identify` has to read mount tables.
        let mut same_name = uses
            .filter(|used| {
                Path::new(&used.path).file_name().map(|name| name.to_string_lossy().into_owned()) == name
            })
            .peekable();
        if same_name.peek().is_none() {
            continue;
        }
        let Some(identity) = uses::identify(reader, mounts, directory, &open) else {
            continue;
        };
        for used in same_name.filter(|used| used.identity.as_ref() == Some(&identity)) {
            let value = format!("{} in {group}: {}", pid, open.evidence.value);
            let evidence = Evidence::new(open.evidence.file.clone(), value);
            used.other_writers.push(OtherWriter { pid, group: group.to_owned(), evidence });
        }
    }
}
