//! Statistics of samples, robust against outliers.
//!
//! ```text
//!   a series over time ─► steady ─► its steady part, without a different beginning or end
//!   samples ────────────► estimate ─► median and confidence interval (bootstrap)
//!   samples, samples ───► compare ─► ratio, confidence interval, significance
//!   ratios by round ────► compare_rounds ─► the same for two that took turns; effects common to a round cancel out
//! ```
//!
//! Noise is heavy-tailed, so everything uses ranks, medians and resampling. At most one of twenty
//! comparisons of equal things shows a difference.

mod compare;
mod estimate;
mod paired;
mod ranks;
mod steady;

pub(crate) use compare::compare;
pub(crate) use estimate::{Estimate, estimate, median};
pub(crate) use paired::compare_rounds;
pub(crate) use ranks::{RankComparison, RankVerdict};
pub(crate) use steady::steady;
