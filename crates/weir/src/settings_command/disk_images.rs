//! The images of disks in the config file, which snapshots replace.
//!
//! Written before the daemon switches to the new images, and restored if it does not. Every disk of
//! the file must be part of that: a start with the old image would change it under its overlay.

use std::{
    cell::OnceCell,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail, ensure};

use super::{PreparedConfigFile, SaveArgs, edit};
use crate::client::report::DaemonReport;

/// The change of the config file.
#[derive(Default)]
pub(crate) struct DiskImages {
    file: PathBuf,
    prepared: Option<PreparedConfigFile>,
    /// Old and new text of the file.
    texts: OnceCell<(String, String)>,
}

impl DiskImages {
    /// Prepares the change: `images` has the names of disks, and the absolute paths of their new
    /// images.
    ///
    /// # Errors
    /// A disk of the file is not to be saved; the file cannot be read or replaced.
    pub(crate) fn prepare(
        report: &DaemonReport,
        save: &SaveArgs,
        images: Vec<(String, PathBuf)>,
    ) -> anyhow::Result<Self> {
        let file = save.config.clone().or_else(|| report.config.as_ref().map(Into::into));
        let Some(file) = file else {
            ensure!(
                !save.save,
                "--save: the daemon was started without a config file (give one with --config FILE)"
            );
            return Ok(Self::default());
        };
        if !save.save {
            let text = fs::read_to_string(&file);
            let text = text.with_context(|| format!("{}: cannot be checked", file.display()))?;
            check_saved(&file, &text, &images)?;
            return Ok(Self::default());
        }
        let texts = OnceCell::new();
        let directory = fs::canonicalize(&file).ok().and_then(|file| file.parent().map(Path::to_owned));
        let prepared = PreparedConfigFile::prepare(&file, |text| {
            let new = with_images(text, directory.as_deref(), &images)?;
            let _ = texts.set((text.to_owned(), new.clone()));
            Ok(new)
        })?;
        Ok(Self { file, prepared: Some(prepared), texts })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// It was changed since, or cannot be written: nothing has changed.
    pub(crate) fn commit(&mut self) -> anyhow::Result<()> {
        self.prepared.take().map_or(Ok(()), |prepared| prepared.commit().map(drop))
    }

    /// Restores the file, if it was written.
    ///
    /// # Errors
    /// It was changed since, or cannot be written.
    pub(crate) fn restore(&mut self) -> anyhow::Result<()> {
        let (None, Some((old, new))) = (self.prepared.take(), self.texts.take()) else { return Ok(()) };
        let restored = PreparedConfigFile::prepare(&self.file, |text| match text == new {
            true => Ok(old),
            false if text == old => Ok(old),
            false => Err("was changed by another process meanwhile".to_owned()),
        })?;
        restored.commit().map(drop)
    }
}

/// The text with the new images of the disks that it has, at least one.
fn with_images(text: &str, directory: Option<&Path>, images: &[(String, PathBuf)]) -> Result<String, String> {
    let mut new = text.to_owned();
    let mut is_found = false;
    for (disk, path) in images {
        let Some(old) = edit::image_of(text, disk)? else { continue };
        is_found = true;
        new = edit::with_image(&new, disk, &written_path(&old, path, directory))?;
    }
    if !is_found {
        let (disk, _) = &images[0];
        return Err(format!("has no [disk.{disk}] (leave --save out: the disk is in no config file)"));
    }
    Ok(new)
}

/// A path as the file has the old one: relative to the directory of the file, or absolute.
fn written_path(old: &str, path: &Path, directory: Option<&Path>) -> String {
    let relative = directory.filter(|_| !old.starts_with('/')).and_then(|at| path.strip_prefix(at).ok());
    // A name with a colon could be taken for another kind of image.
    let relative = relative.filter(|path| !path.to_string_lossy().contains(':'));
    relative.unwrap_or(path).display().to_string()
}

/// Fails unless the file has the new image already, for each disk that it has.
fn check_saved(file: &Path, text: &str, images: &[(String, PathBuf)]) -> anyhow::Result<()> {
    let directory = fs::canonicalize(file)?.parent().map(Path::to_owned).unwrap_or_default();
    for (disk, path) in images {
        let image = edit::image_of(text, disk).map_err(|why| anyhow!("{}: {why}", file.display()))?;
        let Some(image) = image else { continue };
        if directory.join(&image) != *path {
            bail!(
                "{disk}: the next start would open {image}, as {} says, and damage the snapshot (add \
                 --save, which writes the new image into the file)",
                file.display()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "[disk.a]\nimage = \"a.raw\" # first\n\n[disk]\nb = { image = \"/b.qcow2\" }\n";

    #[test]
    fn images_are_replaced_in_place() {
        let images = [("a".to_owned(), "/etc/a.snap-1.qcow2".into()), ("b".to_owned(), "/b2.qcow2".into())];
        let text =
            "[disk.a]\nimage = \"a.raw\" # first\n\n[disk.b]\nimage = \"/b.qcow2\"\nformat = 'qcow2'\n";
        let new = with_images(text, Some(Path::new("/etc")), &images).expect("both are there");
        let expected = "[disk.a]\nimage = \"a.snap-1.qcow2\" # first\nformat = \"qcow2\"\n\n[disk.b]\n\
                        image = \"/b2.qcow2\"\nformat = \"qcow2\"\n";
        assert_eq!(new, expected);
        let error = with_images(text, None, &[("c".to_owned(), "/c".into())]).expect_err("no such disk");
        assert!(error.contains("has no [disk.c]"), "{error}");
        let inline = with_images(CONFIG, None, &images).expect("both are there");
        assert!(inline.contains("b = { image = \"/b2.qcow2\", format = \"qcow2\" }"), "{inline}");
        assert!(with_images("[disk", None, &images).is_err(), "no valid TOML");
    }

    #[test]
    fn a_disk_of_the_file_must_be_saved() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("weir.toml");
        let text = "[disk.a]\nimage = \"a.raw\"\n";
        fs::write(&file, text).expect("written");
        let at = fs::canonicalize(directory.path()).expect("it exists");
        let check = |disk: &str, image: PathBuf| check_saved(&file, text, &[(disk.to_owned(), image)]);
        let error = check("a", at.join("a.snap-1.qcow2")).expect_err("not saved");
        assert!(error.to_string().contains("--save"), "{error}");
        check("a", at.join("a.raw")).expect("the file has it already");
        check("other", at.join("other.qcow2")).expect("not in the file");
    }
}
