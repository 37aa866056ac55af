//! weir's data path: every byte and every system call of a disk.
//!
//! A request passes `export → disk → layer → image → storage → reactor`, and no module knows one to its left.
//! `unsafe` lives in [`reactor`] and [`buffer`] alone.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod buffer;
pub mod device;
pub mod disk;
pub mod error;
pub mod image;
pub mod layer;
#[allow(unsafe_code)]
pub mod reactor;
pub mod storage;
