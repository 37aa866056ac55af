//! Tasks that hand on what etcd says of changes, beside the thread's own work; and whether they
//! still say what there is.

use std::{collections::BTreeMap, time::Duration};

use async_channel::Sender;
use policy::time::Instant;

use super::{
    etcd::{KeyValue, Watch},
    words::Input,
};

/// Aborts a task when it goes.
#[derive(Debug)]
pub(super) struct Watching(tokio::task::AbortHandle);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Hands on what a watch says.
pub(super) fn forward(mut watch: Watch, session: u64, inbox: Sender<Input>) -> Watching {
    let task = tokio::spawn(async move {
        loop {
            match watch.next().await {
                Ok(events) if events.is_empty() => {}
                Ok(events) => {
                    if inbox.send(Input::Watched(session, events)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let _ = inbox.send(Input::Ended(session, error.to_string())).await;
                    return;
                }
            }
        }
    });
    Watching(task.abort_handle())
}

/// Finds out that a watch says nothing any more while its connection lives.
///
/// A host that has reported looks, where no grant comes for a while, whether etcd has something
/// that the watch has not told; and breaks with that member if it has not told it another while
/// later. A leader's own report comes back to it as a grant by both watches.
#[derive(Debug)]
pub(super) struct Silence {
    patience: Duration,
    /// When to look.
    due: Option<Instant>,
    seen: BTreeMap<String, i64>,
    missing: Vec<(String, i64)>,
}

impl Silence {
    pub(super) const fn new(patience: Duration) -> Self {
        Self { patience, due: None, seen: BTreeMap::new(), missing: Vec::new() }
    }

    pub(super) const fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Something was said that is answered, as a rule.
    pub(super) fn said(&mut self, now: Instant) {
        self.due = self.due.or(Some(now + self.patience));
    }

    pub(super) fn answered(&mut self) {
        self.due = None;
        self.missing.clear();
    }

    /// By a watch, or as what was there before it.
    pub(super) fn saw(&mut self, value: &KeyValue) {
        self.seen.insert(value.key.clone(), value.mod_revision);
    }

    /// What there is now of what is watched. Whether a watch has stood still.
    pub(super) fn look<'a>(&mut self, found: impl Iterator<Item = &'a KeyValue>, now: Instant) -> bool {
        let told = |key: &str, revision: i64| self.seen.get(key).is_some_and(|seen| *seen >= revision);
        if self.missing.iter().any(|(key, revision)| !told(key, *revision)) {
            return true;
        }
        let missing = found.filter(|value| !told(&value.key, value.mod_revision));
        self.missing = missing.map(|value| (value.key.clone(), value.mod_revision)).collect();
        self.due = (!self.missing.is_empty()).then(|| now + self.patience);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_watch_does_not_tell_in_time_ends_it() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let value = |key: &str, mod_revision| KeyValue {
            key: key.to_owned(),
            value: Vec::new(),
            create_revision: 1,
            mod_revision,
            lease: 0,
        };
        let mut silence = Silence::new(Duration::from_secs(2));
        silence.saw(&value("grant", 5));
        silence.said(at(10));
        silence.said(at(11));
        assert_eq!(silence.due(), Some(at(12)));
        // Nothing new: nothing to be told.
        assert!(!silence.look([value("grant", 5)].iter(), at(12)));
        assert_eq!(silence.due(), None);
        // Told late, but told.
        silence.said(at(20));
        assert!(!silence.look([value("grant", 6)].iter(), at(22)));
        silence.saw(&value("grant", 7));
        assert!(!silence.look([value("grant", 7)].iter(), at(24)));
        // Not told.
        assert!(!silence.look([value("grant", 8), value("leader", 3)].iter(), at(30)));
        assert_eq!(silence.due(), Some(at(32)));
        silence.saw(&value("grant", 8));
        assert!(silence.look([value("grant", 8), value("leader", 3)].iter(), at(32)));
    }
}
