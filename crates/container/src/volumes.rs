//! Life cycle of volumes, in the terms of Docker's volume plugin protocol.
//!
//! ```text
//!            create               mount by a                mount by b
//!   nothing ───────► unmounted ───────────► mounted {a} ─────────────► mounted {a, b}
//!       ▲               │ ▲                      │  ▲                        │
//!       └───────────────┘ └──────────────────────┘  └────────────────────────┘
//!            remove             unmount by a               unmount by b
//! ```
//!
//! State is kept outside of the process: a volume exists if its record does, and is mounted if the
//! kernel reports the mount. Users are recorded after a mount and removed after an unmount. A crash
//! in between leaves at worst
//!
//! - users of an unmounted volume, which no longer exist, or
//! - a mount without users, which [`Volumes::recover`] and the next user undo.
//!
//! A change of a volume needs its lock ([`VolumeLock`]), so changes of one volume are serialized
//! while other volumes proceed. Reading needs no lock and never waits.

use std::{
    collections::{BTreeSet, HashSet},
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, PoisonError},
};

use anyhow::{Context as _, anyhow, bail};

use crate::{
    image,
    mounter::ImageMounter,
    options::{OptionValues, VolumeOptions},
    volume_store::{MAX_USER_BYTES, MAX_USERS, VolumeName, VolumeRecord, VolumeStore},
};

/// Volumes of one directory.
pub(crate) struct Volumes<D> {
    store: VolumeStore,
    devices: D,
    /// Path of this program, which creates images.
    weir: PathBuf,
    locked: Mutex<HashSet<VolumeName>>,
    released: Condvar,
}

/// Lock of a volume.
pub(crate) struct VolumeLock<'a> {
    name: VolumeName,
    locked: &'a Mutex<HashSet<VolumeName>>,
    released: &'a Condvar,
}

impl Drop for VolumeLock<'_> {
    fn drop(&mut self) {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
        self.released.notify_all();
    }
}

/// Current state of a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct VolumeState {
    pub(crate) name: VolumeName,
    pub(crate) options: OptionValues,
    pub(crate) image: PathBuf,
    /// `None` while unmounted.
    pub(crate) mount_point: Option<PathBuf>,
    pub(crate) users: BTreeSet<String>,
}

impl<D: ImageMounter> Volumes<D> {
    pub(crate) fn new(store: VolumeStore, devices: D, weir: &Path) -> Self {
        Self { store, devices, weir: weir.to_owned(), locked: Mutex::default(), released: Condvar::new() }
    }

    /// Cleans up after an earlier process, as described above. Failures are logged.
    pub(crate) fn recover(&self) -> anyhow::Result<()> {
        for name in self.store.names()? {
            let name = self.lock(name);
            if let Err(error) = self.recover_one(&name) {
                let volume = &name.name;
                tracing::warn!(%volume, error = format!("{error:#}"), "leftovers of the volume cannot be removed");
            }
        }
        Ok(())
    }

    fn recover_one(&self, lock: &VolumeLock<'_>) -> anyhow::Result<()> {
        match self.store.read(&lock.name)? {
            Some(record) => {
                let (record, is_mounted) = self.reconcile_record(lock, record)?;
                if is_mounted && record.users.is_empty() {
                    self.devices.detach(&self.store.mount_point(&lock.name))?;
                }
                Ok(())
            }
            None => self.store.remove(&lock.name),
        }
    }

    /// Waits for the lock of a volume.
    pub(crate) fn lock(&self, name: VolumeName) -> VolumeLock<'_> {
        let locked = self.locked.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.released.wait_while(locked, |held| held.contains(&name));
        free.unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        VolumeLock { name, locked: &self.locked, released: &self.released }
    }

    /// Creates a volume, or succeeds if it exists with the same options.
    pub(crate) fn create(&self, lock: &VolumeLock<'_>, given: OptionValues) -> anyhow::Result<()> {
        let name = &lock.name;
        let options = VolumeOptions::read(given).map_err(|rule| anyhow!("{rule}"))?;
        if let Some(record) = self.store.read(name)? {
            // Docker repeats a request after a lost response.
            if record.options == *options.given() {
                return Ok(());
            }
            bail!("volume {name} exists with other options (remove it, or choose another name)");
        }
        if self.store.names()?.contains(name) {
            self.store.remove(name).context("leftovers of a volume of this name cannot be removed")?;
        }
        let make = || {
            self.store.create_directories(name)?;
            image::create(&self.weir, &self.store.image(name, options.format), &options)?;
            // Last, because it makes the volume exist.
            self.store.write(name, &VolumeRecord { options: options.given().clone(), users: BTreeSet::new() })
        };
        make().inspect_err(|_| {
            // The original error is returned; leftovers are removed before the next attempt.
            let _ = self.store.remove(name);
        })
    }

    /// Removes a volume. Fails while it has users.
    pub(crate) fn remove(&self, lock: &VolumeLock<'_>) -> anyhow::Result<()> {
        let (record, is_mounted) = self.reconcile_record(lock, self.existing_record(lock)?)?;
        if !record.users.is_empty() {
            let count = record.users.len();
            let users =
                if count == 1 { "one container is using it" } else { "several containers are using it" };
            bail!("is mounted: {users} ({}) (stop them first)", abbreviate(&record.users));
        }
        if is_mounted {
            self.devices.detach(&self.store.mount_point(&lock.name))?;
        }
        self.store.remove(&lock.name)
    }

    /// Mounts a volume for `user`; idempotent for the same user. Returns the mount point.
    pub(crate) fn mount(&self, lock: &VolumeLock<'_>, user: &str) -> anyhow::Result<PathBuf> {
        check_user(user)?;
        let (mut record, is_mounted) = self.reconcile_record(lock, self.existing_record(lock)?)?;
        let at = self.store.mount_point(&lock.name);
        if !is_mounted {
            let options = record.checked()?;
            let mut arguments = options.attach_arguments();
            // A stable name, so that limits and events can be assigned to the volume.
            arguments.push(format!("--name={}", lock.name.disk_name()));
            self.devices.attach(&self.store.image(&lock.name, options.format), &arguments, &at)?;
        }
        if record.users.contains(user) {
            return Ok(at);
        }
        if record.users.len() >= MAX_USERS {
            bail!("has {MAX_USERS} users, the maximum (unmount some)");
        }
        // Recorded after the mount: a crash leaves a mount without users, which recovery undoes.
        record.users.insert(user.to_owned());
        self.store.write(&lock.name, &record).inspect_err(|_| {
            if !is_mounted {
                let _ = self.devices.detach(&at);
            }
        })?;
        Ok(at)
    }

    /// Removes `user`, and unmounts the volume after the last one. Unknown users have no effect.
    pub(crate) fn unmount(&self, lock: &VolumeLock<'_>, user: &str) -> anyhow::Result<()> {
        let (mut record, is_mounted) = self.reconcile_record(lock, self.existing_record(lock)?)?;
        let was_user = record.users.remove(user);
        if is_mounted && record.users.is_empty() {
            self.devices.detach(&self.store.mount_point(&lock.name))?;
        }
        // After the unmount: a crash leaves users of an unmounted volume, which `reconcile_record`
        // removes.
        if was_user { self.store.write(&lock.name, &record) } else { Ok(()) }
    }

    /// State of a volume; `None` if it does not exist.
    pub(crate) fn state(&self, name: &VolumeName) -> anyhow::Result<Option<VolumeState>> {
        let Some(record) = self.store.read(name)? else { return Ok(None) };
        let at = self.store.mount_point(name);
        let mount_point = self.devices.is_mounted(&at)?.then_some(at);
        Ok(Some(VolumeState {
            name: name.clone(),
            image: self.store.image(name, record.checked()?.format),
            // Users of an unmounted volume are leftovers.
            users: if mount_point.is_some() { record.users } else { BTreeSet::new() },
            options: record.options,
            mount_point,
        }))
    }

    /// All volumes. Unreadable ones are logged and skipped.
    pub(crate) fn list(&self) -> anyhow::Result<Vec<VolumeState>> {
        let names = self.store.names()?.into_iter();
        let read_state = |name| {
            self.state(&name).unwrap_or_else(|error| {
                tracing::warn!(volume = %name, error = format!("{error:#}"), "the volume is not listed");
                None
            })
        };
        Ok(names.filter_map(read_state).collect())
    }

    fn existing_record(&self, lock: &VolumeLock<'_>) -> anyhow::Result<VolumeRecord> {
        self.store.read(&lock.name)?.with_context(|| unknown_volume(&lock.name))
    }

    /// Corrects the record by the kernel's mounts; returns it, and true if the volume is mounted.
    fn reconcile_record(
        &self,
        lock: &VolumeLock<'_>,
        mut record: VolumeRecord,
    ) -> anyhow::Result<(VolumeRecord, bool)> {
        let is_mounted = self.devices.is_mounted(&self.store.mount_point(&lock.name))?;
        if !is_mounted && !record.users.is_empty() {
            record.users.clear();
            self.store.write(&lock.name, &record)?;
        }
        Ok((record, is_mounted))
    }
}

/// Message about a volume that does not exist.
pub(crate) fn unknown_volume(name: &VolumeName) -> String {
    format!("there is no volume {name} (create it with `docker volume create -d weir -o size=10G {name}`)")
}

fn check_user(user: &str) -> anyhow::Result<()> {
    match user.len() {
        0 => bail!("ID: is empty (send the ID of the container)"),
        length if length > MAX_USER_BYTES => {
            bail!("ID: is {length} bytes long; at most {MAX_USER_BYTES} are allowed")
        }
        _ => Ok(()),
    }
}

/// First users, abbreviated as Docker does.
fn abbreviate(users: &BTreeSet<String>) -> String {
    const SHOWN: usize = 3;
    const LENGTH: usize = 12;
    let short = |user: &String| user.chars().take(LENGTH).collect::<String>();
    let list = users.iter().take(SHOWN).map(short).collect::<Vec<_>>().join(", ");
    if users.len() > SHOWN { format!("{list}, …") } else { list }
}

#[cfg(test)]
#[path = "volumes_tests.rs"]
pub(crate) mod tests;
