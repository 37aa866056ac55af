//! Volumes: made, removed, mounted for those who use them, as Docker's volume plugin protocol words
//! it.
//!
//! ```text
//!            create            mount by a                mount by b
//!   nothing ───────► at rest ───────────► mounted {a} ─────────────► mounted {a, b}
//!       ▲               │ ▲                    │  ▲                        │
//!       └───────────────┘ └────────────────────┘  └────────────────────────┘
//!            remove            unmount by a              unmount by b
//! ```
//!
//! The truth lies outside of the process: a volume is there if its record is, and mounted if the
//! kernel says so. Users are written down after a mount and struck out after an unmount. So one who
//! was killed in between, or whose machine lost its power, left at worst
//!
//! - users of what is not mounted, who are gone, or
//! - a mount that nobody uses, which [`Volumes::recover`] and the next who comes undo.
//!
//! What changes a volume needs it [`Held`]: one at a time for each volume, while others go on.
//! Looking needs no such thing, and never waits.

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

/// All volumes of one directory.
pub(crate) struct Volumes<D> {
    store: Store,
    devices: D,
    /// The program itself, which makes images.
    weir: PathBuf,
    held: Mutex<HashSet<Name>>,
    let_go: Condvar,
}

/// A volume that nobody else changes meanwhile.
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

/// A volume as it is now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    pub(crate) name: Name,
    pub(crate) options: Given,
    pub(crate) image: PathBuf,
    /// None while it is not mounted.
    pub(crate) mount_point: Option<PathBuf>,
    pub(crate) users: BTreeSet<String>,
}

impl<D: Devices> Volumes<D> {
    pub(crate) fn new(store: Store, devices: D, weir: &Path) -> Self {
        Self { store, devices, weir: weir.to_owned(), held: Mutex::default(), let_go: Condvar::new() }
    }

    /// Sets right what an earlier process left: see above. What cannot be is told in the log.
    pub(crate) fn recover(&self) -> anyhow::Result<()> {
        for name in self.store.names()? {
            let name = self.hold(name);
            if let Err(error) = self.recover_one(&name) {
                let volume = &name.name;
                tracing::warn!(%volume, error = format!("{error:#}"), "what was left of it stays");
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

    /// Waits until nobody else has it.
    pub(crate) fn hold(&self, name: Name) -> Held<'_> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.let_go.wait_while(held, |held| held.contains(&name));
        free.unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        Held { name, held: &self.held, let_go: &self.let_go }
    }

    /// Makes it, or finds it made with the same options.
    pub(crate) fn create(&self, held: &Held<'_>, given: Given) -> anyhow::Result<()> {
        let name = &held.name;
        let options = Options::read(given).map_err(|what| anyhow!("{what}"))?;
        if let Some(record) = self.store.read(name)? {
            if record.options == *options.given() {
                return Ok(());
            }
            bail!("a volume {name} is there already, with other options (remove it, or choose another name)");
        }
        if self.store.names()?.contains(name) {
            self.store.remove(name).context("what is left of a volume of this name")?;
        }
        let make = || {
            self.store.prepare(name)?;
            image::make(&self.weir, &self.store.image(name, options.format), &options)?;
            self.store.write(name, &Record { options: options.given().clone(), users: BTreeSet::new() })
        };
        make().inspect_err(|_| {
            // What made it fail is to be told; what is left is cleared before the next attempt.
            let _ = self.store.remove(name);
        })
    }

    /// Fails while somebody uses it.
    pub(crate) fn remove(&self, held: &Held<'_>) -> anyhow::Result<()> {
        let (record, is_mounted) = self.now(held, self.known(held)?)?;
        if !record.users.is_empty() {
            let count = record.users.len();
            let who = if count == 1 { "one container uses it" } else { "several containers use it" };
            bail!("is mounted: {who} ({}) (stop what uses it first)", shown(&record.users));
        }
        if is_mounted {
            self.devices.detach(&self.store.mount_point(&held.name))?;
        }
        self.store.remove(&held.name)
    }

    /// Mounts it for `user`, who may have it already; where it is mounted.
    pub(crate) fn mount(&self, held: &Held<'_>, user: &str) -> anyhow::Result<PathBuf> {
        check_user(user)?;
        let (mut record, is_mounted) = self.now(held, self.known(held)?)?;
        let at = self.store.mount_point(&held.name);
        if !is_mounted {
            let options = record.checked()?;
            let mut words = options.words();
            words.push(format!("--name={}", held.name.of_disk()));
            self.devices.attach(&self.store.image(&held.name, options.format), &words, &at)?;
        }
        if record.users.contains(user) {
            return Ok(at);
        }
        if record.users.len() >= MOST_USERS {
            bail!("has {MOST_USERS} users, and no more may be (unmount some)");
        }
        record.users.insert(user.to_owned());
        self.store.write(&held.name, &record).inspect_err(|_| {
            if !is_mounted {
                let _ = self.devices.detach(&at);
            }
        })?;
        Ok(at)
    }

    /// Strikes out `user`, and unmounts it after the last. One who does not use it changes nothing.
    pub(crate) fn unmount(&self, held: &Held<'_>, user: &str) -> anyhow::Result<()> {
        let (mut record, is_mounted) = self.now(held, self.known(held)?)?;
        let was_there = record.users.remove(user);
        if is_mounted && record.users.is_empty() {
            self.devices.detach(&self.store.mount_point(&held.name))?;
        }
        if was_there { self.store.write(&held.name, &record) } else { Ok(()) }
    }

    /// The volume, if it is there.
    pub(crate) fn look(&self, name: &Name) -> anyhow::Result<Option<Volume>> {
        let Some(record) = self.store.read(name)? else { return Ok(None) };
        let at = self.store.mount_point(name);
        let mount_point = self.devices.is_mounted(&at)?.then_some(at);
        Ok(Some(Volume {
            name: name.clone(),
            image: self.store.image(name, record.checked()?.format),
            users: if mount_point.is_some() { record.users } else { BTreeSet::new() },
            options: record.options,
            mount_point,
        }))
    }

    /// Every volume; what is none is told in the log, and does not hide the others.
    pub(crate) fn list(&self) -> anyhow::Result<Vec<Volume>> {
        let names = self.store.names()?.into_iter();
        let look = |name| {
            self.look(&name).unwrap_or_else(|error| {
                tracing::warn!(volume = %name, error = format!("{error:#}"), "it is not listed");
                None
            })
        };
        Ok(names.filter_map(look).collect())
    }

    fn known(&self, held: &Held<'_>) -> anyhow::Result<Record> {
        self.store.read(&held.name)?.with_context(|| no_such(&held.name))
    }

    /// The record as far as it is still true, and whether the volume is mounted.
    fn now(&self, held: &Held<'_>, mut record: Record) -> anyhow::Result<(Record, bool)> {
        let is_mounted = self.devices.is_mounted(&self.store.mount_point(&held.name))?;
        if !is_mounted && !record.users.is_empty() {
            record.users.clear();
            self.store.write(&held.name, &record)?;
        }
        Ok((record, is_mounted))
    }
}

/// What is said of a volume that is not there.
pub(crate) fn no_such(name: &Name) -> String {
    format!("there is no volume {name} (`docker volume create -d weir -o size=10G {name}` makes it)")
}

fn check_user(user: &str) -> anyhow::Result<()> {
    match user.len() {
        0 => bail!("ID: is empty (a mount is for somebody, whom it names)"),
        length if length > MOST_USER_BYTES => {
            bail!("ID: has {length} bytes; it has {MOST_USER_BYTES} at most")
        }
        _ => Ok(()),
    }
}

/// A few of them, as Docker abbreviates them.
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
