//! From a plan to the parts of the data path: opened images, groups, disks, servers.

use std::{cell::Cell, fs::Metadata, os::unix::fs::MetadataExt as _, path::Path, rc::Rc, sync::Arc};

use anyhow::{Context as _, anyhow};
use block::{disk::Disk, layer::throttle::Group};
use export::nbd;
use image::{Image, Secret, open::ImageOptions};
use settings::{Credentials, Plan, SecretSource, Service, Settings, Tls, secret::Secrets};
use storage::{OpenOptions, Passed, Root, rate::Budgets, rbd};

use super::{
    opening::{Opening, Trial},
    registry::{Registry, RunningDisk},
};
use crate::events::Events;

/// What the disks of one daemon have together while their images are opened.
pub struct Assembly {
    root: Option<Root>,
    /// Of devices that several imitate together.
    budgets: Budgets,
    /// Files that another daemon has passed.
    passed: Option<Passed>,
    /// Each read once, because a pipe says its passphrase once.
    secrets: Secrets,
}

impl Assembly {
    /// Of images that lie below `root`, if that is one.
    pub fn new(root: Option<Root>, budgets: Budgets) -> Self {
        Self { root, budgets, passed: None, secrets: Secrets::default() }
    }

    /// The same, with files that another daemon has passed.
    pub(crate) fn with_files(self, passed: Option<Passed>) -> Self {
        Self { passed, ..self }
    }

    /// Opens the image of a disk.
    pub async fn open(&mut self, planned: &settings::PlacedDisk) -> anyhow::Result<Image> {
        self.opening(planned).await?.open().await
    }

    /// What it takes to open the image of a disk, with its passphrases.
    pub async fn opening(&mut self, planned: &settings::PlacedDisk) -> anyhow::Result<Opening> {
        let own = match &*planned.qcow2.secrets {
            [] => Vec::new(),
            sources => self.read_secrets(sources).await.with_context(|| format!("disk {}", planned.name))?,
        };
        let mut options = options(planned, &self.budgets, self.root.clone(), own);
        options.storage.passed = self.passed.clone();
        let (name, said) = (planned.name.clone(), planned.qcow2_key().cloned());
        Ok(Opening { name, spec: planned.image.spec()?, options, said })
    }

    async fn read_secrets(&mut self, sources: &[SecretSource]) -> anyhow::Result<Vec<Secret>> {
        let (sources, mut secrets) = (sources.to_vec(), std::mem::take(&mut self.secrets));
        let own;
        // On another thread: a pipe says nothing until its other end is closed.
        (self.secrets, own) = reactor::blocking(move || {
            for source in &sources {
                if let SecretSource::File(path) = source {
                    warn_of_readers("passphrase", path);
                }
            }
            let own = sources.iter().map(|source| secrets.get(source)).collect();
            (secrets, own)
        })
        .await;
        own
    }
}

/// Adds all groups to the registry, and says what is odd in the plan. In the order of the plan.
pub fn groups(plan: &Plan, registry: &Registry) -> anyhow::Result<()> {
    for planned in &plan.groups {
        let parent = planned.group.as_ref().map(|parent| registry.group(parent)).transpose()?;
        let of_cluster = registry.cluster().filter(|_| planned.cluster);
        let is_shared = of_cluster.is_some() || registry.shared_group(parent.as_ref()).is_some();
        let settings = if is_shared { promising_nothing(planned.settings) } else { planned.settings };
        let group = Group::new(&planned.name, settings.of_group(), parent.as_ref())
            .with_context(|| format!("group {}", planned.name))?;
        registry.add_group(&group)?;
        if let Some(cluster) = of_cluster {
            cluster.take_part(&group)?;
        }
        if is_shared {
            promise(registry, &planned.name, &planned.settings)?;
        }
    }
    for remark in plan.remarks() {
        tracing::warn!(name = remark.name, "{}", remark.remark);
    }
    Ok(())
}

fn promising_nothing(settings: Settings) -> Settings {
    Settings { iops_reservation: 0, bps_reservation: 0, ..settings }
}

/// A disk that is promised nothing yet.
pub(crate) fn bare(planned: &settings::PlacedDisk) -> settings::PlacedDisk {
    let mut bare = planned.clone();
    bare.settings = promising_nothing(planned.settings);
    bare
}

fn promise(registry: &Registry, name: &str, settings: &Settings) -> anyhow::Result<()> {
    match [settings.iops_reservation, settings.bps_reservation] {
        [0, 0] => Ok(()),
        wanted => registry.promise_at_start(name, wanted),
    }
}

/// What is opened once the daemon is in the sandbox: images of clusters, whose library then has no
/// thread with more rights than others. Everything else is opened before.
pub fn is_late(disk: &settings::PlacedDisk) -> bool {
    disk.image.is_rbd()
}

/// What the disks have together that are opened late.
pub struct Late {
    assembly: Assembly,
}

/// Opens images and adds all groups and their disks to the registry, but for what is opened late.
/// Of that the library is loaded: later nothing is that can run. `is_awaited` says which disks are
/// not put off, however long they take.
pub async fn disks(
    plan: &Rc<Plan>,
    registry: &Rc<Registry>,
    passed: Option<Passed>,
    is_awaited: impl Fn(&str) -> bool,
) -> anyhow::Result<Late> {
    groups(plan, registry)?;
    if let Some(first) = plan.disks.iter().find(|disk| is_late(disk)) {
        let name = &first.name;
        reactor::blocking(rbd::load)
            .await
            .map_err(|why| anyhow!("disk {name}: librbd cannot be loaded: {why} ({})", rbd::remedy(&why)))?;
    }
    if let Some(path) = &plan.service.image_root {
        registry.confine(root(path)?);
    }
    let root = registry.image_root().cloned();
    let assembly = Assembly::new(root, Budgets::default()).with_files(passed);
    let mut late = Late { assembly };
    let is_remote = |disk: &settings::PlacedDisk| disk.image.remote().is_some();
    late.open(plan, registry, |disk| !is_late(disk) && !is_remote(disk)).await?;
    late.open_at_once(plan, registry, (is_remote, is_awaited)).await?;
    Ok(late)
}

impl Late {
    /// Opens those disks of the plan.
    pub(crate) async fn open(
        &mut self,
        plan: &Plan,
        registry: &Rc<Registry>,
        which: impl Fn(&settings::PlacedDisk) -> bool,
    ) -> anyhow::Result<()> {
        for planned in plan.disks.iter().filter(|disk| which(disk)) {
            list(registry, planned, self.assembly.open(planned).await)?;
        }
        Ok(())
    }

    /// The same of all of them at once. Those that nobody answers for, or not soon, are put off,
    /// unless they are waited for.
    pub async fn open_at_once(
        &mut self,
        plan: &Rc<Plan>,
        registry: &Rc<Registry>,
        (which, is_awaited): (impl Fn(&settings::PlacedDisk) -> bool, impl Fn(&str) -> bool),
    ) -> anyhow::Result<()> {
        let mut all = Vec::new();
        for planned in plan.disks.iter().filter(|disk| which(disk)) {
            let opening = self.assembly.opening(planned).await?;
            all.push((planned, Trial::begin(opening, is_awaited(&planned.name))));
        }
        for (planned, trial) in all {
            match trial.outcome().await {
                Ok(image) => {
                    list(registry, planned, image)?;
                }
                Err(silent) => registry.put_off((&planned.name, Rc::clone(plan)), silent),
            }
        }
        Ok(())
    }

    /// For disks that come later.
    pub fn into_budgets(self) -> Budgets {
        self.assembly.budgets
    }
}

/// Lists a disk of the plan once its image is open, with what is promised to it.
fn list(
    registry: &Rc<Registry>,
    planned: &settings::PlacedDisk,
    image: anyhow::Result<Image>,
) -> anyhow::Result<()> {
    let group = planned.group.as_ref().map(|group| registry.group(group)).transpose()?;
    let group = group.as_ref();
    let image = image.map_err(|error| registry.naming_holder_of(error))?;
    if registry.shared_group(group).is_none() {
        return Ok(registry.add_disk(disk(planned, group, image)?)?);
    }
    // It comes up also where others leave no room for what it is promised.
    registry.add_disk(disk(&bare(planned), group, image)?)?;
    promise(registry, &planned.name, &planned.settings)
}

/// Says that everybody on the machine can read a secret: whoever has it is let in.
fn warn_of_readers(what: &str, path: &Path) {
    // What cannot be looked at is not to be had, and whoever reads it says so.
    let mode = path.metadata().ok().filter(Metadata::is_file).map(|file| file.mode() & 0o777);
    if let Some(mode) = mode.filter(|mode| mode & 0o004 != 0) {
        let file = path.display();
        tracing::warn!(%file, mode = format!("{mode:04o}"), "everybody on this machine can read the {what} (chmod o= {file})");
    }
}

/// Opens the directory that all images are in.
///
/// # Errors
/// It cannot be opened.
pub fn root(path: &Path) -> anyhow::Result<Root> {
    Root::open(path).with_context(|| format!("image root {}", path.display()))
}

/// A disk of an opened image, in a group or in none.
pub fn disk(
    planned: &settings::PlacedDisk,
    group: Option<&Arc<Group>>,
    image: Image,
) -> anyhow::Result<RunningDisk> {
    if let (Image::Raw(_), Some(place)) = (&image, planned.qcow2_key()) {
        return Err(place.wrong("is for qcow2 images, and this one is raw (leave it out)").into());
    }
    let named = || format!("disk {}", planned.name);
    let disk = Disk::new(&planned.name, image, planned.settings.of_disk(), group)
        .with_context(named)?
        .with_discards(planned.discard)
        .with_detect_zeroes(planned.detect_zeroes);
    disk.failures().set_policies(planned.on_error);
    disk.prefetch().set(planned.prefetch).with_context(named)?;
    disk.reserve_memory().with_context(named)?;
    Ok(RunningDisk {
        disk: Arc::new(disk),
        config: planned.clone().into_config(),
        caches: Cell::new(planned.qcow2.caches),
        only_here: None,
        below: Vec::new(),
        storage: None,
        told: None,
    })
}

fn options(
    disk: &settings::PlacedDisk,
    budgets: &Budgets,
    root: Option<Root>,
    secrets: Vec<Secret>,
) -> ImageOptions {
    let storage = OpenOptions {
        cache: disk.cache,
        root,
        descriptor: None,
        format: disk.format,
        part: disk.part,
        read_only: disk.read_only,
        force_share: disk.force_share,
        handover: disk.handover,
        reconnect_delay: disk.reconnect_delay,
        open_timeout: disk.open_timeout,
        known: Default::default(),
        may_be_empty: false,
        passed: None,
        delay: disk.delay,
        rate: disk.rate.clone(),
        budgets: budgets.clone(),
        faults: disk.faults.clone(),
    };
    let snapshot = disk.snapshot.clone();
    ImageOptions { storage, caches: disk.qcow2.caches, secrets, snapshot, ..ImageOptions::default() }
}

/// Terms of NBD servers.
pub fn terms(service: &Service, events: &Events) -> nbd::Terms {
    nbd::Terms {
        // A count that does not fit is more than there can ever be.
        max_connections: usize::try_from(service.max_connections).unwrap_or(usize::MAX),
        max_of_one_address: service.max_connections_per_address.map(|most| most as usize),
        access: service.access.clone(),
        visited: Some(Arc::new(events.clone())),
        ..nbd::Terms::default()
    }
}

/// Reads the TLS credentials of NBD servers; `None` without any.
///
/// # Errors
/// They cannot be read or used.
pub fn credentials(tls: &Tls) -> anyhow::Result<Option<nbd::Tls>> {
    let (required, credentials) = match tls {
        Tls::Off => return Ok(None),
        Tls::On(credentials) => (false, credentials),
        Tls::Required(credentials) => (true, credentials),
    };
    let keys = match credentials {
        Credentials::Certificates { directory, verify_peer } => {
            warn_of_readers("server's private key", &directory.join("server-key.pem"));
            nbd::TlsServer::x509(directory, *verify_peer)
        }
        Credentials::PreShared(file) => {
            let inside = file.join("keys.psk");
            warn_of_readers("pre-shared keys", if file.is_dir() { &inside } else { file });
            nbd::TlsServer::psk(file)
        }
    };
    Ok(Some(nbd::Tls { required, keys: keys.context("TLS")? }))
}
