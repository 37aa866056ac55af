//! Server-sent events (WHATWG HTML, section 9.2), and the bound of a listener's lag.
//!
//! A message is serialized once and shared. A listener that lags by [`MAX_LAG`] messages is
//! disconnected: the browser reconnects and receives the whole state.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Bytes;
use hyper::body::{Body, Frame};
use serde::Serialize;
use tokio::sync::mpsc;

use super::peer::HttpPeer;

/// Maximum number of listeners.
pub(super) const MAX_STREAMS: usize = 256;
/// Maximum number of listeners with one address, or of one user over a Unix socket, so that one
/// client cannot use all. A proxy counts as one client.
pub(super) const MAX_STREAMS_PER_PEER: usize = 64;
/// Messages that may wait for one listener, in addition to its socket's buffer.
const MAX_LAG: usize = 32;
/// Bytes passed to the connection at a time, which bounds its copy of a long message.
const PIECE_BYTES: usize = 8 << 10;
/// Delay before a browser reconnects, in milliseconds.
const RECONNECT_MS: u32 = 1000;

/// Formats a message with its type and number.
pub(super) fn message(event: &str, id: u64, data: &impl Serialize) -> Bytes {
    // JSON without whitespace has no line ends, which would end the data.
    let mut message = format!("event: {event}\nid: {id}\ndata: ").into_bytes();
    message.extend_from_slice(&json(data));
    message.extend_from_slice(b"\n\n");
    message.into()
}

/// Serializes a type whose keys are strings.
pub(super) fn json(data: &impl Serialize) -> Bytes {
    serde_json::to_vec(data).expect("all keys are strings").into()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamRejection {
    /// [`MAX_STREAMS`] is reached.
    TooManyListeners,
    /// [`MAX_STREAMS_PER_PEER`] is reached for this client.
    TooManyOfPeer,
}

#[derive(Default)]
pub(super) struct StreamListeners(Vec<(HttpPeer, mpsc::Sender<Bytes>)>);

impl StreamListeners {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a listener, which first receives the messages in `before`.
    pub(super) fn add(&mut self, peer: HttpPeer, before: Vec<Bytes>) -> Result<EventStream, StreamRejection> {
        // Disconnected listeners are noticed here or at the next message.
        self.0.retain(|(_, listener)| !listener.is_closed());
        let source = peer.bound_key();
        if self.0.iter().filter(|(known, _)| *known == source).count() >= MAX_STREAMS_PER_PEER {
            return Err(StreamRejection::TooManyOfPeer);
        }
        // After the check of the peer, whose error contains a remedy for the client.
        if self.0.len() >= MAX_STREAMS {
            return Err(StreamRejection::TooManyListeners);
        }
        let (sender, messages) = mpsc::channel(MAX_LAG);
        self.0.push((source, sender));
        let retry = Bytes::from(format!("retry: {RECONNECT_MS}\n\n"));
        Ok(EventStream { first: std::iter::once(retry).chain(before).collect(), messages })
    }

    /// Sends a message to all, and drops those that lag too far behind.
    pub(super) fn send(&mut self, message: &Bytes) {
        // Never waits: a full queue means that the listener lags too far behind.
        self.0.retain(|(_, listener)| listener.try_send(message.clone()).is_ok());
    }
}

/// Response body of a listener.
pub(super) struct EventStream {
    first: VecDeque<Bytes>,
    messages: mpsc::Receiver<Bytes>,
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.first.is_empty() {
            match self.messages.poll_recv(context) {
                Poll::Ready(Some(message)) => self.first.push_back(message),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
        // `split_to` shares the message's memory; nothing is copied.
        let piece = self.first.front_mut().map(|message| message.split_to(message.len().min(PIECE_BYTES)));
        if self.first.front().is_some_and(Bytes::is_empty) {
            self.first.pop_front();
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, task::Waker};

    use super::*;

    const SOMEBODY: HttpPeer = HttpPeer::User(None);

    fn next(streamed: &mut EventStream) -> Option<Bytes> {
        match Pin::new(streamed).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
            _ => None,
        }
    }

    #[test]
    fn lagging_listeners_are_dropped() {
        let mut listeners = StreamListeners::default();
        let mut reads = listeners.add(SOMEBODY, Vec::new()).unwrap();
        let mut sleeps = listeners.add(SOMEBODY, Vec::new()).unwrap();
        assert!(next(&mut reads).unwrap().starts_with(b"retry: "));
        for step in 0..MAX_LAG + 8 {
            listeners.send(&message("delta", step as u64, &()));
            assert!(next(&mut reads).unwrap().starts_with(b"event: delta\nid: "));
        }
        assert_eq!(listeners.len(), 1);
        let mut waiting = 0;
        while next(&mut sleeps).is_some() {
            waiting += 1;
        }
        // Includes the `retry` line.
        assert_eq!(waiting, MAX_LAG + 1);
    }

    #[test]
    fn long_messages_are_split() {
        let mut listeners = StreamListeners::default();
        let long = Bytes::from(vec![b'x'; 3 * PIECE_BYTES + 1]);
        let mut streamed = listeners.add(SOMEBODY, vec![long]).unwrap();
        next(&mut streamed);
        let lengths: Vec<_> = std::iter::from_fn(|| next(&mut streamed)).map(|piece| piece.len()).collect();
        assert_eq!(lengths, [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 1]);
    }

    fn hosts() -> impl Iterator<Item = HttpPeer> {
        (0..=255).map(|last| HttpPeer::Address(IpAddr::from([192, 0, 2, last])))
    }

    #[test]
    fn listeners_are_bounded() {
        let mut listeners = StreamListeners::default();
        let mut all: Vec<_> = hosts().map(|host| listeners.add(host, Vec::new()).unwrap()).collect();
        assert_eq!(all.len(), MAX_STREAMS);
        assert_eq!(listeners.add(SOMEBODY, Vec::new()).err(), Some(StreamRejection::TooManyListeners));
        all.pop();
        assert!(listeners.add(SOMEBODY, Vec::new()).is_ok());
    }

    #[test]
    fn one_peer_cannot_use_all_streams() {
        let address = |text: &str| HttpPeer::Address(text.parse().unwrap());
        for (one, same, others) in [
            (SOMEBODY, SOMEBODY, [HttpPeer::User(Some(0)), address("::1")]),
            (HttpPeer::User(Some(0)), HttpPeer::User(Some(0)), [SOMEBODY, HttpPeer::User(Some(1))]),
            (address("192.0.2.1"), address("192.0.2.1"), [address("192.0.2.2"), SOMEBODY]),
            // One client may have a whole IPv6 network.
            (address("2001:db8::1"), address("2001:db8::2"), [address("2001:db8:0:1::1"), SOMEBODY]),
        ] {
            let mut listeners = StreamListeners::default();
            let mut all: Vec<_> =
                (0..MAX_STREAMS_PER_PEER).map(|_| listeners.add(one, Vec::new()).unwrap()).collect();
            assert_eq!(listeners.add(same, Vec::new()).err(), Some(StreamRejection::TooManyOfPeer), "{same}");
            let others: Vec<_> = others.into_iter().map(|other| listeners.add(other, Vec::new())).collect();
            assert!(others.iter().all(Result::is_ok));
            all.pop();
            assert!(listeners.add(same, Vec::new()).is_ok(), "{same}");
        }
    }
}
