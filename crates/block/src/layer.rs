//! Layers between an export and its image.
//!
//! Each layer is the mechanism around a decision of the `policy` crate. The layer keeps the waiting
//! tasks, arms the timers and holds the lock; `policy` decides which requests are admitted.

pub mod copy_before_write;
pub mod prefetch;
pub mod throttle;
