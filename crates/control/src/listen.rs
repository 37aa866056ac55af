//! Listening sockets: bound to an address, or passed by the service manager. Never accepts.

mod conflicts;
mod inherited;
mod unix;
mod uri;

use std::{
    cell::RefCell,
    fs::{self, DirBuilder, Permissions},
    io::{self, ErrorKind},
    net::{SocketAddr, TcpListener, ToSocketAddrs as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            fs::{DirBuilderExt as _, PermissionsExt as _},
            net::UnixListener,
        },
    },
    path::{self, Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, SockaddrStorage, getsockopt, setsockopt,
    sockopt::{AcceptConn, ReuseAddr},
};
use reactor::operation::Fd;
use sandbox::directory_of;
use settings::{FileOwner, ListenAddress, ListenEndpoint, SocketAccess, control::ControlSocketLocation};
use storage::PassedFiles;

pub use conflicts::find_address_conflicts;
pub use inherited::InheritedSockets;
pub use unix::SocketFile;
pub use uri::UriAuthority;

/// Listening socket.
#[derive(Debug)]
pub struct BoundListener {
    /// The socket.
    pub socket: OwnedFd,
    /// Its address, as clients name it.
    pub authority: UriAuthority,
    /// Removes the file of a Unix socket that this process created.
    pub file: Option<SocketFile>,
}

/// Listening socket of a worker, with the path of the socket file that weir created.
pub(crate) type ListeningSocket = (Fd, Option<PathBuf>);

impl BoundListener {
    /// Socket of the old process, which was configured to listen at `endpoint`, with the socket
    /// file it created. The file belongs to the old process until this process owns the `passed`
    /// files. `number` is the position among several sockets.
    pub(crate) fn adopt(
        socket: OwnedFd,
        endpoint: &ListenEndpoint,
        number: usize,
        file: Option<&Path>,
        passed: &PassedFiles,
    ) -> anyhow::Result<Self> {
        ensure!(
            getsockopt(&socket, AcceptConn).unwrap_or(false),
            "socket {number} of the old process does not listen"
        );
        let authority = match endpoint {
            ListenEndpoint::Address(ListenAddress::Tcp { host, .. }) => {
                let local = TcpListener::from(socket.try_clone()?).local_addr()?;
                UriAuthority::of_tcp(host, local.port())
            }
            _ => {
                let local = UnixListener::from(socket.try_clone()?).local_addr();
                match local.as_ref().ok().and_then(|local| local.as_pathname()) {
                    Some(path) => UriAuthority::of_unix(file.unwrap_or(path)),
                    None => UriAuthority::Unnamed(number),
                }
            }
        };
        // Removes the file only if this process owns it, that is, after the upgrade is final.
        let file = file.map(|path| SocketFile::adopt(path, passed));
        Ok(Self { socket, authority, file })
    }
}

/// Binds an address, or takes all remaining sockets of the service manager.
pub fn open_listeners(
    endpoint: &ListenEndpoint,
    access: &SocketAccess,
    inherited: &mut InheritedSockets,
) -> anyhow::Result<Vec<BoundListener>> {
    match endpoint {
        ListenEndpoint::Address(address) => bind(address, access),
        ListenEndpoint::Inherited => inherited.take_all(),
        ListenEndpoint::Passed(name) => Ok(vec![inherited.take_named(name)?]),
    }
}

/// Socket of a vhost-user endpoint.
pub(crate) fn vhost_user_listener(
    socket: &settings::VhostUserSocket,
    access: &SocketAccess,
    inherited: &RefCell<InheritedSockets>,
) -> anyhow::Result<BoundListener> {
    // An upgrade takes precedence: the path is still bound by the old process's socket.
    if let Some(listener) = inherited.borrow_mut().take_adopted(&vhost_user_socket_name(socket)?) {
        return Ok(listener);
    }
    match socket {
        settings::VhostUserSocket::Path(path) => {
            let bound = unix::bind(path, access).with_context(|| socket.to_string())?;
            Ok(unix_listener(bound))
        }
        settings::VhostUserSocket::Inherited(name) => {
            let listener = inherited.borrow_mut().take_named(name)?;
            if let UriAuthority::Tcp(authority) = listener.authority {
                bail!("fd:{name}: {authority} is a TCP socket (set ListenStream= to a path)");
            }
            Ok(listener)
        }
    }
}

/// Name by which the old and the new process identify that socket.
pub(crate) fn vhost_user_socket_name(socket: &settings::VhostUserSocket) -> io::Result<String> {
    Ok(match socket.path() {
        Some(path) => settings::VhostUserSocket::Path(path::absolute(path)?).to_string(),
        None => socket.to_string(),
    })
}

/// Creates a Unix socket that only its owner (by default the daemon's user) and root may connect
/// to.
pub(crate) fn private_listener(path: &Path, owner: Option<&FileOwner>) -> anyhow::Result<BoundListener> {
    let access = SocketAccess { owner: owner.cloned(), ..SocketAccess::default() };
    let bound = unix::bind(path, &access);
    Ok(unix_listener(bound.with_context(|| ListenAddress::Unix(path.to_owned()).to_string())?))
}

/// Creates a control socket, as [`private_listener`] does, and its directory if that is weir's own.
pub fn control_listener(
    place: &ControlSocketLocation,
    owner: Option<&FileOwner>,
) -> anyhow::Result<BoundListener> {
    if let (Some(mode), Some(directory)) = (place.directory_mode, place.path.parent()) {
        create_directory(directory, mode).with_context(|| {
            format!("{}: the directory cannot be made", ListenAddress::Unix(place.path.clone()))
        })?;
    }
    private_listener(&place.path, owner)
}

/// Creates the directory with this mode regardless of the umask; an existing one is kept.
fn create_directory(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        // The umask has restricted the mode of mkdir(2).
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(mode)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Socket of a service with a single listener: the Unix socket that the service manager passed, or
/// else a private one at `path`, after a call of `prepare`.
///
/// # Errors
/// Several sockets were passed, or one that is no Unix socket; the socket cannot be created.
pub fn only_listener(
    mut inherited: InheritedSockets,
    path: &Path,
    prepare: impl FnOnce() -> io::Result<()>,
) -> anyhow::Result<(UnixListener, Option<SocketFile>)> {
    let listener = match inherited.unused() {
        0 => {
            prepare().with_context(|| ListenAddress::Unix(path.to_owned()).to_string())?;
            private_listener(path, None)?
        }
        1 => inherited.take_all()?.remove(0),
        more => bail!("LISTEN_FDS: {more} sockets were passed, and one is served (pass one)"),
    };
    let BoundListener { socket, authority, file } = listener;
    if let UriAuthority::Tcp(authority) = authority {
        bail!("LISTEN_FDS: {authority} is a TCP socket (set ListenStream= to a path)");
    }
    Ok((socket.into(), file))
}

/// True if two addresses name the same endpoint. Paths of Unix sockets may be spelled in different
/// ways and contain symbolic links.
pub fn is_same_address(one: &str, other: &str) -> bool {
    let place = |text: &str| {
        let path = path::absolute(text.strip_prefix("unix:")?).ok()?;
        Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?))
    };
    one == other || place(one).is_some_and(|place_of_one| place(other) == Some(place_of_one))
}

/// Interpretation of an address that is already in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressConflictRule {
    /// The address may be in use by the daemon that is being checked; not an error.
    Tolerated,
    /// The address is in use by another process; an error.
    Rejected,
}

/// Reports what would prevent listening at this address, as far as that is known without listening.
/// A process that listens there does not notice the check.
pub fn check(address: &ListenAddress, conflict_rule: AddressConflictRule) -> anyhow::Result<()> {
    match address {
        ListenAddress::Unix(path) => unix::check(path, conflict_rule).with_context(|| address.to_string()),
        ListenAddress::Tcp { host, port } if conflict_rule == AddressConflictRule::Tolerated => {
            resolve(address, host, *port).map(drop)
        }
        ListenAddress::Tcp { host, port } => for_each_address(address, host, *port, |socket_address| {
            bind_without_listening(socket_address)?;
            Ok((socket_address.port(), ()))
        })
        .map(drop),
    }
}

/// As [`check`], for a control socket, whose directory may not exist yet.
pub fn check_control(
    place: &ControlSocketLocation,
    conflict_rule: AddressConflictRule,
) -> anyhow::Result<()> {
    let parent = directory_of(&place.path);
    let is_made = place.directory_mode.is_some() && !parent.exists();
    // Checks that the missing directory can be created.
    let path = if is_made { parent } else { &place.path };
    unix::check(path, conflict_rule).with_context(|| ListenAddress::Unix(place.path.clone()).to_string())
}

/// Checks that the user and the group of sockets exist.
pub fn check_owner(owner: &FileOwner) -> anyhow::Result<()> {
    unix::check_owner(owner)
}

/// Binds a socket and closes it: fails in the cases in which [`TcpListener::bind`] fails. A bound
/// socket that does not listen prevents no listener: both set SO_REUSEADDR (socket(7)).
fn bind_without_listening(at: SocketAddr) -> io::Result<()> {
    let family = if at.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let socket = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, ReuseAddr, &true)?;
    Ok(socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(at))?)
}

fn unix_listener((listener, file): (UnixListener, SocketFile)) -> BoundListener {
    BoundListener { socket: listener.into(), authority: UriAuthority::of_unix(&file.path), file: Some(file) }
}

/// Time for which an address may outlive the process that listened there: requests on an io_uring
/// keep its sockets open (measured: 10 ms after a kill).
const ADDRESS_RELEASE_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval between attempts; the kernel does not signal the end of such a socket.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

fn retry_while_in_use<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = Instant::now() + ADDRESS_RELEASE_TIMEOUT;
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < until => {
                thread::sleep(RETRY_INTERVAL);
            }
            result => return result,
        }
    }
}

/// Returns one socket, or one for each address that a host name resolves to.
fn bind(address: &ListenAddress, access: &SocketAccess) -> anyhow::Result<Vec<BoundListener>> {
    match address {
        ListenAddress::Unix(path) => {
            Ok(vec![unix_listener(unix::bind(path, access).with_context(|| address.to_string())?)])
        }
        ListenAddress::Tcp { host, port } => bind_tcp(address, host, *port),
    }
}

fn bind_tcp(address: &ListenAddress, host: &str, port: u16) -> anyhow::Result<Vec<BoundListener>> {
    for_each_address(address, host, port, |socket_address| {
        let listener = TcpListener::bind(socket_address)?;
        let port = listener.local_addr()?.port();
        let authority = UriAuthority::of_tcp(host, port);
        Ok((port, BoundListener { socket: listener.into(), authority, file: None }))
    })
}

/// Calls `bind` with each address that a host name resolves to; `bind` also returns the port.
fn for_each_address<T>(
    address: &ListenAddress,
    host: &str,
    port: u16,
    bind: impl Fn(SocketAddr) -> io::Result<(u16, T)>,
) -> anyhow::Result<Vec<T>> {
    let addresses = resolve(address, host, port)?;
    let mut bound = Vec::new();
    // A free port (0) is chosen once, so that all addresses of the name share it.
    let mut chosen = port;
    let mut absent = None;
    for mut socket_address in addresses {
        socket_address.set_port(chosen);
        match retry_while_in_use(|| bind(socket_address)) {
            Ok((port, listener)) => {
                chosen = port;
                bound.push(listener);
            }
            // A name may resolve to IPv6 on a host without IPv6; its other addresses suffice.
            Err(error) if is_absent(&error) => absent = Some(error),
            Err(error) => return Err(bind_error(address, chosen, &error)),
        }
    }
    if bound.is_empty() {
        match absent {
            Some(error) => {
                bail!("{address}: not an address of this machine: {error} (`ip address` lists them)")
            }
            None => bail!("{address}: the host name has no address (use an IP address)"),
        }
    }
    Ok(bound)
}

fn resolve(address: &ListenAddress, host: &str, port: u16) -> anyhow::Result<Vec<SocketAddr>> {
    let resolved = (host, port).to_socket_addrs();
    let resolved = resolved
        .map_err(|error| anyhow!("{address}: the host name is not known: {error} (use an IP address)"))?;
    let mut addresses: Vec<SocketAddr> = resolved.collect();
    // Entries of /etc/hosts may repeat an address.
    addresses.dedup();
    Ok(addresses)
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT)
}

fn bind_error(address: &ListenAddress, port: u16, error: &io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::AddrInUse => anyhow!(
            "{address}: the port is in use by another program (`ss -ltnp 'sport = {port}'` shows \
             which; stop it, or choose another port)"
        ),
        ErrorKind::PermissionDenied => {
            anyhow!("{address}: {error} (ports below 1024 need CAP_NET_BIND_SERVICE; choose another)")
        }
        _ => anyhow!("{address}: cannot listen: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn free_port_is_equal_on_all_addresses_of_a_name() {
        // `localhost` may resolve to an IPv4 and an IPv6 address.
        let listeners = bind(&"localhost:0".parse().unwrap(), &SocketAccess::default()).unwrap();
        let first = listeners[0].authority.to_string();
        assert!(listeners.iter().all(|listener| listener.authority.to_string() == first));
        let port: u16 = first.rsplit_once(':').unwrap().1.parse().unwrap();
        assert_ne!(port, 0);
        TcpStream::connect(("localhost", port)).unwrap();
    }

    #[test]
    fn port_in_use_error_names_ss() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error =
            bind(&format!("127.0.0.1:{port}").parse().unwrap(), &SocketAccess::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "127.0.0.1:{port}: the port is in use by another program (`ss -ltnp 'sport = \
                 {port}'` shows which; stop it, or choose another port)"
            )
        );
    }

    #[test]
    fn port_check_is_not_noticed() {
        let address = |port: u16| -> ListenAddress { format!("127.0.0.1:{port}").parse().unwrap() };
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        check(&address(port), AddressConflictRule::Tolerated).unwrap();
        let error = check(&address(port), AddressConflictRule::Rejected).unwrap_err().to_string();
        assert!(error.contains("the port is in use by another program"), "{error}");
        // Nothing in the backlog: the check has not connected.
        taken.set_nonblocking(true).unwrap();
        assert_eq!(taken.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(taken);
        check(&address(port), AddressConflictRule::Rejected).unwrap();
        check(&address(0), AddressConflictRule::Rejected).unwrap();
        // TEST-NET-1 (RFC 5737), which no host has.
        let error = check(&"192.0.2.1:10809".parse().unwrap(), AddressConflictRule::Rejected).unwrap_err();
        assert!(error.to_string().contains("not an address of this machine"), "{error}");
    }

    #[test]
    fn control_socket_directory_has_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("weir/qmp.sock");
        let place = ControlSocketLocation { path: path.clone(), directory_mode: Some(0o700) };
        let listener = control_listener(&place, None).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o700, 0o600));
        // An existing directory keeps the mode that its owner chose.
        fs::set_permissions(path.parent().unwrap(), Permissions::from_mode(0o750)).unwrap();
        drop(listener);
        drop(control_listener(&place, None).unwrap());
        assert_eq!(mode(path.parent().unwrap()), 0o750);
        let in_missing_directory =
            ControlSocketLocation { directory_mode: None, path: root.path().join("other/qmp.sock") };
        assert!(
            format!("{:#}", control_listener(&in_missing_directory, None).unwrap_err())
                .contains("does not exist (create it)")
        );
    }

    #[test]
    fn foreign_address_is_rejected() {
        // TEST-NET-1 (RFC 5737), which no host has.
        let error =
            bind(&"192.0.2.1:10809".parse().unwrap(), &SocketAccess::default()).unwrap_err().to_string();
        assert!(error.starts_with("192.0.2.1:10809: not an address of this machine: "), "{error}");
    }
}
