//! Credentials of a TLS client, and its verification of the server: certificates, or a pre-shared
//! key.
//!
//! ```text
//!  X.509   ca-cert.pem       authority of the servers; without a directory, the system's
//!          ca-crl.pem        optional: revoked servers
//!          client-cert.pem   optional, both: the client's certificate
//!          client-key.pem
//!  PSK     keys.psk          a line `user:hexkey`, as `psktool` writes it
//! ```
//!
//! The layout is that of libnbd and QEMU. All files are read once, before the first connection, so
//! a reconnect needs no file. Never accepts an unverified server, unless the caller requests that
//! (`host` is `None`).

use std::{fmt, net::IpAddr, path::Path};

use openssl::{
    error::ErrorStack,
    ssl::{Ssl, SslContext, SslContextBuilder, SslMethod, SslVerifyMode},
    x509::{store::X509StoreBuilder, verify::X509CheckFlags},
};

use super::{
    files::{self, CredentialsError},
    session::{TlsError, TlsStream},
};

/// Credentials of a client for any number of connections. Clones share them.
#[derive(Clone)]
pub struct TlsClient {
    context: SslContext,
    // Name or address that the server's certificate must hold; `None` with a key, or without a
    // check.
    host: Option<String>,
    has_key: bool,
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("host", &self.host).finish_non_exhaustive()
    }
}

impl TlsClient {
    /// Credentials from a directory of X.509 files, or with the system's authorities alone. The
    /// server's certificate must be valid for `host`. With `None` every certificate is accepted.
    ///
    /// # Errors
    /// Fails on a faulty file; the error names it.
    pub fn x509(directory: Option<&Path>, host: Option<String>) -> Result<Self, CredentialsError> {
        let mut builder = builder()?;
        match directory {
            Some(directory) => x509_files(&mut builder, directory)?,
            None => builder.set_default_verify_paths()?,
        }
        builder.set_verify(if host.is_some() { SslVerifyMode::PEER } else { SslVerifyMode::NONE });
        Ok(Self { context: builder.build(), host, has_key: false })
    }

    /// Credentials from a file of pre-shared keys, or from the file `keys.psk` in a directory: the
    /// key of `user`, or the only one.
    ///
    /// # Errors
    /// Fails on a faulty file, or if it holds no key of the user; the error names the file.
    pub fn psk(path: &Path, user: Option<&str>) -> Result<Self, CredentialsError> {
        let mut known = files::pre_shared(path)?;
        let invalid = |why: String| CredentialsError::Content { path: path.to_owned(), why };
        let user = match user {
            Some(user) => user.as_bytes().to_vec(),
            None if known.len() == 1 => known.keys().next().cloned().unwrap_or_default(),
            None => {
                return Err(invalid("has keys of several users (select one: nbds://USER@HOST/…)".to_owned()));
            }
        };
        let key = known.remove(&user);
        let key =
            key.ok_or_else(|| invalid(format!("has no key for user {:?}", String::from_utf8_lossy(&user))))?;
        let mut builder = builder()?;
        builder.set_cipher_list(files::PSK_CIPHERS)?;
        builder.set_psk_client_callback(move |_, _, identity, secret| {
            // OpenSSL expects the identity as a C string. Returning 0 makes the handshake fail.
            let Some(buffer) = identity.get_mut(..=user.len()) else { return Ok(0) };
            let Some(place) = secret.get_mut(..key.len()) else { return Ok(0) };
            buffer[..user.len()].copy_from_slice(&user);
            buffer[user.len()] = 0;
            place.copy_from_slice(&key);
            Ok(key.len())
        });
        // In TLS 1.3 a server that does not know the key may fall back to a certificate. The empty
        // store rejects every certificate, so that only the key authenticates the server.
        builder.set_verify(SslVerifyMode::PEER);
        builder.set_cert_store(X509StoreBuilder::new()?.build());
        Ok(Self { context: builder.build(), host: None, has_key: true })
    }

    /// True if the server is authenticated by a pre-shared key alone.
    pub fn has_key(&self) -> bool {
        self.has_key
    }

    /// New connection, whose first bytes are ready to be sent.
    ///
    /// # Errors
    /// Fails if OpenSSL does.
    pub fn connect(&self) -> Result<TlsStream, TlsError> {
        let mut ssl = Ssl::new(&self.context)?;
        if let Some(host) = &self.host {
            let is_address = host.parse::<IpAddr>();
            let rules = ssl.param_mut();
            // RFC 6125 section 6.4.3 allows clients to reject wildcards such as `vm*.example.org`.
            rules.set_hostflags(X509CheckFlags::NO_PARTIAL_WILDCARDS);
            match is_address {
                // An address is compared with the iPAddress entries of the certificate, and is not
                // sent as a server name: RFC 6066 section 3 does not permit literal addresses
                // there.
                Ok(address) => rules.set_ip(address)?,
                Err(_) => {
                    rules.set_host(host)?;
                    ssl.set_hostname(host)?;
                }
            }
        }
        TlsStream::client(ssl)
    }
}

fn builder() -> Result<SslContextBuilder, ErrorStack> {
    let mut builder = SslContext::builder(SslMethod::tls_client())?;
    files::harden(&mut builder)?;
    Ok(builder)
}

fn x509_files(builder: &mut SslContextBuilder, directory: &Path) -> Result<(), CredentialsError> {
    let mut store = X509StoreBuilder::new()?;
    for authority in files::certificates(
        &directory.join("ca-cert.pem"),
        "the certificate of the authority that signs the server",
    )? {
        store.add_cert(authority)?;
    }
    files::revoke_in(&mut store, directory, "the revocation list of servers")?;
    builder.set_cert_store(store.build());
    let certificate = directory.join("client-cert.pem");
    // Presenting a certificate is optional, but one without its key is an error.
    if !certificate.exists() {
        return Ok(());
    }
    files::set_identity(builder, &certificate, &directory.join("client-key.pem"), "the client's certificate")
}
