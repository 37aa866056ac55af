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

use super::ask::{Answer, Ask, Job, Sent};
use nbd::client::{Client, Established};
use reactor::{Signal, error::Result};

/// Owner of the connections, over all threads.
pub(super) trait Home: Sized + Send + Sync + 'static {
    /// Unique number in this process.
    fn id(&self) -> u64;
    /// Reports that a connection of this session is lost.
    fn lose(self: &sync::Arc<Self>, session: u64, by: Break, why: &str);
}

/// Cause of a session's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Break {
    /// The server disconnected, or the network.
    Server,
    /// The thread of this process that had the connection has ended.
    Thread,
}

thread_local! {
    /// Connections of this thread, by link number.
    static HERE: RefCell<HashMap<u64, Weak<Lane>>> = RefCell::default();
    /// Last session in which this thread tried to open a connection, by link number.
    static TRIED: RefCell<HashMap<u64, u64>> = RefCell::default();
}

/// True once in each session: this thread may then try to open its own connection.
pub(super) fn may_try(link: u64, session: u64) -> bool {
    TRIED.with_borrow_mut(|tried| tried.insert(link, session) != Some(session))
}

#[derive(Debug)]
struct Lane {
    client: Client,
    session: u64,
    users: Cell<usize>,
    unused: Signal,
}

/// The right to use a connection of this thread; counts its users.
#[derive(Debug)]
pub(super) struct Own(Rc<Lane>);

impl Own {
    /// The connection of this link and session, if this thread has it.
    pub(super) fn of(link: u64, session: u64) -> Option<Self> {
        let lane = HERE.with_borrow(|here| here.get(&link).and_then(Weak::upgrade))?;
        (lane.session == session).then(|| {
            lane.users.set(lane.users.get() + 1);
            Self(lane)
        })
    }

    pub(super) fn session(&self) -> u64 {
        self.0.session
    }

    pub(super) fn client(&self) -> &Client {
        &self.0.client
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.users.set(self.0.users.get() - 1);
        if self.0.users.get() == 0 {
            self.0.unused.raise();
        }
    }
}

/// Path of a request to the server.
#[derive(Debug)]
pub(super) enum Way {
    Own(Own),
    /// Through the thread that has a connection of this session.
    Other(u64, Sender<Job>),
}

impl Way {
    pub(super) fn session(&self) -> u64 {
        match self {
            Self::Own(own) => own.session(),
            Self::Other(session, _) => *session,
        }
    }

    /// Executes a request; `None` if the thread that should execute it has ended.
    ///
    /// # Errors
    /// The server's, or [`GONE`](nbd::client::GONE).
    pub(super) async fn ask(&self, ask: &Ask) -> Option<Result<Answer>> {
        match self {
            Self::Own(own) => Some(ask.on(own.client()).await),
            Self::Other(_, jobs) => {
                let (tell, told) = async_channel::bounded(1);
                jobs.send(Job::Ask(ask.clone(), tell)).await.ok()?;
                told.recv().await.ok().map(|answer| answer.map(Answer::from))
            }
        }
    }
}

/// The keeper's queue. Dropping it drops the queued jobs and thereby fails their callers. The
/// channel alone would keep them as long as a sender exists, and waiting callers are senders.
struct Jobs(Receiver<Job>);

impl Drop for Jobs {
    fn drop(&mut self) {
        self.0.close();
        while self.0.try_recv().is_ok() {}
    }
}

/// Starts a connection on this thread for `link` and returns the sender of its jobs. The connection
/// lasts until all senders are gone.
pub(super) fn start<H: Home>(link: &sync::Arc<H>, session: u64, established: Established) -> Sender<Job> {
    // Unbounded is safe: each job has a caller that waits for it, and the number of callers is
    // bounded.
    let (sender, jobs) = async_channel::unbounded();
    let client = Client::start(established);
    let lane = Rc::new(Lane { client, session, users: Cell::new(0), unused: Signal::default() });
    HERE.with_borrow_mut(|here| {
        // Removes the entries of connections that have ended.
        here.retain(|_, lane| lane.strong_count() > 0);
        TRIED.with_borrow_mut(|tried| tried.retain(|link, _| here.contains_key(link)));
        here.insert(link.id(), Rc::downgrade(&lane));
    });
    reactor::spawn(keep(lane, Jobs(jobs), sync::Arc::downgrade(link), session));
    sender
}

enum Next {
    Job(Job),
    Over,
    Broken,
}

async fn keep<H: Home>(lane: Rc<Lane>, jobs: Jobs, link: sync::Weak<H>, session: u64) {
    // Declared after `jobs`, so dropped first: a caller whose job is dropped retries and must
    // already see the session's end.
    let lost = Lost { link, session, is_told: Cell::new(false) };
    loop {
        match next(&lane, &jobs.0).await {
            Next::Job(Job::Ask(ask, tell)) => {
                lane.users.set(lane.users.get() + 1);
                let own = Own(Rc::clone(&lane));
                reactor::spawn(async move {
                    let answer = ask.on(own.client()).await.map(Sent::from);
                    // Fails only if the caller has been cancelled.
                    let _ = tell.try_send(answer);
                });
            }
            Next::Job(Job::Leave(tell)) => {
                let left = alone(lane).await;
                let left = match left {
                    Some(client) => client.retire().await,
                    None => None,
                };
                lost.is_told.set(true);
                let _ = tell.try_send(left);
                return;
            }
            Next::Over => {
                lost.is_told.set(true);
                if let Some(client) = alone(lane).await {
                    client.disconnect().await;
                }
                return;
            }
            Next::Broken => {
                let why = lane.client.fault().unwrap_or_default();
                lost.tell(Break::Server, &why);
                return;
            }
        }
    }
}

async fn next(lane: &Lane, jobs: &Receiver<Job>) -> Next {
    let mut job = pin!(jobs.recv());
    let mut gone = pin!(lane.client.gone());
    poll_fn(|context| {
        // A break comes first: jobs are then dropped rather than sent on a dead connection.
        if gone.as_mut().poll(context).is_ready() {
            return Poll::Ready(Next::Broken);
        }
        job.as_mut().poll(context).map(|job| job.map_or(Next::Over, Next::Job))
    })
    .await
}

/// The connection, once no request of this thread uses it.
async fn alone(lane: Rc<Lane>) -> Option<Client> {
    while lane.users.get() > 0 {
        lane.unused.wait().await;
    }
    // A user that has just released it may still hold the `Rc` for a moment.
    let mut lane = lane;
    for _ in 0..1000 {
        match Rc::try_unwrap(lane) {
            Ok(lane) => return Some(lane.client),
            Err(still) => lane = still,
        }
        reactor::yield_now().await;
    }
    None
}

/// Reports the loss of the connection to the link once, also when the reactor ends.
struct Lost<H: Home> {
    link: sync::Weak<H>,
    session: u64,
    is_told: Cell<bool>,
}

impl<H: Home> Lost<H> {
    fn tell(&self, by: Break, why: &str) {
        if !self.is_told.replace(true)
            && let Some(link) = self.link.upgrade()
        {
            link.lose(self.session, by, why);
        }
    }
}

impl<H: Home> Drop for Lost<H> {
    fn drop(&mut self) {
        self.tell(Break::Thread, "the thread that had the connection has ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_keeper_that_has_gone_is_told() {
        let (sender, jobs) = async_channel::unbounded();
        let keeper = Jobs(jobs);
        let (tell, told) = async_channel::bounded(1);
        // A waiting caller is also a sender, so the channel would not close by itself.
        sender.try_send(Job::Ask(Ask::Flush, tell)).unwrap();
        drop(keeper);
        assert!(told.is_closed() && sender.is_closed());
    }
}
