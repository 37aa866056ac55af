//! A directory that must contain all images.
//!
//! Images name other files: backing files and data files. A user that serves foreign images may
//! want to confine those names. With a root, the kernel resolves each name beneath that directory
//! (openat2 with `RESOLVE_BENEATH`): `..`, absolute names and symbolic links work as long as they
//! stay inside, and no process can exchange a link between the check and the open. If the call is
//! unavailable, each component is opened separately and `..` returns to the directory opened
//! before: systemd's `RestrictSUIDSGID=` blocks openat2, because no seccomp filter can see its
//! arguments.
//!
//! Never judges names as text. Only the root's own prefix of an absolute name is removed.

use std::{
    ffi::OsString,
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2, readlinkat},
    io::Errno,
};

use super::OpenError;

/// Maximum number of attempts to resolve a name while another process renames directories above it.
const MAX_ATTEMPTS: u32 = 100;
/// Maximum number of symbolic links in a name: the kernel's bound, path_resolution(7).
const MAX_LINKS: u32 = 40;

/// The root directory.
#[derive(Clone, Debug)]
pub struct Root {
    /// Absolute path, as the user named it.
    path: PathBuf,
    /// Path without symbolic links.
    canonical: PathBuf,
    directory: Arc<OwnedFd>,
}

/// A file inside the root, opened with `O_PATH` so that a rename cannot exchange it.
#[derive(Debug)]
pub(super) struct Pinned(OwnedFd);

impl Pinned {
    /// Path that resolves to this file, even after a rename.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

impl Root {
    /// Opens the directory.
    ///
    /// # Errors
    /// As reported by the system, also [`ErrorKind::NotADirectory`].
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = open(path, flags, Mode::empty())?;
        Ok(Self {
            path: std::path::absolute(path)?,
            canonical: path.canonicalize()?,
            directory: Arc::new(directory),
        })
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// As reported by the system; also if the file is outside the root, or not a regular file.
    pub fn read(&self, path: &Path) -> Result<fs::File, OpenError> {
        let name = path.display().to_string();
        let pinned = self.pin(path, &name)?;
        reactor::regular_file::open_resolved(&pinned.path())
            .map_err(|error| OpenError::new(&name, error.to_string(), "check its owner and mode"))
    }

    /// Fails unless the path leads to an existing file or directory inside the root.
    ///
    /// # Errors
    /// It is outside, or the system reports an error.
    pub fn check(&self, path: &Path) -> Result<(), OpenError> {
        self.pin(path, &path.display().to_string()).map(drop)
    }

    /// Resolves a name to a file, without opening it for reading or writing.
    pub(super) fn pin(&self, path: &Path, name: &str) -> Result<Pinned, OpenError> {
        let absolute = std::path::absolute(path)
            .map_err(|error| OpenError::new(name, error.to_string(), "give another name"))?;
        let relative =
            [&self.path, &self.canonical].into_iter().find_map(|root| absolute.strip_prefix(root).ok());
        let relative = relative.ok_or_else(|| self.outside_error(name))?;
        let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut attempts = 0;
        loop {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            match openat2(&self.directory, relative, flags, Mode::empty(), resolve) {
                Ok(fd) => return Ok(Pinned(fd)),
                // EAGAIN: a directory was renamed during the lookup, so the kernel could not prove
                // that `..` stays inside (openat2(2)).
                Err(Errno::AGAIN) if attempts < MAX_ATTEMPTS => attempts += 1,
                Err(Errno::INTR) => {}
                Err(Errno::NOSYS) => return self.pin_by_components(relative, name),
                Err(Errno::XDEV) => return Err(self.outside_error(name)),
                Err(errno) => return Err(self.open_error(name, errno)),
            }
        }
    }

    /// As [`Root::pin`], without openat2.
    fn pin_by_components(&self, relative: &Path, name: &str) -> Result<Pinned, OpenError> {
        resolve_components(&self.directory, relative).map(Pinned).map_err(|errno| match errno {
            Errno::XDEV => self.outside_error(name),
            errno => self.open_error(name, errno),
        })
    }

    fn outside_error(&self, name: &str) -> OpenError {
        OpenError::new(
            name,
            format!("lies outside of the image root, {}", self.path.display()),
            "move it there, with a name or link that does not lead out, or choose another --image-root",
        )
    }

    fn open_error(&self, name: &str, errno: Errno) -> OpenError {
        let error = io::Error::from(errno);
        let remedy = match error.kind() {
            ErrorKind::NotFound => {
                return OpenError::new(name, "no such file", "create it first, or check the path");
            }
            _ => "check the path and its directories",
        };
        OpenError::new(name, error.to_string(), remedy)
    }
}

/// Resolves a name below the directory as `RESOLVE_BENEATH` does; XDEV if it leads out.
fn resolve_components(directory: &OwnedFd, relative: &Path) -> Result<OwnedFd, Errno> {
    // Components still to resolve, the next one last.
    let mut remaining = reversed_components(relative)?;
    // Directories opened so far. `..` pops one instead of asking the kernel for the parent, so a
    // concurrent rename cannot lead out of the root.
    let mut passed: Vec<OwnedFd> = Vec::new();
    let mut links = 0;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    while let Some(part) = remaining.pop() {
        if part == ".." {
            passed.pop().ok_or(Errno::XDEV)?;
            continue;
        }
        let parent = passed.last().unwrap_or(directory);
        let found = openat(parent, &part, flags, Mode::empty())?;
        let kind = FileType::from_raw_mode(fstat(&found)?.st_mode);
        if kind == FileType::Symlink {
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::LOOP);
            }
            let target = readlinkat(&found, "", Vec::new())?;
            // Resolved from the directory of the link, which is the last of `passed`.
            remaining.extend(reversed_components(Path::new(&OsString::from_vec(target.into_bytes())))?);
            continue;
        }
        // A file has no children and no `..`.
        if kind != FileType::Directory && !remaining.is_empty() {
            return Err(Errno::NOTDIR);
        }
        passed.push(found);
    }
    match passed.pop() {
        Some(found) => Ok(found),
        None => openat(directory, ".", flags, Mode::empty()),
    }
}

/// Components of a relative name in reverse order; XDEV if it is absolute.
fn reversed_components(name: &Path) -> Result<Vec<OsString>, Errno> {
    let component_name = |component| match component {
        Component::Normal(name) => Some(Ok(name.to_owned())),
        Component::ParentDir => Some(Ok("..".into())),
        Component::CurDir => None,
        Component::RootDir | Component::Prefix(_) => Some(Err(Errno::XDEV)),
    };
    name.components().rev().filter_map(component_name).collect()
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
    fn without_openat2_names_lead_to_the_same_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let top = dir.path();
        fs::create_dir_all(top.join("root/sub/below")).expect("made");
        for name in ["root/inside", "root/sub/deep", "outside"] {
            fs::write(top.join(name), name).expect("written");
        }
        let links = [
            ("../inside", "sub/good"),
            ("./below/../../sub//deep", "sub/way"),
            ("../../outside", "sub/bad"),
            ("/etc/passwd", "absolute"),
            ("..", "up"),
            ("sub/below", "down"),
            ("loop", "loop"),
        ];
        for (target, link) in links {
            symlink(target, top.join("root").join(link)).expect("linked");
        }
        let root = Root::open(&top.join("root")).expect("a directory");
        let names = [
            ".",
            "inside",
            "sub/good",
            "sub/way",
            "sub",
            "sub/",
            "down",
            "down/../deep",
            "down/../../inside",
            "sub/below/../../inside",
            "inside/..",
            "inside/x",
            "sub/bad",
            "absolute",
            "up",
            "up/inside",
            "up/outside",
            "loop",
            "none",
            "none/..",
            "sub/none",
            "../root/inside",
            "down/../../../outside",
        ];
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let path_of = |fd: OwnedFd| fs::read_link(Pinned(fd).path()).expect("a descriptor");
        for name in names {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            let expected = openat2(&root.directory, name, flags, Mode::empty(), resolve).map(path_of);
            let found = resolve_components(&root.directory, Path::new(name)).map(path_of);
            assert_eq!(found, expected, "{name}");
        }
        let error = root.pin_by_components(Path::new("sub/bad"), "bad").expect_err("outside");
        assert!(error.why.starts_with("lies outside of the image root"), "{error}");
        let error = root.pin_by_components(Path::new("none"), "none").expect_err("missing");
        assert_eq!(error.why, "no such file");
    }

    #[test]
    fn a_root_is_a_directory() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        assert_eq!(Root::open(file.path()).expect_err("a file").kind(), ErrorKind::NotADirectory);
    }
}
