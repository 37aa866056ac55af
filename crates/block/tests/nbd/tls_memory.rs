//! TLS without sockets: OpenSSL's client on one side, [`TlsStream`] on the other, bytes carried by hand.
//!
//! Here the versions can be chosen, which the clients' command lines do not allow, and the queues can be starved.

use crate::certificates::Authority;
use crate::server::Scratch;
use block::export::nbd::{TlsRead, TlsServer, TlsStream};
use openssl::ssl::{
    ErrorCode, Ssl, SslContext, SslContextBuilder, SslFiletype, SslMethod, SslStream, SslVersion,
};
use std::io::{self, Read, Write};
use std::path::Path;

/// The client's socket: what it may read, and what it wrote.
#[derive(Default, Debug)]
struct Pipe {
    to_client: Vec<u8>,
    to_server: Vec<u8>,
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(self.to_client.len());
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        into[..count].copy_from_slice(&self.to_client[..count]);
        self.to_client.drain(..count);
        Ok(count)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to_server.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Pair {
    client: SslStream<Pipe>,
    server: TlsStream,
}

impl Pair {
    fn new(server: &TlsServer, client: SslContextBuilder) -> Self {
        let client = SslStream::new(Ssl::new(&client.build()).unwrap(), Pipe::default()).unwrap();
        Self { client, server: server.accept().unwrap() }
    }

    /// Carries what waits in both directions, a few bytes at a time; true if there was any.
    fn carry(&mut self) -> bool {
        let pipe = self.client.get_mut();
        let up = pipe.to_server.len().min(1000);
        let fed = self.server.feed(&pipe.to_server[..up]);
        pipe.to_server.drain(..fed);
        let down = self.server.outgoing().len().min(700);
        pipe.to_client.extend_from_slice(&self.server.outgoing()[..down]);
        self.server.sent(down);
        fed + down > 0
    }

    /// Both sides' handshakes; an error is the side that failed first.
    fn handshake(&mut self) -> Result<(), String> {
        let (mut client_done, mut server_done) = (false, false);
        loop {
            match self.client.connect() {
                Ok(()) => client_done = true,
                Err(error) if error.code() == ErrorCode::WANT_READ => {}
                Err(error) => return Err(format!("client: {error}")),
            }
            if !server_done {
                server_done = self.server.handshake().map_err(|error| format!("server: {error}"))?;
            }
            if !self.carry() && client_done && server_done {
                return Ok(());
            }
        }
    }

    /// Sends through both directions and compares.
    fn exchange(&mut self, length: usize) {
        let sent: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
        let (mut given, mut back, mut received) = (0, 0, Vec::new());
        let mut returned = Vec::new();
        let mut buffer = [0; 5000];
        while returned.len() < length {
            if given < length && self.client.get_ref().to_server.len() < 100_000 {
                given += self.client.ssl_write(&sent[given..length.min(given + 9000)]).unwrap();
            }
            while let TlsRead::Bytes(count) = self.server.read(&mut buffer).unwrap() {
                received.extend_from_slice(&buffer[..count]);
            }
            back += self.server.write(&received[back..]).unwrap();
            self.carry();
            match self.client.ssl_read(&mut buffer) {
                Ok(count) => returned.extend_from_slice(&buffer[..count]),
                Err(error) => assert_eq!(error.code(), ErrorCode::WANT_READ),
            }
        }
        assert!(returned == sent);
    }
}

fn client(version: SslVersion) -> SslContextBuilder {
    let mut builder = SslContext::builder(SslMethod::tls_client()).unwrap();
    builder.set_min_proto_version(Some(version)).unwrap();
    builder.set_max_proto_version(Some(version)).unwrap();
    builder
}

fn with_key(version: SslVersion, user: &'static [u8], key: &'static [u8]) -> SslContextBuilder {
    let mut builder = client(version);
    builder.set_cipher_list("PSK").unwrap();
    builder.set_psk_client_callback(move |_, _, identity, out| {
        identity[..user.len()].copy_from_slice(user);
        identity[user.len()] = 0;
        out[..key.len()].copy_from_slice(key);
        Ok(key.len())
    });
    builder
}

fn psk_server() -> TlsServer {
    let scratch = Scratch::new();
    let file = scratch.0.join("keys.psk");
    std::fs::write(&file, "alice:6b6579\nbob:0102030405060708").unwrap();
    TlsServer::psk(&file).unwrap()
}

const VERSIONS: [SslVersion; 2] = [SslVersion::TLS1_2, SslVersion::TLS1_3];

#[test]
fn a_pre_shared_key_lets_in_with_tls_1_2_and_1_3() {
    for version in VERSIONS {
        let mut pair = Pair::new(&psk_server(), with_key(version, b"alice", b"key"));
        pair.handshake().unwrap();
        pair.exchange(300_000);
    }
}

#[test]
fn an_unknown_user_or_a_wrong_key_does_not() {
    for version in VERSIONS {
        for (user, key) in [(&b"mallory"[..], &b"key"[..]), (b"alice", b"kez")] {
            assert!(Pair::new(&psk_server(), with_key(version, user, key)).handshake().is_err());
        }
        assert!(Pair::new(&psk_server(), client(version)).handshake().is_err(), "no key at all");
    }
}

#[test]
fn older_versions_are_refused() {
    let mut old = with_key(SslVersion::TLS1_1, b"alice", b"key");
    old.set_security_level(0);
    assert!(Pair::new(&psk_server(), old).handshake().is_err());
}

/// A client that trusts the authority in this directory, and shows its certificate if there is one.
fn with_certificates(version: SslVersion, directory: &Path) -> SslContextBuilder {
    let mut builder = client(version);
    builder.set_ca_file(directory.join("ca-cert.pem")).unwrap();
    builder.set_verify(openssl::ssl::SslVerifyMode::PEER);
    let certificate = directory.join("client-cert.pem");
    if certificate.exists() {
        builder.set_certificate_file(certificate, SslFiletype::PEM).unwrap();
        builder.set_private_key_file(directory.join("client-key.pem"), SslFiletype::PEM).unwrap();
    }
    builder
}

#[test]
fn certificates_are_verified_where_that_is_configured() {
    let (authority, servers, clients, strangers) =
        (Authority::new(), Scratch::new(), Scratch::new(), Scratch::new());
    authority.issue(&servers.0, "server");
    authority.issue(&clients.0, "client");
    Authority::new().issue(&strangers.0, "client");
    std::fs::copy(clients.0.join("ca-cert.pem"), strangers.0.join("ca-cert.pem")).unwrap();
    for version in VERSIONS {
        let verifying = TlsServer::x509(&servers.0, true).unwrap();
        let mut known = Pair::new(&verifying, with_certificates(version, &clients.0));
        known.handshake().unwrap();
        known.exchange(50_000);
        assert!(Pair::new(&verifying, with_certificates(version, &strangers.0)).handshake().is_err());
        assert!(Pair::new(&verifying, with_certificates(version, &servers.0)).handshake().is_err());

        let trusting = TlsServer::x509(&servers.0, false).unwrap();
        Pair::new(&trusting, with_certificates(version, &servers.0)).handshake().unwrap();
    }
}

#[test]
fn broken_credentials_are_found_before_a_client_comes() {
    let scratch = Scratch::new();
    let error = |verify| TlsServer::x509(&scratch.0, verify).unwrap_err().to_string();
    Authority::new().issue(&scratch.0, "server");
    TlsServer::x509(&scratch.0, true).unwrap();

    let other = Scratch::new();
    Authority::new().issue(&other.0, "server");
    std::fs::copy(other.0.join("server-key.pem"), scratch.0.join("server-key.pem")).unwrap();
    assert!(error(true).contains("not the key of"), "{}", error(true));

    let key =
        openssl::pkey::PKey::private_key_from_pem(&std::fs::read(other.0.join("server-key.pem")).unwrap());
    let cipher = openssl::symm::Cipher::aes_256_cbc();
    let locked = key.unwrap().private_key_to_pem_pkcs8_passphrase(cipher, b"secret").unwrap();
    std::fs::write(scratch.0.join("server-key.pem"), locked).unwrap();
    assert!(error(true).contains("unencrypted"), "{}", error(true));

    std::fs::copy(other.0.join("server-cert.pem"), scratch.0.join("server-cert.pem")).unwrap();
    std::fs::copy(other.0.join("server-key.pem"), scratch.0.join("server-key.pem")).unwrap();
    std::fs::write(scratch.0.join("ca-crl.pem"), "rubbish").unwrap();
    assert!(error(true).contains("revocation list"), "{}", error(true));
    std::fs::remove_file(scratch.0.join("ca-cert.pem")).unwrap();
    assert!(error(true).contains("ca-cert.pem"), "{}", error(true));
    TlsServer::x509(&scratch.0, false).unwrap();
    std::fs::write(scratch.0.join("server-cert.pem"), "rubbish").unwrap();
    assert!(error(false).contains("no certificate"), "{}", error(false));
}

#[test]
fn rubbish_is_refused() {
    let mut server = psk_server().accept().unwrap();
    server.feed(b"IHAVEOPT: something that is no client hello at all");
    assert!(server.handshake().is_err());
}

#[test]
fn a_refused_client_is_told_with_an_alert() {
    let mut pair = Pair::new(&psk_server(), client(SslVersion::TLS1_3));
    let error = pair.handshake().unwrap_err();
    assert!(error.starts_with("server:"), "{error}");
    assert!(!pair.server.outgoing().is_empty());
}

#[test]
fn both_queues_are_bounded() {
    let mut pair = Pair::new(&psk_server(), with_key(SslVersion::TLS1_3, b"alice", b"key"));
    pair.handshake().unwrap();
    // A peer that never reads: writing stops.
    let plain = vec![7; 1 << 20];
    let mut written = 0;
    loop {
        match pair.server.write(&plain).unwrap() {
            0 => break,
            count => written += count,
        }
    }
    assert!(written < 100 << 10 && pair.server.outgoing().len() < 100 << 10);
    // A peer that only sends: feeding stops.
    let mut fed = 0;
    loop {
        match pair.server.feed(&plain) {
            0 => break,
            count => fed += count,
        }
    }
    assert!(fed < 100 << 10);
}

#[test]
fn a_farewell_is_told_from_a_cut() {
    let mut pair = Pair::new(&psk_server(), with_key(SslVersion::TLS1_3, b"alice", b"key"));
    pair.handshake().unwrap();
    assert_eq!(pair.server.read(&mut [0; 16]).unwrap(), TlsRead::NeedInput);
    pair.client.shutdown().unwrap();
    while pair.carry() {}
    assert_eq!(pair.server.read(&mut [0; 16]).unwrap(), TlsRead::Closed);
    pair.server.close();
    assert!(!pair.server.outgoing().is_empty());
}
