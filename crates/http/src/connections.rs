//! Open connections of an address, and which of them is closed for a new one.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::AbortHandle,
};

/// Byte stream of a connection: TCP, Unix or TLS.
pub(super) trait HttpStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> HttpStream for S {}

/// Handle of a connection for its requests.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionHandle {
    is_stream: Arc<AtomicBool>,
}

impl ConnectionHandle {
    /// Marks the connection as a stream, which is not closed for a new connection.
    pub(super) fn mark_stream(&self) {
        // Relaxed: a connection that is closed for a new one just before is no harm.
        self.is_stream.store(true, Relaxed);
    }
}

/// Open connections, oldest first.
pub(super) struct ConnectionSlots {
    max: usize,
    open: Mutex<VecDeque<(AbortHandle, ConnectionHandle)>>,
}

/// Free slot for one connection.
pub(super) struct FreeSlot<'a> {
    among: &'a ConnectionSlots,
    connection: ConnectionHandle,
}

impl ConnectionSlots {
    pub(super) fn new(max: usize) -> Self {
        Self { max, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, VecDeque<(AbortHandle, ConnectionHandle)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a free slot, after closing the oldest connection that is not a stream if necessary.
    /// `None` if all are streams.
    pub(super) fn enter(&self) -> Option<FreeSlot<'_>> {
        let mut open = self.open();
        // Ended connections free their slots here, at the next accept.
        open.retain(|(task, _)| !task.is_finished());
        if open.len() >= self.max {
            // Streams are bounded separately (`stream::MAX_STREAMS`).
            let oldest = open.iter().position(|(_, connection)| !connection.is_stream.load(Relaxed))?;
            open.remove(oldest).inspect(|(task, _)| task.abort());
        }
        Some(FreeSlot { among: self, connection: ConnectionHandle::default() })
    }
}

impl FreeSlot<'_> {
    pub(super) fn connection(&self) -> ConnectionHandle {
        self.connection.clone()
    }

    pub(super) fn occupy(self, task: AbortHandle) {
        self.among.open().push_back((task, self.connection));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_runtime(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
    }

    /// A connection that stays open; its task shows whether it was aborted.
    fn enter(connections: &ConnectionSlots) -> Option<(ConnectionHandle, tokio::task::JoinHandle<()>)> {
        let free = connections.enter()?;
        let task = tokio::spawn(std::future::pending::<()>());
        let connection = free.connection();
        free.occupy(task.abort_handle());
        Some((connection, task))
    }

    #[test]
    fn the_oldest_connection_is_closed_for_a_new_one() {
        on_runtime(async {
            let connections = ConnectionSlots::new(3);
            let (stream, streaming) = enter(&connections).unwrap();
            stream.mark_stream();
            let (_, oldest) = enter(&connections).unwrap();
            let (_, younger) = enter(&connections).unwrap();
            enter(&connections).unwrap();
            assert!(oldest.await.unwrap_err().is_cancelled());
            assert!(!streaming.is_finished() && !younger.is_finished());
        });
    }

    #[test]
    fn streams_are_never_closed_for_new_connections() {
        on_runtime(async {
            let connections = ConnectionSlots::new(2);
            let both = [(); 2].map(|()| enter(&connections).unwrap());
            both.iter().for_each(|(connection, _)| connection.mark_stream());
            assert!(enter(&connections).is_none());
            both[0].1.abort();
            tokio::task::yield_now().await;
            assert!(enter(&connections).is_some());
        });
    }
}
