//! Originator of a change, available while the change is being made, across all its polls.
//!
//! ```text
//!   a client of a control socket ─┐
//!   SIGHUP                        ├─► Attributed ─► polls the change ─► a listener calls current_actor()
//!   a client over HTTP            ┘        └ restores the previous actor after each poll
//! ```
//!
//! Belongs to the main thread, which makes all changes.

use std::{
    cell::RefCell,
    pin::Pin,
    task::{Context, Poll},
};

use serde::Serialize;
use serde_json::Value;

/// Originator of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the variants name their fields")]
pub enum ChangeOrigin {
    /// A client of a control socket, by the peer credentials of the socket.
    Qmp { pid: i32, uid: u32 },
    /// SIGHUP.
    Signal,
    /// A reload of the config file, and its originator.
    Reload { by: Box<ChangeOrigin> },
    /// A client over HTTP: its address, or the socket's path.
    Http { client: String },
    /// Another host of the cluster; the originator is known only there.
    #[serde(rename = "cluster")]
    AnotherHost,
}

thread_local! {
    static ACTING: RefCell<Option<ChangeOrigin>> = const { RefCell::new(None) };
}

/// Originator of the change that runs now on this thread; `None`: the daemon itself.
pub fn current_actor() -> Option<ChangeOrigin> {
    ACTING.with_borrow(Clone::clone)
}

impl ChangeOrigin {
    /// Attributes all polls of `change` to this actor.
    pub fn attribute<F: Future>(self, change: F) -> Attributed<F> {
        Attributed { actor: self, change: Box::pin(change) }
    }

    /// A reload on behalf of the current actor; by SIGHUP if there is none.
    pub fn reload_for_current() -> Self {
        Self::Reload { by: Box::new(current_actor().unwrap_or(Self::Signal)) }
    }

    /// Text for messages, after "by".
    pub fn shown(&self) -> String {
        match self {
            Self::Qmp { pid, uid } => format!("process {pid} of user {uid}, over QMP"),
            Self::Signal => "SIGHUP".to_owned(),
            Self::Reload { by } => format!("the config file, read again for {}", by.shown()),
            Self::Http { client } => format!("{client}, over HTTP"),
            Self::AnotherHost => "another host".to_owned(),
        }
    }

    /// JSON for events.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("all keys are strings")
    }
}

/// A change that is attributed to an actor.
pub struct Attributed<F> {
    actor: ChangeOrigin,
    change: Pin<Box<F>>,
}

impl<F: Future> Future for Attributed<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        // Restored by a destructor, so that a panic in the change does not leave the wrong actor.
        struct Restore(Option<ChangeOrigin>);
        impl Drop for Restore {
            fn drop(&mut self) {
                ACTING.set(self.0.take());
            }
        }
        let _restore = Restore(ACTING.replace(Some(self.actor.clone())));
        self.change.as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests {
    use reactor::sim;

    use super::*;

    #[test]
    fn each_poll_restores_the_actor() {
        sim::run(1, async {
            let change = |pid| {
                reactor::spawn_joinable(ChangeOrigin::Qmp { pid, uid: 0 }.attribute(async move {
                    for _ in 0..5 {
                        assert_eq!(current_actor(), Some(ChangeOrigin::Qmp { pid, uid: 0 }));
                        reactor::yield_now().await;
                    }
                    let reload = ChangeOrigin::reload_for_current();
                    reload
                        .attribute(async {
                            assert!(matches!(current_actor(), Some(ChangeOrigin::Reload { .. })));
                        })
                        .await;
                    assert_eq!(current_actor(), Some(ChangeOrigin::Qmp { pid, uid: 0 }));
                }))
            };
            let both = [change(1), change(2)];
            for task in both {
                task.await;
            }
            assert_eq!(
                (current_actor(), ChangeOrigin::reload_for_current()),
                (None, ChangeOrigin::Reload { by: Box::new(ChangeOrigin::Signal) })
            );
        });
    }
}
