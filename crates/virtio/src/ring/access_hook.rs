//! For tests and fuzzing: a hook before each load and store of a ring's word. It simulates a crash,
//! or a guest that changes its memory while the device reads it.

use std::cell::{Cell, RefCell};

/// Kind of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingAccess {
    /// Load of a word.
    Load,
    /// Store of a word.
    Store,
}

type Hook = Box<dyn FnMut(RingAccess)>;

thread_local! {
    static ACTIVE: Cell<bool> = const { Cell::new(false) };
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// Calls the hook of this thread, if there is one.
#[inline]
pub(super) fn call_hook(access: RingAccess) {
    if ACTIVE.get() {
        // Taken out during the call, as the hook may unwind.
        let hook = HOOK.take();
        if let Some(mut hook) = hook {
            hook(access);
            HOOK.set(Some(hook));
        }
    }
}

/// Runs `device`, with `hook` called before each access of this thread to a ring.
pub fn with_hook<T>(hook: impl FnMut(RingAccess) + 'static, device: impl FnOnce() -> T) -> T {
    // Removes the hook also if `device` unwinds.
    struct HookGuard;
    impl Drop for HookGuard {
        fn drop(&mut self) {
            ACTIVE.set(false);
            HOOK.set(None);
        }
    }
    HOOK.set(Some(Box::new(hook)));
    ACTIVE.set(true);
    let _end = HookGuard;
    device()
}
