//! A connection of one thread, and its use by other threads.
//!
//! A connection's tasks and buffers belong to one thread. That thread uses it directly; other
//! threads send it jobs. A task of that thread, the keeper, holds the connection: it executes the
//! jobs, notices when the connection breaks, and disconnects once no sender of jobs is left.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    future::poll_fn,
    pin::pin,
    rc::{Rc, Weak},
    sync,
    task::Poll,
};

use async_channel::{Receiver, Sender};

use super::operation::{ConnectionJob, NbdOperation, NbdResult, SendableResult};
use nbd::client::{EstablishedConnection, NbdClient};
use reactor::{Signal, error::Result};

/// Owner of the connections, over all threads.
pub(super) trait ConnectionOwner: Sized + Send + Sync + 'static {
    /// Unique number in this process.
    fn id(&self) -> u64;
    /// Reports that a connection of this session is lost.
    fn connection_lost(self: &sync::Arc<Self>, session: u64, cause: BreakCause, why: &str);
}

/// Cause of a session's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BreakCause {
    /// The server or the network ended the connection.
    Server,
    /// The thread of this process that had the connection has ended.
    Thread,
}

thread_local! {
    /// Connections of this thread, by link number.
    static LOCAL_CONNECTIONS: RefCell<HashMap<u64, Weak<SharedConnection>>> = RefCell::default();
    /// Last session in which this thread tried to open a connection, by link number.
    static TRIED_SESSIONS: RefCell<HashMap<u64, u64>> = RefCell::default();
}

/// True once in each session: this thread may then try to open its own connection.
pub(super) fn may_open(link: u64, session: u64) -> bool {
    TRIED_SESSIONS.with_borrow_mut(|tried_sessions| tried_sessions.insert(link, session) != Some(session))
}

#[derive(Debug)]
struct SharedConnection {
    client: NbdClient,
    session: u64,
    users: Cell<usize>,
    unused: Signal,
}

/// The right to use a connection of this thread; counts its users.
#[derive(Debug)]
pub(super) struct LocalConnection(Rc<SharedConnection>);

impl LocalConnection {
    /// The connection of this link and session, if this thread has it.
    pub(super) fn of(link: u64, session: u64) -> Option<Self> {
        let connection =
            LOCAL_CONNECTIONS.with_borrow(|connections| connections.get(&link).and_then(Weak::upgrade))?;
        (connection.session == session).then(|| {
            connection.users.set(connection.users.get() + 1);
            Self(connection)
        })
    }

    pub(super) fn session(&self) -> u64 {
        self.0.session
    }

    pub(super) fn client(&self) -> &NbdClient {
        &self.0.client
    }
}

impl Drop for LocalConnection {
    fn drop(&mut self) {
        self.0.users.set(self.0.users.get() - 1);
        if self.0.users.get() == 0 {
            self.0.unused.raise();
        }
    }
}

/// Path of a request to the server.
#[derive(Debug)]
pub(super) enum ConnectionRoute {
    Own(LocalConnection),
    /// Through the thread that has a connection of this session.
    Other(u64, Sender<ConnectionJob>),
}

impl ConnectionRoute {
    pub(super) fn session(&self) -> u64 {
        match self {
            Self::Own(own) => own.session(),
            Self::Other(session, _) => *session,
        }
    }

    /// Executes a request; `None` if the thread that should execute it has ended.
    ///
    /// # Errors
    /// The server's error, or [`CONNECTION_LOST`](nbd::client::CONNECTION_LOST).
    pub(super) async fn execute(&self, operation: &NbdOperation) -> Option<Result<NbdResult>> {
        match self {
            Self::Own(connection) => Some(operation.on(connection.client()).await),
            Self::Other(_, jobs) => {
                let (reply_sender, reply_receiver) = async_channel::bounded(1);
                jobs.send(ConnectionJob::Ask(operation.clone(), reply_sender)).await.ok()?;
                reply_receiver.recv().await.ok().map(|outcome| outcome.map(NbdResult::from))
            }
        }
    }
}

/// The keeper's queue. Dropping it drops the queued jobs and thereby fails their callers. The
/// channel alone would keep them as long as a sender exists, and waiting callers are senders.
struct ConnectionJobs(Receiver<ConnectionJob>);

impl Drop for ConnectionJobs {
    fn drop(&mut self) {
        self.0.close();
        while self.0.try_recv().is_ok() {}
    }
}

/// Starts a connection on this thread for `link` and returns the sender of its jobs. The connection
/// lasts until all senders are gone.
pub(super) fn start_keeper<H: ConnectionOwner>(
    link: &sync::Arc<H>,
    session: u64,
    established: EstablishedConnection,
) -> Sender<ConnectionJob> {
    // Unbounded is safe: each job has a caller that waits for it, and the number of callers is
    // bounded.
    let (sender, jobs) = async_channel::unbounded();
    let client = NbdClient::start(established);
    let connection =
        Rc::new(SharedConnection { client, session, users: Cell::new(0), unused: Signal::default() });
    LOCAL_CONNECTIONS.with_borrow_mut(|connections| {
        // Removes the entries of connections that have ended.
        connections.retain(|_, connection| connection.strong_count() > 0);
        TRIED_SESSIONS.with_borrow_mut(|tried_sessions| {
            tried_sessions.retain(|link, _| connections.contains_key(link));
        });
        connections.insert(link.id(), Rc::downgrade(&connection));
    });
    reactor::spawn(run_keeper(connection, ConnectionJobs(jobs), sync::Arc::downgrade(link), session));
    sender
}

enum KeeperEvent {
    Job(ConnectionJob),
    Over,
    Broken,
}

async fn run_keeper<H: ConnectionOwner>(
    connection: Rc<SharedConnection>,
    jobs: ConnectionJobs,
    link: sync::Weak<H>,
    session: u64,
) {
    // Declared after `jobs`, so dropped first: a caller whose job is dropped retries and must
    // already see the session's end.
    let lost = LossReporter { link, session, is_reported: Cell::new(false) };
    loop {
        match next_event(&connection, &jobs.0).await {
            KeeperEvent::Job(ConnectionJob::Ask(operation, reply_sender)) => {
                connection.users.set(connection.users.get() + 1);
                let local = LocalConnection(Rc::clone(&connection));
                reactor::spawn(async move {
                    let outcome = operation.on(local.client()).await.map(SendableResult::from);
                    // Fails only if the caller has been cancelled.
                    let _ = reply_sender.try_send(outcome);
                });
            }
            KeeperEvent::Job(ConnectionJob::Leave(reply_sender)) => {
                let unused_client = wait_unused(connection).await;
                let established = match unused_client {
                    Some(client) => client.into_established().await,
                    None => None,
                };
                lost.is_reported.set(true);
                let _ = reply_sender.try_send(established);
                return;
            }
            KeeperEvent::Over => {
                lost.is_reported.set(true);
                if let Some(client) = wait_unused(connection).await {
                    client.disconnect().await;
                }
                return;
            }
            KeeperEvent::Broken => {
                let why = connection.client.fault().unwrap_or_default();
                lost.report(BreakCause::Server, &why);
                return;
            }
        }
    }
}

async fn next_event(connection: &SharedConnection, jobs: &Receiver<ConnectionJob>) -> KeeperEvent {
    let mut job = pin!(jobs.recv());
    let mut closed = pin!(connection.client.closed());
    poll_fn(|context| {
        // A break comes first: jobs are then dropped rather than sent on a dead connection.
        if closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(KeeperEvent::Broken);
        }
        job.as_mut().poll(context).map(|job| job.map_or(KeeperEvent::Over, KeeperEvent::Job))
    })
    .await
}

/// The connection, once no request of this thread uses it.
async fn wait_unused(connection: Rc<SharedConnection>) -> Option<NbdClient> {
    while connection.users.get() > 0 {
        connection.unused.wait().await;
    }
    // A user that has just released it may still hold the `Rc` for a moment.
    let mut connection = connection;
    for _ in 0..1000 {
        match Rc::try_unwrap(connection) {
            Ok(connection) => return Some(connection.client),
            Err(shared) => connection = shared,
        }
        reactor::yield_now().await;
    }
    None
}

/// Reports the loss of the connection to the link once, also when the reactor ends.
struct LossReporter<H: ConnectionOwner> {
    link: sync::Weak<H>,
    session: u64,
    is_reported: Cell<bool>,
}

impl<H: ConnectionOwner> LossReporter<H> {
    fn report(&self, cause: BreakCause, why: &str) {
        if !self.is_reported.replace(true)
            && let Some(link) = self.link.upgrade()
        {
            link.connection_lost(self.session, cause, why);
        }
    }
}

impl<H: ConnectionOwner> Drop for LossReporter<H> {
    fn drop(&mut self) {
        self.report(BreakCause::Thread, "the thread that served the connection has ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_keeper_fails_queued_jobs() {
        let (sender, jobs) = async_channel::unbounded();
        let keeper = ConnectionJobs(jobs);
        let (reply_sender, reply_receiver) = async_channel::bounded(1);
        // A waiting caller is also a sender, so the channel would not close by itself.
        sender.try_send(ConnectionJob::Ask(NbdOperation::Flush, reply_sender)).unwrap();
        drop(keeper);
        assert!(reply_receiver.is_closed() && sender.is_closed());
    }
}
