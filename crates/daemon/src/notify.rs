//! What the service manager is told (sd_notify(3)), over one socket that is opened at the start:
//! later the sandbox calls nobody.

use std::{
    fmt::Write as _,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::OnceLock,
};

use sd_notify::NotifyState;

static MANAGER: OnceLock<Option<UnixDatagram>> = OnceLock::new();

/// Opens it; what keeps it from that is told in the log.
pub(crate) fn open() {
    MANAGER.get_or_init(|| {
        connect().unwrap_or_else(|error| {
            warn(&error);
            None
        })
    });
}

fn connect() -> io::Result<Option<UnixDatagram>> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let socket = UnixDatagram::unbound()?;
    match name.as_bytes().strip_prefix(b"@") {
        Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => socket.connect(name)?,
    }
    Ok(Some(socket))
}

/// Tells all of it at once, if there is a service manager.
pub(crate) fn tell(states: &[NotifyState<'_>]) {
    let Some(Some(socket)) = MANAGER.get() else { return };
    let mut message = String::new();
    for state in states {
        // Writing to a string does not fail.
        let _ = writeln!(message, "{state}");
    }
    if let Err(error) = socket.send(message.as_bytes()) {
        warn(&error);
    }
}

fn warn(error: &io::Error) {
    tracing::warn!(%error, "the service manager at NOTIFY_SOCKET cannot be told");
}
