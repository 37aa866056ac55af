//! For tests and fuzzing: what happens before a word of a ring is loaded or stored. A crash, or a
//! guest that changes its memory while we look.

use std::cell::{Cell, RefCell};

/// What the device is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It reads a word.
    Load,
    /// It writes a word.
    Store,
}

type Hook = Box<dyn FnMut(Access)>;

thread_local! {
    static ACTIVE: Cell<bool> = const { Cell::new(false) };
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// Calls what meddles on this thread, if something does.
#[inline]
pub(super) fn before(access: Access) {
    if ACTIVE.get() {
        // Taken out meanwhile, as it may unwind.
        let hook = HOOK.take();
        if let Some(mut hook) = hook {
            hook(access);
            HOOK.set(Some(hook));
        }
    }
}

/// Runs `device` while `hook` is called before each access of this thread to a ring.
pub fn meddle<T>(hook: impl FnMut(Access) + 'static, device: impl FnOnce() -> T) -> T {
    /// Ends it also where `device` unwinds.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            ACTIVE.set(false);
            HOOK.set(None);
        }
    }
    HOOK.set(Some(Box::new(hook)));
    ACTIVE.set(true);
    let _end = End;
    device()
}
