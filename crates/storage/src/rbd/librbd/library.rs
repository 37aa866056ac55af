//! The functions of librbd and librados that weir calls, resolved when the first image is opened.
//!
//! Loaded at run time and not linked: hosts without Ceph need none of its 19 MB, and the licences
//! stay separate (`docs/decisions/0041`). The declarations follow the public headers
//! `rbd/librbd.h` and `rados/librados.h` of Ceph 16, which later versions keep.
//!
//! Never unloaded: its threads run until the process ends.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::OnceLock,
};

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t` or `rbd_completion_t`.
pub(super) type Handle = *mut c_void;
pub(super) type Completed = unsafe extern "C" fn(Handle, *mut c_void);
pub(super) type Updated = unsafe extern "C" fn(*mut c_void);
/// Arguments: offset, length, whether the range exists, the caller's pointer. A result other than
/// zero ends the search.
pub(super) type Found = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;
pub(super) type Progress = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// `rbd_image_watcher_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RbdWatcher {
    pub(super) address: *mut c_char,
    pub(super) id: i64,
    pub(super) cookie: u64,
}

/// Name for the loader, and Debian package.
const FILE: &CStr = c"librbd.so.1";
const PACKAGE: &str = "librbd1";

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, by their names in the headers.
        #[derive(Debug)]
        #[allow(missing_docs, reason = "the headers have it")]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find(library: *mut c_void) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let address = symbol(library, name)?;
                        // SAFETY: it is the function of that name, whose type is the header's
                        // declaration.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address) }
                    },)*
                })
            }
        }
    };
}

functions! {
    rados_create(*mut Handle, *const c_char) -> c_int;
    rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    rados_connect(Handle) -> c_int;
    rados_shutdown(Handle);
    rados_get_instance_id(Handle) -> u64;
    rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
    rados_blocklist_add(Handle, *mut c_char, u32) -> c_int;
    rados_wait_for_latest_osdmap(Handle) -> c_int;
    rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_get_id(Handle) -> i64;
    rados_ioctx_set_namespace(Handle, *const c_char);
    rados_ioctx_destroy(Handle);
    rados_exec(Handle, *const c_char, *const c_char, *const c_char, *const c_char, usize, *mut c_char, usize) -> c_int;
    rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close(Handle) -> c_int;
    rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    rbd_snap_get_id(Handle, *const c_char, *mut u64) -> c_int;
    rbd_get_size(Handle, *mut u64) -> c_int;
    rbd_get_features(Handle, *mut u64) -> c_int;
    rbd_get_flags(Handle, *mut u64) -> c_int;
    rbd_resize2(Handle, u64, bool, Progress, *mut c_void) -> c_int;
    rbd_watchers_list(Handle, *mut RbdWatcher, *mut usize) -> c_int;
    rbd_watchers_list_cleanup(*mut RbdWatcher, usize);
    rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd_lock_release(Handle) -> c_int;
    rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
    rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd_list_lockers(Handle, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize) -> isize;
    rbd_update_watch(Handle, *mut u64, Updated, *mut c_void) -> c_int;
    rbd_update_unwatch(Handle, u64) -> c_int;
    rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, Found, *mut c_void) -> c_int;
    rbd_invalidate_cache(Handle) -> c_int;
    rbd_read(Handle, u64, usize, *mut c_char) -> isize;
    rbd_aio_create_completion(*mut c_void, Completed, *mut Handle) -> c_int;
    rbd_aio_get_return_value(Handle) -> isize;
    rbd_aio_release(Handle);
    rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_flush(Handle, Handle) -> c_int;
    rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
}

static LIBRARY: OnceLock<Library> = OnceLock::new();

/// True if the library is loaded.
pub fn is_loaded() -> bool {
    LIBRARY.get().is_some()
}

/// Loads the library, unless it is loaded. Starts no thread and opens no socket.
///
/// # Errors
/// It cannot be loaded, or is older than Ceph 16: the reason.
pub fn load() -> Result<(), String> {
    library().map(drop)
}

pub(super) fn library() -> Result<&'static Library, String> {
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    // SAFETY: the name ends with a zero byte. Loading only runs the library's initializers, which
    // register its classes; nothing here depends on state that they might change.
    let handle = unsafe { libc::dlopen(FILE.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(last_error());
    }
    let found = Library::find(handle)?;
    Ok(LIBRARY.get_or_init(|| found))
}

/// Advice for an error of [`library`]. The loader reports errors only as text.
pub fn remedy(why: &str) -> String {
    let is_scarce = ["map segment", "allocate"].iter().any(|phrase| why.contains(phrase));
    match is_scarce {
        true => "allow weir more memory: `ulimit -v`, LimitAS= or MemoryMax=".to_owned(),
        false => format!("install the package {PACKAGE}, of Ceph 16 or later"),
    }
}

fn symbol(library: *mut c_void, name: &'static str) -> Result<*mut c_void, String> {
    // SAFETY: the handle is open, and the name ends with a zero byte. Symbols of librados are found
    // too, as a dependency of librbd.
    let address = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    if address.is_null() { Err(last_error()) } else { Ok(address) }
}

/// Last error of the loader.
fn last_error() -> String {
    // SAFETY: it returns null, or a text that is valid until the next call of this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".to_owned();
    }
    // SAFETY: as above; the text ends with a zero byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
