//! One HTTP/1.1 connection to a member of etcd, over TCP or TLS.
//!
//! A peer that has gone without a word is found by TCP itself (keep-alive, some seconds): a watch
//! may have nothing to say for hours.

use std::{net::SocketAddr, path::Path, pin::Pin, time::Duration};

use anyhow::{Context as _, anyhow};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use openssl::ssl::{SslConnector, SslFiletype, SslMethod};
use rustix::net::sockopt;
use serde_json::Value;
use settings::Etcd;
use tokio::{io, net::TcpStream, task::AbortHandle};
use tokio_openssl::SslStream;

use super::Error;

/// Of an answer: 10,000 hosts with ten groups each.
const MAX_ANSWER_BYTES: usize = 64 << 20;
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
            let said = |name: &str| format!("certificates: {}", directory.join(name).display());
            builder.set_ca_file(directory.join("ca-cert.pem")).with_context(|| said("ca-cert.pem"))?;
            let (own, key) = (directory.join("client-cert.pem"), directory.join("client-key.pem"));
            if own.exists() || key.exists() {
                builder.set_certificate_chain_file(own).with_context(|| said("client-cert.pem"))?;
                builder
                    .set_private_key_file(key, SslFiletype::PEM)
                    .with_context(|| said("client-key.pem"))?;
                builder.check_private_key().with_context(|| said("client-key.pem"))?;
            }
        }
        Ok(Self(builder.build()))
    }
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
                let session = session.map_err(Error::unreachable)?;
                let mut stream = SslStream::new(session, stream).map_err(Error::unreachable)?;
                if let Err(error) = Pin::new(&mut stream).connect().await {
                    return Err(match error.io_error() {
                        Some(_) => Error::Unreachable(anyhow!("TLS: {error}")),
                        // Nothing but another certificate helps.
                        None => Error::Refused(format!(
                            "etcd {said}: TLS: {error} (mend certificates of [cluster], or etcd's)"
                        )),
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
