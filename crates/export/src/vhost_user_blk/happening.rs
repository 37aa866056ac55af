//! What happens at an export that its operators are to hear of: front ends that come and go, and
//! rings that cannot be served.
//!
//! Told on the thread that it happens on: rings are on workers. Never waits for who is told.

use std::fmt;

use policy::time::Duration;

use super::connection::Ended;
pub use crate::process::Process;

/// What has happened. `process` is of the front end.
pub enum Happening<'a> {
    /// A front end has begun to use the disk: its first ring is about to be served. One that has
    /// come from another process has begun there.
    Came {
        /// None where it is not known, as below.
        process: Option<&'a Process>,
    },
    /// It has gone, and with it the last of its rings.
    Went {
        /// The same.
        process: Option<&'a Process>,
        /// Since it has begun, or since it has come from another process.
        lasted: Duration,
    },
    /// A front end is at fault, and was disconnected, whether it had begun or not.
    Disconnected {
        /// Which.
        process: Option<&'a Process>,
        /// What it did.
        why: &'a Ended,
    },
    /// A front end was turned away, because another is connected.
    TurnedAway {
        /// Which.
        process: Option<&'a Process>,
        /// The other.
        connected: Option<&'a Process>,
    },
    /// A ring cannot be served until its driver is set up again.
    RingBroken {
        /// Its number.
        ring: u16,
        /// What is wrong with it.
        why: &'a dyn fmt::Display,
    },
    /// A ring of which that was told is served again.
    RingServed {
        /// Its number.
        ring: u16,
        /// Since it was told.
        after: Duration,
    },
}

/// Whoever is told.
pub trait Told: Send + Sync + fmt::Debug {
    /// This has happened at the export with this id, of the disk with this name; `left_out` are
    /// those like it that nobody was told of, since the last: of those that one client could cause
    /// by the thousand there is one a second.
    fn hear(&self, export: &str, disk: &str, happening: &Happening<'_>, left_out: u64);
}
