//! A request that the library carries out: it owns its memory until the library's callback has
//! come.
//!
//! ```text
//!   a task ──► start ──► rbd_aio_… ──► threads of the library
//!     ▲                                      │ callback: the result, and the task's waker
//!     └── the reactor's queue and eventfd ◄──┘
//! ```
//!
//! The callback leaves the result and wakes, and does nothing else. To wake a task from another
//! thread puts it in its reactor's queue, and rings the reactor's one eventfd only where that
//! sleeps: all images share it, and many completions cost one wake-up.
//!
//! Where the future is dropped first, a task of its own keeps the memory and the place until the
//! callback has come.

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
    image::Image,
    library::{Handle, Library},
};
use reactor::{
    buffer::{Segment, Segments},
    error::Result,
};

use crate::rbd::in_flight::Place;

/// What the task and the callback have together.
#[derive(Debug)]
struct Shared {
    library: &'static Library,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    result: Option<i64>,
    waker: Option<Waker>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of it is complete before anything could panic.
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

/// The library's callback, on a thread of its own.
unsafe extern "C" fn completed(completion: Handle, argument: *mut c_void) {
    // SAFETY: `start` passed a counted reference for this one call.
    let shared = unsafe { Arc::from_raw(argument.cast::<Shared>().cast_const()) };
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

/// What the library works on. All of it stays where it is when this is moved.
#[derive(Debug)]
struct Memory {
    segments: Segments,
    vectors: Box<SmallVec<[libc::iovec; 4]>>,
    /// Not closed before.
    image: Arc<Image>,
    _place: Place,
}

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Read { offset: u64 },
    Write { offset: u64 },
    Flush,
    Discard { offset: u64, length: u64 },
    WriteZeroes { offset: u64, length: u64, is_thick: bool },
}

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK: c_int = 1;

/// A request under way; yields its result and its memory.
#[derive(Debug)]
pub(super) struct Operation {
    shared: Arc<Shared>,
    /// `None` once handed back.
    memory: Option<Memory>,
}

impl Operation {
    /// Has the library begin. The segments are none of a guest's: what a library does with memory
    /// that changes under it is not known.
    pub(super) fn start(image: &Arc<Image>, what: What, place: Place, mut segments: Segments) -> Self {
        let vector = |segment: &mut Segment| {
            assert!(matches!(segment, Segment::Own(_)), "a guest's memory is copied first");
            let base = match what {
                What::Read { .. } => segment.target(),
                _ => segment.source().cast_mut(),
            };
            libc::iovec { iov_base: base.cast(), iov_len: segment.len() }
        };
        let vectors = Box::new(segments.as_mut_slice().iter_mut().map(vector).collect());
        let library = image.library();
        let shared = Arc::new(Shared { library, state: Mutex::default() });
        let memory = Memory { segments, vectors, image: Arc::clone(image), _place: place };
        let operation = Self { shared, memory: Some(memory) };
        operation.submit(image, what);
        operation
    }

    fn submit(&self, image: &Image, what: What) {
        let library = self.shared.library;
        let argument = Arc::into_raw(Arc::clone(&self.shared)).cast_mut().cast::<c_void>();
        let mut completion = std::ptr::null_mut();
        // SAFETY: it writes one handle; the callback takes up the reference that `argument` is.
        let created =
            unsafe { (library.rbd_aio_create_completion)(argument, completed, &raw mut completion) };
        let vectors = self.memory.as_ref().map_or(&[][..], |memory| memory.vectors.as_slice());
        let (first, count) = (vectors.as_ptr(), vectors.len() as c_int);
        let image = image.handle();
        let started = if created < 0 {
            created
        } else {
            // SAFETY: the image is open as long as `memory` holds it. Vectors, and what they point
            // to, are `memory`'s, which stays until the callback has come (see `drop`), and nobody
            // else writes there.
            unsafe {
                match what {
                    What::Read { offset } => (library.rbd_aio_readv)(image, first, count, offset, completion),
                    What::Write { offset } => {
                        (library.rbd_aio_writev)(image, first, count, offset, completion)
                    }
                    What::Flush => (library.rbd_aio_flush)(image, completion),
                    What::Discard { offset, length } => {
                        (library.rbd_aio_discard)(image, offset, length, completion)
                    }
                    What::WriteZeroes { offset, length, is_thick } => {
                        let flags = if is_thick { THICK } else { 0 };
                        (library.rbd_aio_write_zeroes)(image, offset, length as usize, completion, flags, 0)
                    }
                }
            }
        };
        if started < 0 {
            // Refused: no callback comes.
            if created >= 0 {
                // SAFETY: the library has nothing to do with it any more.
                unsafe { (library.rbd_aio_release)(completion) }
            }
            // SAFETY: the reference from above, which no callback takes up.
            drop(unsafe { Arc::from_raw(argument.cast::<Shared>().cast_const()) });
            self.shared.state().result = Some(started.into());
        }
    }
}

impl Future for Operation {
    type Output = (Result<u64>, Segments);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(result) = self.shared.poll(context) else { return Poll::Pending };
        let memory = self.memory.take().expect("polled after completion");
        let result = outcome(result);
        if let Err(error) = &result {
            memory.image.note(*error);
        }
        Poll::Ready((result, memory.segments))
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if self.shared.state().result.is_some() {
            return;
        }
        if !reactor::runs_here() {
            // Nobody is left to wait for it: the library keeps it for good.
            std::mem::forget(memory);
            return;
        }
        let shared = Arc::clone(&self.shared);
        let kept = std::mem::ManuallyDrop::new(memory);
        // Dropped unended, it leaves the memory to the library.
        reactor::spawn(async move {
            poll_fn(|context| shared.poll(context)).await;
            drop(std::mem::ManuallyDrop::into_inner(kept));
        });
    }
}
