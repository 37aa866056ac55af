//! What weir keeps for itself between runs: small files, written whole or not at all.

mod capacity;
pub mod whole_file;

pub use capacity::{Figures, Record, Store};
