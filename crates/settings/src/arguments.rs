//! Options that several commands share, derived from the tables of keys and of the policy.

mod keys;
pub mod limits;
pub mod prefetch;

pub use keys::{ConfigKeyArgs, OptionSelection, describe_shared_group};
pub use limits::ThrottleLimitArgs;
