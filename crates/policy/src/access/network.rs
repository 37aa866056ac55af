//! Networks, written as `ADDRESS/LENGTH`, and which of them clients may come from.
//!
//! Of all networks that an address lies in, the narrowest decides, whatever the order in which they
//! are written. So a part of what is allowed can be denied, and a part of that allowed again.
//!
//! An IPv4 address that an IPv6 socket shows as `::ffff:a.b.c.d` is that IPv4 address.

use alloc::{format, string::String, vec::Vec};
use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// Bits in front of an IPv4 address that is written as IPv6 (RFC 4291 section 2.5.5.2).
const MAPPED_BITS: u8 = 96;
/// Bits of an IPv6 address that one host's all have (RFC 4291 section 2.5.4).
const BITS_OF_HOST: u8 = 64;

/// All addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    /// Zero behind the prefix; never an IPv4 address in IPv6.
    address: IpAddr,
    /// Bits; at most 32 of IPv4, 128 of IPv6.
    length: u8,
}

impl Network {
    /// The network of this length around an address; a longer one than there are bits is the
    /// address alone.
    fn around(address: IpAddr, length: u8) -> Self {
        match address {
            IpAddr::V4(v4) => {
                let length = length.min(32);
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
        self.address.is_ipv4() == address.is_ipv4() && Self::around(address, self.length) == *self
    }
}

impl FromStr for Network {
    type Err = String;

    /// An address, alone or with the length of its prefix; behind the prefix it is zero.
    fn from_str(text: &str) -> Result<Self, String> {
        let usage = "is no network; write ADDRESS or ADDRESS/LENGTH, such as 10.0.0.0/8 or 2001:db8::/32";
        let (address, length) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
        let address: IpAddr = address.parse().map_err(|_| usage)?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let length: u8 = match length {
            None => bits,
            Some(text) => text.parse().ok().filter(|length| plain(text) && *length <= bits).ok_or(usage)?,
        };
        let whole = Self::around(address, length);
        if whole.address != address {
            return Err(format!("has bits behind its prefix; write {}/{length}", whole.address));
        }
        Ok(match (address, address.to_canonical()) {
            (IpAddr::V6(_), v4 @ IpAddr::V4(_)) if length >= MAPPED_BITS => {
                Self { address: v4, length: length - MAPPED_BITS }
            }
            _ => whole,
        })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, length } = self;
        write!(f, "{address}/{length}")
    }
}

/// Where clients may come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Networks {
    /// If there is one, who comes from none of these is refused.
    pub allow: Vec<Network>,
    /// Who comes from one of these is refused.
    pub deny: Vec<Network>,
}

impl Networks {
    /// The narrowest network that has the address decides; if none has, it is let in unless some
    /// are allowed. Without an address there is nothing to refuse.
    pub fn admits(&self, address: Option<IpAddr>) -> bool {
        let Some(address) = address.map(|address| address.to_canonical()) else { return true };
        let narrowest = |networks: &[Network]| {
            networks.iter().filter(|network| network.contains(address)).map(|network| network.length).max()
        };
        match (narrowest(&self.allow), narrowest(&self.deny)) {
            (None, None) => self.allow.is_empty(),
            (allowed, denied) => allowed > denied,
        }
    }
}

/// Whose address it is, for counting: one host has many addresses of IPv6, all in one network.
pub fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        // On one link, all hosts are in the same network.
        IpAddr::V6(v6) if !v6.is_unicast_link_local() => Network::around(v6.into(), BITS_OF_HOST).address,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString as _;

    use super::*;

    fn networks(allow: &[&str], deny: &[&str]) -> Networks {
        let read = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        Networks { allow: read(allow), deny: read(deny) }
    }

    #[track_caller]
    fn check(networks: &Networks, admitted: &[&str], refused: &[&str]) {
        for (addresses, expect) in [(admitted, true), (refused, false)] {
            for address in addresses {
                assert_eq!(networks.admits(Some(address.parse().unwrap())), expect, "{address}");
            }
        }
    }

    #[test]
    fn the_narrowest_network_decides() {
        check(&networks(&[], &[]), &["1.2.3.4", "::1"], &[]);
        check(&networks(&["10.0.0.0/8"], &[]), &["10.255.0.1"], &["11.0.0.1", "::1"]);
        check(&networks(&[], &["10.0.0.0/8"]), &["11.0.0.1", "::1"], &["10.255.0.1"]);
        let nested = networks(&["10.0.0.0/8", "10.1.2.3"], &["10.1.0.0/16"]);
        check(&nested, &["10.0.0.1", "10.1.2.3"], &["10.1.2.4", "192.168.0.1"]);
        check(&networks(&["0.0.0.0/0"], &["10.0.0.0/8"]), &["9.0.0.1"], &["10.0.0.1", "2001:db8::1"]);
        check(&networks(&["2001:db8::/32"], &["2001:db8:1::/48"]), &["2001:db8::1"], &["2001:db8:1::1"]);
        // The same on both sides, which no configuration has.
        check(&networks(&["10.0.0.0/8"], &["10.0.0.0/8"]), &[], &["10.0.0.1"]);
    }

    #[test]
    fn an_ipv4_address_is_the_same_in_ipv6() {
        check(&networks(&["10.0.0.0/8"], &[]), &["::ffff:10.1.2.3"], &["::ffff:11.1.2.3"]);
        check(&networks(&[], &["::ffff:10.0.0.0/104"]), &["11.0.0.1"], &["10.1.2.3", "::ffff:10.1.2.3"]);
        // All of IPv6 is not all of IPv4.
        check(&networks(&["::/0"], &[]), &["::1", "2001:db8::1"], &["10.0.0.1", "::ffff:10.0.0.1"]);
    }

    #[test]
    fn networks_are_read_and_shown() {
        let shown = |text: &str| text.parse::<Network>().map(|network| network.to_string());
        assert_eq!(shown("10.0.0.1").as_deref(), Ok("10.0.0.1/32"));
        assert_eq!(shown("0.0.0.0/0").as_deref(), Ok("0.0.0.0/0"));
        assert_eq!(shown("fe80::/10").as_deref(), Ok("fe80::/10"));
        assert_eq!(shown("::ffff:10.0.0.0/104").as_deref(), Ok("10.0.0.0/8"));
        let usage = "is no network; write ADDRESS or ADDRESS/LENGTH, such as 10.0.0.0/8 or 2001:db8::/32";
        for wrong in ["", "localhost", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/+8", "10/8", "::1/x"] {
            assert_eq!(shown(wrong).unwrap_err(), usage, "{wrong}");
        }
        assert_eq!(shown("10.1.0.0/8").unwrap_err(), "has bits behind its prefix; write 10.0.0.0/8");
    }

    #[test]
    fn a_host_is_counted_once() {
        let same = |a: &str, b: &str| origin(a.parse().unwrap()) == origin(b.parse().unwrap());
        assert!(same("10.0.0.1", "::ffff:10.0.0.1"));
        assert!(!same("10.0.0.1", "10.0.0.2"));
        assert!(same("2001:db8::1", "2001:db8::ffff:1"));
        assert!(!same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(!same("fe80::1", "fe80::2"));
    }
}
