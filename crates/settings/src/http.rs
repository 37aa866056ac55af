//! Where the page is, and under which conditions. Only the settings are judged here.

use std::{net::IpAddr, path::PathBuf};

use super::{Address, Credentials, Said, Tls, Wrong};

/// The page and the JSON beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http {
    /// Where.
    pub address: Address,
    /// Holds what a client must send to change anything; `None`: nobody changes anything.
    pub token_file: Option<PathBuf>,
    /// What browsers may call this host, beside its addresses and `localhost`; lower case.
    pub names: Vec<String>,
}

/// Longest name of a host (RFC 1035, section 2.3.4).
const MOST_NAME: usize = 253;

/// The name of a host in a URL, in lower case.
///
/// # Errors
/// If it is none.
pub fn http_name(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    match text {
        "" => Err("is empty (write a name of this host, such as weir.example.org)".to_owned()),
        _ if text.len() > MOST_NAME || !text.bytes().all(is_plain) => {
            Err("is no name of a host (write one without a port, such as weir.example.org)".to_owned())
        }
        _ => Ok(text.to_ascii_lowercase()),
    }
}

impl Http {
    /// Whether the address is reached from this host alone, as far as its text tells.
    pub fn is_local(&self) -> bool {
        match &self.address {
            Address::Unix(_) => true,
            Address::Tcp { host, .. } => {
                host.eq_ignore_ascii_case("localhost")
                    || host.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_loopback())
            }
        }
    }

    /// Whether connections are encrypted: over TCP, wherever there are certificates.
    pub fn is_encrypted(&self, tls: &Tls) -> bool {
        let (Tls::On(credentials) | Tls::Required(credentials)) = tls else { return false };
        matches!(credentials, Credentials::Certificates { .. }) && matches!(self.address, Address::Tcp { .. })
    }
}

/// What the three settings add up to.
///
/// # Errors
/// Settings that are not used, and a token that anybody on the way could read.
pub(crate) fn check(
    address: Option<Said<Address>>,
    token_file: Option<Said<PathBuf>>,
    names: Vec<Said<String>>,
    tls: &Tls,
) -> Result<Option<Http>, Wrong> {
    let Some(address) = address else {
        let rule = "is not used, because there is no page (set http too)";
        let unused =
            token_file.map(|said| said.place).or_else(|| names.into_iter().next().map(|said| said.place));
        return unused.map_or(Ok(None), |place| Err(place.wrong(rule)));
    };
    let http = Http {
        address: address.value,
        token_file: token_file.as_ref().map(|said| said.value.clone()),
        names: names.into_iter().map(|said| said.value).collect(),
    };
    if let Some(said) = token_file
        && !http.is_local()
        && !http.is_encrypted(tls)
    {
        let rule = format!(
            "would be sent over the network in plain text to {} (set tls and tls-certificates, or use an address of this host alone)",
            http.address
        );
        return Err(said.place.wrong(rule));
    }
    Ok(Some(http))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Place;

    fn said<T>(value: T) -> Said<T> {
        Said::new(value, Place::new("--http-token-file"))
    }

    fn with_token(address: &str, tls: &Tls) -> Result<Option<Http>, String> {
        let address = said(address.parse().unwrap());
        check(Some(address), Some(said("token".into())), Vec::new(), tls).map_err(|wrong| wrong.to_string())
    }

    #[test]
    fn a_token_is_never_sent_in_plain_text_over_a_network() {
        let certificates = Credentials::Certificates { directory: "tls".into(), verify_peer: false };
        let keys = Tls::On(Credentials::PreShared("keys.psk".into()));
        for local in [
            "unix:/run/page.sock",
            "localhost:80",
            "127.0.0.1:80",
            "127.8.9.1:80",
            "[::1]:80",
            "[::ffff:127.0.0.1]:80",
        ] {
            assert!(with_token(local, &Tls::Off).is_ok(), "{local}");
        }
        for other in ["0.0.0.0:80", "[::]:80", "192.0.2.1:80", "host:80", "localhost.example.org:80"] {
            assert!(with_token(other, &Tls::On(certificates.clone())).is_ok(), "{other}");
            for plain in [&Tls::Off, &keys] {
                let error = with_token(other, plain).unwrap_err();
                assert!(error.contains("would be sent over the network in plain text"), "{error}");
            }
        }
    }

    #[test]
    fn nothing_is_said_of_a_page_that_is_not_there() {
        let error = check(None, None, vec![said("weir".to_owned())], &Tls::Off).unwrap_err().to_string();
        assert_eq!(error, "--http-token-file: is not used, because there is no page (set http too)");
        assert_eq!(check(None, None, Vec::new(), &Tls::Off).unwrap(), None);
    }

    #[test]
    fn names_are_names_of_hosts() {
        assert_eq!(http_name("Weir.Example.org").unwrap(), "weir.example.org");
        for wrong in ["", "weir:80", "http://weir", "a b", "wëir", &"a".repeat(254)] {
            assert!(http_name(wrong).is_err(), "{wrong}");
        }
    }
}
