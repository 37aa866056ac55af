//! Settings and state of one ring as its front end has set it up.
//!
//! ```text
//!             settings complete, enabled             settings changed, disabled
//!   Stopped ─────────────────────────────► Running ─────────────────────────────► Stopping
//!      ▲                                      │                                       │
//!      └──────────────────────────────────────┴─── its queue has ended its requests ──┘
//! ```
//!
//! Never reads a ring: the queue does. This file only has addresses and numbers.

use std::sync::Arc;

use reactor::{guest::GuestBytes, guest::GuestMemory, operation::Fd};

use super::{features::virtio, inflight::UnflushedWrites, message::VringAddresses};
use ::virtio::ring::RingParts;

/// Parts of a ring, each inside one region and aligned as virtio 1.3 § 2.7 and § 2.8 require.
#[derive(Clone, Debug)]
pub struct RingAreas {
    /// The descriptor table, or a packed ring's descriptors.
    pub descriptors: GuestBytes,
    /// The available ring with its event index, or the driver's event suppression.
    pub driver: GuestBytes,
    /// The used ring with its event index, or the device's event suppression.
    pub device: GuestBytes,
}

/// Settings that a queue needs to serve a ring.
#[derive(Debug)]
pub struct RingSettings {
    /// Number of descriptors; a power of two for a split ring.
    pub size: u16,
    /// Locations of its parts.
    pub areas: RingAreas,
    /// The guest's memory, with its dirty log if there is one.
    pub memory: GuestMemory,
    /// Negotiated features: see [`virtio`].
    pub features: u64,
    /// Index at which to continue, from SET_VRING_BASE or the queue's last stop.
    pub base: u32,
    /// In-flight record of the ring, if the front end keeps one; it may hold requests of a process
    /// that died.
    pub inflight: Option<GuestBytes>,
    /// Loss record of the area, shared by all rings.
    pub loss: Option<Arc<UnflushedWrites>>,
    /// Eventfd that announces requests; without it the ring is polled.
    pub kick: Option<Fd>,
    /// Eventfd that announces completions; without it the driver polls.
    pub call: Option<Fd>,
    /// Eventfd that announces a failure of the ring.
    pub error: Option<Fd>,
}

/// Reason why a ring cannot run: a mistake of the front end or of the guest. Other rings continue.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VringFault {
    #[error(
        "no single region of the guest's memory contains its {what} at {address:#x} (is that memory \
         shared? share=on)"
    )]
    Outside { what: &'static str, address: u64 },
    #[error("its {what} at {address:#x} must be aligned to {alignment} bytes")]
    Unaligned { what: &'static str, address: u64, alignment: usize },
    #[error("a split ring has {0} descriptors, which is no power of two")]
    Size(u16),
    #[error("the in-flight area has no room for the ring")]
    NoInflight,
}

/// Announcement of requests.
#[derive(Clone, Debug, Default)]
pub(super) enum Kick {
    /// Not set yet: the ring does not run.
    #[default]
    Unset,
    /// No kick: the ring is polled.
    Polled,
    Event(Fd),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum VringState {
    #[default]
    Stopped,
    Running,
    /// Its queue has the order to stop and has not reported yet.
    Stopping,
}

#[derive(Debug, Default)]
pub(super) struct Vring {
    pub(super) state: VringState,
    pub(super) size: Option<u16>,
    pub(super) addresses: Option<VringAddresses>,
    pub(super) base: u32,
    pub(super) kick: Kick,
    pub(super) call: Option<Fd>,
    pub(super) error: Option<Fd>,
    /// Value of SET_VRING_ENABLE; not sent if protocol features were not negotiated ("Ring
    /// states").
    pub(super) enabled: Option<bool>,
    /// True if the ring could not be served, and waits until it is set up again.
    pub(super) broken: bool,
    /// True if the driver broke the ring while it ran.
    pub(super) broken_by_driver: bool,
}

impl Vring {
    /// True if the ring should be served.
    pub(super) fn should_run(&self, features: u64) -> bool {
        // "Ring states": without protocol features a ring is enabled from the start, with them
        // disabled.
        let enabled = self.enabled.unwrap_or(features & virtio::PROTOCOL_FEATURES == 0);
        let is_set_up = self.size.is_some() && self.addresses.is_some() && !matches!(self.kick, Kick::Unset);
        enabled && is_set_up && !self.broken
    }

    /// Locates its parts in the guest's memory.
    pub(super) fn areas(&self, memory: &GuestMemory, features: u64) -> Result<RingAreas, VringFault> {
        let (Some(size), Some(addresses)) = (self.size, self.addresses) else {
            unreachable!("only a ring that is set up is looked for")
        };
        let packed = features & virtio::RING_PACKED != 0;
        // Packed rings may have any size (virtio 1.3 § 2.8.10.1), split rings only powers of two.
        if !packed && !size.is_power_of_two() {
            return Err(VringFault::Size(size));
        }
        let parts = RingParts::of(size, packed, features & virtio::EVENT_IDX != 0);
        let find = |area_name, address, (bytes, alignment)| {
            let area =
                memory.user_range(address, bytes).ok_or(VringFault::Outside { what: area_name, address })?;
            match area.is_aligned(alignment) {
                true => Ok(area),
                false => Err(VringFault::Unaligned { what: area_name, address, alignment }),
            }
        };
        Ok(RingAreas {
            descriptors: find("descriptors", addresses.descriptors, parts.descriptors)?,
            driver: find("available ring", addresses.driver, parts.driver)?,
            device: find("used ring", addresses.device, parts.device)?,
        })
    }
}
