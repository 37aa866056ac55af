//! What a request passes on its way from an export to its image.
//!
//! Each layer is the mechanics around a decision of the `policy` crate: it keeps the waiting tasks, arms the timers and takes the
//! lock; when something may pass is decided there.

pub mod prefetch;
pub mod throttle;
