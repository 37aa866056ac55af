//! Devices as such: which there are, making one or taking one over, and removing it.
//!
//! ```text
//!            add, set_params               start
//!   (none) ────────────────► made (Dead) ────────► Live ── its process ends ──► Waiting
//!      ▲                        │                   │ ▲                            │
//!      └──────── delete ────────┴────── stop ───────┘ └───── recovery, by mark ────┘
//! ```
//!
//! Of a device that waits, its guard may be there, which removes it some time later: it is ended
//! before anything is done with such a device ([`guard`]).
//!
//! A device that waits for a process and shows the image of the disk is taken over, with the queues
//! and limits that it was made with. One that was made for it and never started is removed: a
//! process was killed in between. Nobody else serves the image, because it is locked.
//!
//! All of this blocks. Never touches a device that weir has not made, unless it is told to.

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
    memory::NotEnough,
    ublk::{self, Control, Info, Params, State, feature},
};

pub use super::known::path;
use super::{
    Export,
    guard::{self, Guard},
    known::{PAUSE, begin_removal, numbers},
    mark,
    request::SECTOR_BYTES,
};

/// How long the kernel may take to notice that a process has gone: before 6.7 it looks every five
/// seconds.
const NOTICED: Duration = Duration::from_secs(30);

/// How long udev may take to give a device to the user who makes it.
const GIVEN: Duration = Duration::from_secs(10);

/// Why there is no device. Nothing has changed, unless it says so.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Not in the kernel, or not loaded.
    #[error(
        "this kernel has no ublk driver (`modprobe ublk_drv`; where there is no such module, the kernel lacks CONFIG_BLK_DEV_UBLK)"
    )]
    NoDriver,
    /// Not for this user.
    #[error(
        "this user may not use the ublk driver: {0} (start weir as root, or with the key unprivileged where /dev/ublk-control is this user's)"
    )]
    NotPermitted(io::Error),
    /// A user who is not root has made one, and may not use it.
    #[error(
        "{}: not this user's after {} s, as a device that a user makes is to be (have a rule of udev's give it to them; root can remove it: weir detach /dev/ublkb{number})", ublk::Queue::path(*number).display(), GIVEN.as_secs()
    )]
    NotGiven {
        /// N.
        number: u32,
    },
    /// Somebody else's.
    #[error("/dev/ublkb{number}: there is a device of this number already{} (choose another, or leave the number away)", of_process(*process))]
    Taken {
        /// N.
        number: u32,
        /// Who serves it, if anybody does.
        process: Option<u32>,
    },
    /// `ublks_max`
    #[error(
        "the ublk driver has as many devices as it may (remove some, or write a larger number to /sys/module/ublk_drv/parameters/ublks_max)"
    )]
    TooMany,
    /// Somebody has removed it.
    #[error(
        "the device that was to be recovered is not there any more (weir makes one when it is started again)"
    )]
    Gone,
    /// The memory to be lent.
    #[error("{0}")]
    Memory(#[from] NotEnough),
    /// The kernel.
    #[error("{what}: {error}")]
    Kernel {
        /// What was asked of it.
        what: String,
        /// What it said.
        error: io::Error,
    },
}

fn of_process(process: Option<u32>) -> String {
    process.map_or(String::new(), |process| format!(", served by process {process}"))
}

/// What a step is for, where it fails.
pub(super) fn kernel<T>(what: impl Into<String>, result: io::Result<T>) -> Result<T, Refused> {
    result.map_err(|error| Refused::Kernel { what: what.into(), error })
}

/// A device of the driver, whoever made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// N of `/dev/ublkbN`.
    pub number: u32,
    /// How it is doing.
    pub state: State,
    /// Who serves it.
    pub process: Option<u32>,
    /// Whether weir made it.
    pub is_ours: bool,
}

/// All devices that this user may know of, by their numbers; none without the driver.
///
/// # Errors
/// [`Refused::NotPermitted`].
pub fn list() -> Result<Vec<Found>, Refused> {
    let mut control = match open() {
        Ok(control) => control,
        Err(Refused::NoDriver) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let infos = numbers().into_iter().filter_map(|number| control.info(number).ok());
    Ok(infos.map(|info| found(&info)).collect())
}

/// Removes a device that nobody serves. What it was asked and has not done fails.
///
/// # Errors
/// [`Refused::Taken`]: a process serves it. What the kernel says.
pub fn remove(number: u32) -> Result<(), Refused> {
    let mut control = open()?;
    let what = format!("/dev/ublkb{number}: not removed");
    let info = kernel(what.clone(), control.info(number))?;
    if let Some(process) = server_of(&info) {
        return Err(Refused::Taken { number, process: Some(process) });
    }
    kernel(what.clone(), guard::dismiss(&control, number))?;
    kernel(what, control.delete(&info))
}

fn found(info: &Info) -> Found {
    Found {
        number: info.number,
        state: info.state(),
        process: server_of(info),
        is_ours: mark::is_ours(info.mark),
    }
}

/// The process that serves a device, if it is there.
fn server_of(info: &Info) -> Option<u32> {
    let process = u32::try_from(info.process).ok().filter(|process| *process != 0)?;
    (info.state() == State::Live && Path::new(&format!("/proc/{process}")).exists()).then_some(process)
}

fn open() -> Result<Control, Refused> {
    Control::open().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Refused::NoDriver,
        Some(libc::EACCES | libc::EPERM) => Refused::NotPermitted(error),
        _ => Refused::Kernel { what: "/dev/ublk-control".into(), error },
    })
}

/// Whether this process may take the device over; not yet, where the last one is not quite gone.
fn begin_recovery(control: &mut Control, info: &Info, what: impl Fn() -> String) -> Result<bool, Refused> {
    let Err(error) = control.start_recovery(info) else { return Ok(true) };
    match error.raw_os_error() {
        Some(libc::EBUSY) => Ok(false),
        // It has begun: the process that did was killed before it fetched anything.
        Some(libc::EINVAL) => Ok(true),
        _ => Err(Refused::Kernel { what: what(), error }),
    }
}

/// Waits until this user may use the device of this number, which they have made. Before, the
/// driver refuses every command.
fn until_given(number: u32) -> Result<(), Refused> {
    let (path, end) = (ublk::Queue::path(number), Instant::now() + GIVEN);
    while access(&path, AccessFlags::R_OK | AccessFlags::W_OK).is_err() {
        if Instant::now() > end {
            return Err(Refused::NotGiven { number });
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Whether a device of this disk is to be made whose data is not copied.
fn may_be_zero_copy(control: &Control, export: &Export) -> bool {
    let Export { offer, disk, .. } = export;
    // The kernel has no users but root move pages of others.
    let is_wanted = offer.zero_copy && !offer.unprivileged && disk.takes_registered();
    is_wanted && control.features() & feature::ZERO_COPY == feature::ZERO_COPY
}

/// Numbers of devices that this process serves, or is about to.
static CLAIMED: LazyLock<Mutex<BTreeSet<u32>>> = LazyLock::new(Mutex::default);

fn claimed() -> MutexGuard<'static, BTreeSet<u32>> {
    // A set is one whatever panicked.
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device of ours, made or being taken over, which requests can be fetched from.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) info: Info,
    pub(super) params: Params,
    pub(super) is_taken_over: bool,
    /// Begins when this is dropped.
    _guard: Option<Guard>,
}

impl Drop for Node {
    fn drop(&mut self) {
        claimed().remove(&self.info.number);
    }
}

impl Node {
    /// Takes over the device that waits for this disk, or makes one.
    pub(super) fn open(export: &Export) -> Result<Self, Refused> {
        let mut control = open()?;
        let mark = mark::of(&export.disk);
        if let Some(mark) = mark
            && let Some(node) = Self::take_over(&mut control, export, mark, false)?
        {
            return Ok(node);
        }
        Self::make(&mut control, export, mark)
    }

    /// Takes over the device of this disk from a process that is about to have ended.
    pub(super) fn recover(export: &Export) -> Result<Self, Refused> {
        let mark = mark::of(&export.disk).ok_or(Refused::Gone)?;
        Self::take_over(&mut open()?, export, mark, true)?.ok_or(Refused::Gone)
    }

    fn make(control: &mut Control, export: &Export, mark: Option<u64>) -> Result<Self, Refused> {
        let offer = &export.offer;
        let recovery = feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE;
        let wanted = if mark.is_some() { recovery } else { 0 } | feature::UPDATE_SIZE;
        let unprivileged = if offer.unprivileged { feature::UNPRIVILEGED } else { 0 };
        let mut info = Info::new(offer.queues, offer.depth, offer.most_bytes);
        info.features = wanted & control.features() | unprivileged;
        info.mark = mark.unwrap_or(mark::none());
        // Held, so that nobody here takes it for one that was left.
        let mut claimed = claimed();
        let made = match may_be_zero_copy(control, export) {
            true => Self::add_zero_copy(control, export, info, mark),
            false => control.add(offer.number, info),
        };
        let info = made.map_err(|error| match (error.raw_os_error(), offer.number) {
            (Some(libc::EEXIST), Some(number)) => {
                let process = control.info(number).ok().and_then(|info| server_of(&info));
                Refused::Taken { number, process }
            }
            (Some(libc::EACCES), _) => Refused::TooMany,
            (Some(libc::EPERM), _) => Refused::NotPermitted(error),
            _ => Refused::Kernel { what: "no ublk device can be made".into(), error },
        })?;
        claimed.insert(info.number);
        drop(claimed);
        let params = offer.params(export.disk.size_bytes());
        let mut node = Self { info, params, is_taken_over: false, _guard: None };
        let guard = guard::replace(control, &info, offer.dead_timeout_s);
        node._guard = kernel(format!("{}: its guard", node.path().display()), guard).inspect_err(|_| {
            // It has no use.
            let _ = control.delete(&info);
        })?;
        if info.features & feature::UNPRIVILEGED != 0 {
            until_given(info.number)?;
        }
        if let Err(error) = control.set_params(&info, params) {
            // It has no use.
            let _ = control.delete(&info);
            return Err(Refused::Kernel { what: format!("/dev/ublkb{}: its limits", info.number), error });
        }
        Ok(node)
    }

    /// Without copies, or as `plain` says where the kernel refuses that.
    fn add_zero_copy(
        control: &mut Control,
        export: &Export,
        plain: Info,
        mark: Option<u64>,
    ) -> io::Result<Info> {
        let mut info = plain;
        info.features |= feature::ZERO_COPY;
        info.mark = mark.map_or(mark::none(), mark::zero_copy);
        control.add(export.offer.number, info).or_else(|error| {
            let made = control.add(export.offer.number, plain)?;
            tracing::warn!(export = %export.id, %error, "the kernel refuses a device without copies, so data is copied");
            Ok(made)
        })
    }

    fn take_over(
        control: &mut Control,
        export: &Export,
        mark: u64,
        waits: bool,
    ) -> Result<Option<Self>, Refused> {
        for number in numbers() {
            let is_asked_for = export.offer.number.is_none_or(|asked| asked == number);
            if !is_asked_for || !claimed().insert(number) {
                continue;
            }
            match Self::left(control, export, number, mark, waits) {
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

    /// The device of this number, if it was left and shows this image; if `waits`, once it is left.
    fn left(
        control: &mut Control,
        export: &Export,
        number: u32,
        mark: u64,
        waits: bool,
    ) -> Result<Option<Self>, Refused> {
        let what = || format!("/dev/ublkb{number}, which an earlier weir has left");
        let look = |control: &mut Control| {
            let info = control.info(number).ok().filter(|_| numbers().contains(&number))?;
            let is_it = [mark, mark::zero_copy(mark)].contains(&info.mark);
            (is_it && (waits || server_of(&info).is_none())).then_some(info)
        };
        let Some(info) = look(control) else { return Ok(None) };
        // From here on nobody removes it but this process.
        let guard = kernel(what(), guard::replace(control, &info, export.offer.dead_timeout_s))?;
        let end = Instant::now() + NOTICED;
        while let Some(info) = look(control) {
            match info.state() {
                // Its process has gone, and the kernel has not noticed.
                State::Live => {}
                State::Waiting if begin_recovery(control, &info, what)? => {
                    let params = kernel(what(), control.params(&info))?;
                    return Ok(Some(Self { info, params, is_taken_over: true, _guard: guard }));
                }
                State::Waiting => {}
                State::Dead | State::Failing => {
                    kernel(what(), begin_removal(info))?;
                    return Ok(None);
                }
            }
            if Instant::now() > end {
                let error = io::Error::from_raw_os_error(libc::EBUSY);
                return Err(Refused::Kernel { what: what(), error });
            }
            thread::sleep(PAUSE);
        }
        Ok(None)
    }

    pub(super) fn path(&self) -> PathBuf {
        path(self.info.number)
    }

    /// Has it begin, or go on. Every tag has been fetched.
    pub(super) fn start(&self) -> Result<(), Refused> {
        let mut control = open()?;
        let result = match self.is_taken_over {
            true => control.end_recovery(&self.info),
            false => control.start(&self.info),
        };
        kernel(format!("{}: not started", self.path().display()), result)
    }

    /// Writes back what the page cache has of it, and takes it away from whoever uses it.
    pub(super) fn stop(&self) -> Result<(), Refused> {
        // With recovery, the kernel fails what it writes back while it stops the device.
        if let Ok(device) = fs::File::open(self.path())
            && let Err(error) = device.sync_all()
        {
            tracing::warn!(device = %self.path().display(), %error, "what was cached of it is lost");
        }
        kernel(format!("{}: not stopped", self.path().display()), open()?.stop(&self.info))
    }

    /// Nothing of this process has it open any more.
    pub(super) fn delete(&self) -> Result<(), Refused> {
        kernel(format!("{}: not removed", self.path().display()), open()?.delete(&self.info))
    }

    /// Whether it can have another length while it is there.
    pub(super) fn can_resize(&self) -> bool {
        self.info.features & feature::UPDATE_SIZE != 0
    }

    pub(super) fn resize(&self, size_bytes: u64) -> Result<(), Refused> {
        let resized = open()?.update_size(&self.info, size_bytes / SECTOR_BYTES);
        kernel(format!("{}: not resized", self.path().display()), resized)
    }
}
