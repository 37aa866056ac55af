//! Names of the keys for the reaction to I/O errors of a disk.

/// Key for reads.
pub const READ: &str = "on-read-error";
/// Key for writes, flushes and discards.
pub const WRITE: &str = "on-write-error";
