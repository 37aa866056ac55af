//! weir's own state between runs: small files that are replaced atomically.

mod capacity;
pub mod atomic_file;

pub use capacity::{CapacityFigures, CapacityRecord, CapacityStore};
