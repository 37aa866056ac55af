//! Sets of descriptors that clients of the control socket passed (`add-fd`): the name
//! `/dev/fdset/N` opens them, whatever the daemon's own file permissions.
//!
//! As in QEMU, a set may hold several descriptors of one file with different access modes, and
//! lives until it is removed. Removing it leaves images open that were opened with it.
//!
//! Never opens a file by itself.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    os::fd::{AsFd as _, AsRawFd as _, RawFd},
    path::Path,
    sync::Arc,
};

use reactor::operation::PassedFd;
use rustix::fs::{OFlags, fcntl_getfl};

/// Directory that the names of the sets appear in; it need not exist.
const FDSET_DIRECTORY: &str = "/dev/fdset";
/// Maximum number of descriptors in all sets together.
const MAX_DESCRIPTORS: usize = 256;
/// Maximum length in bytes of the `opaque` text.
const MAX_OPAQUE_BYTES: usize = 1024;

/// Descriptor in a set.
#[derive(Debug)]
pub(crate) struct SetDescriptor {
    pub(crate) descriptor: Arc<PassedFd>,
    pub(crate) opaque: Option<String>,
}

impl SetDescriptor {
    /// Number of the descriptor in this process.
    pub(crate) fn number(&self) -> RawFd {
        self.descriptor.as_fd().as_raw_fd()
    }
}

/// Sets of descriptors, by their number.
#[derive(Debug, Default)]
pub(crate) struct DescriptorSets(RefCell<BTreeMap<u64, Vec<SetDescriptor>>>);

impl DescriptorSets {
    /// Adds a descriptor to a set, or to a new set with the lowest free number. Returns the set's
    /// number.
    pub(crate) fn add(
        &self,
        set: Option<u64>,
        descriptor: PassedFd,
        opaque: Option<String>,
    ) -> Result<u64, String> {
        if opaque.as_ref().is_some_and(|text| text.len() > MAX_OPAQUE_BYTES) {
            return Err(format!("the remark is longer than {MAX_OPAQUE_BYTES} bytes"));
        }
        let mut sets = self.0.borrow_mut();
        if sets.values().map(Vec::len).sum::<usize>() >= MAX_DESCRIPTORS {
            return Err(format!("{MAX_DESCRIPTORS} descriptors are kept already (remove some first)"));
        }
        let free = || (0..).find(|number| !sets.contains_key(number)).unwrap_or_default();
        let set = set.unwrap_or_else(free);
        sets.entry(set).or_default().push(SetDescriptor { descriptor: Arc::new(descriptor), opaque });
        Ok(set)
    }

    /// Removes a descriptor by its number in this process, or the whole set. Returns false if there
    /// is none.
    pub(crate) fn remove(&self, set: u64, descriptor: Option<i64>) -> bool {
        let mut sets = self.0.borrow_mut();
        let Some(wanted) = descriptor else { return sets.remove(&set).is_some() };
        let Some(members) = sets.get_mut(&set) else { return false };
        let before = members.len();
        members.retain(|member| i64::from(member.number()) != wanted);
        let removed = members.len() < before;
        if members.is_empty() {
            sets.remove(&set);
        }
        removed
    }

    pub(crate) fn list<T>(&self, list: impl FnMut((&u64, &Vec<SetDescriptor>)) -> T) -> Vec<T> {
        self.0.borrow().iter().map(list).collect()
    }

    /// Returns the descriptor that `path` names; `None` if the path is outside `/dev/fdset`. A
    /// descriptor with the exact access mode is preferred over one with more rights. A writable
    /// descriptor serves one disk only: OFD locks belong to the open file description, so two disks
    /// on it would not exclude each other.
    pub(crate) fn descriptor_at(
        &self,
        path: &Path,
        read_only: bool,
    ) -> Result<Option<Arc<PassedFd>>, String> {
        let Ok(number) = path.strip_prefix(FDSET_DIRECTORY) else { return Ok(None) };
        let number = number.to_str().and_then(|text| text.parse::<u64>().ok());
        let shown =
            number.map_or_else(|| FDSET_DIRECTORY.to_owned(), |number| format!("{FDSET_DIRECTORY}/{number}"));
        let sets = self.0.borrow();
        let members = number.and_then(|number| sets.get(&number));
        let members = members.ok_or_else(|| {
            format!("Could not open '{shown}': there is no such set (`query-fdsets` lists them)")
        })?;
        // In order of preference; a write-only descriptor never suffices, as images are read as
        // well.
        let modes = if read_only { [OFlags::RDONLY, OFlags::RDWR] } else { [OFlags::RDWR; 2] };
        let matches_mode = |member: &&SetDescriptor, mode| {
            // An error counts as O_PATH, which permits no I/O.
            let flags = fcntl_getfl(&*member.descriptor).unwrap_or(OFlags::PATH);
            // A write through O_APPEND lands at the end of the file, whatever its offset.
            let goes_elsewhere = !read_only && flags.contains(OFlags::APPEND);
            !flags.contains(OFlags::PATH) && flags & OFlags::RWMODE == mode && !goes_elsewhere
        };
        let fitting = modes
            .into_iter()
            .flat_map(|mode| members.iter().filter(move |member| matches_mode(member, mode)));
        let fitting: Vec<_> = fitting.map(|member| &member.descriptor).collect();
        if fitting.is_empty() {
            let how = if read_only { "for reading" } else { "for reading and writing, without O_APPEND" };
            return Err(format!(
                "Could not open '{shown}': Permission denied (no descriptor of the set was opened \
                 {how}; add-fd one)"
            ));
        }
        let is_reader = |descriptor: &Arc<PassedFd>| {
            fcntl_getfl(&**descriptor).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDONLY)
        };
        // Readers may share a descriptor: their locks are compatible.
        let free = fitting.into_iter().find(|descriptor| is_reader(descriptor) || is_unused(descriptor));
        free.map(|descriptor| Some(Arc::clone(descriptor))).ok_or_else(|| {
            format!(
                "Could not open '{shown}': in use by another disk, or locked by the process that \
                 passed it (open the file again and pass the new descriptor with add-fd)"
            )
        })
    }
}

/// True if no image is open with the descriptor, or being opened. An open image's locks appear in
/// proc_pid_fdinfo(5) of every descriptor of the same open file description.
fn is_unused(descriptor: &Arc<PassedFd>) -> bool {
    let info = format!("/proc/self/fdinfo/{}", descriptor.as_fd().as_raw_fd());
    let info = std::fs::read_to_string(info).unwrap_or_default();
    let is_lock = |line: &str| line.starts_with("lock:") && line.contains("OFDLCK");
    // A reference beyond the set's own belongs to an image that is open or being opened; the latter
    // has no lock yet.
    Arc::strong_count(descriptor) == 1 && !info.lines().any(is_lock)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{File, OpenOptions},
        os::fd::OwnedFd,
    };

    use nix::{
        fcntl::{FcntlArg, fcntl},
        libc,
    };

    use super::*;

    fn descriptor(write: bool) -> PassedFd {
        let file = tempfile::NamedTempFile::new().expect("a file");
        OpenOptions::new()
            .read(true)
            .write(write)
            .open(file.path())
            .map(OwnedFd::from)
            .expect("it is ours")
            .into()
    }

    #[test]
    fn descriptor_is_chosen_by_access_mode() {
        let sets = DescriptorSets::default();
        let open = |path: &str, read_only| sets.descriptor_at(Path::new(path), read_only);
        assert!(open("/tmp/x", false).expect("another file").is_none());
        assert!(open("/dev/fdset/0", false).unwrap_err().contains("no such set"));
        assert!(open("/dev/fdset/x", false).is_err() && open("/dev/fdset", false).is_err());
        let set = sets.add(None, descriptor(false), None).expect("room");
        let path = format!("/dev/fdset/{set}");
        let error = open(&path, false).unwrap_err();
        assert!(error.contains("opened for reading and writing"), "{error}");
        let reader = open(&path, true).expect("may").expect("is there");
        assert_eq!(sets.add(Some(set), descriptor(true), None), Ok(set));
        assert!(Arc::ptr_eq(&open(&path, true).expect("may").expect("is there"), &reader));
        assert!(!Arc::ptr_eq(&open(&path, false).expect("may").expect("is there"), &reader));
        assert!(sets.remove(set, None) && !sets.remove(set, None) && !sets.remove(7, Some(3)));
        let path_only = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, rustix::fs::Mode::empty());
        let set = sets.add(Some(9), path_only.expect("the root is there").into(), None).expect("room");
        assert!(open(&format!("/dev/fdset/{set}"), true).is_err());
    }

    #[test]
    fn writable_descriptor_serves_one_disk() {
        let sets = DescriptorSets::default();
        let open = |path: &str| sets.descriptor_at(Path::new(path), false);
        let passed = descriptor(true);
        let duplicate = PassedFd::from(passed.as_fd().try_clone_to_owned().expect("a descriptor"));
        let (_, _) = (sets.add(Some(0), passed, None), sets.add(Some(1), duplicate, None));
        let being_opened = open("/dev/fdset/0").expect("it is free").expect("is there");
        assert!(open("/dev/fdset/0").unwrap_err().contains("in use by another disk"));
        // As an open image locks its file.
        let lock = |kind: libc::c_int| {
            let lock = libc::flock { l_type: kind as i16, l_whence: 0, l_start: 100, l_len: 1, l_pid: 0 };
            fcntl(being_opened.as_fd(), FcntlArg::F_OFD_SETLK(&lock))
                .expect("no other descriptor holds the lock");
        };
        lock(libc::F_RDLCK);
        assert!(open("/dev/fdset/1").is_err(), "the same open file by another name");
        lock(libc::F_UNLCK);
        drop(being_opened);
        assert!(open("/dev/fdset/0").is_ok() && open("/dev/fdset/1").is_ok());
    }

    #[test]
    fn append_descriptor_is_not_used_for_writing() {
        let sets = DescriptorSets::default();
        let file = tempfile::NamedTempFile::new().expect("a file");
        let appends = OpenOptions::new().read(true).append(true).open(file.path()).expect("it is ours");
        sets.add(Some(0), OwnedFd::from(appends).into(), None).expect("room");
        let error = sets.descriptor_at(Path::new("/dev/fdset/0"), false).unwrap_err();
        assert!(error.contains("without O_APPEND"), "{error}");
        assert!(sets.descriptor_at(Path::new("/dev/fdset/0"), true).is_ok());
    }

    #[test]
    fn number_of_descriptors_is_bounded() {
        let sets = DescriptorSets::default();
        let file = File::open("/dev/null").expect("it is there");
        let another = || PassedFd::from(OwnedFd::from(file.try_clone().expect("a descriptor")));
        for _ in 0..MAX_DESCRIPTORS {
            sets.add(None, another(), None).expect("room");
        }
        assert!(sets.add(None, another(), None).is_err());
        assert!(sets.remove(0, None) && sets.add(None, another(), Some("x".repeat(2000))).is_err());
        assert_eq!(sets.add(None, another(), None), Ok(0));
    }
}
