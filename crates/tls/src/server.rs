//! TLS credentials of a server: a directory of X.509 files, or a file of pre-shared keys.
//!
//! The layout is that of QEMU and nbdkit:
//!
//! ```text
//!  X.509   server-cert.pem   the certificate, then its intermediates
//!          server-key.pem    its private key, not encrypted
//!          ca-cert.pem       authority of the clients; needed to verify them
//!          ca-crl.pem        optional: revoked clients
//!  PSK     keys.psk          a line `user:hexkey` for each client, as `psktool` writes it
//! ```
//!
//! All files are read at the start, and every fault is reported then. [`TlsServer::replace`]
//! replaces the credentials later.
//!
//! Clients that connect:
//! - X.509: `nbdinfo 'nbds://HOST/NAME?tls-certificates=DIR'`, with ca-cert.pem, client-cert.pem
//!   and client-key.pem in DIR; `qemu-img info --object
//!   tls-creds-x509,id=t,dir=DIR,endpoint=client --image-opts
//!   driver=nbd,host=HOST,port=10809,export=NAME,tls-creds=t`.
//! - PSK: `nbdinfo 'nbds://USER@HOST/NAME?tls-psk-file=keys.psk'`; `qemu-img info --object
//!   tls-creds-psk,id=t,dir=DIR,username=USER,endpoint=client --image-opts …,tls-creds=t` with
//!   DIR/keys.psk.
//! - Through a Unix socket: `nbds+unix://USER@/NAME?socket=PATH&tls-psk-file=keys.psk`.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use openssl::{
    error::ErrorStack,
    ssl::{Ssl, SslContext, SslContextBuilder, SslMethod, SslVerifyMode},
    x509::store::X509StoreBuilder,
};

use super::{
    files::{self, CredentialsError},
    peer_name::index_of_user,
    session::{TlsError, TlsStream},
};

/// Credentials of a server for any number of connections. Clones share them.
#[derive(Clone, Debug)]
pub struct TlsServer {
    context: Arc<Mutex<SslContext>>,
}

impl TlsServer {
    /// Credentials from a directory of X.509 files. With `verify_peer` a client must present a
    /// certificate that ca-cert.pem signed and that ca-crl.pem, if it exists, does not revoke.
    ///
    /// # Errors
    /// Fails on a faulty file; the error names it.
    pub fn x509(directory: &Path, verify_peer: bool) -> Result<Self, CredentialsError> {
        let mut builder = builder()?;
        let (certificate, key) = (directory.join("server-cert.pem"), directory.join("server-key.pem"));
        files::set_identity(&mut builder, &certificate, &key, "the server's certificate")?;
        if verify_peer {
            verify_clients(&mut builder, directory)?;
        }
        Ok(Self::from_builder(builder))
    }

    /// Credentials from a file of pre-shared keys, or from the file `keys.psk` in a directory.
    ///
    /// # Errors
    /// Fails on a faulty file; the error names it and the line.
    pub fn psk(path: &Path) -> Result<Self, CredentialsError> {
        let keys = files::pre_shared(path)?;
        let mut builder = builder()?;
        builder.set_cipher_list(files::PSK_CIPHERS)?;
        let index = index_of_user()?;
        builder.set_psk_server_callback(move |ssl, identity, out| {
            let key = identity.and_then(|identity| keys.get(identity));
            // Kept for `peer_name`, which reads it after the handshake.
            if let (Some(user), Some(_)) = (identity, key) {
                ssl.set_ex_data(index, user.to_vec());
            }
            match key.and_then(|key| Some((key, out.get_mut(..key.len())?))) {
                Some((key, out)) => {
                    out.copy_from_slice(key);
                    Ok(key.len())
                }
                // Unknown user, or no room for the key: a length of 0 makes the handshake fail.
                None => Ok(0),
            }
        });
        Ok(Self::from_builder(builder))
    }

    fn from_builder(builder: SslContextBuilder) -> Self {
        Self { context: Arc::new(Mutex::new(builder.build())) }
    }

    /// Replaces the credentials for all later connections, in this value and all its clones.
    /// Existing connections keep theirs.
    pub fn replace(&self, replacement: Self) {
        let context = replacement.context().clone();
        *self.context() = context;
    }

    fn context(&self) -> MutexGuard<'_, SslContext> {
        self.context.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// New connection without a socket, which waits for the client's first bytes.
    ///
    /// # Errors
    /// Fails if OpenSSL does.
    pub fn accept(&self) -> Result<TlsStream, TlsError> {
        TlsStream::server(self.ssl()?)
    }

    /// OpenSSL state of a new connection, for a stream with its own socket.
    ///
    /// # Errors
    /// Fails if OpenSSL does.
    pub fn ssl(&self) -> Result<Ssl, ErrorStack> {
        Ssl::new(&self.context())
    }
}

fn builder() -> Result<SslContextBuilder, ErrorStack> {
    let mut builder = SslContext::builder(SslMethod::tls_server())?;
    files::harden(&mut builder)?;
    // TLS 1.3 sends session tickets by default. `NO_TICKET` only makes them stateful there, so
    // their number is set to 0.
    builder.set_num_tickets(0)?;
    Ok(builder)
}

fn verify_clients(builder: &mut SslContextBuilder, directory: &Path) -> Result<(), CredentialsError> {
    let mut store = X509StoreBuilder::new()?;
    for authority in files::certificates(
        &directory.join("ca-cert.pem"),
        "the certificate of the authority that signs clients",
    )? {
        // The names of the accepted authorities go into the certificate request, so that a client
        // with several certificates can select one.
        builder.add_client_ca(&authority)?;
        store.add_cert(authority)?;
    }
    files::revoke_in(&mut store, directory, "the revocation list of clients")?;
    builder.set_verify_cert_store(store.build())?;
    builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_files_are_named_with_their_purpose() {
        let missing = Path::new("/nonexistent/tls");
        let error = TlsServer::x509(missing, true).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/tls/server-cert.pem: No such file"), "{error}");
        assert!(error.contains("the server's certificate"), "{error}");
        let error = TlsServer::psk(missing).unwrap_err().to_string();
        assert!(error.contains("psktool"), "{error}");
    }
}
