//! Sets of descriptors that clients of the control socket have passed: files that can be had by the
//! name `/dev/fdset/N`, wherever they lie and whoever may open them.
//!
//! As in QEMU, a set may have several descriptors of one file, opened in different ways, and stays
//! until it is removed; what was opened with it stays open.
//!
//! Never opens a file by itself.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::Arc,
};

use rustix::fs::{OFlags, fcntl_getfl};

/// Where the sets seem to be.
const SETS: &str = "/dev/fdset";
/// Descriptors of all sets together.
const MOST_KEPT: usize = 256;
/// Bytes of a remark.
const MOST_TEXT: usize = 1024;

/// One of a set.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) descriptor: Arc<OwnedFd>,
    pub(crate) opaque: Option<String>,
}

/// Sets of descriptors, by their number.
#[derive(Debug, Default)]
pub(crate) struct Sets(RefCell<BTreeMap<u64, Vec<Member>>>);

impl Sets {
    /// Adds one to a set, or to a new one with the lowest number that is free. The set's number.
    pub(crate) fn add(
        &self,
        set: Option<u64>,
        descriptor: OwnedFd,
        opaque: Option<String>,
    ) -> Result<u64, String> {
        if opaque.as_ref().is_some_and(|text| text.len() > MOST_TEXT) {
            return Err(format!("the remark is longer than {MOST_TEXT} bytes"));
        }
        let mut sets = self.0.borrow_mut();
        if sets.values().map(Vec::len).sum::<usize>() >= MOST_KEPT {
            return Err(format!("{MOST_KEPT} descriptors are kept already (remove some first)"));
        }
        let free = || (0..).find(|number| !sets.contains_key(number)).unwrap_or_default();
        let set = set.unwrap_or_else(free);
        sets.entry(set).or_default().push(Member { descriptor: Arc::new(descriptor), opaque });
        Ok(set)
    }

    /// Removes a descriptor by its number in this process, or the whole set. Whether there was one.
    pub(crate) fn remove(&self, set: u64, descriptor: Option<i64>) -> bool {
        let mut sets = self.0.borrow_mut();
        let Some(wanted) = descriptor else { return sets.remove(&set).is_some() };
        let Some(members) = sets.get_mut(&set) else { return false };
        let before = members.len();
        members.retain(|member| i64::from(member.descriptor.as_raw_fd()) != wanted);
        let removed = members.len() < before;
        if members.is_empty() {
            sets.remove(&set);
        }
        removed
    }

    pub(crate) fn list<T>(&self, list: impl FnMut((&u64, &Vec<Member>)) -> T) -> Vec<T> {
        self.0.borrow().iter().map(list).collect()
    }

    /// What is to be opened where a file of this name is; `None` where it is no set's. One that can
    /// do more than is asked for will do where none is just so.
    pub(crate) fn of_path(&self, path: &Path, read_only: bool) -> Result<Option<Arc<OwnedFd>>, String> {
        let Ok(number) = path.strip_prefix(SETS) else { return Ok(None) };
        let number = number.to_str().and_then(|text| text.parse::<u64>().ok());
        let shown = number.map_or_else(|| SETS.to_owned(), |number| format!("{SETS}/{number}"));
        let sets = self.0.borrow();
        let members = number.and_then(|number| sets.get(&number));
        let members = members.ok_or_else(|| {
            format!("Could not open '{shown}': there is no such set (`query-fdsets` lists them)")
        })?;
        let wanted = if read_only { [OFlags::RDONLY, OFlags::RDWR] } else { [OFlags::RDWR; 2] };
        let has = |member: &&Member, mode| {
            let flags = fcntl_getfl(&*member.descriptor).unwrap_or(OFlags::PATH);
            !flags.contains(OFlags::PATH) && flags & OFlags::RWMODE == mode
        };
        let found = wanted.iter().find_map(|mode| members.iter().find(|member| has(member, *mode)));
        found.map(|member| Some(Arc::clone(&member.descriptor))).ok_or_else(|| {
            let how = if read_only { "for reading" } else { "for reading and writing" };
            format!(
                "Could not open '{shown}': Permission denied (no descriptor of the set was opened {how}; add-fd one)"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};

    use super::*;

    fn descriptor(write: bool) -> OwnedFd {
        let file = tempfile::NamedTempFile::new().expect("a file");
        OpenOptions::new().read(true).write(write).open(file.path()).expect("it is ours").into()
    }

    #[test]
    fn a_set_s_member_is_chosen_by_how_it_was_opened() {
        let sets = Sets::default();
        let open = |path: &str, read_only| sets.of_path(Path::new(path), read_only);
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
        let set = sets.add(Some(9), path_only.expect("the root is there"), None).expect("room");
        assert!(open(&format!("/dev/fdset/{set}"), true).is_err());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let sets = Sets::default();
        let file = File::open("/dev/null").expect("it is there");
        let another = || OwnedFd::from(file.try_clone().expect("a descriptor"));
        for _ in 0..MOST_KEPT {
            sets.add(None, another(), None).expect("room");
        }
        assert!(sets.add(None, another(), None).is_err());
        assert!(sets.remove(0, None) && sets.add(None, another(), Some("x".repeat(2000))).is_err());
        assert_eq!(sets.add(None, another(), None), Ok(0));
    }
}
