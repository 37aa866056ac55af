//! The part of generic netlink that the kernel's NBD client needs: a command with attributes, and
//! its reply.
//!
//! ```text
//!   ┌─ nlmsghdr 16 ─┬ genlmsghdr 4 ┬ attribute: length 2, type 2, value, padding to 4 ┬ …
//! ```
//!
//! Numbers are in native byte order. No netlink crate is used: weir would need it for this only.
//! Replies are parsed like untrusted input: no value in them selects an index or the size of an
//! allocation.

use std::{
    io,
    os::fd::OwnedFd,
    sync::atomic::{AtomicU32, Ordering},
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, netlink, recv, send, socket_with,
};

/// Lengths of a message's headers (`NLMSG_HDRLEN`, `GENL_HDRLEN`) and of an attribute's header.
const MESSAGE_HEADER: usize = 16;
const COMMAND_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const REQUEST_FLAGS: u16 = 1 | 4;
/// `NLMSG_ERROR`, which carries 0 for success.
const ERROR_TYPE: u16 = 2;
/// `NLA_F_NESTED`, and the mask that removes flags from a type (`NLA_TYPE_MASK`).
const NESTED: u16 = 1 << 15;
const TYPE_MASK: u16 = !(0b11 << 14);
/// Size of the receive buffer; the rest of a longer reply is lost. Replies that the kernel
/// allocates with `NLMSG_GOODSIZE` have less than 8 KiB.
const RECEIVE_BUFFER_BYTES: usize = 32 << 10;

/// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY`, `CTRL_ATTR_FAMILY_ID` and `CTRL_ATTR_FAMILY_NAME` of
/// linux/genetlink.h.
const CONTROL_FAMILY: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// Encoded attributes of a command.
#[derive(Clone, Debug, Default)]
pub(super) struct NetlinkAttributesBuilder(Vec<u8>);

impl NetlinkAttributesBuilder {
    pub(super) fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(super) fn u64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds a string with its terminating NUL, which the kernel requires. NUL bytes in `value` are
    /// omitted.
    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes: Vec<u8> = value.bytes().filter(|byte| *byte != 0).collect();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    pub(super) fn nested(self, kind: u16, inner: Self) -> Self {
        self.bytes(kind | NESTED, &inner.0)
    }

    /// Adds an attribute; `value` is shorter than 64 KiB.
    fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length =
            u16::try_from(ATTRIBUTE_HEADER + value.len()).expect("an attribute is shorter than 64 KiB");
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

/// Received attributes in sequence; a truncated one ends the sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NetlinkAttributes<'a>(&'a [u8]);

impl<'a> NetlinkAttributes<'a> {
    pub(super) fn iter(self) -> impl Iterator<Item = (u16, NetlinkAttributes<'a>)> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let length = usize::from(u16_at(rest, 0)?);
            // The upper two bits are flags (nested, byte order) and no part of the type.
            let kind = u16_at(rest, 2)? & TYPE_MASK;
            let value = rest.get(ATTRIBUTE_HEADER..length)?;
            // The last attribute may lack its padding.
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            Some((kind, NetlinkAttributes(value)))
        })
    }

    pub(super) fn get(self, kind: u16) -> Option<Self> {
        self.iter().find(|(found, _)| *found == kind).map(|(_, value)| value)
    }

    pub(super) fn as_u8(self) -> Option<u8> {
        self.0.first().copied()
    }

    pub(super) fn as_u16(self) -> Option<u16> {
        u16_at(self.0, 0)
    }

    pub(super) fn as_u32(self) -> Option<u32> {
        u32_at(self.0, 0)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn request(family: u16, sequence: u32, command: u8, attributes: &NetlinkAttributesBuilder) -> Vec<u8> {
    let length = MESSAGE_HEADER + COMMAND_HEADER + attributes.0.len();
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).expect("attributes are short").to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST_FLAGS.to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    // Port ID 0: the kernel fills in the sender's.
    message.extend(0_u32.to_ne_bytes());
    // `genlmsghdr`: the command, version 1, two reserved bytes.
    message.extend([command, 1, 0, 0]);
    message.extend(&attributes.0);
    message
}

/// A received message, as it concerns the request with one sequence number.
#[derive(Debug, PartialEq, Eq)]
enum NetlinkMessage<'a> {
    Reply(NetlinkAttributes<'a>),
    Acknowledged,
    Failed(i32),
    /// A message for another request, or a malformed one.
    Unrelated,
}

/// Returns the first message and the bytes after it; `None` if the first message is incomplete.
fn split_message(bytes: &[u8], sequence: u32) -> Option<(NetlinkMessage<'_>, &[u8])> {
    let length = u32_at(bytes, 0)? as usize;
    let (kind, message_sequence) = (u16_at(bytes, 4)?, u32_at(bytes, 8)?);
    let payload = bytes.get(MESSAGE_HEADER..length)?;
    // Messages are aligned to 4 bytes; the last one may lack its padding.
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    let parsed = match kind {
        _ if message_sequence != sequence => NetlinkMessage::Unrelated,
        ERROR_TYPE => match u32_at(payload, 0)? as i32 {
            0 => NetlinkMessage::Acknowledged,
            negative => NetlinkMessage::Failed(negative.wrapping_neg()),
        },
        _ => payload
            .get(COMMAND_HEADER..)
            .map_or(NetlinkMessage::Unrelated, |rest| NetlinkMessage::Reply(NetlinkAttributes(rest))),
    };
    Some((parsed, rest))
}

/// A socket to the kernel. Its calls block for as long as the kernel executes the command.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    sequence: AtomicU32,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::GENERIC))?;
        // Connected to port 0, the kernel: messages of other senders are not received.
        connect(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket, sequence: AtomicU32::new(1) })
    }

    /// Number of a family by its name; the kernel assigns it when the driver is loaded.
    pub(super) fn family(&self, name: &str) -> io::Result<u16> {
        let query = NetlinkAttributesBuilder::default().text(FAMILY_NAME, name);
        let reply = self.execute(CONTROL_FAMILY, GET_FAMILY, &query)?;
        let id = NetlinkAttributes(&reply).get(FAMILY_ID).and_then(NetlinkAttributes::as_u16);
        id.ok_or_else(|| io::Error::other("the kernel returned no number of the netlink family"))
    }

    /// Executes a command; returns the attributes of the reply, possibly none.
    pub(super) fn execute(
        &self,
        family: u16,
        command: u8,
        attributes: &NetlinkAttributesBuilder,
    ) -> io::Result<Vec<u8>> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        send(&self.socket, &request(family, sequence, command, attributes), SendFlags::empty())?;
        let mut buffer = vec![0; RECEIVE_BUFFER_BYTES];
        let mut reply = Vec::new();
        loop {
            let (received, _) = recv(&self.socket, &mut *buffer, RecvFlags::empty())?;
            let mut rest = &buffer[..received];
            while let Some((parsed, remaining)) = split_message(rest, sequence) {
                rest = remaining;
                match parsed {
                    // The reply precedes the acknowledgment (NLM_F_ACK), which ends the exchange.
                    NetlinkMessage::Reply(attributes) => reply = attributes.0.to_vec(),
                    NetlinkMessage::Acknowledged => return Ok(reply),
                    NetlinkMessage::Failed(errno) => return Err(io::Error::from_raw_os_error(errno)),
                    NetlinkMessage::Unrelated => {}
                }
            }
        }
    }
}

/// Attributes of the reply that [`Netlink::execute`] returned.
pub(super) fn attributes(reply: &[u8]) -> NetlinkAttributes<'_> {
    NetlinkAttributes(reply)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn attributes_are_read_as_they_were_written() {
        let inner = NetlinkAttributesBuilder::default().u32(1, 7);
        let written = NetlinkAttributesBuilder::default().u64(2, 1 << 40).text(10, "weir").nested(7, inner);
        let read = NetlinkAttributes(&written.0);
        let kinds: Vec<_> = read.iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds, [2, 10, 7]);
        assert_eq!(read.get(10), Some(NetlinkAttributes(b"weir\0")));
        assert_eq!(read.get(7).and_then(|inner| inner.get(1)).and_then(NetlinkAttributes::as_u32), Some(7));
        assert_eq!(read.get(3), None);
    }

    #[test]
    fn a_request_has_the_layout_of_the_headers() {
        let message = request(0x1a, 5, 3, &NetlinkAttributesBuilder::default().u32(1, 9));
        let mut expected = Vec::new();
        expected.extend(28_u32.to_ne_bytes());
        expected.extend(0x1a_u16.to_ne_bytes());
        expected.extend(5_u16.to_ne_bytes());
        expected.extend(5_u32.to_ne_bytes());
        expected.extend(0_u32.to_ne_bytes());
        expected.extend([3, 1, 0, 0]);
        expected.extend(8_u16.to_ne_bytes());
        expected.extend(1_u16.to_ne_bytes());
        expected.extend(9_u32.to_ne_bytes());
        assert_eq!(message, expected);
    }

    fn error(sequence: u32, code: i32) -> Vec<u8> {
        let mut message = request(ERROR_TYPE, sequence, 0, &NetlinkAttributesBuilder::default());
        message[MESSAGE_HEADER..].copy_from_slice(&code.to_ne_bytes());
        message
    }

    #[test]
    fn answers_and_errors_are_distinguished() {
        let mut bytes = request(0x1a, 4, 1, &NetlinkAttributesBuilder::default().u32(1, 2));
        bytes.extend(error(4, -libc::EBUSY));
        bytes.extend(error(9, 0));
        let (parsed, rest) = split_message(&bytes, 4).unwrap();
        assert!(
            matches!(parsed, NetlinkMessage::Reply(answer) if answer.get(1).unwrap().as_u32() == Some(2))
        );
        let (parsed, rest) = split_message(rest, 4).unwrap();
        assert_eq!(parsed, NetlinkMessage::Failed(libc::EBUSY));
        assert_eq!(split_message(rest, 4).unwrap(), (NetlinkMessage::Unrelated, &[][..]));
        assert_eq!(split_message(rest, 9).unwrap().0, NetlinkMessage::Acknowledged);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_in_bounded_time(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = &bytes[..];
            while let Some((parsed, remaining)) = split_message(rest, 1) {
                prop_assert!(remaining.len() < rest.len());
                if let NetlinkMessage::Reply(attributes) = parsed {
                    prop_assert!(attributes.iter().count() <= rest.len());
                }
                rest = remaining;
            }
            prop_assert!(NetlinkAttributes(&bytes).iter().count() <= bytes.len());
        }
    }
}
