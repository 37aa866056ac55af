//! Commands to the driver: creating, starting, stopping, recovering and removing devices.
//!
//! Each blocks until the kernel has executed it, some for as long as a device has requests: call
//! them by [`super::super::run_blocking`] on a thread that must not block. They use a ring of their
//! own, because the driver accepts these commands (32 bytes) only in entries of 128 bytes.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
};

use io_uring::{IoUring, cqueue, opcode, squeue::Entry128, types};
use nix::fcntl::{FcntlArg, fcntl};

use super::{super::ring_restrictions, CommandEncoding, feature};

const DRIVER: &str = "/dev/ublk-control";
/// Path prefix of the node for a device's requests, followed by its number.
pub(super) const CHANNEL_PREFIX: &str = "/dev/ublkc";
/// Device number by which the kernel chooses one.
const ANY_DEVICE: u32 = u32::MAX;

/// A command's number, and the direction of its structure.
#[derive(Clone, Copy)]
struct UblkCommandCode {
    number: u32,
    /// True if the kernel reads the structure.
    writes: bool,
}

impl UblkCommandCode {
    const fn reading(number: u32) -> Self {
        Self { number, writes: false }
    }

    const fn writing(number: u32) -> Self {
        Self { number, writes: true }
    }
}

/// `UBLK_CMD_…`.
mod command {
    use super::UblkCommandCode;

    pub(super) const ADD: UblkCommandCode = UblkCommandCode::writing(0x04);
    pub(super) const DELETE: UblkCommandCode = UblkCommandCode::writing(0x05);
    pub(super) const START: UblkCommandCode = UblkCommandCode::writing(0x06);
    pub(super) const STOP: UblkCommandCode = UblkCommandCode::writing(0x07);
    pub(super) const SET_PARAMS: UblkCommandCode = UblkCommandCode::writing(0x08);
    pub(super) const GET_PARAMS: UblkCommandCode = UblkCommandCode::reading(0x09);
    pub(super) const GET_INFO: UblkCommandCode = UblkCommandCode::reading(0x02);
    pub(super) const START_RECOVERY: UblkCommandCode = UblkCommandCode::writing(0x10);
    pub(super) const END_RECOVERY: UblkCommandCode = UblkCommandCode::writing(0x11);
    pub(super) const GET_INFO2: UblkCommandCode = UblkCommandCode::reading(0x12);
    pub(super) const GET_FEATURES: UblkCommandCode = UblkCommandCode::reading(0x13);
    pub(super) const UPDATE_SIZE: UblkCommandCode = UblkCommandCode::writing(0x15);
}

/// A command in an entry (`struct ublksrv_ctrl_cmd`): 32 bytes, the rest of the entry is zero.
#[derive(Clone, Copy)]
struct UblkCommand {
    code: UblkCommandCode,
    device: u32,
    data: u64,
    /// True if the exchanged data is preceded by the device's path, by which an unprivileged user
    /// proves access to the device.
    has_path: bool,
}

const COMMAND_BYTES: usize = 32;

/// Properties of a device (`struct ublksrv_ctrl_dev_info`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkInfo {
    /// Number of queues.
    pub queues: u16,
    /// Maximum number of requests in flight on each queue.
    pub depth: u16,
    state: u16,
    padding0: u16,
    /// Maximum size of a request in bytes.
    pub max_request_bytes: u32,
    /// Number N of `/dev/ublkbN`.
    pub number: u32,
    /// Process that serves the device. Meaningless after that process has ended.
    pub process: i32,
    padding1: u32,
    /// Bits of [`feature`].
    pub features: u64,
    /// User data set at creation; the driver only stores it.
    pub user_data: u64,
    owner_uid: u32,
    owner_gid: u32,
    reserved: [u64; 2],
}

/// State of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UblkState {
    /// Not started, or stopped.
    Dead,
    /// The block device exists and is served.
    Live,
    /// Orphaned; requests wait for a process that recovers the device.
    Quiesced,
    /// Orphaned; requests fail.
    FailIo,
}

impl UblkInfo {
    /// Properties of a device to create, without features and user data.
    pub fn new(queues: u16, depth: u16, max_request_bytes: u32) -> Self {
        Self { queues, depth, max_request_bytes, ..Self::default() }
    }

    /// True if data is accessed in place: see [`feature::ZERO_COPY`].
    pub fn is_zero_copy(&self) -> bool {
        self.features & feature::ZERO_COPY == feature::ZERO_COPY
    }

    /// State when the properties were read.
    pub fn state(&self) -> UblkState {
        match self.state {
            0 => UblkState::Dead,
            1 => UblkState::Live,
            2 => UblkState::Quiesced,
            _ => UblkState::FailIo,
        }
    }
}

/// Parameters of a device's requests (`struct ublk_params`, the part that Linux 6.1 has).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkParams {
    bytes: u32,
    kinds: u32,
    /// Bits of `UblkParams::READ_ONLY` and its neighbours.
    pub attributes: u32,
    /// Logical block size, as a power of two like the following three.
    pub logical_block_shift: u8,
    /// Physical block size: the unit that the device writes at once.
    pub physical_block_shift: u8,
    /// Optimal size of requests.
    pub optimal_io_shift: u8,
    /// Preferred minimum size of requests.
    pub minimum_io_shift: u8,
    /// Maximum size of a read or a write, in units of 512 bytes like all that follow.
    pub max_sectors: u32,
    /// No request crosses a multiple of it; 0 for no such rule.
    pub chunk_sectors: u32,
    /// Size of the device.
    pub sectors: u64,
    /// Segments of a request must not meet inside of this mask; 0 for no such rule.
    pub virt_boundary_mask: u64,
    /// Alignment of discards in bytes.
    pub discard_alignment: u32,
    /// Granularity of discards in bytes.
    pub discard_granularity: u32,
    /// Maximum size of a discard; 0 for no discards.
    pub max_discard_sectors: u32,
    /// Maximum size of a write-zeroes; 0 for no write-zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Maximum number of ranges of a discard.
    pub max_discard_segments: u16,
    reserved: [u16; 3],
}

impl UblkParams {
    /// `UBLK_ATTR_READ_ONLY`
    pub const READ_ONLY: u32 = 1;
    /// `UBLK_ATTR_VOLATILE_CACHE`: flushes are sent.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// `UBLK_ATTR_FUA`: FUA writes are marked as such instead of being followed by a flush.
    pub const FUA: u32 = 1 << 3;
    const BASIC: u32 = 1;
    const DISCARD: u32 = 1 << 1;
}

/// A connection to the driver.
pub struct UblkControl {
    driver: File,
    ring: IoUring<Entry128, cqueue::Entry>,
    encoding: CommandEncoding,
    features: u64,
}

impl UblkControl {
    /// Opens the driver and queries its features.
    ///
    /// # Errors
    /// `ENOENT` if the driver or its node is missing; `EACCES` if this user may not use it; as
    /// `io_uring_setup(2)`.
    pub fn open() -> io::Result<Self> {
        let driver = OpenOptions::new().read(true).write(true).open(DRIVER)?;
        let ring =
            ring_restrictions::build(&mut IoUring::builder(), 1, None, &[opcode::UringCmd80::CODE], &[])?;
        let mut control = Self { driver, ring, encoding: CommandEncoding::Ioctl, features: 0 };
        let mut features = 0_u64;
        match control.exchange(UblkCommand::new(command::GET_FEATURES, ANY_DEVICE), Some(&mut features)) {
            Ok(()) => control.features = features,
            // Linux before 6.5, where only devices report features.
            Err(error) if error.raw_os_error() != Some(libc::EPERM) => {
                control.encoding = CommandEncoding::Legacy;
            }
            Err(error) => return Err(error),
        }
        Ok(control)
    }

    /// Bits of [`feature`]. A driver that does not report features has those of Linux 6.1.
    pub fn features(&self) -> u64 {
        match self.encoding {
            CommandEncoding::Ioctl => self.features,
            CommandEncoding::Legacy => feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE,
        }
    }

    /// Creates a device. It has no block device until it is started. With no `number`, the kernel
    /// chooses one. Returns the actual properties.
    ///
    /// # Errors
    /// `EEXIST` if the number is in use; `EACCES` if the driver has its maximum number of devices;
    /// `EPERM`.
    pub fn add(&mut self, number: Option<u32>, requested: UblkInfo) -> io::Result<UblkInfo> {
        let number = number.unwrap_or(ANY_DEVICE);
        let mut info = UblkInfo { number, process: -1, ..requested };
        self.exchange(UblkCommand::new(command::ADD, number), Some(&mut info))?;
        Ok(info)
    }

    /// Properties of a device.
    ///
    /// # Errors
    /// `ENODEV` if there is no device with this number; `EPERM`, `EACCES` if it is another user's.
    pub fn info(&mut self, number: u32) -> io::Result<UblkInfo> {
        let mut info = UblkInfo::default();
        let command = match self.encoding {
            CommandEncoding::Ioctl => {
                UblkCommand { has_path: true, ..UblkCommand::new(command::GET_INFO2, number) }
            }
            CommandEncoding::Legacy => UblkCommand::new(command::GET_INFO, number),
        };
        self.exchange(command, Some(&mut info))?;
        Ok(info)
    }

    /// Sets the parameters of a device's requests, before it is started.
    ///
    /// # Errors
    /// `EINVAL` if they are invalid.
    pub fn set_params(&mut self, device: &UblkInfo, params: UblkParams) -> io::Result<()> {
        let erases = params.max_discard_sectors > 0 || params.max_write_zeroes_sectors > 0;
        let kinds = UblkParams::BASIC | if erases { UblkParams::DISCARD } else { 0 };
        let mut params = UblkParams { bytes: size_of::<UblkParams>() as u32, kinds, ..params };
        self.exchange(UblkCommand::to(command::SET_PARAMS, device), Some(&mut params))
    }

    /// Parameters of a device's requests.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn params(&mut self, device: &UblkInfo) -> io::Result<UblkParams> {
        let mut params = UblkParams { bytes: size_of::<UblkParams>() as u32, ..UblkParams::default() };
        self.exchange(UblkCommand::to(command::GET_PARAMS, device), Some(&mut params))?;
        Ok(params)
    }

    /// Creates the block device. Blocks until this process has fetched every tag of every queue.
    /// The kernel reads from the device before the command completes.
    ///
    /// # Errors
    /// Fails if the kernel cannot create the block device.
    pub fn start(&mut self, device: &UblkInfo) -> io::Result<()> {
        self.run_command(command::START, device, u64::from(std::process::id()))
    }

    /// Removes the block device: requests not yet issued fail, those in progress complete first.
    /// All fetches end then.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn stop(&mut self, device: &UblkInfo) -> io::Result<()> {
        self.run_command(command::STOP, device, 0)
    }

    /// Removes an orphaned device, stopping it first; blocks until all openers have closed it.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn delete(&mut self, device: &UblkInfo) -> io::Result<()> {
        self.run_command(command::DELETE, device, 0)
    }

    /// Begins the recovery of an orphaned device by this process, which fetches from it next.
    ///
    /// # Errors
    /// `EBUSY` if it is not waiting for recovery, or not yet.
    pub fn start_recovery(&mut self, device: &UblkInfo) -> io::Result<()> {
        self.run_command(command::START_RECOVERY, device, 0)
    }

    /// Resumes a recovered device, as [`UblkControl::start`] starts a new one.
    ///
    /// # Errors
    /// `EBUSY` if it is not waiting for recovery.
    pub fn end_recovery(&mut self, device: &UblkInfo) -> io::Result<()> {
        self.run_command(command::END_RECOVERY, device, u64::from(std::process::id()))
    }

    /// Changes the size of a device, in units of 512 bytes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the driver or the device lacks [`feature::UPDATE_SIZE`].
    pub fn update_size(&mut self, device: &UblkInfo, sectors: u64) -> io::Result<()> {
        self.run_command(command::UPDATE_SIZE, device, sectors)
    }

    /// Makes this process the [keeper](Self::keeper) of a device number until it ends or closes
    /// any [`UblkControl`]: the role is a record lock of fcntl(2).
    ///
    /// # Errors
    /// `EAGAIN` if another process is the keeper.
    pub fn lock_as_keeper(&self, number: u32) -> io::Result<()> {
        fcntl(&self.driver, FcntlArg::F_SETLK(&keeper_lock(number)))?;
        Ok(())
    }

    /// The keeper of a device number, unless it is the calling process. 0 if the keeper is in a
    /// container and its process ID is not visible to the caller.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn keeper(&self, number: u32) -> io::Result<Option<i32>> {
        let mut lock = keeper_lock(number);
        fcntl(&self.driver, FcntlArg::F_GETLK(&mut lock))?;
        Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid))
    }

    fn run_command(&mut self, code: UblkCommandCode, device: &UblkInfo, data: u64) -> io::Result<()> {
        self.exchange::<UblkInfo>(UblkCommand { data, ..UblkCommand::to(code, device) }, None)
    }

    /// Passes a structure to the kernel, which may change it.
    fn exchange<T: PlainBytes>(&mut self, command: UblkCommand, value: Option<&mut T>) -> io::Result<()> {
        let mut bytes = match command.has_path {
            true => format!("{CHANNEL_PREFIX}{}\0", command.device).into_bytes(),
            false => Vec::new(),
        };
        let path_bytes = bytes.len();
        if let Some(value) = &value {
            let first = std::ptr::from_ref::<T>(value).cast::<u8>();
            // SAFETY: this many bytes exist and are initialised: see `PlainBytes`.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(first, size_of::<T>()) });
        }
        self.send(command, &mut bytes, path_bytes)?;
        if let Some(value) = value {
            // SAFETY: this many bytes follow the path, and any values are a valid `T`.
            *value = unsafe { bytes.as_ptr().add(path_bytes).cast::<T>().read_unaligned() };
        }
        Ok(())
    }

    fn send(&mut self, command: UblkCommand, bytes: &mut [u8], path_bytes: usize) -> io::Result<()> {
        let code = self.encoding.code(command.code.number, command.code.writes, COMMAND_BYTES);
        let entry = opcode::UringCmd80::new(types::Fd(self.driver.as_raw_fd()), code)
            .cmd(command.entry(bytes, path_bytes))
            .build();
        // SAFETY: the bytes are borrowed until this function returns, which is after the kernel's
        // last access: the completion is awaited, or else the process ends.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| io::Error::other("the ring is full"))?;
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => panic!("io_uring_enter failed with {error}; a ublk command cannot be awaited"),
            }
            if let Some(completion) = self.ring.completion().next() {
                return match completion.result() {
                    0.. => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
        }
    }
}

/// A lock on the driver's node, in which each device number has a byte.
fn keeper_lock(number: u32) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::from(number),
        l_len: 1,
        l_pid: 0,
    }
}

/// A type that the kernel may fill with arbitrary bytes.
///
/// # Safety
/// It must consist of integers, without padding.
unsafe trait PlainBytes: Copy {}
// SAFETY: an integer.
unsafe impl PlainBytes for u64 {}
// SAFETY: `repr(C)`, and each field begins where the previous one ends.
unsafe impl PlainBytes for UblkInfo {}
// SAFETY: as above.
unsafe impl PlainBytes for UblkParams {}

impl UblkCommand {
    fn new(code: UblkCommandCode, device: u32) -> Self {
        Self { code, device, data: 0, has_path: false }
    }

    fn to(code: UblkCommandCode, device: &UblkInfo) -> Self {
        let has_path = device.features & feature::UNPRIVILEGED != 0;
        Self { has_path, ..Self::new(code, device.number) }
    }

    /// The command as encoded in an entry; the first `path_bytes` are the device's path.
    fn entry(self, bytes: &mut [u8], path_bytes: usize) -> [u8; 80] {
        let address = if bytes.is_empty() { 0 } else { bytes.as_mut_ptr() as u64 };
        let mut entry = [0; 80];
        entry[..4].copy_from_slice(&self.device.to_ne_bytes());
        // No queue.
        entry[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        entry[6..8].copy_from_slice(&(bytes.len() as u16).to_ne_bytes());
        entry[8..16].copy_from_slice(&address.to_ne_bytes());
        entry[16..24].copy_from_slice(&self.data.to_ne_bytes());
        entry[24..26].copy_from_slice(&(path_bytes as u16).to_ne_bytes());
        entry
    }
}

impl std::fmt::Debug for UblkControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("features", &self.features).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_those_of_the_header() {
        assert_eq!((size_of::<UblkInfo>(), std::mem::offset_of!(UblkInfo, user_data)), (64, 32));
        assert_eq!((size_of::<UblkParams>(), std::mem::offset_of!(UblkParams, sectors)), (64, 24));
        assert_eq!(std::mem::offset_of!(UblkParams, max_discard_segments), 56);
    }
}
