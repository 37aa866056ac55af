//! The images of disks in the config file, which snapshots replace.
//!
//! Written before the daemon switches to the new images, and restored if it does not. Every disk of
//! the file must be part of that: a start with the old image would change it under its overlay.

use std::{
    cell::OnceCell,
    fs,
    path::{Path, PathBuf, absolute},
};

use anyhow::{Context as _, anyhow, bail, ensure};

use super::{PreparedConfigFile, SaveArgs, edit};
use crate::client::report::DaemonReport;

/// The change of the config file.
#[derive(Default)]
pub(crate) struct SavedImages {
    file: PathBuf,
    prepared: Option<PreparedConfigFile>,
    /// Old and new text of the file.
    texts: OnceCell<(String, String)>,
}

impl SavedImages {
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
        let directory = common_directory(&file, report.config.as_ref().map(Path::new));
        if !save.save {
            let text = fs::read_to_string(&file);
            let text = text.with_context(|| format!("{}: cannot be checked", file.display()))?;
            check_saved(&file, &text, directory.as_deref(), &images)?;
            return Ok(Self::default());
        }
        let texts = OnceCell::new();
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
        let restored = PreparedConfigFile::prepare(&self.file, |text| match text == new || text == old {
            true => Ok(old),
            false => Err("was changed by another process meanwhile".to_owned()),
        })?;
        restored.commit().map(drop)
    }
}

/// The directory that relative paths of the file refer to; `None` if that depends on the name by
/// which the file is opened: a symbolic link to it may be in another directory.
fn common_directory(file: &Path, of_daemon: Option<&Path>) -> Option<PathBuf> {
    let target = fs::canonicalize(file).ok()?;
    let directory = target.parent()?;
    let is_same = |path: &&Path| fs::canonicalize(path).is_ok_and(|path| path == target);
    let mut names = [file].into_iter().chain(of_daemon.filter(is_same));
    let is_in = |path: &Path| {
        let path = absolute(path).ok()?;
        fs::canonicalize(path.parent()?).ok()
    };
    names.all(|path| is_in(path).as_deref() == Some(directory)).then(|| directory.to_owned())
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

/// A path as the file has the old one: relative to the directory, or absolute.
fn written_path(old: &str, path: &Path, directory: Option<&Path>) -> String {
    let relative = directory.filter(|_| !old.starts_with('/')).and_then(|at| path.strip_prefix(at).ok());
    // A name with a colon could be taken for another kind of image.
    let relative = relative.filter(|path| !path.to_string_lossy().contains(':'));
    relative.unwrap_or(path).display().to_string()
}

/// Fails unless the file has the new image already, for each disk that it has. A relative path
/// without a directory may lead to any image.
fn check_saved(
    file: &Path,
    text: &str,
    directory: Option<&Path>,
    images: &[(String, PathBuf)],
) -> anyhow::Result<()> {
    for (disk, path) in images {
        let image = edit::image_of(text, disk).map_err(|why| anyhow!("{}: {why}", file.display()))?;
        let Some(image) = image else { continue };
        if directory.unwrap_or(Path::new("")).join(&image) != *path {
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
        let check =
            |disk: &str, image: PathBuf| check_saved(&file, text, Some(&at), &[(disk.to_owned(), image)]);
        let error = check("a", at.join("a.snap-1.qcow2")).expect_err("not saved");
        assert!(error.to_string().contains("--save"), "{error}");
        check("a", at.join("a.raw")).expect("the file has it already");
        check("other", at.join("other.qcow2")).expect("not in the file");
        let named = [("a".to_owned(), at.join("a.raw"))];
        check_saved(&file, text, None, &named).expect_err("it may be another a.raw");
    }

    #[test]
    fn paths_are_relative_only_if_all_names_of_the_file_agree() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = fs::canonicalize(directory.path()).expect("it exists");
        let (file, link) = (at.join("conf/weir.toml"), at.join("weir.toml"));
        fs::create_dir(at.join("conf")).expect("created");
        fs::write(&file, "").expect("written");
        std::os::unix::fs::symlink(&file, &link).expect("created");
        let beside = at.join("conf/link.toml");
        std::os::unix::fs::symlink(&file, &beside).expect("created");
        assert_eq!(common_directory(&file, None), Some(at.join("conf")));
        assert_eq!(common_directory(&beside, Some(&file)), Some(at.join("conf")));
        assert_eq!(common_directory(&link, None), None);
        assert_eq!(common_directory(&file, Some(&link)), None, "the daemon reads it by the link");
        let other = at.join("other.toml");
        fs::write(&other, "").expect("written");
        assert_eq!(common_directory(&file, Some(&other)), Some(at.join("conf")), "another file");
        let images = [("a".to_owned(), at.join("conf/a.snap-1.qcow2"))];
        let new = with_images(CONFIG, None, &images).expect("it is there");
        assert!(new.contains(&format!("image = {:?}", images[0].1)), "{new}");
    }
}
