//! Images as mounted file systems: what `weir attach` and `weir detach` do, as processes of their
//! own.
//!
//! As processes, because a kernel that does not answer then holds up a child that can be left, and
//! because what serves the device must outlive the plugin.
//!
//! Whether something is mounted is asked of the kernel each time, and never remembered: the plugin
//! may have been away, and so may the mount.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;

use crate::program;

/// Docker waits two minutes for a mount.
const TIME: Duration = Duration::from_secs(100);

/// How an image gets to where a container finds it.
pub(crate) trait Devices: Send + Sync {
    /// Mounts the file system in `image` at the directory `at`, with these options of `weir attach`.
    fn attach(&self, image: &Path, words: &[String], at: &Path) -> anyhow::Result<()>;
    /// Undoes it; the image is free when it returns.
    fn detach(&self, at: &Path) -> anyhow::Result<()>;
    /// Whether something is mounted there.
    fn is_mounted(&self, at: &Path) -> anyhow::Result<bool>;
}

/// By the program itself.
pub(crate) struct Weir {
    pub(crate) program: PathBuf,
    /// The control socket of the daemon to attach through, where one was named.
    pub(crate) qmp: Option<String>,
}

impl Devices for Weir {
    fn attach(&self, image: &Path, words: &[String], at: &Path) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command.arg("attach").arg(image).arg("--mount").arg(at).args(words);
        if let Some(qmp) = &self.qmp {
            command.args(["--qmp", qmp]);
        }
        program::run(&mut command, TIME)?;
        // Of a new ext file system. Databases, and Docker where an image has files for the volume,
        // want it empty; e2fsck(8) makes the directory again when it needs one.
        let _ = fs::remove_dir(at.join("lost+found"));
        Ok(())
    }

    fn detach(&self, at: &Path) -> anyhow::Result<()> {
        program::run(Command::new(&self.program).arg("detach").arg(at), TIME)
    }

    fn is_mounted(&self, at: &Path) -> anyhow::Result<bool> {
        const MOUNTS: &str = "/proc/self/mountinfo";
        let mounts = fs::read(MOUNTS).with_context(|| MOUNTS.to_owned())?;
        Ok(mounts.split(|&byte| byte == b'\n').filter_map(mount_point).any(|point| point == at))
    }
}

/// Of a line of proc_pid_mountinfo(5): the fifth field, in which blanks and the like are octal.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let field = line.split(|&byte| byte == b' ').nth(4)?;
    let (mut bytes, mut rest) = (Vec::with_capacity(field.len()), field);
    while let Some((&byte, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|_| byte == b'\\');
        let code = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(byte));
        rest = if code.is_some() { &behind[3..] } else { behind };
    }
    Some(OsString::from_vec(bytes).into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn mount_points_are_read_as_the_kernel_writes_them() {
        let read = |line: &str| mount_point(line.as_bytes()).map(|path| path.as_os_str().as_bytes().to_vec());
        let line = |point: &str| format!("36 35 98:0 / {point} rw,noatime master:1 - ext4 /dev/ublkb0 rw");
        assert_eq!(read(&line("/a/mount")).unwrap(), b"/a/mount");
        assert_eq!(read(&line(r"/a\040b\134c\012")).unwrap(), b"/a b\\c\n");
        assert_eq!(read(&line(r"/a\0")).unwrap(), br"/a\0", "no code, and nothing of the kernel's");
        assert_eq!(read("36 35"), None);
        assert_eq!(read(""), None);
    }

    #[test]
    fn what_is_mounted_is_the_kernels_to_say() {
        let weir = Weir { program: "/nonexistent".into(), qmp: None };
        assert!(weir.is_mounted(Path::new("/proc")).unwrap());
        assert!(!weir.is_mounted(Path::new("/proc/self")).unwrap());
    }
}
