//! Which devices the driver has, and the end of one: what their makers and their guards both need.

use std::{collections::BTreeSet, fs, io, path::PathBuf, sync::mpsc, thread, time::Duration};

use reactor::ublk::{Control, Info};

/// The driver tells nobody, so it is asked again: users of the device wait meanwhile.
pub(super) const PAUSE: Duration = Duration::from_millis(2);

/// The block device of this number.
pub fn path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// The numbers of all devices, but for those that go with their last user.
pub(super) fn numbers() -> BTreeSet<u32> {
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect()
}

/// Removes a device, and waits until nobody can find it any more; not until its last user has
/// closed it.
pub(super) fn begin_removal(device: Info) -> io::Result<()> {
    let (done, removed) = mpsc::channel();
    let delete = move || Control::open().and_then(|mut control| control.delete(&device));
    // Nobody listens where it has a user.
    thread::Builder::new().name("removal".into()).spawn(move || drop(done.send(delete())))?;
    loop {
        match removed.recv_timeout(PAUSE) {
            Ok(result) => return result,
            Err(_) if !numbers().contains(&device.number) => return Ok(()),
            Err(_) => {}
        }
    }
}
