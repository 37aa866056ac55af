//! The groups of a plan: which lies in which, and in an order in which they can be made.
//!
//! A group may lie in another, as a tenant's in a host's. Names become indices, every group after
//! the one it lies in, so one pass builds them.

use std::collections::HashMap;

use super::{Group, GroupDraft, Mistakes, Said, Wrong};

/// Groups that may lie in each other, one in the next: every request passes all of them.
pub(crate) const MAX_LEVELS: usize = 8;

pub(super) struct Groups<'a> {
    drafts: &'a [GroupDraft],
    /// Index in `drafts`.
    by_name: HashMap<&'a str, usize>,
    /// The index in the plan of each draft.
    planned: Vec<usize>,
}

impl<'a> Groups<'a> {
    /// Judges the groups; also returns them as the plan has them.
    pub(super) fn plan(drafts: &'a [GroupDraft], mistakes: &Mistakes) -> (Self, Vec<Group>) {
        let by_name = drafts.iter().enumerate().map(|(index, group)| (group.name.value.as_str(), index));
        let mut groups = Self { drafts, by_name: by_name.collect(), planned: Vec::new() };
        let parent = |group: &GroupDraft| groups.look_for(group.group.as_ref()?, mistakes);
        let parents: Vec<_> = drafts.iter().map(parent).collect();
        // Who lies in a circle is told once.
        let levels: Result<Vec<_>, _> =
            (0..drafts.len()).map(|index| groups.level(index, &parents)).collect();
        let levels = mistakes.keep(levels).unwrap_or_else(|| vec![0; drafts.len()]);
        let mut order: Vec<usize> = (0..drafts.len()).collect();
        order.sort_by_key(|&index| levels[index]);
        groups.planned = vec![0; drafts.len()];
        for (place, &index) in order.iter().enumerate() {
            groups.planned[index] = place;
        }
        let plan = |&index: &usize| {
            let draft = &drafts[index];
            Group {
                name: draft.name.value.clone(),
                settings: draft.settings.judge(mistakes),
                parent: parents[index].map(|parent| groups.planned[parent]),
                cluster: draft.cluster.is_some(),
            }
        };
        let planned = order.iter().map(plan).collect();
        (groups, planned)
    }

    /// The index in the plan of the group of this name; tells if there is none.
    pub(super) fn index_of(&self, name: &Said<String>, mistakes: &Mistakes) -> Option<usize> {
        self.look_for(name, mistakes).map(|index| self.planned[index])
    }

    fn look_for(&self, name: &Said<String>, mistakes: &Mistakes) -> Option<usize> {
        // To suggest a name takes a look at each.
        if mistakes.is_full() { None } else { mistakes.keep(self.find(name)) }
    }

    fn find(&self, name: &Said<String>) -> Result<usize, Wrong> {
        let found = self.by_name.get(name.value.as_str()).copied();
        found.ok_or_else(|| {
            name.wrong(match crate::suggest::nearest(&name.value, self.by_name.keys().copied()) {
                Some(near) => format!("is no group of this file (did you mean {near:?}?)"),
                None => format!("is no group of this file (add [group.{}])", name.value),
            })
        })
    }

    fn level(&self, index: usize, parents: &[Option<usize>]) -> Result<usize, Wrong> {
        let mut level = 0;
        let mut at = index;
        while let Some(parent) = parents[at] {
            level += 1;
            if level == MAX_LEVELS {
                return Err(self.too_deep(index, parents));
            }
            at = parent;
        }
        Ok(level)
    }

    /// What is wrong above a group that lies in too many: a circle, or just their number.
    fn too_deep(&self, index: usize, parents: &[Option<usize>]) -> Wrong {
        let mut chain = vec![index];
        let mut step_of = HashMap::from([(index, 0)]);
        while let Some(parent) = parents[chain[chain.len() - 1]] {
            if let Some(&step) = step_of.get(&parent) {
                return self.circle(&chain[step..]);
            }
            step_of.insert(parent, chain.len());
            chain.push(parent);
        }
        let levels = chain.len();
        self.wrong(
            index,
            format!(
                "makes {levels} groups that lie in each other; there may be {MAX_LEVELS} (leave some out)"
            ),
        )
    }

    fn circle(&self, members: &[usize]) -> Wrong {
        const MOST_NAMED: usize = 4;
        let rest = &members[1..];
        let mut names: Vec<_> = rest.iter().map(|&member| self.drafts[member].name.value.as_str()).collect();
        let left_out = names.len().saturating_sub(MOST_NAMED);
        names.truncate(MOST_NAMED);
        let names = names.join(", ");
        let rule = match (rest.len(), left_out) {
            (0, _) => "is the group itself (name another, or leave it out)".to_owned(),
            (_, 0) => format!("makes the group lie in itself, by way of {names} (break the circle)"),
            _ => format!(
                "makes the group lie in itself, by way of {names} and {left_out} more (break the circle)"
            ),
        };
        self.wrong(members[0], rule)
    }

    fn wrong(&self, index: usize, rule: String) -> Wrong {
        let draft = &self.drafts[index];
        draft.group.as_ref().map_or(&draft.name.place, |said| &said.place).wrong(rule)
    }
}
