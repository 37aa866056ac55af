//! Converts the limits file to pools that can be steered: one for each group or single cgroup.

use std::collections::BTreeMap;

use policy::{
    steering::{SteeredMember, SteeringPool, is_steered},
    throttle::{LimitKind, Limits},
    time::Instant,
    watermark::Watermark,
};

use super::limits_file::{CgroupEntry, LimitsFile};

/// Limits, and the entries that share them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LimitPool {
    /// `group tenant`, or `/system.slice/nginx.service on 254:0`.
    pub(crate) name: String,
    pub(crate) limits: Limits,
    pub(crate) watermark: Watermark,
    /// True if the limits are a fallback share: the daemon may lease more.
    pub(crate) cluster: bool,
    /// Never empty.
    pub(crate) members: Vec<CgroupEntry>,
}

impl LimitPool {
    pub(crate) fn all(limits_file: &LimitsFile) -> anyhow::Result<Vec<Self>> {
        let mut alone = Vec::new();
        let mut groups: BTreeMap<&str, Self> = BTreeMap::new();
        for entry in &limits_file.limits {
            let shared = limits_file.limits_of(entry);
            let new_pool = |name: String| -> anyhow::Result<Self> {
                let (limits, watermark) = (shared.limits()?, shared.watermark()?);
                let cluster = shared.is_of_cluster();
                Ok(Self { name, limits, watermark, cluster, members: vec![entry.clone()] })
            };
            match &entry.group {
                None => alone.push(new_pool(format!("{} on {}", entry.cgroup.display(), entry.device()?))?),
                Some(name) => match groups.get_mut(name.as_str()) {
                    Some(group) => group.members.push(entry.clone()),
                    None => drop(groups.insert(name, new_pool(format!("group {name}"))?)),
                },
            }
        }
        Ok(alone.into_iter().chain(groups.into_values()).collect())
    }

    /// Keeps only the members that exist.
    pub(crate) fn retain_members(mut self, are_there: impl Fn(&CgroupEntry) -> bool) -> Self {
        self.members.retain(are_there);
        self
    }

    /// A pool with empty buckets.
    pub(crate) fn pool(&self, now: Instant) -> SteeringPool {
        let mut pool = SteeringPool::new(&self.limits, now);
        self.members.iter().for_each(|entry| pool.add(SteeredMember::new(entry.weight())));
        pool
    }

    /// True if a limit is divided, between several members or between reads and writes.
    pub(crate) fn limits_are_divided(&self) -> bool {
        let total =
            [LimitKind::BpsTotal, LimitKind::IopsTotal].iter().any(|kind| self.limits.limit(*kind).rate > 0);
        // The members' demand decides the division of a cluster's group.
        total || self.cluster || self.members.len() > 1
    }

    /// True if the kernel alone cannot enforce these limits.
    pub(crate) fn needs_watch(&self) -> bool {
        self.cluster || self.watermark != Watermark::ALWAYS || is_steered(&self.limits, self.members.len())
    }
}
