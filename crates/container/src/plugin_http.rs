//! One HTTP/1.1 request and its response over a Unix socket, as far as Docker and Podman need it.
//!
//! A connection carries one request: the response has `Connection: close`. Idle connections
//! therefore occupy no threads; a client opens a new connection for each request.
//!
//! Never stores more of a request than [`MAX_HEAD_BYTES`] and [`MAX_BODY_BYTES`], and never waits
//! for one beyond its deadline, however slowly its bytes arrive.

use std::{
    io::{self, ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

/// Largest request head; Docker's have about 300 bytes.
pub(crate) const MAX_HEAD_BYTES: usize = 8 << 10;
/// Largest request body; a volume with every option has about 2000 bytes.
pub(crate) const MAX_BODY_BYTES: usize = 64 << 10;
/// Largest number of headers; Docker sends five.
const MAX_HEADERS: usize = 32;
/// Time within which the client has to read the response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Content type of the protocol's second version, which is JSON.
const CONTENT_TYPE: &str = "application/vnd.docker.plugins.v1.1+json";

/// A valid request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PluginRequest {
    pub(crate) path: String,
    pub(crate) body: Vec<u8>,
}

/// Response: a status and JSON.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PluginResponse {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Reason for a missing request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PluginRequestError {
    /// The client disconnected.
    Disconnected,
    /// Status and message of the response.
    Rejected(u16, &'static str),
}

/// Stream with a timeout for reads.
pub(crate) trait ReadTimeout: Read {
    /// Sets the timeout of later reads; not zero.
    fn set_timeout(&self, time: Duration) -> io::Result<()>;
}

impl ReadTimeout for UnixStream {
    fn set_timeout(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))
    }
}

/// Reads a request, which has to be complete before `deadline`.
pub(crate) fn read(
    stream: &mut impl ReadTimeout,
    deadline: Instant,
) -> Result<PluginRequest, PluginRequestError> {
    let mut bytes = Vec::new();
    loop {
        if let Some(head) = head(&bytes)? {
            // Pipelining is not supported: a response closes the connection.
            if bytes.len() - head.bytes > head.body_bytes {
                return Err(PluginRequestError::Rejected(
                    400,
                    "the request is longer than its Content-Length",
                ));
            }
            if bytes.len() - head.bytes == head.body_bytes {
                return Ok(PluginRequest { path: head.path, body: bytes.split_off(head.bytes) });
            }
        // Checked only while the head is incomplete; the body has its own bound.
        } else if bytes.len() >= MAX_HEAD_BYTES {
            return Err(PluginRequestError::Rejected(431, "the header of the request is too long"));
        }
        read_more(stream, &mut bytes, deadline)?;
    }
}

/// Waits for more bytes and appends a bounded number.
fn read_more(
    stream: &mut impl ReadTimeout,
    bytes: &mut Vec<u8>,
    deadline: Instant,
) -> Result<(), PluginRequestError> {
    const TOO_SLOW: PluginRequestError =
        PluginRequestError::Rejected(408, "the request did not arrive in time");
    let remaining = deadline.saturating_duration_since(Instant::now());
    // A zero timeout would mean none to the kernel.
    if remaining.is_zero() {
        return Err(TOO_SLOW);
    }
    let mut chunk = [0; 4096];
    let received = stream.set_timeout(remaining).and_then(|()| stream.read(&mut chunk));
    match received {
        Ok(0) => Err(PluginRequestError::Disconnected),
        Ok(count) => {
            bytes.extend_from_slice(&chunk[..count]);
            Ok(())
        }
        // The caller's loop checks the deadline again.
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Err(TOO_SLOW),
        Err(_) => Err(PluginRequestError::Disconnected),
    }
}

struct RequestHead {
    /// Length in bytes.
    bytes: usize,
    path: String,
    body_bytes: usize,
}

/// Parses the head of the request; `None` while it is incomplete.
fn head(bytes: &[u8]) -> Result<Option<RequestHead>, PluginRequestError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Partial) => return Ok(None),
        Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD_BYTES => length,
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            return Err(PluginRequestError::Rejected(431, "the header of the request is too long"));
        }
        Err(_) => return Err(PluginRequestError::Rejected(400, "the request is not HTTP")),
    };
    if request.method != Some("POST") {
        return Err(PluginRequestError::Rejected(405, "the plugin protocol uses POST only"));
    }
    let named = |name: &'static str| {
        let headers = request.headers.iter();
        headers.filter(move |header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value)
    };
    // Chunked bodies are not supported; neither Docker nor Podman sends them.
    if named("transfer-encoding").next().is_some() {
        return Err(PluginRequestError::Rejected(
            411,
            "the length of the request is unknown (send Content-Length)",
        ));
    }
    let mut lengths = named("content-length");
    let body_bytes = match (lengths.next(), lengths.next()) {
        (None, _) => 0,
        (Some(text), None) => length_of(text)?,
        // Two lengths are an attack or a bug (RFC 9112, section 6.3).
        (Some(_), Some(_)) => {
            return Err(PluginRequestError::Rejected(400, "the request has more than one Content-Length"));
        }
    };
    let path = request.path.unwrap_or_default().to_owned();
    Ok(Some(RequestHead { bytes: length, path, body_bytes }))
}

fn length_of(text: &[u8]) -> Result<usize, PluginRequestError> {
    // `parse` would accept a plus sign.
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return Err(PluginRequestError::Rejected(400, "Content-Length is not a number"));
    }
    let length = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    // A number that does not fit a usize is too long as well.
    let length = length.filter(|&length| length <= MAX_BODY_BYTES);
    length.ok_or(PluginRequestError::Rejected(413, "the request is too long"))
}

/// Sends the response. A client that disconnected does not receive it.
pub(crate) fn send(stream: &mut UnixStream, response: &PluginResponse) -> io::Result<()> {
    let PluginResponse { status, body } = response;
    let length = body.len();
    stream.set_write_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.write_all(
        format!(
            "HTTP/1.1 {status} {}\r\n\
             Content-Type: {CONTENT_TYPE}\r\n\
             Content-Length: {length}\r\n\
             Connection: close\r\n\
             \r\n\
             {body}",
            reason(*status)
        )
        .as_bytes(),
    )
}

/// Reason phrase (RFC 9110, section 15).
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        411 => "Length Required",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        _ => "Internal Server Error",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Stream of these pieces; then it ends, or fails with `then`.
    struct ScriptedStream {
        pieces: Vec<Vec<u8>>,
        then: Option<ErrorKind>,
    }

    impl Read for ScriptedStream {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.pieces.is_empty() {
                return self.then.map_or(Ok(0), |kind| Err(kind.into()));
            }
            let length = self.pieces[0].len().min(buffer.len());
            buffer[..length].copy_from_slice(&self.pieces[0][..length]);
            self.pieces[0].drain(..length);
            if self.pieces[0].is_empty() {
                self.pieces.remove(0);
            }
            Ok(length)
        }
    }

    impl ReadTimeout for ScriptedStream {
        fn set_timeout(&self, time: Duration) -> io::Result<()> {
            assert!(!time.is_zero());
            Ok(())
        }
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn read_pieces(pieces: &[&[u8]]) -> Result<PluginRequest, PluginRequestError> {
        let pieces = pieces.iter().map(|piece| piece.to_vec()).collect();
        read(&mut ScriptedStream { pieces, then: None }, later())
    }

    #[track_caller]
    fn refused(text: &[u8], expect: u16) {
        match read_pieces(&[text]) {
            Err(PluginRequestError::Rejected(status, _)) => assert_eq!(status, expect),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn requests_parse_in_any_pieces() {
        let text = b"POST /VolumeDriver.List HTTP/1.1\r\nHost: plugin\r\ncontent-length: 2\r\n\r\n{}";
        let expect = PluginRequest { path: "/VolumeDriver.List".to_owned(), body: b"{}".to_vec() };
        for cut in 1..text.len() {
            assert_eq!(read_pieces(&[&text[..cut], &text[cut..]]).as_ref(), Ok(&expect), "{cut}");
        }
        let request = read_pieces(&[b"POST /Plugin.Activate HTTP/1.1\r\n\r\n"]).unwrap();
        assert_eq!((request.path.as_str(), request.body.len()), ("/Plugin.Activate", 0));
    }

    #[test]
    fn invalid_requests_get_a_status() {
        refused(b"GET / HTTP/1.1\r\n\r\n", 405);
        refused(b"\x16\x03\x01\x02\x00\x01\x00", 400);
        refused(b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400);
        refused(b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400);
        refused(b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n", 400);
        refused(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}more", 400);
        refused(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411);
        refused(b"POST / HTTP/1.1\r\nContent-Length: 65537\r\n\r\n", 413);
        refused(b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 413);
        let header = format!("X: {}\r\n", "x".repeat(1000));
        refused(format!("POST / HTTP/1.1\r\n{}", header.repeat(9)).as_bytes(), 431);
        refused(format!("POST / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(33)).as_bytes(), 431);
    }

    #[test]
    fn the_longest_body_is_accepted() {
        let body = vec![b'x'; MAX_BODY_BYTES];
        let head = format!("POST / HTTP/1.1\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n");
        assert_eq!(read_pieces(&[head.as_bytes(), &body]).unwrap().body, body);
    }

    #[test]
    fn the_deadline_ends_slow_requests() {
        let half = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{".to_vec();
        let mut quiet = ScriptedStream { pieces: vec![half.clone()], then: Some(ErrorKind::WouldBlock) };
        assert!(matches!(read(&mut quiet, later()), Err(PluginRequestError::Rejected(408, _))));
        // One byte at a time, still incomplete at the deadline.
        let mut slow = ScriptedStream { pieces: vec![b"P".to_vec()], then: None };
        assert!(matches!(read(&mut slow, Instant::now()), Err(PluginRequestError::Rejected(408, _))));
        assert_eq!(read_pieces(&[&half]), Err(PluginRequestError::Disconnected));
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_much(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = read_pieces(&[&bytes]);
        }

        #[test]
        fn no_header_is_too_much(text in "POST / HTTP/1.[01]\r\n\
                                          ([A-Za-z-]{0,20}: ?[ -~]{0,20}\r\n\
                                          ){0,40}\r\n\
                                          .{0,8}") {
            let _ = read_pieces(&[text.as_bytes()]);
        }
    }
}
