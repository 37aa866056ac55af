//! Registry of disks: open, unavailable, being added or being removed. Holds state only: changes
//! that notify listeners are methods of [`Registry`](super::Registry).

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::Arc,
};

use block::disk::Disk;

use super::{NameMap, RegistryError, RunningDisk};
use crate::unavailable_disk::{ReservedEndpoint, UnavailableDiskEntry};

/// All disks of a daemon.
#[derive(Default)]
pub struct DiskRegistry {
    listed: NameMap<Rc<RunningDisk>>,
    /// Names of the nodes below disks and over them.
    node_names: RefCell<BTreeSet<String>>,
    /// Names of nodes whose disk is closed, and which clients have not deleted.
    closed_nodes: RefCell<BTreeSet<String>>,
    /// Removed disks that are being closed.
    closing: RefCell<Vec<String>>,
    /// Disks that are being migrated to or from another host, with the names of their groups. The
    /// names of both are reserved: a migration that fails adds the disk to its group again.
    migrating: RefCell<BTreeMap<String, Option<String>>>,
    /// Disks of the config whose storage did not answer yet.
    pub unavailable: RefCell<BTreeMap<String, Rc<UnavailableDiskEntry>>>,
    /// Disks and groups that are being added: see
    /// [`Registry::begin_adding`](super::Registry::begin_adding).
    pub(super) incomplete: RefCell<BTreeSet<String>>,
    /// Tasks that report failures and size changes of each listed disk.
    watches: RefCell<BTreeMap<String, Vec<reactor::JoinHandle<()>>>>,
    /// True if a disk stopped at an error and no resume followed.
    pub(super) stopped: Cell<bool>,
}

/// Marks a disk as being closed while it exists.
struct ClosingDisk<'a> {
    all: &'a RefCell<Vec<String>>,
    name: &'a str,
}

impl<'a> ClosingDisk<'a> {
    fn begin(all: &'a RefCell<Vec<String>>, name: &'a str) -> Self {
        all.borrow_mut().push(name.to_owned());
        Self { all, name }
    }
}

impl Drop for ClosingDisk<'_> {
    fn drop(&mut self) {
        let mut all = self.all.borrow_mut();
        // Only one entry: a disk that was added and removed again has a second one of the same
        // name.
        if let Some(at) = all.iter().position(|name| name == self.name) {
            all.swap_remove(at);
        }
    }
}

impl DiskRegistry {
    pub(super) fn insert(&self, name: String, disk: Rc<RunningDisk>, watches: Vec<reactor::JoinHandle<()>>) {
        self.watches.borrow_mut().insert(name.clone(), watches);
        // Names of nodes are unique across all disks, as in QEMU.
        self.node_names.borrow_mut().extend(disk.lower_nodes.iter().map(|node| node.name.clone()));
        self.node_names.borrow_mut().extend(disk.overlay_nodes());
        self.listed.insert(name, disk);
    }

    pub(super) fn remove(&self, name: &str) {
        if let Some(disk) = self.listed.remove(name) {
            let mut names = self.node_names.borrow_mut();
            disk.lower_nodes.iter().for_each(|node| _ = names.remove(&node.name));
            disk.overlay_nodes().iter().for_each(|node| _ = names.remove(node));
        }
        self.watches.borrow_mut().remove(name);
    }

    /// Returns the disk, if it is open.
    pub(super) fn find(&self, name: &str) -> Option<Rc<RunningDisk>> {
        self.listed.get(name)
    }

    /// True if the name belongs to a disk, open or not, or to a node below one.
    pub(super) fn has_name(&self, name: &str) -> bool {
        let is_moving = self.migrating.borrow().contains_key(name);
        let is_closed = self.closed_nodes.borrow().contains(name);
        self.listed.contains(name)
            || is_moving
            || is_closed
            || self.has_node_name(name)
            || self.is_unavailable(name)
    }

    /// Marks a removed disk as being closed until the returned value is dropped.
    pub(super) fn mark_closing<'a>(&'a self, name: &'a str) -> impl Drop + 'a {
        ClosingDisk::begin(&self.closing, name)
    }

    pub(crate) fn block_disks(&self) -> Vec<Arc<Disk>> {
        self.listed.all().iter().map(|running| Arc::clone(&running.disk)).collect()
    }

    /// All open disks, by name.
    pub fn all(&self) -> Vec<Rc<RunningDisk>> {
        self.listed.all()
    }

    /// Returns the disk with this name.
    ///
    /// # Errors
    /// There is none, or it is not open.
    pub fn get(&self, name: &str) -> Result<Rc<RunningDisk>, RegistryError> {
        self.listed.get(name).ok_or_else(|| match self.is_unavailable(name) {
            true => RegistryError::NotOpen(name.to_owned()),
            false => RegistryError::UnknownDisk(name.to_owned()),
        })
    }

    /// True if an unlisted disk is still being closed or migrated.
    pub fn has_unlisted(&self) -> bool {
        !self.closing.borrow().is_empty() || !self.migrating.borrow().is_empty()
    }

    /// Name and operation of a disk that is removed and still being closed, or being migrated, or
    /// of a disk or group that is still incomplete.
    pub(crate) fn unlisted_operation(&self) -> Option<(String, &'static str)> {
        let closing = self.closing.borrow().first().cloned().map(|name| (name, "removed"));
        let adding = || self.incomplete.borrow().first().cloned().map(|name| (name, "added"));
        let moving = || self.migrating.borrow().keys().next().cloned().map(|name| (name, "moved"));
        closing.or_else(moving).or_else(adding)
    }

    /// True if a disk has stopped at an error.
    pub(crate) fn is_stopped(&self) -> bool {
        self.listed.any(|running| running.disk.failures().stopped_by().is_some())
    }

    /// True if the disk is in the config but not open yet.
    pub fn is_unavailable(&self, disk: &str) -> bool {
        self.unavailable.borrow().contains_key(disk)
    }

    /// Name of the unavailable disk, other than `disk`, that reserves `wanted`.
    pub(super) fn holder_of_reserved(&self, wanted: &ReservedEndpoint, disk: &str) -> Option<String> {
        let unavailable = self.unavailable.borrow();
        let found = unavailable
            .iter()
            .find(|(name, entry)| **name != disk && entry.reserved_endpoints().contains(wanted));
        found.map(|(name, _)| name.clone())
    }

    /// Reserves the name of a disk until [`DiskRegistry::end_migration`]. False if the disk is
    /// being migrated already.
    pub(crate) fn begin_migration(&self, disk: &str) -> bool {
        let mut migrating = self.migrating.borrow_mut();
        let is_first = !migrating.contains_key(disk);
        if is_first {
            migrating.insert(disk.to_owned(), None);
        }
        is_first
    }

    /// True if the disk is being migrated to or from another host.
    pub(crate) fn is_migrating(&self, disk: &str) -> bool {
        self.migrating.borrow().contains_key(disk)
    }

    /// Fails if a command changes the disk at this moment: it is incomplete or being migrated.
    ///
    /// # Errors
    /// [`RegistryError::Busy`].
    pub(crate) fn check_unchanging(&self, disk: &str) -> Result<(), RegistryError> {
        match self.is_incomplete(disk) || self.is_migrating(disk) {
            true => Err(RegistryError::Busy(disk.to_owned())),
            false => Ok(()),
        }
    }

    /// Reserves the names of a disk and of its group, of which an unlisted disk is no member.
    pub(crate) fn reserve_for_migration(&self, disk: &str, group: Option<String>) {
        self.migrating.borrow_mut().insert(disk.to_owned(), group);
    }

    /// Ends the reservation; returns the name of the group.
    pub(crate) fn end_migration(&self, disk: &str) -> Option<String> {
        self.migrating.borrow_mut().remove(disk).flatten()
    }

    /// Name of a disk that is being migrated, and of this group.
    pub(crate) fn migrating_member_of(&self, group: &str) -> Option<String> {
        let migrating = self.migrating.borrow();
        let member = migrating.iter().find(|(_, of)| of.as_deref() == Some(group));
        member.map(|(name, _)| name.clone())
    }

    pub(super) fn unavailable_member_of(&self, group: &str) -> Option<String> {
        let unavailable = self.unavailable.borrow();
        let member = unavailable.iter().find(|(_, entry)| entry.group().as_deref() == Some(group));
        member.map(|(name, _)| name.clone())
    }

    /// Reserves names for nodes of a disk that is not listed, or not yet.
    pub(crate) fn reserve_nodes(&self, names: &[String]) {
        self.node_names.borrow_mut().extend(names.iter().cloned());
    }

    /// Ends the reservation of [`DiskRegistry::reserve_nodes`].
    pub(crate) fn release_nodes(&self, names: &[String]) {
        let mut reserved = self.node_names.borrow_mut();
        names.iter().for_each(|name| _ = reserved.remove(name));
    }

    /// Adds, and reserves, the names of nodes that a snapshot has put over a disk.
    pub(crate) fn add_overlay_nodes(&self, running: &RunningDisk, names: Vec<String>) {
        self.node_names.borrow_mut().extend(names.iter().cloned());
        running.add_overlay_nodes(names);
    }

    /// The disk with this name, or with a node of this name that a snapshot has put over it.
    pub(crate) fn find_node(&self, name: &str) -> Option<Rc<RunningDisk>> {
        let has_node = |running: &Rc<RunningDisk>| running.overlay_nodes().iter().any(|node| node == name);
        self.find(name).or_else(|| self.all().into_iter().find(has_node))
    }

    /// True if a node of this name is below a disk or, put there by a snapshot, over one.
    pub(crate) fn has_node_name(&self, name: &str) -> bool {
        self.node_names.borrow().contains(name)
    }

    /// Keeps the names of nodes of a closed disk until each of them is deleted.
    pub(crate) fn keep_closed_nodes(&self, names: Vec<String>) {
        self.closed_nodes.borrow_mut().extend(names);
    }

    /// Deletes the name of a node of a closed disk; returns false if there is none.
    pub(crate) fn delete_closed_node(&self, name: &str) -> bool {
        self.closed_nodes.borrow_mut().remove(name)
    }

    /// True if the disk or group of this name is incomplete and may still be rolled back.
    pub(crate) fn is_incomplete(&self, name: &str) -> bool {
        self.incomplete.borrow().contains(name)
    }
}
