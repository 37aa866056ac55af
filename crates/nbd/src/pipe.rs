//! A simulated stream: two bounded queues of bytes that are split at random, as a socket may split
//! and delay data.

use std::{
    collections::VecDeque,
    future::poll_fn,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

use reactor::{
    buffer::{IoBuffer, Segments},
    sim,
};

/// Maximum number of bytes in one direction; a sender waits for space.
const CAPACITY: usize = 8 << 10;

#[derive(Debug, Default)]
struct PipeDirection {
    bytes: VecDeque<u8>,
    closed: bool,
    interrupted: bool,
    /// Wakers of the receiver and the sender.
    waiting: [Option<Waker>; 2],
}

impl PipeDirection {
    fn wake(&mut self) -> [Option<Waker>; 2] {
        std::mem::take(&mut self.waiting)
    }
}

/// One end of a simulated stream.
#[derive(Clone, Debug)]
pub struct Pipe {
    incoming: Arc<Mutex<PipeDirection>>,
    outgoing: Arc<Mutex<PipeDirection>>,
}

fn lock(direction: &Mutex<PipeDirection>) -> MutexGuard<'_, PipeDirection> {
    direction.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wake_all(waiting: [Option<Waker>; 2]) {
    waiting.into_iter().flatten().for_each(Waker::wake);
}

impl Pipe {
    /// Creates two connected ends.
    pub fn pair() -> (Self, Self) {
        let (one, other) = (Arc::default(), Arc::default());
        (
            Self { incoming: Arc::clone(&one), outgoing: Arc::clone(&other) },
            Self { incoming: other, outgoing: one },
        )
    }

    /// Receives as a socket does: at least one byte; 0 after the peer has closed and all is read.
    pub async fn receive(&self, mut buffer: IoBuffer, filled: usize) -> (io::Result<usize>, IoBuffer) {
        let count = poll_fn(|context| {
            let mut incoming = lock(&self.incoming);
            // Bytes that have arrived win over the interruption, as with a socket.
            if std::mem::take(&mut incoming.interrupted) && incoming.bytes.is_empty() {
                return Poll::Ready(Err(io::Error::from_raw_os_error(libc::ECANCELED)));
            }
            let max_bytes = incoming.bytes.len().min(buffer.len() - filled);
            if max_bytes == 0 {
                if incoming.closed {
                    return Poll::Ready(Ok(0));
                }
                incoming.waiting[0] = Some(context.waker().clone());
                return Poll::Pending;
            }
            // Returns a random part of the available bytes, as a socket may.
            let count = sim::random(|random| random.usize(1..=max_bytes));
            for (target, byte) in buffer[filled..].iter_mut().zip(incoming.bytes.drain(..count)) {
                *target = byte;
            }
            let waiting = incoming.wake();
            drop(incoming);
            wake_all(waiting);
            Poll::Ready(Ok(count))
        })
        .await;
        (count, buffer)
    }

    /// Sends everything.
    ///
    /// # Errors
    /// Fails if one end of the pipe is closed.
    pub async fn send(&self, segments: Segments) -> io::Result<()> {
        let mut bytes = vec![0; segments.len()];
        segments.copy_to(&mut bytes);
        let mut sent = 0;
        poll_fn(|context| {
            let mut outgoing = lock(&self.outgoing);
            if outgoing.closed {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let count = (bytes.len() - sent).min(CAPACITY - outgoing.bytes.len());
            outgoing.bytes.extend(&bytes[sent..sent + count]);
            sent += count;
            let waiting = if count > 0 { outgoing.wake() } else { [None, None] };
            let done = sent == bytes.len();
            if !done {
                outgoing.waiting[1] = Some(context.waker().clone());
            }
            drop(outgoing);
            wake_all(waiting);
            if done { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await
    }

    /// Interrupts the receiver of this end, which gets the available bytes, or `ECANCELED`.
    pub fn interrupt(&self) {
        let waiting = {
            let mut incoming = lock(&self.incoming);
            incoming.interrupted = incoming.waiting[0].is_some();
            incoming.wake()
        };
        wake_all(waiting);
    }

    /// Ends receiving after the bytes that are queued already, as `shutdown(SHUT_RD)`; sending
    /// continues.
    pub fn end_receiving(&self) {
        let waiting = {
            let mut incoming = lock(&self.incoming);
            incoming.closed = true;
            incoming.wake()
        };
        wake_all(waiting);
    }

    /// Closes both directions; queued bytes can still be received.
    pub fn close(&self) {
        for direction in [&self.incoming, &self.outgoing] {
            let waiting = {
                let mut direction = lock(direction);
                direction.closed = true;
                direction.wake()
            };
            wake_all(waiting);
        }
    }
}
