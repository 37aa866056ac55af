//! State that all queues of an export share: the disk, the attributes of its file, and counters.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{SystemTime, UNIX_EPOCH},
};

use block::disk::{CancelToken, Disk};
use event_listener::Event;
use storage::RangeLocks;

use super::{
    encode,
    file_end::{COUNT_TIMEOUT, FileEnd},
    interrupts::Interrupts,
    message::{AttributeChanges, FuseFileAttributes},
};

/// A disk to be exported as a file.
#[derive(Clone, Debug)]
pub struct FuseExport {
    /// Name in the log.
    pub id: Arc<str>,
    /// The disk.
    pub disk: Arc<Disk>,
    /// True to reject writes.
    pub read_only: bool,
    /// True if writing past the end and `truncate` resize the disk.
    pub growable: bool,
    /// Initial owner of the file.
    pub owner: FuseFileOwner,
}

/// Owner and permissions of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseFileOwner {
    /// The lower twelve bits of a mode.
    pub permissions: u32,
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

/// State of a file between two requests, for the new process of an upgrade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FuseFileState {
    /// Current owner.
    pub owner: FuseFileOwner,
    /// Time of the last change of content: seconds and nanoseconds since the epoch.
    pub modified: (u64, u32),
    /// Number of open file descriptions.
    pub openers: usize,
    /// Length of the file, if it ends before the disk.
    pub file_bytes: Option<u64>,
    /// Requests that were received and not started, concatenated in the kernel's format.
    pub messages: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct FuseDevice {
    pub(super) export: FuseExport,
    owner: Mutex<FuseFileOwner>,
    modified: Mutex<SystemTime>,
    /// True if the content has changed since `modified` was set.
    is_changed: AtomicBool,
    pub(super) interrupts: Interrupts,
    /// Held exclusively by a request that changes the size, and shared by requests that change
    /// bytes of a resizable file.
    pub(super) size_lock: RangeLocks,
    /// End of the file, which may lie before the end of the disk.
    pub(super) end: FileEnd,
    /// Cancel token of requests that wait on a stopped disk; cancelled when the export ends.
    pub(super) cancel_token: Arc<CancelToken>,
    is_stopping: AtomicBool,
    quiescing: AtomicBool,
    /// Encoded requests that each quiesced queue has received and not started, by the queue's
    /// number.
    quiesced_queues: Mutex<BTreeMap<usize, Vec<u8>>>,
    /// Requests that the old process has not started, for the first queue of this process that
    /// starts.
    inherited_messages: Mutex<Vec<Vec<u8>>>,
    /// Notified when the device stops, quiesces or resumes: for queues and for requests that wait
    /// for limits.
    pub(super) state_changed: Event,
    /// Number of open file descriptions; each ends with one RELEASE request.
    pub(super) openers: AtomicUsize,
    /// True if the file was ever opened.
    pub(super) was_opened: AtomicBool,
    /// Notified when the file is opened or closed, and when a queue has quiesced.
    pub(super) clients_changed: Event,
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
}

impl FuseDevice {
    pub(super) fn new(export: FuseExport) -> Self {
        Self {
            owner: Mutex::new(export.owner),
            end: FileEnd::default(),
            export,
            modified: Mutex::new(SystemTime::now()),
            is_changed: AtomicBool::new(false),
            interrupts: Interrupts::default(),
            size_lock: RangeLocks::default(),
            cancel_token: Arc::default(),
            is_stopping: AtomicBool::new(false),
            quiescing: AtomicBool::new(false),
            quiesced_queues: Mutex::default(),
            inherited_messages: Mutex::default(),
            state_changed: Event::new(),
            openers: AtomicUsize::new(0),
            was_opened: AtomicBool::new(false),
            clients_changed: Event::new(),
            requests: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
        }
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.export.disk
    }

    /// Current length of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.end.file_bytes(self.disk())
    }

    /// Updates the allocated space of the image: see [`FuseDevice::attributes`].
    pub(super) async fn count_space(&self) {
        self.disk().image().count_allocated_bytes(COUNT_TIMEOUT).await;
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Relaxed)
    }

    /// Stops all queues: started requests complete, requests that wait for limits fail.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, SeqCst);
        self.cancel_token.cancel();
        self.state_changed.notify(usize::MAX);
    }

    /// Quiesces the queues, or resumes them.
    pub(super) fn set_quiescing(&self, quiescing: bool) {
        self.quiescing.store(quiescing, SeqCst);
        self.state_changed.notify(usize::MAX);
    }

    pub(super) fn is_quiescing(&self) -> bool {
        self.quiescing.load(Relaxed)
    }

    /// Records that a queue has nothing in flight. `messages` are the requests that it has not
    /// started, as encoded by `encode.rs`.
    pub(super) fn publish_quiesced(&self, queue: usize, messages: Vec<u8>) {
        lock(&self.quiesced_queues).insert(queue, messages);
        self.clients_changed.notify(usize::MAX);
    }

    pub(super) fn withdraw_quiesced(&self, queue: usize) {
        lock(&self.quiesced_queues).remove(&queue);
    }

    pub(super) fn quiesced_queue_count(&self) -> usize {
        lock(&self.quiesced_queues).len()
    }

    /// State for the new process.
    pub(super) fn state(&self) -> FuseFileState {
        let attributes = self.attributes();
        FuseFileState {
            owner: *lock(&self.owner),
            modified: attributes.modified,
            openers: self.openers.load(SeqCst),
            file_bytes: self.end.before_disk(self.disk()),
            messages: lock(&self.quiesced_queues).values().flatten().copied().collect(),
        }
    }

    /// Continues from the state of the old process; false if its requests are malformed.
    pub(super) fn restore(&self, state: &FuseFileState) -> bool {
        let Some(messages) = encode::split(&state.messages) else { return false };
        let (seconds, nanoseconds) = state.modified;
        let since = std::time::Duration::new(seconds, nanoseconds.min(999_999_999));
        *lock(&self.owner) = state.owner;
        *lock(&self.modified) = UNIX_EPOCH.checked_add(since).unwrap_or_else(SystemTime::now);
        *lock(&self.inherited_messages) = messages;
        self.end.set(state.file_bytes);
        self.openers.store(state.openers, SeqCst);
        // OPEN was answered by the old process, so RELEASE arrives here without one.
        self.was_opened.store(state.openers > 0, SeqCst);
        true
    }

    pub(super) fn take_inherited_messages(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut *lock(&self.inherited_messages))
    }

    /// Records that the disk's content has changed.
    pub(super) fn mark_changed(&self) {
        // Read before the store: most writes find the flag set, and do not contend for its cache
        // line.
        if !self.is_changed.load(Relaxed) {
            self.is_changed.store(true, Relaxed);
        }
    }

    /// Attributes of the file, with the last known allocated space.
    pub(super) fn attributes(&self) -> FuseFileAttributes {
        let owner = *lock(&self.owner);
        let mut modified = lock(&self.modified);
        if self.is_changed.swap(false, Relaxed) {
            *modified = SystemTime::now();
        }
        let modified = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
        let write_bits = if self.export.read_only { 0o222 } else { 0 };
        FuseFileAttributes {
            size_bytes: self.file_bytes(),
            space_bytes: self.disk().image().last_allocated_bytes(),
            modified: (modified.as_secs(), modified.subsec_nanos()),
            permissions: owner.permissions & !write_bits,
            uid: owner.uid,
            gid: owner.gid,
            block_bytes: self.disk().image().block_size().preferred.clamp(4096, 1 << 20),
        }
    }

    /// Changes mode and owner; the kernel has checked the permission (`default_permissions`).
    pub(super) fn change_owner(&self, changes: &AttributeChanges) {
        let mut owner = lock(&self.owner);
        *owner = FuseFileOwner {
            permissions: changes.mode.map_or(owner.permissions, |mode| mode & 0o7777),
            uid: changes.uid.unwrap_or(owner.uid),
            gid: changes.gid.unwrap_or(owner.gid),
        };
    }

    pub(super) fn count_open(&self) {
        self.openers.fetch_add(1, SeqCst);
        self.was_opened.store(true, SeqCst);
        self.clients_changed.notify(usize::MAX);
    }

    pub(super) fn count_close(&self) {
        // Saturates: a RELEASE without a counted OPEN must not wrap.
        let _ = self.openers.fetch_update(SeqCst, SeqCst, |openers| openers.checked_sub(1));
        self.clients_changed.notify(usize::MAX);
    }

    /// Resets the count when the kernel will send no further RELEASE.
    pub(super) fn forget_openers(&self) {
        self.openers.store(0, SeqCst);
        self.clients_changed.notify(usize::MAX);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
