//! Credential files (certificates, private keys, pre-shared keys), and the settings that servers
//! and clients share.
//!
//! Each file is read once, up to a bound, and every fault in it is reported then. Never holds a
//! file open.

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

use reactor::regular_file;

// Largest credential file, in bytes: room for tens of thousands of keys.
const MAX_FILE_BYTES: u64 = 4 << 20;
// Longest pre-shared key, in bytes: every version of OpenSSL accepts it.
const MAX_KEY_BYTES: usize = 256;
/// Cipher suites of TLS 1.2 for pre-shared keys with forward secrecy. TLS 1.3 negotiates the key
/// exchange apart from the cipher suite, so this list does not affect it.
pub(crate) const PSK_CIPHERS: &str = "ECDHE-PSK-CHACHA20-POLY1305:ECDHE-PSK-AES256-CBC-SHA384:ECDHE-PSK-AES128-CBC-SHA256:\
                           DHE-PSK-CHACHA20-POLY1305:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-AES128-GCM-SHA256";

/// Fault in credentials.
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

/// Restricts a context to TLS 1.2 and later (chapter "TLS versions" of the NBD protocol), without
/// renegotiation and without session resumption, because resumption keys would outlive the
/// connection.
///
/// # Errors
/// Fails if OpenSSL does.
pub(crate) fn harden(builder: &mut SslContextBuilder) -> Result<(), ErrorStack> {
    builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    builder.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_TICKET | SslOptions::NO_COMPRESSION);
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    Ok(())
}

/// Makes a store reject the certificates that ca-crl.pem in this directory revokes, if that file
/// exists.
///
/// # Errors
/// Fails if the file exists but is not a revocation list.
pub(crate) fn revoke_in(
    store: &mut X509StoreBuilder,
    directory: &Path,
    hint: &'static str,
) -> Result<(), CredentialsError> {
    let revoked = directory.join("ca-crl.pem");
    match read(&revoked, hint) {
        // Only a missing file is ignored. An unreadable one could hide revocations.
        Err(CredentialsError::File { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => revoke(store, &revoked),
    }
}

fn revoke(store: &mut X509StoreBuilder, path: &Path) -> Result<(), CredentialsError> {
    let invalid = |why: String| CredentialsError::Content { path: path.to_owned(), why };
    let name = path.to_str().ok_or_else(|| invalid("the path is not UTF-8".to_owned()))?;
    store
        .add_lookup(X509Lookup::file())?
        .load_crl_file(name, SslFiletype::PEM)
        .map_err(|error| invalid(format!("not a revocation list in PEM format: {error}")))?;
    store.set_flags(X509VerifyFlags::CRL_CHECK)?;
    Ok(())
}

fn read(path: &Path, hint: &'static str) -> Result<Vec<u8>, CredentialsError> {
    let mut bytes = Vec::new();
    regular_file::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| CredentialsError::File { path: path.to_owned(), source, hint })?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let why = format!("larger than {MAX_FILE_BYTES} bytes (is this the right file?)");
        return Err(CredentialsError::Content { path: path.to_owned(), why });
    }
    Ok(bytes)
}

/// Certificates of a file, at least one.
///
/// # Errors
/// Fails if the file holds none or cannot be read. `hint` states the purpose of the file.
pub fn certificates(path: &Path, hint: &'static str) -> Result<Vec<X509>, CredentialsError> {
    // A file that is not PEM counts as one without certificates: the message is the same.
    let certificates = X509::stack_from_pem(&read(path, hint)?).unwrap_or_default();
    if certificates.is_empty() {
        let why = "contains no certificate in PEM format".to_owned();
        return Err(CredentialsError::Content { path: path.to_owned(), why });
    }
    Ok(certificates)
}

/// Logs a warning if a certificate of this file has expired. Otherwise the only report would be
/// the rejection at a peer.
fn warn_if_expired(path: &Path, certificate: &X509) {
    let is_expired = Asn1Time::days_from_now(0).is_ok_and(|now| certificate.not_after() < now.as_ref());
    if is_expired {
        let (file, end) = (path.display(), certificate.not_after());
        tracing::warn!("{file}: expired at {end}: peers that verify it reject it (renew it)");
    }
}

/// Private key in a file.
///
/// # Errors
/// Fails if the file holds none, or an encrypted one, or cannot be read. `hint` states the purpose
/// of the file.
fn private_key(path: &Path, hint: &'static str) -> Result<PKey<Private>, CredentialsError> {
    let bytes = read(path, hint)?;
    // Without a callback OpenSSL would prompt for a passphrase on the terminal, and a daemon would
    // wait for it forever.
    PKey::private_key_from_pem_callback(&bytes, |_| Ok(0)).map_err(|_| CredentialsError::Content {
        path: path.to_owned(),
        why: "not an unencrypted private key in PEM format (`openssl pkey -in FILE -out FILE` decrypts one)"
            .to_owned(),
    })
}

/// Sets the certificate of this end of a connection, with its intermediates, and the private key.
///
/// `purpose` is that of the certificate, for messages.
///
/// # Errors
/// Fails if a file cannot be read or parsed, or if the key belongs to another certificate.
pub fn set_identity(
    builder: &mut SslContextBuilder,
    certificate: &Path,
    key: &Path,
    purpose: &'static str,
) -> Result<(), CredentialsError> {
    let mut chain = certificates(certificate, purpose)?.into_iter();
    let private = private_key(key, "the private key of that certificate")?;
    // Only the first certificate belongs to this end; all others are intermediates for its peer.
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

/// Pre-shared keys by user, from a file or from the file `keys.psk` in a directory.
///
/// # Errors
/// Fails if the file holds no key or an invalid line, or cannot be read.
pub(crate) fn pre_shared(path: &Path) -> Result<HashMap<Vec<u8>, Vec<u8>>, CredentialsError> {
    let path = if path.is_dir() { path.join("keys.psk") } else { path.to_owned() };
    let bytes = read(&path, "pre-shared keys, a line user:hexkey each; `psktool -u USER -p FILE` adds one")?;
    keys(&bytes).map_err(|why| CredentialsError::Content { path, why })
}

/// Parses the format of GnuTLS's psktool: `user:hexkey`; a user name with unusual bytes is `#hex`.
fn keys(file: &[u8]) -> Result<HashMap<Vec<u8>, Vec<u8>>, String> {
    let mut keys = HashMap::new();
    for (number, line) in file.split(|&byte| byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let (user, key) = key(line)
            .ok_or_else(|| format!("line {}: not user:hexkey with a key of 1 to 256 bytes", number + 1))?;
        // Two keys of one user: the wrong one might be used, so the file is rejected.
        if keys.insert(user, key).is_some() {
            return Err(format!("line {}: the user already has a key (remove one)", number + 1));
        }
    }
    if keys.is_empty() {
        return Err("contains no key (`psktool -u USER -p FILE` adds one)".to_owned());
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
            ("", "contains no key"),
        ] {
            let why = keys(file.as_bytes()).unwrap_err();
            assert!(why.contains(line), "{file:?}: {why}");
        }
        let long = format!("alice:{}", "00".repeat(257));
        assert!(keys(long.as_bytes()).is_err());
    }
}
