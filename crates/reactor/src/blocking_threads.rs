//! Threads for blocking system calls.
//!
//! An idle thread is reused for [`IDLE`], except while a process starts that will drop privileges:
//! a thread keeps the privileges it has, so no thread may outlive the start. Until
//! [`join_transient_threads`], each call has a thread that exits after it.
//!
//! The number of threads is unbounded: a call to a file system that has stopped answering never
//! returns, and with a bound the calls to one file system would occupy all threads. Callers bound
//! their calls instead: an open file allows a few concurrent ones, a control connection executes
//! its commands one by one.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

/// Time after which an idle thread exits.
const IDLE: Duration = Duration::from_secs(5);

/// Threads that may still run and must end; `None` if threads may stay.
static TRANSIENT_THREADS: Mutex<Option<Vec<JoinHandle<()>>>> = Mutex::new(None);

static THREAD_POOL: ThreadPool =
    ThreadPool { work: Mutex::new(PendingCalls::new()), arrived: Condvar::new() };

type Call = Box<dyn FnOnce() + Send>;

struct ThreadPool {
    work: Mutex<PendingCalls>,
    arrived: Condvar,
}

struct PendingCalls {
    calls: VecDeque<Call>,
    /// Threads that wait for a call.
    idle: usize,
    threads: usize,
}

impl PendingCalls {
    const fn new() -> Self {
        Self { calls: VecDeque::new(), idle: 0, threads: 0 }
    }
}

impl ThreadPool {
    fn lock(&self) -> MutexGuard<'_, PendingCalls> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a call. If there is no thread and none can be created, the call is executed in place,
    /// which delays this thread instead of ending the process.
    fn start(&'static self, call: Call) {
        let mut work = self.lock();
        work.calls.push_back(call);
        if work.calls.len() > work.idle {
            let thread = thread::Builder::new().name("blocking".to_owned());
            match thread.spawn(|| self.work()) {
                Ok(_) => work.threads += 1,
                // The next thread that finishes its call executes this one.
                Err(error) if work.threads > 0 => {
                    tracing::warn!(
                        %error,
                        "no further thread for blocking system calls started: the call waits for \
                         another"
                    );
                }
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "no thread for blocking system calls started: the call blocks this worker"
                    );
                    let call = work.calls.pop_back();
                    drop(work);
                    return call.into_iter().for_each(execute);
                }
            }
        }
        drop(work);
        self.arrived.notify_one();
    }

    fn work(&self) {
        let mut work = self.lock();
        loop {
            while let Some(call) = work.calls.pop_front() {
                drop(work);
                execute(call);
                work = self.lock();
            }
            work.idle += 1;
            let waited = self.arrived.wait_timeout_while(work, IDLE, |work| work.calls.is_empty());
            work = waited.unwrap_or_else(PoisonError::into_inner).0;
            work.idle -= 1;
            if work.calls.is_empty() {
                work.threads -= 1;
                return;
            }
        }
    }
}

/// Executes a call. A panic is reported by the caller that awaits its result.
fn execute(call: Call) {
    let _ = catch_unwind(AssertUnwindSafe(call));
}

/// From now on, each thread exits after the call that it was started for.
pub fn use_transient_threads() {
    TRANSIENT_THREADS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
}

/// Blocks until all running threads have exited; from now on threads are reused.
pub fn join_transient_threads() {
    let transient = TRANSIENT_THREADS.lock().unwrap_or_else(PoisonError::into_inner).take();
    for thread in transient.into_iter().flatten() {
        // A panic is reported by the caller that awaits the result.
        let _ = thread.join();
    }
}

/// True between [`use_transient_threads`] and [`join_transient_threads`].
pub(super) fn uses_transient_threads() -> bool {
    TRANSIENT_THREADS.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// Starts `call` on a thread of the pool without waiting for it.
///
/// # Panics
/// Panics if no thread can be created before [`join_transient_threads`].
pub(super) fn start(call: impl FnOnce() + Send + 'static) {
    let mut transient = TRANSIENT_THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    match &mut *transient {
        None => {
            drop(transient);
            THREAD_POOL.start(Box::new(call));
        }
        Some(threads) => {
            threads.retain(|thread| !thread.is_finished());
            threads.push(thread::spawn(call));
        }
    }
}

/// Runs `f` on a thread of the pool and waits for its result.
///
/// # Panics
/// Panics if `f` does, or if no thread can be created before [`join_transient_threads`].
pub(super) async fn run<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = async_channel::bounded(1);
    // Sending fails if the caller no longer waits.
    start(move || drop(sender.try_send(f())));
    receiver.recv().await.expect("the call does not panic")
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc};

    use super::*;
    use crate::PollingMode;

    /// Number of this process's reusable threads.
    fn reusable_threads() -> usize {
        let threads = fs::read_dir("/proc/self/task").expect("it is there").flatten();
        let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        threads.map(name).filter(|name| name.starts_with("blocking")).count()
    }

    /// Serializes the test that counts reusable threads and the one that starts some.
    static REUSABLE_THREADS_TEST: Mutex<()> = Mutex::new(());

    /// The only test that lets threads stay; concurrent tests may use them at any time.
    #[test]
    fn no_thread_outlives_the_start() {
        let _alone = REUSABLE_THREADS_TEST.lock().unwrap_or_else(PoisonError::into_inner);
        crate::run(PollingMode::Off, async {
            use_transient_threads();
            let before = reusable_threads();
            let id = crate::run_blocking(|| thread::current().id()).await;
            assert_ne!(id, thread::current().id());
            // Reusable threads have names.
            let name = crate::run_computation(|| thread::current().name().map(str::to_owned)).await;
            assert_eq!(name, None);
            assert!(reusable_threads() <= before);
            join_transient_threads();
            assert_eq!(crate::run_blocking(|| 7).await, 7);
        })
        .expect("io_uring works on a test machine");
    }

    #[test]
    fn calls_that_never_return_delay_no_other_call() {
        const STUCK: usize = 600;
        let _alone = REUSABLE_THREADS_TEST.lock().unwrap_or_else(PoisonError::into_inner);
        let (release, released) = mpsc::channel::<()>();
        let released = std::sync::Arc::new(Mutex::new(released));
        for _ in 0..STUCK {
            let released = std::sync::Arc::clone(&released);
            THREAD_POOL.start(Box::new(move || {
                let released = released.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = released.recv();
            }));
        }
        let (sender, receiver) = mpsc::channel();
        THREAD_POOL.start(Box::new(move || {
            let _ = sender.send(7);
        }));
        assert_eq!(receiver.recv(), Ok(7));
        drop(release);
    }
}
