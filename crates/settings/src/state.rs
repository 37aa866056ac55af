//! weir's own state between runs: small files that are replaced atomically.

pub mod atomic_file;
mod capacity;

pub use capacity::{CapacityFigures, CapacityRecord, CapacityStore};
