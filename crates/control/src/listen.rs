//! Listening sockets: bound to an address, or passed by the service manager. Never accepts.

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
use settings::{ListenAddress, ListenEndpoint, FileOwner, SocketAccess, control::ControlSocketLocation};
use storage::PassedFiles;

pub use inherited::Inherited;
pub use unix::SocketFile;
pub use uri::Authority;

/// A bound socket.
#[derive(Debug)]
pub struct Listener {
    /// The socket.
    pub socket: OwnedFd,
    /// Its address.
    pub authority: Authority,
    /// Removes the file of a Unix socket that was made here.
    pub file: Option<SocketFile>,
}

/// A socket that listens, as its worker has it, with the file that weir has made for it.
pub(crate) type Listening = (Fd, Option<PathBuf>);

impl Listener {
    /// A socket of another daemon, which was asked to listen at `endpoint`, with its file if it has
    /// made one; the other's until `passed` says that they are ours. Of several it has this number.
    pub(crate) fn adopt(
        socket: OwnedFd,
        endpoint: &ListenEndpoint,
        number: usize,
        file: Option<&Path>,
        passed: &PassedFiles,
    ) -> anyhow::Result<Self> {
        ensure!(
            getsockopt(&socket, AcceptConn).unwrap_or(false),
            "{number}: a socket came that does not listen"
        );
        let authority = match endpoint {
            ListenEndpoint::Address(ListenAddress::Tcp { host, .. }) => {
                let local = TcpListener::from(socket.try_clone()?).local_addr()?;
                Authority::of_tcp(host, local.port())
            }
            _ => {
                let local = UnixListener::from(socket.try_clone()?).local_addr();
                match local.as_ref().ok().and_then(|local| local.as_pathname()) {
                    Some(path) => Authority::of_unix(file.unwrap_or(path)),
                    None => Authority::Unnamed(number),
                }
            }
        };
        let file = file.map(|path| SocketFile::adopt(path, passed));
        Ok(Self { socket, authority, file })
    }
}

/// An address, or all sockets of the service manager that are left.
pub fn open(
    endpoint: &ListenEndpoint,
    access: &SocketAccess,
    inherited: &mut Inherited,
) -> anyhow::Result<Vec<Listener>> {
    match endpoint {
        ListenEndpoint::Address(address) => bind(address, access),
        ListenEndpoint::Inherited => inherited.listeners(),
        ListenEndpoint::Passed(name) => Ok(vec![inherited.named(name)?]),
    }
}

/// The one socket of a virtual machine's door.
pub(crate) fn of_machine(
    socket: &settings::VhostUserSocket,
    access: &SocketAccess,
    inherited: &RefCell<Inherited>,
) -> anyhow::Result<Listener> {
    if let Some(listener) = inherited.borrow_mut().adopted(&name_of_machine(socket)?) {
        return Ok(listener);
    }
    match socket {
        settings::VhostUserSocket::Path(path) => {
            let bound = unix::bind(path, access).with_context(|| socket.to_string())?;
            Ok(at_path(bound))
        }
        settings::VhostUserSocket::Inherited(name) => {
            let listener = inherited.borrow_mut().named(name)?;
            if let Authority::Tcp(authority) = listener.authority {
                bail!("fd:{name}: {authority} is a TCP socket (set ListenStream= to a path)");
            }
            Ok(listener)
        }
    }
}

/// What two daemons call that socket.
pub(crate) fn name_of_machine(socket: &settings::VhostUserSocket) -> io::Result<String> {
    Ok(match socket.path() {
        Some(path) => settings::VhostUserSocket::Path(path::absolute(path)?).to_string(),
        None => socket.to_string(),
    })
}

/// A Unix socket that only its owner and root may connect to: the daemon's user, or another.
pub(crate) fn private(path: &Path, owner: Option<&FileOwner>) -> anyhow::Result<Listener> {
    let access = SocketAccess { owner: owner.cloned(), ..SocketAccess::default() };
    let bound = unix::bind(path, &access);
    Ok(at_path(bound.with_context(|| ListenAddress::Unix(path.to_owned()).to_string())?))
}

/// A control socket, as [`private`] makes it, in a directory that is made if it is weir's own.
pub fn control(place: &ControlSocketLocation, owner: Option<&FileOwner>) -> anyhow::Result<Listener> {
    if let (Some(mode), Some(directory)) = (place.directory_mode, place.path.parent()) {
        make_directory(directory, mode).with_context(|| {
            format!("{}: the directory cannot be made", ListenAddress::Unix(place.path.clone()))
        })?;
    }
    private(&place.path, owner)
}

/// With this mode whatever the umask, unless it is there.
fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(mode)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// The one socket of a service that has only one: the Unix socket that the service manager passed,
/// else one at `path` that only its owner and root may connect to, once `prepare` was called.
///
/// # Errors
/// If several were passed, or something else than a Unix socket; else why it cannot be made.
pub fn only(
    mut inherited: Inherited,
    path: &Path,
    prepare: impl FnOnce() -> io::Result<()>,
) -> anyhow::Result<(UnixListener, Option<SocketFile>)> {
    let listener = match inherited.count() {
        0 => {
            prepare().with_context(|| ListenAddress::Unix(path.to_owned()).to_string())?;
            private(path, None)?
        }
        1 => inherited.listeners()?.remove(0),
        more => bail!("LISTEN_FDS: {more} sockets were passed, and one is served (pass one)"),
    };
    let Listener { socket, authority, file } = listener;
    if let Authority::Tcp(authority) = authority {
        bail!("LISTEN_FDS: {authority} is a TCP socket (set ListenStream= to a path)");
    }
    Ok((socket.into(), file))
}

/// Whether two addresses, as text, are the same one: paths of one socket may be spelled in any way,
/// and lead through links.
pub fn is_same_place(one: &str, other: &str) -> bool {
    let place = |text: &str| {
        let path = path::absolute(text.strip_prefix("unix:")?).ok()?;
        Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?))
    };
    one == other || place(one).is_some_and(|place_of_one| place(other) == Some(place_of_one))
}

/// What is thought of whoever has what a daemon is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// It may be that very daemon.
    MayHave,
    /// It is another.
    AreInTheWay,
}

/// What would keep anybody from listening there, as far as that can be told without listening.
/// Nobody notices.
pub fn check(address: &ListenAddress, others: Others) -> anyhow::Result<()> {
    match address {
        ListenAddress::Unix(path) => unix::check(path, others).with_context(|| address.to_string()),
        ListenAddress::Tcp { host, port } if others == Others::MayHave => resolve(address, host, *port).map(drop),
        ListenAddress::Tcp { host, port } => each_of(address, host, *port, |one| {
            bind_alone(one)?;
            Ok((one.port(), ()))
        })
        .map(drop),
    }
}

/// The same for a control socket, whose directory may be still to be made.
pub fn check_control(place: &ControlSocketLocation, others: Others) -> anyhow::Result<()> {
    let parent = directory_of(&place.path);
    let is_made = place.directory_mode.is_some() && !parent.exists();
    let path = if is_made { parent } else { &place.path };
    unix::check(path, others).with_context(|| ListenAddress::Unix(place.path.clone()).to_string())
}

/// Whether there are the user and the group that sockets are to belong to.
pub fn check_owner(owner: &FileOwner) -> anyhow::Result<()> {
    unix::check_owner(owner)
}

/// Fails where [`TcpListener::bind`] would. Who does not listen keeps nobody from it: the kernel
/// has both at a port, as both say SO_REUSEADDR (socket(7)).
fn bind_alone(at: SocketAddr) -> io::Result<()> {
    let family = if at.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let socket = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, ReuseAddr, &true)?;
    Ok(socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(at))?)
}

fn at_path((listener, file): (UnixListener, SocketFile)) -> Listener {
    Listener { socket: listener.into(), authority: Authority::of_unix(&file.path), file: Some(file) }
}

/// How long an address may outlive the process that listened there: requests on an io_uring keep
/// its sockets open (measured: 10 ms after a kill).
const AFTERLIFE: Duration = Duration::from_millis(500);
/// The kernel does not tell when such a socket goes.
const TRY_AGAIN: Duration = Duration::from_millis(50);

fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = Instant::now() + AFTERLIFE;
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < until => {
                thread::sleep(TRY_AGAIN);
            }
            result => return result,
        }
    }
}

/// One socket, or one for each address that a host name resolves to.
fn bind(address: &ListenAddress, access: &SocketAccess) -> anyhow::Result<Vec<Listener>> {
    match address {
        ListenAddress::Unix(path) => {
            Ok(vec![at_path(unix::bind(path, access).with_context(|| address.to_string())?)])
        }
        ListenAddress::Tcp { host, port } => tcp(address, host, *port),
    }
}

fn tcp(address: &ListenAddress, host: &str, port: u16) -> anyhow::Result<Vec<Listener>> {
    each_of(address, host, port, |one| {
        let listener = TcpListener::bind(one)?;
        let port = listener.local_addr()?.port();
        let authority = Authority::of_tcp(host, port);
        Ok((port, Listener { socket: listener.into(), authority, file: None }))
    })
}

/// Has `bind` tried with each address that a host name resolves to; it returns the port, too.
fn each_of<T>(
    address: &ListenAddress,
    host: &str,
    port: u16,
    bind: impl Fn(SocketAddr) -> io::Result<(u16, T)>,
) -> anyhow::Result<Vec<T>> {
    let addresses = resolve(address, host, port)?;
    let mut bound = Vec::new();
    // Any free port is chosen once, so that every address of the name has the same.
    let mut chosen = port;
    let mut absent = None;
    for mut one in addresses {
        one.set_port(chosen);
        match patiently(|| bind(one)) {
            Ok((port, one)) => {
                chosen = port;
                bound.push(one);
            }
            // A name may stand for IPv6 where the machine has none; its other addresses will do.
            Err(error) if is_absent(&error) => absent = Some(error),
            Err(error) => return Err(refused(address, chosen, &error)),
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
    addresses.dedup();
    Ok(addresses)
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT)
}

fn refused(address: &ListenAddress, port: u16, error: &io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::AddrInUse => anyhow!(
            "{address}: the port is in use by another program (`ss -ltnp 'sport = {port}'` shows which; stop it, or choose another port)"
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
    fn a_free_port_is_the_same_on_every_address_of_a_name() {
        let listeners = bind(&"localhost:0".parse().unwrap(), &SocketAccess::default()).unwrap();
        let first = listeners[0].authority.to_string();
        assert!(listeners.iter().all(|listener| listener.authority.to_string() == first));
        let port: u16 = first.rsplit_once(':').unwrap().1.parse().unwrap();
        assert_ne!(port, 0);
        TcpStream::connect(("localhost", port)).unwrap();
    }

    #[test]
    fn a_port_in_use_says_who_could_tell() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error =
            bind(&format!("127.0.0.1:{port}").parse().unwrap(), &SocketAccess::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "127.0.0.1:{port}: the port is in use by another program (`ss -ltnp 'sport = {port}'` shows which; \
                 stop it, or choose another port)"
            )
        );
    }

    #[test]
    fn a_port_is_looked_at_and_nobody_notices() {
        let address = |port: u16| -> ListenAddress { format!("127.0.0.1:{port}").parse().unwrap() };
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        check(&address(port), Others::MayHave).unwrap();
        let error = check(&address(port), Others::AreInTheWay).unwrap_err().to_string();
        assert!(error.contains("the port is in use by another program"), "{error}");
        taken.set_nonblocking(true).unwrap();
        assert_eq!(taken.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(taken);
        check(&address(port), Others::AreInTheWay).unwrap();
        check(&address(0), Others::AreInTheWay).unwrap();
        // From the block that RFC 5737 keeps for documentation.
        let error = check(&"192.0.2.1:10809".parse().unwrap(), Others::AreInTheWay).unwrap_err();
        assert!(error.to_string().contains("not an address of this machine"), "{error}");
    }

    #[test]
    fn the_directory_of_a_control_socket_is_made_as_it_is_to_be() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("weir/qmp.sock");
        let place = ControlSocketLocation { path: path.clone(), directory_mode: Some(0o700) };
        let listener = control(&place, None).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o700, 0o600));
        // What is there is somebody's, with the mode that they gave it.
        fs::set_permissions(path.parent().unwrap(), Permissions::from_mode(0o750)).unwrap();
        drop(listener);
        drop(control(&place, None).unwrap());
        assert_eq!(mode(path.parent().unwrap()), 0o750);
        let nowhere = ControlSocketLocation { directory_mode: None, path: root.path().join("other/qmp.sock") };
        assert!(format!("{:#}", control(&nowhere, None).unwrap_err()).contains("does not exist (create it)"));
    }

    #[test]
    fn an_address_of_another_machine_is_refused() {
        // From the block that RFC 5737 keeps for documentation.
        let error =
            bind(&"192.0.2.1:10809".parse().unwrap(), &SocketAccess::default()).unwrap_err().to_string();
        assert!(error.starts_with("192.0.2.1:10809: not an address of this machine: "), "{error}");
    }
}
