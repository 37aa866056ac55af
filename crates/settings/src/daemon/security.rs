//! Rules between the daemon's keys for TLS, the page and access. Opens no file.

use super::DaemonConfig;
use crate::{
    TlsConfig, TlsCredentialFiles, TlsMode, clients,
    diagnostics::{ConfigError, Origin},
    origins::ConfigWithOrigins,
};

impl ConfigWithOrigins<DaemonConfig> {
    /// Encryption of connections, from the four TLS keys.
    ///
    /// # Errors
    /// Fails on unused, missing or conflicting credentials, so that no server is unencrypted by
    /// mistake.
    pub fn tls(&self) -> Result<TlsConfig, ConfigError> {
        // `tls-verify-peer = false` is the default and harmless without TLS.
        let verify_peer = self.origin_of_given("tls-verify-peer").filter(|_| self.tls_verify_peer);
        if self.tls_mode == TlsMode::Off {
            // An error instead of silence: a typo in `tls` must not disable encryption.
            let unused =
                self.origin_of_given("tls-certificates").or(self.origin_of_given("tls-psk")).or(verify_peer);
            return match unused {
                Some(origin) => {
                    Err(origin.error("is not used, because tls is off (set tls to on or required)"))
                }
                None => Ok(TlsConfig::Off),
            };
        }
        let credentials = match (&self.tls_certificates, &self.tls_psk) {
            (Some(_), Some(_)) => {
                let rule = "tls-certificates is given too (choose certificates or keys)";
                return Err(self.error("tls-psk", rule));
            }
            (Some(directory), None) => TlsCredentialFiles::Certificates {
                directory: directory.clone(),
                verify_peer: self.tls_verify_peer,
            },
            (None, Some(keys)) => match verify_peer {
                Some(origin) => {
                    return Err(origin.error("has no effect with tls-psk (the keys verify clients)"));
                }
                None => TlsCredentialFiles::PreShared(keys.clone()),
            },
            (None, None) => {
                return Err(self.error("tls", "has no credentials (set tls-certificates or tls-psk)"));
            }
        };
        Ok(match self.tls_mode {
            TlsMode::On => TlsConfig::On(credentials),
            TlsMode::Off | TlsMode::Required => TlsConfig::Required(credentials),
        })
    }

    /// Checks the keys of the page.
    ///
    /// # Errors
    /// Fails on unused keys, and on a token that would cross the network unencrypted.
    pub(crate) fn check_page(&self, tls: &TlsConfig) -> Result<(), ConfigError> {
        let Some(page) = self.page() else {
            let unused = self.origin_of_given("http-token-file").or(self.origin_of_given("http-name"));
            let rule = "is not used, because there is no page (set http too)";
            return unused.map_or(Ok(()), |origin| Err(origin.error(rule)));
        };
        // Reading the page without encryption is allowed; sending a token is not.
        if page.token_file.is_some() && !page.is_local() && !page.is_encrypted(tls) {
            let rule = format!(
                "would be sent over the network in plain text to {} (set tls and tls-certificates, \
                 or use an address of this host alone)",
                page.address
            );
            return Err(self.error("http-token-file", rule));
        }
        Ok(())
    }

    /// Checks the access rules.
    ///
    /// # Errors
    /// Fails on a duplicate network, and on name rules that can never apply.
    pub(crate) fn check_access(&self, tls: &TlsConfig) -> Result<(), ConfigError> {
        clients::check_access(self, &self.access, tls, true)
    }

    /// Origin of the first network rule.
    pub(crate) fn network(&self) -> Option<&Origin> {
        self.origin_of_given("allow").or(self.origin_of_given("deny"))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::origins::KeyTable as _;

    /// The daemon with these keys.
    fn daemon(keys: &[(&str, &str)]) -> ConfigWithOrigins<DaemonConfig> {
        let mut daemon = ConfigWithOrigins::<DaemonConfig>::default();
        for (name, text) in keys {
            let key = DaemonConfig::key(name).expect("a key");
            daemon.set(key, text, Path::new(""), Origin::new(format!("--{name}"))).expect("a value");
        }
        daemon
    }

    #[test]
    fn a_token_needs_tls_or_a_local_address() {
        let certificates =
            TlsConfig::On(TlsCredentialFiles::Certificates { directory: "tls".into(), verify_peer: false });
        let keys = TlsConfig::On(TlsCredentialFiles::PreShared("keys.psk".into()));
        let with_token = |address| daemon(&[("http", address), ("http-token-file", "token")]);
        for local in [
            "unix:/run/page.sock",
            "localhost:80",
            "127.0.0.1:80",
            "127.8.9.1:80",
            "[::1]:80",
            "[::ffff:127.0.0.1]:80",
        ] {
            assert!(with_token(local).check_page(&TlsConfig::Off).is_ok(), "{local}");
        }
        for other in ["0.0.0.0:80", "[::]:80", "192.0.2.1:80", "host:80", "localhost.example.org:80"] {
            assert!(with_token(other).check_page(&certificates).is_ok(), "{other}");
            for plain in [&TlsConfig::Off, &keys] {
                let error = with_token(other).check_page(plain).unwrap_err().to_string();
                assert!(error.contains("would be sent over the network in plain text"), "{error}");
            }
        }
    }

    #[test]
    fn page_keys_without_a_page_are_rejected() {
        let error = daemon(&[("http-name", "weir")]).check_page(&TlsConfig::Off).unwrap_err().to_string();
        assert_eq!(error, "--http-name: is not used, because there is no page (set http too)");
        assert_eq!(daemon(&[]).check_page(&TlsConfig::Off), Ok(()));
    }
}
