//! Registry of the file systems that this process serves. Its own images must not be on them.
//!
//! A request to such an image returns to this process as another request. A system call that waits
//! for the reply may block the only thread that could send it: a deadlock.
//!
//! An image is recognized by the device number of its open descriptor, whatever its name: a path, a
//! symbolic link, a bind mount, a passed descriptor. The kernel returns that number without a
//! request to the file system ([`AtFlags::STATX_DONT_SYNC`]). A loop device over a file of this
//! process is recognized by the file that the kernel reports for it.
//!
//! Never sends a request to a file system.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, makedev, statx};

use super::OpenError;

/// Maximum depth of loop devices over files on loop devices that is checked.
const MAX_DEPTH: usize = 8;

/// Device numbers of the file systems, each with the number of its [`OwnMount`]s.
static DEVICES: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// Registration of a file system that this process serves; dropping it removes it.
#[derive(Debug)]
pub struct OwnMount(u64);

impl OwnMount {
    /// Registers the file system of `root`, which may be open with `O_PATH`.
    ///
    /// # Errors
    /// The kernel does not report the file system.
    pub fn of(root: impl AsFd) -> io::Result<Self> {
        let device = device_numbers(root)?.device;
        *devices().entry(device).or_default() += 1;
        Ok(Self(device))
    }
}

impl Drop for OwnMount {
    fn drop(&mut self) {
        let mut devices = devices();
        if let Some(mounts) = devices.get_mut(&self.0) {
            *mounts -= 1;
            if *mounts == 0 {
                devices.remove(&self.0);
            }
        }
    }
}

fn devices() -> MutexGuard<'static, BTreeMap<u64, usize>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device numbers of an open file, from the kernel.
struct DeviceNumbers {
    /// Number of the device that its file system is on.
    device: u64,
    /// Major and minor number, if the file is a block device.
    block_device: Option<(u32, u32)>,
    /// Major and minor number of the device that its file system is on.
    below: (u32, u32),
}

fn device_numbers(file: impl AsFd) -> io::Result<DeviceNumbers> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let numbers = statx(file, c"", flags, StatxFlags::TYPE)?;
    let is_block_device = FileType::from_raw_mode(numbers.stx_mode.into()) == FileType::BlockDevice;
    Ok(DeviceNumbers {
        device: makedev(numbers.stx_dev_major, numbers.stx_dev_minor),
        block_device: is_block_device.then_some((numbers.stx_rdev_major, numbers.stx_rdev_minor)),
        below: (numbers.stx_dev_major, numbers.stx_dev_minor),
    })
}

/// Rejects an image at `path` that is on a file system of this process. A path that cannot be
/// opened is accepted: the caller's attempt reports the error.
pub(super) fn check_path(path: &Path, name: &str) -> Result<(), OpenError> {
    // Its own statement: the mutex must not be held while the path is opened.
    let has_none = devices().is_empty();
    match has_none {
        true => Ok(()),
        false => open_path(path).map_or(Ok(()), |file| check(&file, name)),
    }
}

/// As [`check_path`], for an open image.
pub(super) fn check(file: impl AsFd, name: &str) -> Result<(), OpenError> {
    let has_none = devices().is_empty();
    if has_none || !is_on_own_mount(file, MAX_DEPTH) {
        return Ok(());
    }
    let why = "is a file that this process itself serves, so requests would deadlock";
    Err(OpenError::new(name, why, "name the image behind that file, or serve it by another daemon"))
}

fn is_on_own_mount(file: impl AsFd, levels: usize) -> bool {
    let Ok(numbers) = device_numbers(file) else { return false };
    let is_own = devices().contains_key(&numbers.device);
    is_own
        || levels > 0
            && [numbers.block_device, Some(numbers.below)].into_iter().flatten().any(|number| {
                let file = backing_file(number).and_then(|path| open_path(&path).ok());
                file.is_some_and(|file| is_on_own_mount(file, levels - 1))
            })
}

/// Backing file of a loop device, also given one of its partitions.
fn backing_file((major, minor): (u32, u32)) -> Option<PathBuf> {
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let loop_file = |below: &str| fs::read_to_string(device.join(below).join("loop/backing_file")).ok();
    let path = loop_file(".").or_else(|| loop_file(".."))?;
    Some(PathBuf::from(path.trim_end_matches('\n')))
}

fn open_path(path: &Path) -> rustix::io::Result<std::os::fd::OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_on_an_own_file_system_is_refused_by_every_name() {
        let directory = tempfile::tempdir().expect("there is room");
        let (path, link) = (directory.path().join("disk.raw"), directory.path().join("link"));
        fs::write(&path, [0; 512]).expect("there is room");
        std::os::unix::fs::symlink(&path, &link).expect("it is new");
        let file = fs::File::open(&path).expect("it is there");
        assert!(check(&file, "disk").is_ok(), "no file system is this process's");
        let mounts = [(); 2].map(|()| OwnMount::of(open_path(&path).expect("it is there")).expect("known"));
        let descriptor = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let [first, second] = mounts;
        for _ in 0..2 {
            check(&file, "disk").expect_err("by a descriptor");
            for path in [&path, &link, Path::new(&descriptor)] {
                let error = check_path(path, "disk").expect_err("by a path").to_string();
                assert!(error.contains("itself serves"), "{error}");
            }
            assert!(check_path(&directory.path().join("missing"), "disk").is_ok());
            assert!(check_path(Path::new("/proc/self/stat"), "disk").is_ok(), "another file system");
        }
        drop(first);
        check(&file, "disk").expect_err("one mount is left");
        drop(second);
        assert!(check(&file, "disk").is_ok());
    }
}
