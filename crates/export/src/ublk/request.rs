//! Requests of the kernel as values, validated once, so that `execute` only receives permitted
//! ranges inside the disk.

use reactor::{error::Error, ublk::UblkDescriptor};
use storage::Durability;

/// Unit of offsets, lengths and sizes, independent of the block size.
pub(super) const SECTOR_BYTES: u64 = 512;

/// `UBLK_IO_OP_…`
mod operation {
    pub(super) const READ: u32 = 0;
    pub(super) const WRITE: u32 = 1;
    pub(super) const FLUSH: u32 = 2;
    pub(super) const DISCARD: u32 = 3;
    pub(super) const WRITE_ZEROES: u32 = 5;
}

/// `UBLK_IO_F_…`: durable write; zeroes that stay allocated.
const FUA: u32 = 1 << 13;
const NO_UNMAP: u32 = 1 << 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UblkOperation {
    Read,
    Write(Durability),
    Flush,
    Discard,
    WriteZeroes {
        may_unmap: bool,
        durability: Durability,
    },
    /// Rejected without I/O.
    Refused(Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UblkRequest {
    pub(super) kind: UblkOperation,
    /// In bytes, inside the disk.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Rules for validating requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct UblkRequestRules {
    pub(super) size_bytes: u64,
    pub(super) read_only: bool,
    /// Longest read or write.
    pub(super) max_io_bytes: u64,
    /// Durability of a write without FUA.
    pub(super) durability: Durability,
}

pub(super) fn parse(descriptor: UblkDescriptor, rules: &UblkRequestRules) -> UblkRequest {
    let (offset, bytes) =
        (descriptor.first_sector.checked_mul(SECTOR_BYTES), u64::from(descriptor.sectors) * SECTOR_BYTES);
    let durability = match descriptor.operation & FUA {
        0 => rules.durability,
        _ => Durability::Synchronous,
    };
    let may_unmap = descriptor.operation & NO_UNMAP == 0;
    let kind = match descriptor.operation & 0xff {
        operation::READ => UblkOperation::Read,
        operation::WRITE => UblkOperation::Write(durability),
        operation::FLUSH => return UblkRequest { kind: UblkOperation::Flush, offset: 0, bytes: 0 },
        operation::DISCARD => UblkOperation::Discard,
        operation::WRITE_ZEROES => UblkOperation::WriteZeroes { may_unmap, durability },
        _ => return refused(Error::UNSUPPORTED),
    };
    // Checked although the kernel honours its limits: the memory of a tag ends at `max_io_bytes`.
    let moves_data = matches!(kind, UblkOperation::Read | UblkOperation::Write(_));
    if bytes == 0 || moves_data && bytes > rules.max_io_bytes {
        return refused(Error::INVALID);
    }
    if rules.read_only && kind != UblkOperation::Read {
        return refused(Error::NOT_PERMITTED);
    }
    let inside = |offset: &u64| offset.checked_add(bytes).is_some_and(|end| end <= rules.size_bytes);
    match offset.filter(inside) {
        Some(offset) => UblkRequest { kind, offset, bytes },
        // The image is shorter than the device.
        None => refused(Error::IO),
    }
}

fn refused(error: Error) -> UblkRequest {
    UblkRequest { kind: UblkOperation::Refused(error), offset: 0, bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: UblkRequestRules = UblkRequestRules {
        size_bytes: 1 << 20,
        read_only: false,
        max_io_bytes: 4096,
        durability: Durability::Cached,
    };

    fn kind(operation: u32, first: u64, sectors: u32) -> UblkOperation {
        parse(UblkDescriptor::new(operation, first, sectors), &RULES).kind
    }

    #[test]
    fn operations_match_the_kernel_header() {
        assert_eq!(kind(0, 0, 8), UblkOperation::Read);
        assert_eq!(kind(1, 2047, 1), UblkOperation::Write(Durability::Cached));
        assert_eq!(kind(1 | FUA, 0, 1), UblkOperation::Write(Durability::Synchronous));
        assert_eq!(kind(2, u64::MAX, u32::MAX), UblkOperation::Flush);
        assert_eq!(kind(3, 0, 2048), UblkOperation::Discard);
        let zeroes = |may_unmap| UblkOperation::WriteZeroes { may_unmap, durability: Durability::Cached };
        assert_eq!((kind(5, 0, 2048), kind(5 | NO_UNMAP, 0, 2048)), (zeroes(true), zeroes(false)));
        let request = parse(UblkDescriptor::new(1 << 8, 3, 2), &RULES);
        assert_eq!((request.kind, request.offset, request.bytes), (UblkOperation::Read, 1536, 1024));
    }

    #[test]
    fn malformed_requests_are_rejected() {
        for (operation, first, sectors, error) in [
            (4, 0, 1, Error::UNSUPPORTED),
            (18, 0, 1, Error::UNSUPPORTED),
            (0, 0, 0, Error::INVALID),
            (1, 0, 9, Error::INVALID),
            (0, 2048, 1, Error::IO),
            (0, 2047, 2, Error::IO),
            (3, u64::MAX, 1, Error::IO),
            (3, u64::MAX / 512, u32::MAX, Error::IO),
        ] {
            assert_eq!(
                kind(operation, first, sectors),
                UblkOperation::Refused(error),
                "{operation} {first} {sectors}"
            );
        }
        let rules = UblkRequestRules { read_only: true, ..RULES };
        for operation in [1, 3, 5] {
            let request = parse(UblkDescriptor::new(operation, 0, 1), &rules);
            assert_eq!(request.kind, UblkOperation::Refused(Error::NOT_PERMITTED));
        }
        assert_eq!(parse(UblkDescriptor::new(0, 0, 1), &rules).kind, UblkOperation::Read);
    }
}
