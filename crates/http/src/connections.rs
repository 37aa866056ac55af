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
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Handle of a connection for its requests.
#[derive(Clone, Debug, Default)]
pub(super) struct Connection {
    is_stream: Arc<AtomicBool>,
}

impl Connection {
    /// Marks the connection as a stream, which is not closed for a new connection.
    pub(super) fn becomes_stream(&self) {
        // Relaxed: a connection that is closed for a new one just before is no harm.
        self.is_stream.store(true, Relaxed);
    }
}

/// Open connections, oldest first.
pub(super) struct Connections {
    most: usize,
    open: Mutex<VecDeque<(AbortHandle, Connection)>>,
}

/// Free slot for one connection.
pub(super) struct Free<'a> {
    among: &'a Connections,
    connection: Connection,
}

impl Connections {
    pub(super) fn new(most: usize) -> Self {
        Self { most, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, VecDeque<(AbortHandle, Connection)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a free slot, after closing the oldest connection that is not a stream if necessary.
    /// `None` if all are streams.
    pub(super) fn enter(&self) -> Option<Free<'_>> {
        let mut open = self.open();
        // Ended connections free their slots here, at the next accept.
        open.retain(|(task, _)| !task.is_finished());
        if open.len() >= self.most {
            // Streams are bounded separately (`stream::MOST_STREAMS`).
            let oldest = open.iter().position(|(_, connection)| !connection.is_stream.load(Relaxed))?;
            open.remove(oldest).inspect(|(task, _)| task.abort());
        }
        Some(Free { among: self, connection: Connection::default() })
    }
}

impl Free<'_> {
    pub(super) fn connection(&self) -> Connection {
        self.connection.clone()
    }

    pub(super) fn fill(self, task: AbortHandle) {
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
    fn enter(connections: &Connections) -> Option<(Connection, tokio::task::JoinHandle<()>)> {
        let free = connections.enter()?;
        let task = tokio::spawn(std::future::pending::<()>());
        let connection = free.connection();
        free.fill(task.abort_handle());
        Some((connection, task))
    }

    #[test]
    fn the_oldest_that_is_no_stream_makes_room() {
        on_runtime(async {
            let connections = Connections::new(3);
            let (stream, streaming) = enter(&connections).unwrap();
            stream.becomes_stream();
            let (_, oldest) = enter(&connections).unwrap();
            let (_, younger) = enter(&connections).unwrap();
            enter(&connections).unwrap();
            assert!(oldest.await.unwrap_err().is_cancelled());
            assert!(!streaming.is_finished() && !younger.is_finished());
        });
    }

    #[test]
    fn streams_are_never_ended_for_others() {
        on_runtime(async {
            let connections = Connections::new(2);
            let both = [(); 2].map(|()| enter(&connections).unwrap());
            both.iter().for_each(|(connection, _)| connection.becomes_stream());
            assert!(enter(&connections).is_none());
            both[0].1.abort();
            tokio::task::yield_now().await;
            assert!(enter(&connections).is_some());
        });
    }
}
