//! Who changes what runs: known while a change is being made, however many turns it takes.
//!
//! ```text
//!   a client of a control socket ─┐
//!   SIGHUP                        ├─► By::run ─► polls the change ─► a listener asks now_acting()
//!   a client over HTTP            ┘        └ and takes itself back after each poll
//! ```
//!
//! Belongs to the main thread, where everything is changed.

use std::{
    cell::RefCell,
    pin::Pin,
    task::{Context, Poll},
};

use serde_json::{Value, json};

/// Who asked for a change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants name their fields")]
pub enum Actor {
    /// A client of a control socket, as the kernel knows it.
    Qmp { pid: i32, uid: u32 },
    /// SIGHUP.
    Signal,
    /// The config file, read again for whoever asked.
    Reload(Box<Actor>),
    /// A client over HTTP: its address, or the socket's path.
    Http { client: String },
    /// Another host of the cluster: that knows who asked it.
    AnotherHost,
}

thread_local! {
    static ACTING: RefCell<Option<Actor>> = const { RefCell::new(None) };
}

/// Who is at work now on this thread; none: the daemon by itself.
pub fn now_acting() -> Option<Actor> {
    ACTING.with_borrow(Clone::clone)
}

impl Actor {
    /// Has a change made in its name.
    pub fn run<F: Future>(self, change: F) -> By<F> {
        By { actor: self, change: Box::pin(change) }
    }

    /// The config file, read again in the name of whoever is at work.
    pub fn reload() -> Self {
        Self::Reload(Box::new(now_acting().unwrap_or(Self::Signal)))
    }

    /// To follow "by".
    pub fn shown(&self) -> String {
        match self {
            Self::Qmp { pid, uid } => format!("process {pid} of user {uid}, over QMP"),
            Self::Signal => "SIGHUP".to_owned(),
            Self::Reload(by) => format!("the config file, read again for {}", by.shown()),
            Self::Http { client } => format!("{client}, over HTTP"),
            Self::AnotherHost => "another host".to_owned(),
        }
    }

    /// As in events.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Qmp { pid, uid } => json!({ "kind": "qmp", "pid": pid, "uid": uid }),
            Self::Signal => json!({ "kind": "signal" }),
            Self::Reload(by) => json!({ "kind": "reload", "by": by.to_json() }),
            Self::Http { client } => json!({ "kind": "http", "client": client }),
            Self::AnotherHost => json!({ "kind": "cluster" }),
        }
    }
}

/// A change that is being made by somebody.
pub struct By<F> {
    actor: Actor,
    change: Pin<Box<F>>,
}

impl<F: Future> Future for By<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        struct Restore(Option<Actor>);
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
    fn each_change_is_its_own_maker_s_over_all_its_turns() {
        sim::run(1, async {
            let change = |pid| {
                reactor::spawn_joinable(Actor::Qmp { pid, uid: 0 }.run(async move {
                    for _ in 0..5 {
                        assert_eq!(now_acting(), Some(Actor::Qmp { pid, uid: 0 }));
                        reactor::yield_now().await;
                    }
                    let reload = Actor::reload();
                    reload.run(async { assert!(matches!(now_acting(), Some(Actor::Reload(_)))) }).await;
                    assert_eq!(now_acting(), Some(Actor::Qmp { pid, uid: 0 }));
                }))
            };
            let both = [change(1), change(2)];
            for one in both {
                one.await;
            }
            assert_eq!((now_acting(), Actor::reload()), (None, Actor::Reload(Box::new(Actor::Signal))));
        });
    }
}
