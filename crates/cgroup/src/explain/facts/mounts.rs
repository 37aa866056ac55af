//! The mounts that processes see, and the file systems on them.
//!
//! fdinfo identifies a mount by its id in the process's /proc/PID/mountinfo. Swap files and the
//! files of loop devices belong to no process; they are looked up in weir's own mount namespace.

use std::{
    fs,
    path::{Path, PathBuf},
};

use block::device::DeviceNumber;

use super::{
    BackingDisk, DiskFacts, DiskKind, Evidence, MountedFileSystem,
    disks::DiskStack,
    mount_rows::{MountRow, mount_containing, parse},
    reader::FactReader,
};
use crate::file_system_class::FileSystemClass;

#[derive(Debug)]
pub(super) struct MountTable {
    /// Mounts of weir's own namespace.
    own_mounts: Vec<MountRow>,
    own_file: String,
    /// Mounts of the last process, with its namespace: most processes share one.
    last: Option<(PathBuf, Vec<MountRow>)>,
    pub(super) found: Vec<MountedFileSystem>,
}

impl MountTable {
    /// Creates the table with the mounts of `process`, such as `self`.
    pub(super) fn new(reader: &mut FactReader<'_>, process: &str) -> Self {
        let file = reader.hierarchy.roots.proc.join(process).join("mountinfo");
        let own_mounts = reader.text(&file).map(|text| parse(&text)).unwrap_or_default();
        Self { own_mounts, own_file: file.display().to_string(), last: None, found: Vec::new() }
    }

    pub(super) fn select_process(&mut self, reader: &mut FactReader<'_>, process: &Path) {
        // Cached by namespace: thousands of processes share a mount table. Without permission to
        // read the link, each process has its own entry.
        let namespace = fs::read_link(process.join("ns/mnt")).unwrap_or_else(|_| process.to_owned());
        if self.last.as_ref().is_some_and(|(last, _)| *last == namespace) {
            return;
        }
        let text = reader.text(&process.join("mountinfo"));
        self.last = Some((namespace, text.map(|text| parse(&text)).unwrap_or_default()));
    }

    pub(super) fn enter(&mut self, disks: &mut DiskStack<'_>, file: &str, row: &MountRow) -> usize {
        let file_system = disks.file_system(&self.own_mounts, file, row);
        // The number alone is not enough: mounts of Btrfs and overlays may have the same number,
        // but different mount points or disks.
        let same = |known: &MountedFileSystem| {
            known.number == file_system.number
                && known.mount_point == file_system.mount_point
                && known.backing_disk == file_system.backing_disk
        };
        self.found.iter().position(same).unwrap_or_else(|| {
            self.found.push(file_system);
            self.found.len() - 1
        })
    }

    pub(super) fn file_systems_on(
        &mut self,
        disks: &mut DiskStack<'_>,
        limited: &[DeviceNumber],
    ) -> Vec<usize> {
        let mut found = Vec::new();
        let (own_mounts, file) = (self.own_mounts.clone(), self.own_file.clone());
        let mut seen = Vec::new();
        for row in &own_mounts {
            let mount = &row.mount;
            // Overlays are skipped: the file system of the upper directory is in this list as well.
            if FileSystemClass::of(&mount.kind) == FileSystemClass::Pseudo
                || mount.kind == "overlay"
                || seen.contains(&mount.number)
            {
                continue;
            }
            // A file system that is mounted several times is examined once.
            seen.push(mount.number);
            let index = self.enter(disks, &file, row);
            let BackingDisk::Disk(disk) = self.found[index].backing_disk else {
                continue;
            };
            if limited.contains(&disk) || disks.lower_disks(disk).iter().any(|part| limited.contains(part)) {
                self.found[index].used = true;
                found.push(index);
            }
        }
        found
    }

    pub(super) fn of_path(&mut self, disks: &mut DiskStack<'_>, path: &Path) -> Option<usize> {
        let row = mount_containing(&self.own_mounts, path)?.clone();
        let file = self.own_file.clone();
        Some(self.enter(disks, &file, &row))
    }

    /// The mount with this id in the selected process, else the mount that contains the path.
    pub(super) fn row(&self, id: Option<u64>, path: &Path) -> Option<MountRow> {
        let (_, table) = self.last.as_ref()?;
        table.iter().find(|row| Some(row.id) == id).or_else(|| mount_containing(table, path)).cloned()
    }

    pub(super) fn row_of_number(&self, number: DeviceNumber) -> Option<MountRow> {
        let (_, table) = self.last.as_ref()?;
        table.iter().find(|row| row.mount.number == number).cloned()
    }

    /// Resolves the files of loop devices to file systems, and these to disks.
    pub(super) fn follow_loops(&mut self, disks: &mut DiskStack<'_>) {
        let mut next = 0;
        // By index: each lookup may add disks, which may be loop devices in turn.
        while next < disks.known.len() {
            let DiskFacts { kind, evidence, .. } = &disks.known[next];
            if let DiskKind::Loop { file_system: None, direct } = *kind {
                let path = evidence.first().map(|file| PathBuf::from(&file.value)).unwrap_or_default();
                let on = self.of_path(disks, &path);
                let below = on.map(|index| self.found[index].backing_disk.clone());
                let known = &mut disks.known[next];
                known.kind = DiskKind::Loop { file_system: on, direct };
                if let Some(BackingDisk::Disk(disk)) = below {
                    known.lower_disks = vec![disk];
                }
            }
            next += 1;
        }
    }

    pub(super) fn point_and_evidence(&self, index: usize) -> (String, Evidence) {
        (self.found[index].mount_point.clone(), self.found[index].evidence.clone())
    }
}
