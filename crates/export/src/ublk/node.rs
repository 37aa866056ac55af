//! Devices of the driver: list, create, take over, and remove them.
//!
//! ```text
//!            add, set_params               start
//!   (none) ────────────────► made (Dead) ────────► Live ── its process ends ─► Quiesced
//!      ▲                        │                   │ ▲                            │
//!      └──────── delete ────────┴────── stop ───────┘ └───── recovery, by mark ────┘
//! ```
//!
//! An orphaned device (Quiesced) may have a guard that removes it later, so the guard is ended
//! before anything is done with the device ([`guard`]).
//!
//! An orphaned device with the mark of the disk's image is taken over, with the queues and
//! parameters that it was made with. One that was made and never started is removed: its maker was
//! killed in between. No other process serves the image, because it is locked.
//!
//! All functions block. Never changes a device that weir has not made, except by [`remove`].

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::unistd::{AccessFlags, access};
use reactor::{
    memory::OutOfBudget,
    ublk::{self, UblkControl, UblkInfo, UblkParams, UblkState, feature},
};

pub use super::devices::path;
use super::{
    UblkExport,
    devices::{POLL_INTERVAL, begin_removal, numbers},
    guard::{self, UblkGuard},
    mark,
    request::SECTOR_BYTES,
};

/// Time for the kernel to notice the end of a process: before 6.7 it checks every five seconds.
const EXIT_NOTICE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for udev to change the owner of a new device.
const UDEV_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why there is no device. Nothing has changed, unless the variant's description says
/// otherwise.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The driver is not in the kernel, or not loaded.
    #[error(
        "this kernel has no ublk driver (`modprobe ublk_drv`; where there is no such module, the \
         kernel lacks CONFIG_BLK_DEV_UBLK)"
    )]
    NoDriver,
    /// This user may not use the driver.
    #[error(
        "this user may not use the ublk driver: {0} (start weir as root, or with the key \
         unprivileged where /dev/ublk-control is this user's)"
    )]
    NotPermitted(io::Error),
    /// An unprivileged user has made a device, and was not given it.
    #[error(
        "{}: udev did not give it to this user within {} s (add a udev rule for unprivileged ublk \
         devices; root can remove this one: weir detach /dev/ublkb{number})", ublk::UblkQueue::path(*number).display(), UDEV_TIMEOUT.as_secs()
    )]
    NotGiven {
        /// N.
        number: u32,
    },
    /// A device of this number exists.
    #[error("/dev/ublkb{number}: there is a device of this number already{} (choose another \
             number, or omit it)", of_process(*process))]
    Taken {
        /// N.
        number: u32,
        /// Its server, if there is one.
        process: Option<u32>,
    },
    /// `ublks_max` is reached.
    #[error(
        "the ublk driver has as many devices as it may (remove some, or write a larger number to \
         /sys/module/ublk_drv/parameters/ublks_max)"
    )]
    TooMany,
    /// Another process has removed the device.
    #[error("the device to be recovered no longer exists (restart weir, which creates one)")]
    Gone,
    /// The memory budget has no room for the memory that the driver needs.
    #[error("{0}")]
    Memory(#[from] OutOfBudget),
    /// The kernel has failed.
    #[error("{what}: {error}")]
    Kernel {
        /// The operation.
        what: String,
        /// Its error.
        error: io::Error,
    },
}

fn of_process(process: Option<u32>) -> String {
    process.map_or(String::new(), |process| format!(", served by process {process}"))
}

/// Adds the purpose of an operation to its error.
pub(super) fn kernel<T>(operation: impl Into<String>, result: io::Result<T>) -> Result<T, UblkError> {
    result.map_err(|error| UblkError::Kernel { what: operation.into(), error })
}

/// A device of the driver, made by any program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkDeviceInfo {
    /// N of `/dev/ublkbN`.
    pub number: u32,
    /// State of the device.
    pub state: UblkState,
    /// Process ID of its server.
    pub process: Option<u32>,
    /// True if weir made it.
    pub is_ours: bool,
}

/// All devices that this user may examine, by number; empty without the driver.
///
/// # Errors
/// [`UblkError::NotPermitted`].
pub fn list() -> Result<Vec<UblkDeviceInfo>, UblkError> {
    let mut control = match open() {
        Ok(control) => control,
        Err(UblkError::NoDriver) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let infos = numbers().into_iter().filter_map(|number| control.info(number).ok());
    Ok(infos.map(|info| found(&info)).collect())
}

/// Removes an orphaned device; its pending requests fail.
///
/// # Errors
/// [`UblkError::Taken`]: a process serves it. Any error of the kernel.
pub fn remove(number: u32) -> Result<(), UblkError> {
    let mut control = open()?;
    let operation = format!("/dev/ublkb{number}: not removed");
    let info = kernel(operation.clone(), control.info(number))?;
    if let Some(process) = server_of(&info) {
        return Err(UblkError::Taken { number, process: Some(process) });
    }
    kernel(operation.clone(), guard::dismiss(&control, number))?;
    kernel(operation, control.delete(&info))
}

fn found(info: &UblkInfo) -> UblkDeviceInfo {
    UblkDeviceInfo {
        number: info.number,
        state: info.state(),
        process: server_of(info),
        is_ours: mark::is_ours(info.user_data),
    }
}

/// Process ID of a device's server, if that is alive.
fn server_of(info: &UblkInfo) -> Option<u32> {
    let process = u32::try_from(info.process).ok().filter(|process| *process != 0)?;
    (info.state() == UblkState::Live && Path::new(&format!("/proc/{process}")).exists()).then_some(process)
}

fn open() -> Result<UblkControl, UblkError> {
    UblkControl::open().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => UblkError::NoDriver,
        Some(libc::EACCES | libc::EPERM) => UblkError::NotPermitted(error),
        _ => UblkError::Kernel { what: "/dev/ublk-control".into(), error },
    })
}

/// Begins to take a device over; false if the kernel has not yet cleaned up its last server.
fn begin_recovery(
    control: &mut UblkControl,
    info: &UblkInfo,
    operation: impl Fn() -> String,
) -> Result<bool, UblkError> {
    let Err(error) = control.start_recovery(info) else { return Ok(true) };
    match error.raw_os_error() {
        Some(libc::EBUSY) => Ok(false),
        // Already begun, by a process that was killed before it fetched a request.
        Some(libc::EINVAL) => Ok(true),
        _ => Err(UblkError::Kernel { what: operation(), error }),
    }
}

/// Waits until udev has given the new device to this user; until then the driver rejects every
/// command.
fn wait_for_owner(number: u32) -> Result<(), UblkError> {
    let (path, end) = (ublk::UblkQueue::path(number), Instant::now() + UDEV_TIMEOUT);
    while access(&path, AccessFlags::R_OK | AccessFlags::W_OK).is_err() {
        if Instant::now() > end {
            return Err(UblkError::NotGiven { number });
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// True if a device of this disk can be zero-copy.
fn may_be_zero_copy(control: &UblkControl, export: &UblkExport) -> bool {
    let UblkExport { offer, disk, .. } = export;
    // Zero copy needs root: the kernel does not let other users reference foreign pages.
    let is_requested = offer.zero_copy && !offer.unprivileged && disk.supports_registered();
    is_requested && control.features() & feature::ZERO_COPY == feature::ZERO_COPY
}

/// Numbers of devices that this process serves or is about to serve.
static CLAIMED: LazyLock<Mutex<BTreeSet<u32>>> = LazyLock::new(Mutex::default);

fn claimed() -> MutexGuard<'static, BTreeSet<u32>> {
    // A set stays consistent after a panic.
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device of this process, made or being taken over, from which requests can be fetched.
#[derive(Debug)]
pub(super) struct UblkNode {
    pub(super) info: UblkInfo,
    pub(super) params: UblkParams,
    pub(super) is_taken_over: bool,
    /// Becomes active on drop.
    _guard: Option<UblkGuard>,
}

impl Drop for UblkNode {
    fn drop(&mut self) {
        claimed().remove(&self.info.number);
    }
}

impl UblkNode {
    /// Takes over the orphaned device of this disk, or makes one.
    pub(super) fn open(export: &UblkExport) -> Result<Self, UblkError> {
        let mut control = open()?;
        let mark = mark::mark_of_disk(&export.disk);
        if let Some(mark) = mark
            && let Some(node) = Self::take_over(&mut control, export, mark, false)?
        {
            return Ok(node);
        }
        Self::make(&mut control, export, mark)
    }

    /// Takes over the device of this disk from a process that is about to end.
    pub(super) fn recover(export: &UblkExport) -> Result<Self, UblkError> {
        let mark = mark::mark_of_disk(&export.disk).ok_or(UblkError::Gone)?;
        Self::take_over(&mut open()?, export, mark, true)?.ok_or(UblkError::Gone)
    }

    fn make(control: &mut UblkControl, export: &UblkExport, mark: Option<u64>) -> Result<Self, UblkError> {
        let offer = &export.offer;
        let recovery = feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE;
        let features = if mark.is_some() { recovery } else { 0 } | feature::UPDATE_SIZE;
        // Requested features are limited to those of this kernel, except UNPRIVILEGED, which must
        // not be dropped silently.
        let unprivileged = if offer.unprivileged { feature::UNPRIVILEGED } else { 0 };
        let mut info = UblkInfo::new(offer.queues, offer.depth, offer.max_request_bytes);
        info.features = features & control.features() | unprivileged;
        info.user_data = mark.unwrap_or(mark::mark_without_image());
        // Held until the number is inserted, so that no other task takes the new device for an
        // orphan.
        let mut claimed = claimed();
        let created = match may_be_zero_copy(control, export) {
            true => Self::add_zero_copy(control, export, info, mark),
            false => control.add(offer.number, info),
        };
        let info = created.map_err(|error| match (error.raw_os_error(), offer.number) {
            (Some(libc::EEXIST), Some(number)) => {
                let process = control.info(number).ok().and_then(|info| server_of(&info));
                UblkError::Taken { number, process }
            }
            (Some(libc::EACCES), _) => UblkError::TooMany,
            (Some(libc::EPERM), _) => UblkError::NotPermitted(error),
            _ => UblkError::Kernel { what: "cannot create a ublk device".into(), error },
        })?;
        claimed.insert(info.number);
        drop(claimed);
        let params = offer.params(export.disk.size_bytes());
        let mut node = Self { info, params, is_taken_over: false, _guard: None };
        let guard = guard::replace(control, &info, offer.dead_timeout_s);
        node._guard = kernel(format!("{}: its guard", node.path().display()), guard).inspect_err(|_| {
            // Removed, because it cannot be used.
            let _ = control.delete(&info);
        })?;
        if info.features & feature::UNPRIVILEGED != 0 {
            wait_for_owner(info.number)?;
        }
        if let Err(error) = control.set_params(&info, params) {
            // Removed, because it cannot be used.
            let _ = control.delete(&info);
            return Err(UblkError::Kernel { what: format!("/dev/ublkb{}: its limits", info.number), error });
        }
        Ok(node)
    }

    /// Makes a zero-copy device, or one according to `plain` if the kernel refuses that.
    fn add_zero_copy(
        control: &mut UblkControl,
        export: &UblkExport,
        plain: UblkInfo,
        mark: Option<u64>,
    ) -> io::Result<UblkInfo> {
        let mut info = plain;
        info.features |= feature::ZERO_COPY;
        info.user_data = mark.map_or(mark::mark_without_image(), mark::zero_copy);
        control.add(export.offer.number, info).or_else(|error| {
            let created = control.add(export.offer.number, plain)?;
            tracing::warn!(
                export = %export.id, %error,
                "the kernel refuses a zero-copy device, so data is copied"
            );
            Ok(created)
        })
    }

    fn take_over(
        control: &mut UblkControl,
        export: &UblkExport,
        mark: u64,
        is_server_exiting: bool,
    ) -> Result<Option<Self>, UblkError> {
        for number in numbers() {
            // Claimed first, so that two exports of this process never take over one device.
            let is_requested = export.offer.number.is_none_or(|requested| requested == number);
            if !is_requested || !claimed().insert(number) {
                continue;
            }
            match Self::take_over_orphaned(control, export, number, mark, is_server_exiting) {
                Ok(None) => claimed().remove(&number),
                Ok(node) => return Ok(node),
                Err(error) => {
                    claimed().remove(&number);
                    return Err(error);
                }
            };
        }
        Ok(None)
    }

    /// The device of this number, if it is orphaned and has the disk's mark. If its server is about
    /// to end, waits for that end.
    fn take_over_orphaned(
        control: &mut UblkControl,
        export: &UblkExport,
        number: u32,
        mark: u64,
        is_server_exiting: bool,
    ) -> Result<Option<Self>, UblkError> {
        let operation = || format!("cannot take over /dev/ublkb{number}");
        let find_info = |control: &mut UblkControl| {
            let info = control.info(number).ok().filter(|_| numbers().contains(&number))?;
            let is_marked = [mark, mark::zero_copy(mark)].contains(&info.user_data);
            // A device with a live server is not taken over, unless the caller knows that the
            // server is ending.
            (is_marked && (is_server_exiting || server_of(&info).is_none())).then_some(info)
        };
        let Some(info) = find_info(control) else { return Ok(None) };
        // From here on only this process may remove it.
        let guard = kernel(operation(), guard::replace(control, &info, export.offer.dead_timeout_s))?;
        let end = Instant::now() + EXIT_NOTICE_TIMEOUT;
        while let Some(info) = find_info(control) {
            match info.state() {
                // Its server has ended, and the kernel has not noticed yet.
                UblkState::Live => {}
                UblkState::Quiesced if begin_recovery(control, &info, operation)? => {
                    let params = kernel(operation(), control.params(&info))?;
                    return Ok(Some(Self { info, params, is_taken_over: true, _guard: guard }));
                }
                UblkState::Quiesced => {}
                UblkState::Dead | UblkState::FailIo => {
                    kernel(operation(), begin_removal(info))?;
                    return Ok(None);
                }
            }
            if Instant::now() > end {
                let error = io::Error::from_raw_os_error(libc::EBUSY);
                return Err(UblkError::Kernel { what: operation(), error });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(None)
    }

    pub(super) fn path(&self) -> PathBuf {
        path(self.info.number)
    }

    /// Starts or resumes the device. Every tag must have been fetched.
    pub(super) fn start(&self) -> Result<(), UblkError> {
        let mut control = open()?;
        let result = match self.is_taken_over {
            true => control.end_recovery(&self.info),
            false => control.start(&self.info),
        };
        kernel(format!("{}: not started", self.path().display()), result)
    }

    /// Writes back the page cache of the device, then stops it.
    pub(super) fn stop(&self) -> Result<(), UblkError> {
        // With recovery enabled, the kernel fails writeback that happens while it stops the device.
        if let Ok(device) = fs::File::open(self.path())
            && let Err(error) = device.sync_all()
        {
            tracing::warn!(device = %self.path().display(), %error, "cached writes of the device are lost");
        }
        kernel(format!("{}: not stopped", self.path().display()), open()?.stop(&self.info))
    }

    /// Removes the device; this process must not have it open.
    pub(super) fn delete(&self) -> Result<(), UblkError> {
        kernel(format!("{}: not removed", self.path().display()), open()?.delete(&self.info))
    }

    /// True if the driver can resize a live device.
    pub(super) fn can_resize(&self) -> bool {
        self.info.features & feature::UPDATE_SIZE != 0
    }

    pub(super) fn resize(&self, size_bytes: u64) -> Result<(), UblkError> {
        let resized = open()?.update_size(&self.info, size_bytes / SECTOR_BYTES);
        kernel(format!("{}: not resized", self.path().display()), resized)
    }
}
