//! Networks, written as `ADDRESS/LENGTH`, and the allow and deny rules for them.
//!
//! Of all networks that contain an address, the one with the longest prefix decides, in whatever
//! order they are written. A subnet of an allowed network can be denied, and a part of it allowed
//! again.
//!
//! An IPv4 address that an IPv6 socket reports as `::ffff:a.b.c.d` is treated as IPv4.

use alloc::{format, string::String, vec::Vec};
use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// Prefix of an IPv4-mapped IPv6 address, in bits (RFC 4291 section 2.5.5.2).
const IPV4_MAPPED_PREFIX_BITS: u8 = 96;
/// Prefix that all IPv6 addresses of one host share, in bits (RFC 4291 section 2.5.4).
const IPV6_HOST_PREFIX_BITS: u8 = 64;

/// A range of addresses with a common prefix (CIDR).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    /// Zero after the prefix; never an IPv4-mapped IPv6 address.
    address: IpAddr,
    /// Bits of the prefix: at most 32 for IPv4, 128 for IPv6.
    length: u8,
}

impl Network {
    /// The network with a prefix of `length` bits that contains `address`. A length above the size
    /// of the address is reduced to it.
    fn containing(address: IpAddr, length: u8) -> Self {
        match address {
            IpAddr::V4(v4) => {
                let length = length.min(32);
                // `checked_shl` because a shift by all 32 bits (a prefix of 0) would overflow.
                let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
                Self { address: Ipv4Addr::from_bits(v4.to_bits() & mask).into(), length }
            }
            IpAddr::V6(v6) => {
                let length = length.min(128);
                let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
                Self { address: Ipv6Addr::from_bits(v6.to_bits() & mask).into(), length }
            }
        }
    }

    fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4() && Self::containing(address, self.length) == *self
    }
}

impl FromStr for Network {
    type Err = String;

    /// Parses an address, alone or with its prefix length. Fails if a bit after the prefix is set.
    fn from_str(text: &str) -> Result<Self, String> {
        let usage = "is not a network; write ADDRESS or ADDRESS/LENGTH, such as 10.0.0.0/8 or 2001:db8::/32";
        let (address, length) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
        let address: IpAddr = address.parse().map_err(|_| usage)?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let is_decimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let length: u8 = match length {
            None => bits,
            Some(text) => {
                text.parse().ok().filter(|length| is_decimal(text) && *length <= bits).ok_or(usage)?
            }
        };
        let network = Self::containing(address, length);
        if network.address != address {
            return Err(format!("has bits set beyond its prefix length; write {}/{length}", network.address));
        }
        Ok(match (address, address.to_canonical()) {
            (IpAddr::V6(_), v4 @ IpAddr::V4(_)) if length >= IPV4_MAPPED_PREFIX_BITS => {
                Self { address: v4, length: length - IPV4_MAPPED_PREFIX_BITS }
            }
            _ => network,
        })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, length } = self;
        write!(f, "{address}/{length}")
    }
}

/// Access rules for client addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkRules {
    /// Allowed networks. If there is any, an address outside of all of them is denied.
    pub allow: Vec<Network>,
    /// Denied networks.
    pub deny: Vec<Network>,
}

impl NetworkRules {
    /// True if the address is allowed: the longest matching prefix decides. An address that no
    /// network contains is allowed only if `allow` is empty. A client without an address is
    /// allowed.
    pub fn allows(&self, address: Option<IpAddr>) -> bool {
        let Some(address) = address.map(|address| address.to_canonical()) else { return true };
        let narrowest = |networks: &[Network]| {
            networks.iter().filter(|network| network.contains(address)).map(|network| network.length).max()
        };
        match (narrowest(&self.allow), narrowest(&self.deny)) {
            (None, None) => self.allow.is_empty(),
            // `None` is less than any length. On equal lengths, deny wins.
            (allowed, denied) => allowed > denied,
        }
    }
}

/// Key for counting the connections of one host. An IPv6 host has many addresses in one /64, so its
/// key is that prefix.
pub fn connection_origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        // Link-local addresses of all hosts have the same prefix, so they are distinguished in
        // full.
        IpAddr::V6(v6) if !v6.is_unicast_link_local() => {
            Network::containing(v6.into(), IPV6_HOST_PREFIX_BITS).address
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString as _;

    use super::*;

    fn networks(allow: &[&str], deny: &[&str]) -> NetworkRules {
        let read = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        NetworkRules { allow: read(allow), deny: read(deny) }
    }

    #[track_caller]
    fn check(networks: &NetworkRules, admitted: &[&str], denied: &[&str]) {
        for (addresses, expect) in [(admitted, true), (denied, false)] {
            for address in addresses {
                assert_eq!(networks.allows(Some(address.parse().unwrap())), expect, "{address}");
            }
        }
    }

    #[test]
    fn longest_matching_prefix_decides() {
        check(&networks(&[], &[]), &["1.2.3.4", "::1"], &[]);
        check(&networks(&["10.0.0.0/8"], &[]), &["10.255.0.1"], &["11.0.0.1", "::1"]);
        check(&networks(&[], &["10.0.0.0/8"]), &["11.0.0.1", "::1"], &["10.255.0.1"]);
        let nested = networks(&["10.0.0.0/8", "10.1.2.3"], &["10.1.0.0/16"]);
        check(&nested, &["10.0.0.1", "10.1.2.3"], &["10.1.2.4", "192.168.0.1"]);
        check(&networks(&["0.0.0.0/0"], &["10.0.0.0/8"]), &["9.0.0.1"], &["10.0.0.1", "2001:db8::1"]);
        check(&networks(&["2001:db8::/32"], &["2001:db8:1::/48"]), &["2001:db8::1"], &["2001:db8:1::1"]);
        // The same network in both lists; the config rejects this.
        check(&networks(&["10.0.0.0/8"], &["10.0.0.0/8"]), &[], &["10.0.0.1"]);
    }

    #[test]
    fn ipv4_mapped_addresses_are_treated_as_ipv4() {
        check(&networks(&["10.0.0.0/8"], &[]), &["::ffff:10.1.2.3"], &["::ffff:11.1.2.3"]);
        check(&networks(&[], &["::ffff:10.0.0.0/104"]), &["11.0.0.1"], &["10.1.2.3", "::ffff:10.1.2.3"]);
        // `::/0` does not include IPv4-mapped addresses.
        check(&networks(&["::/0"], &[]), &["::1", "2001:db8::1"], &["10.0.0.1", "::ffff:10.0.0.1"]);
    }

    #[test]
    fn networks_round_trip_through_text() {
        let shown = |text: &str| text.parse::<Network>().map(|network| network.to_string());
        assert_eq!(shown("10.0.0.1").as_deref(), Ok("10.0.0.1/32"));
        assert_eq!(shown("0.0.0.0/0").as_deref(), Ok("0.0.0.0/0"));
        assert_eq!(shown("fe80::/10").as_deref(), Ok("fe80::/10"));
        assert_eq!(shown("::ffff:10.0.0.0/104").as_deref(), Ok("10.0.0.0/8"));
        let usage = "is not a network; write ADDRESS or ADDRESS/LENGTH, such as 10.0.0.0/8 or 2001:db8::/32";
        for wrong in ["", "localhost", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/+8", "10/8", "::1/x"] {
            assert_eq!(shown(wrong).unwrap_err(), usage, "{wrong}");
        }
        assert_eq!(
            shown("10.1.0.0/8").unwrap_err(),
            "has bits set beyond its prefix length; write 10.0.0.0/8"
        );
    }

    #[test]
    fn addresses_of_one_host_have_one_origin() {
        let same =
            |a: &str, b: &str| connection_origin(a.parse().unwrap()) == connection_origin(b.parse().unwrap());
        assert!(same("10.0.0.1", "::ffff:10.0.0.1"));
        assert!(!same("10.0.0.1", "10.0.0.2"));
        assert!(same("2001:db8::1", "2001:db8::ffff:1"));
        assert!(!same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(!same("fe80::1", "fe80::2"));
    }
}
