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
    listen::{self, Inherited},
    qmp::{arguments::Arguments, command::Command, error::Error, json::shown},
    registry::{DoorTerms, Registry},
    serving::{Added, Serving},
};

#[derive(Debug)]
enum Place {
    Address(ListenAddress),
    /// Socket by name, passed with this command or to the daemon.
    Passed(String, Option<OwnedFd>),
}

#[derive(Debug)]
pub(super) struct NbdServerStart {
    place: Place,
    credentials: Option<String>,
    /// Id of an object with name rules.
    names: Option<String>,
    max_connections: usize,
    /// False for a command of the command line.
    is_sent: bool,
}

impl Command for NbdServerStart {
    const NAME: &'static str = "nbd-server-start";
    const CHANGES: bool = true;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        let is_sent = arguments.sent().is_some();
        let mut addr = arguments.object("addr")?.ok_or_else(|| Error::missing("addr"))?;
        let place = address(&mut addr)?;
        addr.finish()?;
        let most = arguments.number("max-connections", 0..=u32::MAX.into())?;
        let credentials: Option<String> = arguments.optional("tls-creds")?;
        let names: Option<String> = arguments.optional("tls-authz")?;
        if names.is_some() && credentials.is_none() {
            return Err(Error::rule("tls-authz", "needs tls-creds, which prove the name of a client"));
        }
        Ok(Self {
            place,
            credentials,
            names,
            is_sent,
            max_connections: match most {
                None => NbdServerTerms::default().max_connections,
                // Fits: at most `u32::MAX` by the range.
                Some(most) => most as usize,
            },
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let generic = |error: anyhow::Error| Error::generic(format!("{error:#}"));
        refuse_second(&registry)?;
        let required = |id: &String| {
            let keys = registry.objects.credentials(id);
            let keys =
                keys.ok_or_else(|| Error::generic(format!("No TLS credentials with id '{}'", shown(id))));
            keys.map(|keys| NbdServerTls { required: true, keys })
        };
        let tls = self.credentials.as_ref().map(required).transpose()?;
        let names = self.names.as_ref().map(|id| {
            let names = registry.objects.names(id);
            names.ok_or_else(|| Error::generic(format!("No authorization object with id '{}'", shown(id))))
        });
        let names = names.transpose()?;
        let DoorTerms { workers, access, nbd: standard, inherited, .. } =
            registry.exports.door_terms().map_err(generic)?;
        let (at, listeners) = match self.place {
            Place::Address(address) => {
                if let Some(sandbox) = registry.sandbox() {
                    sandbox.check_address(&address).map_err(generic)?;
                }
                let (endpoint, access) = (ListenEndpoint::Address(address), access.clone());
                let at = endpoint.clone();
                let open = move || listen::open(&endpoint, &access, &mut Inherited::none());
                // Resolving a host name may block.
                (at, reactor::run_blocking(open).await.map_err(generic)?)
            }
            Place::Passed(name, socket) => {
                let mut passed = inherited.borrow_mut();
                if let Some(socket) = socket {
                    passed.add(&name, socket);
                }
                (ListenEndpoint::Passed(name.clone()), vec![passed.named(&name).map_err(generic)?])
            }
        };
        // Again: opening the socket awaited.
        refuse_second(&registry)?;
        let added =
            Added { max_connections: self.max_connections, has_objects: tls.is_some() || names.is_some() };
        let mut terms = NbdServerTerms { max_connections: self.max_connections, ..standard.clone() };
        if names.is_some() {
            terms.access.names = names;
        }
        let serving = Serving::new(nbd::NbdServer::new(tls, terms), at, listeners, workers);
        // Added exports may omit the server's address.
        serving.standard.set(Some(false));
        serving.added.set(self.is_sent.then_some(added));
        registry.add_server(&serving);
        registry.accept(&serving);
        Ok(json!({}))
    }
}

fn refuse_second(registry: &Registry) -> Result<(), Error> {
    match registry.exports.servers().is_empty() {
        true => Ok(()),
        false => Err(Error::generic("NBD server already running")),
    }
}

/// Reads QEMU's `SocketAddress` or `SocketAddressLegacy`.
fn address(addr: &mut Arguments) -> Result<Place, Error> {
    let kind = addr.choice("type", &["inet", "unix", "fd"])?;
    let kind = kind.ok_or_else(|| Error::missing(&addr.name_of("type")))?;
    match addr.object("data")? {
        Some(mut data) => {
            let place = place(&mut data, kind)?;
            data.finish()?;
            Ok(place)
        }
        None => place(addr, kind),
    }
}

fn place(inside: &mut Arguments, kind: usize) -> Result<Place, Error> {
    if kind == 2 {
        let name: String = inside.required("str")?;
        let socket = inside.passed().take(&name).map(PassedFd::into_owned);
        return Ok(Place::Passed(name, socket));
    }
    if kind == 1 {
        let path: String = inside.required("path")?;
        let path = settings::parse_unix_socket(&format!("unix:{path}"));
        return path
            .map(|path| Place::Address(ListenAddress::Unix(path)))
            .map_err(|rule| Error::rule(&inside.name_of("path"), rule));
    }
    let host: String = inside.required("host")?;
    let port: String = inside.required("port")?;
    let written = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    written.parse().map(Place::Address).map_err(|rule: String| Error::rule(&inside.name_of("host"), rule))
}

/// Time that `nbd-server-stop` waits for requests in flight, which do not complete while a file
/// system does not answer.
const TO_STOP: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(super) struct NbdServerStop;

impl Command for NbdServerStop {
    const NAME: &'static str = "nbd-server-stop";
    const CHANGES: bool = true;

    fn read(_: &mut Arguments) -> Result<Self, Error> {
        Ok(Self)
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        match &*registry.exports.servers() {
            [] => Err(Error::generic("NBD server not running")),
            [only] => {
                let (registry, only) = (Rc::clone(&registry), Rc::clone(only));
                // Not cancelled by the time limit: it continues in the background.
                let stopping = reactor::spawn_detached(async move { registry.stop_server(&only).await });
                match reactor::timeout(TO_STOP, stopping).await {
                    Ok(_) => Ok(json!({})),
                    Err(_) => Err(Error::generic(format!(
                        "NBD server stopped, but requests of its clients have been in flight for {} s",
                        TO_STOP.as_secs()
                    ))),
                }
            }
            several => {
                let count = several.len();
                Err(Error::generic(format!(
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
        Arguments::read_all(value, NbdServerStart::read).map(|command| match command.place {
            Place::Address(address) => address.to_string(),
            Place::Passed(name, _) => format!("fd:{name}"),
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
                "Parameter 'addr.type' does not accept value 'vsock' (there are: inet, unix, fd)",
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
