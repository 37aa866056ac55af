//! Creation of a volume's image with an empty file system.
//!
//! The file system is created with the volume, so that a failure is an error of
//! `docker volume create` and the first mount is like any other. It is created in a raw file; for
//! qcow2 the file is converted, at the cost of its allocated blocks.
//!
//! Leaves its files behind after a failure: the caller removes the volume's directory.

use std::{fs, path::Path, process::Command};

use anyhow::Context as _;
use storage::ImageFormat;

use crate::{child_process, options::VolumeOptions};

/// Creates `image`, which must not exist; temporary files are created beside it. `weir` is this
/// program's path.
///
/// # Errors
/// Fails if a program fails or is missing. Files may be left behind.
pub(crate) fn create(weir: &Path, image: &Path, options: &VolumeOptions) -> anyhow::Result<()> {
    let raw = match options.format {
        ImageFormat::Raw => image.to_owned(),
        ImageFormat::Qcow2 => image.with_extension("unformatted"),
    };
    fs::File::create_new(&raw)
        // Sparse. A multiple of the block size, which O_DIRECT needs.
        .and_then(|file| file.set_len(options.size_bytes.next_multiple_of(4096)))
        .with_context(|| format!("{}: cannot be created", raw.display()))?;
    options.file_system.create(&raw)?;
    if options.format == ImageFormat::Qcow2 {
        let mut command = Command::new(weir);
        // Skips holes, so only the file system's metadata is written.
        command.args(["image", "convert", "-q", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(image);
        child_process::run(&mut command, child_process::SHORT_TIMEOUT)?;
        fs::remove_file(&raw).with_context(|| format!("{}: cannot be removed", raw.display()))?;
    }
    // Durable before the record declares the volume to exist.
    let image = fs::File::open(image).and_then(|image| image.sync_all());
    image.context("the image cannot be written")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raw_image_has_a_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.raw");
        let given = [("size", "8M"), ("format", "raw")];
        let given = given.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        create(Path::new("/nonexistent"), &image, &VolumeOptions::read(given).unwrap()).unwrap();
        let content = fs::read(&image).unwrap();
        assert_eq!(content.len(), 8 << 20);
        assert_eq!(content[0x438..0x43a], [0x53, 0xef], "the signature of ext4");
    }
}
