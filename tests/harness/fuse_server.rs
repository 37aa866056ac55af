//! A FUSE file system with one file that stops answering requests of chosen kinds. To the kernel it
//! looks like a hung NFS server or a hung file system in user space.
//!
//! Written from linux/fuse.h alone. The test process itself never touches the mounted file, because
//! it would wait for itself.

use std::{
    collections::HashSet,
    ffi::CString,
    fs::{self, File, OpenOptions},
    io::{Read as _, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::{DEADLINE, need_root};

/// Kinds of requests: opcodes of linux/fuse.h.
pub(crate) const LOOKUP: u32 = 1;
pub(crate) const GETATTR: u32 = 3;
pub(crate) const SETATTR: u32 = 4;
pub(crate) const OPEN: u32 = 14;
pub(crate) const READ: u32 = 15;
pub(crate) const WRITE: u32 = 16;
pub(crate) const STATFS: u32 = 17;
pub(crate) const RELEASE: u32 = 18;
pub(crate) const FSYNC: u32 = 20;
pub(crate) const FLUSH: u32 = 25;
pub(crate) const GETLK: u32 = 31;
pub(crate) const SETLK: u32 = 32;
pub(crate) const FALLOCATE: u32 = 43;
pub(crate) const LSEEK: u32 = 46;
/// All kinds that a test can stop.
pub(crate) const ALL: [u32; 14] = [
    LOOKUP, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, GETLK, SETLK, FALLOCATE,
    LSEEK,
];

const FORGET: u32 = 2;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

const HEADER_BYTES: usize = 40;
const MAX_WRITE: u32 = 128 << 10;
const EIO: i32 = 5;
const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;
const POSIX_LOCKS: u32 = 1 << 1;

/// The mounted file system. Dropping it unmounts by force, which ends blocked requests.
pub(crate) struct FuseServer {
    directory: PathBuf,
    shared: Arc<FuseServerShared>,
}

struct FuseServerShared {
    device: File,
    state: Mutex<FuseServerState>,
    changed: Condvar,
}

struct FuseServerState {
    data: Vec<u8>,
    stopped: HashSet<u32>,
    failing: HashSet<u32>,
    held: Vec<Vec<u8>>,
}

impl FuseServer {
    /// Mounts the file system at `directory`, with one file `h` of `bytes` bytes.
    #[track_caller]
    pub(crate) fn mount(directory: &Path, bytes: usize) -> Self {
        need_root("mounts");
        fs::create_dir(directory).expect("a directory of the test's");
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").expect("FUSE is there");
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let options = CString::new(options).expect("no zero in it");
        mount("held", directory, "fuse.held", MountFlags::empty(), Some(options.as_c_str()))
            .expect("root may mount");
        let state = FuseServerState {
            data: vec![0; bytes],
            stopped: HashSet::new(),
            failing: HashSet::new(),
            held: Vec::new(),
        };
        let shared = Arc::new(FuseServerShared { device, state: Mutex::new(state), changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        thread::spawn(move || of_thread.serve());
        Self { directory: directory.to_owned(), shared }
    }

    /// Path of the file.
    pub(crate) fn file(&self) -> PathBuf {
        self.directory.join("h")
    }

    /// Blocks requests of these kinds from now on.
    pub(crate) fn block_requests(&self, kinds: &[u32]) {
        self.shared.lock().stopped.extend(kinds);
    }

    /// Answers one request of this kind with EIO: the next one, or the first that is blocked.
    pub(crate) fn fail_once(&self, kind: u32) {
        self.shared.lock().failing.insert(kind);
    }

    /// Waits until a request of this kind is blocked.
    #[track_caller]
    pub(crate) fn wait_until_blocked(&self, kind: u32) {
        self.wait_while(kind, |state| !state.held.iter().any(|request| opcode(request) == kind));
    }

    /// Waits until a request of this kind was answered with EIO: see [`FuseServer::fail_once`].
    #[track_caller]
    pub(crate) fn wait_until_failed(&self, kind: u32) {
        self.wait_while(kind, |state| state.failing.contains(&kind));
    }

    #[track_caller]
    fn wait_while(&self, kind: u32, condition: impl FnMut(&mut FuseServerState) -> bool) {
        let state = self.shared.lock();
        let waited = self.shared.changed.wait_timeout_while(state, DEADLINE, condition);
        let (_state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "no request of kind {kind} arrived");
    }

    /// Content of the file.
    pub(crate) fn content(&self) -> Vec<u8> {
        self.shared.lock().data.clone()
    }

    /// Answers the blocked requests and all later ones.
    pub(crate) fn unblock(&self) {
        let mut state = self.shared.lock();
        state.stopped.clear();
        for request in std::mem::take(&mut state.held) {
            self.shared.handle(&mut state, &request);
        }
    }
}

impl Drop for FuseServer {
    fn drop(&mut self) {
        // Aborts the connection, so that processes with the file open can close it.
        let _ = unmount(&self.directory, UnmountFlags::FORCE | UnmountFlags::DETACH);
    }
}

fn opcode(request: &[u8]) -> u32 {
    read_u32(request, 4)
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u64_bytes(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

fn u32_bytes(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

impl FuseServerShared {
    fn lock(&self) -> MutexGuard<'_, FuseServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut buffer = vec![0; HEADER_BYTES + MAX_WRITE as usize + 4096];
        loop {
            match (&self.device).read(&mut buffer) {
                Ok(length) => {
                    let mut state = self.lock();
                    let request = &buffer[..length];
                    if state.stopped.contains(&opcode(request)) {
                        state.held.push(request.to_vec());
                    } else {
                        self.handle(&mut state, request);
                    }
                    self.changed.notify_all();
                }
                // The request was interrupted before it was read.
                Err(error) if matches!(error.raw_os_error(), Some(2 | 4 | 11)) => {}
                // Unmounted.
                Err(_) => return,
            }
        }
    }

    fn handle(&self, state: &mut FuseServerState, request: &[u8]) {
        let (kind, unique, node) = (opcode(request), read_u64(request, 8), read_u64(request, 16));
        let body = &request[HEADER_BYTES..];
        let size = state.data.len() as u64;
        let done = Ok(Vec::new());
        let result = match kind {
            FORGET | BATCH_FORGET | INTERRUPT => return,
            _ if state.failing.remove(&kind) => Err(EIO),
            INIT => {
                let version = u32_bytes(&[7, 31, read_u32(body, 8), POSIX_LOCKS]);
                // max_background and congestion_threshold of fuse_init_out.
                let limits = [64_u16, 48].into_iter().flat_map(u16::to_ne_bytes).collect();
                Ok([version, limits, u32_bytes(&[MAX_WRITE, 1, 0]), vec![0; 28]].concat())
            }
            LOOKUP if body == b"h\0" => Ok([u64_bytes(&[2, 0, 0, 0, 0]), attributes(2, size)].concat()),
            LOOKUP => Err(ENOENT),
            GETATTR | SETATTR => Ok([u64_bytes(&[0, 0]), attributes(node, size)].concat()),
            OPEN | OPENDIR => Ok([u64_bytes(&[1]), u32_bytes(&[0, 0])].concat()),
            READ => {
                let from = (read_u64(body, 8) as usize).min(state.data.len());
                let to = (from + read_u32(body, 16) as usize).min(state.data.len());
                Ok(state.data[from..to].to_vec())
            }
            WRITE => {
                let (from, length) = (read_u64(body, 8) as usize, read_u32(body, 16) as usize);
                state.data.resize(size.max((from + length) as u64) as usize, 0);
                state.data[from..from + length].copy_from_slice(&body[HEADER_BYTES..HEADER_BYTES + length]);
                Ok(u32_bytes(&[read_u32(body, 16), 0]))
            }
            STATFS => {
                Ok([u64_bytes(&[9999, 9999, 9999, 9, 9]), u32_bytes(&[4096, 255, 4096, 0]), vec![0; 24]]
                    .concat())
            }
            // F_UNLCK: no conflicting lock.
            GETLK => Ok([u64_bytes(&[0, 0]), u32_bytes(&[2, 0])].concat()),
            // SEEK_DATA returns the offset, SEEK_HOLE the size: the file has no holes.
            LSEEK => Ok(u64_bytes(&[if read_u32(body, 16) == 3 { read_u64(body, 8) } else { size }])),
            RELEASE | FSYNC | FLUSH | RELEASEDIR | SETLK | FALLOCATE => done,
            _ => Err(ENOSYS),
        };
        let (error, body) = result.map_or_else(|error| (-error, Vec::new()), |body| (0, body));
        let length = (16 + body.len()) as u32;
        let reply = [u32_bytes(&[length, error.cast_unsigned()]), u64_bytes(&[unique]), body].concat();
        // Fails if the request was aborted.
        let _ = (&self.device).write(&reply);
    }
}

/// A `fuse_attr` of the directory or of the file.
fn attributes(node: u64, size: u64) -> Vec<u8> {
    let (mode, size) = if node == 1 { (0o40_755, 0) } else { (0o100_666, size) };
    [u64_bytes(&[node, size, size / 512, 0, 0, 0]), u32_bytes(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])].concat()
}
