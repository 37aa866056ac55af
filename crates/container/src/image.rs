//! A new volume's image, with an empty file system in it.
//!
//! The file system is made when the volume is created, in a file: whatever keeps it from being made
//! is then an error of `docker volume create`, and the first mount is like every other. For a qcow2
//! image that file is converted, which costs what is in it.
//!
//! Never clears what it leaves where it fails: the volume's whole directory goes then.

use std::{fs, path::Path, process::Command};

use anyhow::Context as _;
use storage::Format;

use crate::{options::Options, program};

/// Makes `image`, which is not there yet, beside which other files may be made. `weir` is the
/// program itself.
///
/// # Errors
/// Whatever keeps it from being made; files may be left.
pub(crate) fn make(weir: &Path, image: &Path, options: &Options) -> anyhow::Result<()> {
    let raw = match options.format {
        Format::Raw => image.to_owned(),
        Format::Qcow2 => image.with_extension("unformatted"),
    };
    fs::File::create_new(&raw)
        .and_then(|file| file.set_len(options.size_bytes.next_multiple_of(4096)))
        .with_context(|| format!("{}: cannot be made", raw.display()))?;
    options.file_system.make(&raw)?;
    if options.format == Format::Qcow2 {
        let mut command = Command::new(weir);
        command.args(["image", "convert", "-q", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(image);
        program::run(&mut command, program::SOON)?;
        fs::remove_file(&raw).with_context(|| format!("{}: cannot be removed", raw.display()))?;
    }
    // Before the volume is said to be there.
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
        make(Path::new("/nonexistent"), &image, &Options::read(given).unwrap()).unwrap();
        let content = fs::read(&image).unwrap();
        assert_eq!(content.len(), 8 << 20);
        assert_eq!(content[0x438..0x43a], [0x53, 0xef], "the signature of ext4");
    }
}
