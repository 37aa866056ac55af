//! The keeper of one attachment: makes it step by step, responds to its caller, and stays in the
//! background until the attachment ends.
//!
//! ```text
//!   place ─► server ─► device ─► loop device ─► udev ─► mount ─► record ─► response ─► wait
//! ```
//!
//! A failed step undoes all earlier ones, in reverse, and so does a failure to send the response. A
//! private server that is killed is restarted: its device waits for the new server.

use std::{
    fs::{self, File},
    io::{self, Write as _, stdout},
    os::fd::{AsFd as _, RawFd},
    path::{Path, PathBuf},
    process,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::Context as _;
use console::CommandFailure;
use control::openers::DeviceOpeners;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::close,
};

use super::{
    AttachRequest, Attachment, KeeperResponse, host,
    kind::AttachKind,
    lasting_users::{LAST_POLL, WRITEBACK_TIMEOUT, is_claimed, lasting_users},
    record::{AttachmentRecord, RecordLock},
    server::{self, AttachmentEvent},
};

/// Hidden command that starts a keeper.
pub(super) const COMMAND: &str = "attach-keeper";

/// Reads the request from standard input and writes the response to standard output.
pub(crate) fn run() -> Result<(), CommandFailure> {
    // A session without a terminal: Ctrl-C of the caller must not end the keeper.
    let _ = nix::unistd::setsid();
    let request: AttachRequest =
        serde_json::from_reader(io::stdin()).context("the request on standard input cannot be read")?;
    close_inherited(&request);
    let mut keeper = AttachmentKeeper::default();
    let outcome = keeper.attach(&request);
    // Before the response, so that a caller that reads the error finds nothing left.
    if outcome.is_err() && !keeper.is_recorded {
        keeper.undo();
    }
    let response = match &outcome {
        Ok(attached) => KeeperResponse::Attached(Box::new(attached.clone())),
        Err(error) => KeeperResponse::Failed(format!("{error:#}")),
    };
    let printed = serde_json::to_string(&response).map_err(io::Error::from);
    let printed = printed.and_then(|line| writeln!(stdout(), "{line}"));
    match outcome {
        Ok(attached) if printed.is_ok() || keeper.is_recorded => keeper.run_until_end(&request, &attached),
        // The caller has ended without the response: no process could detach the device by its
        // name.
        Ok(_) => keeper.undo(),
        Err(_) => {}
    }
    Ok(())
}

/// Closes descriptors inherited from the caller: they would hold its locks, or files in a mount,
/// for the attachment's lifetime. Descriptors named by the image or by an option stay open.
fn close_inherited(request: &AttachRequest) {
    let values = request.options.iter().filter_map(|(_, value)| value.as_ref()).chain([&request.image]);
    let named: Vec<RawFd> = values.flat_map(|word| descriptors_in(word)).collect();
    let open = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    // Collected first: the descriptor of the listing itself is closed by then.
    let open: Vec<RawFd> = open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in open.into_iter().filter(|number| *number > 2 && !named.contains(number)) {
        let _ = close(number);
    }
}

/// Descriptor numbers in paths such as `/dev/fd/5` and `/proc/self/fd/5`.
fn descriptors_in(text: &str) -> impl Iterator<Item = RawFd> {
    text.split("/fd/").skip(1).filter_map(|rest| {
        let end = rest.find(|character: char| !character.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    })
}

/// Steps that are done, for undoing them.
struct AttachmentKeeper {
    /// True if the attachment was recorded by an earlier keeper.
    is_recorded: bool,
    record: Option<(AttachmentRecord, RecordLock)>,
    server: Option<Attachment>,
    /// Thread that waits for the private server.
    process: Option<JoinHandle<()>>,
    fuse: Option<PathBuf>,
    mounted: Option<PathBuf>,
    /// Time of the unmount, until the kernel has finished with the device.
    unmounted: Option<Instant>,
    events: (Sender<AttachmentEvent>, Receiver<AttachmentEvent>),
}

impl Default for AttachmentKeeper {
    fn default() -> Self {
        let (locked, server, process, fuse, mounted, unmounted) = Default::default();
        Self {
            is_recorded: false,
            record: locked,
            server,
            process,
            fuse,
            mounted,
            unmounted,
            events: channel(),
        }
    }
}

impl AttachmentKeeper {
    fn attach(&mut self, request: &AttachRequest) -> anyhow::Result<Attachment> {
        let locked = AttachmentRecord::lock_for(request, remove_remains)?;
        let place = locked.0.clone();
        // If the keeper is killed during mount(8), the program keeps the lock until it ends, so
        // that no cleanup runs beside it.
        host::inherit_to_programs(locked.1.share()?);
        self.record = Some(locked);
        if request.daemon.is_none() {
            // Before the server starts, or its READY=1 could be lost.
            server::listen(&place, self.events.0.clone())?;
        }
        let before = place.attached();
        let mut attached = initial_record(request, &place);
        self.server = Some(attached.clone());
        if request.way == AttachKind::Fuse {
            self.fuse = Some(server::fuse_file(&place));
        }
        self.is_recorded = before.is_some();
        // A recorded attachment may still have its server: only its keeper was killed.
        let is_served = before.as_ref().is_some_and(|before| server::adopt(before, &self.events.0));
        if !is_served {
            if let Some(before) = &before {
                // A mount waits for a stopped server, so a second server must not be started.
                server::check_answers(before, false)?;
            }
            if before.is_some() && request.way == AttachKind::Fuse {
                // A FUSE mount does not survive its server: remove its remains.
                remove_remains(&place);
            }
            // The new server must keep the device's number: mounts and openers refer to it.
            let number = before.as_ref().and_then(|before| device_number(&before.device));
            self.serve(&AttachRequest { number: number.or(request.number), ..request.clone() }, &place)?;
        }
        // The number of a ublk or NBD device may be the server's choice.
        attached.device = server::device(&attached.qmp, &attached.export)?;
        if request.way == AttachKind::Fuse && host::may_make_loops() {
            let device = match before.filter(|_| is_served) {
                Some(before) => before.device,
                None => Self::make_loop(&place, &attached.device, request.is_read_only())?,
            };
            attached.file = Some(std::mem::replace(&mut attached.device, device));
        }
        if request.way == AttachKind::Nbd {
            // The kernel's NBD client reads the partition table when the device is opened.
            let _ = File::open(&attached.device);
        }
        if request.udev && attached.device.starts_with("/dev") {
            host::settle_udev(&attached.device)?;
        }
        if let Some(mount) = &request.mount {
            // After a keeper's death the mount still exists.
            let is_mounted = DeviceOpeners::of_device(&attached.device).mounts.contains(&mount.directory);
            if !is_mounted {
                host::mount(&attached.device, mount, request.is_read_only())
                    .with_context(|| format!("{}", mount.directory.display()))?;
            }
            self.mounted = Some(mount.directory.clone());
            attached.mount = Some(mount.directory.clone());
        }
        // Last: a complete record is what `--recover` restores.
        place.set_attached(&attached)?;
        self.server = Some(attached.clone());
        Ok(attached)
    }

    /// Makes a loop device and records its sequence number.
    fn make_loop(place: &AttachmentRecord, file: &Path, read_only: bool) -> anyhow::Result<PathBuf> {
        let device = host::make_loop(file, read_only)?;
        if let Some(attached_loop) = host::AttachedLoop::of(&device) {
            place.set_made_loop(&attached_loop)?;
        }
        Ok(device)
    }

    fn serve(&mut self, request: &AttachRequest, place: &AttachmentRecord) -> anyhow::Result<()> {
        let (events, receiver) = &self.events;
        match &request.daemon {
            Some(qmp) => server::add(request, place, qmp, events)?,
            None => self.process = Some(server::start(request, place, events, receiver)?),
        }
        Ok(())
    }

    /// Serves until the device is gone or is to be removed.
    fn run_until_end(mut self, request: &AttachRequest, attached: &Attachment) {
        if let Some(directory) = &self.mounted {
            watch_mount(&attached.device, directory, self.events.0.clone());
        }
        while let Some(event) = self.next_event(attached) {
            match event {
                AttachmentEvent::Ready => {}
                AttachmentEvent::Unmounted => (self.mounted, self.unmounted) = (None, Some(Instant::now())),
                // The device is gone. A device that survives its server is left for the next
                // server.
                AttachmentEvent::Ended { orderly: true } if !self.is_orphaned(attached) => break,
                // The kernel aborts a FUSE mount with its server: there is nothing to continue.
                AttachmentEvent::Ended { .. } if attached.kind == AttachKind::Fuse => break,
                AttachmentEvent::Ended { orderly } => {
                    let Some((place, _)) = &self.record else { break };
                    let place = place.clone();
                    let repeated =
                        AttachRequest { number: device_number(&attached.device), ..request.clone() };
                    // A shared daemon is restarted by its service manager, not by a keeper.
                    let may_restart = !orderly && request.daemon.is_none();
                    if !may_restart || self.serve(&repeated, &place).is_err() {
                        // The device waits; the record remains for `weir attach --recover`.
                        return;
                    }
                }
            }
        }
        self.undo();
    }

    /// The next event; `None` once an unmounted device has no users left.
    fn next_event(&mut self, attached: &Attachment) -> Option<AttachmentEvent> {
        while let Some(since) = self.unmounted {
            let attached_loop = self.record.as_ref().and_then(|(place, _)| place.made_loop());
            let users = lasting_users(&attached.device, attached_loop.as_ref(), None);
            if users.is_empty() {
                return None;
            }
            // Mounts and holders can only come from outside: the keeper's own mount is gone.
            let is_used_by_others = !users.claimed || !users.mounts.is_empty() || !users.holders.is_empty();
            if is_used_by_others {
                // Another process uses the device: keep it until it is detached explicitly.
                self.unmounted = None;
            }
            if !users.is_only_claimed() || since.elapsed() >= WRITEBACK_TIMEOUT {
                // Clears the mount in the record, so that callers do not wait for the end of this
                // keeper.
                if let Some((place, _)) = &self.record {
                    let _ = place.set_attached(&Attachment { mount: None, ..attached.clone() });
                }
            }
            while self.unmounted.is_some() && is_claimed(&attached.device, attached_loop.as_ref()) {
                // The kernel reports the unmount, but not the end of its writeback: poll.
                match self.events.1.recv_timeout(LAST_POLL) {
                    Err(RecvTimeoutError::Timeout) if !users.is_only_claimed() => {}
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return None,
                    Ok(event) => return Some(event),
                }
            }
        }
        self.events.1.recv().ok()
    }

    /// True if the server ended and its device still exists and is in use.
    fn is_orphaned(&self, attached: &Attachment) -> bool {
        attached.kind != AttachKind::Fuse
            && server::device(&attached.qmp, &attached.export).is_err()
            && !DeviceOpeners::of_device(&attached.device).is_empty()
    }

    fn undo(&mut self) {
        if let Some(directory) = self.mounted.take() {
            host::unmount_lazily(&directory);
        }
        let Some((place, lock)) = self.record.take() else { return };
        // In reverse order of attaching: each layer keeps the one below in use.
        remove_loops(&place);
        if let Some(server) = self.server.take() {
            let _ =
                server::check_answers(&server, true).and_then(|()| server::remove_export(&server, &place));
        }
        if let Some(process) = self.process.take() {
            // The server has closed its image by then.
            let _ = process.join();
        }
        if let Some(file) = self.fuse.take() {
            host::unmount_fuse(&file);
        }
        place.remove();
        drop(lock);
    }
}

/// Removes the loop device over the FUSE file, if any, and its mounts. Serialized between
/// processes.
pub(super) fn remove_loops(place: &AttachmentRecord) {
    let changing = place.lock_loops();
    host::remove_loops(&server::fuse_file(place), place.made_loop().as_ref());
    drop(changing);
}

/// Record of an attachment before its first step.
fn initial_record(request: &AttachRequest, place: &AttachmentRecord) -> Attachment {
    Attachment {
        name: request.name.clone(),
        image: request.image.clone(),
        kind: request.way,
        device: PathBuf::new(),
        file: None,
        mount: None,
        export: request.name.clone(),
        qmp: request.daemon.clone().unwrap_or_else(|| server::own_qmp(place)),
        daemon: request.daemon.is_some(),
        keeper: process::id(),
    }
}

/// Remains of an attachment whose keeper was killed before it was complete. Without a device,
/// `device` is a path that does not exist.
pub(super) fn partial_record(place: &AttachmentRecord) -> Attachment {
    let request = place.request().unwrap_or_else(|| AttachRequest {
        name: place.name(),
        image: "-".to_owned(),
        options: Vec::new(),
        way: AttachKind::Fuse,
        ublk: String::new(),
        number: None,
        daemon: None,
        mount: None,
        udev: false,
    });
    let mut attached = initial_record(&request, place);
    let file = server::fuse_file(place);
    // A disk of this name in a daemon that received no request for it belongs to another user.
    let is_ours = !attached.daemon || place.has_asked();
    let served = is_ours.then(|| server::device(&attached.qmp, &attached.export).ok()).flatten();
    attached.device = served.unwrap_or_else(|| file.clone());
    if attached.kind == AttachKind::Fuse
        && let Some(device) = place
            .made_loop()
            .and_then(|attached_loop| attached_loop.device())
            .or_else(|| Some(Path::new("/dev").join(DeviceOpeners::loops(&file).first()?)))
    {
        attached.device = device;
        attached.file = Some(file);
    }
    let mount = request.mount.map(|mount| mount.directory);
    attached.mount =
        mount.filter(|directory| DeviceOpeners::of_device(&attached.device).mounts.contains(directory));
    attached
}

/// Removes the remains of an attachment whose keeper was killed early. The caller holds the lock.
pub(super) fn remove_remains(place: &AttachmentRecord) {
    let Some(request) = place.request() else { return };
    // A server that is starting must listen first; otherwise its export would be missed.
    let _ = place.await_server();
    remove_loops(place);
    let _ = server::remove_export(&initial_record(&request, place), place);
    if request.way == AttachKind::Fuse {
        host::unmount_fuse(&server::fuse_file(place));
    }
    place.await_server_end();
}

/// The number `N` of a device, which a restarted server must keep.
fn device_number(device: &Path) -> Option<u32> {
    // Loop devices are not included: their numbers are not kept.
    let name = device.file_name()?.to_str()?;
    let digits = name.strip_prefix("ublkb").or_else(|| name.strip_prefix("nbd"))?;
    digits.parse().ok()
}

/// Sends [`AttachmentEvent::Unmounted`] when a device is no longer mounted at a directory.
fn watch_mount(device: &Path, directory: &Path, events: Sender<AttachmentEvent>) {
    let (device, directory) = (device.to_owned(), directory.to_owned());
    thread::spawn(move || {
        // mountinfo polls as POLLPRI each time mounts change (proc_pid_mountinfo(5)).
        let Ok(mounts) = File::open("/proc/self/mountinfo") else { return };
        while DeviceOpeners::of_device(&device).mounts.contains(&directory) {
            let mut polled = [PollFd::new(mounts.as_fd(), PollFlags::POLLPRI | PollFlags::POLLERR)];
            if poll(&mut polled, PollTimeout::NONE).is_err_and(|errno| errno != nix::errno::Errno::EINTR) {
                return;
            }
        }
        let _ = events.send(AttachmentEvent::Unmounted);
    });
}
