//! NBD URIs (NetworkBlockDevice/nbd, doc/uri.md), with libnbd's parameters for TLS:
//!
//! ```text
//!   nbd://HOST[:PORT]/EXPORT                 nbd+unix:///EXPORT?socket=PATH
//!   nbds://[USER@]HOST[:PORT]/EXPORT[?…]     nbds+unix://[USER@]/EXPORT?socket=PATH[&…]
//!       tls-certificates=DIR   tls-hostname=NAME   tls-verify-peer=false   tls-psk-file=FILE
//! ```
//!
//! Parses only the text: resolves no name and opens no file. An unknown parameter is an error.

use std::{
    ffi::OsString,
    fmt,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
};

use super::{client::NbdEndpoint, proto};

use tls::{CredentialsError, TlsClient};

/// Default port (registered with IANA).
pub const PORT: u16 = 10809;

/// Location of an export, and the TLS settings of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    text: String,
    /// The server.
    pub server: NbdEndpoint,
    /// Name of the export.
    pub export: String,
    /// TLS settings; `None` without TLS.
    pub tls: Option<TlsChoice>,
}

/// TLS settings of a URI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsChoice {
    /// User of the pre-shared key.
    pub user: Option<String>,
    /// Directory of X.509 files.
    pub certificates: Option<PathBuf>,
    /// File of pre-shared keys.
    pub psk_file: Option<PathBuf>,
    /// Name that the server's certificate must have, if it is not the host's.
    pub hostname: Option<String>,
    /// True if the server's certificate is not verified.
    pub accepts_any_certificate: bool,
}

impl Uri {
    /// True if a text looks like an NBD URI, valid or not.
    pub fn looks_like_uri(text: &str) -> bool {
        ["nbd:", "nbds:", "nbd+", "nbds+"].iter().any(|scheme| text.starts_with(scheme))
    }

    /// Parses a URI.
    ///
    /// # Errors
    /// The violated rule, as the continuation of a message that begins with the text.
    pub fn parse(text: &str) -> Result<Self, UriRule> {
        let unknown_scheme = "is an unknown kind of NBD URI; write nbd:// or nbd+unix://";
        // Without a slash it is QEMU's legacy syntax.
        if let Some(rest) = text.strip_prefix("nbd:").filter(|rest| !rest.starts_with('/')) {
            return Self::parse(&from_qemu_syntax(rest).ok_or(unknown_scheme)?);
        }
        let (scheme, rest) = text.split_once("://").ok_or(unknown_scheme)?;
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let name =
            String::from_utf8(decoded(path)?).ok().filter(|name| name.len() <= proto::MAX_STRING_BYTES);
        let export = name.ok_or("has an export's name that is not UTF-8, or longer than 4096 bytes")?;
        let is_secret = matches!(scheme, "nbds" | "nbds+unix");
        // Only `nbds` URIs have a user: that of the pre-shared key.
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, host)) if is_secret => (Some(text_of(user)?), host),
            _ => (None, authority),
        };
        let (mut socket, mut tls) = (None, TlsChoice { user, ..TlsChoice::default() });
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match key {
                "socket" if scheme.ends_with("+unix") => socket = Some(value),
                "tls-certificates" if is_secret => tls.certificates = Some(path_of(value)?),
                "tls-psk-file" if is_secret => tls.psk_file = Some(path_of(value)?),
                "tls-hostname" if is_secret => tls.hostname = Some(text_of(value)?),
                "tls-verify-peer" if is_secret => tls.accepts_any_certificate = !parse_bool(value)?,
                _ if scheme == "nbd" => return Err("takes no parameters after a `?`"),
                _ if scheme == "nbd+unix" => return Err(ONE_SOCKET),
                _ => return Err(PARAMETERS),
            }
        }
        let server = match scheme {
            "nbd" | "nbds" => tcp(authority)?,
            "nbd+unix" | "nbds+unix" if !authority.is_empty() => {
                return Err("names a host; write nbd+unix:///EXPORT?socket=PATH");
            }
            "nbd+unix" | "nbds+unix" => unix(socket)?,
            _ => return Err(unknown_scheme),
        };
        if tls.certificates.is_some() && tls.psk_file.is_some() {
            return Err("has certificates and pre-shared keys; give one");
        }
        Ok(Self { text: text.to_owned(), server, export, tls: is_secret.then_some(tls) })
    }

    /// Resolves relative file names against `directory`.
    #[must_use]
    pub fn relative_to(self, directory: &Path) -> Self {
        const FILES: [&str; 3] = ["socket", "tls-certificates", "tls-psk-file"];
        let Some((before, query)) = self.text.split_once('?') else { return self };
        // Only relative paths of these keys change; all other text is kept.
        let resolve = |pair: &str| {
            let (key, value) = pair.split_once('=')?;
            let path = path_of(value).ok().filter(|path| path.is_relative() && FILES.contains(&key))?;
            Some(format!("{key}={}", encoded(directory.join(path).as_os_str().as_bytes())))
        };
        let pairs: Vec<_> =
            query.split('&').map(|pair| resolve(pair).unwrap_or_else(|| pair.to_owned())).collect();
        Self::parse(&format!("{before}?{}", pairs.join("&"))).unwrap_or(self)
    }

    /// Reads the keys and certificates that it names; `None` without TLS. Blocks.
    ///
    /// # Errors
    /// The file that is wrong, and why.
    pub fn credentials(&self) -> Result<Option<TlsClient>, CredentialsError> {
        let Some(tls) = &self.tls else { return Ok(None) };
        if let Some(file) = &tls.psk_file {
            return TlsClient::psk(file, tls.user.as_deref()).map(Some);
        }
        let server_name = match &self.server {
            // A Unix socket has no host name to verify.
            NbdEndpoint::Unix(_) => "localhost",
            NbdEndpoint::Tcp { host, .. } => host,
        };
        let host = tls.hostname.clone().unwrap_or_else(|| server_name.to_owned());
        TlsClient::x509(tls.certificates.as_deref(), (!tls.accepts_any_certificate).then_some(host)).map(Some)
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Converts QEMU's legacy syntax after `nbd:` to a URI: `HOST:PORT` or `unix:PATH`, optionally
/// followed by `:exportname=NAME`.
fn from_qemu_syntax(text: &str) -> Option<String> {
    let (server, export) = text.split_once(":exportname=").unwrap_or((text, ""));
    let export = encoded(export.as_bytes());
    if let Some(path) = server.strip_prefix("unix:") {
        return Some(format!("nbd+unix:///{export}?socket={}", encoded(path.as_bytes())));
    }
    let (host, port) = server.rsplit_once(':')?;
    let is_host = !host.is_empty() && !host.contains(['/', '?', '@', '%']);
    (is_host && port.parse::<u16>().is_ok()).then(|| format!("nbd://{host}:{port}/{export}"))
}

/// A violated rule, as the continuation of a message that begins with the text.
type UriRule = &'static str;

const PARAMETERS: UriRule = "has an unknown parameter; valid are socket (nbds+unix), \
                             tls-certificates, tls-hostname, tls-verify-peer and tls-psk-file";
const ONE_SOCKET: &str = "takes one parameter, the socket; write nbd+unix:///EXPORT?socket=PATH";

fn unix(socket: Option<&str>) -> Result<NbdEndpoint, UriRule> {
    let path = decoded(socket.ok_or(ONE_SOCKET)?)?;
    if path.is_empty() || path.contains(&0) {
        return Err("has no path for its socket; write nbd+unix:///EXPORT?socket=PATH");
    }
    Ok(NbdEndpoint::Unix(OsString::from_vec(path).into()))
}

fn tcp(authority: &str) -> Result<NbdEndpoint, UriRule> {
    let usage = "has no host; write nbd://HOST/EXPORT, nbd://HOST:PORT/EXPORT or nbd://[IPv6]:PORT/EXPORT";
    // An IPv6 address contains colons, so it is in brackets.
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or(usage)?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':').ok_or(usage)?) })
        }
        None => authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
    };
    let host = String::from_utf8(decoded(host)?).ok();
    let host = host.filter(|host| !host.is_empty() && !host.contains(['@', '/', '\0'])).ok_or(usage)?;
    let plain = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse().ok())?;
    let port = port.map_or(Some(PORT), plain).filter(|&port| port > 0);
    Ok(NbdEndpoint::Tcp { host, port: port.ok_or("has a port that is not a number from 1 to 65535")? })
}

fn text_of(encoded: &str) -> Result<String, UriRule> {
    let text = String::from_utf8(decoded(encoded)?).ok().filter(|text| !text.is_empty());
    text.ok_or("has an empty name, or one that is not UTF-8")
}

fn path_of(encoded: &str) -> Result<PathBuf, UriRule> {
    let path = decoded(encoded)?;
    if path.is_empty() || path.contains(&0) {
        return Err("has an empty path");
    }
    Ok(OsString::from_vec(path).into())
}

fn parse_bool(text: &str) -> Result<bool, UriRule> {
    match text {
        "true" | "on" | "1" | "yes" => Ok(true),
        "false" | "off" | "0" | "no" => Ok(false),
        _ => Err("has a tls-verify-peer that is neither true nor false"),
    }
}

/// URI of an export of a server at a TCP port; the host may be an IPv6 address.
pub fn inet_uri(host: &str, port: &str, export: &str) -> String {
    let host = if host.contains(':') { format!("[{host}]") } else { encoded(host.as_bytes()) };
    format!("nbd://{host}:{}/{}", encoded(port.as_bytes()), encoded(export.as_bytes()))
}

/// URI of an export of a server at a Unix socket.
pub fn unix_uri(path: &str, export: &str) -> String {
    format!("nbd+unix:///{}?socket={}", encoded(export.as_bytes()), encoded(path.as_bytes()))
}

/// Percent-encodes everything but unreserved characters and the slash (RFC 3986, sections 2.1 and
/// 2.3), for any part of a URI.
pub fn encoded(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// Decodes percent-encoding (RFC 3986, section 2.1).
fn decoded(text: &str) -> Result<Vec<u8>, UriRule> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let value = |digit: u8| char::from(digit).to_digit(16);
        let code = match tail {
            [high, low, after @ ..] => {
                rest = after;
                value(*high).zip(value(*low)).and_then(|(high, low)| u8::try_from(16 * high + low).ok())
            }
            _ => None,
        };
        bytes.push(code.ok_or("has a % that two hexadecimal digits do not follow")?);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scheme_is_parsed() {
        let uri = Uri::parse("nbds://alice@h:7/a%20b?tls-psk-file=/k%2F1&tls-verify-peer=false").unwrap();
        let tls = uri.tls.clone().expect("it is nbds");
        assert_eq!(
            (tls.user.as_deref(), tls.psk_file, tls.accepts_any_certificate),
            (Some("alice"), Some("/k/1".into()), true)
        );
        assert_eq!(
            (uri.server, uri.export.as_str()),
            (NbdEndpoint::Tcp { host: "h".into(), port: 7 }, "a b")
        );
        let uri = Uri::parse("nbds+unix:///?tls-certificates=/pki&socket=/s&tls-hostname=vm").unwrap();
        let tls = uri.tls.expect("it is nbds");
        assert_eq!((tls.certificates, tls.hostname.as_deref()), (Some("/pki".into()), Some("vm")));
        assert_eq!((uri.server, uri.export.as_str()), (NbdEndpoint::Unix("/s".into()), ""));
        assert_eq!(
            Uri::parse("nbd://[::1]").unwrap().server,
            NbdEndpoint::Tcp { host: "::1".into(), port: PORT }
        );
    }

    #[test]
    fn qemu_legacy_syntax_is_parsed() {
        for (text, uri) in [
            ("nbd:localhost:10809", "nbd://localhost:10809/"),
            ("nbd:[::1]:7:exportname=a b", "nbd://[::1]:7/a%20b"),
            ("nbd:unix:/run/s", "nbd+unix:///?socket=/run/s"),
            ("nbd:unix:/run/a b:exportname=x://y", "nbd+unix:///x%3A//y?socket=/run/a%20b"),
        ] {
            assert_eq!(Uri::parse(text), Uri::parse(uri), "{text}");
            assert!(Uri::parse(text).is_ok(), "{text}");
        }
        assert!(Uri::parse("nbd:unix:").is_err());
    }

    #[test]
    fn relative_files_resolve_against_a_directory() {
        let resolved = |text| Uri::parse(text).unwrap().relative_to(Path::new("/my dir&")).to_string();
        assert_eq!(resolved("nbd+unix:///x?socket=a%20b/s"), "nbd+unix:///x?socket=/my%20dir%26/a%20b/s");
        assert_eq!(
            resolved("nbds+unix:///x?socket=/s&tls-certificates=pki&tls-hostname=vm"),
            "nbds+unix:///x?socket=/s&tls-certificates=/my%20dir%26/pki&tls-hostname=vm"
        );
        for unchanged in ["nbd://h/x", "nbd+unix:///x?socket=/a+b"] {
            assert_eq!(resolved(unchanged), unchanged);
        }
    }

    #[test]
    fn errors_name_the_violated_rule() {
        for (text, why) in [
            ("nbd:localhost", "is an unknown kind of NBD URI"),
            ("nbd:localhost:x", "is an unknown kind of NBD URI"),
            ("nbd:a/b:10809", "is an unknown kind of NBD URI"),
            ("nbd+vsock://1/x", "is an unknown kind of NBD URI"),
            ("nbd:///x", "has no host"),
            ("nbd://u@h/x", "has no host"),
            ("nbd://h/x?tls-psk-file=/k", "takes no parameters"),
            ("nbd+unix:///x", "takes one parameter, the socket"),
            ("nbds+unix:///x?socket=/s&color=red", "an unknown parameter"),
            ("nbds://h/?tls-psk-file=/k&tls-certificates=/d", "give one"),
            ("nbds://h/?tls-verify-peer=maybe", "neither true nor false"),
            ("nbds://h/?tls-certificates=", "has an empty path"),
            ("nbd://h/%zz", "has a %"),
        ] {
            let error = Uri::parse(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
