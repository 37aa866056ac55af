//! What is measured: an image, an export by its NBD URI (NetworkBlockDevice/nbd, doc/uri.md), or
//! one by the path of its vhost-user-blk socket.
//! Only the text is judged here.

use std::{ffi::OsString, fmt, os::unix::ffi::OsStringExt as _, str::FromStr};

use export::nbd::{client::Endpoint, proto};
use settings::{Image, Rule as _};

const PORT: u16 = 10809;
const VHOST_USER: &str = "vhost-user:";
/// Before a socket's path, in options and logs of `weir serve`.
const OF_SERVE: [&str; 3] = ["unix:", "vhost-user-blk:unix:", "vhost-user:unix:"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BenchTarget {
    Image(Image),
    Nbd(Export),
    /// A socket's path.
    VhostUser(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    uri: String,
    pub(super) server: Endpoint,
    pub(super) name: String,
}

impl FromStr for BenchTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = OF_SERVE.iter().find_map(|prefix| text.strip_prefix(prefix)) {
            return Err(format!(
                "names a socket as `weir serve` does; write vhost-user:{path}, or nbd+unix:///EXPORT?socket={path}"
            ));
        }
        match text.strip_prefix(VHOST_USER) {
            Some("") => return Err("has no path for its socket; write vhost-user:PATH".to_owned()),
            Some(path) => {
                // It has a bound.
                settings::socket(&format!("unix:{path}"))?;
                return Ok(Self::VhostUser(path.to_owned()));
            }
            None => {}
        }
        match text.split_once("://") {
            Some((scheme, rest)) if scheme.starts_with("nbd") => {
                Export::read(text, scheme, rest).map(Self::Nbd)
            }
            _ => text.parse().map(Self::Image).map_err(block::storage::InvalidValue::rule),
        }
    }
}

impl fmt::Display for BenchTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(image) => image.fmt(f),
            Self::Nbd(export) => f.write_str(&export.uri),
            Self::VhostUser(path) => write!(f, "{VHOST_USER}{path}"),
        }
    }
}

impl Export {
    fn read(uri: &str, scheme: &str, rest: &str) -> Result<Self, String> {
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let name =
            String::from_utf8(decoded(path)?).ok().filter(|name| name.len() <= proto::MAX_STRING_BYTES);
        let name = name.ok_or("has an export's name that is not UTF-8, or longer than 4096 bytes")?;
        let server = match scheme {
            "nbd" if query.is_some() => return Err("takes no parameters after a `?`".to_owned()),
            "nbd" => tcp(authority)?,
            "nbd+unix" if !authority.is_empty() => {
                return Err("names a host; write nbd+unix:///EXPORT?socket=PATH".to_owned());
            }
            "nbd+unix" => unix(query)?,
            "nbds" | "nbds+unix" => return Err("asks for TLS, which this client does not speak".to_owned()),
            _ => return Err("is a kind of NBD URI that is not known; write nbd:// or nbd+unix://".to_owned()),
        };
        Ok(Self { uri: uri.to_owned(), server, name })
    }
}

fn unix(query: Option<&str>) -> Result<Endpoint, String> {
    let socket = query.and_then(|query| query.strip_prefix("socket=")).filter(|path| !path.contains('&'));
    let socket = socket.ok_or("takes one parameter, the socket; write nbd+unix:///EXPORT?socket=PATH")?;
    let path = decoded(socket)?;
    if path.is_empty() || path.contains(&0) {
        return Err("has no path for its socket; write nbd+unix:///EXPORT?socket=PATH".to_owned());
    }
    Ok(Endpoint::Unix(OsString::from_vec(path).into()))
}

fn tcp(authority: &str) -> Result<Endpoint, String> {
    let usage = "has no host; write nbd://HOST/EXPORT, nbd://HOST:PORT/EXPORT or nbd://[IPv6]:PORT/EXPORT";
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
    Ok(Endpoint::Tcp { host, port: port.ok_or("has a port that is not a number from 1 to 65535")? })
}

/// Undoes percent-encoding (RFC 3986, section 2.1).
fn decoded(text: &str) -> Result<Vec<u8>, String> {
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

    fn export(text: &str) -> Result<(Endpoint, String), String> {
        match text.parse()? {
            BenchTarget::Nbd(export) => Ok((export.server, export.name)),
            other => panic!("{other} is no NBD export"),
        }
    }

    #[test]
    fn uris_that_weir_serve_prints_are_understood() {
        let tcp = |host: &str, port, name: &str| {
            Ok((Endpoint::Tcp { host: host.to_owned(), port }, name.to_owned()))
        };
        assert_eq!(export("nbd://localhost:10809/vm%201"), tcp("localhost", 10809, "vm 1"));
        assert_eq!(export("nbd://[::1]:7/%C3%A9"), tcp("::1", 7, "é"));
        assert_eq!(export("nbd://[::1]"), tcp("::1", PORT, ""));
        assert_eq!(export("nbd://host"), tcp("host", PORT, ""));
        assert_eq!(export("nbd://host/a/b"), tcp("host", PORT, "a/b"));
        let unix = Ok((Endpoint::Unix("/run/my disks/s&1.sock".into()), "vm1".to_owned()));
        assert_eq!(export("nbd+unix:///vm1?socket=/run/my%20disks/s%261.sock"), unix);
    }

    #[test]
    fn what_is_no_uri_is_an_image() {
        for text in [
            "vm1.raw",
            "memory:1G",
            "file:nbd://a",
            "/a://b",
            "./vhost-user:a",
            "file:vhost-user:a",
            "./unix:a",
        ] {
            assert!(matches!(text.parse(), Ok(BenchTarget::Image(_))), "{text}");
            assert!(!text.parse::<BenchTarget>().unwrap().to_string().is_empty());
        }
    }

    #[test]
    fn a_socket_of_vhost_user_is_named_by_its_path() {
        for path in ["vm1.sock", "/run/my vm:1.sock", "nbd://a"] {
            let text = format!("vhost-user:{path}");
            let target: BenchTarget = text.parse().unwrap();
            assert_eq!((target.to_string(), target), (text, BenchTarget::VhostUser(path.to_owned())));
        }
        assert!("vhost-user:".parse::<BenchTarget>().unwrap_err().starts_with("has no path"));
        let long = format!("vhost-user:{}", "a".repeat(200)).parse::<BenchTarget>().unwrap_err();
        assert!(long.starts_with("has 200 bytes; a Unix socket's path has "), "{long}");
        for text in ["unix:vm1.sock", "vhost-user:unix:vm1.sock", "vhost-user-blk:unix:vm1.sock"] {
            let error = text.parse::<BenchTarget>().unwrap_err();
            assert!(error.contains("; write vhost-user:vm1.sock, or "), "{error}");
        }
    }

    #[test]
    fn a_wrong_uri_says_how_to_write_it() {
        for (text, why) in [
            ("nbds://host/a", "asks for TLS"),
            ("nbds+unix:///a?socket=b", "asks for TLS"),
            ("nbd+vsock:///a", "is a kind of NBD URI"),
            ("nbd://", "has no host"),
            ("nbd:///a", "has no host"),
            ("nbd://me@host", "has no host"),
            ("nbd://[::1", "has no host"),
            ("nbd://[::1]7", "has no host"),
            ("nbd://host:", "has a port"),
            ("nbd://host:0", "has a port"),
            ("nbd://host:65536", "has a port"),
            ("nbd://host:+1", "has a port"),
            ("nbd://host/a?socket=b", "takes no parameters"),
            ("nbd+unix:///a", "takes one parameter"),
            ("nbd+unix:///a?socket=", "has no path"),
            ("nbd+unix:///a?socket=b&tls-certificates=c", "takes one parameter"),
            ("nbd+unix://host/a?socket=b", "names a host"),
            ("nbd://host/%f", "has a %"),
            ("nbd://host/%zz", "has a %"),
            ("nbd://host/%ff", "has an export's name"),
        ] {
            let error = export(text).unwrap_err();
            assert!(error.starts_with(why), "{text}: {error}");
        }
    }
}
