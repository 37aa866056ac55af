//! Events of an export for operators: front ends that connect and disconnect, and rings that cannot
//! be served.
//!
//! Reported on the thread where they happen; events of rings are reported on a worker thread. Never
//! waits for the observer.

use std::fmt;

use policy::time::Duration;

use super::connection::FrontEndEnd;
pub use crate::peer_process::PeerProcess;

/// An event. `process` is the front end's process; `None` if it is unknown.
pub enum FrontEndEvent<'a> {
    /// A front end uses the disk: its first ring is about to be served. Not reported again for a
    /// front end that an upgrade has transferred to this process.
    Connected {
        /// The front end's process.
        process: Option<&'a PeerProcess>,
    },
    /// The front end has disconnected and the last of its rings has ended.
    Disconnected {
        /// The front end's process.
        process: Option<&'a PeerProcess>,
        /// Time since the front end began to use the disk, or since it was transferred to this
        /// process.
        duration: Duration,
    },
    /// A front end broke the protocol and was disconnected, before or after it used the disk.
    ProtocolError {
        /// The front end's process.
        process: Option<&'a PeerProcess>,
        /// Reason for the disconnection.
        why: &'a FrontEndEnd,
    },
    /// A front end was rejected because another is connected.
    Rejected {
        /// Process of the rejected front end.
        process: Option<&'a PeerProcess>,
        /// Process of the connected front end.
        connected: Option<&'a PeerProcess>,
    },
    /// A ring cannot be served until its driver sets it up again.
    RingBroken {
        /// The ring's number.
        ring: u16,
        /// The violation.
        why: &'a dyn fmt::Display,
    },
    /// A ring that was reported broken is served again.
    RingRecovered {
        /// The ring's number.
        ring: u16,
        /// Time since the report.
        broken_for: Duration,
    },
}

/// Receives the events of exports.
pub trait ExportObserver: Send + Sync + fmt::Debug {
    /// Receives an event of the export with this id and the disk with this name. Events that a
    /// client can cause at any rate are reported at most once a second; `suppressed` is the number
    /// of events of this kind that were left out since the last report.
    fn observe(&self, export: &str, disk: &str, event: &FrontEndEvent<'_>, suppressed: u64);
}
