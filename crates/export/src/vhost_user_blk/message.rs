//! Messages of the vhost-user protocol: parsing requests and encoding replies.
//!
//! ```text
//!   0         4        8              12
//!   ┌─────────┬────────┬───────────────┬─────────┐
//!   │ request │ flags  │ payload bytes │ payload │      and descriptors beside the bytes
//!   └─────────┴────────┴───────────────┴─────────┘
//! ```
//!
//! The source is the vhost-user specification ("Message Specification", "Front-end message types");
//! names are its own. Numbers are in native byte order.
//!
//! Sizes and numbers of descriptors are checked exactly. Unexpected descriptors are closed: each is
//! owned from the moment it was received.

use std::os::fd::OwnedFd;

/// Length of a header.
pub const HEADER_BYTES: usize = 12;
/// Longest payload of any message: a range of the configuration space, or a memory table.
pub const MAX_PAYLOAD_BYTES: usize = CONFIG_HEADER_BYTES + MAX_CONFIG_BYTES;
/// Largest number of descriptors of any message: those of a memory table.
pub const MAX_DESCRIPTORS: usize = MAX_TABLE_REGIONS;
/// Largest number of regions in one memory table. The specification has 8; some front ends use 32.
pub const MAX_TABLE_REGIONS: usize = 32;
/// Largest range of the configuration space in one message; no known front end requests more.
pub const MAX_CONFIG_BYTES: usize = 4096;

const CONFIG_HEADER_BYTES: usize = 12;
const REGION_BYTES: usize = 32;
const TABLE_HEADER_BYTES: usize = 8;
/// Length of an in-flight description: four fields, and the same as a C structure aligned to eight
/// bytes.
const INFLIGHT_BYTES: usize = 20;
const PADDED_INFLIGHT_BYTES: usize = 24;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Flag in the payload that sets a ring's eventfd: no descriptor is passed.
const NO_DESCRIPTOR: u64 = 1 << 8;

/// Numbers of the supported requests.
#[allow(missing_docs, reason = "the specification's names")]
pub mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;

    /// One of the back end's own messages, on the channel of SET_BACKEND_REQ_FD.
    pub const CONFIG_CHANGE_MSG: u32 = 2;
}

/// Name of a request, for the log.
pub fn name(code: u32) -> &'static str {
    match code {
        code::GET_FEATURES => "GET_FEATURES",
        code::SET_FEATURES => "SET_FEATURES",
        code::SET_OWNER => "SET_OWNER",
        code::RESET_OWNER => "RESET_OWNER",
        code::SET_MEM_TABLE => "SET_MEM_TABLE",
        code::SET_LOG_BASE => "SET_LOG_BASE",
        code::SET_LOG_FD => "SET_LOG_FD",
        code::SET_VRING_NUM => "SET_VRING_NUM",
        code::SET_VRING_ADDR => "SET_VRING_ADDR",
        code::SET_VRING_BASE => "SET_VRING_BASE",
        code::GET_VRING_BASE => "GET_VRING_BASE",
        code::SET_VRING_KICK => "SET_VRING_KICK",
        code::SET_VRING_CALL => "SET_VRING_CALL",
        code::SET_VRING_ERR => "SET_VRING_ERR",
        code::GET_PROTOCOL_FEATURES => "GET_PROTOCOL_FEATURES",
        code::SET_PROTOCOL_FEATURES => "SET_PROTOCOL_FEATURES",
        code::GET_QUEUE_NUM => "GET_QUEUE_NUM",
        code::SET_VRING_ENABLE => "SET_VRING_ENABLE",
        code::SET_BACKEND_REQ_FD => "SET_BACKEND_REQ_FD",
        code::GET_CONFIG => "GET_CONFIG",
        code::SET_CONFIG => "SET_CONFIG",
        code::GET_INFLIGHT_FD => "GET_INFLIGHT_FD",
        code::SET_INFLIGHT_FD => "SET_INFLIGHT_FD",
        code::RESET_DEVICE => "RESET_DEVICE",
        code::GET_MAX_MEM_SLOTS => "GET_MAX_MEM_SLOTS",
        code::ADD_MEM_REG => "ADD_MEM_REG",
        code::REM_MEM_REG => "REM_MEM_REG",
        code::SET_STATUS => "SET_STATUS",
        code::GET_STATUS => "GET_STATUS",
        _ => "unknown request",
    }
}

/// Reason why bytes are no valid message.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedVhostUserMessage {
    #[error("version {0} of the protocol instead of 1")]
    Version(u32),
    #[error("a reply instead of a request")]
    Reply,
    #[error("a payload of {0} bytes; the maximum is {MAX_PAYLOAD_BYTES}")]
    TooLong(u32),
    #[error("request {0} is not supported")]
    Unknown(u32),
    #[error("a payload of {is} bytes instead of {due}")]
    Size { is: usize, due: usize },
    #[error("{is} descriptors instead of {due}")]
    Descriptors { is: usize, due: usize },
    #[error("{0} regions in one memory table, {MAX_TABLE_REGIONS} are allowed")]
    Regions(u32),
    #[error("a ring is enabled by 1 and disabled by 0, not by {0}")]
    Enable(u32),
    #[error("the address of a log instead of its descriptor")]
    LogWithoutDescriptor,
    #[error("unknown bits in {0:#x}, the number of a ring")]
    RingBits(u64),
}

/// Header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VhostUserHeader {
    /// The request's number: see [`code`].
    pub code: u32,
    /// True if the front end expects an acknowledgement, if REPLY_ACK was negotiated.
    pub need_reply: bool,
    /// Length of the payload that follows, at most [`MAX_PAYLOAD_BYTES`].
    pub payload_bytes: usize,
}

impl VhostUserHeader {
    /// Parses a front end's header.
    ///
    /// # Errors
    /// [`MalformedVhostUserMessage`]: the end of the message is unknown, so the connection has to
    /// end.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MalformedVhostUserMessage> {
        let (code, flags, payload_bytes) = (u32_at(bytes, 0), u32_at(bytes, 4), u32_at(bytes, 8));
        // "Header": the lower two bits of the flags are the version, bit 2 marks a reply.
        if flags & VERSION_MASK != VERSION {
            return Err(MalformedVhostUserMessage::Version(flags & VERSION_MASK));
        }
        if flags & REPLY != 0 {
            return Err(MalformedVhostUserMessage::Reply);
        }
        let length = usize::try_from(payload_bytes).ok().filter(|length| *length <= MAX_PAYLOAD_BYTES);
        let payload_bytes = length.ok_or(MalformedVhostUserMessage::TooLong(payload_bytes))?;
        Ok(Self { code, need_reply: flags & NEED_REPLY != 0, payload_bytes })
    }
}

/// A region of the guest's memory as the front end describes it, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// First guest-physical address.
    pub guest_address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// First address in the front end's address space.
    pub user_address: u64,
    /// Offset in the region's file.
    pub file_offset: u64,
}

/// Locations of a ring's parts, as addresses in the front end's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddresses {
    /// The descriptor table, or a packed ring's descriptors.
    pub descriptors: u64,
    /// The used ring, or the device's event suppression.
    pub device: u64,
    /// The available ring, or the driver's event suppression.
    pub driver: u64,
}

/// Description of an in-flight area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightInfo {
    /// Length in bytes.
    pub bytes: u64,
    /// Offset in its file.
    pub file_offset: u64,
    /// Number of rings that it has room for.
    pub queues: u16,
    /// Number of descriptors of each ring.
    pub queue_size: u16,
    /// True if the message had the padding that a C compiler appends; the reply has it too.
    pub padded: bool,
}

/// A request of a front end.
#[allow(missing_docs, reason = "the specification's names")]
#[derive(Debug)]
pub enum VhostUserRequest {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(RegionInfo, OwnedFd)>),
    SetLogBase { bytes: u64, file_offset: u64, file: OwnedFd },
    SetLogFd(OwnedFd),
    SetVringNum { ring: u32, descriptors: u32 },
    SetVringAddr { ring: u32, addresses: VringAddresses },
    SetVringBase { ring: u32, base: u32 },
    GetVringBase { ring: u32 },
    SetVringKick { ring: u32, event: Option<OwnedFd> },
    SetVringCall { ring: u32, event: Option<OwnedFd> },
    SetVringErr { ring: u32, event: Option<OwnedFd> },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { ring: u32, enable: bool },
    SetBackendReqFd(OwnedFd),
    GetConfig { offset: u32, flags: u32, bytes: usize },
    SetConfig { offset: u32, flags: u32, content: Vec<u8> },
    GetInflightFd(InflightInfo),
    SetInflightFd(InflightInfo, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(RegionInfo, OwnedFd),
    RemMemReg(RegionInfo),
    SetStatus(u64),
    GetStatus,
}

impl VhostUserRequest {
    /// Parses the payload behind a header. All `descriptors` that are not in the result are closed.
    ///
    /// # Errors
    /// [`MalformedVhostUserMessage`]; the length in its header is valid, so later messages can
    /// be parsed.
    pub fn parse(
        code: u32,
        payload: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self, MalformedVhostUserMessage> {
        let mut body = Body { payload, descriptors };
        let request = match code {
            code::GET_FEATURES => Self::GetFeatures,
            code::SET_FEATURES => Self::SetFeatures(body.number()?),
            code::SET_OWNER => Self::SetOwner,
            code::RESET_OWNER => Self::ResetOwner,
            code::SET_MEM_TABLE => Self::SetMemTable(body.table()?),
            code::SET_LOG_BASE => body.log()?,
            code::SET_LOG_FD => Self::SetLogFd(body.descriptor()?),
            code::SET_VRING_NUM => {
                let (ring, descriptors) = body.state()?;
                Self::SetVringNum { ring, descriptors }
            }
            code::SET_VRING_ADDR => body.addresses()?,
            code::SET_VRING_BASE => {
                let (ring, base) = body.state()?;
                Self::SetVringBase { ring, base }
            }
            code::GET_VRING_BASE => Self::GetVringBase { ring: body.state()?.0 },
            code::SET_VRING_KICK => {
                let (ring, event) = body.event()?;
                Self::SetVringKick { ring, event }
            }
            code::SET_VRING_CALL => {
                let (ring, event) = body.event()?;
                Self::SetVringCall { ring, event }
            }
            code::SET_VRING_ERR => {
                let (ring, event) = body.event()?;
                Self::SetVringErr { ring, event }
            }
            code::GET_PROTOCOL_FEATURES => Self::GetProtocolFeatures,
            code::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(body.number()?),
            code::GET_QUEUE_NUM => Self::GetQueueNum,
            code::SET_VRING_ENABLE => match body.state()? {
                (ring, enable @ (0 | 1)) => Self::SetVringEnable { ring, enable: enable == 1 },
                (_, other) => return Err(MalformedVhostUserMessage::Enable(other)),
            },
            code::SET_BACKEND_REQ_FD => Self::SetBackendReqFd(body.descriptor()?),
            code::GET_CONFIG => {
                let (offset, flags, content) = body.config()?;
                Self::GetConfig { offset, flags, bytes: content.len() }
            }
            code::SET_CONFIG => {
                let (offset, flags, content) = body.config()?;
                Self::SetConfig { offset, flags, content: content.to_vec() }
            }
            code::GET_INFLIGHT_FD => Self::GetInflightFd(body.inflight()?),
            // Mappings count in the front end's quota only once the session maps the file.
            code::SET_INFLIGHT_FD => Self::SetInflightFd(body.inflight()?, body.descriptor()?),
            code::RESET_DEVICE => Self::ResetDevice,
            code::GET_MAX_MEM_SLOTS => Self::GetMaxMemSlots,
            code::ADD_MEM_REG => Self::AddMemReg(body.region()?, body.descriptor()?),
            code::REM_MEM_REG => {
                let region = body.region()?;
                // Some front ends pass the region's descriptor once more; the specification asks
                // back ends to tolerate that ("VHOST_USER_REM_MEM_REG").
                body.descriptors.pop();
                Self::RemMemReg(region)
            }
            code::SET_STATUS => Self::SetStatus(body.number()?),
            code::GET_STATUS => Self::GetStatus,
            unknown => return Err(MalformedVhostUserMessage::Unknown(unknown)),
        };
        body.end()?;
        Ok(request)
    }
}

/// True if a request has its own reply, which then also serves as the acknowledgement.
pub fn has_answer(code: u32) -> bool {
    use code::*;
    matches!(
        code,
        GET_FEATURES
            | GET_PROTOCOL_FEATURES
            | GET_QUEUE_NUM
            | GET_VRING_BASE
            | GET_CONFIG
            | GET_INFLIGHT_FD
            | GET_MAX_MEM_SLOTS
            | GET_STATUS
    )
}

/// Unparsed rest of a message.
struct Body<'a> {
    payload: &'a [u8],
    descriptors: Vec<OwnedFd>,
}

impl<'a> Body<'a> {
    /// Takes the whole payload, which must have `N` bytes.
    fn whole<const N: usize>(&mut self) -> Result<&'a [u8; N], MalformedVhostUserMessage> {
        let wrong = MalformedVhostUserMessage::Size { is: self.payload.len(), due: N };
        let payload = <&[u8; N]>::try_from(self.payload).map_err(|_| wrong)?;
        self.payload = &[];
        Ok(payload)
    }

    fn number(&mut self) -> Result<u64, MalformedVhostUserMessage> {
        Ok(u64::from_ne_bytes(*self.whole()?))
    }

    fn state(&mut self) -> Result<(u32, u32), MalformedVhostUserMessage> {
        let bytes = self.whole::<8>()?;
        Ok((u32_at(bytes, 0), u32_at(bytes, 4)))
    }

    fn addresses(&mut self) -> Result<VhostUserRequest, MalformedVhostUserMessage> {
        let bytes = self.whole::<40>()?;
        // Ignores the flags at 4 (log writes to the used ring) and the log address at 32. Those
        // writes are logged where they happen, with all others: see `session`.
        let addresses = VringAddresses {
            descriptors: u64_at(bytes, 8),
            device: u64_at(bytes, 16),
            driver: u64_at(bytes, 24),
        };
        Ok(VhostUserRequest::SetVringAddr { ring: u32_at(bytes, 0), addresses })
    }

    fn event(&mut self) -> Result<(u32, Option<OwnedFd>), MalformedVhostUserMessage> {
        let number = self.number()?;
        if number & !(0xff | NO_DESCRIPTOR) != 0 {
            return Err(MalformedVhostUserMessage::RingBits(number));
        }
        // Bits 0 to 7 are the ring, bit 8 means that no descriptor is passed
        // ("VHOST_USER_SET_VRING_KICK").
        let event = if number & NO_DESCRIPTOR == 0 { Some(self.descriptor()?) } else { None };
        Ok(((number & 0xff) as u32, event))
    }

    fn table(&mut self) -> Result<Vec<(RegionInfo, OwnedFd)>, MalformedVhostUserMessage> {
        let short = MalformedVhostUserMessage::Size { is: self.payload.len(), due: TABLE_HEADER_BYTES };
        let (header, regions) = self.payload.split_at_checked(TABLE_HEADER_BYTES).ok_or(short)?;
        let count = u32_at(header, 0);
        let due = usize::try_from(count).ok().filter(|count| *count <= MAX_TABLE_REGIONS);
        let due = due.ok_or(MalformedVhostUserMessage::Regions(count))?;
        if regions.len() != due * REGION_BYTES {
            let due = TABLE_HEADER_BYTES + due * REGION_BYTES;
            return Err(MalformedVhostUserMessage::Size { is: self.payload.len(), due });
        }
        // One descriptor for each region, in the order of the regions.
        if self.descriptors.len() != due {
            return Err(MalformedVhostUserMessage::Descriptors { is: self.descriptors.len(), due });
        }
        self.payload = &[];
        let regions = regions.chunks_exact(REGION_BYTES).map(region);
        Ok(regions.zip(self.descriptors.drain(..)).collect())
    }

    fn region(&mut self) -> Result<RegionInfo, MalformedVhostUserMessage> {
        let bytes = self.whole::<{ 8 + REGION_BYTES }>()?;
        Ok(region(&bytes[8..]))
    }

    fn log(&mut self) -> Result<VhostUserRequest, MalformedVhostUserMessage> {
        // An eight-byte payload is an address in the front end, as the kernel's vhost accepts it.
        if self.payload.len() == 8 {
            return Err(MalformedVhostUserMessage::LogWithoutDescriptor);
        }
        let area = self.whole::<16>()?;
        let file = self.descriptor()?;
        Ok(VhostUserRequest::SetLogBase { bytes: u64_at(area, 0), file_offset: u64_at(area, 8), file })
    }

    fn config(&mut self) -> Result<(u32, u32, &'a [u8]), MalformedVhostUserMessage> {
        let short = MalformedVhostUserMessage::Size { is: self.payload.len(), due: CONFIG_HEADER_BYTES };
        let (header, content) = self.payload.split_at_checked(CONFIG_HEADER_BYTES).ok_or(short)?;
        let size = u32_at(header, 4) as usize;
        if content.len() != size {
            let due = CONFIG_HEADER_BYTES.saturating_add(size);
            return Err(MalformedVhostUserMessage::Size { is: self.payload.len(), due });
        }
        self.payload = &[];
        Ok((u32_at(header, 0), u32_at(header, 8), content))
    }

    fn inflight(&mut self) -> Result<InflightInfo, MalformedVhostUserMessage> {
        // Front ends written in C send the structure with its padding, others without.
        let padded = self.payload.len() == PADDED_INFLIGHT_BYTES;
        let bytes: &[u8] =
            if padded { self.whole::<PADDED_INFLIGHT_BYTES>()? } else { self.whole::<INFLIGHT_BYTES>()? };
        Ok(InflightInfo {
            bytes: u64_at(bytes, 0),
            file_offset: u64_at(bytes, 8),
            queues: u16_at(bytes, 16),
            queue_size: u16_at(bytes, 18),
            padded,
        })
    }

    fn descriptor(&mut self) -> Result<OwnedFd, MalformedVhostUserMessage> {
        match self.descriptors.len() {
            1 => self.descriptors.pop().ok_or(MalformedVhostUserMessage::Descriptors { is: 0, due: 1 }),
            is => Err(MalformedVhostUserMessage::Descriptors { is, due: 1 }),
        }
    }

    /// Fails if a part of the message was not consumed.
    fn end(self) -> Result<(), MalformedVhostUserMessage> {
        match (self.payload.len(), self.descriptors.len()) {
            (0, 0) => Ok(()),
            (0, is) => Err(MalformedVhostUserMessage::Descriptors { is, due: 0 }),
            (is, _) => Err(MalformedVhostUserMessage::Size { is, due: 0 }),
        }
    }
}

/// Payload of one number.
pub(super) fn number(number: u64) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

/// Payload of several numbers.
pub(super) fn numbers(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Payload of a ring and a number.
pub(super) fn state(ring: u32, value: u32) -> Vec<u8> {
    [ring, value].map(u32::to_ne_bytes).concat()
}

/// Payload of a ring's eventfd, with or without a descriptor.
pub(super) fn event(ring: u32, has_descriptor: bool) -> Vec<u8> {
    number(u64::from(ring) | if has_descriptor { 0 } else { NO_DESCRIPTOR })
}

/// Payload of a ring's addresses.
pub(super) fn addresses_of(ring: u32, addresses: &VringAddresses) -> Vec<u8> {
    let &VringAddresses { descriptors, device, driver } = addresses;
    [state(ring, 0), numbers(&[descriptors, device, driver, 0])].concat()
}

/// Payload of one memory region.
pub(super) fn region_of(info: &RegionInfo) -> Vec<u8> {
    let &RegionInfo { guest_address, bytes, user_address, file_offset } = info;
    numbers(&[0, guest_address, bytes, user_address, file_offset])
}

/// Payload of an in-flight area.
pub(super) fn area_of(info: &InflightInfo) -> Vec<u8> {
    let sizes = [info.queues, info.queue_size].map(u16::to_ne_bytes).concat();
    let padding: &[u8] = if info.padded { &[0; PADDED_INFLIGHT_BYTES - INFLIGHT_BYTES] } else { &[] };
    [&numbers(&[info.bytes, info.file_offset]), &sizes[..], padding].concat()
}

/// Payload of a range of the configuration space.
pub(super) fn config_of(offset: u32, flags: u32, content: &[u8]) -> Vec<u8> {
    // Cannot truncate: as long as the request's content, whose length has four bytes.
    let size = content.len() as u32;
    let head = [offset, size, flags].map(u32::to_ne_bytes).concat();
    [&head[..], content].concat()
}

/// Parses exactly [`REGION_BYTES`].
fn region(bytes: &[u8]) -> RegionInfo {
    RegionInfo {
        guest_address: u64_at(bytes, 0),
        bytes: u64_at(bytes, 8),
        user_address: u64_at(bytes, 16),
        file_offset: u64_at(bytes, 24),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// A reply to a front end, ready to be sent.
#[derive(Debug)]
pub struct VhostUserReply {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// Sent beside the bytes.
    pub descriptor: Option<OwnedFd>,
}

impl VhostUserReply {
    fn new(code: u32, payload: &[&[u8]]) -> Self {
        Self { bytes: message(code, VERSION | REPLY, payload), descriptor: None }
    }

    /// A number; as an acknowledgement, 0 is success.
    pub fn number(code: u32, number: u64) -> Self {
        Self::new(code, &[&number.to_ne_bytes()])
    }

    /// Index at which a stopped ring continues later.
    pub fn vring_base(ring: u32, base: u32) -> Self {
        Self::new(code::GET_VRING_BASE, &[&ring.to_ne_bytes(), &base.to_ne_bytes()])
    }

    /// A range of the configuration space.
    pub fn config(offset: u32, flags: u32, content: &[u8]) -> Self {
        Self::new(code::GET_CONFIG, &[&config_of(offset, flags, content)])
    }

    /// Failure to read the configuration space: an empty payload.
    pub fn no_config() -> Self {
        Self::new(code::GET_CONFIG, &[])
    }

    /// An in-flight area and its file. Without a file, an area of no bytes: none is available.
    pub fn inflight(area: &InflightInfo, file: Option<OwnedFd>) -> Self {
        Self { descriptor: file, ..Self::new(code::GET_INFLIGHT_FD, &[&area_of(area)]) }
    }
}

/// CONFIG_CHANGE_MSG, which makes a front end read the configuration space again; it is not
/// acknowledged.
pub fn config_change() -> Vec<u8> {
    message(code::CONFIG_CHANGE_MSG, VERSION, &[])
}

fn message(code: u32, flags: u32, payload: &[&[u8]]) -> Vec<u8> {
    let payload = payload.concat();
    // Cannot truncate: payloads are created here and short.
    let length = payload.len() as u32;
    let mut bytes = [code, flags, length].map(u32::to_ne_bytes).concat();
    bytes.extend_from_slice(&payload);
    bytes
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| File::open("/dev/null").expect("it is there").into()).collect()
    }

    fn header(code: u32, flags: u32, length: u32) -> Result<VhostUserHeader, MalformedVhostUserMessage> {
        let bytes = [code, flags, length].map(u32::to_ne_bytes).concat();
        VhostUserHeader::parse(bytes.as_slice().try_into().expect("twelve bytes"))
    }

    #[test]
    fn headers_of_other_versions_and_replies_are_rejected() {
        let parsed = header(1, 1, 0).expect("as QEMU sends it");
        assert_eq!(parsed, VhostUserHeader { code: 1, need_reply: false, payload_bytes: 0 });
        assert!(header(5, 9, 4096).expect("to be acknowledged").need_reply);
        assert_eq!(header(1, 0, 0), Err(MalformedVhostUserMessage::Version(0)));
        assert_eq!(header(1, 2, 0), Err(MalformedVhostUserMessage::Version(2)));
        assert_eq!(header(1, 5, 0), Err(MalformedVhostUserMessage::Reply));
        assert_eq!(header(1, 1, u32::MAX), Err(MalformedVhostUserMessage::TooLong(u32::MAX)));
        assert!(header(1, 1, MAX_PAYLOAD_BYTES as u32).is_ok());
        assert!(header(1, 1, MAX_PAYLOAD_BYTES as u32 + 1).is_err());
    }

    /// Every request with exactly its payload and its descriptors, and no other.
    #[test]
    fn sizes_and_descriptors_are_exact() {
        use code::*;
        let table = |regions: u32| {
            [&regions.to_ne_bytes()[..], &[0; 4], &vec![0; regions as usize * REGION_BYTES]].concat()
        };
        let config =
            |bytes: u32| [[0_u32, bytes, 0].map(u32::to_ne_bytes).concat(), vec![0; bytes as usize]].concat();
        let no_event = NO_DESCRIPTOR.to_ne_bytes().to_vec();
        let exact = [
            (GET_FEATURES, vec![], 0),
            (SET_FEATURES, vec![0; 8], 0),
            (SET_OWNER, vec![], 0),
            (RESET_OWNER, vec![], 0),
            (SET_MEM_TABLE, table(0), 0),
            (SET_MEM_TABLE, table(1), 1),
            (SET_MEM_TABLE, table(32), 32),
            (SET_LOG_BASE, vec![0; 16], 1),
            (SET_LOG_FD, vec![], 1),
            (SET_VRING_NUM, vec![0; 8], 0),
            (SET_VRING_ADDR, vec![0; 40], 0),
            (SET_VRING_BASE, vec![0; 8], 0),
            (GET_VRING_BASE, vec![0; 8], 0),
            (SET_VRING_KICK, vec![0; 8], 1),
            (SET_VRING_CALL, vec![0; 8], 1),
            (SET_VRING_ERR, vec![0; 8], 1),
            (SET_VRING_KICK, no_event.clone(), 0),
            (SET_VRING_CALL, no_event.clone(), 0),
            (SET_VRING_ERR, no_event, 0),
            (GET_PROTOCOL_FEATURES, vec![], 0),
            (SET_PROTOCOL_FEATURES, vec![0; 8], 0),
            (GET_QUEUE_NUM, vec![], 0),
            (SET_VRING_ENABLE, vec![0; 8], 0),
            (SET_BACKEND_REQ_FD, vec![], 1),
            (GET_CONFIG, config(0), 0),
            (GET_CONFIG, config(60), 0),
            (SET_CONFIG, config(1), 0),
            (GET_INFLIGHT_FD, vec![0; 24], 0),
            (GET_INFLIGHT_FD, vec![0; 20], 0),
            (SET_INFLIGHT_FD, vec![0; 24], 1),
            (RESET_DEVICE, vec![], 0),
            (GET_MAX_MEM_SLOTS, vec![], 0),
            (ADD_MEM_REG, vec![0; 40], 1),
            (REM_MEM_REG, vec![0; 40], 0),
            (REM_MEM_REG, vec![0; 40], 1),
            (SET_STATUS, vec![0; 8], 0),
            (GET_STATUS, vec![], 0),
        ];
        for (code, payload, count) in &exact {
            let name = name(*code);
            let parsed = |payload: &[u8], count| VhostUserRequest::parse(*code, payload, descriptors(count));
            assert!(parsed(payload, *count).is_ok(), "{name}");
            let longer = [payload, &[0][..]].concat();
            assert!(matches!(parsed(&longer, *count), Err(MalformedVhostUserMessage::Size { .. })), "{name}");
            if let Some((_, shorter)) = payload.split_last() {
                assert!(
                    matches!(parsed(shorter, *count), Err(MalformedVhostUserMessage::Size { .. })),
                    "{name}"
                );
            }
            for wrong in [count + 1, count + 2] {
                if *code == REM_MEM_REG && wrong == 1 {
                    continue;
                }
                let refused =
                    matches!(parsed(payload, wrong), Err(MalformedVhostUserMessage::Descriptors { .. }));
                assert!(refused, "{name} with {wrong} descriptors");
            }
            if *count > 0 && *code != REM_MEM_REG {
                assert!(
                    matches!(parsed(payload, count - 1), Err(MalformedVhostUserMessage::Descriptors { .. })),
                    "{name}"
                );
            }
        }
        for unknown in [0, 19, 20, 22, 23, 26, 27, 28, 29, 30, 33, 35, 41, 44, u32::MAX] {
            let parsed = VhostUserRequest::parse(unknown, &[], Vec::new());
            assert_eq!(parsed.err(), Some(MalformedVhostUserMessage::Unknown(unknown)));
        }
    }

    #[test]
    fn payload_fields_are_parsed() {
        let bytes: Vec<u8> = (1..=5_u64).flat_map(u64::to_ne_bytes).collect();
        let parsed = VhostUserRequest::parse(code::SET_VRING_ADDR, &bytes, Vec::new()).expect("well formed");
        let VhostUserRequest::SetVringAddr { ring: 1, addresses } = parsed else { panic!("{parsed:?}") };
        assert_eq!(addresses, VringAddresses { descriptors: 2, device: 3, driver: 4 });

        let parsed = VhostUserRequest::parse(code::ADD_MEM_REG, &bytes, descriptors(1)).expect("well formed");
        let VhostUserRequest::AddMemReg(region, _) = parsed else { panic!("{parsed:?}") };
        let expected = RegionInfo { guest_address: 2, bytes: 3, user_address: 4, file_offset: 5 };
        assert_eq!(region, expected);

        let enable = |number: u32| {
            VhostUserRequest::parse(
                code::SET_VRING_ENABLE,
                &[3, number].map(u32::to_ne_bytes).concat(),
                Vec::new(),
            )
        };
        assert!(matches!(enable(0), Ok(VhostUserRequest::SetVringEnable { ring: 3, enable: false })));
        assert!(matches!(enable(1), Ok(VhostUserRequest::SetVringEnable { ring: 3, enable: true })));
        assert_eq!(enable(2).err(), Some(MalformedVhostUserMessage::Enable(2)));

        let log = VhostUserRequest::parse(code::SET_LOG_BASE, &[0; 8], Vec::new());
        assert_eq!(log.err(), Some(MalformedVhostUserMessage::LogWithoutDescriptor));
        let kick = VhostUserRequest::parse(code::SET_VRING_KICK, &0x200_u64.to_ne_bytes(), descriptors(1));
        assert_eq!(kick.err(), Some(MalformedVhostUserMessage::RingBits(0x200)));
        let table = [33_u32, 0].map(u32::to_ne_bytes).concat();
        let table = VhostUserRequest::parse(code::SET_MEM_TABLE, &table, Vec::new());
        assert_eq!(table.err(), Some(MalformedVhostUserMessage::Regions(33)));
    }

    #[test]
    fn replies_are_as_long_as_the_front_end_expects_them() {
        let area = |padded| InflightInfo { bytes: 7, file_offset: 0, queues: 2, queue_size: 128, padded };
        assert_eq!(VhostUserReply::inflight(&area(true), None).bytes.len(), HEADER_BYTES + 24);
        assert_eq!(VhostUserReply::inflight(&area(false), None).bytes.len(), HEADER_BYTES + 20);
        assert_eq!(VhostUserReply::no_config().bytes, [24_u32, 5, 0].map(u32::to_ne_bytes).concat());
        let config = VhostUserReply::config(32, 1, &[1]).bytes;
        let head = [24_u32, 5, 13, 32, 1, 1].map(u32::to_ne_bytes).concat();
        assert_eq!(config, [head, vec![1]].concat());
        assert_eq!(config_change(), [2_u32, 1, 0].map(u32::to_ne_bytes).concat());
        let number = [[11_u32, 5, 8].map(u32::to_ne_bytes), [[3, 0, 0, 0], [9, 0, 0, 0], [0; 4]]].concat();
        assert_eq!(VhostUserReply::vring_base(3, 9).bytes, number[..5].concat());
    }
}
