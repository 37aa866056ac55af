//! Limits of control groups on disks that appear (`--device any`).
//!
//! ```text
//!   kernel: uevent "add@…", SUBSYSTEM=block ──► flag ──► next turn of the watch: limits on new disks
//! ```
//!
//! The kernel announces each block device (netlink(7), NETLINK_KOBJECT_UEVENT), so nothing is
//! polled. The flag is set at the start too: a disk may have appeared before. Limits are set on a
//! separate thread, because systemd may answer slowly, and reach the watch by the limits file.
//! Nothing runs while no control group has such limits.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use nix::{
    errno::Errno,
    sys::socket::{self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType},
};

use crate::{
    hierarchy::CgroupHierarchy,
    limit::{any_device, limits_file::LimitsFile},
};

/// Multicast group of the kernel's own events; the other one is udev's (lib/kobject_uevent.c).
const KERNEL_EVENTS: u32 = 1;
/// Longest event: the kernel's UEVENT_BUFFER_SIZE is 2048, with the header of the path.
const MAX_EVENT_BYTES: usize = 8 << 10;

/// Listens for disks while there is a limit for those that appear.
#[derive(Debug)]
pub(super) struct AppearingDisks {
    /// Opened at once, because the sandbox of a daemon denies it later; `None` once the thread has
    /// it. The kernel drops events that do not fit.
    socket: Option<Result<OwnedFd, Errno>>,
    has_appeared: Arc<AtomicBool>,
    /// Sets limits on new disks.
    extending: Option<thread::JoinHandle<()>>,
}

impl AppearingDisks {
    pub(super) fn new() -> Self {
        Self { socket: Some(open_socket()), has_appeared: Arc::new(AtomicBool::new(true)), extending: None }
    }

    /// Starts setting limits on new disks if the kernel has announced some since the last call.
    pub(super) fn extend_if_changed(
        &mut self,
        hierarchy: &CgroupHierarchy,
        file: &Path,
        limits_file: &LimitsFile,
    ) {
        if limits_file.any_device.is_empty() {
            return;
        }
        if let Some(socket) = self.socket.take() {
            self.listen(socket);
        }
        // Events meanwhile are seen in a later turn.
        if self.extending.as_ref().is_some_and(|extending| !extending.is_finished())
            || !self.has_appeared.swap(false, Ordering::AcqRel)
        {
            return;
        }
        let (hierarchy, file) = (hierarchy.clone(), file.to_owned());
        let extend = move || match any_device::extend(&hierarchy, &file) {
            Ok(0) => {}
            Ok(limits) => tracing::info!(limits, "disks have appeared, and are limited"),
            Err(error) => tracing::warn!("limits on disks that appear: {error:#}"),
        };
        match thread::Builder::new().name("appearing-disks".to_owned()).spawn(extend) {
            Ok(extending) => self.extending = Some(extending),
            Err(error) => {
                tracing::warn!("limits on disks that appear: no thread can be started: {error}");
                // Retried in the next turn.
                self.has_appeared.store(true, Ordering::Release);
            }
        }
    }

    /// Waits for the thread that sets limits.
    #[cfg(test)]
    pub(super) fn finish(&mut self) {
        self.extending.take().expect("disks to limit").join().expect("no panic");
    }

    #[cfg(test)]
    pub(super) fn announce(&self) {
        self.has_appeared.store(true, Ordering::Release);
    }

    /// Starts the thread that receives events. Without them, only the disks of this moment get
    /// limits, which is logged.
    fn listen(&self, socket: Result<OwnedFd, Errno>) {
        let announced = Arc::clone(&self.has_appeared);
        let started = socket.map_err(io::Error::from).and_then(|socket| {
            let receive = move || receive(&socket, &announced);
            thread::Builder::new().name("block-events".to_owned()).spawn(receive)
        });
        if let Err(error) = started {
            tracing::warn!(
                "the kernel's events of block devices cannot be received: {error}; disks that appear get no \
                 limit until the watch is restarted"
            );
        }
    }
}

fn open_socket() -> Result<OwnedFd, Errno> {
    let socket = socket::socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkKObjectUEvent,
    )?;
    socket::bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_EVENTS))?;
    Ok(socket)
}

/// Sets the flag for each event of a disk, until the process ends.
fn receive(socket: &OwnedFd, announced: &AtomicBool) {
    let mut buffer = vec![0; MAX_EVENT_BYTES];
    loop {
        match socket::recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            Ok(length) if is_new_disk(&buffer[..length]) => announced.store(true, Ordering::Release),
            Ok(_) | Err(Errno::EINTR) => {}
            // The kernel has dropped events: some may have been of disks.
            Err(Errno::ENOBUFS) => announced.store(true, Ordering::Release),
            Err(error) => {
                tracing::warn!("the kernel's events of block devices end: {error}");
                return;
            }
        }
    }
}

/// True for an event of a block device that appears, or gets a size: a loop device exists before
/// its file. Events are a line `ACTION@PATH` and lines `KEY=VALUE`, each ended by a zero byte.
fn is_new_disk(event: &[u8]) -> bool {
    let has = |line: &[u8]| event.split(|byte| *byte == 0).any(|known| known == line);
    has(b"SUBSYSTEM=block") && (has(b"ACTION=add") || has(b"ACTION=change"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_distinguished_from_other_events() {
        let event = |lines: &[&str]| lines.join("\0").into_bytes();
        let path = "add@/devices/virtual/block/loop0";
        assert!(is_new_disk(&event(&[path, "ACTION=add", "DEVPATH=/x", "SUBSYSTEM=block", "MAJOR=7", ""])));
        assert!(is_new_disk(&event(&[path, "ACTION=change", "SUBSYSTEM=block"])));
        assert!(!is_new_disk(&event(&[path, "ACTION=remove", "SUBSYSTEM=block"])));
        assert!(!is_new_disk(&event(&[path, "ACTION=add", "SUBSYSTEM=net"])));
        assert!(!is_new_disk(b"") && !is_new_disk(&[0xff; 64]));
    }
}
