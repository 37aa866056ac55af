//! Names of the keys that say what is done about a disk's errors.

/// The key about reads.
pub const READ: &str = "on-read-error";
/// The key about writes, flushes and discards.
pub const WRITE: &str = "on-write-error";
