//! Detects control groups that were created or recreated: these have lost their limits.

use std::{
    collections::{HashMap, HashSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::round_robin;
use crate::{hierarchy::CgroupHierarchy, limit::limits_file::LimitsFile};

/// Control groups checked at each interval: bounds the load with thousands of them.
const CHECKED_GROUPS: usize = 1024;

#[derive(Default)]
pub(super) struct RecreatedGroups {
    /// Inode of each cgroup's directory when it was last checked.
    inodes: HashMap<PathBuf, Option<u64>>,
    /// Order of the round-robin checks.
    order: Vec<PathBuf>,
    next: usize,
}

impl RecreatedGroups {
    /// Adopts the entries of a changed file; returns the control groups that are new in it.
    pub(super) fn adopt(&mut self, hierarchy: &CgroupHierarchy, limits_file: &LimitsFile) -> Vec<PathBuf> {
        let mut unknown = Vec::new();
        let mut inodes = HashMap::new();
        self.order.clear();
        for entry in &limits_file.limits {
            if inodes.contains_key(&entry.cgroup) {
                continue;
            }
            let inode = self.inodes.get(&entry.cgroup).copied().unwrap_or_else(|| {
                unknown.push(entry.cgroup.clone());
                inode(hierarchy, &entry.cgroup)
            });
            inodes.insert(entry.cgroup.clone(), inode);
            self.order.push(entry.cgroup.clone());
        }
        // Known inodes are kept: a cgroup recreated since its last check is still detected.
        self.inodes = inodes;
        unknown
    }

    /// Checks the next control groups in turn; returns those created or recreated since.
    pub(super) fn new_groups(&mut self, hierarchy: &CgroupHierarchy) -> HashSet<PathBuf> {
        let mut new = HashSet::new();
        for index in round_robin(&mut self.next, self.order.len(), CHECKED_GROUPS) {
            let cgroup = &self.order[index];
            let inode = inode(hierarchy, cgroup);
            let before = self.inodes.insert(cgroup.clone(), inode).flatten();
            if inode.is_some() && inode != before {
                new.insert(cgroup.clone());
            }
        }
        new
    }
}

fn inode(hierarchy: &CgroupHierarchy, cgroup: &Path) -> Option<u64> {
    let group = hierarchy.group(cgroup).ok()?;
    fs::metadata(&group.directory).ok().map(|metadata| metadata.ino())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_machine::FakeMachine;

    #[test]
    fn recreated_group_is_found_after_a_file_change() {
        let machine = FakeMachine::v2("io");
        machine.group("a");
        let hierarchy = machine.hierarchy();
        let limits_file = |names: &[&str]| -> LimitsFile {
            let entry = |name: &&str| {
                format!(
                    r#"{{"cgroup": "/{name}", "device": "254:0", "device-key": "x", "own": {{"limits": {{"bps-read": 7}}}}}}"#
                )
            };
            let entries: Vec<String> = names.iter().map(entry).collect();
            serde_json::from_str(&format!(r#"{{"limits": [{}]}}"#, entries.join(", "))).unwrap()
        };
        let mut present = RecreatedGroups::default();
        assert_eq!(present.adopt(&hierarchy, &limits_file(&["a", "b"])), ["/a", "/b"].map(PathBuf::from));
        assert_eq!(present.new_groups(&hierarchy), HashSet::new());
        // Both exist at the same time, so the file system cannot reuse the inode number.
        fs::rename(machine.root().join("a"), machine.root().join("old")).unwrap();
        machine.group("a");
        machine.group("b");
        assert_eq!(present.adopt(&hierarchy, &limits_file(&["a", "b", "old"])), [PathBuf::from("/old")]);
        assert_eq!(present.new_groups(&hierarchy), ["/a", "/b"].map(PathBuf::from).into());
        assert_eq!(present.new_groups(&hierarchy), HashSet::new());
    }
}
