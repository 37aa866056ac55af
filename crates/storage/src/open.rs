//! Opens the storage that a user names: parses the spec, opens, locks, probes, and adds the
//! wrappers.
//!
//! Blocks, so call it at the start of the program, or in [`reactor::run_blocking`].

use std::{path::Path, sync::Arc};

use policy::time::Duration;

use super::{
    CacheMode, ImageFormat, MemoryStorage, NullStorage, OpenError, PassedFiles, Root, Storage, StoragePart,
    StorageSpec,
    align::Align,
    delay::DelayOptions,
    fault::FaultRule,
    file::{self, FileOptions},
    nbd::{NbdOptions, ResolvedServerCache},
    probe::{Probed, probe_beginning, probe_file},
    rate::{RateBudgets, RateOptions},
    rbd,
};
use nbd::uri::Uri;
use reactor::{PollingMode, operation::PassedFd};

/// Options of opening an image.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Cache mode of files, RBD and NBD; memory has no cache.
    pub cache: CacheMode,
    /// `None` guesses the format if that is safe.
    pub format: Option<ImageFormat>,
    /// Rejects writes and locks as a reader, so that other readers can open it.
    pub read_only: bool,
    /// Reads although another process writes; only with `read_only`.
    pub force_share: bool,
    /// Opens without locks, since another process may hold them. The image must not be used before
    /// `block::disk::Disk::hold`. Only for files that are opened for writing.
    pub handover: bool,
    /// Accepts an empty regular file as a disk of size zero.
    pub may_be_empty: bool,
    /// Rejects a block device that is mounted or in other use by the kernel, and prevents such uses
    /// while it is open. Does not apply to `descriptor`.
    pub exclusive: bool,
    /// Directory that files must be in; `None` allows all.
    pub root: Option<Root>,
    /// The file, already open: its name and its directory are not checked.
    pub descriptor: Option<Arc<PassedFd>>,
    /// Files that another process has open for writing, and its RBD images. The process may also
    /// use NBD exports, which it does not pass.
    pub passed_files: Option<PassedFiles>,
    /// The part of the storage that is the disk; only for raw images.
    pub part: Option<StoragePart>,
    /// Time for which requests wait for a disconnected NBD server and are then retried. With zero
    /// they fail at once.
    pub reconnect_delay: Duration,
    /// Time for which the first connection to an NBD server is retried; with zero there is one
    /// attempt.
    pub open_timeout: Duration,
    /// Result of an earlier attempt to connect to the NBD server.
    pub nbd_server: ResolvedServerCache,
    /// Latency to add.
    pub delay: Option<DelayOptions>,
    /// Bandwidth to limit to.
    pub rate: Option<RateOptions>,
    /// Registry of the budgets that images opened with the same `shared` name use together.
    pub budgets: RateBudgets,
    /// Rules that inject failures, in order.
    pub faults: Vec<FaultRule>,
}

/// Opens the storage that `spec` names, for callers that interpret the bytes: does not guess a
/// format and ignores `format`.
///
/// # Errors
/// The reason, as a message for users.
pub fn open_storage(spec: &str, options: OpenOptions) -> Result<Storage, OpenError> {
    add_wrappers(spec, open_bottom(spec, &options)?.0, options)
}

/// Probes the format of an image on any storage; `spec` as for [`open_storage`].
///
/// # Errors
/// The image cannot be opened or read.
pub fn probe_anywhere(spec: &str) -> Result<Probed, OpenError> {
    let options =
        OpenOptions { read_only: true, force_share: true, may_be_empty: true, ..OpenOptions::default() };
    Ok(open_bottom(spec, &options)?.1)
}

/// Opens an NBD export for a caller without a reactor, or one that cannot wait: on a new thread
/// with its own reactor.
fn open_on_thread(uri: &Uri, options: &OpenOptions) -> Result<(Storage, Probed), OpenError> {
    let (uri_copy, options) = (uri.clone(), nbd_options(uri, options)?);
    let thread = std::thread::spawn(move || {
        reactor::run(PollingMode::Off, async move { crate::nbd::open(&uri_copy, &options).await })
    });
    let failed = |why: String| OpenError::new(&uri.to_string(), why, "is io_uring available?");
    let opened = thread.join().map_err(|_| failed("the thread that opened it has ended".to_owned()))?;
    let (nbd, probed) = opened.map_err(|error| failed(format!("io_uring cannot be set up: {error}")))??;
    Ok((Storage::Nbd(nbd), probed))
}

fn nbd_options(uri: &Uri, options: &OpenOptions) -> Result<NbdOptions, OpenError> {
    if options.handover {
        let why = "cannot be handed over: NBD has no locks";
        return Err(OpenError::new(&uri.to_string(), why, "leave handover out"));
    }
    Ok(NbdOptions {
        cache: options.cache,
        is_format_known: options.format.is_some(),
        read_only: options.read_only,
        is_shared: options.force_share,
        may_be_empty: options.may_be_empty,
        passed_files: options.passed_files.clone(),
        reconnect_delay: options.reconnect_delay,
        open_timeout: options.open_timeout,
        server_cache: options.nbd_server.clone(),
    })
}

/// As [`open_bottom`], without blocking, on this thread's reactor.
pub async fn open_async(spec: &str, options: &OpenOptions) -> Result<(Storage, Probed), OpenError> {
    match parse_spec(spec)? {
        StorageSpec::Nbd(_) if options.force_share && !options.read_only => Err(force_share_error(spec)),
        StorageSpec::Nbd(uri) => {
            let (nbd, probed) = crate::nbd::open(&uri, &nbd_options(&uri, options)?).await?;
            Ok((Storage::Nbd(nbd), probed))
        }
        // Without a system call that could block, so without another thread.
        StorageSpec::Memory(_) | StorageSpec::Null(_) => open_bottom(spec, options),
        StorageSpec::File(_) | StorageSpec::Rbd(_) => {
            let (spec, options) = (spec.to_owned(), options.clone());
            reactor::run_blocking(move || open_bottom(&spec, &options)).await
        }
    }
}

fn parse_spec(spec: &str) -> Result<StorageSpec, OpenError> {
    spec.parse().map_err(|error: super::InvalidValue| {
        let remedy = "an image is a path, memory:SIZE, null:SIZE, rbd:POOL/IMAGE or nbd://HOST/EXPORT";
        OpenError::new(spec, error.to_string(), remedy)
    })
}

fn force_share_error(spec: &str) -> OpenError {
    OpenError::new(spec, "force-share would allow two writers to corrupt it", "add --read-only")
}

/// Opens the storage that `spec` names, without wrappers, and probes its format. Blocks.
pub fn open_bottom(spec: &str, options: &OpenOptions) -> Result<(Storage, Probed), OpenError> {
    if options.force_share && !options.read_only {
        return Err(force_share_error(spec));
    }
    let storage_spec = parse_spec(spec)?;
    let has_delay = !options.reconnect_delay.is_zero() || !options.open_timeout.is_zero();
    if has_delay && !matches!(storage_spec, StorageSpec::Nbd(_)) {
        let why = "reconnect-delay and open-timeout apply to NBD servers only";
        return Err(OpenError::new(spec, why, "leave them out"));
    }
    if options.handover && (options.read_only || !matches!(storage_spec, StorageSpec::File(_))) {
        return Err(OpenError::new(
            spec,
            "only a file that is written to can be handed over",
            "leave handover out",
        ));
    }
    match storage_spec {
        StorageSpec::File(path) => open_file(&path, options),
        StorageSpec::Memory(size) => Ok((Storage::Memory(memory(spec, size)?), Probed::Raw)),
        StorageSpec::Nbd(uri) => open_on_thread(&uri, options),
        StorageSpec::Null(size) => Ok((Storage::Null(NullStorage::new(not_empty(spec, size)?)), Probed::Raw)),
        StorageSpec::Rbd(address) => {
            let OpenOptions { cache, read_only, force_share, .. } = *options;
            let rbd_options =
                rbd::RbdOptions { cache, read_only, force_share, passed: options.passed_files.clone() };
            let (image, probed) = rbd::open(&address, rbd_options, options.format.is_none())?;
            Ok((Storage::Rbd(Align::new(image)), probed))
        }
    }
}

fn open_file(path: &Path, options: &OpenOptions) -> Result<(Storage, Probed), OpenError> {
    let file_options = FileOptions {
        cache: options.cache,
        read_only: options.read_only,
        force_share: options.force_share,
        handover: options.handover,
        may_be_empty: options.may_be_empty,
        exclusive: options.exclusive,
        passed: options.passed_files.clone(),
        root: options.root.clone(),
        descriptor: options.descriptor.clone(),
    };
    let (file, plain) = file::open(path, &file_options)?;
    let probe_result = match options.format {
        None => probe_file(&plain),
        Some(_) => probe_beginning(&plain),
    };
    let probed = match (options.format, probe_result) {
        (_, Ok(probed)) => probed,
        // If a format was given, the probed format is used only for a warning.
        (Some(_), Err(_)) => Probed::Raw,
        (None, Err(error)) => {
            let why = format!("its first bytes cannot be read: {error}");
            return Err(OpenError::new(&path.display().to_string(), why, "check the device"));
        }
    };
    Ok((Storage::File(Align::new(file)), probed))
}

fn memory(spec: &str, size: u64) -> Result<MemoryStorage, OpenError> {
    MemoryStorage::new(not_empty(spec, size)?)
        .ok_or_else(|| OpenError::new(spec, "is too large for memory", "256T is the largest"))
}

fn not_empty(spec: &str, size: u64) -> Result<u64, OpenError> {
    if size == 0 { Err(OpenError::new(spec, "has size zero", "give it a size, e.g. 1G")) } else { Ok(size) }
}

/// Adds the wrappers in the order of the drawing in [`storage`](super): faults outermost, so that
/// an injected failure costs no time.
pub fn add_wrappers(spec: &str, mut storage: Storage, options: OpenOptions) -> Result<Storage, OpenError> {
    if let Some(part) = options.part {
        let total_bytes = storage.size_bytes();
        storage = storage.part(part);
        // A part that is only partly inside would shift every bound check; it is rejected as a
        // whole.
        if storage.size_bytes() == 0 || part.size.is_some_and(|size| size > storage.size_bytes()) {
            let why = format!(
                "has {total_bytes} bytes as a raw file, and the part given by offset and size extends \
                 beyond its end"
            );
            return Err(OpenError::new(spec, why, "choose another offset or size"));
        }
    }
    if let Some(delay) = options.delay {
        storage = storage.delayed(delay);
    }
    if let Some(rate) = options.rate {
        let budget = options.budgets.get(&rate).map_err(|error| {
            OpenError::new(
                spec,
                format!("another image has shared={} with other rates", error.0),
                "give both images the same rates",
            )
        })?;
        storage = storage.with_rate(budget);
    }
    if !options.faults.is_empty() {
        storage = storage.with_faults(options.faults);
    }
    Ok(storage)
}
