//! Events of an export for operators: front ends that connect and disconnect, and rings that cannot
//! be served.
//!
//! Reported on the thread where they happen; for rings that is a worker. Never waits for the
//! observer.

use std::fmt;

use policy::time::Duration;

use super::connection::FrontEndEnd;
pub use crate::peer_process::PeerProcess;

/// An event. `process` is that of the front end; `None` if it is unknown.
pub enum FrontEndEvent<'a> {
    /// A front end uses the disk: its first ring is about to be served. Not reported again for a
    /// front end that another process has transferred.
    Connected {
        /// `None` if unknown, as below.
        process: Option<&'a PeerProcess>,
    },
    /// The front end has disconnected and the last of its rings has ended.
    Disconnected {
        /// The front end's process.
        process: Option<&'a PeerProcess>,
        /// Time since it began to use the disk, or since it was transferred.
        duration: Duration,
    },
    /// A front end broke the protocol and was disconnected, before or after it used the disk.
    ProtocolError {
        /// The front end's process.
        process: Option<&'a PeerProcess>,
        /// Its fault.
        why: &'a FrontEndEnd,
    },
    /// A front end was rejected because another is connected.
    Rejected {
        /// The rejected process.
        process: Option<&'a PeerProcess>,
        /// The connected process.
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

/// Observer of events.
pub trait ExportObserver: Send + Sync + fmt::Debug {
    /// Receives an event of the export with this id and the disk with this name. Events that a
    /// client can cause thousands of times are limited to one a second; `suppressed` is the number
    /// of those that were not reported since the last one.
    fn observe(&self, export: &str, disk: &str, event: &FrontEndEvent<'_>, suppressed: u64);
}
