//! From a plan to the parts of the data path: opened images, groups, disks, servers.

use std::{fs::Metadata, os::unix::fs::MetadataExt as _, path::Path, sync::Arc};

use anyhow::{Context as _, anyhow};
use block::{disk::Disk, layer::throttle::ThrottleGroup};
use export::nbd;
use image::{Image, Secret, open::ImageOptions};
use settings::{TlsCredentialFiles, DesiredState, SecretSource, ProcessSpec, ThrottleConfig, TlsConfig, secret::SecretReader};
use storage::{OpenOptions, PassedFiles, Root, rate::RateBudgets, rbd};

use super::{
    opening::Opening,
    registry::{Registry, RunningDisk},
};
use crate::events::Events;

/// What the disks of one daemon have together while their images are opened.
pub struct Assembly {
    root: Option<Root>,
    /// Of devices that several imitate together.
    budgets: RateBudgets,
    /// Files that another daemon has passed.
    passed: Option<PassedFiles>,
    /// Each read once, because a pipe says its passphrase once.
    secrets: SecretReader,
}

impl Assembly {
    /// Of images that lie below `root`, if that is one.
    pub fn new(root: Option<Root>, budgets: RateBudgets) -> Self {
        Self { root, budgets, passed: None, secrets: SecretReader::default() }
    }

    /// For disks that are added to those of the registry.
    pub(crate) fn beside(registry: &Registry) -> Self {
        let loaded = registry.loaded.borrow();
        let budgets = loaded.as_ref().map(|loaded| loaded.budgets.clone()).unwrap_or_default();
        Self::new(registry.image_root().cloned(), budgets)
    }

    /// The same, with files that another daemon has passed.
    pub(crate) fn with_files(self, passed: Option<PassedFiles>) -> Self {
        Self { passed, ..self }
    }

    /// Opens the image of a disk.
    pub(crate) async fn open(&mut self, planned: &settings::PlacedDisk) -> anyhow::Result<Image> {
        self.opening(planned).await?.open().await
    }

    /// What it takes to open the image of a disk, with its passphrases.
    pub(crate) async fn opening(&mut self, planned: &settings::PlacedDisk) -> anyhow::Result<Opening> {
        let own = match &*planned.qcow2.secrets {
            [] => Vec::new(),
            sources => self.read_secrets(sources).await.with_context(|| format!("disk {}", planned.name))?,
        };
        self.opening_with(planned, own)
    }

    /// The same with passphrases that were read before.
    pub(crate) fn opening_with(
        &self,
        planned: &settings::PlacedDisk,
        secrets: Vec<Secret>,
    ) -> anyhow::Result<Opening> {
        let mut options = options(planned, &self.budgets, self.root.clone(), secrets);
        options.storage.passed_files = self.passed.clone();
        let (name, said) = (planned.name.clone(), planned.first_qcow2_key().cloned());
        Ok(Opening { name, spec: planned.image.to_spec()?, options, said })
    }

    async fn read_secrets(&mut self, sources: &[SecretSource]) -> anyhow::Result<Vec<Secret>> {
        let (sources, mut secrets) = (sources.to_vec(), std::mem::take(&mut self.secrets));
        let own;
        // On another thread: a pipe says nothing until its other end is closed.
        (self.secrets, own) = reactor::run_blocking(move || {
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

/// Logs a warning for each odd but valid setting of a plan.
pub fn warn_of_remarks(plan: &DesiredState) {
    for remark in plan.ineffective_settings() {
        tracing::warn!(name = remark.name, "{}", remark.remark);
    }
}

/// Loads librbd if a disk needs it, and confines images to the plan's root. After this, the process
/// can give up the right to run programs.
///
/// # Errors
/// The library or the directory cannot be opened.
pub async fn prepare(plan: &DesiredState, registry: &Registry) -> anyhow::Result<()> {
    if let Some(first) = plan.disks.iter().find(|disk| is_late(disk)) {
        let name = &first.name;
        reactor::run_blocking(rbd::load)
            .await
            .map_err(|why| anyhow!("disk {name}: librbd cannot be loaded: {why} ({})", rbd::remedy(&why)))?;
    }
    if let Some(path) = &plan.process.image_root {
        registry.confine(root(path)?);
    }
    Ok(())
}

fn promising_nothing(settings: ThrottleConfig) -> ThrottleConfig {
    ThrottleConfig { iops_reservation: 0, bps_reservation: 0, ..settings }
}

/// A disk that is promised nothing yet.
pub(crate) fn bare(planned: &settings::PlacedDisk) -> settings::PlacedDisk {
    let mut bare = planned.clone();
    bare.settings = promising_nothing(planned.settings);
    bare
}

/// Makes the reservations of a group or disk of a cluster's limits, as far as there is room.
pub(crate) fn promise(registry: &Registry, name: &str, settings: &ThrottleConfig) -> anyhow::Result<()> {
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
    group: Option<&Arc<ThrottleGroup>>,
    image: Image,
) -> anyhow::Result<RunningDisk> {
    if let (Image::Raw(_), Some(place)) = (&image, planned.first_qcow2_key()) {
        return Err(place.error("is for qcow2 images, and this one is raw (leave it out)").into());
    }
    let named = || format!("disk {}", planned.name);
    let disk = Disk::new(&planned.name, image, planned.settings.to_disk_settings(), group)
        .with_context(named)?
        .with_discards(planned.discard)
        .with_detect_zeroes(planned.detect_zeroes);
    disk.failures().set_policies(planned.on_error);
    disk.prefetch().set(planned.prefetch).with_context(named)?;
    disk.reserve_memory().with_context(named)?;
    Ok(RunningDisk::new(disk, planned.clone().into_config()))
}

fn options(
    disk: &settings::PlacedDisk,
    budgets: &RateBudgets,
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
        nbd_server: Default::default(),
        may_be_empty: false,
        passed_files: None,
        delay: disk.delay,
        rate: disk.rate.clone(),
        budgets: budgets.clone(),
        faults: disk.faults.clone(),
    };
    let snapshot = disk.snapshot.clone();
    ImageOptions { storage, caches: disk.qcow2.caches, secrets, snapshot, ..ImageOptions::default() }
}

/// Terms of NBD servers.
pub fn terms(service: &ProcessSpec, events: &Events) -> nbd::NbdServerTerms {
    nbd::NbdServerTerms {
        // A count that does not fit is more than there can ever be.
        max_connections: usize::try_from(service.max_connections).unwrap_or(usize::MAX),
        max_of_one_address: service.max_connections_per_address.map(|most| most as usize),
        access: service.access.clone(),
        visited: Some(Arc::new(events.clone())),
        ..nbd::NbdServerTerms::default()
    }
}

/// Reads the TLS credentials of NBD servers; `None` without any.
///
/// # Errors
/// They cannot be read or used.
pub fn credentials(tls: &TlsConfig) -> anyhow::Result<Option<nbd::NbdServerTls>> {
    let (required, credentials) = match tls {
        TlsConfig::Off => return Ok(None),
        TlsConfig::On(credentials) => (false, credentials),
        TlsConfig::Required(credentials) => (true, credentials),
    };
    let keys = match credentials {
        TlsCredentialFiles::Certificates { directory, verify_peer } => {
            warn_of_readers("server's private key", &directory.join("server-key.pem"));
            tls::TlsServer::x509(directory, *verify_peer)
        }
        TlsCredentialFiles::PreShared(file) => {
            let inside = file.join("keys.psk");
            warn_of_readers("pre-shared keys", if file.is_dir() { &inside } else { file });
            tls::TlsServer::psk(file)
        }
    };
    Ok(Some(nbd::NbdServerTls { required, keys: keys.context("TLS")? }))
}
