//! Connections at rest: between two requests, with nothing in flight, so that another process can
//! go on with them, or this one.
//!
//! ```text
//!   open ──► closed ──────────► still ─────────────────────────► gone
//!    ▲       nobody new is      every connection comes to rest   another goes on with them; those
//!    │       let in             and says what it has             that cannot move are closed
//!    └──────────┴─────────────────┴── go on ──
//! ```
//!
//! What a client has sent and nobody has begun goes along as bytes, as they came: whoever goes on
//! parses them again. Requests that wait for their limits are such, charged nothing. What was begun
//! is finished and answered before.
//!
//! Decides nothing: the server says what is next, each connection sees to itself.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
};

use event_listener::{Event, EventListener};

use super::session::Session;
use reactor::op::Fd;

/// A connection that waits for whoever goes on with it.
#[derive(Clone, Debug)]
pub struct Rested {
    /// Nobody receives or sends there.
    pub socket: Fd,
    /// Whether TLS is spoken there, whose state cannot move.
    pub tls: bool,
    /// What was agreed on.
    pub session: Session,
    /// Received, from the beginning of a request on.
    pub bytes: Vec<u8>,
    /// So many bytes are dropped before what comes behind `bytes`, which are none then.
    pub skip: u64,
}

/// What all connections of a server are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Stage {
    Open,
    Closed,
    Still,
    Gone,
}

#[derive(Debug, Default)]
pub(super) struct Rest {
    stage: AtomicU8,
    /// Of those that stood still, one after the other.
    turn: AtomicU64,
    /// Notified when the stage has changed. Every connection listens.
    changed: Event,
    /// Notified when a client has arrived or a connection has come to rest. Only the server
    /// listens, while it closes its listeners or quiesces its connections.
    progress: Event,
    /// Clients that are being accepted, or are not registered yet.
    arriving: AtomicUsize,
    /// By number; nothing can be had of a stream that is no socket.
    rested: Mutex<HashMap<u64, Option<Rested>>>,
}

/// Somebody may be accepted, or has been and is not registered: see [`Rest::arriving`].
#[derive(Debug)]
pub(super) struct Arriving(Arc<Rest>);

impl Drop for Arriving {
    fn drop(&mut self) {
        self.0.arriving.fetch_sub(1, SeqCst);
        self.0.progress.notify(usize::MAX);
    }
}

impl Rest {
    /// Counts a client, who may still come, until it is registered or does not come.
    pub(super) fn arriving(self: &Arc<Self>) -> Arriving {
        self.arriving.fetch_add(1, SeqCst);
        Arriving(Arc::clone(self))
    }

    /// Whether nobody can come of whom nobody knows yet.
    pub(super) fn nobody_arrives(&self) -> bool {
        self.arriving.load(SeqCst) == 0
    }

    pub(super) fn stage(&self) -> Stage {
        match self.stage.load(SeqCst) {
            0 => Stage::Open,
            1 => Stage::Closed,
            2 => Stage::Still,
            _ => Stage::Gone,
        }
    }

    pub(super) fn set(&self, stage: Stage) {
        {
            let mut rested = self.rested();
            // What they had is old as soon as they go on.
            if stage != Stage::Gone {
                rested.clear();
            }
            if stage == Stage::Still {
                self.turn.fetch_add(1, SeqCst);
            }
            self.stage.store(stage as u8, SeqCst);
        }
        self.changed.notify(usize::MAX);
        self.progress.notify(usize::MAX);
    }

    /// Listener for the next arrival of a client, the next connection that comes to rest, and the
    /// next change of the stage. To be created before the server checks any of these.
    pub(super) fn listen_to_progress(&self) -> EventListener {
        self.progress.listen()
    }

    /// Waits until a stage is as it should be; returns it.
    pub(super) async fn until(&self, is_it: impl Fn(Stage) -> bool) -> Stage {
        loop {
            let changed = self.changed.listen();
            let stage = self.stage();
            if is_it(stage) {
                return stage;
            }
            changed.await;
        }
    }

    pub(super) fn turn(&self) -> u64 {
        self.turn.load(SeqCst)
    }

    /// Waits until a rest is over that began in this turn; whether another goes on. A rest that
    /// follows at once is another one.
    pub(super) async fn over(&self, turn: u64) -> bool {
        let stage = self.until(|stage| stage != Stage::Still || self.turn() != turn).await;
        stage == Stage::Gone
    }

    /// A connection has come to rest: says so in this turn and in all that follow at once, and
    /// waits until it is to go on; whether another goes on.
    pub(super) async fn lie(&self, number: u64, has: Option<Rested>) -> bool {
        loop {
            let turn = self.turn();
            {
                let mut rested = self.rested();
                // Of a turn that is over nobody has to know.
                if self.turn() == turn && self.stage() == Stage::Still {
                    rested.insert(number, has.clone());
                }
            }
            self.progress.notify(usize::MAX);
            if self.over(turn).await {
                return true;
            }
            match self.stage() {
                Stage::Still => {}
                stage => return stage == Stage::Gone,
            }
        }
    }

    /// Whether another goes on with this connection.
    pub(super) fn is_passed_on(&self, number: u64) -> bool {
        let rested = self.rested();
        self.stage() == Stage::Gone
            && rested.get(&number).is_some_and(|has| has.as_ref().is_some_and(|has| !has.tls))
    }

    pub(super) fn rested(&self) -> MutexGuard<'_, HashMap<u64, Option<Rested>>> {
        self.rested.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        future::{Future, poll_fn},
        pin::pin,
        rc::Rc,
    };

    use super::*;
    use reactor::{sim, spawn_joinable, yield_now};

    /// Connections are woken when the stage changes, and neither by a client that arrives nor by
    /// another connection that has come to rest.
    #[test]
    fn connections_are_woken_by_stages_alone() {
        const CONNECTIONS: u64 = 100;
        sim::run(1, async {
            let rest = Arc::<Rest>::default();
            let polls: Rc<Cell<u64>> = Rc::default();
            let connection = |_| {
                let (rest, polls) = (Arc::clone(&rest), Rc::clone(&polls));
                spawn_joinable(async move {
                    let mut still = pin!(rest.until(|stage| stage >= Stage::Still));
                    poll_fn(|context| {
                        polls.set(polls.get() + 1);
                        still.as_mut().poll(context)
                    })
                    .await
                })
            };
            let connections: Vec<_> = (0..CONNECTIONS).map(connection).collect();
            let settle = || async {
                for _ in 0..10 * CONNECTIONS {
                    yield_now().await;
                }
            };
            settle().await;
            for _ in 0..1000 {
                let heard = rest.listen_to_progress();
                drop(rest.arriving());
                heard.await;
            }
            settle().await;
            assert_eq!(polls.get(), CONNECTIONS);
            rest.set(Stage::Closed);
            settle().await;
            rest.set(Stage::Still);
            for connection in connections {
                assert_eq!(connection.await, Stage::Still);
            }
            assert_eq!(polls.get(), 3 * CONNECTIONS);
        });
    }
}
