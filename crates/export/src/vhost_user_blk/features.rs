//! Features of an export: feature bits of virtio and of the vhost-user protocol.
//!
//! Sources: virtio 1.3 § 5.2.3 (block devices) and § 6 (reserved bits); the vhost-user
//! specification, "Protocol features" and "Migration".
//!
//! SIZE_MAX is not offered: segments may have any length, and some drivers refuse a small limit.

/// Bits of GET_FEATURES and SET_FEATURES.
pub mod virtio {
    /// The number of segments of a request is limited.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// The configuration has the block size.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Flush requests are supported.
    pub const FLUSH: u64 = 1 << 9;
    /// The configuration has the topology of the disk below.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The guest may switch the write cache.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// More than one request queue is possible.
    pub const MQ: u64 = 1 << 12;
    /// Discard requests are supported.
    pub const DISCARD: u64 = 1 << 13;
    /// Write-zeroes requests are supported.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Writes to the guest's memory are logged (vhost's own).
    pub const LOG_ALL: u64 = 1 << 26;
    /// Descriptors may refer to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Kicks and calls are suppressed up to an index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Protocol features can be negotiated (vhost-user's own).
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Not a legacy device from before virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// Rings may have the packed layout.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Message for a SET_FEATURES with features that were not offered. Names those that an export's
/// options decide, and the remedy.
pub(super) fn not_offered(features: u64) -> String {
    const OPTIONAL: [(u64, &str); 5] = [
        (virtio::FLUSH, "FLUSH"),
        (virtio::CONFIG_WCE, "CONFIG_WCE"),
        (virtio::MQ, "MQ (queues of more than 1)"),
        (virtio::DISCARD, "DISCARD"),
        (virtio::WRITE_ZEROES, "WRITE_ZEROES"),
    ];
    let names = OPTIONAL.iter().filter(|(bit, _)| features & bit != 0).map(|(_, name)| *name);
    let names: Vec<_> = names.collect();
    if names.is_empty() {
        return format!("features {features:#x} were not offered");
    }
    format!(
        "features {features:#x} were not offered, {} among them (they were when the machine was started: \
         restore its export's options, or stop and start the machine)",
        names.join(", ")
    )
}

/// Bits of GET_PROTOCOL_FEATURES and SET_PROTOCOL_FEATURES.
#[allow(missing_docs, reason = "the specification's names")]
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;

    /// All protocol features; every export offers them.
    pub const OFFERED: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// Largest number of rings of an export: a message has eight bits for a ring's number.
pub const MAX_QUEUES: u16 = 256;
/// Largest number of descriptors of a ring (virtio 1.3 § 2.7 and § 2.8.10.1).
pub const MAX_QUEUE_SIZE: u16 = 1 << 15;

/// Parameters of an export as front ends see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserOffer {
    /// Length of the disk; bytes behind its last whole block are not offered.
    pub size_bytes: u64,
    /// See [`Disk::opening_id`](block::disk::Disk::opening_id).
    pub opened: u64,
    /// True if the guest may not write.
    pub read_only: bool,
    /// True if the guest may discard.
    pub discard: bool,
    /// True if the guest may write zeroes.
    pub write_zeroes: bool,
    /// True if the guest may use packed rings.
    pub packed: bool,
    /// True if writes are cached until a flush, unless the guest chooses otherwise. A front end
    /// that reconnects does not repeat the guest's choice, so the owner passes it here.
    pub write_cache: bool,
    /// Number of rings: 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Largest number of descriptors of a ring: 1 to [`MAX_QUEUE_SIZE`].
    pub queue_size: u16,
    /// Largest number of data segments of one request.
    pub max_segments: u32,
    /// Logical block size, a power of two from 512 bytes; requests that are no multiples of it
    /// fail.
    pub block_bytes: u32,
    /// Physical block size, `block_bytes` times a power of two.
    pub physical_block_bytes: u32,
    /// Optimal I/O size; 0 if it makes no difference.
    pub optimal_io_bytes: u32,
    /// Preferred alignment of discards; a multiple of a sector.
    pub discard_alignment_bytes: u32,
    /// Longest segment of a discard or write-zeroes request, in sectors.
    pub max_erase_sectors: u32,
    /// Largest number of segments of a discard request.
    pub max_discard_segments: u32,
    /// Largest number of segments of a write-zeroes request.
    pub max_write_zeroes_segments: u32,
}

impl Default for VhostUserOffer {
    /// An empty disk with all features and one ring.
    fn default() -> Self {
        Self {
            size_bytes: 0,
            opened: 0,
            read_only: false,
            discard: true,
            write_zeroes: true,
            packed: true,
            write_cache: true,
            queues: 1,
            queue_size: 1024,
            // A chain may not be longer than its ring, which has 128 descriptors by default; two of
            // them are the request's header and its status.
            max_segments: 126,
            block_bytes: 512,
            physical_block_bytes: 4096,
            optimal_io_bytes: 0,
            discard_alignment_bytes: 4096,
            // 1 GiB.
            max_erase_sectors: 1 << 21,
            max_discard_segments: 32,
            max_write_zeroes_segments: 1,
        }
    }
}

impl VhostUserOffer {
    /// Reply to GET_FEATURES.
    pub fn features(&self) -> u64 {
        use virtio::*;
        let flags_if = |condition: bool, bits: u64| if condition { bits } else { 0 };
        let writable = !self.read_only;
        SEG_MAX
            | BLK_SIZE
            | FLUSH
            | TOPOLOGY
            | LOG_ALL
            | INDIRECT_DESC
            | EVENT_IDX
            | PROTOCOL_FEATURES
            | VERSION_1
            | flags_if(self.queues > 1, MQ)
            | flags_if(self.packed, RING_PACKED)
            | flags_if(self.read_only, RO)
            | flags_if(writable, CONFIG_WCE)
            | flags_if(writable && self.discard, DISCARD)
            | flags_if(writable && self.write_zeroes, WRITE_ZEROES)
    }

    /// Largest number of data segments as offered to the guest: no more than fit into the ring
    /// beside a header and a status.
    pub fn segments(&self) -> u32 {
        let fitting = u32::from(self.queue_size).saturating_sub(2).max(1);
        self.max_segments.min(fitting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_disabled_by_options_are_named() {
        assert_eq!(not_offered(1 << 35), "features 0x800000000 were not offered");
        let message = not_offered(1 << 35 | virtio::DISCARD | virtio::CONFIG_WCE);
        assert!(
            message.starts_with("features 0x800002800 were not offered, CONFIG_WCE, DISCARD among them ("),
            "{message}"
        );
    }

    #[test]
    fn offered_features_match_the_options() {
        let all = VhostUserOffer { queues: 4, ..VhostUserOffer::default() };
        // Bit by bit, from the specifications.
        let expected = [2, 6, 9, 10, 11, 12, 13, 14, 26, 28, 29, 30, 32, 34].map(|bit| 1_u64 << bit);
        assert_eq!(all.features(), expected.iter().sum::<u64>());
        let without = |offer: VhostUserOffer| all.features() & !offer.features();
        assert_eq!(without(VhostUserOffer { queues: 1, ..all.clone() }), virtio::MQ);
        assert_eq!(without(VhostUserOffer { discard: false, ..all.clone() }), virtio::DISCARD);
        assert_eq!(without(VhostUserOffer { write_zeroes: false, ..all.clone() }), virtio::WRITE_ZEROES);
        assert_eq!(without(VhostUserOffer { packed: false, ..all.clone() }), virtio::RING_PACKED);
        let read_only = VhostUserOffer { read_only: true, ..all.clone() };
        let writing = virtio::CONFIG_WCE | virtio::DISCARD | virtio::WRITE_ZEROES;
        assert_eq!(read_only.features(), all.features() & !writing | virtio::RO);
        assert_eq!(protocol::OFFERED, 0x1b22b);
    }
}
