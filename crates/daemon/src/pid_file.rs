//! A file with the process's number, for scripts that wait for the daemon or end it.

use std::{
    fs,
    fs::{OpenOptions, Permissions},
    io::Write as _,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process,
};

use anyhow::Context as _;
use nix::libc::O_NOFOLLOW;

/// The file, removed when this is dropped if it still holds this process's number.
#[derive(Debug)]
pub(crate) struct PidFile(PathBuf);

impl PidFile {
    /// Over what an earlier process left.
    pub(crate) fn write(path: &Path) -> anyhow::Result<Self> {
        let named = || format!("pid file {}: cannot be written", path.display());
        let path = std::path::absolute(path).with_context(named)?;
        // Not through a link, which somebody else may have laid in a directory that others can
        // write; and not for others to write, whatever the umask.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o644).custom_flags(O_NOFOLLOW);
        let mut file = options.open(&path).with_context(named)?;
        file.set_permissions(Permissions::from_mode(0o644)).with_context(named)?;
        writeln!(file, "{}", process::id()).with_context(named)?;
        Ok(Self(path))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let ours = fs::read_to_string(&self.0).is_ok_and(|text| text.trim() == process::id().to_string());
        if ours {
            let _ = fs::remove_file(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_there_while_the_process_serves() {
        let path = std::env::temp_dir().join(format!("weir-pid-{}", process::id()));
        let file = PidFile::write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", process::id()));
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn another_process_s_file_stays() {
        let path = std::env::temp_dir().join(format!("weir-pid-other-{}", process::id()));
        let file = PidFile::write(&path).unwrap();
        fs::write(&path, "1\n").unwrap();
        drop(file);
        assert!(path.exists());
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_link_is_not_followed_and_nobody_else_may_write() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("precious"), directory.path().join("pid"));
        fs::write(&target, "precious").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        PidFile::write(&link).unwrap_err();
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        let path = directory.path().join("own");
        fs::write(&path, "1").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let _file = PidFile::write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        let error = PidFile::write(Path::new("/nonexistent/pid")).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.starts_with("pid file /nonexistent/pid: cannot be written: No such file"), "{text}");
    }
}
