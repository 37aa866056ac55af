//! What a message of a front end leads to, as values: what is to happen to rings and disk, what the
//! front end is answered, and what is refused and why. Does nothing of it.

use std::io;

use reactor::{
    guest::{Memory, RegionError},
    op::Fd,
};

use super::MAX_MEM_SLOTS;
use crate::vhost_user_blk::{
    channel::NoChannel,
    features::not_offered,
    inflight::InflightError,
    message::{Malformed, Reply},
    vring::{Fault, RingPlaces, RingSettings},
};

/// What is to happen to rings and disk.
#[derive(Debug)]
pub enum Effect {
    /// Serve a ring. It has not run before, or has been reported by `Session::stopped` since. First
    /// look into it: requests may be there that are not announced again.
    Start {
        /// Its number.
        ring: u16,
        /// All that is needed.
        settings: Box<RingSettings>,
    },
    /// Take no more requests from a ring; let those that have begun end, put the others back, and
    /// report `Session::stopped`. The guest's memory must not be touched afterwards.
    Stop {
        /// Its number.
        ring: u16,
    },
    /// A ring cannot be served: tell of it, also by its event. If it runs, its
    /// [`Effect::Stop`] follows.
    Fault {
        /// Its number.
        ring: u16,
        /// What is wrong.
        why: Fault,
        /// To be signalled.
        error: Option<Fd>,
    },
    /// The memory of rings that run has changed, or from now on writes to it are recorded, or no
    /// longer. Requests that have begun keep the memory they have; what they write once recording
    /// has begun has to be marked in the new memory's log too, when they end.
    Memory {
        /// What requests that begin now use.
        memory: Memory,
        /// The rings that run, and where their parts are in it.
        rings: Vec<(u16, RingPlaces)>,
    },
    /// A ring that runs has another event.
    Event {
        /// Its number.
        ring: u16,
        /// Which of them.
        kind: EventKind,
        /// What takes its place; `None` as in [`RingSettings`].
        event: Option<Fd>,
    },
    /// Whether completed writes may stay in a cache until the next flush.
    WriteCache(bool),
}

/// The events of a ring.
#[allow(missing_docs, reason = "fields of RingSettings")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Kick,
    Call,
    Error,
}

/// What a message leads to.
#[derive(Debug)]
pub enum Output {
    /// To be sent.
    Reply(Reply),
    /// To be carried out.
    Act(Effect),
    /// The front end should read the configuration: see `message::config_change`. On
    /// `Session::channel`.
    ConfigChanged,
    /// The front end has been told that something is not possible.
    Refused {
        /// The request.
        request: &'static str,
        /// What is wrong with it.
        why: Refusal,
    },
    /// The connection is to be closed.
    Close {
        /// The request.
        request: &'static str,
        /// What is wrong with it.
        why: Refusal,
    },
}

/// Why a request is refused.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("{}", not_offered(*.0))]
    Features(u64),
    #[error("ring {0} runs with other features")]
    FeaturesInUse(u16),
    #[error("protocol features {0:#x} were not offered")]
    ProtocolFeatures(u64),
    #[error("ring {ring}, where {queues} were offered")]
    NoSuchRing { ring: u32, queues: u16 },
    #[error("ring {0} runs")]
    Running(u16),
    #[error(
        "a ring of {is} descriptors, 1 to {most} are possible (give the device a smaller queue-size, or this export a larger one)"
    )]
    RingSize { is: u32, most: u16 },
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("more than {MAX_MEM_SLOTS} regions of memory")]
    TooManyRegions,
    #[error("no such region: {bytes} bytes at {guest_address:#x}")]
    NoSuchRegion { guest_address: u64, bytes: u64 },
    #[error("the log of writes: {0}")]
    Log(RegionError),
    #[error(transparent)]
    Inflight(#[from] InflightError),
    #[error(
        "blocks of {is} bytes, and its guest was told {told} (give this export the logical-block-size of then, or start the machine anew)"
    )]
    Blocks { is: u32, told: u64 },
    #[error("{bytes} bytes of the configuration at {offset} cannot be written")]
    Config { offset: u32, bytes: usize },
    #[error("{0:#x} is no status")]
    Status(u64),
    #[error(transparent)]
    NoChannel(#[from] NoChannel),
    #[error("its descriptor is no eventfd: the ring goes on without")]
    NoEvent,
    #[error("ring {ring}: {why}")]
    Fault { ring: u16, why: Fault },
}

impl Refusal {
    /// Whether a file that the front end has passed is no longer what it was: its own doing, which
    /// nobody else is to suffer for.
    pub fn is_of_its_files(&self) -> bool {
        let (Self::Region(why) | Self::Log(why) | Self::Inflight(InflightError::Map(why))) = self else {
            return false;
        };
        match why {
            RegionError::TooShort { .. } => true,
            // It was sealed: see `fcntl(2)`, F_SEAL_FUTURE_WRITE.
            RegionError::Map(error) => error.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }
}
