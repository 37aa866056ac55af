//! What an export offers to its front ends: feature bits of virtio and of the vhost-user protocol.
//!
//! Sources: virtio 1.3 § 5.2.3 (block devices) and § 6 (reserved bits); the vhost-user
//! specification, "Protocol features" and "Migration".
//!
//! SIZE_MAX is not offered: a segment may have any length, and some drivers refuse a small limit.

/// Bits of GET_FEATURES and SET_FEATURES.
pub mod virtio {
    /// There is a limit to the segments of one request.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk cannot be written to.
    pub const RO: u64 = 1 << 5;
    /// The configuration has the size of a block.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Flush requests are understood.
    pub const FLUSH: u64 = 1 << 9;
    /// The configuration has what the disk below is best at.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The guest may switch the write cache.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// There may be more than one request queue.
    pub const MQ: u64 = 1 << 12;
    /// Discard requests are understood.
    pub const DISCARD: u64 = 1 << 13;
    /// Write-zeroes requests are understood.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Writes to the guest's memory are to be recorded (vhost's own).
    pub const LOG_ALL: u64 = 1 << 26;
    /// Descriptors may refer to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Kicks and calls are wanted from an index on.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// There are protocol features to be negotiated (vhost-user's own).
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Not a device from before virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// Rings may have the packed layout.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Says that these features of a SET_FEATURES were not offered; of those that an export's options
/// decide, by name, and what to do.
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
        "features {features:#x} were not offered, {} among them (the machine was started when they were: give \
         its export the options of then, or start the machine anew)",
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

    /// All that are offered, by every export.
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

/// Most rings of an export: a message has eight bits for a ring's number.
pub const MAX_QUEUES: u16 = 256;
/// Most descriptors of a ring (virtio 1.3 § 2.7 and § 2.8.10.1).
pub const MAX_QUEUE_SIZE: u16 = 1 << 15;

/// What an export is, as its front ends are to see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Length of the disk; what lies behind its last whole block is not offered.
    pub size_bytes: u64,
    /// See [`Disk::opened`](block::disk::Disk::opened).
    pub opened: u64,
    /// Nothing may be written.
    pub read_only: bool,
    /// The guest may discard.
    pub discard: bool,
    /// The guest may ask for zeroes.
    pub write_zeroes: bool,
    /// The guest may use packed rings.
    pub packed: bool,
    /// Whether writes are cached until a flush, as long as the guest does not say otherwise. A
    /// front end that connects again does not repeat what its guest said: pass that here.
    pub write_cache: bool,
    /// Rings: 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Most descriptors of a ring: 1 to [`MAX_QUEUE_SIZE`].
    pub queue_size: u16,
    /// Most data segments of one request.
    pub max_segments: u32,
    /// A block as the guest is to see it, a power of two from 512 bytes on: requests that are no
    /// multiples of it are refused.
    pub block_bytes: u32,
    /// A block of the disk below, a power of two of `block_bytes`.
    pub physical_block_bytes: u32,
    /// What requests had best be multiples of; 0 where it makes no difference.
    pub optimal_io_bytes: u32,
    /// Discards had best begin and end at multiples of it; a multiple of a sector.
    pub discard_alignment_bytes: u32,
    /// What one segment of a discard or write-zeroes request may cover, in sectors.
    pub max_erase_sectors: u32,
    /// Segments of a discard request.
    pub max_discard_segments: u32,
    /// Segments of a write-zeroes request.
    pub max_write_zeroes_segments: u32,
}

impl Default for Offer {
    /// An empty disk that can do everything, with one ring.
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
            // A chain may not be longer than its ring, which has 128 descriptors where nobody says
            // otherwise; two of them are the request's header and its status.
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

impl Offer {
    /// The answer to GET_FEATURES.
    pub fn features(&self) -> u64 {
        use virtio::*;
        let when = |condition: bool, bits: u64| if condition { bits } else { 0 };
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
            | when(self.queues > 1, MQ)
            | when(self.packed, RING_PACKED)
            | when(self.read_only, RO)
            | when(writable, CONFIG_WCE)
            | when(writable && self.discard, DISCARD)
            | when(writable && self.write_zeroes, WRITE_ZEROES)
    }

    /// Data segments of one request as the guest is told: no more than fit into the ring, with a
    /// header and a status.
    pub fn segments(&self) -> u32 {
        let fitting = u32::from(self.queue_size).saturating_sub(2).max(1);
        self.max_segments.min(fitting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_options_have_taken_away_is_named() {
        assert_eq!(not_offered(1 << 35), "features 0x800000000 were not offered");
        let said = not_offered(1 << 35 | virtio::DISCARD | virtio::CONFIG_WCE);
        assert!(
            said.starts_with("features 0x800002800 were not offered, CONFIG_WCE, DISCARD among them ("),
            "{said}"
        );
    }

    #[test]
    fn an_export_offers_what_it_can_do() {
        let all = Offer { queues: 4, ..Offer::default() };
        // Bit by bit, from the specifications.
        let due = [2, 6, 9, 10, 11, 12, 13, 14, 26, 28, 29, 30, 32, 34].map(|bit| 1_u64 << bit);
        assert_eq!(all.features(), due.iter().sum::<u64>());
        let without = |offer: Offer| all.features() & !offer.features();
        assert_eq!(without(Offer { queues: 1, ..all.clone() }), virtio::MQ);
        assert_eq!(without(Offer { discard: false, ..all.clone() }), virtio::DISCARD);
        assert_eq!(without(Offer { write_zeroes: false, ..all.clone() }), virtio::WRITE_ZEROES);
        assert_eq!(without(Offer { packed: false, ..all.clone() }), virtio::RING_PACKED);
        let read_only = Offer { read_only: true, ..all.clone() };
        let writing = virtio::CONFIG_WCE | virtio::DISCARD | virtio::WRITE_ZEROES;
        assert_eq!(read_only.features(), all.features() & !writing | virtio::RO);
        assert_eq!(protocol::OFFERED, 0x1b22b);
    }
}
