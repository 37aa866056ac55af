//! A long answer in pieces: sent while the rest is still being written, then kept for others.
//!
//! ```text
//!   a thread that writes ─► Sheet ─┬─► Pieces ─► who asked first, as it is written
//!                                  └─► Vec<Bytes> ─► Pieces ─► who asks next, from its beginning
//! ```
//!
//! A connection copies what it sends: by pieces it never holds a second copy of the whole.

use std::{
    collections::VecDeque,
    fmt, io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;

/// Bytes of a piece, and a line more: what a socket takes at a time.
const PIECE: usize = 64 << 10;
/// Most lines are shorter.
const LINE: usize = 1 << 10;

/// An empty sheet, and what whoever asked for it reads meanwhile.
pub(super) fn blank() -> (Sheet, Pieces) {
    let (reader, rest) = mpsc::unbounded_channel();
    (
        Sheet { text: String::new(), written: Vec::new(), reader },
        Pieces { ready: VecDeque::new(), rest: Some(rest) },
    )
}

/// Where an answer is written, line by line. Dropped before its [`Self::end`], it is a broken one.
pub(super) struct Sheet {
    text: String,
    written: Vec<Bytes>,
    /// The last is none.
    reader: mpsc::UnboundedSender<Option<Bytes>>,
}

impl Sheet {
    /// Whether a line begins here.
    pub(super) fn is_at_line(&self) -> bool {
        self.text.as_bytes().last().is_none_or(|last| *last == b'\n')
    }

    /// A piece of its own.
    pub(super) fn add(&mut self, piece: impl Into<Bytes>) {
        let piece = piece.into();
        // Whoever asked may have gone, and others may come.
        let _ = self.reader.send(Some(piece.clone()));
        self.written.push(piece);
    }

    /// All of it.
    pub(super) fn end(mut self) -> Vec<Bytes> {
        self.hand_over();
        let _ = self.reader.send(None);
        self.written
    }

    fn hand_over(&mut self) {
        if !self.text.is_empty() {
            let next = String::with_capacity(PIECE + LINE);
            let piece = std::mem::replace(&mut self.text, next);
            self.add(piece);
        }
    }
}

impl fmt::Write for Sheet {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.text.push_str(text);
        if self.text.len() >= PIECE && text.ends_with('\n') {
            self.hand_over();
        }
        Ok(())
    }
}

/// What one who asked is sent.
pub(super) struct Pieces {
    ready: VecDeque<Bytes>,
    /// What is not written yet.
    rest: Option<mpsc::UnboundedReceiver<Option<Bytes>>>,
}

impl From<Vec<Bytes>> for Pieces {
    fn from(written: Vec<Bytes>) -> Self {
        Self { ready: written.into(), rest: None }
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Some(piece) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        let piece = match ready!(rest.poll_recv(context)) {
            Some(piece) => piece.map(|piece| Ok(Frame::data(piece))),
            // The connection breaks: so a client sees that it has half of it.
            None => Some(Err(io::ErrorKind::UnexpectedEof.into())),
        };
        Poll::Ready(piece)
    }

    fn size_hint(&self) -> SizeHint {
        match self.rest {
            Some(_) => SizeHint::default(),
            None => SizeHint::with_exact(self.ready.iter().map(|piece| piece.len() as u64).sum()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, task::Waker};

    use super::*;

    fn next(pieces: &mut Pieces) -> Poll<Option<io::Result<Bytes>>> {
        let frame = Pin::new(pieces).poll_frame(&mut Context::from_waker(Waker::noop()));
        frame.map(|frame| frame.map(|frame| frame.map(|frame| frame.into_data().unwrap())))
    }

    fn whole(mut pieces: Pieces) -> Vec<u8> {
        let mut all = Vec::new();
        while let Poll::Ready(Some(piece)) = next(&mut pieces) {
            all.extend(piece.unwrap());
        }
        all
    }

    #[test]
    fn it_is_read_while_it_is_written_and_again_as_a_whole() {
        let (mut sheet, mut pieces) = blank();
        let line = "x".repeat(1000) + "\n";
        let mut expect = String::new();
        while expect.len() < PIECE {
            assert!(next(&mut pieces).is_pending() && sheet.is_at_line());
            for part in [&line[..999], &line[999..]] {
                sheet.write_str(part).unwrap();
                expect.push_str(part);
            }
        }
        // At the end of a line, so that one can tell where one begins.
        assert!(matches!(next(&mut pieces), Poll::Ready(Some(Ok(piece))) if piece == expect));
        assert!(next(&mut pieces).is_pending() && sheet.is_at_line());
        sheet.write_str("the last").unwrap();
        assert!(!sheet.is_at_line());
        let written = sheet.end();
        assert_eq!(whole(pieces), b"the last");
        let again = Pieces::from(written);
        assert_eq!(again.size_hint().exact(), Some(expect.len() as u64 + 8));
        assert_eq!(whole(again), (expect + "the last").into_bytes());
    }

    #[test]
    fn half_of_it_is_an_error() {
        let (mut sheet, mut pieces) = blank();
        sheet.add("half");
        drop(sheet);
        assert!(matches!(next(&mut pieces), Poll::Ready(Some(Ok(_)))));
        assert!(matches!(next(&mut pieces), Poll::Ready(Some(Err(_)))));
    }
}
