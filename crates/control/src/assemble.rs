//! Builds the parts of the data path from a plan: opened images, groups, disks, servers.

use std::{fs::Metadata, os::unix::fs::MetadataExt as _, path::Path, sync::Arc};

use anyhow::{Context as _, anyhow};
use block::{disk::Disk, layer::throttle::ThrottleGroup};
use export::nbd;
use image::{
    Image, Secret,
    open::{BackingChoice, ImageOptions},
};
use reactor::{operation::PassedFd, regular_file};
use settings::{
    DesiredState, DiskConfig, ProcessSpec, SecretSource, ThrottleConfig, TlsConfig, TlsCredentialFiles,
    secret::SecretReader,
};
use storage::{ImageFormat, OpenOptions, PassedFiles, Root, rate::RateBudgets, rbd};

use super::{
    image_opening::ImageOpenRequest,
    registry::{Registry, RunningDisk},
    schedules::scheduled_now,
};
use crate::events::EventLog;

/// State that the disks of one daemon share while their images are opened.
pub struct DiskAssembly {
    root: Option<Root>,
    /// Rate budgets of emulated devices that several disks share (`rate=…,shared=NAME`).
    budgets: RateBudgets,
    /// Files that the old process passed in an upgrade.
    passed_files: Option<PassedFiles>,
    /// Passphrases, each read once: a pipe delivers its passphrase only once.
    secrets: SecretReader,
}

impl DiskAssembly {
    /// Assembly for images below `root`, if there is a root.
    pub fn new(root: Option<Root>, budgets: RateBudgets) -> Self {
        Self { root, budgets, passed_files: None, secrets: SecretReader::default() }
    }

    /// Assembly for disks that are added to a running registry; shares its rate budgets.
    pub(crate) fn for_registry(registry: &Registry) -> Self {
        Self::new(registry.image_root().cloned(), rate_budgets(registry))
    }

    /// Adds files that the old process passed.
    pub(crate) fn with_passed_files(self, passed: Option<PassedFiles>) -> Self {
        Self { passed_files: passed, ..self }
    }

    /// Opens the image of a disk.
    pub(crate) async fn open(&mut self, planned: &settings::DiskWithOrigins) -> anyhow::Result<Image> {
        self.open_request(planned).await?.open().await
    }

    /// Returns everything that opening the image of a disk needs, including its passphrases.
    pub(crate) async fn open_request(
        &mut self,
        planned: &settings::DiskWithOrigins,
    ) -> anyhow::Result<ImageOpenRequest> {
        let secrets = match &*planned.qcow2.secrets {
            [] => Vec::new(),
            sources => self.read_secrets(sources).await.with_context(|| format!("disk {}", planned.name))?,
        };
        self.open_request_with(planned, secrets)
    }

    /// As [`Self::open_request`], for a disk that a client describes. Its passphrases are read by
    /// [`client_passphrase`], and its image may be a descriptor that the client passed.
    pub(crate) async fn open_request_of_client(
        &self,
        disk: &settings::DiskWithOrigins,
        registry: &Registry,
    ) -> anyhow::Result<ImageOpenRequest> {
        let mut secrets = Vec::new();
        for source in &disk.qcow2.secrets {
            if let SecretSource::File(path) = source {
                let read = client_passphrase(registry, path).await;
                secrets.push(read.map_err(|why| disk.error("secret-file", why))?);
            }
        }
        let mut request = self.open_request_with(disk, secrets)?;
        if let Some(path) = disk.image.path() {
            // A path in `/dev/fdset` is opened by its passed descriptor, not by name.
            let descriptor = registry.objects.descriptors.descriptor_at(path, disk.read_only);
            request.options.storage.descriptor = descriptor.map_err(anyhow::Error::msg)?;
        }
        Ok(request)
    }

    /// As `open_request`, with passphrases that were already read.
    fn open_request_with(
        &self,
        planned: &settings::DiskWithOrigins,
        secrets: Vec<Secret>,
    ) -> anyhow::Result<ImageOpenRequest> {
        let mut options = image_options(planned, &self.budgets, self.root.clone(), secrets);
        options.storage.passed_files = self.passed_files.clone();
        let (name, key_origin) = (planned.name.clone(), planned.first_qcow2_key().cloned());
        Ok(ImageOpenRequest { name, spec: planned.image.to_spec()?, options, qcow2_key_origin: key_origin })
    }

    /// Options for a new overlay of a disk with this config. Its own format is qcow2; its parts,
    /// passphrases and snapshots are those of images below.
    pub(crate) fn overlay_options(&self, config: &DiskConfig, descriptor: Option<PassedFd>) -> ImageOptions {
        let mut options = image_options(config, &self.budgets, self.root.clone(), Vec::new());
        (options.storage.format, options.storage.descriptor) =
            (Some(ImageFormat::Qcow2), descriptor.map(Arc::new));
        ImageOptions { backing: BackingChoice::Nothing, ..options }
    }

    /// Options for an image that a disk with this config is moved to.
    pub(crate) fn target_options(&self, config: &DiskConfig) -> ImageOptions {
        image_options(config, &self.budgets, self.root.clone(), Vec::new())
    }

    async fn read_secrets(&mut self, sources: &[SecretSource]) -> anyhow::Result<Vec<Secret>> {
        // The cache moves to the blocking thread and back; it must outlive this call, as another
        // disk may use the same source.
        let (sources, mut secrets) = (sources.to_vec(), std::mem::take(&mut self.secrets));
        let disk_secrets;
        // On another thread: a read of a pipe blocks until its writer closes it.
        (self.secrets, disk_secrets) = reactor::run_blocking(move || {
            for source in &sources {
                if let SecretSource::File(path) = source {
                    warn_if_world_readable("passphrase", path);
                }
            }
            let disk_secrets = sources.iter().map(|source| secrets.get(source)).collect();
            (secrets, disk_secrets)
        })
        .await;
        disk_secrets
    }
}

/// Rate budgets of the running disks.
pub(crate) fn rate_budgets(registry: &Registry) -> RateBudgets {
    registry.loaded.borrow().as_ref().map(|loaded| loaded.budgets.clone()).unwrap_or_default()
}

/// Reads a passphrase from a file that a client names. If images are confined to a directory, the
/// file must be inside it as well; otherwise a client could probe the contents of other files.
///
/// # Errors
/// Reason why the file cannot be read.
pub(crate) async fn client_passphrase(registry: &Registry, path: &Path) -> Result<Secret, String> {
    let (path, root) = (path.to_owned(), registry.image_root().cloned());
    let read = move || {
        // Pipes are rejected: a pipe may never get a writer, and this call has no timeout.
        let file = match root {
            Some(root) => root.read(&path).map_err(|error| error.why)?,
            None => regular_file::open(&path).map_err(|error| error.to_string())?,
        };
        Secret::read(file).map_err(|error| error.to_string())
    };
    reactor::run_blocking(read).await
}

/// Logs a warning for each valid setting of a plan that has no effect or is probably a mistake.
pub fn log_remarks(plan: &DesiredState) {
    for remark in plan.ineffective_settings() {
        tracing::warn!(name = remark.name, "{}", remark.remark);
    }
}

/// Loads librbd if a disk needs it, and confines images to the plan's root. After this, the process
/// no longer needs the right to run programs.
///
/// # Errors
/// The library or the directory cannot be opened.
pub async fn prepare(plan: &DesiredState, registry: &Registry) -> anyhow::Result<()> {
    if let Some(first) = plan.disks.iter().find(|disk| opens_in_sandbox(disk)) {
        let name = &first.name;
        reactor::run_blocking(rbd::load)
            .await
            // Loaded before the process gives up its rights.
            .map_err(|why| anyhow!("disk {name}: librbd cannot be loaded: {why} ({})", rbd::remedy(&why)))?;
    }
    if let Some(path) = &plan.process.image_root {
        registry.confine(open_image_root(path)?);
    }
    Ok(())
}

fn without_reservations(settings: ThrottleConfig) -> ThrottleConfig {
    ThrottleConfig { iops_reservation: 0, bps_reservation: 0, ..settings }
}

/// Copy of a disk's config without its reservations, which a later step books.
pub(crate) fn without_disk_reservations(planned: &settings::DiskWithOrigins) -> settings::DiskWithOrigins {
    let mut disk = planned.clone();
    disk.settings = without_reservations(planned.settings);
    disk
}

/// Books the reservations of a group or disk in a cluster-wide limit, as far as capacity allows.
pub(crate) fn book_reservations(
    registry: &Registry,
    name: &str,
    settings: &ThrottleConfig,
) -> anyhow::Result<()> {
    match [settings.iops_reservation, settings.bps_reservation] {
        [0, 0] => Ok(()),
        wanted => registry.book_at_start(name, wanted),
    }
}

/// True for images that are opened inside the sandbox. librbd starts threads, and only threads that
/// start inside the sandbox are confined by it. All other images are opened before.
pub fn opens_in_sandbox(disk: &settings::DiskWithOrigins) -> bool {
    disk.image.is_rbd()
}

/// Logs a warning if every user of the host can read a secret file.
fn warn_if_world_readable(contents: &str, path: &Path) {
    // Unreadable files are skipped here; the reader reports the error.
    let mode = path.metadata().ok().filter(Metadata::is_file).map(|file| file.mode() & 0o777);
    if let Some(mode) = mode.filter(|mode| mode & 0o004 != 0) {
        let file = path.display();
        tracing::warn!(
            %file, mode = format!("{mode:04o}"),
            "every user of this host can read the {contents} (chmod o= {file})"
        );
    }
}

/// Opens the directory that all images are confined to.
///
/// # Errors
/// The directory cannot be opened.
pub fn open_image_root(path: &Path) -> anyhow::Result<Root> {
    Root::open(path).with_context(|| format!("image root {}", path.display()))
}

/// Builds the disk of an opened image, in a group or without one.
///
/// # Errors
/// The image is raw but the config has a qcow2 key; the limits, the prefetch settings or the memory
/// reservation are not accepted.
pub fn build_disk(
    planned: &settings::DiskWithOrigins,
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
    disk.throttle().set_scheduled(scheduled_now(&planned.schedule, false)).with_context(named)?;
    disk.failures().set_policies(planned.on_error);
    // Prefetch before the memory reservation, whose size depends on it.
    disk.prefetch().set(planned.prefetch).with_context(named)?;
    disk.reserve_memory().with_context(named)?;
    Ok(RunningDisk::new(disk, planned.clone().into_config()))
}

fn image_options(
    disk: &DiskConfig,
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
        exclusive: false,
        passed_files: None,
        delay: disk.delay,
        rate: disk.rate.clone(),
        budgets: budgets.clone(),
        faults: disk.faults.clone(),
    };
    let snapshot = disk.snapshot.clone();
    ImageOptions { storage, caches: disk.qcow2.caches, secrets, snapshot, ..ImageOptions::default() }
}

/// Limits and access rules of NBD servers.
pub fn nbd_server_terms(service: &ProcessSpec, events: &EventLog) -> nbd::NbdServerTerms {
    nbd::NbdServerTerms {
        // Saturates: a larger count can never be reached.
        max_connections: usize::try_from(service.max_connections).unwrap_or(usize::MAX),
        max_of_one_address: service.max_connections_per_address.map(|max| max as usize),
        access: service.access.clone(),
        observer: Some(Arc::new(events.clone())),
        ..nbd::NbdServerTerms::default()
    }
}

/// Reads the TLS credentials of NBD servers; `None` if TLS is off.
///
/// # Errors
/// The credentials cannot be read or used.
pub fn read_tls_credentials(tls: &TlsConfig) -> anyhow::Result<Option<nbd::NbdServerTls>> {
    let (required, credentials) = match tls {
        TlsConfig::Off => return Ok(None),
        TlsConfig::On(credentials) => (false, credentials),
        TlsConfig::Required(credentials) => (true, credentials),
    };
    let keys = match credentials {
        TlsCredentialFiles::Certificates { directory, verify_peer } => {
            warn_if_world_readable("server's private key", &directory.join("server-key.pem"));
            tls::TlsServer::x509(directory, *verify_peer)
        }
        TlsCredentialFiles::PreShared(file) => {
            let inside = file.join("keys.psk");
            warn_if_world_readable("pre-shared keys", if file.is_dir() { &inside } else { file });
            tls::TlsServer::psk(file)
        }
    };
    Ok(Some(nbd::NbdServerTls { required, keys: keys.context("TLS")? }))
}
