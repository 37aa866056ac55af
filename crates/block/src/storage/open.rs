//! From what a user asked for to a storage that is ready: opens, locks, probes, and puts the
//! wrappers on.
//!
//! Blocks, so it belongs at the start of the program, or in
//! [`reactor::blocking`](crate::reactor::blocking).

use std::{os::fd::OwnedFd, path::Path, sync::Arc};

use super::{
    CacheMode, Format, Memory, Null, OpenError, Part, Passed, Root, Spec, Storage,
    align::Align,
    delay::DelayOptions,
    fault::FaultRule,
    file::{self, FileOptions},
    probe::{Probed, probe_file},
    rate::{Budgets, RateOptions},
    rbd,
};

/// How to open an image.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// For files; memory has no cache.
    pub cache: CacheMode,
    /// `None` guesses, where that is safe.
    pub format: Option<Format>,
    /// Refuse writes; take no lock that would keep other readers away.
    pub read_only: bool,
    /// Read although somebody else writes; only with `read_only`.
    pub force_share: bool,
    /// Open it without its locks, since another may have them: it is not to be used before
    /// [`Disk::hold`](crate::disk::Disk::hold). Only of files that are written to.
    pub handover: bool,
    /// A regular file of no bytes is a disk too, of size zero.
    pub may_be_empty: bool,
    /// Where files must lie; everywhere without it.
    pub root: Option<Root>,
    /// The file itself, already open: its name is not looked at, nor where it lies.
    pub descriptor: Option<Arc<OwnedFd>>,
    /// Files that another process has open, for those that are written to.
    pub passed: Option<Passed>,
    /// The part of it that is the disk; only of raw images.
    pub part: Option<Part>,
    /// Latency added.
    pub delay: Option<DelayOptions>,
    /// Bandwidth bounded.
    pub rate: Option<RateOptions>,
    /// Where `rate` finds the budget that it shares with others opened with the same.
    pub budgets: Budgets,
    /// Rules by which requests fail, in order.
    pub faults: Vec<FaultRule>,
}

/// Opens the storage that `spec` names, for who interprets the bytes: nothing is guessed about
/// them, and `format` is not looked at.
///
/// # Errors
/// Everything that is wrong with it, said for people.
pub fn open_storage(spec: &str, options: OpenOptions) -> Result<Storage, OpenError> {
    wrapped(spec, open_bottom(spec, &options)?.0, options)
}

/// What `spec` names, without wrappers, and what it looks like. Blocks.
pub(crate) fn open_bottom(spec: &str, options: &OpenOptions) -> Result<(Storage, Probed), OpenError> {
    if options.force_share && !options.read_only {
        return Err(OpenError::new(spec, "force-share would let two writers ruin it", "add --read-only"));
    }
    let place: Spec = spec.parse().map_err(|error: super::InvalidValue| {
        OpenError::new(
            spec,
            error.to_string(),
            "an image is a path, memory:SIZE, null:SIZE or rbd:POOL/IMAGE",
        )
    })?;
    if options.handover && (options.read_only || !matches!(place, Spec::File(_))) {
        return Err(OpenError::new(
            spec,
            "only a file that is written to can be handed over",
            "leave handover out",
        ));
    }
    match place {
        Spec::File(path) => open_file(&path, options),
        Spec::Memory(size) => Ok((Storage::Memory(memory(spec, size)?), Probed::Raw)),
        Spec::Null(size) => Ok((Storage::Null(Null::new(not_empty(spec, size)?)), Probed::Raw)),
        Spec::Rbd(address) => {
            let OpenOptions { cache, read_only, force_share, .. } = *options;
            let how = rbd::How { cache, read_only, force_share };
            let (image, probed) = rbd::open(&address, how, options.format.is_none())?;
            Ok((Storage::Rbd(Align::new(image)), probed))
        }
    }
}

fn open_file(path: &Path, options: &OpenOptions) -> Result<(Storage, Probed), OpenError> {
    let how = FileOptions {
        cache: options.cache,
        read_only: options.read_only,
        force_share: options.force_share,
        handover: options.handover,
        may_be_empty: options.may_be_empty,
        passed: options.passed.clone(),
        root: options.root.clone(),
        descriptor: options.descriptor.clone(),
    };
    let (file, plain) = file::open(path, &how)?;
    // Who says the format need not be able to guess it.
    let probed = match options.format {
        Some(_) => Probed::Raw,
        None => probe_file(&plain).map_err(|error| {
            let why = format!("its first bytes cannot be read: {error}");
            OpenError::new(&path.display().to_string(), why, "is the device in order?")
        })?,
    };
    Ok((Storage::File(Align::new(file)), probed))
}

fn memory(spec: &str, size: u64) -> Result<Memory, OpenError> {
    Memory::new(not_empty(spec, size)?)
        .ok_or_else(|| OpenError::new(spec, "is too large for memory", "256T is the largest"))
}

fn not_empty(spec: &str, size: u64) -> Result<u64, OpenError> {
    if size == 0 { Err(OpenError::new(spec, "has size zero", "give it a size, e.g. 1G")) } else { Ok(size) }
}

/// In the order of the drawing in [`storage`](super): faults outermost, so that they cost no time.
pub(crate) fn wrapped(spec: &str, mut storage: Storage, options: OpenOptions) -> Result<Storage, OpenError> {
    if let Some(part) = options.part {
        let whole = storage.size_bytes();
        storage = storage.part(part);
        if storage.size_bytes() == 0 || part.size.is_some_and(|size| size > storage.size_bytes()) {
            let why = format!(
                "has {whole} bytes, and the part that was asked for (--options), which takes the file as raw, is not all inside"
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
                "give both the same",
            )
        })?;
        storage = storage.with_rate(budget);
    }
    if !options.faults.is_empty() {
        storage = storage.with_faults(options.faults);
    }
    Ok(storage)
}
