//! The lab: measuring disks through the very code that serves them, without a daemon and without clients.
//!
//! Never changes how the data path works in order to measure it.

mod bench;
mod load;

pub(crate) use bench::run as bench;
