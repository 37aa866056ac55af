//! The keeper of one attachment: makes it step by step, answers whoever asked, and stays in the
//! background until it ends.
//!
//! ```text
//!   place ─► server ─► device ─► loop device ─► udev ─► mount ─► written down ─► answer ─► wait
//! ```
//!
//! What fails is undone from there backwards, and so is everything if nobody takes the answer. A
//! server of its own that is killed is started again: the device has waited.

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
use control::users::Users;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::close,
};

use super::{
    Attached, Outcome, Wanted, host,
    lasting::{SELDOM, WRITING_BACK, is_claimed, lasting_users},
    place::{Kept, Place},
    server::{self, Event},
    way::Way,
};

/// The hidden command that a keeper is started by.
pub(super) const COMMAND: &str = "attach-keeper";

/// Reads what is wanted from standard input, and answers on standard output.
pub(crate) fn run() -> Result<(), CommandFailure> {
    // The terminal's signals are not for it.
    let _ = nix::unistd::setsid();
    let wanted: Wanted = serde_json::from_reader(io::stdin()).context("what to attach cannot be read")?;
    close_inherited(&wanted);
    let mut made = Made::default();
    let outcome = made.attach(&wanted);
    // Before it is told, so that whoever hears of it finds nothing left.
    if outcome.is_err() && !made.is_known {
        made.undo();
    }
    let answer = match &outcome {
        Ok(attached) => Outcome::Attached(Box::new(attached.clone())),
        Err(error) => Outcome::Failed(format!("{error:#}")),
    };
    let told = serde_json::to_string(&answer).map_err(io::Error::from);
    let told = told.and_then(|line| writeln!(stdout(), "{line}"));
    match outcome {
        Ok(attached) if told.is_ok() || made.is_known => made.keep(&wanted, &attached),
        // Who asked has gone, and nobody knows of it.
        Ok(_) => made.undo(),
        Err(_) => {}
    }
    Ok(())
}

/// Closes what whoever asked had open: a lock would be held, and a file in what is mounted in use,
/// for as long as the disk is attached. What the disk, or a key of it, is named by stays.
fn close_inherited(wanted: &Wanted) {
    let words = wanted.options.iter().filter_map(|(_, value)| value.as_ref()).chain([&wanted.image]);
    let named: Vec<RawFd> = words.flat_map(|word| descriptors_in(word)).collect();
    let open = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    // All of them first: the one that lists them has gone then.
    let open: Vec<RawFd> = open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in open.into_iter().filter(|number| *number > 2 && !named.contains(number)) {
        let _ = close(number);
    }
}

/// The numbers in paths such as `/dev/fd/5` and `/proc/self/fd/5`.
fn descriptors_in(word: &str) -> impl Iterator<Item = RawFd> {
    word.split("/fd/").skip(1).filter_map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    })
}

/// What there is so far.
struct Made {
    /// An earlier keeper had it.
    is_known: bool,
    kept: Option<(Place, Kept)>,
    server: Option<Attached>,
    /// Ends with a server of its own.
    process: Option<JoinHandle<()>>,
    fuse: Option<PathBuf>,
    mounted: Option<PathBuf>,
    /// When it was unmounted, until it is known that the kernel is through with the device.
    unmounted: Option<Instant>,
    events: (Sender<Event>, Receiver<Event>),
}

impl Default for Made {
    fn default() -> Self {
        let (kept, server, process, fuse, mounted, unmounted) = Default::default();
        Self { is_known: false, kept, server, process, fuse, mounted, unmounted, events: channel() }
    }
}

impl Made {
    fn attach(&mut self, wanted: &Wanted) -> anyhow::Result<Attached> {
        let kept = Place::take(wanted, clear)?;
        let place = kept.0.clone();
        host::hand_to_programs(kept.1.share()?);
        self.kept = Some(kept);
        if wanted.daemon.is_none() {
            server::listen(&place, self.events.0.clone())?;
        }
        let before = place.attached();
        let mut attached = at_first(wanted, &place);
        self.server = Some(attached.clone());
        if wanted.way == Way::Fuse {
            self.fuse = Some(server::fuse_file(&place));
        }
        self.is_known = before.is_some();
        let is_served = before.as_ref().is_some_and(|before| server::adopt(before, &self.events.0));
        if !is_served {
            if let Some(before) = &before {
                // What is mounted waits for one that only stands still.
                server::check_answers(before, false)?;
            }
            if before.is_some() && wanted.way == Way::Fuse {
                // It died with its server.
                clear(&place);
            }
            let number = before.as_ref().and_then(|before| number_of(&before.device));
            self.serve(&Wanted { number: number.or(wanted.number), ..wanted.clone() }, &place)?;
        }
        attached.device = server::device(&attached.qmp, &attached.export)?;
        if wanted.way == Way::Fuse && host::may_make_loops() {
            let device = match before.filter(|_| is_served) {
                Some(before) => before.device,
                None => Self::make_loop(&place, &attached.device, wanted.is_read_only())?,
            };
            attached.file = Some(std::mem::replace(&mut attached.device, device));
        }
        if wanted.way == Way::Nbd {
            // Of this driver's, the kernel reads the table of partitions when somebody opens it.
            let _ = File::open(&attached.device);
        }
        if wanted.udev && attached.device.starts_with("/dev") {
            host::settle(&attached.device)?;
        }
        if let Some(mount) = &wanted.mount {
            let is_there = Users::of(&attached.device).mounts.contains(&mount.directory);
            if !is_there {
                host::mount(&attached.device, mount, wanted.is_read_only())
                    .with_context(|| format!("{}", mount.directory.display()))?;
            }
            self.mounted = Some(mount.directory.clone());
            attached.mount = Some(mount.directory.clone());
        }
        place.set_attached(&attached)?;
        self.server = Some(attached.clone());
        Ok(attached)
    }

    /// A loop device, and a note of which one it is.
    fn make_loop(place: &Place, file: &Path, read_only: bool) -> anyhow::Result<PathBuf> {
        let device = host::make_loop(file, read_only)?;
        if let Some(made) = host::Loop::of(&device) {
            place.set_made_loop(&made)?;
        }
        Ok(device)
    }

    fn serve(&mut self, wanted: &Wanted, place: &Place) -> anyhow::Result<()> {
        let (events, heard) = &self.events;
        match &wanted.daemon {
            Some(qmp) => server::add(wanted, place, qmp, events)?,
            None => self.process = Some(server::start(wanted, place, (events, heard))?),
        }
        Ok(())
    }

    /// Until the device has gone, or is to go.
    fn keep(mut self, wanted: &Wanted, attached: &Attached) {
        if let Some(directory) = &self.mounted {
            watch_mount(&attached.device, directory, self.events.0.clone());
        }
        while let Some(event) = self.next(attached) {
            match event {
                Event::Ready => {}
                Event::Unmounted => (self.mounted, self.unmounted) = (None, Some(Instant::now())),
                // The device has gone, or has been left for who comes next.
                Event::Ended { orderly: true } if !self.is_left(attached) => break,
                Event::Ended { .. } if attached.way == Way::Fuse => break,
                Event::Ended { orderly } => {
                    let Some((place, _)) = &self.kept else { break };
                    let place = place.clone();
                    let again = Wanted { number: number_of(&attached.device), ..wanted.clone() };
                    let may = !orderly && wanted.daemon.is_none();
                    if !may || self.serve(&again, &place).is_err() {
                        // The device waits, and what is written down is what to go on with.
                        return;
                    }
                }
            }
        }
        self.undo();
    }

    /// What it hears next; `None` once nobody has the device whose file system was unmounted.
    fn next(&mut self, attached: &Attached) -> Option<Event> {
        while let Some(since) = self.unmounted {
            let made = self.kept.as_ref().and_then(|(place, _)| place.made_loop());
            let users = lasting_users(&attached.device, made.as_ref(), None);
            if users.is_empty() {
                return None;
            }
            let is_anothers = !users.claimed || !users.mounts.is_empty() || !users.holders.is_empty();
            if is_anothers {
                // Somebody else has it, and then it stays until it is detached.
                self.unmounted = None;
            }
            if !users.is_only_claimed() || since.elapsed() >= WRITING_BACK {
                // Nobody is to wait for its end.
                if let Some((place, _)) = &self.kept {
                    let _ = place.set_attached(&Attached { mount: None, ..attached.clone() });
                }
            }
            while self.unmounted.is_some() && is_claimed(&attached.device, made.as_ref()) {
                // The kernel tells of the unmounting, and of nothing afterwards.
                match self.events.1.recv_timeout(SELDOM) {
                    Err(RecvTimeoutError::Timeout) if !users.is_only_claimed() => {}
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return None,
                    Ok(event) => return Some(event),
                }
            }
        }
        self.events.1.recv().ok()
    }

    /// Whether the server has ended, and not the device.
    fn is_left(&self, attached: &Attached) -> bool {
        attached.way != Way::Fuse
            && server::device(&attached.qmp, &attached.export).is_err()
            && !Users::of(&attached.device).is_empty()
    }

    fn undo(&mut self) {
        if let Some(directory) = self.mounted.take() {
            host::unmount_at_last(&directory);
        }
        let Some((place, kept)) = self.kept.take() else { return };
        remove_loops(&place);
        if let Some(server) = self.server.take() {
            let _ = server::check_answers(&server, true).and_then(|()| server::let_go(&server, &place));
        }
        if let Some(process) = self.process.take() {
            // Its image is closed by then.
            let _ = process.join();
        }
        if let Some(file) = self.fuse.take() {
            host::unmount_fuse(&file);
        }
        place.remove();
        drop(kept);
    }
}

/// Removes the loop device over what FUSE serves, if there is one, and its mounts; one process at a
/// time.
pub(super) fn remove_loops(place: &Place) {
    let changing = place.changing_loops();
    host::remove_loops(&server::fuse_file(place), place.made_loop().as_ref());
    drop(changing);
}

/// What an attachment is before there is anything of it.
fn at_first(wanted: &Wanted, place: &Place) -> Attached {
    Attached {
        name: wanted.name.clone(),
        image: wanted.image.clone(),
        way: wanted.way,
        device: PathBuf::new(),
        file: None,
        mount: None,
        export: wanted.name.clone(),
        qmp: wanted.daemon.clone().unwrap_or_else(|| server::own_qmp(place)),
        daemon: wanted.daemon.is_some(),
        keeper: process::id(),
    }
}

/// What there is in a place that no keeper has, whose keeper was killed before it was through; no
/// device is a path where nothing is.
pub(super) fn remains(place: &Place) -> Attached {
    let wanted = place.wanted().unwrap_or_else(|| Wanted {
        name: place.name(),
        image: "-".to_owned(),
        options: Vec::new(),
        way: Way::Fuse,
        ublk: String::new(),
        number: None,
        daemon: None,
        mount: None,
        udev: false,
    });
    let mut attached = at_first(&wanted, place);
    let file = server::fuse_file(place);
    let is_ours = !attached.daemon || place.has_asked();
    let served = is_ours.then(|| server::device(&attached.qmp, &attached.export).ok()).flatten();
    attached.device = served.unwrap_or_else(|| file.clone());
    if attached.way == Way::Fuse
        && let Some(device) = place
            .made_loop()
            .and_then(|made| made.device())
            .or_else(|| Some(Path::new("/dev").join(Users::loops(&file).first()?)))
    {
        attached.device = device;
        attached.file = Some(file);
    }
    let mount = wanted.mount.map(|mount| mount.directory);
    attached.mount = mount.filter(|directory| Users::of(&attached.device).mounts.contains(directory));
    attached
}

/// Takes away what a keeper that was killed half way has left in a place, for whoever has it.
pub(super) fn clear(place: &Place) {
    let Some(wanted) = place.wanted() else { return };
    // One that has begun is asked, and not missed.
    let _ = place.await_server();
    remove_loops(place);
    let _ = server::let_go(&at_first(&wanted, place), place);
    if wanted.way == Way::Fuse {
        host::unmount_fuse(&server::fuse_file(place));
    }
    place.await_server_end();
}

/// The `N` of a device that a server is to have again.
fn number_of(device: &Path) -> Option<u32> {
    let name = device.file_name()?.to_str()?;
    let digits = name.strip_prefix("ublkb").or_else(|| name.strip_prefix("nbd"))?;
    digits.parse().ok()
}

/// Tells when a device is no longer mounted at a directory.
fn watch_mount(device: &Path, directory: &Path, events: Sender<Event>) {
    let (device, directory) = (device.to_owned(), directory.to_owned());
    thread::spawn(move || {
        // The kernel marks it as ready each time that mounts have changed (proc_pid_mountinfo(5)).
        let Ok(mounts) = File::open("/proc/self/mountinfo") else { return };
        while Users::of(&device).mounts.contains(&directory) {
            let mut polled = [PollFd::new(mounts.as_fd(), PollFlags::POLLPRI | PollFlags::POLLERR)];
            if poll(&mut polled, PollTimeout::NONE).is_err_and(|errno| errno != nix::errno::Errno::EINTR) {
                return;
            }
        }
        let _ = events.send(Event::Unmounted);
    });
}
