//! Replaces the config file: prepared before the change is sent to the daemon, committed once the
//! daemon has applied it.
//!
//! ```text
//!   prepare   lock, read, edit, check as `weir serve` would, write a new file beside it, same mode and owner
//!      │
//!   daemon    rejects ──► the new file is dropped, nothing has changed
//!      │ applies
//!   commit    still the file that was read? ──► rename over it
//! ```
//!
//! A reader sees the old file or the new one, even after a power failure. Never overwrites a change
//! that another process made in between.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, fchown},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail};
use console::print_notice;
use nix::fcntl::{Flock, FlockArg};
use reactor::regular_file;
use settings::{DesiredState, config};
use tempfile::NamedTempFile;

/// A new config file, ready to replace the old one. Dropping it deletes it.
pub(crate) struct PreparedConfigFile {
    path: PathBuf,
    old: Flock<File>,
    old_text: String,
    /// `None` if the text is unchanged.
    new: Option<NamedTempFile>,
    /// Error that the file had before and still has.
    existing_error: Option<String>,
}

impl PreparedConfigFile {
    /// Prepares the text that `edit` makes of the old one.
    pub(crate) fn prepare(
        path: &Path,
        edit: impl FnOnce(&str) -> Result<String, String>,
    ) -> anyhow::Result<Self> {
        let display_path = path.display().to_string();
        // Symbolic links are kept: their target is replaced.
        let path = fs::canonicalize(path).with_context(|| format!("{display_path}: cannot be saved to"))?;
        let (old, old_text) = open(&path).with_context(|| format!("{display_path}: cannot be saved to"))?;
        let new_text = edit(&old_text).map_err(|message| anyhow!("{display_path}: {message}"))?;
        let warning = check(&path, &old_text, &new_text).with_context(|| {
            format!("{display_path}: nothing changed, neither in the file nor in the daemon")
        })?;
        let write = || write_beside(&path, &old.metadata()?, &new_text);
        let new = (new_text != old_text).then(write).transpose().with_context(|| {
            format!(
                "{display_path}: cannot be replaced (this user must own it and be able to write to its directory)"
            )
        })?;
        Ok(Self { path, old, old_text, new, existing_error: warning })
    }

    /// True if the file is to change.
    pub(crate) fn has_changes(&self) -> bool {
        self.new.is_some()
    }

    /// Returns the file's name. Fails if the file was changed or replaced since it was read.
    pub(crate) fn commit(mut self) -> anyhow::Result<String> {
        let display_path = self.path.display().to_string();
        if !self.is_unchanged().with_context(|| display_path.clone())? {
            bail!("{display_path}: was changed by another process meanwhile (run the command again)");
        }
        if let Some(warning) = self.existing_error {
            print_notice(&warning);
        }
        let Some(new) = self.new else { return Ok(display_path) };
        new.persist(&self.path).map_err(|error| error.error).with_context(|| display_path.clone())?;
        // A rename is durable once its directory is synced.
        if let Some(directory) = self.path.parent() {
            File::open(directory)
                .and_then(|directory| directory.sync_all())
                .with_context(|| display_path.clone())?;
        }
        Ok(display_path)
    }

    fn is_unchanged(&mut self) -> io::Result<bool> {
        let same = |a: &Metadata, b: &Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        if !same(&self.old.metadata()?, &fs::metadata(&self.path)?) {
            return Ok(false);
        }
        Ok(fs::read_to_string(&self.path)? == self.old_text)
    }
}

fn open(path: &Path) -> anyhow::Result<(Flock<File>, String)> {
    // Opened for writing too, although it is replaced: a user without write permission must not
    // replace it.
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // Reading a FIFO or a device could block or never end.
    regular_file::check(&file)?;
    // Serializes concurrent `--save`; editors do not take the lock, so `commit` compares the text
    // again.
    let mut file = Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, _)| anyhow!("another process is saving to it (run the command again)"))?;
    let mut text = String::new();
    let read = (&mut *file).take(config::MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if read as u64 > config::MAX_FILE_BYTES {
        bail!("larger than {} bytes (is this the right file?)", config::MAX_FILE_BYTES);
    }
    Ok((file, text))
}

/// Rejects a text that `weir serve` would reject. If it would reject the old text too, the error is
/// returned as a warning: options of the command line may complete the file.
fn check(path: &Path, old_text: &str, new_text: &str) -> anyhow::Result<Option<String>> {
    let name = path.display().to_string();
    let directory = path.parent().unwrap_or(Path::new(""));
    let plan = |text| {
        config::parse(&name, text, directory).and_then(|config| DesiredState::new(config, 0).map(drop))
    };
    match (plan(old_text), plan(new_text)) {
        (Ok(()), Err(wrong)) => Err(anyhow!("the next start would fail: {wrong}")),
        (Err(_), Err(wrong)) => {
            Ok(Some(format!("the next start with this file alone fails, as before this change: {wrong}")))
        }
        _ => Ok(None),
    }
}

fn write_beside(path: &Path, like: &Metadata, text: &str) -> io::Result<NamedTempFile> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::Builder::new().prefix(".weir.").suffix(".new").tempfile_in(directory)?;
    file.write_all(text.as_bytes())?;
    let metadata = file.as_file().metadata()?;
    // Owner before permissions: chown(2) clears set-ID bits.
    if (metadata.uid(), metadata.gid()) != (like.uid(), like.gid()) {
        fchown(file.as_file(), Some(like.uid()), Some(like.gid()))?;
    }
    file.as_file().set_permissions(like.permissions())?;
    // Synced before the rename: otherwise a power failure could leave an empty file under the final
    // name.
    file.as_file().sync_all()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::{super::edit, *};
    use crate::client::change::{SettingName, SettingValue, SettingsChange};

    const CONFIG: &str = "[disk.a]\nimage = \"memory:1M\"\niops-total = 5 # sold\n";

    fn set(name: &str, value: u64) -> SettingsChange {
        let mut change = SettingsChange::default();
        change.set(SettingName::find(name).unwrap(), SettingValue::Number(value));
        change
    }

    fn file() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weir.toml");
        fs::write(&path, CONFIG).unwrap();
        (directory, path)
    }

    fn prepare(path: &Path, change: &SettingsChange) -> anyhow::Result<PreparedConfigFile> {
        PreparedConfigFile::prepare(path, |text| edit::with_change(text, "disk", "a", change))
    }

    fn refusal(path: &Path, change: &SettingsChange) -> String {
        format!("{:#}", prepare(path, change).err().unwrap())
    }

    fn names(directory: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        fs::read_dir(directory).unwrap().map(name).collect()
    }

    #[test]
    fn the_file_is_replaced_with_its_mode_through_links() {
        let (directory, path) = file();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let link = directory.path().join("link.toml");
        symlink(&path, &link).unwrap();
        let saving = prepare(&link, &set("iops-total", 7)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), CONFIG, "not before it is committed");
        assert_eq!(saving.commit().unwrap(), path.to_str().unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), CONFIG.replace('5', "7"));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(names(directory.path()).len(), 2, "nothing is left beside it");
    }

    #[test]
    fn dropped_change_leaves_no_file() {
        let (directory, path) = file();
        drop(prepare(&path, &set("iops-total", 7)).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), CONFIG);
        assert_eq!(names(directory.path()), ["weir.toml"]);
    }

    #[test]
    fn concurrent_edit_is_not_overwritten() {
        let (_directory, path) = file();
        for replace in [true, false] {
            let saving = prepare(&path, &set("iops-total", 7)).unwrap();
            if replace {
                fs::remove_file(&path).unwrap();
            }
            fs::write(&path, CONFIG.replace("sold", "mine")).unwrap();
            let message = saving.commit().unwrap_err().to_string();
            assert!(
                message.ends_with("was changed by another process meanwhile (run the command again)"),
                "{message}"
            );
            assert_eq!(fs::read_to_string(&path).unwrap(), CONFIG.replace("sold", "mine"));
            fs::write(&path, CONFIG).unwrap();
        }
    }

    #[test]
    fn concurrent_saves_are_rejected() {
        let (_directory, path) = file();
        let first = prepare(&path, &set("iops-total", 7)).unwrap();
        assert!(refusal(&path, &set("iops-total", 8)).contains("another process is saving to it"));
        first.commit().unwrap();
        prepare(&path, &set("iops-total", 8)).unwrap();
    }

    #[test]
    fn invalid_result_is_not_written() {
        let (_directory, path) = file();
        let message = refusal(&path, &set("iops-total-max", 2));
        assert!(
            message.contains(
                "nothing changed, neither in the file nor in the daemon: the next start would fail: "
            ),
            "{message}"
        );
        assert!(message.contains("iops-total-max = 2: is below iops-total (5)"), "{message}");
        // The file alone is incomplete, so it cannot be checked.
        fs::write(&path, "[disk.a]\niops-total = 5\n").unwrap();
        let saving = prepare(&path, &set("iops-total-max", 2)).unwrap();
        let warning = saving.existing_error.unwrap();
        assert!(
            warning.contains("as before this change: ") && warning.contains("weir.toml:1: disk.a: no image"),
            "{warning}"
        );
    }

    #[test]
    fn unwritable_files_are_reported() {
        let (directory, path) = file();
        let missing = directory.path().join("none.toml");
        assert!(
            refusal(&missing, &set("iops-total", 1)).contains("none.toml: cannot be saved to: No such file")
        );
        let change = set("iops-total", 1);
        let message =
            PreparedConfigFile::prepare(&path, |text| edit::with_change(text, "group", "g", &change))
                .err()
                .unwrap();
        let message = format!("{message:#}");
        assert!(message.contains("has no [group.g]"), "{message}");
        assert!(
            refusal(directory.path(), &set("iops-total", 1)).contains("cannot be saved to: Is a directory")
        );
    }
}
