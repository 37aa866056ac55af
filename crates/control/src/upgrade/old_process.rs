//! Old process of an upgrade.
//!
//! ```text
//!   offer ─► flush ─► stop accepting ─► quiesce ─► write image metadata ─► state ─► end
//!            └─ still serves ─────────┘ └─ no client is served: some milliseconds ─┘
//! ```
//!
//! After any failure before the end it resumes where it stopped: connections from their unparsed
//! bytes, images from their files. Never cleans up after it has sent `Yours`: files, locks and
//! sockets belong to the new process.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use block::{disk::Disk, layer::throttle::ThrottleGroup};
use console::logging;
use export::vhost_user_blk::{self, QuiescedFrontEnd, SessionMessage};
use nix::errno::Errno;
use policy::time::Duration;
use reactor::error::Error;
use sd_notify::NotifyState;

use super::{
    added_objects,
    channel::UpgradeChannel,
    clock_ns,
    counters::{DaemonCounterState, DiskCounterState, ThrottleCounterState},
    devices, endpoint_name,
    identity::DiskIdentity,
    messages::{
        AddedDiskState, BucketLevelsState, ClientState, FrontEndState, ObjectOrigin, OfferedDisk,
        OfferedExport, OfferedServer, OfferedVhostUser, PartialMessage, ProcessState, QuiesceOutcome,
        TransferredDisk, TransferredGroup, UPGRADE_FORMAT, UpgradeMessage, UpgradeOffer, VhostMessageState,
    },
    release_later, transferred_settings,
};
use crate::{
    endpoints::HostEndpoint,
    listen::ListeningSocket,
    notify,
    registry::{Registry, RunningDisk, RunningEndpoint, RunningExport},
    running_server::RunningServer,
};

/// Time limit for opening everything in the new process; it derives the keys of encrypted images.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of the new process while no client is served.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for pending handshakes after accepting has stopped.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for requests in flight.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the service manager to read the new main process id; if this process ends before,
/// the manager considers the service ended.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without progress in reading replies after which a client is disconnected.
const STALL_TIMEOUT: Duration = Duration::from_secs(5);
/// As [`STALL_TIMEOUT`], during the quiesce.
const STALL_TIMEOUT_QUIESCED: Duration = Duration::from_secs(1);
/// Descriptors of a front end: its socket and memory. Each virtqueue has two more.
const FRONT_END_DESCRIPTORS: u64 = 10;
/// Time that all disks wait for the reopening of images after a failure.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between attempts to reopen an image.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

/// Request of a new process.
#[derive(Debug)]
pub(crate) struct UpgradeRequest {
    /// Socket for the transfer; passed, as the sandbox permits no connections.
    pub(crate) socket: OwnedFd,
    pub(crate) format: u64,
    pub(crate) version: String,
}

/// Begins an upgrade, and returns; the rest runs in the background and is logged.
///
/// # Errors
/// Reason why an upgrade is impossible.
pub(crate) async fn begin_upgrade(registry: &Rc<Registry>, request: UpgradeRequest) -> anyhow::Result<()> {
    let sizes = refresh_sizes(registry).await;
    sizes.and_then(|()| begin_or_reject(registry, request)).inspect_err(|error| {
        tracing::warn!("upgrade rejected, this process continues: {error:#}");
    })
}

/// Probes the sizes of all images, so that the new process receives current sizes.
async fn refresh_sizes(registry: &Registry) -> anyhow::Result<()> {
    let refresh = |running: Rc<RunningDisk>| {
        reactor::spawn_joinable(async move {
            let size = running.disk.refresh_size_within(IN_FLIGHT_TIMEOUT).await;
            size.with_context(|| format!("disk {}: its size cannot be read", running.disk.name()))
        })
    };
    let tasks: Vec<_> = registry.disks.all().into_iter().map(refresh).collect();
    for task in tasks {
        task.await?;
    }
    Ok(())
}

fn begin_or_reject(registry: &Rc<Registry>, request: UpgradeRequest) -> anyhow::Result<()> {
    ensure!(
        request.format == UPGRADE_FORMAT,
        "weir {} uses upgrade format {}, and the running weir {} uses {UPGRADE_FORMAT} (restart it)",
        request.version,
        request.format,
        env!("CARGO_PKG_VERSION")
    );
    // All checks and the flag below run without an await, so neither an upgrade nor a change
    // interleaves.
    ensure!(!registry.lifecycle.is_upgrading.get(), "another upgrade is in progress (wait for it)");
    ensure!(!registry.lifecycle.is_ending.get(), "weir is stopping");
    ensure!(
        !registry.lifecycle.structure_lock.is_exclusively_locked(),
        "a reload is in progress (try again)"
    );
    // `is_upgrading` rejects later additions and removals; one in progress rejects the upgrade.
    if let Some((name, operation)) = registry.disks.unlisted_operation() {
        bail!("{name} is being {operation} at this moment (try again once that is done)");
    }
    // A job in its last phase does not use the disk any more, but still writes to its target.
    registry.jobs.check_all_idle()?;
    let (offer, descriptors) = build_offer(registry).map_err(explain_descriptor_limit)?;
    check_new_version(&offer, &request.version)?;
    let channel = UpgradeChannel::from_passed(request.socket)?;
    tracing::info!(
        version = request.version,
        process = channel.process(),
        "an upgrade to a new process begins"
    );
    registry.lifecycle.is_upgrading.set(true);
    let registry = Rc::clone(registry);
    reactor::spawn(async move {
        let result = run_upgrade(&registry, channel, offer, descriptors).await;
        let Err(error) = result;
        tracing::warn!("the upgrade failed, this process continues: {error:#}");
        registry.lifecycle.is_upgrading.set(false);
    });
    Ok(())
}

/// First version (major, minor) that reads the keys of an added disk.
const FIRST_VERSION_WITH_KEYS: [u64; 2] = [0, 2];

/// Fails if a new process of this version could not read the offer, although its upgrade format has
/// the same number.
fn check_new_version(offer: &UpgradeOffer, version: &str) -> anyhow::Result<()> {
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    let numbers = [(); 2].map(|()| numbers.next().unwrap_or(0));
    let has_keys = |disk: &&OfferedDisk| {
        matches!(&disk.origin, ObjectOrigin::Added(AddedDiskState { keys: Some(_), .. }))
    };
    match offer.disks.iter().find(has_keys).filter(|_| numbers < FIRST_VERSION_WITH_KEYS) {
        Some(disk) => bail!(
            "disk {}: it was added by `weir disk add`, which weir {version} cannot take over from \
             weir {} (write the disk into the config file, or remove it; or stop this weir and \
             start weir {version})",
            disk.name,
            env!("CARGO_PKG_VERSION")
        ),
        None => Ok(()),
    }
}

/// Adds to an error about the descriptor limit that this process has reached it; otherwise the user
/// would examine the new process.
fn explain_descriptor_limit(error: anyhow::Error) -> anyhow::Error {
    let is_out = |cause: &(dyn std::error::Error + 'static)| {
        let of_system = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        of_system.or(cause.downcast_ref().copied().map(Error::errno)) == Some(Errno::EMFILE as i32)
    };
    match error.chain().any(is_out) {
        true => anyhow!(
            "the running weir is at its limit of descriptors, and needs more for the upgrade \
             (`prlimit --pid {} --nofile=NUMBER` raises it while it runs)",
            std::process::id()
        ),
        false => error,
    }
}

/// Description of all running objects, with their descriptors.
fn build_offer(registry: &Registry) -> anyhow::Result<(UpgradeOffer, Vec<OwnedFd>)> {
    let mut descriptors = Vec::new();
    let mut servers = Vec::new();
    for serving in registry.exports.servers() {
        let origin = added_objects::server_origin(&serving);
        servers.push(offered_server(
            endpoint_name(&serving.endpoint),
            &serving.sockets(),
            origin,
            &mut descriptors,
        )?);
    }
    for (name, listening) in &*registry.lifecycle.http_sockets.borrow() {
        servers.push(offered_server(name.clone(), listening, ObjectOrigin::Config, &mut descriptors)?);
    }
    let mut control = Vec::new();
    for (path, socket) in registry.lifecycle.control.borrow().iter() {
        descriptors.push(socket.as_fd().try_clone_to_owned()?);
        control.push(path.clone());
    }
    let (mut exports, mut machines, mut listening_sockets) = (Vec::new(), Vec::new(), Vec::new());
    let mut devices = Vec::new();
    for export in registry.exports.all() {
        let serving = match &export.endpoint {
            RunningEndpoint::Nbd(serving, _) => serving,
            RunningEndpoint::Separate(endpoint) => {
                if let Some(host) = endpoint.host_endpoint() {
                    devices.push(devices::describe_device(&export, host)?);
                    continue;
                }
                let vhost_user = endpoint.vhost_user().context("it is not a vhost-user-blk export")?;
                let listening = vhost_user.listening.as_ref().map(|(name, (socket, file))| {
                    listening_sockets.push(socket.clone());
                    (name.clone(), file.clone())
                });
                machines.push(OfferedVhostUser {
                    id: export.id.clone(),
                    disk: export.disk.disk.name().to_string(),
                    read_only: export.read_only,
                    listening,
                    origin: added_objects::endpoint_origin(&export),
                });
                continue;
            }
        };
        let bitmaps = export.nbd_parameters.iter().flat_map(|new| new.bitmaps.iter());
        exports.push(OfferedExport {
            endpoint: endpoint_name(&serving.endpoint),
            name: export.name.clone(),
            disk: export.disk.disk.name().to_string(),
            read_only: export.read_only,
            bitmaps: bitmaps.map(|bitmap| bitmap.name().to_string()).collect(),
            origin: added_objects::export_origin(&export),
        });
    }
    let mut disks = Vec::new();
    for running in registry.disks.all() {
        let disk = &running.disk;
        let checked = disk.check_upgrade();
        checked.with_context(|| {
            format!(
                "disk {}: cannot be taken over (remove it with `weir disk remove`, or restart weir)",
                disk.name()
            )
        })?;
        let files = disk.duplicate_descriptors()?;
        let (name, identity) = (disk.name().to_string(), DiskIdentity::of(disk));
        disks.push(OfferedDisk {
            name,
            files: files.len(),
            identity,
            origin: added_objects::disk_origin(&running),
            overlay_nodes: running.overlay_nodes(),
        });
        descriptors.extend(files.into_iter().flat_map(|file| [file.main, file.buffered]));
    }
    for socket in listening_sockets {
        descriptors.push(socket.as_fd().try_clone_to_owned()?);
    }
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let watchdog_ns =
        registry.lifecycle.watchdog.get().and_then(|allowed| allowed.as_nanos().try_into().ok());
    let clients =
        registry.exports.servers().iter().map(|serving| serving.server.connections() as u64).sum::<u64>();
    let front_ends = registry.exports.all().iter().map(|export| front_end_descriptors(export)).sum::<u64>();
    let client_descriptors = clients + front_ends;
    Ok((
        UpgradeOffer {
            version,
            watchdog_ns,
            descriptors: client_descriptors,
            servers,
            control,
            groups: added_objects::added_groups(registry),
            disks,
            exports,
            machines,
            devices,
        },
        descriptors,
    ))
}

/// Estimate of the descriptors that the client of a single-disk endpoint adds to the transfer.
fn front_end_descriptors(export: &RunningExport) -> u64 {
    let RunningEndpoint::Separate(endpoint) = &export.endpoint else { return 0 };
    match endpoint.vhost_user() {
        Some(vhost_user) if vhost_user.server.connections() > 0 => {
            FRONT_END_DESCRIPTORS + 2 * vhost_user.server.statistics().queues as u64
        }
        Some(_) => 0,
        None => 1,
    }
}

/// Describes a listening endpoint; appends its sockets to the descriptors.
fn offered_server(
    endpoint: String,
    listening: &[ListeningSocket],
    origin: ObjectOrigin<usize>,
    descriptors: &mut Vec<OwnedFd>,
) -> anyhow::Result<OfferedServer> {
    for (socket, _) in listening {
        descriptors.push(socket.as_fd().try_clone_to_owned()?);
    }
    Ok(OfferedServer { endpoint, sockets: listening.iter().map(|(_, file)| file.clone()).collect(), origin })
}

/// Runs the upgrade. Returns only on failure, with the reason for which this process continues.
async fn run_upgrade(
    registry: &Rc<Registry>,
    channel: UpgradeChannel,
    offer: UpgradeOffer,
    descriptors: Vec<OwnedFd>,
) -> anyhow::Result<std::convert::Infallible> {
    let process = channel.process();
    let channel = channel.send_in_background(offer, Vec::new(), descriptors).await?;
    let mut client_ids = Vec::new();
    let prepared = until_prepared(channel, &mut client_ids).await;
    let channel = match prepared {
        Ok(Ok(channel)) => channel,
        // An orderly refusal: the new process closes its images itself.
        Ok(Err(why)) => bail!("{why}"),
        Err(error) => {
            blocklist(registry, &client_ids).await;
            return Err(error);
        }
    };
    let machines = registry.exports.all().into_iter().filter_map(|export| match &export.endpoint {
        RunningEndpoint::Separate(endpoint) => {
            Some((export.id.clone(), Arc::clone(&endpoint.vhost_user()?.server)))
        }
        RunningEndpoint::Nbd(..) => None,
    });
    let hosts = registry.exports.all().into_iter().filter_map(|export| match &export.endpoint {
        RunningEndpoint::Separate(endpoint) => Some((export.id.clone(), endpoint.host_endpoint()?.clone())),
        RunningEndpoint::Nbd(..) => None,
    });
    // From here on every failure must resume all of these.
    let mut objects = QuiescedObjects {
        servers: registry.exports.servers(),
        machines: machines.collect(),
        hosts: hosts.collect(),
        held_disks: Vec::new(),
        suspended_disks: Vec::new(),
        new_client_ids: client_ids,
        is_state_sent: false,
    };
    // `quiesce_and_transfer` consumes the channel, and its failure must still be reported.
    let reporting_channel = channel.try_clone()?;
    let outcome = quiesce_and_transfer(registry, channel, &mut objects).await;
    let (_channel, disconnected) = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            objects.resume().await;
            registry.lifecycle.set_control_closed(false);
            // If this fails, the new process sees the end of the connection.
            let _ = reporting_channel
                .send_in_background(QuiesceOutcome::Refused(format!("{error:#}")), Vec::new(), Vec::new())
                .await;
            return Err(error);
        }
    };
    drop(reporting_channel);
    // From here on the new process serves.
    // Read before the servers drop their connections.
    let clients = registry.exports.connections();
    // Closes the connections with TLS; all others are left to the new process.
    for_each_server(&objects.servers, |server| async move { server.hand_over().await }).await;
    // Recordings contain only what this process served; the new process starts its own.
    registry.recordings.end_all().await;
    // Otherwise this process stays a watcher of the images for other clients of the Ceph cluster.
    let disks =
        registry.disks.all().into_iter().filter(|running| running.disk.image().storage().is_in_cluster());
    let tasks = disks.map(|running| reactor::spawn_joinable(async move { running.disk.close_own().await }));
    for task in tasks.collect::<Vec<_>>() {
        task.await;
    }
    let process = process.unwrap_or_default();
    if disconnected > 0 {
        tracing::info!(
            clients = disconnected,
            "disconnected: TLS sessions cannot be transferred (they can connect again)"
        );
    }
    let clients = clients.saturating_sub(disconnected);
    tracing::info!(process, clients, "a new process has taken over");
    // Sent and read before this process ends, or the manager considers the service ended.
    notify::send(&[NotifyState::MainPid(process)]);
    let _ = reactor::timeout(NOTIFY_TIMEOUT, notify::until_sent()).await;
    reactor::run_blocking(logging::flush).await;
    // No destructors: everything belongs to the new process. It detects the end of this process by
    // the end of the connection.
    std::process::exit(0)
}

/// Waits until the new process is prepared or refuses. Collects its client ids in Ceph clusters.
async fn until_prepared(
    mut channel: UpgradeChannel,
    client_ids: &mut Vec<u64>,
) -> anyhow::Result<Result<UpgradeChannel, String>> {
    let end = reactor::now() + PREPARE_TIMEOUT;
    loop {
        let (next, message, _) = channel.receive_in_background(end - reactor::now()).await?;
        channel = next;
        match message {
            UpgradeMessage::OpensAs(client) => client_ids.push(client),
            UpgradeMessage::Prepared => return Ok(Ok(channel)),
            UpgradeMessage::Refused(why) => return Ok(Err(why)),
            other => bail!("unexpected message {other:?} from the new process"),
        }
    }
}

/// Blocklists a new process that ended without closing its images: a Ceph cluster would keep its
/// watches for 30 s, and operations that notify all users of an image would wait for them.
async fn blocklist(registry: &Registry, client_ids: &[u64]) {
    for running in registry.disks.all() {
        let disk = &running.disk;
        let blocklisted = reactor::timeout(REOPEN_TIMEOUT, disk.blocklist(client_ids)).await;
        if let Err(error) = blocklisted.unwrap_or(Err(Error::TIMED_OUT)) {
            tracing::warn!(
                disk = %disk.name(), %error,
                "the new process cannot be blocklisted in its cluster"
            );
        }
    }
}

/// Quiesces and transfers everything. The new process serves once this has returned. Also returns
/// the number of clients that cannot be transferred.
async fn quiesce_and_transfer(
    registry: &Rc<Registry>,
    channel: UpgradeChannel,
    objects: &mut QuiescedObjects,
) -> anyhow::Result<(UpgradeChannel, usize)> {
    // Again: a start that has begun before the upgrade must not have completed.
    registry.jobs.check_all_idle()?;
    let disks = registry.disks.all();
    // Released disks with handover may be open in another process, so they are not even read.
    let in_use: Vec<_> = disks.iter().filter(|running| !running.disk.is_released()).collect();
    // Before anything is quiesced, so that an unresponsive image costs no client a pause.
    let answering =
        in_use.iter().map(|running| reactor::spawn_joinable(is_responsive(Arc::clone(&running.disk))));
    let answering: Vec<_> = answering.collect();
    for (running, answers) in in_use.iter().zip(answering) {
        ensure!(
            answers.await,
            "disk {}: its image has not answered a read for {} s, so requests in flight would not \
             end (check its storage, or restart weir)",
            running.disk.name(),
            IN_FLIGHT_TIMEOUT.as_secs()
        );
    }
    for running in in_use {
        // Writes dirty metadata now, to shorten the pause.
        running.disk.preflush().await.map_err(|error| write_error(&running.disk, error))?;
    }
    // A reply that a client does not read is in flight, and would make the quiesce time out.
    for client in
        for_each_server(
            &objects.servers,
            |server| async move { server.disconnect_stalled(STALL_TIMEOUT).await },
        )
        .await
    {
        client.into_iter().for_each(|client| log_disconnected(&client, STALL_TIMEOUT));
    }
    // The order matters: first stop accepting, then give handshakes in progress their time, and
    // only then start the pause. A client in its handshake could not be transferred.
    // No command may change the state that is about to be transferred.
    registry.lifecycle.set_control_closed(true);
    for_each_server(&objects.servers, |server| async move { server.stop_accepting(HANDSHAKE_TIMEOUT).await })
        .await;
    // Disks with handover are held before their virtqueues stop, or stopping would release them.
    let began_ns = clock_ns();
    for running in &disks {
        if running.disk.retain().await {
            objects.held_disks.push(Arc::clone(&running.disk));
        }
    }
    // All kinds of servers are quiesced concurrently; the pause is as long as the slowest.
    let machines = objects.machines.iter().map(|(_, server)| {
        let server = Arc::clone(server);
        reactor::spawn_joinable(async move { server.quiesce(IN_FLIGHT_TIMEOUT).await })
    });
    let machines: Vec<_> = machines.collect();
    let hosts = objects.hosts.iter().map(|(_, host)| {
        let host = host.clone();
        reactor::spawn_joinable(async move { host.quiesce(IN_FLIGHT_TIMEOUT).await })
    });
    let hosts: Vec<_> = hosts.collect();
    let quiesced =
        for_each_server(&objects.servers, |server| async move { quiesce_clients(&server).await }).await;
    for ((id, _), is_quiesced) in objects.machines.iter().zip(machines) {
        ensure!(
            is_quiesced.await,
            "export {id}: requests of its virtual machine take longer than {} s",
            IN_FLIGHT_TIMEOUT.as_secs()
        );
    }
    for ((id, _), is_quiesced) in objects.hosts.iter().zip(hosts) {
        ensure!(
            is_quiesced.await,
            "export {id}: requests in flight take longer than {} s",
            IN_FLIGHT_TIMEOUT.as_secs()
        );
    }
    for (serving, is_quiesced) in objects.servers.iter().zip(quiesced) {
        ensure!(
            is_quiesced,
            "{} at {}: its requests take longer than {} s",
            serving.server.unquiesced_client().unwrap_or_else(|| "a client".to_owned()),
            serving.address(),
            IN_FLIGHT_TIMEOUT.as_secs()
        );
    }
    // Only now, with nothing in flight: a late write may have failed.
    for running in &disks {
        let disk = &running.disk;
        disk.check_upgrade().with_context(|| format!("disk {}: cannot be taken over", disk.name()))?;
    }
    let in_use = disks.iter().map(|running| &running.disk).filter(|disk| !disk.is_released());
    // Set before the work: a disk that fails halfway must be reopened as well.
    objects.suspended_disks = in_use.cloned().collect();
    // Concurrently: each may wait for another storage.
    let tasks = objects.suspended_disks.iter().map(|disk| {
        let disk = Arc::clone(disk);
        reactor::spawn_joinable(
            async move { disk.suspend().await.map_err(|error| write_error(&disk, error)) },
        )
    });
    let mut all = Ok(());
    for task in tasks.collect::<Vec<_>>() {
        all = all.and(task.await);
    }
    all?;
    let (mut clients, mut bytes, mut descriptors) = (Vec::new(), Vec::new(), Vec::new());
    let mut disconnected = 0;
    // The order of bytes and descriptors is that of `ProcessState`.
    for serving in &objects.servers {
        let endpoint = endpoint_name(&serving.endpoint);
        for (export, connection) in serving.server.quiesced_state() {
            // TLS state lives in this process and cannot be transferred.
            if !connection.tls {
                let received = connection.bytes.len() as u64;
                clients.push(ClientState::new(
                    &endpoint,
                    &export,
                    &connection.session,
                    received,
                    connection.skip,
                ));
                bytes.extend(connection.bytes);
                descriptors.push(connection.socket.as_fd().try_clone_to_owned()?);
            } else {
                disconnected += 1;
            }
        }
    }
    let mut machines = Vec::new();
    for (id, server) in &objects.machines {
        let Some(front_end) = server.take_quiesced() else { continue };
        let QuiescedFrontEnd {
            socket,
            messages: session_messages,
            bytes: partial_bytes,
            descriptors: partial_descriptors,
            used_ns,
        } = front_end;
        descriptors.push(socket.as_fd().try_clone_to_owned()?);
        let mut messages = Vec::new();
        for SessionMessage { code, payload, descriptors: attached } in session_messages {
            messages.push(VhostMessageState { code, bytes: payload.len(), descriptors: attached.len() });
            bytes.extend(payload);
            descriptors.extend(attached);
        }
        let sizes = PartialMessage { bytes: partial_bytes.len(), descriptors: partial_descriptors.len() };
        bytes.extend(partial_bytes);
        descriptors.extend(partial_descriptors);
        machines.push(FrontEndState { id: id.clone(), said: messages, begun: sizes, used_ns });
    }
    let mut devices = Vec::new();
    for (id, host) in &objects.hosts {
        devices.extend(devices::quiesced_state(id, host, &mut bytes, &mut descriptors)?);
    }
    // Requests have been drained: the last bytes are counted here.
    registry.sample_quotas();
    let disks = disks.iter().map(|running| TransferredDisk {
        name: running.disk.name().to_string(),
        size_bytes: running.disk.size_bytes(),
        is_laid_down: !running.disk.is_released(),
        counted: DiskCounterState::of(&running.disk),
        filled: running.disk.throttle().bucket_levels().map(Into::into),
        set: Some(transferred_settings::disk_settings(running)),
        quota: registry.quotas.stored(running.disk.name(), &running.disk.throttle().settings().quota),
        bitmaps: running.disk.image().recorded_bitmaps(),
    });
    let groups = registry.groups.all();
    let groups = groups.iter().map(|group| TransferredGroup {
        name: group.name().to_owned(),
        counted: ThrottleCounterState::of(group),
        filled: group_levels(group),
        set: Some(transferred_settings::group_settings(group)),
        quota: registry.quotas.stored(group.name(), &group.settings().quota),
    });
    let (disks, groups) = (disks.collect(), groups.collect());
    let last_event = registry.events.last();
    let counted = DaemonCounterState::of(registry);
    let state =
        Box::new(ProcessState { began_ns, last_event, clients, machines, devices, disks, groups, counted });
    // Set before sending: after a partial send the new process may have received everything.
    objects.is_state_sent = true;
    let channel = channel.send_in_background(QuiesceOutcome::Still(state), bytes, descriptors).await?;
    let (channel, message, _) = channel.receive_in_background(READY_TIMEOUT).await?;
    match message {
        // A signal may have arrived during the pause; then this process shuts down.
        UpgradeMessage::Ready if !registry.lifecycle.is_ending.get() => {}
        UpgradeMessage::Ready => bail!("weir is stopping"),
        UpgradeMessage::Refused(why) => bail!("{why}"),
        other => bail!("unexpected message {other:?} from the new process"),
    }
    channel
        .send_in_background(UpgradeMessage::Yours, Vec::new(), Vec::new())
        .await
        .map(|channel| (channel, disconnected))
}

fn write_error(disk: &Disk, error: Error) -> anyhow::Error {
    let name = disk.name();
    match error {
        Error::TIMED_OUT => {
            anyhow!(
                "disk {name}: its storage takes too long to write buffered data (check it, or restart weir)"
            )
        }
        error => anyhow!(error).context(format!("disk {name}: its image cannot be written")),
    }
}

/// True if an image answers within the time limit of requests in flight. An unresponsive image
/// would make the quiesce fail after a pause for all clients.
async fn is_responsive(disk: Arc<Disk>) -> bool {
    /// A sector, which every device can read.
    const BYTES: u64 = 512;
    let length = disk.size_bytes().min(BYTES) as usize;
    // An error is an answer, too.
    length == 0 || reactor::timeout(IN_FLIGHT_TIMEOUT, disk.image().read(0, length)).await.is_ok()
}

/// Quiesces all clients of a server. Disconnects clients that stop reading replies meanwhile.
async fn quiesce_clients(server: &Arc<export::nbd::NbdServer>) -> bool {
    let reading = Arc::clone(server);
    let disconnecting = reactor::spawn_joinable(async move {
        let log = |client: String| log_disconnected(&client, STALL_TIMEOUT_QUIESCED);
        reading.disconnect_stalled_until_dropped(STALL_TIMEOUT_QUIESCED, log).await;
    });
    let is_quiesced = server.quiesce(IN_FLIGHT_TIMEOUT).await;
    disconnecting.cancel().await;
    is_quiesced
}

fn log_disconnected(client: &str, timeout: Duration) {
    let message = "disconnected: it does not read replies, so it cannot be transferred";
    tracing::warn!(client, patience_s = timeout.as_secs(), "{message}");
}

/// Runs an operation for all servers concurrently, and waits for all of them.
async fn for_each_server<T: 'static, F: Future<Output = T> + 'static>(
    servers: &[Rc<RunningServer>],
    operation: impl Fn(Arc<export::nbd::NbdServer>) -> F,
) -> Vec<T> {
    let started =
        servers.iter().map(|serving| reactor::spawn_joinable(operation(Arc::clone(&serving.server))));
    let started: Vec<_> = started.collect();
    let mut done = Vec::new();
    for task in started {
        done.push(task.await);
    }
    done
}

/// Quiesced objects, to be resumed on failure.
struct QuiescedObjects {
    servers: Vec<Rc<RunningServer>>,
    /// By export id.
    machines: Vec<(String, Arc<vhost_user_blk::VhostUserServer>)>,
    hosts: Vec<(String, HostEndpoint)>,
    /// Disks with handover that a guest held.
    held_disks: Vec<Arc<Disk>>,
    suspended_disks: Vec<Arc<Disk>>,
    /// Client ids of the new process in Ceph clusters.
    new_client_ids: Vec<u64>,
    /// True if the new process may have continued with the state.
    is_state_sent: bool,
}

impl QuiescedObjects {
    async fn resume(self) {
        let receivers = self.suspended_disks.into_iter().map(|disk| {
            // Until the state is sent, the new process holds no lock that would have to be broken.
            let client_ids = if self.is_state_sent { self.new_client_ids.clone() } else { Vec::new() };
            let (sender, receiver) = async_channel::bounded::<()>(1);
            reactor::spawn(reopen_image(disk, client_ids, sender));
            receiver
        });
        let receivers: Vec<_> = receivers.collect();
        // A disk whose cluster does not answer must not delay all disks.
        let all = async {
            for receiver in receivers {
                // Closed after the first attempt.
                let _ = receiver.recv().await;
            }
        };
        let _ = reactor::timeout(REOPEN_TIMEOUT, all).await;
        for serving in self.servers {
            serving.server.resume();
        }
        for (_, server) in self.machines {
            server.resume();
        }
        for (_, host) in self.hosts {
            host.resume();
        }
        self.held_disks.into_iter().for_each(release_later);
    }
}

/// Reopens a quiesced image, retrying as long as necessary; drops the sender after the first
/// attempt. The new process has served no client, so data in memory are valid, except metadata that
/// opening an image changes. For an image in a Ceph cluster, writes wait for its lock.
async fn reopen_image(disk: Arc<Disk>, client_ids: Vec<u64>, sender: async_channel::Sender<()>) {
    let Err(error) = disk.resume(&client_ids).await else { return };
    // Wakes `QuiescedObjects::resume`, which waits for the first attempt of each disk.
    drop(sender);
    if disk.is_blocklisted() {
        // The error is already logged.
        return;
    }
    let error = anyhow!(error);
    let until_then = match disk.image().storage().is_in_cluster() {
        true => "its writes wait",
        false => "it uses its metadata in memory, without prefetch",
    };
    tracing::error!(
        disk = %disk.name(),
        "its image cannot be read again after the takeover that failed, which is tried each second; until \
         then {until_then}: {error:#}"
    );
    loop {
        reactor::sleep_until(reactor::now() + REOPEN_INTERVAL).await;
        match disk.resume(&client_ids).await {
            Ok(()) => break,
            Err(_) if disk.is_blocklisted() => return,
            Err(_) => {}
        }
    }
    tracing::info!(disk = %disk.name(), "its image can be read again");
}

/// Bucket levels; `None` for cluster-wide limits: a new process starts at its fallback share with
/// full buckets.
fn group_levels(group: &ThrottleGroup) -> Option<BucketLevelsState> {
    group.bucket_levels().filter(|_| group.quota_lease().is_none()).map(Into::into)
}
