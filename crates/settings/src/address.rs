//! Addresses of servers: `unix:PATH` or `HOST:PORT`. Checks only the text.

use std::{
    fmt,
    net::Ipv6Addr,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Longest path of a Unix socket in bytes: `sun_path` of unix(7) without the terminating zero.
const MAX_SOCKET_PATH: usize = 107;

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenAddress {
    /// A Unix socket with this path.
    Unix(PathBuf),
    /// TCP on every address that the host name resolves to. Port 0 is any free port.
    Tcp {
        /// A name, an IPv4 address, or an IPv6 address without its brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

impl ListenAddress {
    /// Default address: NBD's registered port on localhost.
    pub fn nbd_default() -> Self {
        Self::Tcp { host: "localhost".to_owned(), port: 10809 }
    }

    /// Resolves the path of a Unix socket against this directory.
    ///
    /// # Errors
    /// Fails if the path is then too long, or not UTF-8.
    pub(crate) fn relative_to(self, directory: &Path) -> Result<Self, String> {
        match self {
            Self::Unix(path) => resolve_socket(directory, &path).map(Self::Unix),
            address @ Self::Tcp { .. } => Ok(address),
        }
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return check_socket_path(path).map(Self::Unix);
        }
        let usage = "is not an address; write unix:PATH, HOST:PORT or [IPv6]:PORT";
        // Likely mistakes get a specific message before the general one.
        if is_path(text) {
            return Err(format!("is a path without unix: before it (write unix:{text})"));
        }
        let (host, port) =
            text.rsplit_once(':').ok_or_else(|| missing_port_hint(text).unwrap_or(usage.to_owned()))?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or(usage)?,
            // Without brackets the last group would be taken for the port.
            None if host.parse::<Ipv6Addr>().is_ok() => {
                return Err("is an IPv6 address without brackets; write [::1]:10809".to_owned());
            }
            None => host,
        };
        if host.is_empty() {
            return Err("has no host; write localhost, or [::] for every address of this machine".to_owned());
        }
        // Any further colon belongs to an IPv6 address in brackets, possibly with a zone.
        if host.contains(['/', '\0'])
            || (host.contains(':') && !text.starts_with('['))
            || host.contains(char::is_whitespace)
        {
            return Err(usage.to_owned());
        }
        // `fd:NAME` looks like a host named fd with a port.
        if host == "fd" && !port.starts_with(|first: char| first.is_ascii_digit()) {
            return Err("is for vhost-user-blk alone; NBD uses unix:PATH or HOST:PORT, or inherited \
                        sockets by default"
                .to_owned());
        }
        // `parse` alone would accept a leading plus sign.
        let plain = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let port = port.parse().ok().filter(|_| plain);
        let port = port.ok_or("has no port; a port is a number from 0 (any free port) to 65535")?;
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

/// Error for a host without a port, or a port without a host.
fn missing_port_hint(text: &str) -> Option<String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(format!("has no host (write localhost:{text}, or [::]:{text} for every address)"));
    }
    // Only plausible host names, or the advice would be nonsense.
    let is_host = text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
    is_host.then(|| format!("has no port (write {text}:PORT, such as {text}:10809, or unix:PATH)"))
}

fn check_socket_path(path: &str) -> Result<PathBuf, String> {
    if path.is_empty() {
        return Err("has no path; write unix:PATH".to_owned());
    }
    if path.contains('\0') {
        return Err("has a NUL byte (remove it)".to_owned());
    }
    if path.len() > MAX_SOCKET_PATH {
        let length = path.len();
        return Err(format!(
            "is {length} bytes long; a Unix socket's path has at most {MAX_SOCKET_PATH} (use a shorter one)"
        ));
    }
    Ok(PathBuf::from(path))
}

/// True if a text that is not an address is certainly a path.
fn is_path(text: &str) -> bool {
    text.starts_with(['/', '.']) && text.contains('/') && !text.contains('\0')
}

/// Resolves the path of a Unix socket against this directory.
///
/// # Errors
/// Fails if the whole path is too long, or not UTF-8.
pub(crate) fn resolve_socket(directory: &Path, path: &Path) -> Result<PathBuf, String> {
    let path = directory.join(path);
    check_socket_path(path.to_str().ok_or("the directory of the config file is not UTF-8 (move it)")?)
}

/// Parses `unix:PATH`.
pub fn parse_unix_socket(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:") {
        Some(path) => check_socket_path(path),
        None if is_path(text) => Err(format!("is a path without unix: before it (write unix:{text})")),
        None => Err("is not a Unix socket; write unix:PATH".to_owned()),
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in
            ["unix:/run/weir.sock", "unix:relative", "localhost:10809", "[::1]:10809", "0.0.0.0:0", "[::]:1"]
        {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), text);
        }
        assert_eq!("[::1]:7".parse(), Ok(ListenAddress::Tcp { host: "::1".to_owned(), port: 7 }));
        assert_eq!(ListenAddress::nbd_default().to_string(), "localhost:10809");
    }

    #[test]
    fn a_bare_path_gets_a_hint_to_unix() {
        for path in ["/x.sock", "./x.sock", "../run/x.sock"] {
            let rule = format!("is a path without unix: before it (write unix:{path})");
            assert_eq!(path.parse::<ListenAddress>(), Err(rule.clone()));
            assert_eq!(parse_unix_socket(path), Err(rule));
        }
    }

    #[test]
    fn invalid_addresses_name_their_rule() {
        let check = |text: &str, expect: &str| {
            assert_eq!(text.parse::<ListenAddress>().unwrap_err(), expect, "{text}");
        };
        let usage = "is not an address; write unix:PATH, HOST:PORT or [IPv6]:PORT";
        let port = "has no port; a port is a number from 0 (any free port) to 65535";
        check("", usage);
        check("localhost", "has no port (write localhost:PORT, such as localhost:10809, or unix:PATH)");
        check("10809", "has no host (write localhost:10809, or [::]:10809 for every address)");
        check("[::1:10809", usage);
        check("tcp://host:1", usage);
        check("::1:10809", "is an IPv6 address without brackets; write [::1]:10809");
        check(":10809", "has no host; write localhost, or [::] for every address of this machine");
        check("host:", port);
        assert!(
            "fd:nbd"
                .parse::<ListenAddress>()
                .unwrap_err()
                .starts_with("is for vhost-user-blk alone; NBD uses ")
        );
        check("host:+1", port);
        check("host:65536", port);
        check("unix:", "has no path; write unix:PATH");
        let long = format!("unix:/{}", "x".repeat(107));
        check(&long, "is 108 bytes long; a Unix socket's path has at most 107 (use a shorter one)");
    }
}
