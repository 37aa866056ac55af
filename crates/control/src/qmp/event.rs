//! QMP events.
//!
//! An event goes to every client with a negotiated session, after pending replies. Never waits: the
//! [outbox](super::outbox) handles clients that do not read.

use std::{
    cell::RefCell,
    rc::{Rc, Weak},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use super::outbox::QmpOutbox;

/// Clients with a negotiated session. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct QmpEvents(Rc<RefCell<Vec<Weak<QmpOutbox>>>>);

impl QmpEvents {
    /// Sends an event to all of them; `data` may be `null`.
    pub(crate) fn emit(&self, name: &str, data: Value) {
        let event = event_json(SystemTime::now(), name, data);
        let mut listeners = self.0.borrow_mut();
        listeners.retain(|listener| {
            // A dropped outbox belongs to a disconnected client.
            let Some(outbox) = listener.upgrade() else { return false };
            outbox.push_event(&event);
            true
        });
    }

    pub(super) fn subscribe(&self, outbox: &Rc<QmpOutbox>) {
        self.0.borrow_mut().push(Rc::downgrade(outbox));
    }
}

/// Times before 1970 count as 1970: clients do not expect negative seconds, which QMP permits.
fn event_json(time: SystemTime, name: &str, data: Value) -> Value {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let timestamp = json!({ "seconds": since.as_secs(), "microseconds": since.subsec_micros() });
    let mut event = json!({ "event": name, "timestamp": timestamp });
    if !data.is_null() {
        event["data"] = data;
    }
    event
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn event_has_a_timestamp() {
        let time = UNIX_EPOCH + Duration::new(1_795_229_965, 574_518_999);
        assert_eq!(
            event_json(time, "SHUTDOWN", json!({"guest": false})),
            json!({
                "event": "SHUTDOWN",
                "data": {"guest": false},
                "timestamp": {"seconds": 1_795_229_965, "microseconds": 574_518},
            })
        );
        assert_eq!(event_json(time, "X", Value::Null).get("data"), None);
    }
}
