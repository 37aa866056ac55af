//! What samples say, and what they do not.
//!
//! ```text
//!   a series over time ─► steady ─► its middle, without a beginning or an end that differs
//!   samples ────────────► estimate ─► median, and between what it lies (bootstrap)
//!   samples, samples ───► compare ─► how much more, between what, and whether it is a difference at all
//!   quotients by round ─► compare_rounds ─► the same of two that took turns, without what the rounds had in common
//! ```
//!
//! The machines that measure are noisy, and their noise has heavy tails: a run that the host
//! disturbed is far off. So everything here goes by ranks, medians and resampling, and nothing
//! assumes a normal distribution.
//!
//! Never calls a difference real that chance makes in one of twenty cases.

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
