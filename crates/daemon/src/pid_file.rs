//! A file with the process's number, for scripts that wait for the daemon or end it.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
};

use anyhow::Context as _;

/// The file, removed when this is dropped if it still holds this process's number.
#[derive(Debug)]
pub(crate) struct PidFile(PathBuf);

impl PidFile {
    /// Over what an earlier process left.
    pub(crate) fn write(path: &Path) -> anyhow::Result<Self> {
        let named = || format!("pid file {}: cannot be written", path.display());
        let path = std::path::absolute(path).with_context(named)?;
        fs::write(&path, format!("{}\n", process::id())).with_context(named)?;
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
    fn a_file_that_cannot_be_written_is_named() {
        let error = PidFile::write(Path::new("/nonexistent/pid")).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.starts_with("pid file /nonexistent/pid: cannot be written: No such file"), "{text}");
    }
}
