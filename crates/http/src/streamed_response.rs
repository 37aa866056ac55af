//! A long response in pieces, sent while the rest is still being written, then shared.
//!
//! ```text
//!   writing thread ─► ResponseBuffer ─┬─► ResponsePieces ─► the first client, while it is written
//!                                     └─► Vec<Bytes> ─► ResponsePieces ─► later clients, from the beginning
//! ```
//!
//! A connection copies what it sends. With pieces it never copies the whole response.

use std::{
    collections::VecDeque,
    fmt, io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;

/// Size of a piece in bytes, without its last line: about the size of a socket buffer.
const PIECE_BYTES: usize = 64 << 10;
/// Reserve for the last line of a piece; most are shorter.
const LINE: usize = 1 << 10;

/// Creates an empty buffer and the body that reads it.
pub(super) fn response_channel() -> (ResponseBuffer, ResponsePieces) {
    let (reader, rest) = mpsc::unbounded_channel();
    (
        ResponseBuffer { text: String::new(), written: Vec::new(), reader },
        ResponsePieces { ready: VecDeque::new(), rest: Some(rest) },
    )
}

/// Buffer of a response, written line by line. Dropped before [`Self::finish`] it fails the
/// response.
pub(super) struct ResponseBuffer {
    text: String,
    written: Vec<Bytes>,
    /// Pieces for the reader; `None` marks the end.
    reader: mpsc::UnboundedSender<Option<Bytes>>,
}

impl ResponseBuffer {
    /// True at the beginning of a line.
    pub(super) fn is_at_line(&self) -> bool {
        self.text.as_bytes().last().is_none_or(|last| *last == b'\n')
    }

    /// Appends a separate piece.
    pub(super) fn add(&mut self, piece: impl Into<Bytes>) {
        let piece = piece.into();
        // The first client may have disconnected; later clients use the pieces.
        let _ = self.reader.send(Some(piece.clone()));
        self.written.push(piece);
    }

    /// Completes the response and returns its pieces.
    pub(super) fn finish(mut self) -> Vec<Bytes> {
        self.flush_piece();
        let _ = self.reader.send(None);
        self.written
    }

    fn flush_piece(&mut self) {
        if !self.text.is_empty() {
            // Allocated at full size: growing it would copy each piece.
            let next = String::with_capacity(PIECE_BYTES + LINE);
            let piece = std::mem::replace(&mut self.text, next);
            self.add(piece);
        }
    }
}

impl fmt::Write for ResponseBuffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.text.push_str(text);
        // Only at a line end: `TextFormatConverter` looks for the beginning of a line.
        if self.text.len() >= PIECE_BYTES && text.ends_with('\n') {
            self.flush_piece();
        }
        Ok(())
    }
}

/// Body of a response to one client.
pub(super) struct ResponsePieces {
    ready: VecDeque<Bytes>,
    /// Receiver of pieces that are not written yet.
    rest: Option<mpsc::UnboundedReceiver<Option<Bytes>>>,
}

impl From<Vec<Bytes>> for ResponsePieces {
    fn from(written: Vec<Bytes>) -> Self {
        Self { ready: written.into(), rest: None }
    }
}

impl Body for ResponsePieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Some(piece) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        // A shared response is complete.
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        let piece = match ready!(rest.poll_recv(context)) {
            Some(piece) => piece.map(|piece| Ok(Frame::data(piece))),
            // An error aborts the connection, so that the client notices the truncation.
            None => Some(Err(io::ErrorKind::UnexpectedEof.into())),
        };
        Poll::Ready(piece)
    }

    fn size_hint(&self) -> SizeHint {
        match self.rest {
            // Length unknown while it is written: sent with chunked encoding.
            Some(_) => SizeHint::default(),
            None => SizeHint::with_exact(self.ready.iter().map(|piece| piece.len() as u64).sum()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, task::Waker};

    use super::*;

    fn next(pieces: &mut ResponsePieces) -> Poll<Option<io::Result<Bytes>>> {
        let frame = Pin::new(pieces).poll_frame(&mut Context::from_waker(Waker::noop()));
        frame.map(|frame| frame.map(|frame| frame.map(|frame| frame.into_data().unwrap())))
    }

    fn collect_bytes(mut pieces: ResponsePieces) -> Vec<u8> {
        let mut all = Vec::new();
        while let Poll::Ready(Some(piece)) = next(&mut pieces) {
            all.extend(piece.unwrap());
        }
        all
    }

    #[test]
    fn pieces_are_sent_while_written_and_shared_later() {
        let (mut writer, mut pieces) = response_channel();
        let line = "x".repeat(1000) + "\n";
        let mut expect = String::new();
        while expect.len() < PIECE_BYTES {
            assert!(next(&mut pieces).is_pending() && writer.is_at_line());
            for part in [&line[..999], &line[999..]] {
                writer.write_str(part).unwrap();
                expect.push_str(part);
            }
        }
        // Pieces end at a line end, so that the writer can recognize the beginning of a line.
        assert!(matches!(next(&mut pieces), Poll::Ready(Some(Ok(piece))) if piece == expect));
        assert!(next(&mut pieces).is_pending() && writer.is_at_line());
        writer.write_str("the last").unwrap();
        assert!(!writer.is_at_line());
        let written = writer.finish();
        assert_eq!(collect_bytes(pieces), b"the last");
        let shared = ResponsePieces::from(written);
        assert_eq!(shared.size_hint().exact(), Some(expect.len() as u64 + 8));
        assert_eq!(collect_bytes(shared), (expect + "the last").into_bytes());
    }

    #[test]
    fn a_truncated_response_is_an_error() {
        let (mut writer, mut pieces) = response_channel();
        writer.add("half");
        drop(writer);
        assert!(matches!(next(&mut pieces), Poll::Ready(Some(Ok(_)))));
        assert!(matches!(next(&mut pieces), Poll::Ready(Some(Err(_)))));
    }
}
