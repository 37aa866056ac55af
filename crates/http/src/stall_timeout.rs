//! A connection that fails if its client does not read for too long.
//!
//! Time counts only while data waits to be sent: an idle client is not limited here.

use std::{
    future::Future as _,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

use super::connections::HttpStream;

/// Time that a client may leave data unread.
const STALL_LIMIT: Duration = Duration::from_secs(10);

pub(super) struct StallTimeout {
    stream: Box<dyn HttpStream>,
    limit: Duration,
    /// Set while data waits to be sent.
    until: Option<Pin<Box<Sleep>>>,
}

impl StallTimeout {
    pub(super) fn new(stream: Box<dyn HttpStream>) -> Self {
        Self { stream, limit: STALL_LIMIT, until: None }
    }

    /// Returns the result of a write, or fails if the client has stalled for longer than the limit.
    fn check_stall<T>(
        &mut self,
        context: &mut Context<'_>,
        sent: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        // Progress of any size resets the timer.
        if sent.is_ready() {
            self.until = None;
            return sent;
        }
        let limit = self.limit;
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(until.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for StallTimeout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for StallTimeout {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_stall(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.check_stall(context, sent)
    }

    /// Forwarded: without vectored writes hyper copies all data once more.
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_flush(context);
        self.check_stall(context, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check_stall(context, sent)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::net::UnixStream;

    use super::*;

    /// Writes until the socket is full, or until the connection fails.
    async fn fill(patient: &mut StallTimeout) -> io::Result<()> {
        poll_fn(|context| {
            loop {
                match Pin::new(&mut *patient).poll_write(context, &[0; 4096]) {
                    Poll::Ready(Ok(_)) => {}
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Ready(Ok(())),
                }
            }
        })
        .await
    }

    #[test]
    fn a_stalled_client_times_out() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut patient =
                StallTimeout { limit: Duration::from_secs(86_400), ..StallTimeout::new(Box::new(ours)) };
            fill(&mut patient).await.unwrap();
            assert!(patient.until.is_some());
            // Any progress of the client restarts the timeout.
            let mut bytes = [0; 65_536];
            theirs.readable().await.unwrap();
            while theirs.try_read(&mut bytes).is_ok() {}
            poll_fn(|context| Pin::new(&mut patient).poll_write(context, &[0])).await.unwrap();
            assert!(patient.until.is_none());
            patient.limit = Duration::ZERO;
            fill(&mut patient).await.unwrap();
            let error =
                poll_fn(|context| Pin::new(&mut patient).poll_write(context, &[0])).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }
}
