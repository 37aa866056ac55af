//! The files of one test, removed with it.
//!
//! Images are below cargo's target directory and not in /tmp, which may be a tmpfs: O_DIRECT, holes
//! and locks must be those of a file system on a disk. Sockets are in /tmp, because their paths are
//! limited to 107 bytes.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

pub(crate) struct Scratch {
    files: TempDir,
    sockets: TempDir,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        let files = tempfile::Builder::new().prefix("e2e.").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        Self {
            files: files.expect("cargo makes its temporary directory"),
            sockets: tempfile::Builder::new()
                .prefix("weir.")
                .tempdir()
                .expect("the system has a temporary directory"),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).expect("the file can be written");
        path
    }

    pub(crate) fn sparse(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).and_then(|file| file.set_len(bytes)).expect("the file can be written");
        path
    }

    /// An image filled with [`pattern`].
    pub(crate) fn filled(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        let mut file = File::create(&path).expect("the file can be written");
        file.write_all(&pattern(bytes as usize)).expect("there is room for a test's image");
        path
    }
}

/// Data in which no two sectors are equal, so that a wrong offset is detected: each word is a hash
/// of its index.
pub(crate) fn pattern(bytes: usize) -> Vec<u8> {
    let word = |number: usize| (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..bytes.div_ceil(8)).flat_map(word).take(bytes).collect()
}

/// The path as text. Paths of tests are UTF-8.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}
