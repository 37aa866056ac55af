//! Credential files: certificates, private keys, pre-shared keys; and the settings that servers and
//! clients have in common.
//!
//! Each file is read once, up to a bound, and every fault is found then. Never holds a file open.

use std::{
    collections::HashMap,
    io::{self, ErrorKind, Read as _},
    path::{Path, PathBuf},
};

use openssl::{
    asn1::Asn1Time,
    error::ErrorStack,
    pkey::{PKey, Private},
    ssl::{SslContextBuilder, SslFiletype, SslOptions, SslSessionCacheMode, SslVersion},
    x509::{
        X509,
        store::{X509Lookup, X509StoreBuilder},
        verify::X509VerifyFlags,
    },
};

use reactor::regular;

/// Largest credential file that is read, in bytes: tens of thousands of keys.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Longest pre-shared key, in bytes (what OpenSSL accepts in every version).
const MAX_KEY_BYTES: usize = 256;
/// TLS 1.2's suites for pre-shared keys with forward secrecy; TLS 1.3 names its suites apart from
/// the key exchange.
pub(crate) const PSK_CIPHERS: &str = "ECDHE-PSK-CHACHA20-POLY1305:ECDHE-PSK-AES256-CBC-SHA384:ECDHE-PSK-AES128-CBC-SHA256:\
                           DHE-PSK-CHACHA20-POLY1305:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-AES128-GCM-SHA256";

/// What is wrong with credentials.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    #[error("{}: {source} ({hint})", path.display())]
    File { path: PathBuf, source: io::Error, hint: &'static str },
    #[error("{}: {why}", path.display())]
    Content { path: PathBuf, why: String },
    #[error("TLS: {0}")]
    OpenSsl(#[from] ErrorStack),
}

/// TLS 1.2 and later ("TLS versions"), without renegotiation, and without resumption, whose keys
/// would outlive the connection.
///
/// # Errors
/// OpenSSL's.
pub(crate) fn harden(builder: &mut SslContextBuilder) -> Result<(), ErrorStack> {
    builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    builder.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_TICKET | SslOptions::NO_COMPRESSION);
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    Ok(())
}

/// Has certificates that the list ca-crl.pem of this directory names refused, if it is there.
///
/// # Errors
/// Where it is there and is none.
pub(crate) fn revoke_in(
    store: &mut X509StoreBuilder,
    directory: &Path,
    hint: &'static str,
) -> Result<(), CredentialsError> {
    let revoked = directory.join("ca-crl.pem");
    match read(&revoked, hint) {
        // Only a list that is certainly not there may be ignored.
        Err(CredentialsError::File { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => revoke(store, &revoked),
    }
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
    regular::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| CredentialsError::File { path: path.to_owned(), source, hint })?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let why = format!("larger than {MAX_FILE_BYTES} bytes (is this the right file?)");
        return Err(CredentialsError::Content { path: path.to_owned(), why });
    }
    Ok(bytes)
}

/// The certificates in a file, at least one.
///
/// # Errors
/// Where there are none, or the file cannot be read; `hint` says what it is for.
pub fn certificates(path: &Path, hint: &'static str) -> Result<Vec<X509>, CredentialsError> {
    let certificates = X509::stack_from_pem(&read(path, hint)?).unwrap_or_default();
    if certificates.is_empty() {
        let why = "holds no certificate in PEM form".to_owned();
        return Err(CredentialsError::Content { path: path.to_owned(), why });
    }
    Ok(certificates)
}

/// Says that a certificate of this file's has expired: others refuse it, in words of their own.
fn warn_if_expired(path: &Path, certificate: &X509) {
    let is_over = Asn1Time::days_from_now(0).is_ok_and(|now| certificate.not_after() < now.as_ref());
    if is_over {
        let (file, end) = (path.display(), certificate.not_after());
        tracing::warn!("{file}: has expired, at {end}: whoever verifies it refuses it (renew it)");
    }
}

/// The private key in a file.
///
/// # Errors
/// Where it is none, or encrypted, or the file cannot be read; `hint` says what it is for.
fn private_key(path: &Path, hint: &'static str) -> Result<PKey<Private>, CredentialsError> {
    let bytes = read(path, hint)?;
    // Without a callback OpenSSL would ask on the terminal, and a daemon would wait there for ever.
    PKey::private_key_from_pem_callback(&bytes, |_| Ok(0)).map_err(|_| CredentialsError::Content {
        path: path.to_owned(),
        why: "not an unencrypted private key in PEM form (`openssl pkey -in FILE -out FILE` decrypts one)"
            .to_owned(),
    })
}

/// Sets the certificate of this end of a connection, with its intermediates, and its private key.
///
/// `of` is the purpose of the certificate, for messages.
///
/// # Errors
/// A file cannot be read, holds something else, or the key is that of another certificate.
pub fn set_identity(
    builder: &mut SslContextBuilder,
    certificate: &Path,
    key: &Path,
    of: &'static str,
) -> Result<(), CredentialsError> {
    let mut chain = certificates(certificate, of)?.into_iter();
    let private = private_key(key, "the private key of that certificate")?;
    if let Some(leaf) = chain.next() {
        if !leaf.public_key()?.public_eq(&private) {
            let why = format!("not the key of {} (exchange one of them)", certificate.display());
            return Err(CredentialsError::Content { path: key.to_owned(), why });
        }
        warn_if_expired(certificate, &leaf);
        builder.set_certificate(&leaf)?;
    }
    for intermediate in chain {
        builder.add_extra_chain_cert(intermediate)?;
    }
    Ok(builder.set_private_key(&private)?)
}

/// The pre-shared keys in a file, or in the file `keys.psk` of a directory, by their users.
///
/// # Errors
/// Where there are none, or a line is none, or the file cannot be read.
pub(crate) fn pre_shared(path: &Path) -> Result<HashMap<Vec<u8>, Vec<u8>>, CredentialsError> {
    let path = if path.is_dir() { path.join("keys.psk") } else { path.to_owned() };
    let bytes = read(&path, "pre-shared keys, a line user:hexkey each; `psktool -u USER -p FILE` adds one")?;
    keys(&bytes).map_err(|why| CredentialsError::Content { path, why })
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
}
