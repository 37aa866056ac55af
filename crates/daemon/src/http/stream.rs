//! Server-sent events (WHATWG HTML, section 9.2): what is sent to whom, and how far behind a
//! listener may be.
//!
//! A message is made once and shared by all. A listener who is [`MOST_BEHIND`] messages behind is
//! let go: its program comes again by itself, and then has everything anew.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Bytes;
use hyper::body::{Body, Frame};
use serde_json::Value;
use tokio::sync::mpsc;

/// Listeners at a time.
pub(super) const MOST_STREAMS: usize = 256;
/// Messages that wait for one listener, beside what lies in its socket.
const MOST_BEHIND: usize = 32;
/// Bytes that are handed over at a time, so that a connection holds no more of a long message.
const PIECE: usize = 8 << 10;
/// After which time a browser comes again, in milliseconds.
const COME_AGAIN_MS: u32 = 1000;

/// A message with its kind and number.
pub(super) fn message(event: &str, id: u64, data: &Value) -> Bytes {
    // JSON has no line ends in it.
    format!("event: {event}\nid: {id}\ndata: {data}\n\n").into()
}

/// [`MOST_STREAMS`] listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused;

#[derive(Default)]
pub(super) struct Listeners(Vec<mpsc::Sender<Bytes>>);

impl Listeners {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One more, which is sent this first.
    pub(super) fn add(&mut self, before: Vec<Bytes>) -> Result<Streamed, Refused> {
        self.0.retain(|listener| !listener.is_closed());
        if self.0.len() >= MOST_STREAMS {
            return Err(Refused);
        }
        let (sender, news) = mpsc::channel(MOST_BEHIND);
        self.0.push(sender);
        let retry = Bytes::from(format!("retry: {COME_AGAIN_MS}\n\n"));
        Ok(Streamed { first: std::iter::once(retry).chain(before).collect(), news })
    }

    /// Those who are too far behind are gone after this.
    pub(super) fn send(&mut self, message: &Bytes) {
        self.0.retain(|listener| listener.try_send(message.clone()).is_ok());
    }
}

/// What one listener is sent, as it takes it.
pub(super) struct Streamed {
    first: VecDeque<Bytes>,
    news: mpsc::Receiver<Bytes>,
}

impl Body for Streamed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.first.is_empty() {
            match self.news.poll_recv(context) {
                Poll::Ready(Some(message)) => self.first.push_back(message),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
        let piece = self.first.front_mut().map(|message| message.split_to(message.len().min(PIECE)));
        if self.first.front().is_some_and(Bytes::is_empty) {
            self.first.pop_front();
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    fn next(streamed: &mut Streamed) -> Option<Bytes> {
        match Pin::new(streamed).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
            _ => None,
        }
    }

    #[test]
    fn a_listener_that_does_not_read_is_let_go_and_others_stay() {
        let mut listeners = Listeners::default();
        let mut reads = listeners.add(Vec::new()).unwrap();
        let mut sleeps = listeners.add(Vec::new()).unwrap();
        assert!(next(&mut reads).unwrap().starts_with(b"retry: "));
        for step in 0..MOST_BEHIND + 8 {
            listeners.send(&message("delta", step as u64, &Value::Null));
            assert!(next(&mut reads).unwrap().starts_with(b"event: delta\nid: "));
        }
        assert_eq!(listeners.len(), 1);
        let mut waiting = 0;
        while next(&mut sleeps).is_some() {
            waiting += 1;
        }
        // With the line that says when to come again.
        assert_eq!(waiting, MOST_BEHIND + 1);
    }

    #[test]
    fn a_long_message_goes_out_in_pieces() {
        let mut listeners = Listeners::default();
        let long = Bytes::from(vec![b'x'; 3 * PIECE + 1]);
        let mut streamed = listeners.add(vec![long]).unwrap();
        next(&mut streamed);
        let lengths: Vec<_> = std::iter::from_fn(|| next(&mut streamed)).map(|piece| piece.len()).collect();
        assert_eq!(lengths, [PIECE, PIECE, PIECE, 1]);
    }

    #[test]
    fn there_is_a_number_of_listeners_at_most() {
        let mut listeners = Listeners::default();
        let mut all: Vec<_> = (0..MOST_STREAMS).map(|_| listeners.add(Vec::new()).unwrap()).collect();
        assert_eq!(listeners.add(Vec::new()).err(), Some(Refused));
        all.pop();
        assert!(listeners.add(Vec::new()).is_ok());
    }
}
