//! Encryption of connections, as a server offers it. Only the settings are judged here.

use std::{path::PathBuf, str::FromStr};

use super::{Place, Said, Wrong};

/// When connections are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// Never.
    #[default]
    Off,
    /// Where the client asks for it.
    On,
    /// Always; other clients are refused.
    Required,
}

impl FromStr for TlsMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::On),
            "required" => Ok(Self::Required),
            _ => Err("is not a TLS mode; there are off, on and required".to_owned()),
        }
    }
}

/// [`TlsMode`] with what it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Never.
    Off,
    /// Where the client asks for it.
    On(Credentials),
    /// Always.
    Required(Credentials),
}

/// How server and client know each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// By X.509 certificates.
    Certificates {
        /// Holds `server-cert.pem`, `server-key.pem` and, to verify clients, `ca-cert.pem`.
        directory: PathBuf,
        /// Clients must present a certificate that the authority signed.
        verify_peer: bool,
    },
    /// By pre-shared keys in this file, `user:hexkey` lines.
    PreShared(PathBuf),
}

/// The four settings as they were said.
#[derive(Clone, Debug, Default)]
pub struct TlsDraft {
    pub mode: Option<Said<TlsMode>>,
    pub certificates: Option<Said<PathBuf>>,
    pub verify_peer: Option<Said<bool>>,
    pub psk: Option<Said<PathBuf>>,
}

impl TlsDraft {
    /// These settings, and `other`'s where these say nothing.
    pub fn or(self, other: Self) -> Self {
        Self {
            mode: self.mode.or(other.mode),
            certificates: self.certificates.or(other.certificates),
            verify_peer: self.verify_peer.or(other.verify_peer),
            psk: self.psk.or(other.psk),
        }
    }

    /// Where encryption was asked for, if it was.
    pub(crate) fn wanted(&self) -> Option<&Place> {
        self.mode.as_ref().filter(|said| said.value != TlsMode::Off).map(|said| &said.place)
    }

    /// What they add up to.
    ///
    /// # Errors
    /// Credentials that are unused, missing or of two kinds: no server quietly serves in the clear.
    pub fn check(self) -> Result<Tls, Wrong> {
        let verify_peer = self.verify_peer.filter(|said| said.value);
        let mode = self.mode.as_ref().map_or(TlsMode::Off, |said| said.value);
        if mode == TlsMode::Off {
            let unused = [
                self.certificates.map(|said| said.place),
                self.psk.map(|said| said.place),
                verify_peer.map(|said| said.place),
            ];
            return match unused.into_iter().flatten().next() {
                Some(place) => {
                    Err(place.wrong("is not used, because tls is off (set tls to on or required)"))
                }
                None => Ok(Tls::Off),
            };
        }
        let credentials = match (self.certificates, self.psk) {
            (Some(_), Some(psk)) => {
                return Err(psk.wrong("tls-certificates is given too (choose certificates or keys)"));
            }
            (Some(directory), None) => {
                Credentials::Certificates { directory: directory.value, verify_peer: verify_peer.is_some() }
            }
            (None, Some(psk)) => match verify_peer {
                Some(said) => {
                    return Err(said.wrong("has no meaning with tls-psk (whoever has a key is verified)"));
                }
                None => Credentials::PreShared(psk.value),
            },
            (None, None) => {
                let place = self.mode.map(|said| said.place);
                let rule = "has no credentials (set tls-certificates or tls-psk)";
                return Err(place.unwrap_or_else(|| Place::new("tls")).wrong(rule));
            }
        };
        Ok(if mode == TlsMode::On { Tls::On(credentials) } else { Tls::Required(credentials) })
    }
}
