//! Addresses: each is bound, or transferred from another daemon, together with its exports. Accepts
//! no client.

use std::{collections::HashSet, path::PathBuf, rc::Rc};

use anyhow::{Context as _, anyhow};
use control::{
    assemble,
    listen::{self, BoundListener, InheritedSockets},
    planned_export,
    reconcile::source::StartSource,
    registry::Registry,
    upgrade::http_endpoint_name,
};
use export::nbd;
use reactor::{ReactorWorker, error::descriptor_remedy, operation::Fd};
use settings::{
    ControlSocketPolicy, DesiredState, ExportSpec, ListenAddress, ListenEndpoint, ProcessSpec, TlsConfig,
    control::ControlSocketLocation,
};

/// Opens the configured control sockets and the default one, or returns the reason why the default
/// one is missing. The daemon runs without the default one unless it is required: it may be the
/// second daemon on this host.
fn control_sockets(
    service: &ProcessSpec,
    source: &mut dyn StartSource,
) -> anyhow::Result<(Vec<BoundListener>, Option<anyhow::Error>)> {
    let owner = service.user.as_ref();
    let mut open = |location: ControlSocketLocation| {
        source.control(&location.path)?.map_or_else(|| listen::control_listener(&location, owner), Ok)
    };
    let named = |path: &PathBuf| open(ControlSocketLocation::at(path.clone()));
    let mut sockets: Vec<_> = service.qmp.iter().map(named).collect::<anyhow::Result<_>>()?;
    if service.control_socket() == ControlSocketPolicy::Off {
        return Ok((sockets, None));
    }
    let location = ControlSocketLocation::for_daemon().map_err(|rule| anyhow!("control socket: {rule}"));
    match location.and_then(open) {
        Ok(listener) => sockets.push(listener),
        Err(error) if service.control_socket() == ControlSocketPolicy::Required => return Err(error),
        Err(error) => return Ok((sockets, Some(error))),
    }
    Ok((sockets, None))
}

/// Binds the HTTP addresses, or takes them from another daemon. The registry keeps copies for the
/// next upgrade.
fn bind_http(
    service: &ProcessSpec,
    source: &mut dyn StartSource,
    tls: Option<&nbd::NbdServerTls>,
    registry: &Registry,
) -> anyhow::Result<weir_http::HttpEndpoints> {
    let mut open = |kind: &'static str, address: &ListenAddress| -> anyhow::Result<Vec<BoundListener>> {
        // A listener from the old process keeps connections that wait in its queue.
        let taken = source.http_listeners(kind, address)?;
        let bind = || weir_http::bind(kind, address, &service.sockets);
        let listeners = taken.map_or_else(bind, Ok)?;
        let known = listeners.iter().map(|listener| -> std::io::Result<_> {
            let path = listener.file.as_ref().map(|file| file.path().to_owned());
            Ok((Fd::from(listener.socket.try_clone()?), path))
        });
        let known = known.collect::<Result<_, _>>().context(kind)?;
        registry.lifecycle.http_sockets.borrow_mut().push((http_endpoint_name(kind, address), known));
        Ok(listeners)
    };
    let metrics = service.metrics.as_ref().map(|address| open("metrics", address)).transpose()?;
    let page = |page: &settings::HttpConfig| -> anyhow::Result<_> {
        let token = page.token_file.as_deref().map(weir_http::ChangeToken::read).transpose()?;
        let is_encrypted = page.is_encrypted(&service.tls);
        if !is_encrypted && !page.is_local() {
            tracing::warn!(
                at = %page.address,
                "http: unencrypted: others on the network can read names and activity of disks \
                 (set tls and tls-certificates, or use a local address)"
            );
        }
        let keys = tls.filter(|_| is_encrypted).map(|tls| tls.keys.clone());
        let listeners = open("http", &page.address)?;
        Ok(weir_http::PageEndpoint { listeners, names: page.names.clone(), token, tls: keys })
    };
    Ok(weir_http::HttpEndpoints { metrics, page: service.page().as_ref().map(page).transpose()? })
}

/// Addresses that are bound before the first export runs, and accept clients once all run.
pub(super) struct BoundAddresses {
    pub(super) workers: Rc<Vec<ReactorWorker>>,
    pub(super) control: Vec<BoundListener>,
    /// Reason why the daemon has no default control socket.
    pub(super) missing: Option<anyhow::Error>,
    pub(super) http: Option<weir_http::HttpEndpoints>,
    /// Number of sockets that the service manager passed.
    pub(super) inherited: usize,
}

/// Starts the workers and binds the addresses of the daemon itself. Prepares the sockets of
/// exports.
pub(super) fn bind(
    plan: &DesiredState,
    registry: &Rc<Registry>,
    tls: Option<&nbd::NbdServerTls>,
    mut inherited: InheritedSockets,
    source: &mut dyn StartSource,
) -> anyhow::Result<BoundAddresses> {
    let workers = Rc::new(start_workers(&plan.process)?);
    let (control, missing) = control_sockets(&plan.process, source)?;
    registry.lifecycle.watchdog.set(sd_notify::watchdog_enabled().or_else(|| source.watchdog()));
    let count = source.inherited_sockets().unwrap_or_else(|| inherited.unused());
    let http = bind_http(&plan.process, source, tls, registry)?;
    // Listeners of the old process take the place of sockets that the service manager passed.
    source.pass_vhost_user_sockets(&mut inherited)?;
    for ExportSpec { target, .. } in &plan.exports {
        target.inherited_name().map(|name| inherited.reserve(name)).transpose()?;
    }
    for settings::NbdServerSpec { endpoint, .. } in &plan.servers {
        if let (ListenEndpoint::Passed(name), false) = (endpoint, source.has_server(endpoint)) {
            inherited.reserve(name)?;
        }
    }
    let terms = assemble::nbd_server_terms(&plan.process, &registry.events);
    registry.exports.set_endpoint_parameters(
        &workers,
        &plan.process.sockets,
        terms,
        inherited,
        &plan.process.tls,
    );
    Ok(BoundAddresses { workers, control, missing, http: Some(http), inherited: count })
}

fn start_workers(service: &ProcessSpec) -> anyhow::Result<Vec<ReactorWorker>> {
    let start = |number: usize| ReactorWorker::start(&format!("worker {number}"), service.poll);
    let workers: std::io::Result<_> = (0..service.workers).map(start).collect();
    workers.map_err(|error| {
        let may_be = match descriptor_remedy(&error) {
            Some(_) => "",
            None => " (is kernel.io_uring_disabled set, or RLIMIT_MEMLOCK too low?)",
        };
        anyhow::Error::new(error).context(format!("a worker cannot be started{may_be}"))
    })
}

/// IDs of exports that exist or are to be added.
pub(super) fn export_ids(registry: &Registry) -> HashSet<String> {
    let running = registry.exports.all().into_iter().map(|export| export.id.clone());
    running.chain(registry.exports.awaited_endpoints.borrow().keys().cloned()).collect()
}

/// URIs of the exports that exist or are planned now and are not in `before`.
pub(super) fn uris_beyond(before: &HashSet<String>, registry: &Registry, tls: &TlsConfig) -> Vec<String> {
    let running = registry.exports.all();
    let running = running.iter().filter(|export| !before.contains(&export.id));
    let awaited = registry.exports.awaited_endpoints.borrow();
    let awaited = awaited.iter().filter(|(id, _)| !before.contains(*id)).map(|(_, target)| target.address());
    running.flat_map(|export| planned_export::export_uris(export, tls)).chain(awaited).collect()
}
