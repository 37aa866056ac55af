//! Commands to the driver: making, starting, stopping, taking over and removing devices.
//!
//! Each blocks until the kernel has done it, some for as long as a device has requests: so call
//! them by [`super::super::blocking`] where anything else is to go on. They go through a ring of
//! their own, since the driver takes these commands (32 bytes) in entries of 128 bytes alone.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
};

use io_uring::{IoUring, cqueue, opcode, squeue::Entry128, types};
use nix::fcntl::{FcntlArg, fcntl};

use super::{super::restricted, Dialect, feature};

const DRIVER: &str = "/dev/ublk-control";
/// With a device's number: what its requests come through.
pub(super) const CHANNEL: &str = "/dev/ublkc";
/// What a device's number is where the kernel is to choose.
const ANY: u32 = u32::MAX;

/// `UBLK_CMD_…`, and whether the kernel is told something.
mod command {
    pub(super) const ADD: (u32, bool) = (0x04, true);
    pub(super) const DELETE: (u32, bool) = (0x05, true);
    pub(super) const START: (u32, bool) = (0x06, true);
    pub(super) const STOP: (u32, bool) = (0x07, true);
    pub(super) const SET_PARAMS: (u32, bool) = (0x08, true);
    pub(super) const GET_PARAMS: (u32, bool) = (0x09, false);
    pub(super) const GET_INFO: (u32, bool) = (0x02, false);
    pub(super) const START_RECOVERY: (u32, bool) = (0x10, true);
    pub(super) const END_RECOVERY: (u32, bool) = (0x11, true);
    pub(super) const GET_INFO2: (u32, bool) = (0x12, false);
    pub(super) const GET_FEATURES: (u32, bool) = (0x13, false);
    pub(super) const UPDATE_SIZE: (u32, bool) = (0x15, true);
}

/// What stands in an entry (`struct ublksrv_ctrl_cmd`), 32 bytes of which the rest is zero.
#[derive(Clone, Copy)]
struct Command {
    number: u32,
    writes: bool,
    device: u32,
    data: u64,
    /// The device's path stands in front of what is exchanged: so an unprivileged user shows that
    /// it is theirs.
    has_path: bool,
}

const COMMAND_BYTES: usize = 32;

/// What a device is (`struct ublksrv_ctrl_dev_info`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Queues.
    pub queues: u16,
    /// Requests in flight on each queue at most.
    pub depth: u16,
    state: u16,
    padding0: u16,
    /// Bytes of a request at most.
    pub most_bytes: u32,
    /// N of `/dev/ublkbN`.
    pub number: u32,
    /// The process that serves it; of one that has gone nothing is said here.
    pub process: i32,
    padding1: u32,
    /// Of [`feature`].
    pub features: u64,
    /// What whoever made the device wants to find there; the driver only keeps it.
    pub mark: u64,
    owner_uid: u32,
    owner_gid: u32,
    reserved: [u64; 2],
}

/// How a device is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not started, or stopped.
    Dead,
    /// There is a block device, and somebody serves it.
    Live,
    /// Nobody serves it; its requests wait for who takes it over.
    Waiting,
    /// Nobody serves it; its requests fail.
    Failing,
}

impl Info {
    /// A device that is to be made, without features and without a mark.
    pub fn new(queues: u16, depth: u16, most_bytes: u32) -> Self {
        Self { queues, depth, most_bytes, ..Self::default() }
    }

    /// Whether data stays where it is: see [`feature::ZERO_COPY`].
    pub fn is_zero_copy(&self) -> bool {
        self.features & feature::ZERO_COPY == feature::ZERO_COPY
    }

    /// How it was doing.
    pub fn state(&self) -> State {
        match self.state {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Waiting,
            _ => State::Failing,
        }
    }
}

/// What the kernel is told of a device's requests (`struct ublk_params`, of which 6.1 has so much).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    bytes: u32,
    kinds: u32,
    /// Bits of `Params::READ_ONLY` and its neighbours.
    pub attributes: u32,
    /// Powers of two: a sector, what is written at once, what is best, what is least.
    pub logical_block_shift: u8,
    /// See above.
    pub physical_block_shift: u8,
    /// See above.
    pub optimal_io_shift: u8,
    /// See above.
    pub minimum_io_shift: u8,
    /// Of a read or a write, in units of 512 bytes as all that follow.
    pub max_sectors: u32,
    /// No request crosses a multiple of it; 0 is no such rule.
    pub chunk_sectors: u32,
    /// The device's length.
    pub sectors: u64,
    /// No two segments of a request meet inside it; 0 is no such rule.
    pub virt_boundary_mask: u64,
    /// Bytes.
    pub discard_alignment: u32,
    /// Bytes.
    pub discard_granularity: u32,
    /// 0: no discards.
    pub max_discard_sectors: u32,
    /// 0: no write-zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Ranges of a discard.
    pub max_discard_segments: u16,
    reserved: [u16; 3],
}

impl Params {
    /// `UBLK_ATTR_READ_ONLY`
    pub const READ_ONLY: u32 = 1;
    /// `UBLK_ATTR_VOLATILE_CACHE`: flushes are sent.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// `UBLK_ATTR_FUA`: writes are marked that are to be durable by themselves.
    pub const FUA: u32 = 1 << 3;
    const BASIC: u32 = 1;
    const DISCARD: u32 = 1 << 1;
}

/// The way to the driver.
pub struct Control {
    driver: File,
    ring: IoUring<Entry128, cqueue::Entry>,
    dialect: Dialect,
    features: u64,
}

impl Control {
    /// Opens it, and asks what it can do.
    ///
    /// # Errors
    /// `ENOENT`: there is no such driver, or no node of it. `EACCES`: not for this user. What
    /// `io_uring_setup(2)` says.
    pub fn open() -> io::Result<Self> {
        let driver = OpenOptions::new().read(true).write(true).open(DRIVER)?;
        let ring = restricted::build(&mut IoUring::builder(), 1, None, &[opcode::UringCmd80::CODE], &[])?;
        let mut control = Self { driver, ring, dialect: Dialect::Ioctl, features: 0 };
        let mut features = 0_u64;
        match control.exchange(Command::new(command::GET_FEATURES, ANY), Some(&mut features)) {
            Ok(()) => control.features = features,
            // Linux before 6.5, where each device says what it was made with.
            Err(error) if error.raw_os_error() != Some(libc::EPERM) => control.dialect = Dialect::Plain,
            Err(error) => return Err(error),
        }
        Ok(control)
    }

    /// Of [`feature`]. A driver that does not say has none but those of Linux 6.1.
    pub fn features(&self) -> u64 {
        match self.dialect {
            Dialect::Ioctl => self.features,
            Dialect::Plain => feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE,
        }
    }

    /// Makes a device, which has no block device before it is started. `number`: the kernel's
    /// choice where there is none. Says what the kernel has made of it.
    ///
    /// # Errors
    /// `EEXIST`: the number is taken. `EACCES`: the driver has as many devices as it may. `EPERM`.
    pub fn add(&mut self, number: Option<u32>, wanted: Info) -> io::Result<Info> {
        let number = number.unwrap_or(ANY);
        let mut info = Info { number, process: -1, ..wanted };
        self.exchange(Command::new(command::ADD, number), Some(&mut info))?;
        Ok(info)
    }

    /// What is known of a device.
    ///
    /// # Errors
    /// `ENODEV`: there is none of this number. `EPERM`, `EACCES`: it is another user's.
    pub fn info(&mut self, number: u32) -> io::Result<Info> {
        let mut info = Info::default();
        let command = match self.dialect {
            Dialect::Ioctl => Command { has_path: true, ..Command::new(command::GET_INFO2, number) },
            Dialect::Plain => Command::new(command::GET_INFO, number),
        };
        self.exchange(command, Some(&mut info))?;
        Ok(info)
    }

    /// Tells the kernel of the device's requests; before it is started.
    ///
    /// # Errors
    /// `EINVAL`: they cannot be.
    pub fn set_params(&mut self, device: &Info, params: Params) -> io::Result<()> {
        let erases = params.max_discard_sectors > 0 || params.max_write_zeroes_sectors > 0;
        let kinds = Params::BASIC | if erases { Params::DISCARD } else { 0 };
        let mut params = Params { bytes: size_of::<Params>() as u32, kinds, ..params };
        self.exchange(Command::to(command::SET_PARAMS, device), Some(&mut params))
    }

    /// What the kernel knows of the device's requests.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn params(&mut self, device: &Info) -> io::Result<Params> {
        let mut params = Params { bytes: size_of::<Params>() as u32, ..Params::default() };
        self.exchange(Command::to(command::GET_PARAMS, device), Some(&mut params))?;
        Ok(params)
    }

    /// Makes the block device. Every tag of every queue has been fetched before, by this process;
    /// or else it waits for that. The kernel reads from the device before this ends.
    ///
    /// # Errors
    /// What keeps a block device from being made.
    pub fn start(&mut self, device: &Info) -> io::Result<()> {
        self.tell(command::START, device, u64::from(std::process::id()))
    }

    /// Takes the block device away: what it has not been asked yet fails, what is in hand ends
    /// before. Every fetch ends then.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn stop(&mut self, device: &Info) -> io::Result<()> {
        self.tell(command::STOP, device, 0)
    }

    /// Removes a device that nobody serves, stopping it first; waits until all have closed it.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn delete(&mut self, device: &Info) -> io::Result<()> {
        self.tell(command::DELETE, device, 0)
    }

    /// Announces that this process takes over a device that waits; it is fetched from next.
    ///
    /// # Errors
    /// `EBUSY`: it does not wait, or not yet.
    pub fn start_recovery(&mut self, device: &Info) -> io::Result<()> {
        self.tell(command::START_RECOVERY, device, 0)
    }

    /// Has it go on, as [`Control::start`] makes one begin.
    ///
    /// # Errors
    /// `EBUSY`: it does not wait.
    pub fn end_recovery(&mut self, device: &Info) -> io::Result<()> {
        self.tell(command::END_RECOVERY, device, u64::from(std::process::id()))
    }

    /// Gives a device another length, in units of 512 bytes.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the driver or the device lacks [`feature::UPDATE_SIZE`].
    pub fn update_size(&mut self, device: &Info, sectors: u64) -> io::Result<()> {
        self.tell(command::UPDATE_SIZE, device, sectors)
    }

    /// Has this process be [found](Self::guardian) as the one that guards a device of this number,
    /// until it ends, or closes any [`Control`]: such is a lock of fcntl(2).
    ///
    /// # Errors
    /// `EAGAIN`: another is that.
    pub fn guard(&self, number: u32) -> io::Result<()> {
        fcntl(&self.driver, FcntlArg::F_SETLK(&byte(number)))?;
        Ok(())
    }

    /// The process that guards a device of this number: not one that calls this by itself. 0 where
    /// it is in a container, and not to be seen from here.
    ///
    /// # Errors
    /// What fcntl(2) says.
    pub fn guardian(&self, number: u32) -> io::Result<Option<i32>> {
        let mut answer = byte(number);
        fcntl(&self.driver, FcntlArg::F_GETLK(&mut answer))?;
        Ok((i32::from(answer.l_type) != libc::F_UNLCK).then_some(answer.l_pid))
    }

    fn tell(&mut self, command: (u32, bool), device: &Info, data: u64) -> io::Result<()> {
        self.exchange::<Info>(Command { data, ..Command::to(command, device) }, None)
    }

    /// Hands a structure to the kernel, which may change it.
    fn exchange<T: Exchanged>(&mut self, command: Command, value: Option<&mut T>) -> io::Result<()> {
        let mut bytes = match command.has_path {
            true => format!("{CHANNEL}{}\0", command.device).into_bytes(),
            false => Vec::new(),
        };
        let path = bytes.len();
        if let Some(value) = &value {
            let first = std::ptr::from_ref::<T>(value).cast::<u8>();
            // SAFETY: so many bytes are there, and all are initialised: see `Exchanged`.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(first, size_of::<T>()) });
        }
        self.send(command, &mut bytes, path)?;
        if let Some(value) = value {
            // SAFETY: so many bytes stand behind the path, and any of them are a `T`.
            *value = unsafe { bytes.as_ptr().add(path).cast::<T>().read_unaligned() };
        }
        Ok(())
    }

    fn send(&mut self, command: Command, bytes: &mut [u8], path: usize) -> io::Result<()> {
        let code = self.dialect.code(command.number, command.writes, COMMAND_BYTES);
        let entry = opcode::UringCmd80::new(types::Fd(self.driver.as_raw_fd()), code)
            .cmd(command.entry(bytes, path))
            .build();
        // SAFETY: the bytes are borrowed until this returns, which it does only once the kernel has
        // done with them: the submission is awaited, or else the process ends.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| io::Error::other("the ring is full"))?;
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => panic!("io_uring_enter failed with {error}: the ring is set up wrongly"),
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

/// A lock of the driver's node, in which each number has a byte.
fn byte(number: u32) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::from(number),
        l_len: 1,
        l_pid: 0,
    }
}

/// What the kernel may write any bytes into.
///
/// # Safety
/// It is made of integers, without a gap between them or behind.
unsafe trait Exchanged: Copy {}
// SAFETY: it is one.
unsafe impl Exchanged for u64 {}
// SAFETY: `repr(C)`, and each field begins where the one before ends.
unsafe impl Exchanged for Info {}
// SAFETY: as above.
unsafe impl Exchanged for Params {}

impl Command {
    fn new((number, writes): (u32, bool), device: u32) -> Self {
        Self { number, writes, device, data: 0, has_path: false }
    }

    fn to(command: (u32, bool), device: &Info) -> Self {
        let has_path = device.features & feature::UNPRIVILEGED != 0;
        Self { has_path, ..Self::new(command, device.number) }
    }

    /// As it stands in an entry, of which the first bytes are the device's path.
    fn entry(self, bytes: &mut [u8], path: usize) -> [u8; 80] {
        let address = if bytes.is_empty() { 0 } else { bytes.as_mut_ptr() as u64 };
        let mut entry = [0; 80];
        entry[..4].copy_from_slice(&self.device.to_ne_bytes());
        // To no queue.
        entry[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        entry[6..8].copy_from_slice(&(bytes.len() as u16).to_ne_bytes());
        entry[8..16].copy_from_slice(&address.to_ne_bytes());
        entry[16..24].copy_from_slice(&self.data.to_ne_bytes());
        entry[24..26].copy_from_slice(&(path as u16).to_ne_bytes());
        entry
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("features", &self.features).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_those_of_the_header() {
        assert_eq!((size_of::<Info>(), std::mem::offset_of!(Info, mark)), (64, 32));
        assert_eq!((size_of::<Params>(), std::mem::offset_of!(Params, sectors)), (64, 24));
        assert_eq!(std::mem::offset_of!(Params, max_discard_segments), 56);
    }
}
