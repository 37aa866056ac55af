//! A directory that must contain all images.
//!
//! Images name other files: the one that they were copied from, the one with their data. Whoever
//! serves images made by others may not want those names to lead everywhere. With a root, the
//! kernel resolves each name beneath that directory (openat2 with `RESOLVE_BENEATH`): `..`,
//! absolute names and symbolic links work as long as they stay inside, and nobody can exchange a
//! link between the check and the opening.
//!
//! Never judges names as text. Only the part of an absolute name that is the root's own is cut off.

use std::{
    fs,
    io::{self, ErrorKind},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags, open, openat2},
    io::Errno,
};

use super::OpenError;

/// How often a name is resolved again while somebody renames directories above it.
const MOST_ATTEMPTS: u32 = 100;

/// The directory.
#[derive(Clone, Debug)]
pub struct Root {
    /// As it was named, absolute.
    path: PathBuf,
    /// Without symbolic links.
    canonical: PathBuf,
    directory: Arc<OwnedFd>,
}

/// A file inside, held so that it stays the same one.
#[derive(Debug)]
pub(super) struct Pinned(OwnedFd);

impl Pinned {
    /// A path that leads to this very file, whatever happens to its name.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

impl Root {
    /// Opens the directory.
    ///
    /// # Errors
    /// The system's, also [`ErrorKind::NotADirectory`].
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = open(path, flags, Mode::empty())?;
        Ok(Self {
            path: std::path::absolute(path)?,
            canonical: path.canonicalize()?,
            directory: Arc::new(directory),
        })
    }

    /// Opens the file of this name for reading.
    ///
    /// # Errors
    /// The system's; also if it lies outside.
    pub fn read(&self, path: &Path) -> Result<fs::File, OpenError> {
        let name = path.display().to_string();
        let pinned = self.pin(path, &name)?;
        fs::File::open(pinned.path())
            .map_err(|error| OpenError::new(&name, error.to_string(), "check its owner and mode"))
    }

    /// Finds the file of this name without opening it for anything.
    pub(super) fn pin(&self, path: &Path, name: &str) -> Result<Pinned, OpenError> {
        let absolute = std::path::absolute(path)
            .map_err(|error| OpenError::new(name, error.to_string(), "give another name"))?;
        let inside =
            [&self.path, &self.canonical].into_iter().find_map(|root| absolute.strip_prefix(root).ok());
        let inside = inside.ok_or_else(|| self.outside(name))?;
        let inside = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut attempts = 0;
        loop {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            match openat2(&self.directory, inside, flags, Mode::empty(), resolve) {
                Ok(fd) => return Ok(Pinned(fd)),
                Err(Errno::AGAIN) if attempts < MOST_ATTEMPTS => attempts += 1,
                Err(Errno::INTR) => {}
                Err(Errno::XDEV) => return Err(self.outside(name)),
                Err(errno) => return Err(self.failed(name, errno)),
            }
        }
    }

    fn outside(&self, name: &str) -> OpenError {
        OpenError::new(
            name,
            format!("lies outside of the image root, {}", self.path.display()),
            "move it there, with a name or link that does not lead out, or choose another --image-root",
        )
    }

    fn failed(&self, name: &str, errno: Errno) -> OpenError {
        let error = io::Error::from(errno);
        let remedy = match error.kind() {
            ErrorKind::NotFound => {
                return OpenError::new(name, "no such file", "create it first, or check the path");
            }
            _ if errno == Errno::NOSYS => "--image-root needs Linux 5.6, with openat2 allowed",
            _ => "check the path and its directories",
        };
        OpenError::new(name, error.to_string(), remedy)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn names_and_links_may_not_lead_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let top = dir.path();
        fs::create_dir_all(top.join("root/sub")).expect("made");
        for name in ["root/inside", "root/sub/deep", "outside"] {
            fs::write(top.join(name), name).expect("written");
        }
        symlink("../inside", top.join("root/sub/good")).expect("linked");
        symlink("../../outside", top.join("root/sub/bad")).expect("linked");
        symlink(top.join("outside"), top.join("root/absolute")).expect("linked");
        symlink("..", top.join("root/up")).expect("linked");
        symlink("root", top.join("other-name")).expect("linked");
        let root = Root::open(&top.join("other-name")).expect("a directory");
        for good in
            ["root/inside", "other-name/inside", "root/sub/../inside", "root/sub/good", "other-name/sub/deep"]
        {
            let pinned = root.pin(&top.join(good), good).expect(good);
            let content = fs::read_to_string(pinned.path()).expect(good);
            assert!(["root/inside", "root/sub/deep"].contains(&content.as_str()), "{good}: {content}");
        }
        for bad in
            ["outside", "root/../outside", "root/sub/bad", "root/absolute", "root/up/outside", "/etc/passwd"]
        {
            let error = root.pin(&top.join(bad), bad).expect_err(bad);
            assert!(error.why.starts_with("lies outside of the image root"), "{bad}: {error}");
        }
        let error = root.pin(&top.join("root/none"), "none").expect_err("missing");
        assert_eq!(error.why, "no such file");
    }

    #[test]
    fn a_root_is_a_directory() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        assert_eq!(Root::open(file.path()).expect_err("a file").kind(), ErrorKind::NotADirectory);
    }
}
