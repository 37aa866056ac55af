//! Encryption of connections, as a server offers it. Checks only the settings.

use std::{fmt, path::PathBuf, str::FromStr};

/// Encryption policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// Never.
    #[default]
    Off,
    /// If the client requests it.
    On,
    /// Always; unencrypted clients are rejected.
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
            _ => Err("is not a TLS mode (off, on, required)".to_owned()),
        }
    }
}

/// [`TlsMode`] with its credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsConfig {
    /// Never.
    Off,
    /// If the client requests it.
    On(TlsCredentialFiles),
    /// Always.
    Required(TlsCredentialFiles),
}

/// Authentication of server and client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsCredentialFiles {
    /// By X.509 certificates.
    Certificates {
        /// Directory with `server-cert.pem`, `server-key.pem` and, to verify clients,
        /// `ca-cert.pem`.
        directory: PathBuf,
        /// True if clients have to present a certificate signed by the authority.
        verify_peer: bool,
    },
    /// By pre-shared keys in this file, `user:hexkey` lines.
    PreShared(PathBuf),
}
