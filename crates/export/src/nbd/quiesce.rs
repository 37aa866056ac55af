//! Quiesced connections: between two requests with nothing in flight, so that this process or the
//! new process of an upgrade can continue them.
//!
//! ```text
//!   Open ──► NotAccepting ────► Quiescing ─────────────────────► HandedOver
//!    ▲       no client is       every connection quiesces and    the new process continues them;
//!    │       accepted           publishes its state              those with TLS are closed
//!    └──────────┴─────────────────┴── resume ──
//! ```
//!
//! Requests that were received but not started are transferred as the bytes that arrived; the new
//! process parses them again. That includes requests that wait for limits, which are not charged
//! yet. Started requests are completed and answered first.
//!
//! Never decides the next stage: the server does. Each connection quiesces itself.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
};

use event_listener::{Event, EventListener};

use super::session::NbdSession;
use reactor::operation::Fd;

/// State of a quiesced connection.
#[derive(Clone, Debug)]
pub struct QuiescedNbdConnection {
    /// No task receives or sends on it.
    pub socket: Fd,
    /// True if the connection uses TLS, whose state cannot be transferred.
    pub tls: bool,
    /// Negotiated session.
    pub session: NbdSession,
    /// Received bytes, from the beginning of a request.
    pub bytes: Vec<u8>,
    /// Number of bytes to drop from the socket; if above zero, `bytes` is empty.
    pub skip: u64,
}

/// Stage of all connections of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum QuiesceStage {
    Open,
    NotAccepting,
    Quiescing,
    HandedOver,
}

#[derive(Debug, Default)]
pub(super) struct ConnectionQuiesce {
    stage: AtomicU8,
    /// Number of quiesces so far.
    quiesce_count: AtomicU64,
    /// Notified when the stage has changed. Every connection listens.
    changed: Event,
    /// Notified when a client has arrived or a connection has quiesced. Only the server listens,
    /// while it closes its listeners or quiesces its connections.
    progress: Event,
    /// Clients that are being accepted or are not registered yet.
    arriving: AtomicUsize,
    /// State by connection number; `None` for a stream that is no socket and cannot be transferred.
    quiesced_states: Mutex<HashMap<u64, Option<QuiescedNbdConnection>>>,
}

/// Guard for a client that is being accepted or not registered yet: see
/// [`ConnectionQuiesce::arriving`].
#[derive(Debug)]
pub(super) struct ArrivalGuard(Arc<ConnectionQuiesce>);

impl Drop for ArrivalGuard {
    fn drop(&mut self) {
        self.0.arriving.fetch_sub(1, SeqCst);
        self.0.progress.notify(usize::MAX);
    }
}

impl ConnectionQuiesce {
    /// Counts a possible client until it is registered or was not accepted.
    pub(super) fn arriving(self: &Arc<Self>) -> ArrivalGuard {
        self.arriving.fetch_add(1, SeqCst);
        ArrivalGuard(Arc::clone(self))
    }

    /// True if no accepted connection is unregistered, and none is being accepted.
    pub(super) fn has_no_arrivals(&self) -> bool {
        self.arriving.load(SeqCst) == 0
    }

    pub(super) fn stage(&self) -> QuiesceStage {
        match self.stage.load(SeqCst) {
            0 => QuiesceStage::Open,
            1 => QuiesceStage::NotAccepting,
            2 => QuiesceStage::Quiescing,
            _ => QuiesceStage::HandedOver,
        }
    }

    pub(super) fn set(&self, stage: QuiesceStage) {
        {
            let mut states = self.lock_quiesced_states();
            // Published states are stale once connections resume.
            if stage != QuiesceStage::HandedOver {
                states.clear();
            }
            if stage == QuiesceStage::Quiescing {
                // Under the lock of the states, so that `publish_until_resumed` cannot publish
                // state of the previous quiesce.
                self.quiesce_count.fetch_add(1, SeqCst);
            }
            self.stage.store(stage as u8, SeqCst);
        }
        // After the store, or a woken connection could read the old stage and sleep again.
        self.changed.notify(usize::MAX);
        self.progress.notify(usize::MAX);
    }

    /// Listener for the next arrival of a client, the next connection that quiesces, and the next
    /// change of the stage. Create it before checking any of these.
    pub(super) fn listen_to_progress(&self) -> EventListener {
        self.progress.listen()
    }

    /// Waits until the stage satisfies the predicate; returns the stage.
    pub(super) async fn wait_for_stage(&self, predicate: impl Fn(QuiesceStage) -> bool) -> QuiesceStage {
        loop {
            // The listener exists before the stage is read, so that a change in between wakes it.
            let changed = self.changed.listen();
            let stage = self.stage();
            if predicate(stage) {
                return stage;
            }
            changed.await;
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.quiesce_count.load(SeqCst)
    }

    /// Waits for the end of the quiesce with this number; true if another process continues the
    /// connection. A quiesce that follows at once has another number.
    pub(super) async fn wait_for_end_of_quiesce(&self, generation: u64) -> bool {
        let stage = self
            .wait_for_stage(|stage| stage != QuiesceStage::Quiescing || self.generation() != generation)
            .await;
        stage == QuiesceStage::HandedOver
    }

    /// Publishes the state of a quiesced connection, also for quiesces that follow at once, and
    /// waits until the server resumes. True if another process continues the connection.
    pub(super) async fn publish_until_resumed(
        &self,
        number: u64,
        state: Option<QuiescedNbdConnection>,
    ) -> bool {
        loop {
            let generation = self.generation();
            {
                let mut states = self.lock_quiesced_states();
                // The state is published only for the current quiesce: an older one was already
                // cleared.
                if self.generation() == generation && self.stage() == QuiesceStage::Quiescing {
                    states.insert(number, state.clone());
                }
            }
            self.progress.notify(usize::MAX);
            if self.wait_for_end_of_quiesce(generation).await {
                return true;
            }
            match self.stage() {
                QuiesceStage::Quiescing => {}
                stage => return stage == QuiesceStage::HandedOver,
            }
        }
    }

    /// True if another process continues this connection.
    pub(super) fn is_handed_over(&self, number: u64) -> bool {
        let states = self.lock_quiesced_states();
        self.stage() == QuiesceStage::HandedOver
            && states.get(&number).is_some_and(|state| state.as_ref().is_some_and(|has| !has.tls))
    }

    pub(super) fn lock_quiesced_states(&self) -> MutexGuard<'_, HashMap<u64, Option<QuiescedNbdConnection>>> {
        self.quiesced_states.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Connections are woken by changes of the stage only, not by an arriving client or by another
    /// connection that quiesces.
    #[test]
    fn connections_are_woken_by_stages_alone() {
        const CONNECTIONS: u64 = 100;
        sim::run(1, async {
            let quiesce = Arc::<ConnectionQuiesce>::default();
            let polls: Rc<Cell<u64>> = Rc::default();
            let connection = |_| {
                let (quiesce, polls) = (Arc::clone(&quiesce), Rc::clone(&polls));
                spawn_joinable(async move {
                    let mut wait = pin!(quiesce.wait_for_stage(|stage| stage >= QuiesceStage::Quiescing));
                    poll_fn(|context| {
                        polls.set(polls.get() + 1);
                        wait.as_mut().poll(context)
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
                let progress = quiesce.listen_to_progress();
                drop(quiesce.arriving());
                progress.await;
            }
            settle().await;
            assert_eq!(polls.get(), CONNECTIONS);
            quiesce.set(QuiesceStage::NotAccepting);
            settle().await;
            quiesce.set(QuiesceStage::Quiescing);
            for connection in connections {
                assert_eq!(connection.await, QuiesceStage::Quiescing);
            }
            assert_eq!(polls.get(), 3 * CONNECTIONS);
        });
    }
}
