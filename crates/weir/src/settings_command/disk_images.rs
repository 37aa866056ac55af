//! The images of disks in the config file, which snapshots and mirrors replace.
//!
//! Written before the daemon switches to the new images, and restored if it does not. Every disk of
//! the file must be part of that: a start with the old image would change it under its overlay. So
//! the file is always the one of the daemon.

use std::{
    cell::OnceCell,
    fs,
    path::{Path, PathBuf, absolute},
};

use anyhow::{Context as _, anyhow, bail, ensure};

use super::{PreparedConfigFile, SaveArgs, edit};
use crate::client::report::DaemonReport;

/// Image that a disk has from now on.
pub(crate) struct NewImage {
    pub(crate) disk: String,
    /// Absolute path, or the location of an image that is no file.
    pub(crate) path: PathBuf,
    pub(crate) format: &'static str,
    /// True if it is removed when the disk is not switched.
    pub(crate) is_new: bool,
}

/// The change of the config file.
#[derive(Default)]
pub(crate) struct SavedImages {
    file: PathBuf,
    prepared: Option<PreparedConfigFile>,
    /// Old and new text of the file.
    texts: OnceCell<(String, String)>,
    /// The new images.
    images: Vec<NewImage>,
}

impl SavedImages {
    /// Prepares the change: `images` has the disks with their new images.
    ///
    /// # Errors
    /// The daemon was started with another file or with none; a disk of the file is not to be
    /// saved; the file cannot be read or replaced.
    pub(crate) fn prepare(
        report: &DaemonReport,
        save: &SaveArgs,
        images: Vec<NewImage>,
    ) -> anyhow::Result<Self> {
        let Some(of_daemon) = report.config.as_ref().map(Path::new) else {
            ensure!(
                !save.save,
                "--save: the daemon was started without a config file (leave it out: the disk is in no config \
                 file)"
            );
            return Ok(Self::default());
        };
        let file = save.config.as_deref().unwrap_or(of_daemon).to_owned();
        check_same_file(&file, of_daemon)?;
        let directory = common_directory(&file, of_daemon);
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
        Ok(Self { file, prepared: Some(prepared), texts, images })
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
    /// It was changed since, or cannot be written; with the remedy.
    pub(crate) fn restore(&mut self) -> anyhow::Result<()> {
        let (None, Some((old, new))) = (self.prepared.take(), self.texts.take()) else { return Ok(()) };
        let restored = PreparedConfigFile::prepare(&self.file, |text| match text == new || text == old {
            true => Ok(old.clone()),
            false => Err("was changed by another process meanwhile".to_owned()),
        });
        let restored = restored.and_then(PreparedConfigFile::commit);
        restored.map(drop).map_err(|error| anyhow!("{error:#} ({})", self.manual_restore(&old)))
    }

    /// Instructions for restoring the file, and for removing the new images afterwards.
    fn manual_restore(&self, old: &str) -> String {
        let mut keys = Vec::new();
        let mut files = Vec::new();
        for NewImage { disk, path, is_new, .. } in &self.images {
            files.extend(is_new.then(|| path.display().to_string()));
            let Ok(Some((image, format))) = edit::image_of(old, disk) else { continue };
            let format = format.map_or("no format".to_owned(), |format| format!("format = {format:?}"));
            keys.push(format!("image = {image:?} and {format} of disk.{disk}"));
        }
        let then =
            if files.is_empty() { String::new() } else { format!(", then remove {}", files.join(", ")) };
        format!("restore {} in the file{then}", keys.join(", "))
    }
}

/// Fails unless `file` is the file that the daemon was started with, by whatever name.
fn check_same_file(file: &Path, of_daemon: &Path) -> anyhow::Result<()> {
    let found = |path: &Path| {
        fs::canonicalize(path).with_context(|| format!("{}: cannot be checked", path.display()))
    };
    ensure!(
        found(file)? == found(of_daemon)?,
        "--config {}: the daemon was started with {}, so its next start would open the old image and lose \
         later changes (leave --config out)",
        file.display(),
        of_daemon.display()
    );
    Ok(())
}

/// The directory that relative paths of the file refer to; `None` if that depends on the name by
/// which the file is opened: a symbolic link to it may be in another directory.
fn common_directory(file: &Path, of_daemon: &Path) -> Option<PathBuf> {
    let target = fs::canonicalize(file).ok()?;
    let directory = target.parent()?;
    let is_in = |path: &Path| {
        let path = absolute(path).ok()?;
        fs::canonicalize(path.parent()?).ok()
    };
    [file, of_daemon]
        .iter()
        .all(|path| is_in(path).as_deref() == Some(directory))
        .then(|| directory.to_owned())
}

/// The text with the new images of the disks that it has, at least one.
fn with_images(text: &str, directory: Option<&Path>, images: &[NewImage]) -> Result<String, String> {
    let mut new = text.to_owned();
    let mut is_found = false;
    for NewImage { disk, path, format, .. } in images {
        let Some((old, _)) = edit::image_of(text, disk)? else { continue };
        is_found = true;
        new = edit::with_image(&new, disk, &written_path(&old, path, directory), format)?;
    }
    if !is_found {
        let NewImage { disk, .. } = &images[0];
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

/// Fails unless the file has the new image and its format already, for each disk that it has. A
/// relative path without a directory may lead to any image.
fn check_saved(file: &Path, text: &str, directory: Option<&Path>, images: &[NewImage]) -> anyhow::Result<()> {
    for NewImage { disk, path, format: needed, .. } in images {
        let found = edit::image_of(text, disk).map_err(|why| anyhow!("{}: {why}", file.display()))?;
        let Some((image, format)) = found else { continue };
        // An image at a server has no path.
        let is_same = Path::new(&image) == path || directory.unwrap_or(Path::new("")).join(&image) == *path;
        if !is_same {
            bail!(
                "{disk}: the next start would open {image}, as {} says, and not the new image \
                 (add --save, which writes the new image into the file)",
                file.display()
            );
        }
        // Without a format the start refuses an image that names a backing file.
        ensure!(
            format.as_deref() == Some(*needed),
            "{disk}: the next start would not open {image} as {needed}, because {} has {} for it (add --save, which \
             writes the format into the file)",
            file.display(),
            format.map_or("no format".to_owned(), |format| format!("format = {format:?}"))
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use api::DaemonStatus;

    use super::*;

    fn image(disk: &str, path: &str) -> NewImage {
        NewImage { disk: disk.to_owned(), path: path.into(), format: "qcow2", is_new: true }
    }

    const CONFIG: &str = "[disk.a]\nimage = \"a.raw\" # first\n\n[disk]\nb = { image = \"/b.qcow2\" }\n";

    #[test]
    fn images_are_replaced_in_place() {
        let images = [image("a", "/etc/a.snap-1.qcow2"), image("b", "/b2.qcow2")];
        let text =
            "[disk.a]\nimage = \"a.raw\" # first\n\n[disk.b]\nimage = \"/b.qcow2\"\nformat = 'qcow2'\n";
        let new = with_images(text, Some(Path::new("/etc")), &images).expect("both are there");
        let expected = "[disk.a]\nimage = \"a.snap-1.qcow2\" # first\nformat = \"qcow2\"\n\n[disk.b]\n\
                        image = \"/b2.qcow2\"\nformat = \"qcow2\"\n";
        assert_eq!(new, expected);
        let error = with_images(text, None, &[image("c", "/c")]).expect_err("no such disk");
        assert!(error.contains("has no [disk.c]"), "{error}");
        let inline = with_images(CONFIG, None, &images).expect("both are there");
        assert!(inline.contains("b = { image = \"/b2.qcow2\", format = \"qcow2\" }"), "{inline}");
        assert!(with_images("[disk", None, &images).is_err(), "no valid TOML");
    }

    #[test]
    fn a_disk_of_the_file_must_be_saved() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("weir.toml");
        let text = "[disk.a]\nimage = \"a.qcow2\"\nformat = \"qcow2\"\n";
        fs::write(&file, text).expect("written");
        let at = fs::canonicalize(directory.path()).expect("it exists");
        let check = |disk: &str, path: PathBuf| {
            check_saved(&file, text, Some(&at), &[image(disk, path.to_str().expect("UTF-8"))])
        };
        let error = check("a", at.join("a.snap-1.qcow2")).expect_err("not saved");
        assert!(error.to_string().contains("--save"), "{error}");
        check("a", at.join("a.qcow2")).expect("the file has it already");
        check("other", at.join("other.qcow2")).expect("not in the file");
        let named = [image("a", at.join("a.qcow2").to_str().expect("UTF-8"))];
        check_saved(&file, text, None, &named).expect_err("it may be another a.qcow2");
        for (format, expected) in [("", "no format"), ("format = \"raw\"\n", "format = \"raw\"")] {
            let text = text.replace("format = \"qcow2\"\n", format);
            let error = check_saved(&file, &text, Some(&at), &named).expect_err("a start would not open it");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_restored_is_reported_with_its_keys() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("weir.toml");
        let old = "[disk.a]\nimage = \"/images/a.raw\"\nformat = \"raw\"\n";
        fs::write(&file, old).expect("written");
        let status = DaemonStatus { config: Some(file.display().to_string()), ..DaemonStatus::default() };
        let report = DaemonReport { status, latencies: Default::default() };
        let save = SaveArgs { save: true, config: None };
        let prepare = || {
            let images = vec![image("a", "/images/a.snap-1.qcow2")];
            SavedImages::prepare(&report, &save, images).expect("the file has the disk")
        };
        let mut saved = prepare();
        saved.commit().expect("it is unchanged");
        saved.restore().expect("it is unchanged");
        assert_eq!(fs::read_to_string(&file).expect("readable"), old);
        let mut saved = prepare();
        saved.commit().expect("it is unchanged");
        fs::write(&file, "# mine\n").expect("written");
        let error = saved.restore().expect_err("it was changed").to_string();
        let expected = "was changed by another process meanwhile (restore image = \"/images/a.raw\" and \
                        format = \"raw\" of disk.a in the file, then remove /images/a.snap-1.qcow2)";
        assert!(error.ends_with(expected), "{error}");
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
        assert_eq!(common_directory(&file, &file), Some(at.join("conf")));
        assert_eq!(common_directory(&beside, &file), Some(at.join("conf")));
        assert_eq!(common_directory(&link, &link), None);
        assert_eq!(common_directory(&file, &link), None, "the daemon reads it by the link");
        check_same_file(&file, &link).expect("the same file");
        let other = at.join("other.toml");
        fs::write(&other, "").expect("written");
        let error = check_same_file(&other, &link).expect_err("another file").to_string();
        assert!(error.contains("the daemon was started with"), "{error}");
        let images = [image("a", at.join("conf/a.snap-1.qcow2").to_str().expect("UTF-8"))];
        let new = with_images(CONFIG, None, &images).expect("it is there");
        assert!(new.contains(&format!("image = {:?}", images[0].path)), "{new}");
    }
}
