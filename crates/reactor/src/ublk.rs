//! The kernel's ublk driver: block devices served by this process (`linux/ublk_cmd.h`,
//! `Documentation/block/ublk.rst`).
//!
//! ```text
//!   /dev/ublk-control   UblkControl      create, start, stop, recover and remove devices
//!   /dev/ublkcN         UblkQueue        requests of device N, by tag: fetch, then commit and fetch
//!                       RegisteredData   the data of a request, in place
//!   /dev/ublkbN         the block device, for all other processes
//! ```
//!
//! A control command may block for long, and has a separate ring. Commands of a queue go through
//! this thread's reactor, because their sixteen bytes fit into ordinary entries.
//!
//! Never makes decisions about a device, and is independent of disks.

mod control;
mod queue;
mod registered;

pub use control::{UblkControl, UblkInfo, UblkParams, UblkState};
pub use queue::{UblkData, UblkDescriptor, UblkQueue};
pub use registered::RegisteredData;

/// `UBLK_F_…`: features of a driver or a device.
pub mod feature {
    /// The device survives its server process and waits for another one.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests in progress at the end of a server process are issued to the next one instead of
    /// failing.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// The device belongs to the user that creates it; root is not required.
    pub const UNPRIVILEGED: u64 = 1 << 5;
    /// The pages of a request become a registered buffer of the ring that fetches it
    /// (`SUPPORT_ZERO_COPY`, `AUTO_BUF_REG`; Linux 6.16). If that fails, its data is copied by
    /// `pread` and `pwrite` (`USER_COPY`).
    pub const ZERO_COPY: u64 = 1 | 1 << 7 | 1 << 11;
    /// Commands are encoded like ioctls. Reported by the driver.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// [`UblkControl::update_size`](super::UblkControl::update_size) is supported.
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// Display name of each feature, by bit.
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

/// Maximum number of requests in flight on one queue (`UBLK_MAX_QUEUE_DEPTH`).
pub const MAX_DEPTH: u16 = 4096;

/// Encoding of command numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandEncoding {
    /// The only one until Linux 6.4; later kernels may be built without it.
    Legacy,
    /// `_IOR` or `_IOWR('u', number, …)`.
    Ioctl,
}

impl CommandEncoding {
    /// Code of a command with a structure of `bytes`. `writes` is true if the kernel also reads the
    /// structure (`_IOWR`).
    fn code(self, number: u32, writes: bool, bytes: usize) -> u32 {
        const READ: u32 = 2 << 30;
        const WRITE: u32 = 1 << 30;
        match self {
            Self::Legacy => number,
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
        // As a C compiler evaluates UBLK_U_CMD_GET_FEATURES, ADD_DEV and UBLK_U_IO_FETCH_REQ.
        assert_eq!(CommandEncoding::Ioctl.code(0x13, false, 32), 0x8020_7513);
        assert_eq!(CommandEncoding::Ioctl.code(0x04, true, 32), 0xc020_7504);
        assert_eq!(CommandEncoding::Ioctl.code(0x20, true, 16), 0xc010_7520);
        assert_eq!(CommandEncoding::Legacy.code(0x20, true, 16), 0x20);
    }
}
