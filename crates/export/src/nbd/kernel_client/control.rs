//! Control of the kernel's NBD client: connect, reconfigure and disconnect devices.
//!
//! Commands and attributes are those of linux/nbd-netlink.h. Each call blocks for as long as the
//! kernel works on it, so callers use a thread that may wait.

use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use super::netlink::{Netlink, NetlinkAttributes, NetlinkAttributesBuilder, attributes};

/// `NBD_GENL_FAMILY_NAME`, and its commands.
const FAMILY: &str = "nbd";
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const STATUS: u8 = 5;

/// `NBD_ATTR_*`.
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;
const DEVICE_LIST: u16 = 9;
const BACKEND_IDENTIFIER: u16 = 10;
/// `NBD_SOCK_ITEM`, `NBD_SOCK_FD`, `NBD_DEVICE_ITEM`, `NBD_DEVICE_CONNECTED`.
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;
const DEVICE_ITEM: u16 = 1;
const DEVICE_CONNECTED: u16 = 2;

/// Unit of a device's length in sysfs.
const SECTOR_BYTES: u64 = 512;

/// Parameters of a device.
#[derive(Clone, Debug)]
pub(super) struct NbdDeviceParameters {
    /// `None` selects the first free device.
    pub(super) number: Option<u32>,
    pub(super) size_bytes: u64,
    /// Logical block size.
    pub(super) block_bytes: u32,
    /// `proto::export_flag`s.
    pub(super) flags: u16,
    pub(super) timeout_s: u32,
    pub(super) dead_timeout_s: u32,
    /// Identity (`NBD_ATTR_BACKEND_IDENTIFIER`): only a server with the same one may reconfigure
    /// the device.
    pub(super) backend: String,
}

#[derive(Debug)]
pub(super) struct NbdNetlinkControl {
    netlink: Netlink,
    family: u16,
}

impl NbdNetlinkControl {
    /// Opens the control socket.
    ///
    /// # Errors
    /// `ENOENT` if the kernel has no NBD client.
    pub(super) fn open() -> io::Result<Self> {
        let netlink = Netlink::open()?;
        let family = netlink.family(FAMILY)?;
        Ok(Self { netlink, family })
    }

    /// Creates a device that uses these sockets; returns its number. The kernel holds its own
    /// references to the sockets, so the caller may close them.
    ///
    /// # Errors
    /// `EBUSY` if the device is in use, `EPERM` without the capability.
    pub(super) fn connect(&self, device: &NbdDeviceParameters, sockets: &[OwnedFd]) -> io::Result<u32> {
        let mut request = NetlinkAttributesBuilder::default();
        if let Some(number) = device.number {
            request = request.u32(INDEX, number);
        }
        let request = request
            .u64(SIZE_BYTES, device.size_bytes)
            .u64(BLOCK_SIZE_BYTES, device.block_bytes.into())
            .u64(SERVER_FLAGS, device.flags.into());
        let reply = self.netlink.execute(self.family, CONNECT, &with_parameters(request, device, sockets))?;
        let number = attributes(&reply).get(INDEX).and_then(NetlinkAttributes::as_u32).or(device.number);
        number.ok_or_else(|| io::Error::other("the kernel returned no device number"))
    }

    /// Gives a device sockets in place of closed ones.
    ///
    /// # Errors
    /// `EINVAL` if the device was disconnected or has another backend identifier.
    pub(super) fn reconnect(
        &self,
        number: u32,
        device: &NbdDeviceParameters,
        sockets: &[OwnedFd],
    ) -> io::Result<()> {
        let request = NetlinkAttributesBuilder::default().u32(INDEX, number);
        self.netlink.execute(self.family, RECONFIGURE, &with_parameters(request, device, sockets)).map(drop)
    }

    /// Changes the length of a device.
    pub(super) fn resize(
        &self,
        number: u32,
        device: &NbdDeviceParameters,
        size_bytes: u64,
    ) -> io::Result<()> {
        let request = NetlinkAttributesBuilder::default().u32(INDEX, number).u64(SIZE_BYTES, size_bytes);
        let request = request.text(BACKEND_IDENTIFIER, &device.backend);
        self.netlink.execute(self.family, RECONFIGURE, &request).map(drop)
    }

    /// Disconnects a device; unwritten data is lost.
    pub(super) fn disconnect(&self, number: u32) -> io::Result<()> {
        self.netlink
            .execute(self.family, DISCONNECT, &NetlinkAttributesBuilder::default().u32(INDEX, number))
            .map(drop)
    }

    /// True if any server is connected to the device.
    pub(super) fn is_connected(&self, number: u32) -> io::Result<bool> {
        let reply = self.netlink.execute(
            self.family,
            STATUS,
            &NetlinkAttributesBuilder::default().u32(INDEX, number),
        )?;
        let item = attributes(&reply).get(DEVICE_LIST).and_then(|list| list.get(DEVICE_ITEM));
        Ok(item.and_then(|item| item.get(DEVICE_CONNECTED)).and_then(NetlinkAttributes::as_u8) == Some(1))
    }
}

fn with_parameters(
    request: NetlinkAttributesBuilder,
    device: &NbdDeviceParameters,
    sockets: &[OwnedFd],
) -> NetlinkAttributesBuilder {
    let item = |list: NetlinkAttributesBuilder, socket: &OwnedFd| {
        // A file descriptor is never negative.
        let fd = NetlinkAttributesBuilder::default().u32(SOCK_FD, socket.as_raw_fd().unsigned_abs());
        list.nested(SOCK_ITEM, fd)
    };
    request
        .u64(TIMEOUT, device.timeout_s.into())
        .u64(DEAD_CONN_TIMEOUT, device.dead_timeout_s.into())
        .text(BACKEND_IDENTIFIER, &device.backend)
        .nested(SOCKETS, sockets.iter().fold(NetlinkAttributesBuilder::default(), item))
}

/// Number of the device with this backend identifier; with `number`, only that device is examined.
pub(super) fn find_orphaned(number: Option<u32>, backend: &str) -> Option<u32> {
    let is_ours = |number: &u32| {
        let file = format!("/sys/block/nbd{number}/backend");
        fs::read_to_string(file).is_ok_and(|text| text.trim_end_matches('\n') == backend)
    };
    let device_number = |name: &str| name.strip_prefix("nbd")?.parse().ok();
    match number {
        Some(number) => Some(number).filter(is_ours),
        // Only devices with a backend identifier have the file `backend`.
        None => {
            let all = fs::read_dir("/sys/block").into_iter().flatten().flatten();
            all.filter_map(|entry| device_number(entry.file_name().to_str()?)).find(is_ours)
        }
    }
}

/// Length of a device according to sysfs.
pub(super) fn size_bytes(number: u32) -> Option<u64> {
    read_sysfs(number, "size")?.checked_mul(SECTOR_BYTES)
}

/// Logical block size of a device according to sysfs.
pub(super) fn block_bytes(number: u32) -> Option<u64> {
    read_sysfs(number, "queue/logical_block_size")
}

fn read_sysfs(number: u32, attribute: &str) -> Option<u64> {
    fs::read_to_string(format!("/sys/block/nbd{number}/{attribute}")).ok()?.trim_end().parse().ok()
}
