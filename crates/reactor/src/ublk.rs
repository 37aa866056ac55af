//! The kernel's ublk driver: block devices whose requests come to this process (`linux/ublk_cmd.h`,
//! `Documentation/block/ublk.rst`).
//!
//! ```text
//!   /dev/ublk-control   Control   devices are made, started, stopped, taken over, removed
//!   /dev/ublkcN         Queue     requests of device N, by tags: fetch, then commit and fetch
//!                       Registered   the data of one, where it is
//!   /dev/ublkbN         the block device, for everybody else
//! ```
//!
//! A control command may block for long, and has a ring of its own. What a queue asks of the kernel
//! goes through this thread's reactor: sixteen bytes fit into the entries that it has.
//!
//! Never decides anything about a device, and knows nothing of disks.

mod control;
mod queue;
mod registered;

pub use control::{Control, Info, Params, State};
pub use queue::{Data, Descriptor, Queue};
pub use registered::Registered;

/// `UBLK_F_…`: what a driver can do, and what a device was made with.
pub mod feature {
    /// The device outlives the process that serves it, and waits for another.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Of what that process had in hand, nothing fails: the next gets it again.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// The device belongs to the user who makes it, who need not be root.
    pub const UNPRIVILEGED: u64 = 1 << 5;
    /// The requests' own pages are buffers of the ring that fetches them, as soon as they come
    /// (`SUPPORT_ZERO_COPY`, `AUTO_BUF_REG`; Linux 6.16); where one is not, its data is copied by
    /// `pread` and `pwrite` (`USER_COPY`).
    pub const ZERO_COPY: u64 = 1 | 1 << 7 | 1 << 11;
    /// Commands are numbered as ioctls are. The driver says it of itself.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// [`Control::update_size`](super::Control::update_size) works.
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// Each feature that has a name, for people.
    pub const NAMES: [&str; 20] = [
        "zero-copy",
        "complete-in-task",
        "need-get-data",
        "recovery",
        "recovery-reissue",
        "unprivileged",
        "ioctl-encode",
        "user-copy",
        "zoned",
        "recovery-fail-io",
        "update-size",
        "auto-buffers",
        "quiesce",
        "per-io-daemon",
        "buffers-off-daemon",
        "batch-io",
        "integrity",
        "safe-stop",
        "no-partition-scan",
        "shared-memory",
    ];
}

/// Most requests in flight on one queue (`UBLK_MAX_QUEUE_DEPTH`).
pub const MAX_DEPTH: u16 = 4096;

/// How commands are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialect {
    /// As they were until Linux 6.4; later kernels may be built without.
    Plain,
    /// `_IOR` or `_IOWR('u', number, …)`.
    Ioctl,
}

impl Dialect {
    /// The code of a command whose structure has so many bytes. `writes`: the kernel is told
    /// something by it.
    fn code(self, number: u32, writes: bool, bytes: usize) -> u32 {
        const READ: u32 = 2 << 30;
        const WRITE: u32 = 1 << 30;
        match self {
            Self::Plain => number,
            Self::Ioctl => {
                let direction = if writes { READ | WRITE } else { READ };
                direction | (bytes as u32) << 16 | u32::from(b'u') << 8 | number
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_header() {
        // As a C compiler says of UBLK_U_CMD_GET_FEATURES, ADD_DEV and UBLK_U_IO_FETCH_REQ.
        assert_eq!(Dialect::Ioctl.code(0x13, false, 32), 0x8020_7513);
        assert_eq!(Dialect::Ioctl.code(0x04, true, 32), 0xc020_7504);
        assert_eq!(Dialect::Ioctl.code(0x20, true, 16), 0xc010_7520);
        assert_eq!(Dialect::Plain.code(0x20, true, 16), 0x20);
    }
}
