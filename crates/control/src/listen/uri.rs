//! NBD URIs in the form that clients accept (NetworkBlockDevice/nbd, doc/uri.md), for copying from
//! the log.

use std::{
    fmt,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use nbd::uri::encoded;
use settings::TlsConfig;

/// Authority of a URI: the address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UriAuthority {
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(String),
    /// Number of an inherited socket without a name.
    Unnamed(usize),
}

impl UriAuthority {
    pub(super) fn of_unix(path: &Path) -> Self {
        Self::Unix(path.to_owned())
    }

    /// Authority of a TCP port. The host is a name, an IPv4 address or an IPv6 address without
    /// brackets.
    pub(super) fn of_tcp(host: &str, port: u16) -> Self {
        Self::Tcp(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    }

    /// URI of an export; `nbds` if the server requires TLS.
    pub(crate) fn uri(&self, export: &str, tls: &TlsConfig) -> String {
        let scheme = if matches!(tls, TlsConfig::Required(_)) { "nbds" } else { "nbd" };
        let export = encoded(export.as_bytes());
        match self {
            Self::Unix(path) => {
                let path = encoded(path.as_os_str().as_bytes());
                format!("{scheme}+unix:///{export}?socket={path}")
            }
            Self::Tcp(authority) => format!("{scheme}://{authority}/{export}"),
            Self::Unnamed(index) => format!("{export} at inherited socket {index}"),
        }
    }
}

impl fmt::Display for UriAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(authority) => f.write_str(authority),
            Self::Unnamed(index) => write!(f, "inherited socket {index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use settings::TlsCredentialFiles;

    use super::*;

    #[test]
    fn uris_have_the_form_that_clients_accept() {
        let required = TlsConfig::Required(TlsCredentialFiles::PreShared("keys".into()));
        let unix = UriAuthority::of_unix(Path::new("/run/my disks/s&1.sock"));
        assert_eq!(unix.uri("vm1", &TlsConfig::Off), "nbd+unix:///vm1?socket=/run/my%20disks/s%261.sock");
        assert_eq!(unix.to_string(), "unix:/run/my disks/s&1.sock");
        assert_eq!(unix.uri("", &required), "nbds+unix:///?socket=/run/my%20disks/s%261.sock");
        assert_eq!(
            UriAuthority::of_tcp("localhost", 10809).uri("vm 1", &TlsConfig::Off),
            "nbd://localhost:10809/vm%201"
        );
        assert_eq!(UriAuthority::of_tcp("::1", 7).uri("é", &required), "nbds://[::1]:7/%C3%A9");
    }
}
