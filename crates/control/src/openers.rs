//! Openers of a device of this host: mount points, devices on top of it, processes that have it
//! open.
//!
//! `detach` refuses to remove a device in use, and names its openers. Reads only /proc and /sys and
//! never opens the device: an access to a file that this process serves over FUSE would deadlock.

use std::{
    collections::HashSet,
    fmt, fs, io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
};

use nix::libc;
use reactor::sanitize::sanitize;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

/// Maximum number of processes in a message.
const MAX_NAMED_PROCESSES: usize = 5;

/// Openers of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceOpeners {
    /// Mount points of the device and its partitions.
    pub mounts: Vec<PathBuf>,
    /// Devices on top of it, such as `dm-0` and loop devices.
    pub holders: Vec<String>,
    /// Processes that have it open; filled by [`DeviceOpeners::with_processes`].
    pub processes: Vec<OpenerProcess>,
    /// True if the kernel has claimed it; set by [`DeviceOpeners::with_claims`].
    pub claimed: bool,
    nodes: Vec<OpenedDevice>,
    root: PathBuf,
    file: Option<PathBuf>,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenerProcess {
    /// Process id.
    pub pid: u32,
    /// Name, as in /proc.
    pub name: String,
}

/// Form `weir (12)`.
impl fmt::Display for OpenerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.pid)
    }
}

/// Block device, with its name and `MAJOR:MINOR`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct OpenedDevice {
    name: String,
    number: String,
}

impl DeviceOpeners {
    /// Openers of a block device, given by its node in /dev, or of a file. Without processes.
    pub fn of_device(device: &Path) -> Self {
        Self::of_device_in(Path::new("/"), device)
    }

    /// Users of a mounted file system that prevent its unmounting: mounts below its directory, and
    /// other processes that have a working directory, an executable or an open file in it.
    pub fn of_directory(directory: &Path) -> Self {
        let mut users = Self::of_directory_in(Path::new("/"), directory);
        users.processes.retain(|process| process.pid != std::process::id());
        users
    }

    fn of_directory_in(root: &Path, directory: &Path) -> Self {
        let mut users = Self { root: root.to_owned(), ..Self::default() };
        let mounts = fs::read(root.join("proc/self/mountinfo")).unwrap_or_default();
        let point = |line: &[u8]| line.split(|byte| *byte == b' ').nth(4).map(unescaped);
        users.mounts = mounts.split(|byte| *byte == b'\n').filter_map(point).collect();
        users.mounts.retain(|point| point != directory && point.starts_with(directory));
        users.processes = users.processes_with(|process| {
            let is_inside = |link: PathBuf| fs::read_link(link).is_ok_and(|path| path.starts_with(directory));
            process_links(process).any(is_inside)
        });
        users
    }

    /// Processes for whose directory in /proc the condition holds.
    fn processes_with(&self, holds: impl Fn(&Path) -> bool) -> Vec<OpenerProcess> {
        let process = |directory: String| {
            let pid = directory.parse().ok()?;
            let process = self.root.join("proc").join(directory);
            // Processes may end meanwhile, and those of other users may be unreadable; both are
            // skipped.
            if !holds(&process) {
                return None;
            }
            Some(OpenerProcess { pid, name: process_name(&process) })
        };
        entry_names(&self.root.join("proc")).into_iter().filter_map(process).collect()
    }

    /// True if the devices on top of it have not changed. A loop device that is released may be
    /// attached to another file at once, whose mounts do not belong to this device.
    pub fn are_unchanged(&self, device: &Path) -> bool {
        Self::read(&self.root, device).nodes == self.nodes
    }

    /// As [`DeviceOpeners::of_device`], with /proc and /sys below `root`.
    fn of_device_in(root: &Path, device: &Path) -> Self {
        loop {
            let users = Self::read(root, device);
            // Read again until two reads agree: devices may come and go between the files of /proc
            // and /sys.
            if users.are_unchanged(device) {
                return users;
            }
        }
    }

    fn read(root: &Path, device: &Path) -> Self {
        let mut users = Self { root: root.to_owned(), ..Self::default() };
        let name = device.strip_prefix("/dev").ok().and_then(Path::to_str);
        match name.filter(|name| users.sysfs_path(name).is_dir()) {
            Some(name) => users.add_node(name),
            None => {
                users.add_loops_over(device);
                users.file = Some(device.to_owned());
            }
        }
        // A worklist: loop devices found here are examined in turn.
        let mut next = 0;
        while let Some(name) = users.nodes.get(next).map(|node| node.name.clone()) {
            // Loop devices open their file without claiming it, so `holders` does not list them.
            users.add_loops_over(&Path::new("/dev").join(&name));
            let above = entry_names(&users.sysfs_path(&name).join("holders"));
            users.holders.extend(above);
            next += 1;
        }
        users.mounts = users.mounts_in(&root.join("proc/self/mountinfo"));
        users
    }

    /// Adds other processes that have it open, and mounts in their mount namespaces. Slow on a host
    /// with many processes. Excludes this process: it may serve the image file itself, or have
    /// inherited the device.
    #[must_use]
    pub fn with_processes(mut self) -> Self {
        let mut paths: Vec<_> =
            self.nodes.iter().map(|node| PathBuf::from("/dev").join(&node.name)).collect();
        paths.extend(self.file.clone());
        let mut namespaces = HashSet::new();
        for directory in entry_names(&self.root.join("proc")) {
            let Ok(pid) = directory.parse::<u32>() else { continue };
            let process = self.root.join("proc").join(&directory);
            // Processes may end meanwhile, and those of other users may be unreadable; both are
            // skipped.
            let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
            let mut open = open.map(|entry| entry.path());
            if pid != std::process::id() && open.any(|open| self.is_open_of(&open, &paths)) {
                self.processes.push(OpenerProcess { pid, name: process_name(&process) });
            }
            // Each mount namespace is read once, by the first process in it.
            if fs::read_link(process.join("ns/mnt")).is_ok_and(|namespace| namespaces.insert(namespace)) {
                for mount in self.mounts_in(&process.join("mountinfo")) {
                    if !self.mounts.contains(&mount) {
                        self.mounts.push(mount);
                    }
                }
            }
        }
        self
    }

    /// True if an open file is one of these paths, or one of the devices by another node, such as a
    /// node in a container.
    fn is_open_of(&self, open: &Path, paths: &[PathBuf]) -> bool {
        let Ok(path) = fs::read_link(open) else { return false };
        // Pipes and sockets have links such as `pipe:[1]`.
        if !path.is_absolute() || paths.contains(&path) {
            return path.is_absolute();
        }
        // STATX_DONT_SYNC: sends no request to the server of the file system.
        let known = statx(CWD, open, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        known.is_ok_and(|known| {
            let number = format!("{}:{}", known.stx_rdev_major, known.stx_rdev_minor);
            FileType::from_raw_mode(known.stx_mode.into()) == FileType::BlockDevice
                && self.nodes.iter().any(|node| node.number == number)
        })
    }

    /// Checks whether the kernel has claimed a block device: a file system keeps writing to it for
    /// a while after its last mount point has disappeared. Opens the device with O_EXCL, which its
    /// server must be able to answer; never opens a file.
    #[must_use]
    pub fn with_claims(mut self) -> Self {
        let is_claimed = |node: &OpenedDevice| {
            let path = self.root.join("dev").join(&node.name);
            // O_EXCL without O_CREAT on a block device fails with EBUSY if it is claimed (open(2)).
            let open = fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
            open.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
        };
        self.claimed = self.nodes.iter().any(is_claimed);
        self
    }

    /// Adds processes that have a working directory, an executable or an open file in a file system
    /// on it. After a lazy unmount no mount table lists the file system. Does not detect file
    /// systems on several devices, which have a device number of their own.
    #[must_use]
    pub fn with_file_system_users(mut self) -> Self {
        let is_inside = |link: PathBuf| {
            // STATX_DONT_SYNC: sends no request to the server of the file system.
            let known = statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
            known.is_ok_and(|known| {
                let number = format!("{}:{}", known.stx_dev_major, known.stx_dev_minor);
                self.nodes.iter().any(|node| node.number == number)
            })
        };
        let processes = self.processes_with(|process| process_links(process).any(is_inside));
        self.processes.extend(processes);
        self.processes.sort_by_key(|process| process.pid);
        self.processes.dedup();
        self
    }

    /// True if the device has no users.
    pub fn is_empty(&self) -> bool {
        !self.claimed && self.is_only_claimed()
    }

    /// True if the device has no users except possibly a claim of the kernel.
    pub fn is_only_claimed(&self) -> bool {
        self.mounts.is_empty() && self.holders.is_empty() && self.processes.is_empty()
    }

    fn sysfs_path(&self, name: &str) -> PathBuf {
        self.root.join("sys/class/block").join(name)
    }

    /// Adds a device and its partitions.
    fn add_node(&mut self, name: &str) {
        let directory = self.sysfs_path(name);
        let inside = entry_names(&directory);
        let partitions = inside.into_iter().filter(|part| directory.join(part).join("partition").is_file());
        for name in [name.to_owned()].into_iter().chain(partitions) {
            let number = fs::read_to_string(self.sysfs_path(&name).join("dev")).unwrap_or_default();
            self.nodes.push(OpenedDevice { name, number: number.trim_end().to_owned() });
        }
    }

    fn add_loops_over(&mut self, file: &Path) {
        for name in self.loops_over(file) {
            if self.nodes.iter().all(|node| node.name != name) {
                self.add_node(&name);
                self.holders.push(name);
            }
        }
    }

    /// Names of the loop devices whose backing file this is.
    pub fn loops(file: &Path) -> Vec<String> {
        Self { root: PathBuf::from("/"), ..Self::default() }.loops_over(file)
    }

    fn loops_over(&self, file: &Path) -> Vec<String> {
        let is_backed_by = |name: &String| {
            let backing = fs::read(self.sysfs_path(name).join("loop/backing_file")).unwrap_or_default();
            backing.strip_suffix(b"\n").unwrap_or(&backing) == file.as_os_str().as_bytes()
        };
        let mut names = entry_names(&self.root.join("sys/class/block"));
        names.retain(|name| name.starts_with("loop") && is_backed_by(name));
        names
    }

    /// proc_pid_mountinfo(5): number, parent, MAJOR:MINOR, root, mount point, … - type, source.
    fn mounts_in(&self, file: &Path) -> Vec<PathBuf> {
        let text = fs::read(file).unwrap_or_default();
        let mount = |line: &[u8]| {
            let mut fields = line.split(|byte| *byte == b' ');
            let number = fields.nth(2)?;
            let point = fields.nth(1)?;
            // Optional fields end with a single hyphen.
            let source = fields.skip_while(|field| *field != b"-").nth(2)?;
            let is_of = |node: &OpenedDevice| {
                // A file system on several devices has a separate device number; compare the
                // source.
                node.number.as_bytes() == number
                    || source.strip_prefix(b"/dev/") == Some(node.name.as_bytes())
            };
            self.nodes.iter().any(is_of).then(|| unescaped(point))
        };
        text.split(|byte| *byte == b'\n').filter_map(mount).collect()
    }
}

/// Name of a process, with control characters replaced: the process chose it.
fn process_name(process: &Path) -> String {
    let name = fs::read(process.join("comm")).unwrap_or_default();
    sanitize(&String::from_utf8_lossy(name.trim_ascii_end()))
}

/// True if the directory is a mount point; the path must be absolute and free of links. Does not
/// access the mounted file system, which may not answer.
///
/// # Errors
/// Fails if /proc is not mounted.
pub fn is_mount_point(directory: &Path) -> io::Result<bool> {
    let mounts = fs::read("/proc/self/mountinfo")?;
    let point = |line: &[u8]| line.split(|byte| *byte == b' ').nth(4).map(unescaped);
    Ok(mounts.split(|byte| *byte == b'\n').filter_map(point).any(|point| point == directory))
}

/// True if a process is stopped by a signal (until `SIGCONT`) or by a debugger.
pub fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which may contain spaces: proc_pid_stat(5).
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with(['T', 't']))
}

/// Links in a process's directory in /proc: working directory, root, executable and open files.
fn process_links(process: &Path) -> impl Iterator<Item = PathBuf> {
    let links = ["cwd", "root", "exe"].map(|name| process.join(name));
    let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    links.into_iter().chain(open.map(|entry| entry.path()))
}

fn entry_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Decodes the octal escapes of mount tables, such as `\040` for a space.
fn unescaped(text: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let digits = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.filter(|_| first == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(std::ffi::OsString::from_vec(plain))
}

/// Form `mounted at /mnt; held by dm-0; open in dd (12)`.
impl fmt::Display for DeviceOpeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mounts: Vec<_> = self.mounts.iter().map(|point| point.display().to_string()).collect();
        let named = self.processes.iter().take(MAX_NAMED_PROCESSES);
        let mut open: Vec<_> = named.map(OpenerProcess::to_string).collect();
        if let Some(more @ 1..) = self.processes.len().checked_sub(MAX_NAMED_PROCESSES) {
            open.push(format!("{more} more"));
        }
        let uses = [("mounted at", mounts), ("held by", self.holders.clone()), ("open in", open)];
        let uses = uses.iter().filter(|(_, users)| !users.is_empty());
        let mut uses: Vec<_> = uses.map(|(how, users)| format!("{how} {}", users.join(", "))).collect();
        if self.claimed && uses.is_empty() {
            uses.push(
                "claimed by the kernel, such as a file system that is still being unmounted".to_owned(),
            );
        }
        f.write_str(&uses.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Host with a disk of two partitions, a loop device over a file, and two processes.
    fn host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = host.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (name, number) in [("ublkb0", "259:0"), ("ublkb0p1", "259:1"), ("loop3", "7:3")] {
            write(&format!("sys/class/block/{name}/dev"), &format!("{number}\n"));
        }
        write("sys/class/block/ublkb0/ublkb0p1/partition", "1\n");
        write("sys/class/block/ublkb0p1/holders/dm-0/dev", "");
        write("sys/class/block/loop3/loop/backing_file", "/run/a disk\n");
        write("sys/class/block/loop4/dev", "7:4\n");
        write("sys/class/block/loop4/loop/backing_file", "/dev/loop3\n");
        let mounts = "22 1 0:21 / /proc rw shared:1 - proc proc rw\n\
                      30 1 259:1 / /mnt/with\\040space rw - ext4 /dev/ublkb0p1 rw\n\
                      31 1 0:50 / /mnt/btrfs rw,noatime shared:2 - btrfs /dev/loop3 rw\n";
        write("proc/self/mountinfo", mounts);
        write("proc/12/comm", "dd\n");
        write("proc/12/mountinfo", "40 1 259:0 / /inside rw - xfs /dev/ublkb0 rw\n");
        for (link, to) in [("fd/0", "/dev/ublkb0"), ("fd/1", "/dev/null"), ("ns/mnt", "mnt:[1]")] {
            fs::create_dir_all(host.path().join("proc/12").join(link).parent().unwrap()).unwrap();
            symlink(to, host.path().join("proc/12").join(link)).unwrap();
        }
        host
    }

    #[test]
    fn partitions_count_as_uses_of_the_device() {
        let host = host();
        let users = DeviceOpeners::of_device_in(host.path(), Path::new("/dev/ublkb0"));
        assert_eq!(users.to_string(), "mounted at /mnt/with space; held by dm-0");
        let users = users.with_processes();
        assert_eq!(users.to_string(), "mounted at /mnt/with space, /inside; held by dm-0; open in dd (12)");
        assert!(!users.is_empty());
    }

    #[test]
    fn users_inside_a_directory_are_found() {
        let host = host();
        let process = host.path().join("proc/12");
        let users = || DeviceOpeners::of_directory_in(host.path(), Path::new("/mnt")).to_string();
        assert_eq!(users(), "mounted at /mnt/with space, /mnt/btrfs");
        let users = || DeviceOpeners::of_directory_in(host.path(), Path::new("/mnt/btrfs")).to_string();
        assert_eq!(users(), "");
        // A working directory prevents unmounting as an open file does.
        symlink("/mnt/btrfs/work", process.join("cwd")).unwrap();
        assert_eq!(users(), "open in dd (12)");
        fs::remove_file(process.join("cwd")).unwrap();
        symlink("/mnt/btrfs/file", process.join("fd/5")).unwrap();
        assert_eq!(users(), "open in dd (12)");
        assert_eq!(DeviceOpeners::of_directory_in(host.path(), Path::new("/mnt/btr")).to_string(), "");
    }

    #[test]
    fn file_system_users_are_found_by_device_number() {
        let host = host();
        // The device number of the directory that holds the model of the host.
        let number = nix::sys::stat::stat(host.path()).unwrap().st_dev;
        let number = format!("{}:{}", nix::sys::stat::major(number), nix::sys::stat::minor(number));
        fs::write(host.path().join("sys/class/block/loop4/dev"), number).unwrap();
        let users = |name: &str| {
            DeviceOpeners::of_device_in(host.path(), Path::new(name)).with_file_system_users().processes
        };
        assert_eq!(users("/dev/loop4"), []);
        symlink(host.path(), host.path().join("proc/12/cwd")).unwrap();
        assert_eq!(users("/dev/loop4"), [OpenerProcess { pid: 12, name: "dd".to_owned() }]);
        assert_eq!(users("/dev/ublkb0"), []);
    }

    #[test]
    fn kernel_claim_counts_as_use() {
        let claimed = DeviceOpeners { claimed: true, ..DeviceOpeners::default() };
        assert!(!claimed.is_empty() && claimed.is_only_claimed());
        assert!(claimed.to_string().starts_with("claimed by the kernel"));
        // The device node does not exist.
        assert!(!DeviceOpeners::of_device_in(host().path(), Path::new("/dev/ublkb0")).with_claims().claimed);
    }

    #[test]
    fn a_file_is_used_through_loop_devices() {
        let host = host();
        let users = DeviceOpeners::of_device_in(host.path(), Path::new("/run/a disk")).with_processes();
        assert_eq!(users.to_string(), "mounted at /mnt/btrfs; held by loop3, loop4");
        let nobody = DeviceOpeners::of_device_in(host.path(), Path::new("/run/another")).with_processes();
        assert!(nobody.is_empty() && nobody.to_string().is_empty());
    }

    #[test]
    fn a_device_is_used_through_loop_devices() {
        let host = host();
        let users = DeviceOpeners::of_device_in(host.path(), Path::new("/dev/loop3"));
        assert_eq!(users.to_string(), "mounted at /mnt/btrfs; held by loop4");
    }

    #[test]
    fn a_mount_point_is_known_by_its_path() {
        assert!(is_mount_point(Path::new("/proc")).unwrap());
        assert!(!is_mount_point(Path::new("/proc/self")).unwrap());
    }

    #[test]
    fn invalid_escapes_are_kept() {
        assert_eq!(unescaped(br"a\040b\\c\0").as_os_str().as_bytes(), br"a b\\c\0");
    }
}
