//! A new file in which a disk continues, or that receives a copy: directories that do not keep it,
//! and the access rights of the image that it continues.
//!
//! Never replaces a file, and never permits a user to read more than the image does.

use std::{
    fs::{self, File, Metadata, OpenOptions, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::Path,
};

use rustix::{
    fs::{XattrFlags, fremovexattr, fsetxattr, getxattr, statfs},
    io::Errno,
};

/// Types of file systems in memory (`linux/magic.h`): tmpfs and ramfs, of which devtmpfs is one.
const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// Name of the access control list of a file, acl(5).
const ACL: &str = "system.posix_acl_access";

/// Maximum size of an extended attribute (`XATTR_SIZE_MAX` of `linux/limits.h`).
const MAX_ACL_BYTES: usize = 1 << 16;

/// Fails if a new file at `path` would be in the file system of `/dev`, which a reboot empties.
///
/// # Errors
/// The reason, with a remedy.
pub fn check_directory(path: &Path) -> Result<(), String> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
    let devices = Path::new("/dev");
    if !is_in_memory(devices) || device(directory) != device(devices) {
        return Ok(());
    }
    Err(format!(
        "its directory {} is in the file system of /dev, which is in memory and empty after a reboot (name \
         a file in a directory on disk)",
        directory.display()
    ))
}

/// True if the path is in a file system that keeps its files in memory (tmpfs, devtmpfs, ramfs).
pub fn is_in_memory(path: &Path) -> bool {
    // The type is a C long, of which file systems use 32 bits.
    statfs(path).is_ok_and(|system| IN_MEMORY.contains(&(system.f_type as u32)))
}

/// Creates an empty file with the owner, the group, the mode and the access control list of an
/// image. If this process may not set one of them, fewer users can read the file.
///
/// # Errors
/// It exists, or the system does not permit it; nothing is left behind.
pub fn create_like(path: &Path, image: &Path) -> io::Result<File> {
    let like = fs::metadata(image)?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    match set_access(&file, &like, image) {
        Ok(()) => Ok(file),
        Err(error) => {
            // The first error is the reason.
            let _ = fs::remove_file(path);
            Err(error)
        }
    }
}

fn set_access(file: &File, like: &Metadata, image: &Path) -> io::Result<()> {
    let (uid, gid) = (like.uid(), like.gid());
    // A process without privileges may only set a group that it belongs to. What has succeeded is
    // read below.
    let _ = fchown(file, Some(uid), Some(gid)).or_else(|_| fchown(file, None, Some(gid)));
    let own = file.metadata()?;
    let (has_owner, has_group) = (own.uid() == uid, own.gid() == gid);
    let has_list = match access_list(image) {
        Ok(Some(list)) if has_owner && has_group => fsetxattr(file, ACL, &list, XattrFlags::empty()).is_ok(),
        list => {
            // The directory may have given it a list of its own.
            let removed = fremovexattr(file, ACL);
            matches!(list, Ok(None)) && matches!(removed, Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP))
        }
    };
    let owner = if has_owner { like.mode() & 0o600 } else { 0o600 };
    let others = like.mode() & 0o006;
    let group = match (has_list, has_group) {
        (true, true) => like.mode() & 0o060,
        // Another group has the rights of all users.
        (true, false) => others << 3,
        // These bits are the mask of a list, which has other entries or none.
        (false, _) => 0,
    };
    file.set_permissions(Permissions::from_mode(owner | group | others))
}

/// The access control list of a file; `None` if it has none.
fn access_list(path: &Path) -> rustix::io::Result<Option<Vec<u8>>> {
    let mut list = vec![0; MAX_ACL_BYTES];
    match getxattr(path, ACL, &mut *list) {
        Ok(length) => {
            list.truncate(length);
            Ok(Some(list))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use nix::unistd::geteuid;
    use rustix::fs::setxattr;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it exists").mode() & 0o777
    }

    #[test]
    fn files_beside_devices_are_refused() {
        let error = check_directory(Path::new("/dev/weir-none.qcow2")).expect_err("in memory");
        assert!(error.contains("/dev is in the file system of /dev"), "{error}");
        check_directory(Path::new("/usr/weir-none.qcow2")).expect("another file system");
        check_directory(Path::new("/none/none")).expect("the error of the open is better");
    }

    #[test]
    fn new_file_has_the_access_rights_of_the_image() {
        let directory = tempfile::tempdir().expect("a directory");
        let (image, new) = (directory.path().join("image"), directory.path().join("new"));
        fs::write(&image, "").expect("written");
        for bits in [0o666, 0o640, 0o400] {
            fs::set_permissions(&image, Permissions::from_mode(bits)).expect("its owner");
            create_like(&new, &image).expect("it is new");
            assert_eq!(mode(&new), bits, "whatever the umask");
            create_like(&new, &image).expect_err("it exists");
            assert!(new.exists(), "another file is not removed");
            fs::remove_file(&new).expect("it exists");
        }
        if !geteuid().is_root() {
            // Without privileges there is no file of another user.
            return;
        }
        std::os::unix::fs::chown(&image, Some(4000), Some(4001)).expect("root");
        create_like(&new, &image).expect("it is new");
        let metadata = fs::metadata(&new).expect("it exists");
        assert_eq!((metadata.uid(), metadata.gid(), mode(&new)), (4000, 4001, 0o400));
    }

    #[test]
    fn the_list_of_the_image_replaces_that_of_the_directory() {
        let directory = tempfile::tempdir().expect("a directory");
        let (image, new) = (directory.path().join("image"), directory.path().join("new"));
        fs::write(&image, "").expect("written");
        fs::set_permissions(&image, Permissions::from_mode(0o660)).expect("its owner");
        // acl(5): version 2, then tag, rights and id of the owner, the user 4000, the group, the
        // mask and all others.
        let list: Vec<u8> =
            [(1_u16, 6_u16, u32::MAX), (2, 6, 4000), (4, 0, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)]
                .iter()
                .flat_map(|(tag, rights, id)| {
                    [&tag.to_le_bytes()[..], &rights.to_le_bytes(), &id.to_le_bytes()].concat()
                })
                .collect();
        let list = [&2_u32.to_le_bytes()[..], &list].concat();
        if setxattr(directory.path(), "system.posix_acl_default", &list, XattrFlags::empty())
            == Err(Errno::OPNOTSUPP)
        {
            // The file system has no lists, so none can be inherited.
            return;
        }
        create_like(&new, &image).expect("it is new");
        assert_eq!(access_list(&new), Ok(None), "the image has none");
        assert_eq!(mode(&new), 0o660);
        fs::remove_file(&new).expect("it exists");
        setxattr(&image, ACL, &list, XattrFlags::empty()).expect("as that of the directory");
        create_like(&new, &image).expect("it is new");
        assert_eq!(access_list(&new), Ok(Some(list)));
        assert_eq!(mode(&new), 0o660);
    }
}
