//! Opens small files that a user names: configs, tokens, keys, passwords.
//!
//! Opening a named pipe blocks until a writer opens it, and reading a device may never end. A
//! daemon that opens a named pipe would hang, and so would each later reload. [`open`] never blocks
//! and returns regular files only.
//!
//! A pipe is accepted only if this process inherited it and it is named by its number (`/dev/fd/5`,
//! `/dev/stdin`), as with a shell's `<(command)`.

use std::{
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::Path,
};

/// Opens a file for reading.
///
/// # Errors
/// As `open(2)`; [`ErrorKind::InvalidInput`], with the kind of the file, unless it is regular.
pub fn open(path: &Path) -> io::Result<File> {
    let descriptor_prefixes = ["/dev/fd/", "/proc/self/fd/", "/dev/stdin"];
    if descriptor_prefixes.iter().any(|prefix| path.starts_with(prefix)) {
        return File::open(path);
    }
    open_resolved(path)
}

/// As [`open`], for a path that is already resolved, in any directory.
pub fn open_resolved(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    check(&file)?;
    Ok(file)
}

/// Fails unless an open file is a regular one.
///
/// # Errors
/// As [`open`].
pub fn check(file: &File) -> io::Result<()> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let problem = match kind {
        kind if kind.is_dir() => "is a directory, not a file",
        kind if kind.is_fifo() => "is a named pipe, not a file (pass a pipe as /dev/fd/N)",
        kind if kind.is_char_device() || kind.is_block_device() => "is a device, not a file",
        _ => "is not a regular file",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, problem))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn only_regular_files_are_opened_without_blocking() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("file"), "text").expect("written");
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("made");
        let mut text = String::new();
        open(&path("file")).expect("a file").read_to_string(&mut text).expect("read");
        assert_eq!(text, "text");
        // Without a writer, a plain open of the pipe would block for ever.
        for (target, expected) in [
            (path("pipe"), "is a named pipe"),
            (directory.path().to_owned(), "is a directory"),
            ("/dev/zero".into(), "is a device"),
        ] {
            let error = open(&target).expect_err("no file").to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        let error = open(&path("missing")).expect_err("none");
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn inherited_pipe_is_read() {
        let (mut reader, mut writer) = io::pipe().expect("a pipe");
        writer.write_all(b"config").expect("written");
        drop(writer);
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        let mut text = String::new();
        open(Path::new(&path)).expect("given").read_to_string(&mut text).expect("read");
        assert_eq!(text, "config");
        assert_eq!(reader.read(&mut [0]).expect("at its end"), 0);
    }
}
