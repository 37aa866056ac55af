//! Small state files, replaced atomically. Never used for a user's file, which may have content
//! that is unknown to weir.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use reactor::regular_file;

/// Content of a file; `None` if it does not exist.
///
/// # Errors
/// Fails if the file is unreadable, or longer than `most_bytes`.
pub fn read(path: &Path, most_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match regular_file::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut content = Vec::new();
    file.take(most_bytes + 1).read_to_end(&mut content)?;
    if content.len() as u64 > most_bytes {
        return Err(io::Error::other(format!("is too large, above {most_bytes} bytes")));
    }
    Ok(Some(content))
}

/// Replaces a file, readable for all users; with `durably` the change survives a power failure.
///
/// # Errors
/// Fails without changing the file.
pub fn write(path: &Path, content: &[u8], durably: bool) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // In the same directory: a rename is atomic only within a file system.
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(content)?;
    // By descriptor: the sandbox forbids changing modes by path.
    file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    if durably {
        // Before the rename, or a crash could leave an empty file.
        file.as_file().sync_all()?;
    }
    file.persist(path)?;
    if durably {
        fs::File::open(directory)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        assert_eq!(read(&path, 10).unwrap(), None);
        for (content, durably) in [(&b"one"[..], true), (b"two", false)] {
            write(&path, content, durably).unwrap();
            assert_eq!(read(&path, 3).unwrap().as_deref(), Some(content));
        }
        assert_eq!(read(&path, 2).unwrap_err().to_string(), "is too large, above 2 bytes");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        fs::create_dir(&path).unwrap();
        assert!(write(&path, b"x", false).is_err());
        assert!(path.is_dir());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
