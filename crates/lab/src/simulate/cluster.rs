//! `weir simulate --cluster`: hosts that share one group's limits by etcd, in virtual time.
//!
//! ```text
//!   --cluster hosts=… ─► spec ──► hosts: demand, and the ideal shares ───┐
//!   --iops-total … ────► limits ──► run: policy's simulated cluster ─────┼─► summary: tables, JSON
//!                                   changes and faults by the seed       └─► findings: charts
//! ```
//!
//! Hosts, leader and trees are the daemon's own code; etcd, the network, clocks and clients are
//! simulated (`policy::cluster::simulated`). Never connects to etcd, and accepts no address of one.

mod findings;
mod hosts;
mod run;
mod spec;
mod summary;
#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicBool;

use anyhow::anyhow;
use console::{CommandFailure, figures, progress::ActivitySpinner};
use policy::{
    cluster::ClusterGroupLimits,
    throttle::{LimitKind, LimitPart, LimitSetting, Limits},
};
pub(crate) use spec::ClusterSpec;
use summary::ClusterSummary;

use crate::result::Findings;

/// Operations per second and host of the default limit.
const IOPS_OF_ONE: u64 = 100;
/// Options that can be combined with it, besides limits.
pub(super) const CLUSTER_OPTIONS: [&str; 5] = ["cluster", "seed", "json", "result", "report"];

/// Result of a simulation.
pub(super) struct ClusterResult {
    pub(super) summary: ClusterSummary,
    pub(super) findings: Findings,
}

impl ClusterResult {
    /// The most severe problem: a violated limit, else the reason for an early end.
    pub(super) fn failure(&self) -> Option<String> {
        let violated = self.summary.violation.is_some().then(|| self.summary.safety());
        violated.or_else(|| self.summary.partial.clone())
    }
}

/// Simulates hosts that share these limits, until the end or `stop`.
pub(super) fn simulate(
    spec: &ClusterSpec,
    limits: Limits,
    seed: u64,
    stop: &AtomicBool,
) -> Result<ClusterResult, CommandFailure> {
    // Wrong limits are usage errors, reported before the simulation starts.
    let (limits, remarks) = of_group(limits, spec)?;
    let progress = ActivitySpinner::new();
    let outcome = run::run(spec, limits, seed, stop, |at| {
        progress.set_message(|| format!("{} of {} s simulated", figures::time(at), spec.seconds));
    });
    drop(progress);
    let summary = ClusterSummary::new(spec, &limits, seed, &outcome, remarks);
    let findings = findings::of(&summary, &outcome);
    Ok(ClusterResult { summary, findings })
}

/// The group's limits, and remarks about them.
fn of_group(
    mut limits: Limits,
    spec: &ClusterSpec,
) -> Result<(ClusterGroupLimits, Vec<String>), CommandFailure> {
    let usage_error = |why: String| CommandFailure::Usage(anyhow!("--cluster: {why}"));
    for kind in [LimitKind::IopsWrite, LimitKind::BpsWrite] {
        if limits.limit(kind).rate > 0 {
            let name = LimitSetting::Limit(kind, LimitPart::Rate).name();
            return Err(usage_error(format!(
                "{name}: its clients only read (limit reads, or both together)"
            )));
        }
    }
    let mut remarks = Vec::new();
    if limits.is_unlimited() {
        let rate = IOPS_OF_ONE * spec.hosts as u64;
        limits.limit_mut(LimitKind::IopsTotal).rate = rate;
        remarks
            .push(format!("No limit was given: iops-total={rate} was taken, {IOPS_OF_ONE} for each host."));
    }
    let group = ClusterGroupLimits::new(1, limits, spec.hosts as u32, spec.safe_share_ppm)
        .map_err(|error| usage_error(error.to_string()))?;
    // Reservations beyond the limit could not all be in force, and the ideal would be undefined.
    let promised = spec.total_reservation();
    for kind in [LimitKind::IopsTotal, LimitKind::IopsRead] {
        let rate = limits.limit(kind).rate;
        if rate > 0 && promised > rate {
            return Err(usage_error(format!(
                "reservation: {promised} operations per second are reserved in total, more than \
                 the limit of {rate} (lower reserved, reservation or disks)"
            )));
        }
    }
    Ok((group, remarks))
}
