//! Options that several commands share, derived from the tables of keys and of the policy.

mod keys;
pub mod limits;
pub mod prefetch;

pub use keys::{KeyArgs, KeyOptions, shared_group};
pub use limits::LimitArgs;
