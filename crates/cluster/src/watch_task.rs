//! Tasks that forward watch events to the agent's queue, and detection of a watch that stalled.

use std::{collections::BTreeMap, time::Duration};

use async_channel::Sender;
use policy::time::Instant;

use super::{
    etcd::{EtcdKeyValue, EtcdWatch},
    messages::AgentInput,
};

/// Aborts its task when dropped.
#[derive(Debug)]
pub(super) struct WatchTask(tokio::task::AbortHandle);

impl Drop for WatchTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Forwards the events of a watch, then its error.
pub(super) fn forward(mut watch: EtcdWatch, session: u64, inbox: Sender<AgentInput>) -> WatchTask {
    let task = tokio::spawn(async move {
        loop {
            match watch.next().await {
                Ok(events) if events.is_empty() => {}
                Ok(events) => {
                    if inbox.send(AgentInput::Watched(session, events)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let _ = inbox.send(AgentInput::Ended(session, error.to_string())).await;
                    return;
                }
            }
        }
    });
    WatchTask(task.abort_handle())
}

/// Detects a watch that reports nothing while its connection is alive.
///
/// If a report is not followed by a grant in time, etcd is read directly. If the watch still has
/// not delivered one of those values after the same time again, the session ends. The leader's own
/// report returns to it as a grant as well, so it checks both of its watches.
#[derive(Debug)]
pub(super) struct StallDetector {
    limit: Duration,
    /// Time of the next check.
    due: Option<Instant>,
    seen: BTreeMap<String, i64>,
    missing: Vec<(String, i64)>,
}

impl StallDetector {
    pub(super) const fn new(limit: Duration) -> Self {
        Self { limit, due: None, seen: BTreeMap::new(), missing: Vec::new() }
    }

    pub(super) const fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Notes a report, which a grant normally follows.
    pub(super) fn note_report(&mut self, now: Instant) {
        self.due = self.due.or(Some(now + self.limit));
    }

    pub(super) fn note_grant(&mut self) {
        self.due = None;
        self.missing.clear();
    }

    /// Notes a value that a watch delivered, or that was read before the watch.
    pub(super) fn note_value(&mut self, value: &EtcdKeyValue) {
        self.seen.insert(value.key.clone(), value.mod_revision);
    }

    /// Compares the values in etcd with those seen. True if a watch has stalled.
    pub(super) fn check<'a>(&mut self, found: impl Iterator<Item = &'a EtcdKeyValue>, now: Instant) -> bool {
        let was_seen = |key: &str, revision: i64| self.seen.get(key).is_some_and(|seen| *seen >= revision);
        if self.missing.iter().any(|(key, revision)| !was_seen(key, *revision)) {
            return true;
        }
        let missing = found.filter(|value| !was_seen(&value.key, value.mod_revision));
        self.missing = missing.map(|value| (value.key.clone(), value.mod_revision)).collect();
        self.due = (!self.missing.is_empty()).then(|| now + self.limit);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stalled_watch_is_detected() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let value = |key: &str, mod_revision| EtcdKeyValue {
            key: key.to_owned(),
            value: Vec::new(),
            create_revision: 1,
            mod_revision,
            lease: 0,
        };
        let mut silence = StallDetector::new(Duration::from_secs(2));
        silence.note_value(&value("grant", 5));
        silence.note_report(at(10));
        silence.note_report(at(11));
        assert_eq!(silence.due(), Some(at(12)));
        // Nothing new in etcd, so nothing was missed.
        assert!(!silence.check([value("grant", 5)].iter(), at(12)));
        assert_eq!(silence.due(), None);
        // Late, but delivered.
        silence.note_report(at(20));
        assert!(!silence.check([value("grant", 6)].iter(), at(22)));
        silence.note_value(&value("grant", 7));
        assert!(!silence.check([value("grant", 7)].iter(), at(24)));
        // Not delivered.
        assert!(!silence.check([value("grant", 8), value("leader", 3)].iter(), at(30)));
        assert_eq!(silence.due(), Some(at(32)));
        silence.note_value(&value("grant", 8));
        assert!(silence.check([value("grant", 8), value("leader", 3)].iter(), at(32)));
    }
}
