//! Existing devices of the driver, and the removal of one: shared by servers and guards.

use std::{collections::BTreeSet, fs, io, path::PathBuf, sync::mpsc, thread, time::Duration};

use reactor::ublk::{UblkControl, UblkInfo};

/// Interval of polling the driver, which sends no notification; openers of the device wait
/// meanwhile.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The block device of this number.
pub fn path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// Numbers of all devices, except those whose removal waits for their last opener.
pub(super) fn numbers() -> BTreeSet<u32> {
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect()
}

/// Removes a device; returns once it cannot be found any more, possibly before its last opener has
/// closed it.
pub(super) fn begin_removal(device: UblkInfo) -> io::Result<()> {
    let (done, removed) = mpsc::channel();
    let delete = move || UblkControl::open().and_then(|mut control| control.delete(&device));
    // Sending fails if this function has returned while an opener still delayed the removal.
    thread::Builder::new().name("removal".into()).spawn(move || drop(done.send(delete())))?;
    loop {
        match removed.recv_timeout(POLL_INTERVAL) {
            Ok(result) => return result,
            Err(_) if !numbers().contains(&device.number) => return Ok(()),
            Err(_) => {}
        }
    }
}
