//! Share of requests that waited for each limit, as printed by `weir trace info` and `weir report`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet},
    rc::Rc,
};

use console::figures;
use serde::{Serialize, Serializer};

/// Names of limits, each stored once for all disks.
pub(super) type LimitNames = HashSet<Rc<str>>;

/// Number of throttled requests of a disk, by the limit that each waited for last.
#[derive(Default)]
pub(super) struct RequestsByLimit(BTreeMap<Rc<str>, u64>);

impl RequestsByLimit {
    /// Column heading in both commands, in lower case.
    pub(super) const HEADING: &str = "held by (of requests)";

    pub(super) fn note(&mut self, limit: &str, names: &mut LimitNames) {
        match self.0.get_mut(limit) {
            Some(count) => *count += 1,
            // Names of limits repeat across disks, so they are shared.
            None => {
                let name = names.get(limit).map_or_else(|| Rc::from(limit), Rc::clone);
                names.insert(Rc::clone(&name));
                self.0.insert(name, 1);
            }
        }
    }

    /// Number of throttled requests.
    pub(super) fn waited(&self) -> u64 {
        self.0.values().sum()
    }

    /// Limits with their shares of `requests`, the largest first; `-` if none waited.
    pub(super) fn shown(&self, requests: u64) -> String {
        let mut held: Vec<_> = self.0.iter().collect();
        held.sort_by_key(|(_, count)| Reverse(**count));
        let all = requests.max(1) as f64;
        let share =
            |(limit, count): (&Rc<str>, &u64)| format!("{limit} {}", figures::share(*count as f64 / all));
        let shown: Vec<_> = held.into_iter().map(share).collect();
        if shown.is_empty() { "-".to_owned() } else { shown.join(", ") }
    }
}

impl Serialize for RequestsByLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, count)| (&**name, count)))
    }
}
