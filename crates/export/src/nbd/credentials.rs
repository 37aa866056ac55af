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
//! Everything is read once, at the start, and every fault is found then.
//!
//! Clients that connect:
//! - X.509: `nbdinfo 'nbds://HOST/NAME?tls-certificates=DIR'`, with ca-cert.pem, client-cert.pem
//!   and client-key.pem in DIR; `qemu-img info --object tls-creds-x509,id=t,dir=DIR,endpoint=client
//!   --image-opts driver=nbd,host=HOST,port=10809,export=NAME,tls-creds=t`.
//! - PSK: `nbdinfo 'nbds://USER@HOST/NAME?tls-psk-file=keys.psk'`; `qemu-img info --object
//!   tls-creds-psk,id=t,dir=DIR,username=USER,endpoint=client --image-opts …,tls-creds=t` with
//!   DIR/keys.psk.
//! - Through a Unix socket: `nbds+unix://USER@/NAME?socket=PATH&tls-psk-file=keys.psk`.

use super::name;
use super::tls::{TlsError, TlsStream};
use openssl::error::ErrorStack;
use openssl::pkey::{PKey, Private};
use openssl::ssl::{
    SslContext, SslContextBuilder, SslFiletype, SslMethod, SslOptions, SslSessionCacheMode, SslVerifyMode,
    SslVersion,
};
use openssl::x509::X509;
use openssl::x509::store::{X509Lookup, X509StoreBuilder};
use openssl::x509::verify::X509VerifyFlags;
use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

/// Largest credential file that is read, in bytes: tens of thousands of keys.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Longest pre-shared key, in bytes (what OpenSSL accepts in every version).
const MAX_KEY_BYTES: usize = 256;
/// TLS 1.2's suites for pre-shared keys with forward secrecy; TLS 1.3 names its suites apart from
/// the key exchange.
const PSK_CIPHERS: &str = "ECDHE-PSK-CHACHA20-POLY1305:ECDHE-PSK-AES256-CBC-SHA384:ECDHE-PSK-AES128-CBC-SHA256:\
                           DHE-PSK-CHACHA20-POLY1305:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-AES128-GCM-SHA256";

/// What is wrong with credentials.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    #[error("{}: {source} ({hint})", path.display())]
    File { path: PathBuf, source: std::io::Error, hint: &'static str },
    #[error("{}: {why}", path.display())]
    Content { path: PathBuf, why: String },
    #[error("TLS: {0}")]
    OpenSsl(#[from] ErrorStack),
}

/// A server's credentials, ready for any number of connections. Clones share them.
#[derive(Clone, Debug)]
pub struct TlsServer {
    context: SslContext,
}

impl TlsServer {
    /// From a directory of X.509 files. With `verify_peer` a client must present a certificate that
    /// ca-cert.pem signs and that ca-crl.pem, if there is one, does not revoke.
    pub fn x509(directory: &Path, verify_peer: bool) -> Result<Self, CredentialsError> {
        let mut builder = builder()?;
        let chain_path = directory.join("server-cert.pem");
        let mut chain = certificates(&chain_path, "the server's certificate")?.into_iter();
        let key_path = directory.join("server-key.pem");
        let key = private_key(&key_path)?;
        if let Some(leaf) = chain.next() {
            if !leaf.public_key()?.public_eq(&key) {
                let why = format!("not the key of {} (exchange one of them)", chain_path.display());
                return Err(CredentialsError::Content { path: key_path, why });
            }
            builder.set_certificate(&leaf)?;
        }
        for intermediate in chain {
            builder.add_extra_chain_cert(intermediate)?;
        }
        builder.set_private_key(&key)?;
        if verify_peer {
            verify_clients(&mut builder, directory)?;
        }
        Ok(Self { context: builder.build() })
    }

    /// From a file of pre-shared keys, or from the file `keys.psk` in a directory.
    pub fn psk(path: &Path) -> Result<Self, CredentialsError> {
        let path = if path.is_dir() { path.join("keys.psk") } else { path.to_owned() };
        let bytes =
            read(&path, "pre-shared keys, a line user:hexkey each; `psktool -u USER -p FILE` adds one")?;
        let keys = keys(&bytes).map_err(|why| CredentialsError::Content { path, why })?;
        let mut builder = builder()?;
        builder.set_cipher_list(PSK_CIPHERS)?;
        let index = name::index_of_user()?;
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
        Ok(Self { context: builder.build() })
    }

    /// A connection's state, waiting for the client's first bytes.
    pub fn accept(&self) -> Result<TlsStream, TlsError> {
        TlsStream::new(&self.context)
    }
}

/// TLS 1.2 and later ("TLS versions"), without renegotiation, and without resumption, whose keys
/// would outlive the connection.
fn builder() -> Result<SslContextBuilder, ErrorStack> {
    let mut builder = SslContext::builder(SslMethod::tls_server())?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    builder.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_TICKET | SslOptions::NO_COMPRESSION);
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    builder.set_num_tickets(0)?;
    Ok(builder)
}

fn verify_clients(builder: &mut SslContextBuilder, directory: &Path) -> Result<(), CredentialsError> {
    let mut store = X509StoreBuilder::new()?;
    for authority in certificates(&directory.join("ca-cert.pem"), "the authority that signs clients")? {
        builder.add_client_ca(&authority)?;
        store.add_cert(authority)?;
    }
    let revoked = directory.join("ca-crl.pem");
    match read(&revoked, "the clients that are revoked") {
        // Only a list that is certainly not there may be ignored.
        Err(CredentialsError::File { source, .. }) if source.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(_) => revoke(&mut store, &revoked)?,
    }
    builder.set_verify_cert_store(store.build())?;
    builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
    Ok(())
}

fn revoke(store: &mut X509StoreBuilder, path: &Path) -> Result<(), CredentialsError> {
    let wrong = |why: String| CredentialsError::Content { path: path.to_owned(), why };
    let name = path.to_str().ok_or_else(|| wrong("the path is not UTF-8".to_owned()))?;
    store
        .add_lookup(X509Lookup::file())?
        .load_crl_file(name, SslFiletype::PEM)
        .map_err(|error| wrong(format!("not a revocation list in PEM form: {error}")))?;
    store.set_flags(X509VerifyFlags::CRL_CHECK)?;
    Ok(())
}

fn read(path: &Path, hint: &'static str) -> Result<Vec<u8>, CredentialsError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| CredentialsError::File { path: path.to_owned(), source, hint })?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let why = format!("larger than {MAX_FILE_BYTES} bytes (is this the right file?)");
        return Err(CredentialsError::Content { path: path.to_owned(), why });
    }
    Ok(bytes)
}

fn certificates(path: &Path, hint: &'static str) -> Result<Vec<X509>, CredentialsError> {
    let certificates = X509::stack_from_pem(&read(path, hint)?).unwrap_or_default();
    if certificates.is_empty() {
        let why = "holds no certificate in PEM form".to_owned();
        return Err(CredentialsError::Content { path: path.to_owned(), why });
    }
    Ok(certificates)
}

fn private_key(path: &Path) -> Result<PKey<Private>, CredentialsError> {
    let bytes = read(path, "the private key of server-cert.pem")?;
    // Without a callback OpenSSL would ask on the terminal, and a daemon would wait there for ever.
    PKey::private_key_from_pem_callback(&bytes, |_| Ok(0)).map_err(|_| CredentialsError::Content {
        path: path.to_owned(),
        why: "not an unencrypted private key in PEM form (`openssl pkey -in FILE -out FILE` decrypts one)"
            .to_owned(),
    })
}

/// As GnuTLS's psktool writes them: `user:hexkey`, with a user of unusual bytes as `#hex`.
fn keys(file: &[u8]) -> Result<HashMap<Vec<u8>, Vec<u8>>, String> {
    let mut keys = HashMap::new();
    for (number, line) in file.split(|&byte| byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let (user, key) = key(line)
            .ok_or_else(|| format!("line {}: not user:hexkey with a key of 1 to 256 bytes", number + 1))?;
        if keys.insert(user, key).is_some() {
            return Err(format!("line {}: this user has a key already (remove one)", number + 1));
        }
    }
    if keys.is_empty() {
        return Err("holds no key (`psktool -u USER -p FILE` adds one)".to_owned());
    }
    Ok(keys)
}

fn key(line: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let colon = line.iter().position(|&byte| byte == b':')?;
    let (user, key) = (&line[..colon], unhex(&line[colon + 1..])?);
    let user = match user.strip_prefix(b"#") {
        Some(hex) => unhex(hex)?,
        None => user.to_owned(),
    };
    (!user.is_empty() && (1..=MAX_KEY_BYTES).contains(&key.len())).then_some((user, key))
}

fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.chunks_exact(2).map(|pair| Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_files_are_read_as_psktool_writes_them() {
        let read = keys(b"alice:00ff\n\n#626f62:0A\r\n").unwrap();
        assert_eq!(read.get(b"alice".as_slice()), Some(&vec![0, 255]));
        assert_eq!(read.get(b"bob".as_slice()), Some(&vec![10]));
    }

    #[test]
    fn a_bad_key_file_is_refused_with_the_line() {
        for (file, line) in [
            ("alice", "line 1"),
            ("alice:0", "line 1"),
            ("alice:zz", "line 1"),
            ("alice:", "line 1"),
            (":00", "line 1"),
            ("#0:00", "line 1"),
            ("alice:00\nbob:é0", "line 2"),
            ("alice:00\nalice:01", "line 2"),
            ("", "holds no key"),
        ] {
            let why = keys(file.as_bytes()).unwrap_err();
            assert!(why.contains(line), "{file:?}: {why}");
        }
        let long = format!("alice:{}", "00".repeat(257));
        assert!(keys(long.as_bytes()).is_err());
    }

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
