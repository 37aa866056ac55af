//! Where clients come: every address bound, or taken over from another daemon, and the exports that
//! they find there. Lets nobody in.

use std::{collections::HashSet, path::PathBuf, rc::Rc};

use anyhow::{Context as _, anyhow};
use control::{
    assemble::{self, Late},
    listen::{self, Inherited, Listener},
    registry::Registry,
    serving::Serving,
    takeover::{newcomer::Newcomer, told_name},
    wanted::{self, Wanted},
};
use export::nbd;
use reactor::{Worker, op::Fd};
use settings::{Address, DoorExport, Endpoint, Plan, Service, Standard, Tls, control::ControlSocket};

/// Those that were named, and the one that nobody named, or why that cannot be had. A daemon does
/// without that one, unless it must not: it may be the second on this machine.
pub(super) fn control_sockets(
    service: &Service,
    mut newcomer: Option<&mut Newcomer>,
) -> anyhow::Result<(Vec<Listener>, Option<anyhow::Error>)> {
    let owner = service.user.as_ref();
    let mut open = |place: ControlSocket| {
        let taken = newcomer.as_mut().map(|newcomer| newcomer.control(&place.path)).transpose()?;
        taken.flatten().map_or_else(|| listen::control(&place, owner), Ok)
    };
    let named = |path: &PathBuf| open(ControlSocket::at(path.clone()));
    let mut sockets: Vec<_> = service.qmp.iter().map(named).collect::<anyhow::Result<_>>()?;
    if service.control == Standard::Off {
        return Ok((sockets, None));
    }
    let place = ControlSocket::of_daemon().map_err(|rule| anyhow!("control socket: {rule}"));
    match place.and_then(open) {
        Ok(listener) => sockets.push(listener),
        Err(error) if service.control == Standard::Must => return Err(error),
        Err(error) => return Ok((sockets, Some(error))),
    }
    Ok((sockets, None))
}

/// Where figures are asked for over HTTP: bound, or another daemon's. The registry knows it too,
/// for the next one.
pub(super) fn told(
    service: &Service,
    mut newcomer: Option<&mut Newcomer>,
    tls: Option<&nbd::Tls>,
    registry: &Registry,
) -> anyhow::Result<weir_http::Doors> {
    let mut open = |what: &'static str, address: &Address| -> anyhow::Result<Vec<Listener>> {
        let taken = newcomer.as_mut().map(|newcomer| newcomer.told(what, address)).transpose()?;
        let bind = || weir_http::bind(what, address, &service.sockets);
        let listeners = taken.flatten().map_or_else(bind, Ok)?;
        let known = listeners.iter().map(|listener| -> std::io::Result<_> {
            let path = listener.file.as_ref().map(|file| file.path().to_owned());
            Ok((Fd::from(listener.socket.try_clone()?), path))
        });
        let known = known.collect::<Result<_, _>>().context(what)?;
        registry.told.borrow_mut().push((told_name(what, address), known));
        Ok(listeners)
    };
    let metrics = service.metrics.as_ref().map(|address| open("metrics", address)).transpose()?;
    let page = |page: &settings::Http| -> anyhow::Result<_> {
        let token = page.token_file.as_deref().map(weir_http::Token::read).transpose()?;
        let is_encrypted = page.is_encrypted(&service.tls);
        if !is_encrypted && !page.is_local() {
            tracing::warn!(
                at = %page.address,
                "http: everybody on the way reads the names of disks and what they do (set tls and tls-certificates, or use an address of this host alone)"
            );
        }
        let keys = tls.filter(|_| is_encrypted).map(|tls| tls.keys.clone());
        let listeners = open("http", &page.address)?;
        Ok(weir_http::Page { listeners, names: page.names.clone(), token, keys })
    };
    Ok(weir_http::Doors { metrics, page: service.http.as_ref().map(page).transpose()? })
}

/// Binds every address, or takes it over, and lets nobody in yet; returns the exports' URIs.
pub(super) async fn listen(
    plan: &Plan,
    mut inherited: Inherited,
    mut newcomer: Option<&mut Newcomer>,
    tls: Option<nbd::Tls>,
    workers: &Rc<Vec<Worker>>,
    registry: &Rc<Registry>,
) -> anyhow::Result<Vec<String>> {
    if let Some(newcomer) = &mut newcomer {
        newcomer.pass_machines(&mut inherited)?;
    }
    for DoorExport { door, .. } in &plan.doors {
        door.passed().map(|name| inherited.keep(name)).transpose()?;
    }
    for settings::Server { endpoint, .. } in &plan.servers {
        let is_others = newcomer.as_ref().is_some_and(|newcomer| newcomer.has_server(endpoint));
        if let (Endpoint::Passed(name), false) = (endpoint, is_others) {
            inherited.keep(name)?;
        }
    }
    // All addresses first: where one fails, no client should have seen the others.
    let open = |server: &settings::Server| {
        let taken = newcomer.as_mut().map(|newcomer| newcomer.listeners(&server.endpoint)).transpose()?;
        match taken.flatten() {
            Some(listeners) => Ok(listeners),
            None => listen::open(&server.endpoint, &plan.service.sockets, &mut inherited),
        }
    };
    let listeners: Vec<_> = plan.servers.iter().map(open).collect::<anyhow::Result<_>>()?;
    for (planned, listeners) in plan.servers.iter().zip(listeners) {
        let server = nbd::Server::new(tls.clone(), assemble::terms(&plan.service, &registry.events));
        server.expect(planned.exports.iter().map(|export| export.name.clone()));
        let serving = Serving::new(server, planned.endpoint.clone(), listeners, workers);
        serving.standard.set(planned.standard);
        registry.add_server(&serving);
    }
    let terms = assemble::terms(&plan.service, &registry.events);
    registry.let_doors(workers, &plan.service.sockets, terms, inherited, &plan.service.tls);
    exports(plan, registry, newcomer.as_deref(), |disk| !assemble::is_late(disk)).await
}

/// Has the exports of these disks run; returns their URIs.
async fn exports(
    plan: &Plan,
    registry: &Rc<Registry>,
    newcomer: Option<&Newcomer>,
    which: impl Fn(&settings::PlacedDisk) -> bool,
) -> anyhow::Result<Vec<String>> {
    let is_there = |disk: &&settings::PlacedDisk| which(disk) && !registry.is_unopened(&disk.name);
    let names: HashSet<_> = plan.disks.iter().filter(is_there).map(|disk| &disk.name).collect();
    let mut uris = Vec::new();
    for wanted in Wanted::all(plan).iter().filter(|wanted| names.contains(&wanted.disk)) {
        if newcomer.as_ref().is_some_and(|newcomer| newcomer.puts_off(wanted, registry)) {
            uris.push(wanted.told(registry).1);
            continue;
        }
        let export = wanted.add(registry).await?;
        uris.extend(wanted::uris(&export, &plan.service.tls));
    }
    Ok(uris)
}

/// Opens what is opened in the sandbox, with its exports; returns their URIs.
pub(super) async fn late_ones(
    plan: &Rc<Plan>,
    registry: &Rc<Registry>,
    newcomer: Option<&Newcomer>,
    late: &mut Late,
) -> anyhow::Result<Vec<String>> {
    late.open_at_once(plan, registry, (assemble::is_late, is_awaited(plan, registry, newcomer))).await?;
    exports(plan, registry, newcomer, assemble::is_late).await
}

/// Which disks a start waits for, however long they take to open: what another daemon serves
/// already, and the one disk of a command line.
pub(super) fn is_awaited(
    plan: &Plan,
    registry: &Registry,
    newcomer: Option<&Newcomer>,
) -> impl Fn(&str) -> bool {
    let is_alone = plan.disks.len() == 1 && registry.config.is_none();
    move |disk| is_alone || newcomer.is_some_and(|newcomer| newcomer.has_disk(disk))
}

/// Of exports that there are, or are to be.
pub(super) fn export_ids(registry: &Registry) -> HashSet<String> {
    let running = registry.exports().into_iter().map(|export| export.id.clone());
    running.chain(registry.awaited.borrow().keys().cloned()).collect()
}

/// How clients call those exports that have come since there were these.
pub(super) fn uris_beyond(before: &HashSet<String>, registry: &Registry, tls: &Tls) -> Vec<String> {
    let running = registry.exports();
    let running = running.iter().filter(|export| !before.contains(&export.id));
    let awaited = registry.awaited.borrow();
    let awaited = awaited.iter().filter(|(id, _)| !before.contains(*id)).map(|(_, door)| door.address());
    running.flat_map(|export| wanted::uris(export, tls)).chain(awaited).collect()
}
