//! `--cluster`: hosts, their demand, the cluster's settings, and faults.

use std::{str::FromStr, time::Duration};

use policy::cluster::{MAX_HOSTS, Timing};

use crate::simulate::keys::SpecKeys;

const MAX_DISKS: u64 = 1000;
/// Bound on all disks: each has a queue, a client and a slot in its host's tree.
const MAX_DISKS_OF_ALL: u64 = 100_000;
const MAX_SECONDS: u64 = 100_000;
/// Keeps the difference of two clocks below the safety margin of leases.
const MAX_DRIFT_PPM: u64 = 400;
const MS: Duration = Duration::from_millis(1);

/// Hosts that share one group's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterSpec {
    pub(super) hosts: usize,
    /// Disks of each host.
    pub(super) disks: usize,
    /// Request size in bytes.
    pub(super) size: u64,
    pub(super) seconds: u64,
    /// Percentages of hosts with unbounded demand, and without demand.
    pub(super) busy: u64,
    pub(super) idle: u64,
    /// Demand of the remaining hosts, in percent of an equal share.
    pub(super) wants: u64,
    /// True for random arrivals, false for even spacing.
    pub(super) is_random: bool,
    /// Percentage of hosts that change at a time.
    pub(super) change: u64,
    pub(super) every: Duration,
    pub(super) timing: Timing,
    pub(super) safe_share_ppm: Option<u32>,
    /// Mean latency of a message.
    pub(super) latency: Duration,
    pub(super) drift_ppm: u64,
    pub(super) candidates: usize,
    /// Percentage of hosts whose disks have this weight; the rest have 100.
    pub(super) heavy: u64,
    pub(super) weight: u32,
    /// Percentage of hosts whose disks have this reservation.
    pub(super) promised: u64,
    pub(super) reservation: u64,
    pub(super) faults: ClusterFaults,
}

/// Number of faults of each kind, at times that the seed determines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ClusterFaults {
    pub(super) leader_deaths: u64,
    pub(super) etcd_stops: u64,
    /// Number of partitions, each of one percent of the hosts.
    pub(super) cuts: u64,
    pub(super) crashes: u64,
    /// Duration of an outage of etcd or of a partition.
    pub(super) away: Duration,
}

impl FromStr for ClusterSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut keys = SpecKeys::new(text)?;
        keys.accept_old_name("safe-share", "fallback-share");
        keys.accept_old_name("promised", "reserved");
        let seconds = |seconds| Duration::from_secs(seconds);
        let hosts = keys.number("hosts", 100, 1..=u64::from(MAX_HOSTS))?;
        let disks = keys.number("disks", 10, 1..=MAX_DISKS)?;
        if hosts * disks > MAX_DISKS_OF_ALL {
            return Err(format!(
                "hosts={hosts},disks={disks} are more than {MAX_DISKS_OF_ALL} disks (lower one)"
            ));
        }
        // Parsed first: the bounds of other keys depend on it.
        let tick = keys.time("tick", Timing::DEFAULT.tick, 10 * MS..=seconds(10))?;
        let spec = Self {
            hosts: hosts as usize,
            disks: disks as usize,
            size: keys.bytes("size", 4096)?,
            seconds: keys.number("seconds", 60, 1..=MAX_SECONDS)?,
            busy: keys.percent("busy", 40)?,
            idle: keys.percent("idle", 30)?,
            wants: keys.percent("wants", 50)?,
            is_random: match keys.take("arrivals").unwrap_or("even") {
                "even" => false,
                "random" => true,
                other => return Err(format!("arrivals={other} is neither even nor random")),
            },
            change: keys.percent("change", 10)?,
            // Ten ticks at least, else no change is followed before the next.
            every: keys.time("every", seconds(10), 10 * tick..=seconds(MAX_SECONDS))?,
            timing: Timing {
                tick,
                // Several ticks, so that a late renewal does not end a lease.
                lease: keys.time("lease", Timing::DEFAULT.lease, 5 * tick..=seconds(600))?,
            },
            safe_share_ppm: match keys.take("fallback-share") {
                Some(text) => Some(
                    settings::parse_fallback_share(text)
                        .map_err(|rule| format!("fallback-share={text} {rule}"))?,
                ),
                None => None,
            },
            latency: keys.time("latency", MS, Duration::from_micros(1)..=seconds(1))?,
            drift_ppm: keys.number("drift", 200, 0..=MAX_DRIFT_PPM)?,
            candidates: keys.number("candidates", 3, 1..=100)? as usize,
            heavy: keys.percent("heavy", 0)?,
            weight: keys.number("weight", 200, 1..=10_000)? as u32,
            promised: keys.percent("reserved", 0)?,
            reservation: keys.number("reservation", 20, 1..=1_000_000)?,
            faults: ClusterFaults {
                leader_deaths: keys.number("leader-deaths", 0, 0..=1000)?,
                etcd_stops: keys.number("etcd-stops", 0, 0..=1000)?,
                cuts: keys.number("cuts", 0, 0..=1000)?,
                crashes: keys.number("crashes", 0, 0..=1000)?,
                away: keys.time("away", seconds(3), MS..=seconds(MAX_SECONDS))?,
            },
        };
        keys.finish("--cluster")?;
        if spec.busy + spec.idle > 100 {
            return Err(format!("busy={},idle={} are more than 100% of the hosts", spec.busy, spec.idle));
        }
        Ok(spec)
    }
}

impl ClusterSpec {
    /// True for the last hosts, which have reservations.
    pub(super) const fn has_reservation(&self, host: usize) -> bool {
        host >= self.hosts - self.hosts * self.promised as usize / 100
    }

    /// Sum of all reservations, in operations per second.
    pub(super) const fn total_reservation(&self) -> u64 {
        (self.hosts * self.promised as usize / 100 * self.disks) as u64 * self.reservation
    }
}

#[cfg(test)]
impl ClusterFaults {
    pub(super) const fn any(&self) -> bool {
        self.leader_deaths + self.etcd_stops + self.cuts + self.crashes > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_cluster_spec_is_rejected() {
        let error = |text: &str| text.parse::<ClusterSpec>().unwrap_err();
        assert_eq!(error("hosts=0"), "hosts=0 is not between 1 and 10000");
        assert_eq!(error("hosts=10001"), "hosts=10001 is not between 1 and 10000");
        for (wrong, expect) in [
            ("hosts=-1", "hosts=-1 is not a whole number of 0 or more; it must be between 1 and 10000"),
            ("disks=1K", "(write 1000); it must be between 1 and 1000"),
            ("every=x", "; it must be between 2s and 100000s"),
        ] {
            assert!(error(wrong).ends_with(expect), "{}", error(wrong));
        }
        assert!(error("hosts=10000,disks=11").ends_with("are more than 100000 disks (lower one)"));
        assert_eq!(error("busy=101%"), "busy=101% is not a percentage from 0% to 100%");
        assert_eq!(error("busy=60%,idle=50"), "busy=60,idle=50 are more than 100% of the hosts");
        assert_eq!(error("tick=1s,lease=4s"), "lease=4s is not between 5s and 600s");
        assert_eq!(error("drift=500"), "drift=500 is not between 0 and 400");
        assert!(error("fallback-share=2").starts_with("fallback-share=2 is not a part of a limit"));
        assert_eq!("promised=25%".parse::<ClusterSpec>().map(|spec| spec.promised), Ok(25), "the old name");
        assert_eq!(error("arrivals=odd"), "arrivals=odd is neither even nor random");
        assert_eq!(error("host=3"), "\"host\" is no key of --cluster (did you mean hosts?)");
        assert!(error("hosts").contains("is not of the form key=value"));
    }

    #[test]
    fn defaults_are_those_of_the_daemon() {
        let spec: ClusterSpec = "".parse().unwrap();
        assert_eq!((spec.hosts, spec.disks, spec.timing), (100, 10, Timing::DEFAULT));
        assert!(!spec.faults.any());
    }
}
