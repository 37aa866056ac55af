//! Options that several commands have: limits, shares, caches, and what is read ahead. Made from
//! the policy's own tables where there are any. Each becomes a part of the draft that the config
//! file makes too.

pub mod limits;
pub mod prefetch;
mod qcow2;
mod shares;

pub use limits::LimitArgs;
pub use prefetch::LongArgs;
pub use qcow2::{CacheArgs, Qcow2Args};
pub use shares::ShareArgs;
