//! Results of a front end's message, as values: effects on rings and disk, replies, and rejections.
//! Never executes them.

use std::io;

use reactor::{
    guest::{GuestMemory, RegionError},
    operation::Fd,
};

use super::MAX_MEM_SLOTS;
use crate::vhost_user_blk::{
    back_end_channel::InvalidChannel,
    features::not_offered,
    inflight::InflightError,
    message::{MalformedVhostUserMessage, VhostUserReply},
    vring::{RingAreas, RingSettings, VringFault},
};

/// An effect on rings or disk.
#[derive(Debug)]
pub enum Effect {
    /// Serve a ring. It has not run before, or `VhostUserSession::ring_stopped` has reported it
    /// since. Read it first: it may hold requests that are not announced again.
    Start {
        /// Number of the ring.
        ring: u16,
        /// Complete settings.
        settings: Box<RingSettings>,
    },
    /// Take no further request from a ring, complete the started ones, put the rest back, and
    /// report `VhostUserSession::ring_stopped`. The guest's memory must not be accessed afterwards.
    Stop {
        /// Number of the ring.
        ring: u16,
    },
    /// A ring cannot be served: report that, also by its error event. If it runs, its
    /// [`Effect::Stop`] follows.
    Fault {
        /// Number of the ring.
        ring: u16,
        /// The violation.
        why: VringFault,
        /// Error event to be signalled.
        error: Option<Fd>,
    },
    /// The memory of running rings was replaced, or logging of writes to it begins or ends. Started
    /// requests keep their memory; their writes after logging has begun are also marked in the
    /// new memory's log when they complete.
    Memory {
        /// Memory for requests that start now.
        memory: GuestMemory,
        /// Running rings, with the locations of their parts in it.
        rings: Vec<(u16, RingAreas)>,
    },
    /// An event of a running ring was replaced.
    Event {
        /// Number of the ring.
        ring: u16,
        /// Kind of the event.
        kind: EventKind,
        /// The new event; `None` as in [`RingSettings`].
        event: Option<Fd>,
    },
    /// True if completed writes may stay in a cache until the next flush.
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

/// One result of a message.
#[derive(Debug)]
pub enum SessionOutput {
    /// Send this reply.
    Reply(VhostUserReply),
    /// Execute this effect.
    Effect(Effect),
    /// Ask the front end to read the configuration: send `message::config_change` on
    /// `VhostUserSession::channel`.
    ConfigChanged,
    /// A request was rejected, and the reply reports that to the front end.
    Rejected {
        /// The request.
        request: &'static str,
        /// The reason.
        why: RequestRejection,
    },
    /// Close the connection.
    Close {
        /// The request.
        request: &'static str,
        /// The reason.
        why: RequestRejection,
    },
}

/// Reason for rejecting a request.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum RequestRejection {
    #[error(transparent)]
    Malformed(#[from] MalformedVhostUserMessage),
    #[error("{}", not_offered(*.0))]
    Features(u64),
    #[error("features cannot change while ring {0} runs")]
    FeaturesInUse(u16),
    #[error("protocol features {0:#x} were not offered")]
    ProtocolFeatures(u64),
    #[error("no ring {ring}: {queues} were offered")]
    NoSuchRing { ring: u32, queues: u16 },
    #[error("ring {0} runs")]
    Running(u16),
    #[error(
        "a ring of {is} descriptors; the export allows 1 to {most} (give the device a smaller \
         queue-size, or this export a larger one)"
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
        "the export has blocks of {offered} bytes, but the guest uses blocks of {stored} bytes (restore \
         this export's logical-block-size, or stop and start the machine)"
    )]
    Blocks { offered: u32, stored: u64 },
    #[error("{bytes} bytes of the configuration at {offset} cannot be written")]
    Config { offset: u32, bytes: usize },
    #[error("{0:#x} is not a device status")]
    Status(u64),
    #[error(transparent)]
    NoChannel(#[from] InvalidChannel),
    #[error("its descriptor is no eventfd: the ring continues without it")]
    NoEvent,
    #[error("ring {ring}: {why}")]
    Fault { ring: u16, why: VringFault },
}

impl RequestRejection {
    /// True if the front end has modified a file after it passed the file: its own fault, which
    /// must not affect other front ends.
    pub fn is_modified_file(&self) -> bool {
        let (Self::Region(why) | Self::Log(why) | Self::Inflight(InflightError::Map(why))) = self else {
            return false;
        };
        match why {
            // The front end has truncated the file.
            RegionError::TooShort { .. } => true,
            // The front end has sealed the file: see `fcntl(2)`, F_SEAL_FUTURE_WRITE.
            RegionError::Map(error) => error.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }
}
