//! A webhook: an HTTP/1.1 POST for each event, over TCP, TLS or a Unix socket.
//!
//! Written here, and no library: one request on a connection of its own, of whose answer the status
//! alone is read. TLS is OpenSSL's, as for NBD. What takes time (names, connecting, TLS, sending,
//! the answer) has one deadline for all, by timeouts of the socket, so that no thread is needed
//! that could be left behind. A name is looked up by the C library, which has a deadline of its
//! own.
//!
//! Never follows where a server points to, and never reads more than an answer's first bytes.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs as _},
    ops::RangeInclusive,
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use openssl::ssl::{HandshakeError, SslConnector, SslMethod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use settings::{WebServer, Webhook};

/// Bytes in which the status is looked for, behind interim answers.
const MOST_STATUS: usize = 16 << 10;

pub(super) struct Client {
    webhook: Webhook,
    /// With the authorities of this host.
    tls: Option<SslConnector>,
}

impl Client {
    /// Reads all that a request will need of files.
    pub(super) fn new(webhook: &Webhook) -> anyhow::Result<Self> {
        let mut tls = None;
        if let WebServer::Tcp { host, port, tls: is_wanted } = &webhook.server {
            if *is_wanted {
                let connector = SslConnector::builder(SslMethod::tls_client());
                tls = Some(connector.context("TLS cannot be had")?.build());
            }
            // The C library loads what it looks names up with. That a name is not known now may
            // change.
            let _ = (host.as_str(), *port).to_socket_addrs();
        }
        Ok(Self { webhook: webhook.clone(), tls })
    }

    /// # Errors
    /// Why it was not taken, by then.
    pub(super) fn post(&self, body: &[u8], deadline: Instant) -> Result<(), String> {
        let request = self.request(body);
        let status = match &self.webhook.server {
            WebServer::Unix(path) => {
                let stream = to_socket(path).map_err(|error| format!("it cannot be reached: {error}"))?;
                status(&mut Timed { stream, deadline }, &request)
            }
            WebServer::Tcp { host, port, .. } => {
                let stream = to_host(host, *port, deadline)?;
                let mut stream = Timed { stream, deadline };
                match &self.tls {
                    None => status(&mut stream, &request),
                    Some(tls) => {
                        let mut encrypted = tls.connect(host, stream).map_err(|error| tls_failure(&error))?;
                        status(&mut encrypted, &request)
                    }
                }
            }
        };
        match status.map_err(|error| why(&error))? {
            200..=299 => Ok(()),
            code @ 300..=399 => Err(format!("it answers with {code} (name the URL that it points to)")),
            code => Err(format!("it answers with {code}")),
        }
    }

    fn request(&self, body: &[u8]) -> Vec<u8> {
        let host = match &self.webhook.server {
            WebServer::Unix(_) => "localhost".to_owned(),
            WebServer::Tcp { host, port, .. } => {
                settings::Address::Tcp { host: host.clone(), port: *port }.to_string()
            }
        };
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: weir/{}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nAccept: */*\r\nConnection: close\r\n\r\n",
            self.webhook.path,
            env!("CARGO_PKG_VERSION"),
            body.len()
        );
        [head.as_bytes(), body].concat()
    }
}

/// A socket whose queue is full is not waited for.
fn to_socket(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn to_host(host: &str, port: u16, deadline: Instant) -> Result<TcpStream, String> {
    let known = (host, port).to_socket_addrs();
    let mut failure = "it has no address".to_owned();
    for address in known.map_err(|error| format!("its name cannot be looked up: {error}"))? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = format!("it cannot be reached: {}", why(&error)),
        }
    }
    Err(failure)
}

fn status(stream: &mut (impl Read + Write), request: &[u8]) -> io::Result<u16> {
    stream.write_all(request)?;
    stream.flush()?;
    let mut answer = Vec::new();
    while answer.len() < MOST_STATUS {
        let mut some = [0; 512];
        let count = stream.read(&mut some)?;
        answer.extend(&some[..count]);
        let last = without_interim(&answer);
        if count == 0 || last.contains(&b'\n') {
            let status = parsed(last).filter(|status| !INTERIM.contains(status));
            if count == 0 || status.is_some() || parsed(last).is_none() {
                return status.ok_or_else(|| io::Error::other("what it answers is not HTTP"));
            }
        }
    }
    Err(io::Error::other("what it answers is not HTTP"))
}

/// Nobody has asked for these, and anybody may send them: RFC 9110, section 15.2.
const INTERIM: RangeInclusive<u16> = 100..=199;

/// What follows interim answers that are whole.
fn without_interim(mut answer: &[u8]) -> &[u8] {
    while parsed(answer).is_some_and(|status| INTERIM.contains(&status)) {
        match answer.windows(4).position(|four| four == b"\r\n\r\n") {
            Some(end) => answer = &answer[end + 4..],
            None => break,
        }
    }
    answer
}

/// `HTTP/1.1 204 No Content`: RFC 9112, section 4.
fn parsed(answer: &[u8]) -> Option<u16> {
    let line = answer.split(|byte| *byte == b'\n').next()?;
    let rest = line.strip_prefix(b"HTTP/1.")?.get(1..)?.strip_prefix(b" ")?;
    let (code, behind) = rest.split_at_checked(3)?;
    let is_whole = behind.first().is_none_or(|byte| matches!(byte, b' ' | b'\r'));
    let code =
        std::str::from_utf8(code).ok().filter(|code| code.bytes().all(|byte| byte.is_ascii_digit()))?;
    code.parse().ok().filter(|_| is_whole)
}

fn tls_failure(error: &HandshakeError<Timed<TcpStream>>) -> String {
    match error {
        HandshakeError::SetupFailure(errors) => format!("TLS cannot be had: {errors}"),
        HandshakeError::Failure(middle) | HandshakeError::WouldBlock(middle) => {
            let verified = middle.ssl().verify_result();
            if verified.as_raw() != 0 {
                return format!("its certificate is not to be trusted: {verified}");
            }
            match middle.error().io_error() {
                Some(error) => why(error),
                None => format!("TLS: {}", middle.error()),
            }
        }
    }
}

fn why(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => late(),
        ErrorKind::UnexpectedEof => "it has closed the connection".to_owned(),
        _ => error.to_string(),
    }
}

fn late() -> String {
    format!("it has not answered within {} s", super::PATIENCE.as_secs())
}

/// A socket whose every call ends by then.
#[derive(Debug)]
struct Timed<S> {
    stream: S,
    deadline: Instant,
}

trait Socket {
    fn set_timeouts(&self, left: Duration) -> io::Result<()>;
}

macro_rules! socket {
    ($($kind:ty),+) => {
        $(impl Socket for $kind {
            fn set_timeouts(&self, left: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(left))?;
                self.set_write_timeout(Some(left))
            }
        })+
    };
}
socket!(TcpStream, UnixStream);

impl<S: Socket> Timed<S> {
    fn in_time(&self) -> io::Result<&S> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_timeouts(left)?;
        Ok(&self.stream)
    }
}

impl<S: Socket> Read for Timed<S>
where
    for<'a> &'a S: Read,
{
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.in_time()?;
        timed_out(stream.read(buffer))
    }
}

impl<S: Socket> Write for Timed<S>
where
    for<'a> &'a S: Write,
{
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stream = self.in_time()?;
        timed_out(stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The kernel says that it would block: then OpenSSL would have it tried again.
fn timed_out<T>(result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| match error.kind() {
        ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_and_nothing_else() {
        assert_eq!(parsed(b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n"), Some(204));
        assert_eq!(parsed(b"HTTP/1.0 500\r\n"), Some(500));
        for other in
            [&b""[..], b"SSH-2.0-OpenSSH", b"HTTP/1.1 2000 OK\r\n", b"HTTP/1.1 +04 x\r\n", b"HTTP/2 200\r\n"]
        {
            assert_eq!(parsed(other), None, "{other:?}");
        }
    }

    #[test]
    fn interim_answers_are_passed_over() {
        let status = |answer: &str| {
            let mut stream = io::Cursor::new(b"POST".to_vec());
            stream.get_mut().extend(answer.as_bytes());
            status(&mut stream, b"POST").ok()
        };
        let early = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n".repeat(20);
        assert_eq!(
            status(&format!("HTTP/1.1 100 Continue\r\n\r\n{early}HTTP/1.1 204 No Content\r\n")),
            Some(204)
        );
        for other in ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 100 Continue\r\nX: 1\r\n", "", "SSH\r\n"] {
            assert_eq!(status(other), None, "{other:?}");
        }
        assert_eq!(status(&early.repeat(100)), None, "without an end");
    }

    #[test]
    fn a_request_is_whole() {
        let webhook = |text: &str| match text.parse().unwrap() {
            settings::OnEvent::Webhook(webhook) => Client { webhook, tls: None },
            settings::OnEvent::Command(_) => panic!("a webhook"),
        };
        let request = String::from_utf8(webhook("http://[::1]:8080/a?b").request(b"{}")).unwrap();
        assert!(request.starts_with("POST /a?b HTTP/1.1\r\nHost: [::1]:8080\r\n"), "{request}");
        assert!(
            request.contains("\r\nContent-Length: 2\r\n") && request.ends_with("\r\n\r\n{}"),
            "{request}"
        );
    }
}
