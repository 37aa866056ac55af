//! Tasks that forward watch events to the agent's queue, and detection of a watch that stalled.

use std::{collections::BTreeMap, time::Duration};

use async_channel::Sender;
use policy::time::Instant;

use super::{
    etcd::{KeyValue, Watch},
    words::Input,
};

/// Aborts its task when dropped.
#[derive(Debug)]
pub(super) struct Watching(tokio::task::AbortHandle);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Forwards the events of a watch, then its error.
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

/// Detects a watch that reports nothing while its connection is alive.
///
/// If a report is not followed by a grant in time, etcd is read directly. If the watch still has
/// not delivered one of those values after the same time again, the session ends. The leader's own
/// report returns to it as a grant as well, so it checks both of its watches.
#[derive(Debug)]
pub(super) struct Silence {
    patience: Duration,
    /// Time of the next check.
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

    /// Notes a report, which a grant normally follows.
    pub(super) fn said(&mut self, now: Instant) {
        self.due = self.due.or(Some(now + self.patience));
    }

    pub(super) fn answered(&mut self) {
        self.due = None;
        self.missing.clear();
    }

    /// Notes a value that a watch delivered, or that was read before the watch.
    pub(super) fn saw(&mut self, value: &KeyValue) {
        self.seen.insert(value.key.clone(), value.mod_revision);
    }

    /// Compares the values in etcd with those seen. True if a watch has stalled.
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
        // Nothing new in etcd, so nothing was missed.
        assert!(!silence.look([value("grant", 5)].iter(), at(12)));
        assert_eq!(silence.due(), None);
        // Late, but delivered.
        silence.said(at(20));
        assert!(!silence.look([value("grant", 6)].iter(), at(22)));
        silence.saw(&value("grant", 7));
        assert!(!silence.look([value("grant", 7)].iter(), at(24)));
        // Not delivered.
        assert!(!silence.look([value("grant", 8), value("leader", 3)].iter(), at(30)));
        assert_eq!(silence.due(), Some(at(32)));
        silence.saw(&value("grant", 8));
        assert!(silence.look([value("grant", 8), value("leader", 3)].iter(), at(32)));
    }
}
