//! The groups of a config as trees, in an order in which they can be created.
//!
//! A group may be a member of another: a tenant's group of a host's group. Each group follows its
//! parent, so one pass creates them.

use std::collections::HashMap;

use super::{ConfigError, ConfigWithOrigins, Diagnostics, GroupConfig};

/// Maximum depth of nested groups: every request passes all levels.
pub(crate) const MAX_GROUP_DEPTH: usize = 8;

/// Lookup of groups by name.
pub(super) struct GroupIndex<'a> {
    all: &'a [ConfigWithOrigins<GroupConfig>],
    /// Index in `all`.
    by_name: HashMap<&'a str, usize>,
}

/// Checks the groups and returns them ordered, each after its parent.
pub(super) fn sort_groups(
    groups: Vec<ConfigWithOrigins<GroupConfig>>,
    diagnostics: &Diagnostics,
) -> Vec<ConfigWithOrigins<GroupConfig>> {
    groups.iter().for_each(|group| group.check_rules(diagnostics));
    let known = GroupIndex::new(&groups);
    let parent = |group: &ConfigWithOrigins<GroupConfig>| {
        known.find_or_report(group.group.as_ref()?, diagnostics, |rule| group.error("group", rule))
    };
    let parents: Vec<_> = groups.iter().map(parent).collect();
    for group in groups.iter().filter(|group| group.settings.latency.target_ns > 0) {
        if let Some(above) = known.with_latency_target(group.group.as_deref()) {
            diagnostics.report(group.error("latency-target", nested_target_rule(above)));
        }
    }
    // `collect` stops at the first error, so a cycle is reported once.
    let levels: Result<Vec<_>, _> = (0..groups.len()).map(|index| known.depth(index, &parents)).collect();
    let levels = diagnostics.ok_or_report(levels).unwrap_or_else(|| vec![0; groups.len()]);
    let mut order: Vec<_> = levels.into_iter().zip(groups).collect();
    // A stable sort by depth: parents first, otherwise the order of the file.
    order.sort_by_key(|(level, _)| *level);
    order.into_iter().map(|(_, group)| group).collect()
}

/// Rule of a latency target inside a group that has one.
pub fn nested_target_rule(group: &str) -> String {
    format!(
        "cannot be set inside group {group:?}, which has a latency-target for all its disks together \
         (remove one of them)"
    )
}

impl<'a> GroupIndex<'a> {
    pub(super) fn new(all: &'a [ConfigWithOrigins<GroupConfig>]) -> Self {
        let by_name = all.iter().enumerate().map(|(index, group)| (group.name.as_str(), index)).collect();
        Self { all, by_name }
    }

    /// Index of the group of this name. If there is none, reports the error that `to_error`
    /// returns for the rule.
    pub(super) fn find_or_report(
        &self,
        name: &str,
        diagnostics: &Diagnostics,
        to_error: impl Fn(String) -> ConfigError,
    ) -> Option<usize> {
        // Finding the nearest name compares all of them, which is pointless beyond the bound.
        if diagnostics.is_full() { None } else { diagnostics.ok_or_report(self.find(name).map_err(to_error)) }
    }

    /// Name of the innermost of the group `name` and its ancestors that has a latency target.
    pub(super) fn with_latency_target(&self, name: Option<&'a str>) -> Option<&'a str> {
        let parent = |name: &&'a str| self.all[*self.by_name.get(name)?].group.as_deref();
        // The bound ends a cycle, which is reported elsewhere.
        let mut chain = std::iter::successors(name, parent).take(MAX_GROUP_DEPTH);
        let has_target = |name: &&str| {
            let index = self.by_name.get(name);
            index.is_some_and(|index| self.all[*index].settings.latency.target_ns > 0)
        };
        chain.find(has_target)
    }

    fn find(&self, name: &str) -> Result<usize, String> {
        let found = self.by_name.get(name).copied();
        found.ok_or_else(|| match crate::suggest::nearest(name, self.by_name.keys().copied()) {
            Some(nearest) => format!("is not a group of this file (did you mean {nearest:?}?)"),
            None => format!("is not a group of this file (add [group.{name}])"),
        })
    }

    fn depth(&self, index: usize, parents: &[Option<usize>]) -> Result<usize, ConfigError> {
        let mut level = 0;
        let mut at = index;
        // Ends after `MAX_GROUP_DEPTH` steps, so that cycles need no detection here.
        while let Some(parent) = parents[at] {
            level += 1;
            if level == MAX_GROUP_DEPTH {
                return Err(self.depth_error(index, parents));
            }
            at = parent;
        }
        Ok(level)
    }

    /// Error of a group whose chain of parents is a cycle, or too long.
    fn depth_error(&self, index: usize, parents: &[Option<usize>]) -> ConfigError {
        let mut chain = vec![index];
        // Runs once, for the message: finds the cycle's first member on the chain.
        let mut step_of = HashMap::from([(index, 0)]);
        while let Some(parent) = parents[chain[chain.len() - 1]] {
            if let Some(&step) = step_of.get(&parent) {
                return self.cycle_error(&chain[step..]);
            }
            step_of.insert(parent, chain.len());
            chain.push(parent);
        }
        let levels = chain.len();
        self.error(
            index,
            format!("nests {levels} groups; at most {MAX_GROUP_DEPTH} are possible (remove some)"),
        )
    }

    fn cycle_error(&self, members: &[usize]) -> ConfigError {
        const MAX_NAMED: usize = 4;
        let rest = &members[1..];
        let mut names: Vec<_> = rest.iter().map(|&member| self.all[member].name.as_str()).collect();
        // A cycle may have 100,000 members.
        let omitted = names.len().saturating_sub(MAX_NAMED);
        names.truncate(MAX_NAMED);
        let names = names.join(", ");
        let rule = match (rest.len(), omitted) {
            (0, _) => "is the group itself (name another, or remove the key)".to_owned(),
            (_, 0) => format!("puts the group into itself, through {names} (break the cycle)"),
            _ => format!("puts the group into itself, through {names} and {omitted} more (break the cycle)"),
        };
        self.error(members[0], rule)
    }

    fn error(&self, index: usize, rule: String) -> ConfigError {
        self.all[index].error("group", rule)
    }
}
