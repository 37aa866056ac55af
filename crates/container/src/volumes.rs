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
//! kernel says so. Users are recorded after a mount and removed after an unmount. A crash in
//! between leaves at worst
//!
//! - users of an unmounted volume, which no longer exist, or
//! - a mount without users, which [`Volumes::recover`] and the next user undo.
//!
//! A change of a volume needs its lock ([`Held`]), so changes of one volume are serialized while
//! other volumes proceed. Reading needs no lock and never waits.

use std::{
    collections::{BTreeSet, HashSet},
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, PoisonError},
};

use anyhow::{Context as _, anyhow, bail};

use crate::{
    device::Devices,
    image,
    options::{Given, Options},
    record::{MOST_USER_BYTES, MOST_USERS, Name, Record, Store},
};

/// Volumes of one directory.
pub(crate) struct Volumes<D> {
    store: Store,
    devices: D,
    /// Path of this program, which creates images.
    weir: PathBuf,
    held: Mutex<HashSet<Name>>,
    let_go: Condvar,
}

/// Lock of a volume.
pub(crate) struct Held<'a> {
    name: Name,
    held: &'a Mutex<HashSet<Name>>,
    let_go: &'a Condvar,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
        self.let_go.notify_all();
    }
}

/// Current state of a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    pub(crate) name: Name,
    pub(crate) options: Given,
    pub(crate) image: PathBuf,
    /// `None` while unmounted.
    pub(crate) mount_point: Option<PathBuf>,
    pub(crate) users: BTreeSet<String>,
}

impl<D: Devices> Volumes<D> {
    pub(crate) fn new(store: Store, devices: D, weir: &Path) -> Self {
        Self { store, devices, weir: weir.to_owned(), held: Mutex::default(), let_go: Condvar::new() }
    }

    /// Cleans up after an earlier process, as described above. Failures are logged.
    pub(crate) fn recover(&self) -> anyhow::Result<()> {
        for name in self.store.names()? {
            let name = self.hold(name);
            if let Err(error) = self.recover_one(&name) {
                let volume = &name.name;
                tracing::warn!(%volume, error = format!("{error:#}"), "leftovers of the volume cannot be removed");
            }
        }
        Ok(())
    }

    fn recover_one(&self, held: &Held<'_>) -> anyhow::Result<()> {
        match self.store.read(&held.name)? {
            Some(record) => {
                let (record, is_mounted) = self.now(held, record)?;
                if is_mounted && record.users.is_empty() {
                    self.devices.detach(&self.store.mount_point(&held.name))?;
                }
                Ok(())
            }
            None => self.store.remove(&held.name),
        }
    }

    /// Waits for the lock of a volume.
    pub(crate) fn hold(&self, name: Name) -> Held<'_> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.let_go.wait_while(held, |held| held.contains(&name));
        free.unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        Held { name, held: &self.held, let_go: &self.let_go }
    }

    /// Creates a volume, or succeeds if it exists with the same options.
    pub(crate) fn create(&self, held: &Held<'_>, given: Given) -> anyhow::Result<()> {
        let name = &held.name;
        let options = Options::read(given).map_err(|what| anyhow!("{what}"))?;
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
            self.store.prepare(name)?;
            image::make(&self.weir, &self.store.image(name, options.format), &options)?;
            // Last, because it makes the volume exist.
            self.store.write(name, &Record { options: options.given().clone(), users: BTreeSet::new() })
        };
        make().inspect_err(|_| {
            // The original error is returned; leftovers are removed before the next attempt.
            let _ = self.store.remove(name);
        })
    }

    /// Removes a volume. Fails while it has users.
    pub(crate) fn remove(&self, held: &Held<'_>) -> anyhow::Result<()> {
        let (record, is_mounted) = self.now(held, self.known(held)?)?;
        if !record.users.is_empty() {
            let count = record.users.len();
            let who =
                if count == 1 { "one container is using it" } else { "several containers are using it" };
            bail!("is mounted: {who} ({}) (stop them first)", shown(&record.users));
        }
        if is_mounted {
            self.devices.detach(&self.store.mount_point(&held.name))?;
        }
        self.store.remove(&held.name)
    }

    /// Mounts a volume for `user`; idempotent for the same user. Returns the mount point.
    pub(crate) fn mount(&self, held: &Held<'_>, user: &str) -> anyhow::Result<PathBuf> {
        check_user(user)?;
        let (mut record, is_mounted) = self.now(held, self.known(held)?)?;
        let at = self.store.mount_point(&held.name);
        if !is_mounted {
            let options = record.checked()?;
            let mut words = options.words();
            // A stable name, so that limits and events can be assigned to the volume.
            words.push(format!("--name={}", held.name.of_disk()));
            self.devices.attach(&self.store.image(&held.name, options.format), &words, &at)?;
        }
        if record.users.contains(user) {
            return Ok(at);
        }
        if record.users.len() >= MOST_USERS {
            bail!("has {MOST_USERS} users, the maximum (unmount some)");
        }
        // Recorded after the mount: a crash leaves a mount without users, which recovery undoes.
        record.users.insert(user.to_owned());
        self.store.write(&held.name, &record).inspect_err(|_| {
            if !is_mounted {
                let _ = self.devices.detach(&at);
            }
        })?;
        Ok(at)
    }

    /// Removes `user`, and unmounts the volume after the last one. Unknown users have no effect.
    pub(crate) fn unmount(&self, held: &Held<'_>, user: &str) -> anyhow::Result<()> {
        let (mut record, is_mounted) = self.now(held, self.known(held)?)?;
        let was_there = record.users.remove(user);
        if is_mounted && record.users.is_empty() {
            self.devices.detach(&self.store.mount_point(&held.name))?;
        }
        // After the unmount: a crash leaves users of an unmounted volume, which `now` removes.
        if was_there { self.store.write(&held.name, &record) } else { Ok(()) }
    }

    /// State of a volume; `None` if it does not exist.
    pub(crate) fn look(&self, name: &Name) -> anyhow::Result<Option<Volume>> {
        let Some(record) = self.store.read(name)? else { return Ok(None) };
        let at = self.store.mount_point(name);
        let mount_point = self.devices.is_mounted(&at)?.then_some(at);
        Ok(Some(Volume {
            name: name.clone(),
            image: self.store.image(name, record.checked()?.format),
            // Users of an unmounted volume are leftovers.
            users: if mount_point.is_some() { record.users } else { BTreeSet::new() },
            options: record.options,
            mount_point,
        }))
    }

    /// All volumes. Unreadable ones are logged and skipped.
    pub(crate) fn list(&self) -> anyhow::Result<Vec<Volume>> {
        let names = self.store.names()?.into_iter();
        let look = |name| {
            self.look(&name).unwrap_or_else(|error| {
                tracing::warn!(volume = %name, error = format!("{error:#}"), "the volume is not listed");
                None
            })
        };
        Ok(names.filter_map(look).collect())
    }

    fn known(&self, held: &Held<'_>) -> anyhow::Result<Record> {
        self.store.read(&held.name)?.with_context(|| no_such(&held.name))
    }

    /// Corrects the record by the kernel's mounts; returns it, and true if the volume is mounted.
    fn now(&self, held: &Held<'_>, mut record: Record) -> anyhow::Result<(Record, bool)> {
        let is_mounted = self.devices.is_mounted(&self.store.mount_point(&held.name))?;
        if !is_mounted && !record.users.is_empty() {
            record.users.clear();
            self.store.write(&held.name, &record)?;
        }
        Ok((record, is_mounted))
    }
}

/// Message about a volume that does not exist.
pub(crate) fn no_such(name: &Name) -> String {
    format!("there is no volume {name} (create it with `docker volume create -d weir -o size=10G {name}`)")
}

fn check_user(user: &str) -> anyhow::Result<()> {
    match user.len() {
        0 => bail!("ID: is empty (send the ID of the container)"),
        length if length > MOST_USER_BYTES => {
            bail!("ID: is {length} bytes long; at most {MOST_USER_BYTES} are allowed")
        }
        _ => Ok(()),
    }
}

/// First users, abbreviated as Docker does.
fn shown(users: &BTreeSet<String>) -> String {
    const SHOWN: usize = 3;
    const LENGTH: usize = 12;
    let short = |user: &String| user.chars().take(LENGTH).collect::<String>();
    let list = users.iter().take(SHOWN).map(short).collect::<Vec<_>>().join(", ");
    if users.len() > SHOWN { format!("{list}, …") } else { list }
}

#[cfg(test)]
#[path = "volumes_tests.rs"]
pub(crate) mod tests;
