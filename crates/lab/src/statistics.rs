//! What samples say, and what they do not.
//!
//! ```text
//!   a series over time ─► steady ─► its middle, without a beginning or an end that differs
//!   samples ────────────► estimate ─► median, and between what it lies (bootstrap)
//!   samples, samples ───► compare ─► how much more, between what, and whether it is a difference at all
//!   quotients by round ─► compare_rounds ─► the same of two that took turns, without what the rounds had in common
//! ```
//!
//! Noise is heavy-tailed, so everything goes by ranks, medians and resampling. At most one of
//! twenty comparisons of equal things shows a difference.

mod compare;
mod estimate;
mod paired;
mod ranks;
mod steady;

pub(crate) use compare::compare;
pub(crate) use estimate::{Estimate, estimate, median};
pub(crate) use paired::compare_rounds;
pub(crate) use ranks::{Comparison, Verdict};
pub(crate) use steady::steady;
