//! What clients are told without asking.
//!
//! An event goes to every client that has negotiated, behind earlier answers. Never waits: the
//! [outbox](super::outbox) deals with clients that do not read.

use std::{
    cell::RefCell,
    rc::{Rc, Weak},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use super::outbox::Outbox;

/// Clones speak to the same clients.
#[derive(Clone, Debug, Default)]
pub(crate) struct Events(Rc<RefCell<Vec<Weak<Outbox>>>>);

impl Events {
    /// `data` may be `null`.
    pub(crate) fn emit(&self, name: &str, data: Value) {
        let event = at(SystemTime::now(), name, data);
        let mut listeners = self.0.borrow_mut();
        listeners.retain(|listener| {
            let Some(outbox) = listener.upgrade() else { return false };
            outbox.push_event(&event);
            true
        });
    }

    pub(super) fn subscribe(&self, outbox: &Rc<Outbox>) {
        self.0.borrow_mut().push(Rc::downgrade(outbox));
    }
}

/// A clock before 1970 is taken for 1970: no client knows that QMP's seconds may be -1.
fn at(time: SystemTime, name: &str, data: Value) -> Value {
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
    fn an_event_says_when_it_was() {
        let time = UNIX_EPOCH + Duration::new(1_795_229_965, 574_518_999);
        assert_eq!(
            at(time, "SHUTDOWN", json!({"guest": false})),
            json!({
                "event": "SHUTDOWN",
                "data": {"guest": false},
                "timestamp": {"seconds": 1_795_229_965, "microseconds": 574_518},
            })
        );
        assert_eq!(at(time, "X", Value::Null).get("data"), None);
    }
}
