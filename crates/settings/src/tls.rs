//! Encryption of connections, as a server offers it. Only the settings are judged here.

use std::{fmt, path::PathBuf, str::FromStr};

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

impl fmt::Display for TlsMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Required => "required",
        })
    }
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
