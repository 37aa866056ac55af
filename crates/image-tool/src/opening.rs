//! From a file's name to its storage and its format, for commands that look at the bytes
//! themselves.
//!
//! A format is guessed only to look at an image: a command that writes was told it, or there is a
//! signature.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use block::{
    image::qcow2::{header::Header, read_header},
    nbd::uri::Uri,
    storage::{
        CacheMode, Format, OpenError, OpenOptions, Storage, open_storage,
        probe::{self, Probed},
        probe_anywhere,
    },
};
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};

/// `--help` lists the names alone: a line on each would triple the pages that have one.
pub(super) fn format_option() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new([Format::Raw, Format::Qcow2].map(Format::name))
        .try_map(|name| name.parse::<Format>())
}

/// Of a name that stands in an image.
pub(super) fn format_named(name: Option<&str>) -> anyhow::Result<Format> {
    match name {
        Some(name) => match name.parse() {
            Ok(format) => Ok(format),
            Err(_) => bail!("weir does not know the format {name} (raw and qcow2 it does)"),
        },
        None => bail!("its format is not said"),
    }
}

/// Where a name in an image points, for messages: a relative one begins at the image's directory.
/// `block` resolves what it opens; this refuses no name.
pub fn beside(image: &Path, name: &str) -> PathBuf {
    if is_elsewhere(image) {
        return name.into();
    }
    image.parent().map_or_else(|| PathBuf::from(name), |directory| directory.join(name))
}

pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    one == other || real(one).is_some_and(|path| Some(path) == real(other))
}

/// The image that a command is about.
#[derive(Debug, Args)]
pub(super) struct Subject {
    /// The image
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,
    /// Its format [default: as its signature says]
    #[arg(short, long, value_name = "FORMAT", value_parser = format_option())]
    pub(super) format: Option<Format>,
}

impl Subject {
    /// As messages call it.
    pub(super) fn name(&self) -> String {
        self.file.display().to_string()
    }

    /// The format that was given, or else that of the signature.
    pub(super) fn format(&self) -> anyhow::Result<Format> {
        format(&self.file, self.format)
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct How {
    pub(super) cache: CacheMode,
    pub(super) write: bool,
    /// Also while somebody else writes to it.
    pub(super) force_share: bool,
    /// Bytes per second at most; not 0.
    pub(super) rate_bps: Option<u64>,
    pub(super) alone: bool,
}

impl How {
    /// With what helps whoever wants to change an image, rather than to serve it.
    pub(super) fn refused(self, mut error: OpenError) -> OpenError {
        if self.write && error.why.starts_with("locked") {
            let is_weir = error.holder.as_deref().is_some_and(|name| name.starts_with("weir"));
            let or = if is_weir { ", or take the disk from it with `weir disk remove`" } else { "" };
            error.remedy = format!("stop it first{or}");
        }
        error
    }
}

/// The format that was given, or else that of the signature.
pub(super) fn format(path: &Path, given: Option<Format>) -> anyhow::Result<Format> {
    if let Some(format) = given {
        return Ok(format);
    }
    let name = path.display();
    let probed = match path.to_str().filter(|_| is_elsewhere(path)) {
        Some(elsewhere) => probe_anywhere(elsewhere)?,
        None => probe::probe(path).with_context(|| format!("{name}: cannot be read"))?,
    };
    match probed {
        Probed::Raw => Ok(Format::Raw),
        Probed::Looks("qcow2") => Ok(Format::Qcow2),
        Probed::Looks(other) => {
            bail!(
                "{name}: is of the format {other}, which weir does not know (convert it with qemu-img first)"
            )
        }
    }
}

pub(super) fn storage(path: &Path, how: How) -> anyhow::Result<Storage> {
    Ok(open_storage(&spec(path)?, options(how)?).map_err(|error| how.refused(error))?)
}

pub(super) fn spec(path: &Path) -> anyhow::Result<String> {
    let text =
        path.to_str().with_context(|| format!("{}: not UTF-8 (use another name of it)", path.display()))?;
    Ok(if is_elsewhere(path) { text.to_owned() } else { format!("file:{text}") })
}

/// Whether it names no file of this host: an image of a Ceph cluster, or at an NBD server. A file
/// of such a name is `./rbd:…`.
pub(super) fn is_elsewhere(path: &Path) -> bool {
    let is_in_cluster = path.as_os_str().as_encoded_bytes().starts_with(b"rbd:");
    is_in_cluster || path.to_str().is_some_and(Uri::is_meant)
}

pub(super) fn options(how: How) -> anyhow::Result<OpenOptions> {
    let rate = match how.rate_bps {
        Some(rate) => {
            Some(format!("bytes={rate}").parse().with_context(|| format!("{rate} bytes per second"))?)
        }
        None => None,
    };
    Ok(OpenOptions {
        cache: how.cache,
        read_only: !how.write,
        force_share: how.force_share,
        may_be_empty: true,
        rate,
        ..OpenOptions::default()
    })
}

pub(super) async fn header_of(path: &Path) -> anyhow::Result<Header> {
    let storage = storage(path, How { force_share: true, ..How::default() })?;
    read_header(&storage).await.with_context(|| path.display().to_string())
}

pub(super) fn backing_in(path: &Path, header: &Header) -> anyhow::Result<Option<(PathBuf, Format)>> {
    let Some(backing) = &header.backing else { return Ok(None) };
    let format = format_named(backing.format.as_deref()).with_context(|| {
        format!(
            "{}: its backing file {} (name its format with `weir image rebase -u`)",
            path.display(),
            backing.name
        )
    })?;
    Ok(Some((beside(path, &backing.name), format)))
}
