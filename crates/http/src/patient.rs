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

use super::connections::Stream;

/// Time that a client may leave data unread.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Patient {
    stream: Box<dyn Stream>,
    patience: Duration,
    /// Set while data waits to be sent.
    until: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    pub(super) fn new(stream: Box<dyn Stream>) -> Self {
        Self { stream, patience: PATIENCE, until: None }
    }

    /// Returns the result of a write, or fails after a stall of `patience`.
    fn judge<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        // Progress of any size resets the timer.
        if sent.is_ready() {
            self.until = None;
            return sent;
        }
        let patience = self.patience;
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(until.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.judge(context, sent)
    }

    /// Forwarded: without vectored writes hyper copies all data once more.
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(context, sent)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::net::UnixStream;

    use super::*;

    /// Writes until the socket is full, or until the connection fails.
    async fn fill(patient: &mut Patient) -> io::Result<()> {
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
    fn whoever_does_not_read_is_given_up_once_the_time_is_over() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut patient =
                Patient { patience: Duration::from_secs(86_400), ..Patient::new(Box::new(ours)) };
            fill(&mut patient).await.unwrap();
            assert!(patient.until.is_some());
            // Any progress of the client restarts the timeout.
            let mut bytes = [0; 65_536];
            theirs.readable().await.unwrap();
            while theirs.try_read(&mut bytes).is_ok() {}
            poll_fn(|context| Pin::new(&mut patient).poll_write(context, &[0])).await.unwrap();
            assert!(patient.until.is_none());
            patient.patience = Duration::ZERO;
            fill(&mut patient).await.unwrap();
            let error =
                poll_fn(|context| Pin::new(&mut patient).poll_write(context, &[0])).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }
}
