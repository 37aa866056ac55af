//! Queue of replies and events to a client, in order.
//!
//! The next command waits until the client has read most of its replies. A client that does not
//! read events is disconnected. Never grows beyond one reply and [`MAX_EVENT_BYTES`].

use std::{
    cell::{Cell, RefCell},
    mem,
};

use reactor::Signal;
use serde::Serialize;
use serde_json::Value;

/// Queued bytes above which the next command waits.
const PAUSE_BYTES: usize = 256 << 10;
/// Queued bytes above which an event ends the connection. One reload may change ten thousand disks,
/// with an event each, before anything can be sent.
const MAX_EVENT_BYTES: usize = 16 << 20;

pub(super) struct QmpOutbox {
    bytes: RefCell<Vec<u8>>,
    /// Bytes handed to the sending task and not sent completely.
    sending_bytes: Cell<usize>,
    closed: Cell<bool>,
    disconnected: Cell<bool>,
    /// Raised if there is something to send, or nothing will follow.
    filled: Signal,
    /// Raised when bytes were sent, or none will be.
    emptied: Signal,
    /// Shuts down the connection, which wakes a blocked sending task.
    hang_up: Box<dyn Fn()>,
}

impl QmpOutbox {
    pub(super) fn new(hang_up: impl Fn() + 'static) -> Self {
        Self {
            bytes: RefCell::default(),
            sending_bytes: Cell::new(0),
            closed: Cell::new(false),
            disconnected: Cell::new(false),
            filled: Signal::default(),
            emptied: Signal::default(),
            hang_up: Box::new(hang_up),
        }
    }

    pub(super) fn push(&self, value: &impl Serialize) {
        if !self.closed.get() {
            append(&mut self.bytes.borrow_mut(), value);
            self.filled.raise();
        }
    }

    pub(super) fn push_event(&self, event: &Value) {
        if self.queued() > MAX_EVENT_BYTES {
            self.disconnect();
        } else {
            self.push(event);
        }
    }

    fn queued(&self) -> usize {
        self.bytes.borrow().len() + self.sending_bytes.get()
    }

    /// Waits until the next command may run; false if the client was disconnected.
    pub(super) async fn until_drained(&self) -> bool {
        while self.queued() > PAUSE_BYTES && !self.disconnected.get() {
            self.emptied.wait().await;
        }
        !self.disconnected.get()
    }

    /// Waits for bytes to send; `None` if none will follow.
    pub(super) async fn next_bytes(&self) -> Option<Vec<u8>> {
        // The caller asks for more only after the previous bytes were sent.
        self.sending_bytes.set(0);
        self.emptied.raise();
        loop {
            if self.disconnected.get() {
                return None;
            }
            let bytes = mem::take(&mut *self.bytes.borrow_mut());
            if !bytes.is_empty() {
                self.sending_bytes.set(bytes.len());
                return Some(bytes);
            }
            if self.closed.get() {
                return None;
            }
            self.filled.wait().await;
        }
    }

    /// Rejects further messages; queued ones are still sent.
    pub(super) fn close(&self) {
        self.closed.set(true);
        self.filled.raise();
    }

    /// Drops all messages and disconnects the client.
    pub(super) fn disconnect(&self) {
        self.disconnected.set(true);
        self.close();
        self.bytes.take();
        self.emptied.raise();
        // Last: the sending task wakes up and must find the queue closed.
        (self.hang_up)();
    }

    #[cfg(test)]
    pub(super) fn is_disconnected(&self) -> bool {
        self.disconnected.get()
    }
}

/// Appends a value as one line, with QEMU's line end.
fn append(bytes: &mut Vec<u8>, value: &impl Serialize) {
    // Cannot fail: all keys are strings, and the writer is memory.
    let written = serde_json::to_writer(&mut *bytes, value);
    debug_assert!(written.is_ok(), "{written:?}");
    bytes.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use reactor::sim;
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_are_sent_in_order_before_the_end() {
        sim::run(1, async {
            let outbox = QmpOutbox::new(|| ());
            outbox.push(&json!(1));
            outbox.push_event(&json!({"event": "X"}));
            assert_eq!(outbox.next_bytes().await.unwrap(), b"1\r\n{\"event\":\"X\"}\r\n");
            outbox.push(&json!(2));
            outbox.close();
            // After `close`: dropped.
            outbox.push(&json!(3));
            assert_eq!(outbox.next_bytes().await.unwrap(), b"2\r\n");
            assert_eq!(outbox.next_bytes().await, None);
        });
    }

    #[test]
    fn next_command_waits_for_unread_replies() {
        for seed in 0..20 {
            sim::run(seed, async {
                let outbox = Rc::new(QmpOutbox::new(|| ()));
                outbox.push(&json!("x".repeat(2 * PAUSE_BYTES)));
                let reader = Rc::clone(&outbox);
                // Blocked by the large reply.
                let drained = reactor::spawn_joinable(async move { reader.until_drained().await });
                reactor::yield_now().await;
                let bytes = outbox.next_bytes().await.unwrap();
                reactor::yield_now().await;
                assert!(!drained.is_finished(), "on its way is not read");
                drop(bytes);
                outbox.push(&json!(1));
                outbox.next_bytes().await;
                assert!(drained.await);
            });
        }
    }

    #[test]
    fn client_that_never_reads_is_disconnected() {
        sim::run(1, async {
            let hung_up = Rc::new(Cell::new(false));
            let flag = Rc::clone(&hung_up);
            let outbox = QmpOutbox::new(move || flag.set(true));
            let event = json!({"event": "X", "data": "x".repeat(1000)});
            for _ in 0..100_000 {
                outbox.push_event(&event);
            }
            assert!(hung_up.get() && outbox.is_disconnected());
            assert!(!outbox.until_drained().await);
            assert_eq!(outbox.next_bytes().await, None);
            assert_eq!(outbox.queued(), 0);
        });
    }
}
