//! One HTTP/1.1 connection to a member of etcd, over TCP or TLS.
//!
//! TCP keep-alive detects a lost peer within seconds: a watch may be idle for hours.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use openssl::{
    error::ErrorStack,
    ssl::{self, SslConnector, SslConnectorBuilder, SslMethod, SslVerifyMode},
    x509::{GeneralNameRef, X509Ref, X509StoreContextRef},
};
use reactor::sanitize::sanitize;
use rustix::net::sockopt;
use serde_json::Value;
use settings::EtcdEndpoint;
use tokio::{io, net::TcpStream, task::AbortHandle};
use tokio_openssl::SslStream;

use super::EtcdError;

/// Maximum length of a response in bytes: enough for 10,000 hosts with ten groups each.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// OpenSSL's codes for certificates that are not yet valid, expired, or issued to another name
/// (x509_vfy.h).
const X509_V_ERR_CERT_NOT_YET_VALID: i32 = 9;
const X509_V_ERR_CERT_HAS_EXPIRED: i32 = 10;
const X509_V_ERR_HOSTNAME_MISMATCH: i32 = 62;
const X509_V_ERR_IP_ADDRESS_MISMATCH: i32 = 64;
/// Maximum number of a certificate's names that a message lists.
const MAX_NAMES: usize = 8;
/// Part of the reply of Go's servers to plain HTTP on a TLS port.
const HTTPS_PORT_REPLY: &[u8] = b"HTTP request to an HTTPS server";
/// Part of the refusal of etcd's gateway if the client certificate has a common name.
const COMMON_NAME_REFUSAL: &[u8] = b"CommonName of client";
/// Idle time before the first keep-alive probe.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// TLS configuration with the certificates that the files had when it was created. Later changes of
/// the files need a new one.
#[derive(Clone)]
pub(super) struct EtcdTls(pub(super) SslConnector);

impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EtcdTls")
    }
}

impl EtcdTls {
    pub(super) fn new(certificates: Option<&Path>) -> anyhow::Result<Self> {
        let mut builder = SslConnector::builder(SslMethod::tls_client()).context("TLS")?;
        if let Some(directory) = certificates {
            Self::add_certificates(&mut builder, directory).context("certificates")?;
        }
        Ok(Self(builder.build()))
    }

    fn add_certificates(builder: &mut SslConnectorBuilder, directory: &Path) -> anyhow::Result<()> {
        let metadata = fs::metadata(directory);
        if let Err(error) = &metadata
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            return metadata.map(drop).with_context(|| directory.display().to_string());
        }
        ensure!(
            metadata.is_ok_and(|found| found.is_dir()),
            "{}: is not a directory (set `certificates` in [cluster] to the directory that contains \
             ca-cert.pem, the certificate of etcd's authority)",
            directory.display()
        );
        let purpose = "the certificate of etcd's authority: copy it to this directory, or correct `certificates` \
             in [cluster]";
        for authority in tls::certificates(&directory.join("ca-cert.pem"), purpose)? {
            builder.cert_store_mut().add_cert(authority)?;
        }
        let (own_certificate, own_key) =
            (directory.join("client-cert.pem"), directory.join("client-key.pem"));
        if !own_certificate.exists() && !own_key.exists() {
            return Ok(());
        }
        Ok(tls::set_identity(
            builder,
            &own_certificate,
            &own_key,
            "the certificate that belongs to client-key.pem",
        )?)
    }
}

/// Describes why the certificate of member `host` is not accepted, and the remedy.
fn certificate_fault(host: &str, chain: &X509StoreContextRef) -> String {
    let (error, certificate) = (chain.error(), chain.current_cert());
    let subject = match chain.error_depth() {
        0 => "etcd's certificate",
        _ => "the certificate of etcd's authority",
    };
    match (error.as_raw(), certificate) {
        (X509_V_ERR_CERT_HAS_EXPIRED, Some(certificate)) => {
            let end = certificate.not_after();
            format!("{subject} has expired, at {end} (renew it, or set this host's clock)")
        }
        (X509_V_ERR_CERT_NOT_YET_VALID, Some(certificate)) => {
            let begin = certificate.not_before();
            format!("{subject} is not valid before {begin} (set this host's clock, or renew it)")
        }
        (X509_V_ERR_HOSTNAME_MISMATCH | X509_V_ERR_IP_ADDRESS_MISMATCH, certificate) => {
            let names = certificate.map(names_of).unwrap_or_default();
            format!(
                "the name {host:?} is expected, but etcd's certificate is for {names} (write one of \
                 these names in `etcd` of [cluster], or issue a certificate for {host})"
            )
        }
        _ => {
            let why = error.error_string();
            format!("{subject} is not trusted: {why} (correct `certificates` in [cluster], or etcd's)")
        }
    }
}

/// The first [`MAX_NAMES`] names of a certificate, for a message.
fn names_of(certificate: &X509Ref) -> String {
    let name = |name: &GeneralNameRef| {
        let address = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => Some(IpAddr::from([a, b, c, d])),
            _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        };
        let dns = name.dnsname().map(|name| format!("{name:?}"));
        dns.or_else(|| Some(address(name.ipaddress()?)?.to_string()))
    };
    let all: Vec<_> =
        certificate.subject_alt_names().iter().flatten().filter_map(name).take(MAX_NAMES).collect();
    if all.is_empty() { "no name".to_owned() } else { all.join(", ") }
}

/// Error of a handshake that failed for another reason than the member's certificate.
fn handshake_error(endpoint: &EtcdEndpoint, error: &ssl::Error) -> EtcdError {
    let has_reason = |reason| {
        let errors = error.ssl_error().map_or(&[][..], ErrorStack::errors);
        errors.iter().any(|error| error.reason() == Some(reason))
    };
    match (error.io_error(), error.ssl_error()) {
        (Some(why), _) => EtcdError::Unreachable(anyhow!("TLS: {why}")),
        _ if has_reason("wrong version number") => EtcdError::Refused(format!(
            "etcd {endpoint}: the server does not use TLS \
             (write http:// in etcd of [cluster], or give the member a certificate)"
        )),
        (None, Some(_)) if !has_reason("unexpected eof while reading") => EtcdError::Refused(format!(
            "etcd {endpoint}: TLS: {error} (correct `certificates` in [cluster], or etcd's)"
        )),
        _ => EtcdError::Unreachable(anyhow!(
            "TLS: the server closed the connection (the address of a member without TLS begins with http://)"
        )),
    }
}

trait EtcdStream: io::AsyncRead + io::AsyncWrite + Send + Unpin {}
impl<S: io::AsyncRead + io::AsyncWrite + Send + Unpin> EtcdStream for S {}

#[derive(Debug)]
pub(super) struct EtcdConnection {
    endpoint: EtcdEndpoint,
    sender: http1::SendRequest<Full<Bytes>>,
    driver: AbortHandle,
    has_answered: bool,
}

impl Drop for EtcdConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl EtcdConnection {
    /// Connects to the first address that accepts.
    pub(super) async fn open(
        endpoint: EtcdEndpoint,
        addresses: &[SocketAddr],
        tls: Option<&EtcdTls>,
        timeout: Duration,
    ) -> Result<Self, EtcdError> {
        let mut last_error = anyhow!("the host name has no address");
        for address in addresses {
            let opened = tokio::time::timeout(timeout, Self::open_at(&endpoint, *address, tls)).await;
            match opened {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(EtcdError::Unreachable(error))) => last_error = error,
                // Only an unreachable address is followed by the next one: any other error comes
                // from the member itself, which every address reaches.
                Ok(Err(refused)) => return Err(refused),
                Err(_) => last_error = anyhow!("no answer in {} s", timeout.as_secs()),
            }
        }
        Err(EtcdError::Unreachable(last_error.context(format!("etcd {endpoint}"))))
    }

    async fn open_at(
        endpoint: &EtcdEndpoint,
        address: SocketAddr,
        tls: Option<&EtcdTls>,
    ) -> Result<Self, EtcdError> {
        let stream = TcpStream::connect(address).await.map_err(EtcdError::unreachable)?;
        // Best effort: without keep-alive a lost peer is found later, by a timeout.
        let _ = stream.set_nodelay(true);
        let _ = sockopt::set_socket_keepalive(&stream, true);
        let _ = sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE);
        let _ = sockopt::set_tcp_keepintvl(&stream, KEEP_ALIVE / 2);
        let _ = sockopt::set_tcp_keepcnt(&stream, 3);
        let stream: Box<dyn EtcdStream> = match tls.filter(|_| endpoint.tls) {
            None => Box::new(stream),
            Some(EtcdTls(connector)) => {
                let session = connector.configure().and_then(|tls| tls.into_ssl(&endpoint.host));
                let mut session = session.map_err(EtcdError::unreachable)?;
                let found = Arc::new(OnceLock::new());
                session.set_verify_callback(SslVerifyMode::PEER, {
                    let (found, host) = (Arc::clone(&found), endpoint.host.clone());
                    move |is_good, chain| {
                        if !is_good {
                            // The first fault is kept; OpenSSL stops the verification there.
                            let _ = found.set(certificate_fault(&host, chain));
                        }
                        is_good
                    }
                });
                let mut stream = SslStream::new(session, stream).map_err(EtcdError::unreachable)?;
                if let Err(error) = Pin::new(&mut stream).connect().await {
                    return Err(match found.get() {
                        // Refused, not unreachable: a retry cannot help.
                        Some(fault) => EtcdError::Refused(format!("etcd {endpoint}: TLS: {fault}")),
                        None => handshake_error(endpoint, &error),
                    });
                }
                Box::new(stream)
            }
        };
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(EtcdError::unreachable)?;
        // The task ends when the connection closes.
        let driver = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Ok(Self { endpoint: endpoint.clone(), sender, driver, has_answered: false })
    }

    /// Sends a request and returns the head of the response.
    pub(super) async fn send_request(
        &mut self,
        path: &str,
        body: Vec<u8>,
        token: Option<&str>,
    ) -> Result<Response<Incoming>, EtcdError> {
        let host = match self.endpoint.host.contains(':') {
            true => format!("[{}]:{}", self.endpoint.host, self.endpoint.port),
            false => format!("{}:{}", self.endpoint.host, self.endpoint.port),
        };
        let mut request = Request::post(path).header(header::HOST, host);
        request = request.header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let request = request.body(Full::new(Bytes::from(body))).map_err(EtcdError::unreachable)?;
        let sent = match self.sender.ready().await {
            Ok(()) => self.sender.send_request(request).await,
            Err(error) => Err(error),
        };
        self.has_answered |= sent.is_ok();
        sent.map_err(|error| {
            let (endpoint, error) = (&self.endpoint, anyhow!(error));
            EtcdError::Unreachable(match (self.has_answered, endpoint.tls) {
                (true, _) => anyhow!("etcd {endpoint}: {error:#}"),
                (false, false) => {
                    anyhow!(
                        "etcd {endpoint}: {error:#} (the address of a member with TLS begins with https://)"
                    )
                }
                // With TLS 1.3 a server rejects the client certificate after the handshake.
                (false, true) => anyhow!(
                    "etcd {endpoint}: the server closed the connection after the handshake (with \
                     --client-cert-auth it requires client-cert.pem and client-key.pem, signed by \
                     its authority, in certificates of [cluster]; `weir reload` reads renewed ones)"
                ),
            })
        })
    }

    /// Sends a request and returns the whole response as JSON. Fails for a response that is not
    /// JSON: it does not come from etcd.
    pub(super) async fn request(
        &mut self,
        path: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<(StatusCode, Value), EtcdError> {
        let response = self.send_request(path, body.to_string().into_bytes(), token).await?;
        let status = response.status();
        let reply = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
        let reply = reply.map_err(|error| {
            let endpoint = &self.endpoint;
            EtcdError::Unreachable(match error.is::<LengthLimitError>() {
                true => anyhow!(
                    "etcd {endpoint}: its response is longer than {} MiB (other programs store data \
                     under /weir/v1/: `etcdctl get --prefix --keys-only /weir/v1/` lists it)",
                    MAX_RESPONSE_BYTES >> 20
                ),
                false => anyhow!("etcd {endpoint}: {error}"),
            })
        })?;
        let reply = reply.to_bytes();
        // Not JSON: a heuristic by known texts names the likely mistake.
        let contains = |phrase: &[u8]| reply.windows(phrase.len()).any(|bytes| bytes == phrase);
        let not_etcd = |_| {
            let why = if contains(HTTPS_PORT_REPLY) {
                "the server uses TLS (write https:// in etcd of [cluster])".to_owned()
            } else if contains(COMMON_NAME_REFUSAL) {
                "its gateway rejects client certificates with a common name (CN) if etcd has users (create \
                 client-cert.pem without a CN; user and password-file identify the client)"
                    .to_owned()
            } else {
                let excerpt: String = String::from_utf8_lossy(&reply).trim().chars().take(80).collect();
                format!(
                    "the server is not etcd's gateway, version 3.4 or newer: {status}, {:?} (correct etcd \
                     of [cluster])",
                    sanitize(&excerpt)
                )
            };
            EtcdError::Refused(format!("etcd {}: {why}", self.endpoint))
        };
        serde_json::from_slice(&reply).map(|reply| (status, reply)).map_err(not_etcd)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read as _, Write as _},
        net::TcpListener,
        thread,
        time::{SystemTime, UNIX_EPOCH},
    };

    use openssl::{
        asn1::Asn1Time,
        hash::MessageDigest,
        pkey::{PKey, Private},
        rsa::Rsa,
        ssl::SslAcceptor,
        x509::{X509, X509Name, extension::SubjectAlternativeName},
    };

    use super::*;

    const DAY_S: i64 = 86_400;
    const LOCALHOST: &str = "127.0.0.1";
    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Certificate for `address`, valid from `from` to `until`, in days from now.
    fn certificate(address: &str, from: i64, until: i64) -> (X509, PKey<Private>) {
        let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
        let day = |days: i64| Asn1Time::from_unix(now + days * DAY_S).unwrap();
        let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
        let mut name = X509Name::builder().unwrap();
        name.append_entry_by_text("CN", "other").unwrap();
        let name = name.build();
        let mut builder = X509::builder().unwrap();
        builder.set_version(2).unwrap();
        builder.set_subject_name(&name).unwrap();
        builder.set_issuer_name(&name).unwrap();
        builder.set_pubkey(&key).unwrap();
        builder.set_not_before(&day(from)).unwrap();
        builder.set_not_after(&day(until)).unwrap();
        let names = SubjectAlternativeName::new()
            .dns("etcd1.example")
            .ip(address)
            .build(&builder.x509v3_context(None, None))
            .unwrap();
        builder.append_extension(names).unwrap();
        builder.sign(&key, MessageDigest::sha256()).unwrap();
        (builder.build(), key)
    }

    fn on_runtime<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        runtime.unwrap().block_on(future)
    }

    /// Error of a client that trusts the certificate `trusted` and connects to a member at
    /// `address`.
    fn connection_error(trusted: &X509, address: SocketAddr) -> EtcdError {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("ca-cert.pem"), trusted.to_pem().unwrap()).unwrap();
        let tls = EtcdTls::new(Some(directory.path())).unwrap();
        let endpoint: EtcdEndpoint = format!("https://{address}").parse().unwrap();
        on_runtime(EtcdConnection::open(endpoint, &[address], Some(&tls), TIMEOUT)).unwrap_err()
    }

    /// Error of a client that trusts `trusted` and connects to a member with
    /// `member_certificate`.
    fn handshake_message(member_certificate: &(X509, PKey<Private>), trusted: &X509) -> String {
        let (certificate, key) = member_certificate;
        let mut acceptor = SslAcceptor::mozilla_intermediate(SslMethod::tls_server()).unwrap();
        acceptor.set_certificate(certificate).unwrap();
        acceptor.set_private_key(key).unwrap();
        let acceptor = acceptor.build();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let member = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            // The client aborts the handshake.
            assert!(acceptor.accept(stream).is_err());
        });
        let error = connection_error(trusted, address);
        member.join().unwrap();
        let text = error.to_string();
        assert!(matches!(error, EtcdError::Refused(_)), "{text}");
        assert!(text.starts_with(&format!("etcd https://{address}: TLS: ")), "{text}");
        text
    }

    #[test]
    fn certificate_faults_are_named() {
        let other = certificate("192.0.2.7", -1, 2);
        let expect = "the name \"127.0.0.1\" is expected, but etcd's certificate is for \
                      \"etcd1.example\", 192.0.2.7 (";
        let message = handshake_message(&other, &other.0);
        assert!(message.contains(expect), "{message}");
        let old = certificate(LOCALHOST, -9, -2);
        let message = handshake_message(&old, &old.0);
        let end = old.0.not_after();
        assert!(
            message.contains(&format!("etcd's certificate has expired, at {end} (renew it")),
            "{message}"
        );
        let early = certificate(LOCALHOST, 2, 9);
        let message = handshake_message(&early, &early.0);
        assert!(message.contains("etcd's certificate is not valid before "), "{message}");
        let message = handshake_message(&certificate(LOCALHOST, -1, 2), &other.0);
        assert!(message.contains("etcd's certificate is not trusted: self"), "{message}");
    }

    /// Error text for a member that replies with `reply` to the first bytes and closes.
    fn message_after_reply(reply: &'static [u8], connect: impl FnOnce(SocketAddr) -> EtcdError) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let member = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _first = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(reply).unwrap();
        });
        let message = connect(address).to_string();
        member.join().unwrap();
        message
    }

    #[test]
    fn a_member_without_tls_is_recognized() {
        let connect = |address| connection_error(&certificate(LOCALHOST, -1, 2).0, address);
        let message = message_after_reply(b"HTTP/1.0 400 Bad Request\r\n\r\n", connect);
        assert!(
            message.ends_with(
                "does not use TLS (write http:// in etcd of [cluster], or give the member a certificate)"
            ),
            "{message}"
        );
        let message = message_after_reply(b"", connect);
        assert!(
            message
                .contains("closed the connection (the address of a member without TLS begins with http://)"),
            "{message}"
        );
    }

    #[test]
    fn a_member_with_tls_is_recognized() {
        let connect = |address: SocketAddr| {
            let endpoint: EtcdEndpoint = format!("http://{address}").parse().unwrap();
            on_runtime(async {
                let opened = EtcdConnection::open(endpoint, &[address], None, TIMEOUT).await;
                opened.unwrap().request("/", &Value::Null, None).await.unwrap_err()
            })
        };
        let message = message_after_reply(b"", connect);
        assert!(message.ends_with("(the address of a member with TLS begins with https://)"), "{message}");
        let message = message_after_reply(
            b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
            connect,
        );
        assert!(message.ends_with("the server uses TLS (write https:// in etcd of [cluster])"), "{message}");
    }
}
