//! New process of an upgrade: `weir serve --takeover`.
//!
//! ```text
//!   request ─► offer ─► images by passed descriptors, groups, servers: as in every start
//!                       └─ every object of the old process must exist here ─► prepared
//!   state ─► read metadata, fill buckets, assign clients ─► ready ─► yours ─► serve
//! ```
//!
//! Objects that clients of the control socket added to the old process are added in between: see
//! `add_transferred`.
//!
//! Failures before `Yours` have no effect on the old process: locks, socket files and images stay
//! unchanged.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io::{self, BufRead as _, BufReader, Write as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use export::{
    nbd::{NbdServer, QuiescedNbdConnection},
    vhost_user_blk,
};
use reactor::{ReactorWorker, operation};
use serde_json::{Value, json};
use settings::{ListenAddress, ListenEndpoint};
use storage::{PassedFile, PassedFiles};

use super::{
    UPGRADE_COMMAND, UPGRADE_FORMAT,
    channel::{MessageAttachments, UpgradeChannel, check_listener, send_with},
    clock_ns,
    counters::DaemonCounterState,
    devices::AwaitedDevices,
    endpoint_name, http_endpoint_name,
    identity::DiskIdentity,
    messages::{
        FrontEndState, ObjectOrigin, OfferedVhostUser, ProcessState, QuiesceOutcome, TransferredDisk,
        UpgradeMessage, UpgradeOffer, VhostMessageState,
    },
    missing_text, release_later, transferred_settings,
};
use crate::{
    bitmaps,
    endpoints::ExportEndpoint,
    listen::{BoundListener, InheritedSockets},
    planned_export::PlannedExport,
    reconcile::source::StartSource,
    registry::{Registry, RunningEndpoint, RunningExport},
};

/// Time limit for an answer of the old process.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for its quiesce: handshakes, requests in flight, flushes.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for its end.
const END_TIMEOUT: Duration = Duration::from_secs(15);

/// New process that has received the offer.
pub struct NewProcess {
    pub(super) channel: UpgradeChannel,
    pub(super) offer: UpgradeOffer,
    /// Sockets of each server, in the order of the offer.
    pub(super) sockets: Vec<VecDeque<OwnedFd>>,
    control: VecDeque<OwnedFd>,
    /// Listening sockets of vhost-user exports, in the order of the offer.
    machines: VecDeque<OwnedFd>,
    pub(super) devices: AwaitedDevices,
    pub(super) passed: PassedFiles,
}

/// The old process after `Yours`.
pub struct OldProcess {
    channel: UpgradeChannel,
    devices: AwaitedDevices,
    pause_began_ns: u64,
    in_use: BTreeSet<String>,
    clients: usize,
    /// Counters of endpoints that are not open yet.
    counted: DaemonCounterState,
}

impl OldProcess {
    /// Number of transferred clients and front ends.
    pub fn clients(&self) -> usize {
        self.clients
    }

    /// Waits for its end, and recovers the ublk devices that it had until then. Returns the exports
    /// with endpoints of their own whose clients were transferred.
    pub async fn until_ended(mut self, registry: &Rc<Registry>) -> BTreeSet<String> {
        self.channel.wait_for_end(END_TIMEOUT).await;
        if self.devices.recover(registry).await > 0 {
            add_device_counters(&mut self.counted, registry);
            let pause_us = microseconds_since(self.pause_began_ns);
            tracing::info!(pause_us, "recovered the devices of ublk");
        }
        self.in_use
    }
}

/// Microseconds since an instant of [`clock_ns`].
fn microseconds_since(began_ns: u64) -> u64 {
    clock_ns().saturating_sub(began_ns) / 1000
}

/// Reports a failure of the new process.
pub struct FailureReporter(UpgradeChannel);

impl FailureReporter {
    /// Sends the reason to the old process, which logs it.
    pub fn report(self, why: &anyhow::Error) {
        // If this fails, the old process sees the end of the connection.
        let _ = self.0.send_now(&UpgradeMessage::Refused(format!("{why:#}")));
    }
}

impl NewProcess {
    /// Returns the means to report a failure of this process.
    pub fn failure_reporter(&self) -> io::Result<FailureReporter> {
        self.channel.try_clone().map(FailureReporter)
    }

    /// Requests an upgrade from the daemon at a control socket, and receives its offer.
    ///
    /// `user` is the user that this process continues as.
    ///
    /// # Errors
    /// No daemon listens there, its user is not trusted, or it refuses.
    pub fn request(control: &Path, user: Option<&str>) -> anyhow::Result<Self> {
        let action = || format!("taking over from unix:{}", control.display());
        let (channel, other) = UpgradeChannel::pair()?;
        send_command(control, user, other).with_context(action)?;
        let (channel, offer, attachments): (_, Value, _) =
            channel.receive_now(ANSWER_TIMEOUT).with_context(action)?;
        let offer = parse_offer(offer).with_context(action)?;
        Self::new(channel, offer, attachments).with_context(action)
    }

    fn new(
        channel: UpgradeChannel,
        offer: UpgradeOffer,
        attachments: MessageAttachments,
    ) -> anyhow::Result<Self> {
        let mut descriptors = VecDeque::from(attachments.descriptors);
        // The descriptors are in the order of `UpgradeOffer`, which contains the counts.
        let mut take_descriptors = |count: usize| -> anyhow::Result<VecDeque<OwnedFd>> {
            ensure!(descriptors.len() >= count, "fewer descriptors arrived than announced");
            Ok(descriptors.drain(..count).collect())
        };
        let sockets = offer.servers.iter().map(|server| take_descriptors(server.sockets.len()));
        let sockets = sockets.collect::<anyhow::Result<_>>()?;
        let control = take_descriptors(offer.control.len())?;
        let mut files = Vec::new();
        for disk in &offer.disks {
            for _ in 0..disk.files {
                let mut pair = take_descriptors(2)?.into_iter();
                if let (Some(main), Some(buffered)) = (pair.next(), pair.next()) {
                    files.push(PassedFile { main, buffered });
                }
            }
        }
        let machines =
            take_descriptors(offer.machines.iter().filter(|machine| machine.listening.is_some()).count())?;
        let mut offer = offer;
        let devices = AwaitedDevices::new(std::mem::take(&mut offer.devices));
        let images = offer.disks.iter().flat_map(|disk| disk.identity.written_files()).map(str::to_owned);
        let announcing = channel.try_clone()?;
        let passed = PassedFiles::new(files, images, move |client| {
            // If this fails the old process is gone.
            let _ = announcing.send_now(&UpgradeMessage::OpensAs(client));
        });
        Ok(Self { channel, sockets, control, machines, devices, passed, offer })
    }

    /// Version of the old process.
    pub fn version(&self) -> &str {
        &self.offer.version
    }

    fn adopt_sockets(
        &mut self,
        name: &str,
        endpoint: &ListenEndpoint,
    ) -> anyhow::Result<Option<Vec<BoundListener>>> {
        let Some(at) = self.offer.servers.iter().position(|server| server.endpoint == name) else {
            return Ok(None);
        };
        let files = &self.offer.servers[at].sockets;
        let adopted = files.iter().zip(self.sockets[at].drain(..)).enumerate();
        let adopt = |(number, (file, socket)): (usize, (&Option<_>, OwnedFd))| {
            BoundListener::adopt(socket, endpoint, number, file.as_deref(), &self.passed)
        };
        adopted.map(adopt).collect::<anyhow::Result<_>>().map(Some)
    }

    /// Checks that every object of the old process exists here, including added objects.
    ///
    /// # Errors
    /// An object is missing or differs.
    pub fn check_complete(&self, registry: &Registry) -> anyhow::Result<()> {
        self.check_complete_except(registry, |_, _| false)
    }

    /// As `check`, except for objects that follow later: those for which the function returns
    /// true. Its arguments are whether a client added the object, and the disk's name.
    fn check_complete_except(
        &self,
        registry: &Registry,
        is_deferred: impl Fn(bool, &str) -> bool,
    ) -> anyhow::Result<()> {
        let left = self
            .offer
            .servers
            .iter()
            .zip(&self.sockets)
            .find(|(server, left)| !(left.is_empty() || is_deferred(server.origin.is_added(), "")));
        let left = left.map(|(server, _)| (server.endpoint.clone(), &server.origin));
        let control =
            || Some((format!("unix:{}", self.offer.control.first()?.display()), &ObjectOrigin::Config));
        let sockets = left.or_else(control).map_or(Ok(()), |(left, origin)| {
            let subject = format!("{left}: it is open, but not in this config");
            Err(anyhow!("{}", missing_text(subject, origin, registry)))
        });
        check(&self.offer, registry, &is_deferred)?;
        ensure!(
            is_deferred(true, "") || self.passed.remaining() == 0,
            "images are in use that this config does not have"
        );
        // Checked now, since exceeding the limit during the pause would fail the upgrade late.
        let (incoming, free) = (self.offer.descriptors, operation::free_descriptors());
        ensure!(
            incoming < free,
            "descriptors that come with its clients: {incoming}, and only {free} more may be open \
             here (`ulimit -n` or LimitNOFILE= must be larger)"
        );
        self.devices.check_complete(registry, &is_deferred)?;
        sockets
    }

    /// Takes over: when this returns, the old process cannot resume, and all transferred clients
    /// are served.
    ///
    /// # Errors
    /// The old process does not transfer its state, or the state cannot be used. The old process
    /// resumes.
    pub async fn take_over(
        self,
        registry: &Rc<Registry>,
        workers: &[ReactorWorker],
    ) -> anyhow::Result<OldProcess> {
        let Self { channel, offer, devices, passed, .. } = self;
        add_overlay_nodes(&offer, registry)?;
        let channel = channel.send_in_background(UpgradeMessage::Prepared, Vec::new(), Vec::new()).await?;
        let (channel, outcome, attachments): (_, QuiesceOutcome, _) = channel
            .receive_in_background(QUIESCE_TIMEOUT)
            .await
            .context("the old process did not transfer its state (see its log)")?;
        let state = match outcome {
            QuiesceOutcome::Still(state) => *state,
            QuiesceOutcome::Refused(why) => bail!("the old process continues: {why}"),
        };
        // Later events have larger numbers than those of the old process.
        registry.events.continue_after(state.last_event);
        let (began_ns, device_ids) = (state.began_ns, devices.ids());
        // Computed before `apply_state` consumes the state; logged only after success.
        let set_otherwise = transferred_settings::differing_settings(&state, registry);
        let (clients, machines, counted) =
            apply_state(state, attachments, &offer.machines, &devices, registry).await?;
        let channel = channel.send_in_background(UpgradeMessage::Ready, Vec::new(), Vec::new()).await?;
        let (channel, message, _) =
            channel.receive_or_close(ANSWER_TIMEOUT).await.context("the old process continues")?;
        match message {
            UpgradeMessage::Yours => {}
            UpgradeMessage::Refused(why) => bail!("the old process continues: {why}"),
            other => bail!("unexpected message {other:?} from the old process"),
        }
        // From here on files and locks belong to this process, also at its end.
        passed.take_ownership();
        let disks = registry.disks.all();
        let held = disks.iter().filter(|running| running.disk.has_handover() && !running.disk.is_released());
        held.for_each(|running| release_later(Arc::clone(&running.disk)));
        let count = clients.len() + machines.len();
        for (number, (server, client)) in clients.into_iter().enumerate() {
            // Round-robin: the old process's assignment to workers is not transferred.
            server.adopt(client, &workers[number % workers.len()]);
        }
        let pause_us = microseconds_since(began_ns);
        tracing::info!(from = offer.version, clients = count, pause_us, "taken over");
        set_otherwise.iter().for_each(|line| tracing::warn!("{line}"));
        let in_use = machines.into_iter().chain(device_ids).collect();
        Ok(OldProcess { channel, devices, pause_began_ns: began_ns, in_use, clients: count, counted })
    }
}

/// Gives the nodes that snapshots have put over disks their names.
///
/// # Errors
/// A name is in use here.
fn add_overlay_nodes(offer: &UpgradeOffer, registry: &Registry) -> anyhow::Result<()> {
    for offered in &offer.disks {
        let running = registry.disks.get(&offered.name)?;
        for node in &offered.overlay_nodes {
            registry.check_name(node).with_context(|| {
                format!("disk {}: a snapshot has put a node of this name over it", offered.name)
            })?;
        }
        registry.disks.add_overlay_nodes(&running, offered.overlay_nodes.clone());
    }
    Ok(())
}

/// Parses the offer of the old process.
///
/// # Errors
/// This version cannot read the offer of the old process's version.
fn parse_offer(offer: Value) -> anyhow::Result<UpgradeOffer> {
    let version = offer["version"].as_str().unwrap_or("of an unknown version").to_owned();
    serde_json::from_value(offer).map_err(|error| {
        anyhow!(
            "weir {version} transfers state that weir {} cannot read: {error} (upgrade to weir \
             {version} or later, or restart weir)",
            env!("CARGO_PKG_VERSION")
        )
    })
}

impl StartSource for NewProcess {
    fn inherited_sockets(&self) -> Option<usize> {
        let inherited = self
            .offer
            .servers
            .iter()
            .filter(|server| server.endpoint == ListenEndpoint::Inherited.to_string());
        Some(inherited.map(|server| server.sockets.len()).sum())
    }

    fn watchdog(&self) -> Option<Duration> {
        self.offer.watchdog_ns.map(Duration::from_nanos)
    }

    fn passed(&self) -> Option<&PassedFiles> {
        Some(&self.passed)
    }

    fn listeners(&mut self, endpoint: &ListenEndpoint) -> anyhow::Result<Option<Vec<BoundListener>>> {
        self.adopt_sockets(&endpoint_name(endpoint), endpoint)
    }

    fn has_server(&self, endpoint: &ListenEndpoint) -> bool {
        let name = endpoint_name(endpoint);
        self.offer.servers.iter().any(|server| server.endpoint == name)
    }

    fn has_disk(&self, name: &str) -> bool {
        self.offer.disks.iter().any(|disk| disk.name == name)
    }

    fn http_listeners(
        &mut self,
        kind: &str,
        address: &ListenAddress,
    ) -> anyhow::Result<Option<Vec<BoundListener>>> {
        self.adopt_sockets(&http_endpoint_name(kind, address), &ListenEndpoint::Address(address.clone()))
    }

    fn pass_vhost_user_sockets(&mut self, inherited: &mut InheritedSockets) -> anyhow::Result<()> {
        let listening = self.offer.machines.iter().filter_map(|machine| machine.listening.as_ref());
        for (number, ((name, file), socket)) in listening.zip(self.machines.drain(..)).enumerate() {
            let file = file.as_deref();
            inherited.adopt(
                name,
                BoundListener::adopt(socket, &ListenEndpoint::Inherited, number, file, &self.passed)?,
            );
        }
        Ok(())
    }

    fn opens_later(&self, planned: &PlannedExport, registry: &Registry) -> bool {
        self.devices.claim(planned, registry)
    }

    fn control(&mut self, path: &Path) -> anyhow::Result<Option<BoundListener>> {
        let path = std::path::absolute(path)?;
        let Some(at) = self.offer.control.iter().position(|known| *known == path) else { return Ok(None) };
        self.offer.control.remove(at);
        let socket = self.control.remove(at).context("the descriptor of a control socket is missing")?;
        let endpoint = ListenEndpoint::Address(ListenAddress::Unix(path.clone()));
        BoundListener::adopt(socket, &endpoint, 0, Some(&path), &self.passed).map(Some)
    }

    fn check_config(&self, registry: &Registry, is_late: &dyn Fn(&str) -> bool) -> anyhow::Result<()> {
        self.check_complete_except(registry, |is_added, disk| is_added || is_late(disk))
    }
}

/// Checks that all disks and exports of the old process are here and equal, except those that
/// follow later.
fn check(
    offer: &UpgradeOffer,
    registry: &Registry,
    is_deferred: impl Fn(bool, &str) -> bool,
) -> anyhow::Result<()> {
    for offered in &offer.disks {
        let disk = registry.disks.get(&offered.name);
        if disk.is_err() && is_deferred(offered.origin.is_added(), &offered.name) {
            continue;
        }
        let disk = disk.map_err(|_| {
            let subject =
                format!("disk {}: the running daemon has it, but this config does not", offered.name);
            anyhow!("{}", missing_text(subject, &offered.origin, registry))
        })?;
        if let Some(difference) = offered.identity.difference(&DiskIdentity::of(&disk.disk)) {
            bail!(
                "disk {}: the running daemon serves it {difference} (use the same setting, or restart)",
                offered.name
            );
        }
        let is_elsewhere = disk.disk.image().storage().is_in_cluster() && !disk.disk.image().is_read_only();
        ensure!(
            offered.files == 0 && !is_elsewhere || disk.disk.is_passed(),
            "disk {}: its image is open here in another way",
            offered.name
        );
    }
    for offered in &offer.exports {
        let export = find_export(registry, &offered.endpoint, &offered.name);
        if export.is_none() && is_deferred(offered.origin.is_added(), &offered.disk) {
            continue;
        }
        let (_, _, export) = export.with_context(|| {
            let (name, endpoint) = (&offered.name, &offered.endpoint);
            let subject =
                format!("export {name} at {endpoint}: the running daemon has it, but this config does not");
            missing_text(subject, &offered.origin, registry)
        })?;
        let bitmaps = export.nbd_parameters.iter().flat_map(|new| new.bitmaps.iter());
        ensure!(
            export.disk.disk.name().as_ref() == offered.disk
                && export.read_only == offered.read_only
                && bitmaps
                    .map(|bitmap| bitmap.name().as_ref())
                    .eq(offered.bitmaps.iter().map(String::as_str)),
            "export {} at {}: the running daemon serves it with another disk, other bitmaps or \
             another value of read-only (use the same settings, or restart)",
            offered.name,
            offered.endpoint
        );
    }
    for offered in &offer.machines {
        let here = find_vhost_user(registry, offered);
        if here.is_none() && is_deferred(offered.origin.is_added(), &offered.disk) {
            continue;
        }
        let (export, _) = here.with_context(|| {
            let subject = format!(
                "export {} at {}: the running daemon has it, but this config does not",
                offered.id,
                offered.address_text()
            );
            missing_text(subject, &offered.origin, registry)
        })?;
        ensure!(
            export.disk.disk.name().as_ref() == offered.disk && export.read_only == offered.read_only,
            "export {} at {}: the running daemon serves it with another disk or another value of \
             read-only (use the same settings, or restart)",
            offered.id,
            offered.address_text()
        );
    }
    Ok(())
}

/// Finds a vhost-user export and its endpoint: by socket if weir listens, else by id.
pub(super) fn find_vhost_user(
    registry: &Registry,
    offered: &OfferedVhostUser,
) -> Option<(Rc<RunningExport>, Rc<ExportEndpoint>)> {
    registry.exports.all().into_iter().find_map(|export| {
        let RunningEndpoint::Separate(endpoint) = &export.endpoint else { return None };
        let listening = endpoint.vhost_user()?.listening.as_ref().map(|(name, _)| name);
        let is_match = match &offered.listening {
            Some((name, _)) => listening == Some(name),
            None => listening.is_none() && export.id == offered.id,
        };
        let endpoint = Rc::clone(endpoint);
        is_match.then_some((export, endpoint))
    })
}

/// Finds an NBD export by endpoint and name; returns its server, its number there, and itself.
pub(super) fn find_export(
    registry: &Registry,
    endpoint: &str,
    name: &str,
) -> Option<(Arc<NbdServer>, usize, Rc<RunningExport>)> {
    registry.exports.all().into_iter().find_map(|export| match &export.endpoint {
        // The cheap comparison first: this runs during the pause.
        RunningEndpoint::Nbd(serving, number)
            if export.name == name && endpoint_name(&serving.endpoint) == endpoint =>
        {
            Some((Arc::clone(&serving.server), *number, export))
        }
        _ => None,
    })
}

/// Applies the transferred state without serving yet. Returns the clients with their servers, the
/// exports of transferred front ends, and the remaining counters. A front end whose memory is not
/// accessible any more is skipped; it is disconnected when the old process ends.
async fn apply_state(
    state: ProcessState,
    mut attachments: MessageAttachments,
    offered_machines: &[OfferedVhostUser],
    devices: &AwaitedDevices,
    registry: &Rc<Registry>,
) -> anyhow::Result<(Vec<(Arc<NbdServer>, QuiescedNbdConnection)>, Vec<String>, DaemonCounterState)> {
    let states: HashMap<&str, &TransferredDisk> =
        state.disks.iter().map(|standing| (&*standing.name, standing)).collect();
    // Concurrently: each may wait for another storage.
    let resumptions = registry.disks.all().into_iter().map(|running| {
        let transferred = states.get(&**running.disk.name()).copied();
        // Released disks with handover are opened by their guests' next use.
        let is_resumed =
            running.disk.is_passed() && transferred.is_none_or(|transferred| transferred.is_laid_down);
        let disk = is_resumed.then(|| Arc::clone(&running.disk));
        let resumption = disk.map(|disk| reactor::spawn_joinable(async move { disk.resume(&[]).await }));
        (running, transferred, resumption)
    });
    let mut taken = Vec::new();
    for (running, transferred, resumption) in resumptions.collect::<Vec<_>>() {
        let done = match resumption {
            Some(resumption) => resumption.await,
            None => Ok(()),
        };
        taken.push((running, transferred, done));
    }
    for (running, transferred, done) in taken {
        let disk = &running.disk;
        done.with_context(|| format!("disk {}", disk.name()))?;
        let before = transferred.map_or(0, |transferred| transferred.size_bytes);
        ensure!(
            disk.size_bytes() >= before || disk.is_released(),
            "disk {}: it has grown since, which is not visible here (try again)",
            disk.name()
        );
    }
    check_bitmaps(&state.disks, registry).await?;
    for group in state.groups {
        let Ok(here) = registry.groups.get(&group.name) else { continue };
        group.counted.add_to(&here);
        if let Some(counts) = &group.quota {
            registry.quotas.restore(&group.name, counts);
        }
        if let Some(filled) = &group.filled {
            here.restore_levels(&filled.to_levels()?)
                .map_err(|invalid| anyhow!("group {}: {}", group.name, invalid.rule))?;
        }
    }
    for disk in state.disks {
        let here = registry.disks.get(&disk.name)?;
        disk.counted.add_to(&here.disk);
        if let Some(counts) = &disk.quota {
            registry.quotas.restore(&disk.name, counts);
        }
        if let Some(filled) = &disk.filled {
            let filled = here.disk.throttle().restore_levels(&filled.to_levels()?);
            filled.map_err(|invalid| anyhow!("disk {}: {}", disk.name, invalid.rule))?;
        }
    }
    let mut counted = state.counted;
    counted.add_to(registry);
    // From here on in the order of `ProcessState`.
    let mut pieces = attachments.pieces();
    let sockets = pieces.descriptors(state.clients.len())?;
    // Cached: many clients share few exports, and each lookup visits all exports.
    let mut lookup: HashMap<(String, String), (Arc<NbdServer>, usize)> = HashMap::new();
    let mut clients = Vec::new();
    for (client, socket) in state.clients.iter().zip(sockets) {
        let key = (client.endpoint.clone(), client.export.clone());
        let (server, number) = match lookup.get(&key) {
            Some(known) => known.clone(),
            None => {
                let found = find_export(registry, &client.endpoint, &client.export);
                let (server, number, _) = found.context("a client of an export that is not here")?;
                lookup.insert(key, (Arc::clone(&server), number));
                (server, number)
            }
        };
        let received = usize::try_from(client.received).ok().and_then(|count| pieces.bytes(count).ok());
        let received = received.context("the unparsed bytes of a client are missing")?;
        let (socket, session) = (socket.into(), client.to_session(number)?);
        clients.push((
            server,
            QuiescedNbdConnection {
                socket,
                tls: false,
                session,
                bytes: received.to_vec(),
                skip: client.skip,
            },
        ));
    }
    let mut machines = Vec::new();
    for FrontEndState { id, said: messages, begun: partial, used_ns } in state.machines {
        let here = offered_machines.iter().find(|offered| offered.id == id);
        let here = here.and_then(|offered| find_vhost_user(registry, offered));
        let (export, endpoint) = here.context("a front end of an export that is not here")?;
        let vhost_user = endpoint.vhost_user().context("it is not a vhost-user-blk export")?;
        let socket = pieces.descriptor()?.into();
        let mut session_messages = Vec::new();
        for VhostMessageState { code, bytes, descriptors } in messages {
            let payload = pieces.bytes(bytes).context("the payload of a message is missing")?.to_vec();
            let descriptors = pieces.descriptors(descriptors)?;
            session_messages.push(vhost_user_blk::SessionMessage { code, payload, descriptors });
        }
        let bytes =
            pieces.bytes(partial.bytes).context("the unparsed bytes of a front end are missing")?.to_vec();
        let descriptors = pieces.descriptors(partial.descriptors)?;
        // Replays the messages, which maps the guest's memory.
        match vhost_user.server.adopt(vhost_user_blk::QuiescedFrontEnd {
            socket,
            messages: session_messages,
            bytes,
            descriptors,
            used_ns,
        }) {
            Ok(()) => machines.push(export.id.clone()),
            Err(why) if why.is_modified_file() => {
                let consequence =
                    "its virtual machine is disconnected: its shared memory is not accessible any more";
                tracing::warn!(export = id, %why, "{consequence} (it can connect again)");
            }
            Err(why) => {
                return Err(why).with_context(|| format!("export {id}: its machine cannot be taken over"));
            }
        }
    }
    // Also for exports without a connected client.
    for offered in offered_machines {
        if let Some((export, _)) = find_vhost_user(registry, offered) {
            counted.add_to_endpoint(&offered.id, &export);
        }
    }
    devices.open_transferred(state.devices, &mut pieces, registry).await?;
    add_device_counters(&mut counted, registry);
    Ok((clients, machines, counted))
}

/// Adds the counters of devices that are open by now; their export ids are unchanged.
fn add_device_counters(counted: &mut DaemonCounterState, registry: &Registry) {
    for export in registry.exports.all() {
        if export.own_endpoint().is_some_and(|endpoint| endpoint.host_endpoint().is_some()) {
            counted.add_to_endpoint(&export.id, &export);
        }
    }
}

/// Fails if a recording dirty bitmap is missing here, or an exported bitmap is not the one that was
/// found while the old process had the images.
async fn check_bitmaps(disks: &[TransferredDisk], registry: &Registry) -> anyhow::Result<()> {
    for disk in disks {
        // Disks that were added during this start are missing here.
        let here = registry.disks.get(&disk.name).map_err(|_| {
            anyhow!("disk {}: it was added while this weir started, and is not here (try again)", disk.name)
        })?;
        let here = here.disk.image().recorded_bitmaps();
        if let Some(missing) = disk.bitmaps.iter().find(|bitmap| !here.contains(bitmap)) {
            bail!("disk {}: its recording bitmap {missing:?} cannot be read here", disk.name);
        }
    }
    for export in registry.exports.all() {
        let found = export.nbd_parameters.as_ref().map(|new| Arc::clone(&new.bitmaps)).unwrap_or_default();
        let names: Vec<_> = found.iter().map(|bitmap| bitmap.name().to_string()).collect();
        let now = bitmaps::find_bitmaps(&export.disk, &names).await?;
        if let Some((bitmap, _)) =
            found.iter().zip(&*now).find(|(one, other)| !one.is_of_the_same_image(other))
        {
            let (disk, name) = (export.disk.disk.name(), bitmap.name());
            bail!(
                "disk {disk}: bitmap {name:?} is in another image of its chain than a moment ago (try again)"
            );
        }
    }
    Ok(())
}

/// Sends the upgrade command to a daemon, with the socket for the transfer, and waits for its
/// reply.
fn send_command(control: &Path, user: Option<&str>, passed: OwnedFd) -> anyhow::Result<()> {
    /// Maximum length of a line.
    const MOST: u64 = 1 << 20;
    let socket = UnixStream::connect(control).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            anyhow!("no permission to ask the daemon there (be root, or the daemon's own user)")
        }
        _ => anyhow!(error).context("no process listens there (start without --takeover)"),
    })?;
    check_listener(&socket, user)?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    let mut lines = BufReader::new(io::Read::take(&socket, MOST));
    let mut next = || -> anyhow::Result<Value> {
        loop {
            let mut line = String::new();
            lines.read_line(&mut line).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => {
                    anyhow!("no answer in time (is the daemon stopped, or something else listening there?)")
                }
                _ => anyhow!(error).context("the daemon's reply cannot be read"),
            })?;
            let message: Value =
                serde_json::from_str(&line).context("the process that listens there is not weir")?;
            // An event may precede the reply to a command.
            if message.get("event").is_none() {
                return Ok(message);
            }
        }
    };
    let refusal = |answer: &Value| match answer["error"]["desc"].as_str() {
        Some(why) => Err(anyhow!("{why}")),
        None => Ok(()),
    };
    refusal(&next()?)?;
    writeln!(&socket, "{}", json!({ "execute": "qmp_capabilities" }))?;
    refusal(&next()?)?;
    let command = json!({
        "execute": UPGRADE_COMMAND,
        "arguments": { "format": UPGRADE_FORMAT, "version": env!("CARGO_PKG_VERSION") },
    });
    let line = format!("{command}\n");
    let sent = send_with(&socket, line.as_bytes(), &[passed])?;
    ensure!(sent == line.len(), "the command could not be sent completely");
    refusal(&next()?)
}
