//! One ring as its front end has set it up: what it needs to run, and whether it does.
//!
//! ```text
//!             settings complete, enabled             settings changed, disabled
//!   Stopped ─────────────────────────────► Running ─────────────────────────────► Stopping
//!      ▲                                      │                                       │
//!      └──────────────────────────────────────┴─── its queue has ended its requests ──┘
//! ```
//!
//! The rings themselves, and the requests in them, are the queue's. Here are addresses and numbers.

use std::sync::Arc;

use reactor::{guest::Memory, guest::Place, op::Fd};

use super::{features::virtio, inflight::Loss, message::VringAddresses};
use ::virtio::ring::Parts;

/// The parts of a ring, each wholly in one region and aligned as virtio 1.3 § 2.7 and § 2.8 ask.
#[derive(Clone, Debug)]
pub struct RingPlaces {
    /// The descriptor table, or a packed ring's descriptors.
    pub descriptors: Place,
    /// The available ring with its event index, or the driver's event suppression.
    pub driver: Place,
    /// The used ring with its event index, or the device's event suppression.
    pub device: Place,
}

/// Everything that a queue needs to serve a ring.
#[derive(Debug)]
pub struct RingSettings {
    /// Descriptors: for a split ring a power of two.
    pub size: u16,
    /// Where its parts are.
    pub places: RingPlaces,
    /// The guest's memory; writes to it are recorded where they have to be.
    pub memory: Memory,
    /// What was negotiated: see [`virtio`].
    pub features: u64,
    /// Where to go on, as SET_VRING_BASE or the queue itself said last.
    pub base: u32,
    /// Its record of requests in flight, if the front end keeps one: some may be left of a process
    /// that died.
    pub inflight: Option<Place>,
    /// Beside that record, for all rings: what would be lost with this process.
    pub loss: Option<Arc<Loss>>,
    /// Tells that requests have come. Without it the ring has to be polled.
    pub kick: Option<Fd>,
    /// To tell that requests have ended; nobody wants to know without it.
    pub call: Option<Fd>,
    /// To tell that the ring cannot be served.
    pub error: Option<Fd>,
}

/// Why a ring cannot run. The front end, or the guest behind it, has set it up wrongly; other rings
/// go on.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error(
        "no region of the guest's memory holds all of its {what} at {address:#x} (is that memory shared? share=on)"
    )]
    Outside { what: &'static str, address: u64 },
    #[error("its {what} at {address:#x} must be aligned to {alignment} bytes")]
    Unaligned { what: &'static str, address: u64, alignment: usize },
    #[error("a split ring has {0} descriptors, which is no power of two")]
    Size(u16),
    #[error("the in-flight area has no room for it")]
    NoInflight,
}

/// How requests are announced.
#[derive(Clone, Debug, Default)]
pub(super) enum Kick {
    /// Not said yet: the ring does not run.
    #[default]
    Unset,
    /// Not at all.
    Polled,
    Event(Fd),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Stopped,
    Running,
    /// Its queue has been told, and has not answered.
    Stopping,
}

#[derive(Debug, Default)]
pub(super) struct Vring {
    pub(super) state: State,
    pub(super) size: Option<u16>,
    pub(super) addresses: Option<VringAddresses>,
    pub(super) base: u32,
    pub(super) kick: Kick,
    pub(super) call: Option<Fd>,
    pub(super) error: Option<Fd>,
    /// What the front end said; it need not say anything where protocol features were not
    /// negotiated ("Ring states").
    pub(super) enabled: Option<bool>,
    /// It could not be served, and waits until it is set up again.
    pub(super) broken: bool,
    /// It was, by its driver, while it ran.
    pub(super) spoilt: bool,
}

impl Vring {
    /// Whether it should be served.
    pub(super) fn is_wanted(&self, features: u64) -> bool {
        let enabled = self.enabled.unwrap_or(features & virtio::PROTOCOL_FEATURES == 0);
        let is_set_up = self.size.is_some() && self.addresses.is_some() && !matches!(self.kick, Kick::Unset);
        enabled && is_set_up && !self.broken
    }

    /// Finds its parts in the guest's memory.
    pub(super) fn places(&self, memory: &Memory, features: u64) -> Result<RingPlaces, Fault> {
        let (Some(size), Some(addresses)) = (self.size, self.addresses) else {
            unreachable!("only a ring that is set up is looked for")
        };
        let packed = features & virtio::RING_PACKED != 0;
        if !packed && !size.is_power_of_two() {
            return Err(Fault::Size(size));
        }
        let parts = Parts::of(size, packed, features & virtio::EVENT_IDX != 0);
        let find = |what, address, (bytes, alignment)| {
            let place = memory.user_place(address, bytes).ok_or(Fault::Outside { what, address })?;
            match place.is_aligned(alignment) {
                true => Ok(place),
                false => Err(Fault::Unaligned { what, address, alignment }),
            }
        };
        Ok(RingPlaces {
            descriptors: find("descriptors", addresses.descriptors, parts.descriptors)?,
            driver: find("available ring", addresses.driver, parts.driver)?,
            device: find("used ring", addresses.device, parts.device)?,
        })
    }
}
