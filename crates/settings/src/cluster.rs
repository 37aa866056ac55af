//! `[cluster]`: the cluster whose limits this host shares, and its etcd.
//!
//! Checks values only: never resolves a name or connects.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    sync::LazyLock,
};

use crate::{
    diagnostics::Diagnostics,
    key::{
        ConfigKey, ConfigValue, KeyField, KeyInput, KeyLiteral,
        KeyType::{self, Text},
        each, maybe, one, table,
    },
    origins::{ConfigWithOrigins, KeyTable},
};

/// etcd's client port.
const DEFAULT_PORT: u16 = 2379;
/// Longest name of a cluster or a host in bytes: both are part of every key.
const MAX_NAME_BYTES: usize = 64;
/// Largest number of etcd members; etcd recommends seven at most.
const MAX_ENDPOINTS: usize = 16;
/// Millionths in a whole.
const PPM: f64 = 1_000_000.0;

/// Config of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Name of the cluster, a prefix of all its keys.
    pub name: String,
    /// Name of this host, unique in the cluster.
    pub host: String,
    /// Members of etcd, at least one; any of them suffices.
    pub etcd: Vec<EtcdEndpoint>,
    /// Directory with `ca-cert.pem` and, if etcd requires them, `client-cert.pem` and
    /// `client-key.pem`.
    pub certificates: Option<PathBuf>,
    /// User of etcd; needs a password.
    pub user: Option<String>,
    /// File of the user's password.
    pub password_file: Option<PathBuf>,
    /// Fallback share of a host in millionths of a limit, for groups whose limits are first set
    /// here.
    pub fallback_share_ppm: Option<u32>,
    /// Groups of the cluster whose quota this host's control groups use, instead of disks.
    pub control_groups: Vec<String>,
    /// Address at which other hosts of the cluster reach this one.
    pub peer_address: Option<SocketAddr>,
}

impl ClusterConfig {
    /// User and password file for etcd's authentication.
    #[must_use]
    pub fn login(&self) -> Option<(&str, &Path)> {
        self.user.as_deref().zip(self.password_file.as_deref())
    }

    /// True if connections to etcd, and therefore between hosts, use TLS.
    #[must_use]
    pub fn uses_tls(&self) -> bool {
        self.etcd.iter().any(|endpoint| endpoint.tls)
    }
}

impl KeyTable for ClusterConfig {
    const RENAMED: &'static [(&'static str, &'static str, &'static str)] = &[(
        "safe-share",
        "fallback-share",
        "safe-share is the old name of fallback-share (rename the key: the next release refuses \
         the old name)",
    )];

    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<ClusterConfig>>> = LazyLock::new(cluster_keys);
        &KEYS
    }

    fn check_rules(cluster: &ConfigWithOrigins<Self>, diagnostics: &Diagnostics) {
        let groups = &cluster.control_groups;
        for (index, _) in groups.iter().enumerate().filter(|(at, group)| groups[..*at].contains(group)) {
            let origin = cluster.item_origin("control-groups", index, "").unwrap_or(cluster.own_origin());
            diagnostics.report(origin.error("is given twice"));
        }
        if cluster.etcd.len() > MAX_ENDPOINTS {
            diagnostics
                .report(cluster.error("etcd", format!("has too many members; at most {MAX_ENDPOINTS}")));
        }
        if let Some(origin) =
            cluster.origin_of_given("certificates").filter(|_| !cluster.etcd.iter().any(|e| e.tls))
        {
            diagnostics.report(origin.error("is not used, because no member of etcd is https"));
        }
        match (cluster.origin_of_given("user"), cluster.origin_of_given("password-file")) {
            (Some(user), None) => diagnostics.report(user.error("needs password-file")),
            (None, Some(file)) => diagnostics.report(file.error("needs user")),
            (Some(_), Some(_)) | (None, None) => {}
        }
    }
}

type Config = ClusterConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(ClusterConfig) = |ClusterConfig {
                                  name: _,
                                  host: _,
                                  etcd: _,
                                  certificates: _,
                                  user: _,
                                  password_file: _,
                                  fallback_share_ppm: _,
                                  control_groups: _,
                                  peer_address: _,
                              }| ();

/// The table of keys.
fn cluster_keys() -> Vec<ConfigKey<ClusterConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "Cluster" {
            "name", Text, "NAME", one!(name, parse_cluster_name), "required", Reject, Separate,
                "Name of the cluster: letters, digits, '.', '-' and '_'. Hosts with another name \
                 belong to another cluster";
            "host", Text, "NAME", one!(host, parse_cluster_name), "the host name", Reject, Separate,
                "Name of this host, of the same characters, unique in the cluster";
            "etcd", Text, "URL", each!(etcd), "required", Reject, Separate,
                "http://HOST:PORT or https://HOST:PORT of a member of etcd; 16 members at most";
            "certificates", KeyType::Path, "DIR", maybe!(certificates), "the certificate authorities of the system", Reject, Separate,
                "Directory with ca-cert.pem and, if etcd requires it, client-cert.pem and \
                 client-key.pem; for https";
            "user", Text, "NAME", maybe!(user), "", Reject, Separate,
                "User of etcd; needs --password-file";
            "password-file", KeyType::Path, "FILE", maybe!(password_file), "", Reject, Separate,
                "File with the password of the user";
            "fallback-share", Text, "PERCENT", share(), "20% for all hosts together", Reject, Separate,
                "Fallback share: part of a limit that each host may use without etcd, such as \
                 0.5%, for groups whose limits are first set here";
            "control-groups", Text, "NAME", each!(control_groups, parse_cluster_name), "", Reject, Separate,
                "Groups of the cluster for control groups of this host; needs --cgroup-limits of the daemon";
            "peer-address", Text, "IP:PORT", maybe!(peer_address), "", Reject, Separate,
                "Address at which this host listens for the other hosts, so that they keep their \
                 quotas while etcd is unreachable; with the same port on all hosts. With https, \
                 certificates must also contain server-cert.pem and server-key.pem";
        }
    }
}

/// Parses the address at which other hosts reach this one.
///
/// # Errors
/// Fails unless it is an IP address with a port, and one that other hosts can connect to.
fn parse_peer_address(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse::<SocketAddr>().ok();
    let is_reachable = |address: &SocketAddr| !address.ip().is_unspecified() && address.port() != 0;
    address.filter(is_reachable).ok_or_else(|| {
        "is not the address of this host; write IP:PORT, such as 10.0.0.1:7441 or [fd00::1]:7441".to_owned()
    })
}

impl ConfigValue for SocketAddr {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        parse_peer_address(given.text)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.to_string())
    }
}

impl ConfigValue for EtcdEndpoint {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        given.text.parse()
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.to_string())
    }
}

fn share() -> KeyField<ClusterConfig> {
    KeyField::new(
        |cluster: &mut ClusterConfig, given| {
            cluster.fallback_share_ppm = Some(parse_fallback_share(given.text)?);
            Ok(())
        },
        |cluster| {
            cluster.fallback_share_ppm.map(|ppm| KeyLiteral::Text(format!("{}%", f64::from(ppm) / 10_000.0)))
        },
    )
}

/// Address of a member of etcd.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EtcdEndpoint {
    /// True for `https`.
    pub tls: bool,
    /// Name or address, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl FromStr for EtcdEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = || {
            let more = match text {
                _ if text.contains(',') => {
                    ", and several as a list: etcd = [\"http://A:2379\", \"http://B:2379\"]"
                }
                _ if text.contains('@') => "; set user and password-file instead",
                _ => "",
            };
            format!("is not the address of etcd; write http://HOST:PORT or https://HOST:PORT{more}")
        };
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            // Any other scheme, such as `unix` or `ftp`.
            Some(_) => return Err(rule()),
            None => (false, text),
        };
        // A URL may end with a slash.
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(rule)?;
                (host, port.strip_prefix(':'))
            }
            // An IPv6 address without brackets fails on its port.
            None => match rest.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (rest, None),
            },
        };
        let port = port.map_or(Ok(DEFAULT_PORT), |port| port.parse().map_err(|_| rule()))?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
        if host.is_empty() || port == 0 || !host.chars().all(plain) {
            return Err(rule());
        }
        Ok(Self { tls, host: host.to_owned(), port })
    }
}

impl fmt::Display for EtcdEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

/// Checks the name of a cluster or a host.
///
/// # Errors
/// Fails if it is empty, too long, or has a character that separates the parts of keys.
pub fn parse_cluster_name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if text.is_empty() || text.len() > MAX_NAME_BYTES || !text.chars().all(plain) {
        return Err(format!(
            "is not a valid name: use 1 to {MAX_NAME_BYTES} letters, digits, '.', '-' and '_'"
        ));
    }
    Ok(text.to_owned())
}

/// Parses a share of a limit, such as `2%`, to millionths.
///
/// # Errors
/// Fails if it is not a percentage from 0.0001 % to 100 %.
pub fn parse_fallback_share(text: &str) -> Result<u32, String> {
    let percent = text.strip_suffix('%').and_then(|number| number.trim_end().parse::<f64>().ok());
    // NaN is in no range, so it is rejected here.
    let ppm = percent.map(|percent| percent / 100.0 * PPM).filter(|ppm| (1.0..=PPM).contains(ppm));
    // In range, so the cast removes only the fraction.
    ppm.map(|ppm| ppm.round() as u32)
        .ok_or_else(|| "is not a part of a limit; write a percentage such as 2% (0.0001% to 100%)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_etcd_are_urls() {
        let read = |text: &str| text.parse::<EtcdEndpoint>().map(|etcd| etcd.to_string());
        for (text, expect) in [
            ("http://a:1", "http://a:1"),
            ("https://10.0.0.1:2379/", "https://10.0.0.1:2379"),
            ("a", "http://a:2379"),
            ("a:7", "http://a:7"),
            ("https://[::1]:7", "https://[::1]:7"),
            ("http://[fe80::1%eth0]", "http://[fe80::1%eth0]:2379"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(expect));
        }
        for wrong in ["", "http://", "ftp://a", "a:0", "a:b", "a:1:2", "http://a/b", "[::1", "http://u@a"] {
            assert!(read(wrong).unwrap_err().contains("write http://HOST:PORT"), "{wrong}");
        }
    }

    #[test]
    fn fallback_shares_are_fractions() {
        assert_eq!(parse_fallback_share("2%"), Ok(20_000));
        assert_eq!(parse_fallback_share("0.1 %"), Ok(1000));
        assert_eq!(parse_fallback_share("100%"), Ok(1_000_000));
        for wrong in ["", "2", "0%", "-1%", "100.1%", "nan%", "inf%", "x%"] {
            assert!(parse_fallback_share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn peer_addresses_are_reachable() {
        assert_eq!(parse_peer_address("[fd00::1]:7").map(|address| address.port()), Ok(7));
        for wrong in ["", "host:7", "0.0.0.0:7", "[::]:7", "10.0.0.1:0", "10.0.0.1"] {
            assert!(parse_peer_address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_stand_in_keys() {
        assert_eq!(parse_cluster_name("a-B_1.c").as_deref(), Ok("a-B_1.c"));
        for wrong in ["", "a/b", "a b", "ä", &"a".repeat(65)] {
            assert!(parse_cluster_name(wrong).is_err(), "{wrong}");
        }
    }
}
