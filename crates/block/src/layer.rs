//! What a request passes on its way from an export to its image.
//!
//! Each layer is the mechanics around a decision of the `policy` crate. The layer keeps the waiting
//! tasks, arms the timers and takes the lock; `policy` decides what may pass.

pub mod prefetch;
pub mod throttle;
