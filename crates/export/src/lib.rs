//! How a client reaches a disk.
//!
//! Each export speaks one protocol and knows no other; what they share is the disk behind them. A protocol's
//! messages are parsed and validated here, before anything else sees them, so that the layers below only meet
//! requests that lie inside the disk. An export never decides about limits, caching or placement.

#![forbid(unsafe_code)]

pub mod nbd;
