//! Messages of the kernel's FUSE protocol: bytes and values.
//!
//! Layouts and names are those of `include/uapi/linux/fuse.h`, 7.31 and later. A message begins
//! with its own length. Messages from the kernel are validated like any other input: a message that
//! does not fit its layout is an error.
//!
//! Never does I/O, and never reads a request's data.

/// `fuse_in_header`.
pub(super) const HEADER_BYTES: usize = 40;
/// Length of a WRITE before its data: the header and `fuse_write_in`.
pub const WRITE_HEAD_BYTES: usize = 80;
/// Number of bytes that [`parse`] needs: the longest fixed part of any message, SETATTR's.
pub const MAX_PARSED_BYTES: usize = HEADER_BYTES + 88;
/// `fuse_out_header`.
const REPLY_HEADER_BYTES: usize = 16;
/// Longest reply without data: `fuse_attr_out`.
const MAX_REPLY_BYTES: usize = REPLY_HEADER_BYTES + 104;

/// `FUSE_KERNEL_VERSION`.
pub(super) const MAJOR: u32 = 7;

/// Numbers of the kernel's requests.
pub(super) mod opcode {
    pub(in crate::fuse) const LOOKUP: u32 = 1;
    pub(in crate::fuse) const FORGET: u32 = 2;
    pub(in crate::fuse) const GETATTR: u32 = 3;
    pub(in crate::fuse) const SETATTR: u32 = 4;
    pub(in crate::fuse) const OPEN: u32 = 14;
    pub(in crate::fuse) const READ: u32 = 15;
    pub(in crate::fuse) const WRITE: u32 = 16;
    pub(in crate::fuse) const STATFS: u32 = 17;
    pub(in crate::fuse) const RELEASE: u32 = 18;
    pub(in crate::fuse) const FSYNC: u32 = 20;
    pub(in crate::fuse) const INIT: u32 = 26;
    pub(in crate::fuse) const INTERRUPT: u32 = 36;
    pub(in crate::fuse) const DESTROY: u32 = 38;
    pub(in crate::fuse) const IOCTL: u32 = 39;
    pub(in crate::fuse) const BATCH_FORGET: u32 = 42;
    pub(in crate::fuse) const FALLOCATE: u32 = 43;
    pub(in crate::fuse) const LSEEK: u32 = 46;
}

/// Bits of `fuse_setattr_in.valid`.
pub(super) mod valid {
    pub(in crate::fuse) const MODE: u32 = 1;
    pub(in crate::fuse) const UID: u32 = 1 << 1;
    pub(in crate::fuse) const GID: u32 = 1 << 2;
    pub(in crate::fuse) const SIZE: u32 = 1 << 3;
}

/// A message of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseRequest {
    /// Number that identifies its reply.
    pub unique: u64,
    /// The requested operation.
    pub operation: FuseOperation,
}

/// An operation on the only file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FuseOperation {
    /// The first message.
    Init(Init),
    /// The last message.
    Destroy,
    /// Lookup of a name below the file, which is no directory.
    Lookup,
    /// `stat(2)`.
    GetAttributes,
    /// `chmod(2)`, `chown(2)`, `truncate(2)`.
    SetAttributes(AttributeChanges),
    /// `open(2)`.
    Open {
        /// `O_…`.
        flags: u32,
    },
    /// Close of the last descriptor of an Open.
    Release,
    /// Read of data.
    Read {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u32,
    },
    /// Write; the data follows the message's first [`WRITE_HEAD_BYTES`].
    Write {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u32,
        /// `O_…` of the open file.
        flags: u32,
        /// True if the kernel writes it back from the page cache, as of a mapped file.
        cached: bool,
    },
    /// `fsync(2)`: make written data durable.
    Sync,
    /// `fallocate(2)`.
    Allocate {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// `FALLOC_FL_…`.
        mode: u32,
    },
    /// `lseek(2)` to data or to a hole.
    Seek {
        /// Start of the search.
        offset: u64,
        /// `SEEK_…`.
        whence: u32,
    },
    /// Size of the file system.
    StatFs,
    /// The process of a request was interrupted. No reply.
    Interrupt {
        /// The interrupted request.
        unique: u64,
    },
    /// The kernel drops references to an inode. No reply.
    Forget,
    /// `ioctl(2)`.
    Ioctl,
    /// Any other operation.
    Other,
}

/// `fuse_init_in`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Init {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Largest read-ahead, in bytes.
    pub max_readahead: u32,
    /// Capabilities of the kernel.
    pub flags: u64,
}

/// Attributes that SETATTR changes. Times are ignored: the file shows the time of the disk's last
/// change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributeChanges {
    /// Length in bytes.
    pub size: Option<u64>,
    /// Permissions.
    pub mode: Option<u32>,
    /// User ID.
    pub uid: Option<u32>,
    /// Group ID.
    pub gid: Option<u32>,
}

/// An invalid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedFuseMessage {
    /// Request to be answered with an error, if it is known.
    pub unique: Option<u64>,
}

/// Parses a message of `length` bytes. `bytes` are its first [`MAX_PARSED_BYTES`], or all of it if
/// it is shorter.
///
/// # Errors
/// [`MalformedFuseMessage`].
pub fn parse(bytes: &[u8], length: usize) -> Result<FuseRequest, MalformedFuseMessage> {
    // Without a header there is no request to answer; with one, the error can be sent.
    let malformed = |unique| move || MalformedFuseMessage { unique };
    let header = FuseFields(bytes.get(..HEADER_BYTES).ok_or(MalformedFuseMessage { unique: None })?);
    let unique = header.u64(8).ok_or_else(malformed(None))?;
    // The unique number is read first, so that a message of wrong length can still be answered.
    let fits = header.u32(0).and_then(|declared| usize::try_from(declared).ok()) == Some(length);
    let body = FuseFields(&bytes[HEADER_BYTES..]);
    let operation = header.u32(4).filter(|_| fits).and_then(|opcode| operation(opcode, body, length));
    Ok(FuseRequest { unique, operation: operation.ok_or_else(malformed(Some(unique)))? })
}

fn operation(opcode: u32, body: FuseFields<'_>, length: usize) -> Option<FuseOperation> {
    Some(match opcode {
        opcode::INIT => FuseOperation::Init(Init {
            major: body.u32(0)?,
            minor: body.u32(4)?,
            max_readahead: body.u32(8)?,
            // The upper half was added in 7.36.
            flags: u64::from(body.u32(12)?) | u64::from(body.u32(16).unwrap_or(0)) << 32,
        }),
        opcode::DESTROY => FuseOperation::Destroy,
        opcode::LOOKUP => FuseOperation::Lookup,
        opcode::GETATTR => FuseOperation::GetAttributes,
        opcode::SETATTR => {
            let changed = body.u32(0)?;
            let is_changed = |bit| changed & bit != 0;
            let (size, mode) = (body.u64(16)?, body.u32(68)?);
            let (uid, gid) = (body.u32(76)?, body.u32(80)?);
            FuseOperation::SetAttributes(AttributeChanges {
                size: is_changed(valid::SIZE).then_some(size),
                mode: is_changed(valid::MODE).then_some(mode),
                uid: is_changed(valid::UID).then_some(uid),
                gid: is_changed(valid::GID).then_some(gid),
            })
        }
        opcode::OPEN => FuseOperation::Open { flags: body.u32(0)? },
        opcode::RELEASE => FuseOperation::Release,
        opcode::READ => FuseOperation::Read { offset: body.u64(8)?, length: body.u32(16)? },
        opcode::WRITE => {
            let (offset, bytes, flags) = (body.u64(8)?, body.u32(16)?, body.u32(32)?);
            // The data must be complete: its length is used to take memory from the receive buffer.
            let data_bytes = length.checked_sub(WRITE_HEAD_BYTES)?;
            if usize::try_from(bytes) != Ok(data_bytes) {
                return None;
            }
            // FUSE_WRITE_CACHE
            let cached = body.u32(20)? & 1 != 0;
            FuseOperation::Write { offset, length: bytes, flags, cached }
        }
        opcode::FSYNC => FuseOperation::Sync,
        opcode::FALLOCATE => {
            FuseOperation::Allocate { offset: body.u64(8)?, length: body.u64(16)?, mode: body.u32(24)? }
        }
        opcode::LSEEK => FuseOperation::Seek { offset: body.u64(8)?, whence: body.u32(16)? },
        opcode::STATFS => FuseOperation::StatFs,
        opcode::INTERRUPT => FuseOperation::Interrupt { unique: body.u64(0)? },
        opcode::FORGET | opcode::BATCH_FORGET => FuseOperation::Forget,
        opcode::IOCTL => FuseOperation::Ioctl,
        _ => FuseOperation::Other,
    })
}

/// Numbers at fixed offsets, in native byte order.
#[derive(Clone, Copy)]
struct FuseFields<'a>(&'a [u8]);

impl FuseFields<'_> {
    fn u32(self, at: usize) -> Option<u32> {
        let bytes = self.0.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }

    fn u64(self, at: usize) -> Option<u64> {
        let bytes = self.0.get(at..at + 8)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }
}

/// `fuse_init_out`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InitReply {
    /// Minor version.
    pub minor: u32,
    /// Largest read-ahead, in bytes.
    pub max_readahead: u32,
    /// Capabilities that are used.
    pub flags: u64,
    /// Number of background requests (asynchronous direct I/O) at a time.
    pub max_background: u16,
    /// Longest write, in bytes.
    pub max_write: u32,
    /// Largest number of pages of a request.
    pub max_pages: u16,
}

/// Attributes of the file for `stat(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseFileAttributes {
    /// Length in bytes.
    pub size_bytes: u64,
    /// Allocated storage in bytes.
    pub space_bytes: u64,
    /// Time of the disk's last change: seconds and nanoseconds since the epoch.
    pub modified: (u64, u32),
    /// Permissions.
    pub permissions: u32,
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Preferred I/O size.
    pub block_bytes: u32,
}

/// A reply, or its part before the data.
#[derive(Clone, Copy, Debug)]
pub struct FuseReply {
    bytes: [u8; MAX_REPLY_BYTES],
    length: usize,
}

impl FuseReply {
    /// Success without a value.
    #[must_use]
    pub fn done(unique: u64) -> Self {
        let mut reply = Self { bytes: [0; MAX_REPLY_BYTES], length: REPLY_HEADER_BYTES };
        reply.bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        reply.seal(0)
    }

    /// Failure with an error number of Linux.
    #[must_use]
    pub fn error(unique: u64, errno: i32) -> Self {
        let mut reply = Self::done(unique);
        reply.bytes[4..8].copy_from_slice(&errno.saturating_neg().to_ne_bytes());
        reply
    }

    /// Success, followed by `bytes` of data.
    ///
    /// # Panics
    /// For 4 GiB or more.
    #[must_use]
    pub fn data(unique: u64, bytes: usize) -> Self {
        Self::done(unique).seal(bytes)
    }

    /// Number of bytes that were written.
    #[must_use]
    pub fn written(unique: u64, bytes: u32) -> Self {
        Self::done(unique).u32(bytes).u32(0).seal(0)
    }

    /// Success of OPEN, with `FOPEN_…` flags.
    #[must_use]
    pub fn opened(unique: u64, flags: u32) -> Self {
        Self::done(unique).u64(0).u32(flags).u32(0).seal(0)
    }

    /// Offset that `lseek` found.
    #[must_use]
    pub fn offset(unique: u64, offset: u64) -> Self {
        Self::done(unique).u64(offset).seal(0)
    }

    /// Reply to INIT.
    #[must_use]
    pub fn init(unique: u64, init: &InitReply) -> Self {
        let background = u32::from(init.max_background);
        // As the kernel's own defaults: congested at three quarters.
        let congested = background * 3 / 4;
        Self::done(unique)
            .u32(MAJOR)
            .u32(init.minor)
            .u32(init.max_readahead)
            // Split in two halves since 7.36; the upper one follows max_pages.
            .u32(init.flags as u32)
            .u16(init.max_background)
            .u16(congested as u16)
            .u32(init.max_write)
            .u32(1)
            .u16(init.max_pages)
            .u16(0)
            .u32((init.flags >> 32) as u32)
            .padded(REPLY_HEADER_BYTES + 64)
            .seal(0)
    }

    /// Attributes with a validity of zero, so that the kernel requests them each time.
    #[must_use]
    pub fn attributes(unique: u64, file: &FuseFileAttributes) -> Self {
        const REGULAR_FILE: u32 = 0o100_000;
        let (seconds, nanoseconds) = file.modified;
        Self::done(unique)
            .u64(0)
            .u64(0)
            // Begin of `fuse_attr`.
            .u64(1)
            .u64(file.size_bytes)
            .u64(file.space_bytes.div_ceil(512))
            .u64(seconds)
            .u64(seconds)
            .u64(seconds)
            .u32(nanoseconds)
            .u32(nanoseconds)
            .u32(nanoseconds)
            // One link, the type of a regular file, and the same time for access, change and
            // modification.
            .u32(REGULAR_FILE | file.permissions)
            .u32(1)
            .u32(file.uid)
            .u32(file.gid)
            .u32(0)
            .u32(file.block_bytes)
            .u32(0)
            .seal(0)
    }

    /// A file system that is full with its one file.
    #[must_use]
    pub fn file_system(unique: u64, size_bytes: u64) -> Self {
        const BLOCK: u64 = 4096;
        Self::done(unique)
            .u64(size_bytes.div_ceil(BLOCK))
            .u64(0)
            .u64(0)
            .u64(1)
            .u64(0)
            .u32(BLOCK as u32)
            .u32(255)
            .u32(BLOCK as u32)
            .padded(REPLY_HEADER_BYTES + 80)
            .seal(0)
    }

    /// Encoded bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn put(mut self, bytes: &[u8]) -> Self {
        self.bytes[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
        self
    }

    fn u16(self, value: u16) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn u32(self, value: u32) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn padded(mut self, length: usize) -> Self {
        self.length = length;
        self
    }

    /// Sets the length field to the encoded bytes and the data that follows.
    fn seal(mut self, data_bytes: usize) -> Self {
        let length = u32::try_from(self.length + data_bytes).expect("less than 4 GiB are asked for");
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with these numbers in its body, each with its width.
    fn message(opcode: u32, body: &[(u64, usize)]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77_u64.to_ne_bytes());
        for (number, width) in body {
            // All supported machines are little-endian.
            bytes.extend(&number.to_le_bytes()[..*width]);
        }
        let length = bytes.len() as u32;
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes
    }

    fn parsed(opcode: u32, body: &[(u64, usize)]) -> FuseOperation {
        let bytes = message(opcode, body);
        let request = parse(&bytes, bytes.len()).expect("it is well formed");
        assert_eq!(request.unique, 77);
        request.operation
    }

    #[test]
    fn fields_are_parsed_at_the_specified_offsets() {
        let fh = (9, 8);
        assert_eq!(
            parsed(opcode::READ, &[fh, (4096, 8), (512, 4), (0, 4), (0, 8), (0x8000, 4), (0, 4)]),
            FuseOperation::Read { offset: 4096, length: 512 }
        );
        let write = [fh, (4096, 8), (8, 4), (1, 4), (0, 8), (0x1000, 4), (0, 4), (0, 8)];
        assert_eq!(
            parsed(opcode::WRITE, &write),
            FuseOperation::Write { offset: 4096, length: 8, flags: 0x1000, cached: true }
        );
        assert_eq!(
            parsed(opcode::FALLOCATE, &[fh, (10, 8), (20, 8), (3, 4), (0, 4)]),
            FuseOperation::Allocate { offset: 10, length: 20, mode: 3 }
        );
        assert_eq!(
            parsed(opcode::LSEEK, &[fh, (10, 8), (4, 4), (0, 4)]),
            FuseOperation::Seek { offset: 10, whence: 4 }
        );
        assert_eq!(parsed(opcode::OPEN, &[(2, 4), (0, 4)]), FuseOperation::Open { flags: 2 });
        assert_eq!(parsed(opcode::INTERRUPT, &[(76, 8)]), FuseOperation::Interrupt { unique: 76 });
        assert_eq!(
            parsed(opcode::INIT, &[(7, 4), (31, 4), (65_536, 4), (5, 4)]),
            FuseOperation::Init(Init { major: 7, minor: 31, max_readahead: 65_536, flags: 5 })
        );
        let FuseOperation::Init(init) =
            parsed(opcode::INIT, &[(7, 4), (40, 4), (1, 4), (1 << 30, 4), (16, 4)])
        else {
            panic!("it is INIT");
        };
        assert_eq!(init.flags, 1 << 30 | 1 << 36);
        let mut attributes = vec![(valid::SIZE.into(), 4), (0, 4), fh, (1 << 20, 8), (0, 8)];
        attributes.extend([
            (1, 8),
            (2, 8),
            (3, 8),
            (4, 4),
            (5, 4),
            (6, 4),
            (0o644, 4),
            (0, 4),
            (7, 4),
            (8, 4),
            (0, 4),
        ]);
        let changed = |operation| match operation {
            FuseOperation::SetAttributes(changes) => changes,
            other => panic!("{other:?}"),
        };
        let size = AttributeChanges { size: Some(1 << 20), ..AttributeChanges::default() };
        assert_eq!(changed(parsed(opcode::SETATTR, &attributes)), size);
        attributes[0].0 = u64::from(valid::MODE | valid::UID | valid::GID);
        let owner = AttributeChanges { size: None, mode: Some(0o644), uid: Some(7), gid: Some(8) };
        assert_eq!(changed(parsed(opcode::SETATTR, &attributes)), owner);
    }

    #[test]
    fn malformed_messages_are_rejected() {
        let good = message(opcode::READ, &[(0, 8), (0, 8), (512, 4), (0, 4), (0, 8), (0, 8)]);
        assert!(parse(&good, good.len()).is_ok());
        assert_eq!(parse(&good, good.len() + 1), Err(MalformedFuseMessage { unique: Some(77) }));
        let mut short = good.clone();
        short.truncate(50);
        short[..4].copy_from_slice(&50_u32.to_ne_bytes());
        assert_eq!(parse(&short, 50), Err(MalformedFuseMessage { unique: Some(77) }));
        assert_eq!(parse(&good[..39], 39), Err(MalformedFuseMessage { unique: None }));
        // A write with incomplete data.
        let write = message(opcode::WRITE, &[(0, 8), (0, 8), (9, 4), (0, 4), (0, 8), (0, 8), (0, 8)]);
        assert_eq!(parse(&write, write.len()), Err(MalformedFuseMessage { unique: Some(77) }));
    }

    #[test]
    fn replies_are_as_long_as_the_kernel_expects() {
        let file = FuseFileAttributes {
            size_bytes: 1000,
            space_bytes: 600,
            modified: (1, 2),
            permissions: 0o600,
            uid: 3,
            gid: 4,
            block_bytes: 4096,
        };
        for (reply, bytes) in [
            (FuseReply::done(1), 0),
            (FuseReply::error(1, 5), 0),
            (FuseReply::written(1, 2), 8),
            (FuseReply::opened(1, 2), 16),
            (FuseReply::offset(1, 2), 8),
            (FuseReply::init(1, &InitReply::default()), 64),
            (FuseReply::attributes(1, &file), 104),
            (FuseReply::file_system(1, 1000), 80),
        ] {
            let reply = reply.as_bytes();
            assert_eq!(reply.len(), REPLY_HEADER_BYTES + bytes);
            assert_eq!(reply[..4], (reply.len() as u32).to_ne_bytes());
            assert_eq!(reply[8..16], 1_u64.to_ne_bytes());
        }
        assert_eq!(FuseReply::data(1, 100).as_bytes()[..4], 116_u32.to_ne_bytes());
        assert_eq!(FuseReply::error(1, 5).as_bytes()[4..8], (-5_i32).to_ne_bytes());
        let attributes = FuseReply::attributes(1, &file);
        let at = |offset: usize| &attributes.as_bytes()[REPLY_HEADER_BYTES + offset..];
        // fuse_attr_out begins with its validity: zero.
        assert_eq!(at(0)[..12], [0; 12]);
        assert_eq!(at(16 + 8)[..8], 1000_u64.to_ne_bytes());
        assert_eq!(at(16 + 60)[..4], 0o100_600_u32.to_ne_bytes());
    }
}
