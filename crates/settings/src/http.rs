//! Address and access of the page. Checks only the settings.

use std::{net::IpAddr, path::PathBuf};

use super::{ListenAddress, TlsConfig, TlsCredentialFiles};

/// Settings of the page and its API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// Address to listen on.
    pub address: ListenAddress,
    /// File of the token that authorizes changes; `None` makes the page read-only.
    pub token_file: Option<PathBuf>,
    /// Host names for the page besides its addresses and `localhost`; lower case.
    pub names: Vec<String>,
}

/// Longest name of a host (RFC 1035, section 2.3.4).
const MAX_NAME_BYTES: usize = 253;

/// Parses a host name of a URL and converts it to lower case.
///
/// # Errors
/// Fails if it is not a host name.
pub fn parse_http_name(text: &str) -> Result<String, String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    match text {
        "" => Err("is empty (write a name of this host, such as weir.example.org)".to_owned()),
        _ if text.len() > MAX_NAME_BYTES || !text.bytes().all(is_allowed) => {
            Err("is not a host name (write one without a port, such as weir.example.org)".to_owned())
        }
        _ => Ok(text.to_ascii_lowercase()),
    }
}

impl HttpConfig {
    /// True if the text shows that only this host can reach the address.
    pub fn is_local(&self) -> bool {
        match &self.address {
            ListenAddress::Unix(_) => true,
            ListenAddress::Tcp { host, .. } => {
                host.eq_ignore_ascii_case("localhost")
                    // `to_canonical` also recognizes IPv4-mapped loopback addresses.
                    || host.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_loopback())
            }
        }
    }

    /// True if connections are encrypted: over TCP, if there are certificates.
    pub fn is_encrypted(&self, tls: &TlsConfig) -> bool {
        let (TlsConfig::On(credentials) | TlsConfig::Required(credentials)) = tls else { return false };
        matches!(credentials, TlsCredentialFiles::Certificates { .. })
            && matches!(self.address, ListenAddress::Tcp { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_names_of_hosts() {
        assert_eq!(parse_http_name("Weir.Example.org").unwrap(), "weir.example.org");
        for wrong in ["", "weir:80", "http://weir", "a b", "wëir", &"a".repeat(254)] {
            assert!(parse_http_name(wrong).is_err(), "{wrong}");
        }
    }
}
