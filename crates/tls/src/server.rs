//! Server credentials for TLS: a directory of X.509 files, or a file of pre-shared keys.
//!
//! Both are laid out as QEMU and nbdkit have them:
//!
//! ```text
//!  X.509   server-cert.pem   the certificate, then its intermediates
//!          server-key.pem    its private key, not encrypted
//!          ca-cert.pem       who signs clients; needed to verify them
//!          ca-crl.pem        optional: revoked clients
//!  PSK     keys.psk          a line `user:hexkey` a client, as `psktool` writes it
//! ```
//!
//! Everything is read at the start, and every fault is found then; what was renewed is put in by
//! [`TlsServer::renew`].
//!
//! Clients that connect:
//! - X.509: `nbdinfo 'nbds://HOST/NAME?tls-certificates=DIR'`, with ca-cert.pem, client-cert.pem
//!   and client-key.pem in DIR; `qemu-img info --object tls-creds-x509,id=t,dir=DIR,endpoint=client
//!   --image-opts driver=nbd,host=HOST,port=10809,export=NAME,tls-creds=t`.
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

/// A server's credentials, ready for any number of connections. Clones share them.
#[derive(Clone, Debug)]
pub struct TlsServer {
    context: Arc<Mutex<SslContext>>,
}

impl TlsServer {
    /// Credentials from a directory of X.509 files. With `verify_peer` a client must present a
    /// certificate that ca-cert.pem signs and that ca-crl.pem, if there is one, does not revoke.
    ///
    /// # Errors
    /// The fault of a file, with its path.
    pub fn x509(directory: &Path, verify_peer: bool) -> Result<Self, CredentialsError> {
        let mut builder = builder()?;
        let (certificate, key) = (directory.join("server-cert.pem"), directory.join("server-key.pem"));
        files::set_identity(&mut builder, &certificate, &key, "the server's certificate")?;
        if verify_peer {
            verify_clients(&mut builder, directory)?;
        }
        Ok(Self::of(builder))
    }

    /// Credentials from a file of pre-shared keys, or from the file `keys.psk` in a directory.
    ///
    /// # Errors
    /// The fault of the file, with its path and line.
    pub fn psk(path: &Path) -> Result<Self, CredentialsError> {
        let keys = files::pre_shared(path)?;
        let mut builder = builder()?;
        builder.set_cipher_list(files::PSK_CIPHERS)?;
        let index = index_of_user()?;
        builder.set_psk_server_callback(move |ssl, identity, out| {
            let key = identity.and_then(|identity| keys.get(identity));
            if let (Some(user), Some(_)) = (identity, key) {
                ssl.set_ex_data(index, user.to_vec());
            }
            match key.and_then(|key| Some((key, out.get_mut(..key.len())?))) {
                Some((key, out)) => {
                    out.copy_from_slice(key);
                    Ok(key.len())
                }
                // An unknown user: the handshake fails.
                None => Ok(0),
            }
        });
        Ok(Self::of(builder))
    }

    fn of(builder: SslContextBuilder) -> Self {
        Self { context: Arc::new(Mutex::new(builder.build())) }
    }

    /// Has others' credentials for all that connect from now on, at this one and all its clones.
    pub fn renew(&self, others: Self) {
        let context = others.context().clone();
        *self.context() = context;
    }

    fn context(&self) -> MutexGuard<'_, SslContext> {
        self.context.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// State of a connection without a socket, waiting for the client's first bytes.
    ///
    /// # Errors
    /// OpenSSL's.
    pub fn accept(&self) -> Result<TlsStream, TlsError> {
        TlsStream::server(self.ssl()?)
    }

    /// State of a connection, for a stream that has its own socket.
    ///
    /// # Errors
    /// OpenSSL's.
    pub fn ssl(&self) -> Result<Ssl, ErrorStack> {
        Ssl::new(&self.context())
    }
}

fn builder() -> Result<SslContextBuilder, ErrorStack> {
    let mut builder = SslContext::builder(SslMethod::tls_server())?;
    files::harden(&mut builder)?;
    builder.set_num_tickets(0)?;
    Ok(builder)
}

fn verify_clients(builder: &mut SslContextBuilder, directory: &Path) -> Result<(), CredentialsError> {
    let mut store = X509StoreBuilder::new()?;
    for authority in files::certificates(&directory.join("ca-cert.pem"), "the authority that signs clients")?
    {
        builder.add_client_ca(&authority)?;
        store.add_cert(authority)?;
    }
    files::revoke_in(&mut store, directory, "the clients that are revoked")?;
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
