//! Small files that weir keeps for itself between runs, written whole or not at all. Never used for
//! a file of the user's, which may hold more than weir knows.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use reactor::regular;

/// What is in a file; `None` if there is none.
///
/// # Errors
/// If it cannot be read, or is longer than so many bytes.
pub fn read(path: &Path, most_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match regular::open(path) {
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

/// Replaces the file's content, readable for all; with `durably` a loss of power does not undo it.
///
/// # Errors
/// If that fails; the file is then as it was.
pub fn write(path: &Path, content: &[u8], durably: bool) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(content)?;
    // By its descriptor: the sandbox lets no mode be changed by a name.
    file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    if durably {
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
    fn what_is_written_is_read_and_nothing_lies_beside_it() {
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
    fn what_cannot_be_written_is_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        fs::create_dir(&path).unwrap();
        assert!(write(&path, b"x", false).is_err());
        assert!(path.is_dir());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
