//! A request that the library executes. It owns its memory until the library's callback.
//!
//! ```text
//!   a task ──► start ──► rbd_aio_… ──► threads of the library
//!     ▲                                      │ callback: the result, and the task's waker
//!     └── the reactor's queue and eventfd ◄──┘
//! ```
//!
//! The callback stores the result and wakes the task, and does nothing else. Waking a task from
//! another thread puts it in its reactor's queue, and signals the reactor's one eventfd only if the
//! reactor sleeps: all images share the eventfd, and many completions cost one wake-up.
//!
//! If the future is dropped first, a separate task keeps the memory and the slot until the
//! callback.

use std::{
    ffi::{c_int, c_void},
    future::{Future, poll_fn},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use smallvec::SmallVec;

use super::{
    cluster::outcome,
    image::RbdImage,
    library::{Handle, Library},
};
use reactor::{
    buffer::{Segment, Segments},
    error::Result,
};

use crate::rbd::slots::RbdRequestSlot;

/// State shared by the task and the callback.
#[derive(Debug)]
struct RbdCompletion {
    library: &'static Library,
    state: Mutex<RbdCompletionState>,
}

#[derive(Debug, Default)]
struct RbdCompletionState {
    result: Option<i64>,
    waker: Option<Waker>,
}

impl RbdCompletion {
    fn state(&self) -> MutexGuard<'_, RbdCompletionState> {
        // Each change of the state is complete before any code that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<i64> {
        let mut state = self.state();
        match state.result {
            Some(result) => Poll::Ready(result),
            None => {
                match &mut state.waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                Poll::Pending
            }
        }
    }
}

/// Callback of the library, on one of its threads.
unsafe extern "C" fn completed(completion: Handle, argument: *mut c_void) {
    // SAFETY: `submit` passed a counted reference for this one call.
    let shared = unsafe { Arc::from_raw(argument.cast::<RbdCompletion>().cast_const()) };
    // SAFETY: the completion has ended, and this is the last use of it.
    let result = unsafe {
        let result = (shared.library.rbd_aio_get_return_value)(completion);
        (shared.library.rbd_aio_release)(completion);
        result as i64
    };
    let waker = {
        let mut state = shared.state();
        state.result = Some(result);
        state.waker.take()
    };
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Memory that the library accesses. Moving this value does not move the memory.
#[derive(Debug)]
struct OperationMemory {
    segments: Segments,
    vectors: Box<SmallVec<[libc::iovec; 4]>>,
    // Keeps the image open.
    image: Arc<RbdImage>,
    _place: RbdRequestSlot,
}

/// Kind of operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum RbdOperationKind {
    Read { offset: u64 },
    Write { offset: u64 },
    Flush,
    Discard { offset: u64, length: u64 },
    WriteZeroes { offset: u64, length: u64, is_thick: bool },
}

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK: c_int = 1;

/// A request in flight; yields its result and its memory.
#[derive(Debug)]
pub(super) struct RbdOperation {
    shared: Arc<RbdCompletion>,
    /// `None` after completion.
    memory: Option<OperationMemory>,
}

impl RbdOperation {
    /// Submits an operation. The segments must not be guest memory, which may change while the
    /// library uses it.
    pub(super) fn start(
        image: &Arc<RbdImage>,
        kind: RbdOperationKind,
        slot: RbdRequestSlot,
        mut segments: Segments,
    ) -> Self {
        let vector = |segment: &mut Segment| {
            assert!(matches!(segment, Segment::Own(_)), "a guest's memory is copied first");
            let base = match kind {
                RbdOperationKind::Read { .. } => segment.target(),
                _ => segment.source().cast_mut(),
            };
            libc::iovec { iov_base: base.cast(), iov_len: segment.len() }
        };
        let vectors = Box::new(segments.as_mut_slice().iter_mut().map(vector).collect());
        let library = image.library();
        let shared = Arc::new(RbdCompletion { library, state: Mutex::default() });
        let memory = OperationMemory { segments, vectors, image: Arc::clone(image), _place: slot };
        let operation = Self { shared, memory: Some(memory) };
        operation.submit(image, kind);
        operation
    }

    fn submit(&self, image: &RbdImage, kind: RbdOperationKind) {
        let library = self.shared.library;
        let argument = Arc::into_raw(Arc::clone(&self.shared)).cast_mut().cast::<c_void>();
        let mut completion = std::ptr::null_mut();
        // SAFETY: the function writes one handle; the callback consumes the reference in
        // `argument`.
        let created =
            unsafe { (library.rbd_aio_create_completion)(argument, completed, &raw mut completion) };
        let vectors = self.memory.as_ref().map_or(&[][..], |memory| memory.vectors.as_slice());
        let (first, count) = (vectors.as_ptr(), vectors.len() as c_int);
        let image = image.handle();
        let started = if created < 0 {
            created
        } else {
            // SAFETY: the image is open as long as `memory` holds it. The vectors, and the memory
            // they point to, belong to `memory`, which lives until the callback (see `drop`); no
            // other code accesses it meanwhile.
            unsafe {
                match kind {
                    RbdOperationKind::Read { offset } => {
                        (library.rbd_aio_readv)(image, first, count, offset, completion)
                    }
                    RbdOperationKind::Write { offset } => {
                        (library.rbd_aio_writev)(image, first, count, offset, completion)
                    }
                    RbdOperationKind::Flush => (library.rbd_aio_flush)(image, completion),
                    RbdOperationKind::Discard { offset, length } => {
                        (library.rbd_aio_discard)(image, offset, length, completion)
                    }
                    RbdOperationKind::WriteZeroes { offset, length, is_thick } => {
                        let flags = if is_thick { THICK } else { 0 };
                        (library.rbd_aio_write_zeroes)(image, offset, length as usize, completion, flags, 0)
                    }
                }
            }
        };
        if started < 0 {
            // Rejected: there will be no callback.
            if created >= 0 {
                // SAFETY: the library does not use it any more.
                unsafe { (library.rbd_aio_release)(completion) }
            }
            // SAFETY: the reference from above, which no callback consumes.
            drop(unsafe { Arc::from_raw(argument.cast::<RbdCompletion>().cast_const()) });
            self.shared.state().result = Some(started.into());
        }
    }
}

impl Future for RbdOperation {
    type Output = (Result<u64>, Segments);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(result) = self.shared.poll(context) else { return Poll::Pending };
        let memory = self.memory.take().expect("polled after completion");
        let result = outcome(result);
        if let Err(error) = &result {
            memory.image.note_error(*error);
        }
        Poll::Ready((result, memory.segments))
    }
}

impl Drop for RbdOperation {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if self.shared.state().result.is_some() {
            return;
        }
        if !reactor::has_reactor() {
            // No reactor to wait for the callback: the memory is leaked to the library.
            std::mem::forget(memory);
            return;
        }
        let shared = Arc::clone(&self.shared);
        let memory_guard = std::mem::ManuallyDrop::new(memory);
        // `ManuallyDrop`: if the task is dropped before the callback, the memory is leaked.
        reactor::spawn(async move {
            poll_fn(|context| shared.poll(context)).await;
            drop(std::mem::ManuallyDrop::into_inner(memory_guard));
        });
    }
}
