//! The measured object: an image, an export by its NBD URI (NetworkBlockDevice/nbd, doc/uri.md), or
//! a vhost-user-blk device by the path of its socket. Only parses the text.

use std::{fmt, str::FromStr};

use nbd::uri::Uri;
use settings::{ImageLocation, RuleError as _};

const VHOST_USER: &str = "vhost-user:";
/// Prefixes of a socket's path in options and logs of `weir serve`, rejected with advice.
const SERVE_PREFIXES: [&str; 3] = ["unix:", "vhost-user-blk:unix:", "vhost-user:unix:"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BenchTarget {
    Image(ImageLocation),
    /// Measured by a plain client, without weir's layers.
    Nbd(Box<Uri>),
    /// Path of the socket.
    VhostUser(String),
}

impl FromStr for BenchTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = SERVE_PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix)) {
            return Err(format!(
                "names a socket as `weir serve` does; write vhost-user:{path}, or \
                 nbd+unix:///EXPORT?socket={path}"
            ));
        }
        match text.strip_prefix(VHOST_USER) {
            Some("") => return Err("has no path for its socket; write vhost-user:PATH".to_owned()),
            Some(path) => {
                // Checks the length of a Unix socket's path.
                settings::parse_unix_socket(&format!("unix:{path}"))?;
                return Ok(Self::VhostUser(path.to_owned()));
            }
            None => {}
        }
        // A file may be named `a://b`; only schemes that begin with `nbd` are parsed as URIs.
        match text.split_once("://") {
            Some((scheme, _)) if scheme.starts_with("nbd") => {
                Uri::parse(text).map(|uri| Self::Nbd(Box::new(uri))).map_err(str::to_owned)
            }
            _ => text.parse().map(Self::Image).map_err(storage::InvalidValue::rule),
        }
    }
}

impl fmt::Display for BenchTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(image) => image.fmt(f),
            Self::Nbd(export) => export.fmt(f),
            Self::VhostUser(path) => write!(f, "{VHOST_USER}{path}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use nbd::{client::NbdEndpoint, uri::PORT};

    use super::*;

    fn export(text: &str) -> Result<(NbdEndpoint, String), String> {
        match text.parse()? {
            BenchTarget::Nbd(uri) => Ok((uri.server, uri.export)),
            other => panic!("{other} is no NBD export"),
        }
    }

    #[test]
    fn uris_printed_by_weir_serve_are_accepted() {
        let tcp = |host: &str, port, name: &str| {
            Ok((NbdEndpoint::Tcp { host: host.to_owned(), port }, name.to_owned()))
        };
        assert_eq!(export("nbd://localhost:10809/vm%201"), tcp("localhost", 10809, "vm 1"));
        assert_eq!(export("nbd://[::1]:7/%C3%A9"), tcp("::1", 7, "é"));
        assert_eq!(export("nbd://[::1]"), tcp("::1", PORT, ""));
        assert_eq!(export("nbd://host"), tcp("host", PORT, ""));
        assert_eq!(export("nbd://host/a/b"), tcp("host", PORT, "a/b"));
        let unix = Ok((NbdEndpoint::Unix("/run/my disks/s&1.sock".into()), "vm1".to_owned()));
        assert_eq!(export("nbd+unix:///vm1?socket=/run/my%20disks/s%261.sock"), unix);
    }

    #[test]
    fn text_without_a_uri_scheme_is_an_image() {
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
    fn vhost_user_socket_is_a_path() {
        for path in ["vm1.sock", "/run/my vm:1.sock", "nbd://a"] {
            let text = format!("vhost-user:{path}");
            let target: BenchTarget = text.parse().unwrap();
            assert_eq!((target.to_string(), target), (text, BenchTarget::VhostUser(path.to_owned())));
        }
        assert!("vhost-user:".parse::<BenchTarget>().unwrap_err().starts_with("has no path"));
        let long = format!("vhost-user:{}", "a".repeat(200)).parse::<BenchTarget>().unwrap_err();
        assert!(long.starts_with("is 200 bytes long; a Unix socket's path has "), "{long}");
        for text in ["unix:vm1.sock", "vhost-user:unix:vm1.sock", "vhost-user-blk:unix:vm1.sock"] {
            let error = text.parse::<BenchTarget>().unwrap_err();
            assert!(error.contains("; write vhost-user:vm1.sock, or "), "{error}");
        }
    }

    #[test]
    fn invalid_uri_error_suggests_the_form() {
        for (text, why) in [
            ("nbds://host/a?color=red", "has an unknown parameter"),
            ("nbd+vsock:///a", "is an unknown kind of NBD URI"),
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
