//! One HTTP/1.1 connection to a member of etcd, over TCP or TLS.
//!
//! A peer that has gone without a word is found by TCP itself (keep-alive, some seconds): a watch
//! may have nothing to say for hours.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use block::nbd::keys;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use openssl::{
    ssl::{SslConnector, SslConnectorBuilder, SslMethod, SslVerifyMode},
    x509::{GeneralNameRef, X509Ref, X509VerifyResult},
};
use rustix::net::sockopt;
use serde_json::Value;
use settings::Etcd;
use tokio::{io, net::TcpStream, task::AbortHandle};
use tokio_openssl::SslStream;

use super::Error;

/// Of an answer: 10,000 hosts with ten groups each.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// What OpenSSL says of a certificate that is good, and another's (x509_vfy.h).
const X509_V_ERR_HOSTNAME_MISMATCH: i32 = 62;
const X509_V_ERR_IP_ADDRESS_MISMATCH: i32 = 64;
/// Names of a certificate that are told.
const MOST_NAMES: usize = 8;
/// After which an idle connection is tried, and how often.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// What TLS needs. Read once: after that the files are not looked at again.
#[derive(Clone)]
pub(super) struct Tls(SslConnector);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    pub(super) fn new(certificates: Option<&Path>) -> anyhow::Result<Self> {
        let mut builder = SslConnector::builder(SslMethod::tls_client()).context("TLS")?;
        if let Some(directory) = certificates {
            Self::read(&mut builder, directory).context("certificates")?;
        }
        Ok(Self(builder.build()))
    }

    fn read(builder: &mut SslConnectorBuilder, directory: &Path) -> anyhow::Result<()> {
        ensure!(
            directory.is_dir(),
            "{}: is no directory (put ca-cert.pem there, which signs etcd's members; or mend certificates of [cluster])",
            directory.display()
        );
        let signs =
            "the authority that signs etcd's members: put it there, or mend certificates of [cluster]";
        for authority in keys::certificates(&directory.join("ca-cert.pem"), signs)? {
            builder.cert_store_mut().add_cert(authority)?;
        }
        let (own, own_key) = (directory.join("client-cert.pem"), directory.join("client-key.pem"));
        if !own.exists() && !own_key.exists() {
            return Ok(());
        }
        let mut chain = keys::certificates(&own, "which client-key.pem is the key of")?.into_iter();
        let key = keys::private_key(&own_key, "the private key of client-cert.pem")?;
        if let Some(leaf) = chain.next() {
            let is_its = leaf.public_key()?.public_eq(&key);
            let (own, key) = (own.display(), own_key.display());
            ensure!(is_its, "{key}: not the key of {own} (exchange one of them)");
            builder.set_certificate(&leaf)?;
        }
        for intermediate in chain {
            builder.add_extra_chain_cert(intermediate)?;
        }
        Ok(builder.set_private_key(&key)?)
    }
}

fn is_for_another(error: X509VerifyResult) -> bool {
    [X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH].contains(&error.as_raw())
}

/// What a certificate is for, the first of many names.
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
        certificate.subject_alt_names().iter().flatten().filter_map(name).take(MOST_NAMES).collect();
    if all.is_empty() { "no name".to_owned() } else { all.join(", ") }
}

trait Stream: io::AsyncRead + io::AsyncWrite + Send + Unpin {}
impl<S: io::AsyncRead + io::AsyncWrite + Send + Unpin> Stream for S {}

#[derive(Debug)]
pub(super) struct Connection {
    said: Etcd,
    sender: http1::SendRequest<Full<Bytes>>,
    driver: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    /// The first address that lets somebody in.
    pub(super) async fn open(
        said: Etcd,
        addresses: &[SocketAddr],
        tls: Option<&Tls>,
        patience: Duration,
    ) -> Result<Self, Error> {
        let mut last = anyhow!("it has no address");
        for address in addresses {
            let opened = tokio::time::timeout(patience, Self::open_at(&said, *address, tls)).await;
            match opened {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(Error::Unreachable(error))) => last = error,
                Ok(Err(refused)) => return Err(refused),
                Err(_) => last = anyhow!("no answer in {} s", patience.as_secs()),
            }
        }
        Err(Error::Unreachable(last.context(format!("etcd {said}"))))
    }

    async fn open_at(said: &Etcd, address: SocketAddr, tls: Option<&Tls>) -> Result<Self, Error> {
        let stream = TcpStream::connect(address).await.map_err(Error::unreachable)?;
        // What cannot be set is found out later.
        let _ = stream.set_nodelay(true);
        let _ = sockopt::set_socket_keepalive(&stream, true);
        let _ = sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE);
        let _ = sockopt::set_tcp_keepintvl(&stream, KEEP_ALIVE / 2);
        let _ = sockopt::set_tcp_keepcnt(&stream, 3);
        let stream: Box<dyn Stream> = match tls.filter(|_| said.tls) {
            None => Box::new(stream),
            Some(Tls(connector)) => {
                let session = connector.configure().and_then(|tls| tls.into_ssl(&said.host));
                let mut session = session.map_err(Error::unreachable)?;
                let names = Arc::new(OnceLock::new());
                session.set_verify_callback(SslVerifyMode::PEER, {
                    let names = Arc::clone(&names);
                    move |is_good, chain| {
                        if !is_good && is_for_another(chain.error()) {
                            // One certificate is the member's, and it is looked at once.
                            let _ = names.set(chain.current_cert().map(names_of).unwrap_or_default());
                        }
                        is_good
                    }
                });
                let mut stream = SslStream::new(session, stream).map_err(Error::unreachable)?;
                if let Err(error) = Pin::new(&mut stream).connect().await {
                    return Err(match error.io_error() {
                        Some(_) => Error::Unreachable(anyhow!("TLS: {error}")),
                        // Nothing but another certificate helps.
                        None => Error::Refused(match names.get() {
                            Some(names) => format!(
                                "etcd {said}: TLS: the name {:?} is expected, and etcd's certificate is for {names} (call it so in etcd of [cluster], or give it a certificate for this name)",
                                said.host
                            ),
                            None => format!(
                                "etcd {said}: TLS: {error} (mend certificates of [cluster], or etcd's; a member that has none has an address with http://)"
                            ),
                        }),
                    });
                }
                Box::new(stream)
            }
        };
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(Error::unreachable)?;
        // It ends with the connection.
        let driver = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Ok(Self { said: said.clone(), sender, driver })
    }

    /// Sends a request, and gives back the beginning of its answer.
    pub(super) async fn begin(
        &mut self,
        path: &str,
        body: Vec<u8>,
        token: Option<&str>,
    ) -> Result<Response<Incoming>, Error> {
        let host = match self.said.host.contains(':') {
            true => format!("[{}]:{}", self.said.host, self.said.port),
            false => format!("{}:{}", self.said.host, self.said.port),
        };
        let mut request = Request::post(path).header(header::HOST, host);
        request = request.header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let request = request.body(Full::new(Bytes::from(body))).map_err(Error::unreachable)?;
        let named =
            |error: hyper::Error| Error::Unreachable(anyhow!(error).context(format!("etcd {}", self.said)));
        self.sender.ready().await.map_err(named)?;
        self.sender.send_request(request).await.map_err(named)
    }

    /// Sends a request, and gives back the whole answer; JSON, or it is not etcd that answers.
    pub(super) async fn ask(
        &mut self,
        path: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<(StatusCode, Value), Error> {
        let response = self.begin(path, body.to_string().into_bytes(), token).await?;
        let status = response.status();
        let answer = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
        let answer = answer.map_err(|error| Error::Unreachable(anyhow!("etcd {}: {error}", self.said)))?;
        let answer = serde_json::from_slice(&answer.to_bytes());
        let not_etcd = |_| {
            Error::Refused(format!(
                "etcd {}: what answers there is not etcd's gateway, version 3.4 or newer (mend etcd of [cluster])",
                self.said
            ))
        };
        answer.map(|answer| (status, answer)).map_err(not_etcd)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, net::TcpListener, thread};

    use openssl::{
        asn1::Asn1Time,
        hash::MessageDigest,
        pkey::{PKey, Private},
        rsa::Rsa,
        ssl::SslAcceptor,
        x509::{X509, X509Name, extension::SubjectAlternativeName},
    };

    use super::*;

    fn certificate() -> (X509, PKey<Private>) {
        let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
        let mut name = X509Name::builder().unwrap();
        name.append_entry_by_text("CN", "other").unwrap();
        let name = name.build();
        let mut builder = X509::builder().unwrap();
        builder.set_version(2).unwrap();
        builder.set_subject_name(&name).unwrap();
        builder.set_issuer_name(&name).unwrap();
        builder.set_pubkey(&key).unwrap();
        builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
        builder.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
        let names = SubjectAlternativeName::new()
            .dns("etcd1.example")
            .ip("192.0.2.7")
            .build(&builder.x509v3_context(None, None))
            .unwrap();
        builder.append_extension(names).unwrap();
        builder.sign(&key, MessageDigest::sha256()).unwrap();
        (builder.build(), key)
    }

    #[test]
    fn a_certificate_for_another_name_is_told_with_both() {
        let directory = tempfile::tempdir().unwrap();
        let (certificate, key) = certificate();
        fs::write(directory.path().join("ca-cert.pem"), certificate.to_pem().unwrap()).unwrap();
        let mut acceptor = SslAcceptor::mozilla_intermediate(SslMethod::tls_server()).unwrap();
        acceptor.set_certificate(&certificate).unwrap();
        acceptor.set_private_key(&key).unwrap();
        let acceptor = acceptor.build();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let member = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            // The client breaks it off.
            assert!(acceptor.accept(stream).is_err());
        });
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
        let tls = Tls::new(Some(directory.path())).unwrap();
        let said: Etcd = format!("https://{address}").parse().unwrap();
        let patience = Duration::from_secs(60);
        let opened = runtime.block_on(Connection::open(said, &[address], Some(&tls), patience));
        let said = opened.unwrap_err().to_string();
        let expect = "the name \"127.0.0.1\" is expected, and etcd's certificate is for \"etcd1.example\", 192.0.2.7 (";
        assert!(said.contains(expect), "{said}");
        member.join().unwrap();
    }
}
