//! weir's data path: every byte and every system call of a disk.
//!
//! A request passes `export → disk → layer → image → storage → reactor`, and no module knows one to its left.
//! `unsafe` lives in [`reactor`] and [`buffer`] alone.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod buffer;
pub mod error;
pub mod image;
#[allow(unsafe_code)]
pub mod reactor;
pub mod storage;
