//! The data path.

pub mod export;
