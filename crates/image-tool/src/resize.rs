//! `weir image resize`: changes the size of a disk, with the options of `qemu-img resize`.
//!
//! If a running daemon has the image open, the command sends the request to the daemon, so that
//! clients of the disk see the new size.
//!
//! Never shrinks a disk without `--shrink`, which confirms the loss of data.

use std::path::Path;

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::{Image, qcow2::create::Preallocation};
use reactor::buffer::IoBuffer;
use storage::{Durability, OpenError, ZeroOptions, parse_size};

use super::{
    create,
    image_args::{ImageArg, NamedImage, with_secrets},
    keys::PassphraseArgs,
    opening::OpenMode,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image resize -f qcow2 vm1.qcow2 +10G
      Grow by 10 GiB.
  weir image resize --preallocation=falloc vm1.qcow2 100G
      Grow to 100 GiB, and allocate the added space.
  weir image resize -f raw --shrink vm1.raw 20G
      Shrink to 20 GiB; the data beyond is lost.

If a running daemon serves the image, the daemon resizes it; WEIR_QMP names the daemon's socket [default: \
that of `weir status`]. Guests with a vhost-user-blk disk see the new size at once. NBD transmits the size \
only when a client connects: it sees the new size after a reconnect.

Exit status: 0 resized, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image resize`.
#[derive(Debug, Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    image: ImageArg,
    /// New size, a multiple of 512 bytes; with + or -, the difference to the current size
    #[arg(value_name = "[+|-]SIZE", allow_hyphen_values = true, value_parser = parse_size_change)]
    size: SizeChange,
    /// Preallocation of the added part: off, metadata (only qcow2), falloc or full
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = create::preallocation_mode)]
    preallocation: Preallocation,
    /// Allow a smaller size; the data beyond the new end is lost
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    keys: PassphraseArgs,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeChange {
    Absolute(u64),
    Increase(u64),
    Decrease(u64),
}

fn parse_size_change(text: &str) -> Result<SizeChange, String> {
    let size = |text: &str| parse_size(text).map_err(|error| error.rule.into_owned());
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => size(more).map(SizeChange::Increase),
        (_, Some(less)) => size(less).map(SizeChange::Decrease),
        _ => size(text).map(SizeChange::Absolute),
    }
}

/// A disk that a running daemon serves from an image.
pub struct ServedDisk {
    /// Name of the disk in the daemon.
    pub name: String,
    /// The daemon's control socket.
    pub daemon: String,
    /// Format that the daemon has opened the image as.
    pub format: String,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Requests the new size in bytes from the daemon; returns the daemon's error.
    pub resize: Box<dyn FnOnce(u64) -> anyhow::Result<()>>,
}

const STEP_BYTES: u64 = 1 << 20;
const SECTOR: u64 = 512;

/// Runs the command. After a failure the size is unchanged, unless restoring it failed too.
pub(crate) fn run(
    arguments: ResizeArgs,
    find_served_disk: fn(&Path) -> Option<ServedDisk>,
) -> Result<(), CommandFailure> {
    let named_image = arguments.image.named()?;
    let mut keys = with_secrets(arguments.keys.read()?, &[&named_image])?;
    on_reactor(async move {
        let name = named_image.name();
        let mode = OpenMode { write: true, ..OpenMode::default() };
        let image = match named_image.open(mode, &mut keys).await {
            Ok(image) => image,
            Err(error) if error.is::<OpenError>() => {
                // Any failure to open may be a lock of the daemon, which is queried before the
                // error is reported.
                let served =
                    find_served_disk(&named_image.path).ok_or_else(|| advise_control_socket(error))?;
                return resize_served(served, &named_image, &arguments);
            }
            Err(error) => return Err(error.into()),
        };
        keys.check_used()?;
        let old = image.size_bytes();
        let size =
            new_size(arguments.size, old).with_context(|| name.clone()).map_err(CommandFailure::Usage)?;
        // Before the resize: nothing is changed if an option does not fit.
        check(&image, old, size, &arguments).with_context(|| name.clone()).map_err(CommandFailure::Usage)?;
        image.resize(size).await.with_context(|| name.clone())?;
        // Preallocation follows the resize, so if it fails the old size is restored.
        let filled = preallocate_added(&image, old, size, arguments.preallocation).await;
        let is_restored = match &filled {
            Ok(()) => true,
            Err(_) => image.resize(old).await.is_ok(),
        };
        // Closed also after a failure: closing writes the metadata of the old size.
        let closed = image.close().await;
        let message = match (&filled, is_restored && closed.is_ok()) {
            (Err(_), true) => "no space for the added part; the size is unchanged",
            _ => "has the new size, but its metadata could not be completed",
        };
        filled.and(closed).with_context(|| format!("{name}: {message}"))?;
        if !arguments.quiet {
            print("Image resized.\n")?;
        }
        Ok(())
    })
}

/// Resizes the disk in the daemon that serves it.
fn resize_served(
    served: ServedDisk,
    image: &NamedImage,
    arguments: &ResizeArgs,
) -> Result<(), CommandFailure> {
    let ServedDisk { name, daemon, format, size_bytes: old, resize } = served;
    let image_name = image.name();
    let usage = |message: String| CommandFailure::Usage(anyhow!("{image_name}: {message}"));
    if let Some(given) = image.format.filter(|given| given.name() != format) {
        return Err(usage(format!(
            "the daemon at {daemon} serves it as {format}, not as {} (leave -f out)",
            given.name()
        )));
    }
    if arguments.preallocation != Preallocation::Off {
        return Err(usage(format!(
            "the daemon at {daemon} serves it and cannot preallocate (leave --preallocation out)"
        )));
    }
    let size =
        new_size(arguments.size, old).with_context(|| image_name.clone()).map_err(CommandFailure::Usage)?;
    check_loss(old, size, arguments.shrink)
        .with_context(|| image_name.clone())
        .map_err(CommandFailure::Usage)?;
    resize(size).with_context(|| image_name.clone())?;
    if !arguments.quiet {
        print(&format!("Image resized by the daemon at {daemon}, which serves it as {name}.\n"))?;
    }
    Ok(())
}

/// Adds advice to the error about an image that a daemon has open.
fn advise_control_socket(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<OpenError>() {
        Ok(served) if served.holder.as_deref().is_some_and(|name| name.starts_with("weir")) => {
            let remedy = "if a daemon serves it, set WEIR_QMP to its control socket: the command \
                          then requests the new size from it (`block_resize`)";
            OpenError { remedy: remedy.to_owned(), ..served }.into()
        }
        Ok(error) => error.into(),
        Err(error) => error,
    }
}

/// New size, which must be whole sectors, as in QEMU. A relative change counts from the end of the
/// sector in which the disk ends.
fn new_size(change: SizeChange, old: u64) -> anyhow::Result<u64> {
    // A raw file may end inside a sector.
    let end = old.checked_next_multiple_of(SECTOR);
    let size = match change {
        SizeChange::Absolute(size) => Some(size),
        SizeChange::Increase(more) => end.and_then(|end| end.checked_add(more)),
        SizeChange::Decrease(less) => end.and_then(|end| end.checked_sub(less)),
    };
    let size = size.filter(|&size| size > 0);
    let none = || anyhow!("has {old} bytes: the change leads to an invalid size (choose another)");
    let size = size.ok_or_else(none)?;
    ensure!(
        size.is_multiple_of(SECTOR),
        "the size {size} is not a multiple of {SECTOR} bytes (use {})",
        settings::nearest_multiples(size, SECTOR)
    );
    Ok(size)
}

fn check_loss(old: u64, size: u64, shrink: bool) -> anyhow::Result<()> {
    if size < old && !shrink {
        bail!("has {old} bytes; a size of {size} loses the data beyond it (add --shrink to allow that)");
    }
    Ok(())
}

fn check(image: &Image, old: u64, size: u64, arguments: &ResizeArgs) -> anyhow::Result<()> {
    check_loss(old, size, arguments.shrink)?;
    if size <= old && arguments.preallocation != Preallocation::Off {
        bail!("--preallocation applies only to added space (leave it out)");
    }
    if matches!(image, Image::Raw(_)) && arguments.preallocation == Preallocation::Metadata {
        bail!("--preallocation metadata: raw images have no metadata (use falloc or full)");
    }
    Ok(())
}

async fn preallocate_added(
    image: &Image,
    old: u64,
    size: u64,
    preallocation: Preallocation,
) -> Result<(), reactor::error::Error> {
    if let Image::Qcow2(qcow2) = image {
        qcow2.preallocate(old, size, preallocation).await?;
        return image.flush().await;
    }
    let zeroes = ZeroOptions { may_unmap: false, only_if_fast: false, durability: Durability::Cached };
    let mut at = old;
    while at < size {
        let length = STEP_BYTES.min(size - at);
        match preallocation {
            Preallocation::Off | Preallocation::Metadata => return Ok(()),
            Preallocation::Falloc => image.write_zeroes(at, length, zeroes).await?,
            Preallocation::Full => {
                image.write(at, IoBuffer::zeroed(length as usize).into(), Durability::Cached).await?;
            }
        }
        at += length;
    }
    image.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_changes() {
        assert_eq!(parse_size_change("2G"), Ok(SizeChange::Absolute(2 << 30)));
        assert_eq!(parse_size_change("+1M"), Ok(SizeChange::Increase(1 << 20)));
        assert_eq!(parse_size_change("-1M"), Ok(SizeChange::Decrease(1 << 20)));
        assert!(parse_size_change("+-1M").is_err());
        assert_eq!(new_size(SizeChange::Increase(512), 1000).unwrap(), 1536, "from the end of a sector on");
        assert_eq!(new_size(SizeChange::Decrease(512), 1000).unwrap(), 512);
        assert_eq!(new_size(SizeChange::Absolute(1024), 1000).unwrap(), 1024);
        for (change, size, suggestion) in [
            (SizeChange::Decrease(1), 1023, "512 or 1024"),
            (SizeChange::Increase(1000), 2024, "1536 or 2048"),
            (SizeChange::Absolute(1), 1, "512"),
        ] {
            assert_eq!(
                new_size(change, 1024).unwrap_err().to_string(),
                format!("the size {size} is not a multiple of 512 bytes (use {suggestion})")
            );
        }
        assert!(new_size(SizeChange::Decrease(1024), 1024).is_err());
        assert!(new_size(SizeChange::Increase(u64::MAX), 1024).is_err());
    }
}
