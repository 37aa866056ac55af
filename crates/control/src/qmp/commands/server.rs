//! `nbd-server-start` and `nbd-server-stop`: an NBD server for exports that are added later, if the
//! daemon has none.
//!
//! The address has the form of QMP (`{"type": "unix", "data": {"path": …}}`), or the form without
//! `data` of a command line.

use std::{os::fd::OwnedFd, rc::Rc};

use export::nbd::{self, NbdServerTerms, NbdServerTls};
use policy::time::Duration;
use reactor::operation::PassedFd;
use serde_json::{Value, json};
use settings::{ListenAddress, ListenEndpoint};

use crate::{
    listen::{self, InheritedSockets},
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError, json::excerpt},
    registry::{EndpointParameters, Registry},
    running_server::{AddedServer, RunningServer},
};

#[derive(Debug)]
enum NbdServerAddress {
    Address(ListenAddress),
    /// Socket by name, passed with this command or to the daemon.
    Passed(String, Option<OwnedFd>),
}

#[derive(Debug)]
pub(super) struct NbdServerStart {
    place: NbdServerAddress,
    credentials: Option<String>,
    /// Id of an object with name rules.
    names: Option<String>,
    max_connections: usize,
    /// False for a command of the command line.
    is_sent: bool,
}

impl QmpCommand for NbdServerStart {
    const NAME: &'static str = "nbd-server-start";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let is_sent = arguments.sent_json().is_some();
        let mut addr = arguments.object("addr")?.ok_or_else(|| QmpError::missing("addr"))?;
        let place = read_address(&mut addr)?;
        addr.finish()?;
        let max = arguments.number("max-connections", 0..=u32::MAX.into())?;
        let credentials: Option<String> = arguments.optional("tls-creds")?;
        let names: Option<String> = arguments.optional("tls-authz")?;
        if names.is_some() && credentials.is_none() {
            return Err(QmpError::rule("tls-authz", "needs tls-creds, which prove the name of a client"));
        }
        Ok(Self {
            place,
            credentials,
            names,
            is_sent,
            max_connections: match max {
                None => NbdServerTerms::default().max_connections,
                // Fits: at most `u32::MAX` by the range.
                Some(max) => max as usize,
            },
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let generic = |error: anyhow::Error| QmpError::generic(format!("{error:#}"));
        check_none_running(&registry)?;
        let required = |id: &String| {
            let keys = registry.objects.credentials(id);
            let keys = keys
                .ok_or_else(|| QmpError::generic(format!("No TLS credentials with id '{}'", excerpt(id))));
            keys.map(|keys| NbdServerTls { required: true, keys })
        };
        let tls = self.credentials.as_ref().map(required).transpose()?;
        let names = self.names.as_ref().map(|id| {
            let names = registry.objects.names(id);
            names.ok_or_else(|| {
                QmpError::generic(format!("No authorization object with id '{}'", excerpt(id)))
            })
        });
        let names = names.transpose()?;
        let EndpointParameters { workers, access, nbd: standard, inherited, .. } =
            registry.exports.endpoint_parameters().map_err(generic)?;
        let (at, listeners) = match self.place {
            NbdServerAddress::Address(address) => {
                if let Some(sandbox) = registry.sandbox() {
                    sandbox.check_address(&address).map_err(generic)?;
                }
                let (endpoint, access) = (ListenEndpoint::Address(address), access.clone());
                let at = endpoint.clone();
                let open = move || listen::open_listeners(&endpoint, &access, &mut InheritedSockets::empty());
                // Resolving a host name may block.
                (at, reactor::run_blocking(open).await.map_err(generic)?)
            }
            NbdServerAddress::Passed(name, socket) => {
                let mut passed = inherited.borrow_mut();
                if let Some(socket) = socket {
                    passed.add(&name, socket);
                }
                (ListenEndpoint::Passed(name.clone()), vec![passed.take_named(&name).map_err(generic)?])
            }
        };
        // Checked again: another command may have started a server while the socket was opened.
        check_none_running(&registry)?;
        let added = AddedServer {
            max_connections: self.max_connections,
            has_objects: tls.is_some() || names.is_some(),
        };
        let mut terms = NbdServerTerms { max_connections: self.max_connections, ..standard.clone() };
        if names.is_some() {
            terms.access.names = names;
        }
        let serving = RunningServer::new(nbd::NbdServer::new(tls, terms), at, listeners, workers);
        // Added exports may omit the server's address.
        serving.default_for_disks.set(Some(false));
        serving.added.set(self.is_sent.then_some(added));
        registry.add_server(&serving);
        registry.accept(&serving);
        Ok(json!({}))
    }
}

fn check_none_running(registry: &Registry) -> Result<(), QmpError> {
    match registry.exports.servers().is_empty() {
        true => Ok(()),
        false => Err(QmpError::generic("NBD server already running")),
    }
}

/// Reads QEMU's `SocketAddress` or `SocketAddressLegacy`.
fn read_address(addr: &mut QmpArguments) -> Result<NbdServerAddress, QmpError> {
    let kind = addr.choice("type", &["inet", "unix", "fd"])?;
    let kind = kind.ok_or_else(|| QmpError::missing(&addr.full_name("type")))?;
    match addr.object("data")? {
        Some(mut data) => {
            let address = read_socket_address(&mut data, kind)?;
            data.finish()?;
            Ok(address)
        }
        None => read_socket_address(addr, kind),
    }
}

fn read_socket_address(inside: &mut QmpArguments, kind: usize) -> Result<NbdServerAddress, QmpError> {
    if kind == 2 {
        let name: String = inside.required("str")?;
        let socket = inside.descriptors().take_named(&name).map(PassedFd::into_owned);
        return Ok(NbdServerAddress::Passed(name, socket));
    }
    if kind == 1 {
        let path: String = inside.required("path")?;
        let path = settings::parse_unix_socket(&format!("unix:{path}"));
        return path
            .map(|path| NbdServerAddress::Address(ListenAddress::Unix(path)))
            .map_err(|rule| QmpError::rule(&inside.full_name("path"), rule));
    }
    let host: String = inside.required("host")?;
    let port: String = inside.required("port")?;
    let written = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    written
        .parse()
        .map(NbdServerAddress::Address)
        .map_err(|rule: String| QmpError::rule(&inside.full_name("host"), rule))
}

/// Time that `nbd-server-stop` waits for requests in flight, which do not complete while a file
/// system does not answer.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(super) struct NbdServerStop;

impl QmpCommand for NbdServerStop {
    const NAME: &'static str = "nbd-server-stop";
    const CHANGES_STRUCTURE: bool = true;

    fn read(_: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self)
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        match &*registry.exports.servers() {
            [] => Err(QmpError::generic("NBD server not running")),
            [only] => {
                let (registry, only) = (Rc::clone(&registry), Rc::clone(only));
                // Not cancelled by the time limit: it continues in the background.
                let stopping = reactor::spawn_detached(async move { registry.stop_server(&only).await });
                match reactor::timeout(STOP_TIMEOUT, stopping).await {
                    Ok(_) => Ok(json!({})),
                    Err(_) => Err(QmpError::generic(format!(
                        "NBD server stopped, but requests of its clients have been in flight for {} s",
                        STOP_TIMEOUT.as_secs()
                    ))),
                }
            }
            several => {
                let count = several.len();
                Err(QmpError::generic(format!(
                    "there are {count} NBD servers; this command stops one only if it is the only one"
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<String, String> {
        QmpArguments::read_all(value, NbdServerStart::read).map(|command| match command.place {
            NbdServerAddress::Address(address) => address.to_string(),
            NbdServerAddress::Passed(name, _) => format!("fd:{name}"),
        })
    }

    #[test]
    fn addresses_are_qemus() {
        let with = |addr: Value| read(json!({ "addr": addr }));
        assert_eq!(with(json!({"type": "unix", "data": {"path": "/a"}})).unwrap(), "unix:/a");
        assert_eq!(with(json!({"type": "unix", "path": "/a"})).unwrap(), "unix:/a");
        let inet = json!({"type": "inet", "data": {"host": "::1", "port": "7"}});
        assert_eq!(with(inet).unwrap(), "[::1]:7");
        assert_eq!(with(json!({"type": "fd", "data": {"str": "nbd"}})).unwrap(), "fd:nbd");
        for (addr, expect) in [
            (
                json!({"type": "vsock"}),
                "Parameter 'addr.type' does not accept value 'vsock' (accepted: inet, unix, fd)",
            ),
            (json!({"type": "unix", "data": {}}), "Parameter 'addr.data.path' is missing"),
            (json!({"type": "inet", "host": "a"}), "Parameter 'addr.port' is missing"),
            (json!({"type": "inet", "host": "a", "port": "1", "to": 5}), "Parameter 'addr.to' is unexpected"),
        ] {
            assert_eq!(with(addr).unwrap_err(), expect);
        }
        let authz = json!({"addr": {"type": "unix", "path": "/a"}, "tls-authz": "x"});
        assert!(read(authz).unwrap_err().starts_with("Parameter 'tls-authz' needs tls-creds"));
    }
}
