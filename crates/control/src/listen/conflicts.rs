//! Conflicts of listening addresses: two servers of one daemon cannot listen at the same address,
//! however it is spelled.
//!
//! Never binds a socket: two bound sockets can share a port until one of them listens, so binding
//! one address after the other would find no conflict.

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{self, Path, PathBuf},
};

use settings::ListenAddress;

use super::resolve;

/// Conflicts in a list: the index of each address that excludes an earlier one, with the index of
/// that earlier one. A host name that cannot be resolved has no conflicts.
pub fn find_address_conflicts(all: &[ListenAddress]) -> Vec<(usize, usize)> {
    let mut sockets: HashMap<PathBuf, usize> = HashMap::new();
    let mut ports: HashMap<u16, Vec<(IpAddr, usize)>> = HashMap::new();
    let mut found = Vec::new();
    for (index, address) in all.iter().enumerate() {
        match address {
            ListenAddress::Unix(path) => {
                let first = *sockets.entry(resolved_socket_path(path)).or_insert(index);
                found.extend((first != index).then_some((index, first)));
            }
            // The kernel assigns a free port.
            ListenAddress::Tcp { port: 0, .. } => {}
            ListenAddress::Tcp { host, port } => {
                let addresses = resolve(address, host, *port).unwrap_or_default();
                let earlier = ports.entry(*port).or_default();
                let is_excluded = |(other, _): &&(IpAddr, usize)| {
                    addresses.iter().any(|one| exclude_each_other(one.ip(), *other))
                };
                let first = earlier.iter().find(is_excluded).map(|(_, first)| *first);
                found.extend(first.map(|first| (index, first)));
                earlier.extend(addresses.iter().map(|one| (one.ip(), index)));
            }
        }
    }
    found
}

/// True if sockets that listen at these addresses with the same port exclude each other. `[::]`
/// includes IPv4 (ipv6(7), IPV6_V6ONLY).
fn exclude_each_other(one: IpAddr, other: IpAddr) -> bool {
    let covers = |one: IpAddr, other: IpAddr| one.is_unspecified() && (one.is_ipv6() || other.is_ipv4());
    one == other || covers(one, other) || covers(other, one)
}

/// Absolute path of a socket, with symlinks of its directory resolved.
fn resolved_socket_path(path: &Path) -> PathBuf {
    let path = path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let directory = path.parent().and_then(|parent| parent.canonicalize().ok());
    match (directory, path.file_name()) {
        (Some(directory), Some(name)) => directory.join(name),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_addresses_conflict_in_every_spelling() {
        let root = tempfile::tempdir().unwrap();
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        let sockets = [root.path(), &link].map(|directory| format!("unix:{}", directory.join("s").display()));
        for (one, other, is_excluded) in [
            ("127.0.0.1:7", "127.0.0.1:7", true),
            ("127.0.0.1:7", "0.0.0.0:7", true),
            ("[::]:7", "127.0.0.1:7", true),
            ("0.0.0.0:7", "[::1]:7", false),
            ("127.0.0.1:7", "127.0.0.2:7", false),
            ("127.0.0.1:7", "127.0.0.1:8", false),
            ("127.0.0.1:0", "127.0.0.1:0", false),
            (&sockets[0], &sockets[1], true),
            (&sockets[0], "unix:/s", false),
        ] {
            let all = ["unix:/first", one, other].map(|text| text.parse().unwrap());
            let expected = if is_excluded { vec![(2, 1)] } else { Vec::new() };
            assert_eq!(find_address_conflicts(&all), expected, "{one} {other}");
        }
    }
}
