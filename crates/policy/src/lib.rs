//! weir's decisions, and nothing else: when a request may pass, what is merged with what.
//!
//! Pure: no I/O, no clock, no threads. Time comes in as an argument ([`time::Instant`]), decisions go out as
//! values, so the daemon, the simulator and the tests run literally the same code.
//! `Instant::now()` does not compile here.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod device;
pub mod merge;
pub mod prefetch;
pub mod request;
pub mod steering;
pub mod throttle;
pub mod time;
pub mod watermark;
