//! Threads for system calls that block.
//!
//! They stay for a while and are used again, except while a process starts that is going to give up
//! rights: what a thread may do is its own, so one that was there before would keep them. Until
//! [`threads_may_stay`], each call has a thread that ends with it.

use std::{
    sync::{Mutex, PoisonError},
    thread::{self, JoinHandle},
};

/// Those that may still run; none: threads stay.
static PASSING: Mutex<Option<Vec<JoinHandle<()>>>> = Mutex::new(None);

/// From now on no thread outlives what it was started for.
pub fn threads_must_end() {
    PASSING.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
}

/// Waits until those that run have ended; from now on threads stay.
pub fn threads_may_stay() {
    let passing = PASSING.lock().unwrap_or_else(PoisonError::into_inner).take();
    for thread in passing.into_iter().flatten() {
        // Whoever waits for its result has heard of a panic.
        let _ = thread.join();
    }
}

/// # Panics
/// If `f` does, or no thread can be had.
pub(super) async fn run<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let result = {
        let mut passing = PASSING.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *passing {
            None => Err(f),
            Some(threads) => {
                let (sender, receiver) = async_channel::bounded(1);
                threads.retain(|thread| !thread.is_finished());
                // Nobody waits any more where it cannot be sent.
                threads.push(thread::spawn(move || drop(sender.try_send(f()))));
                Ok(receiver)
            }
        }
    };
    match result {
        Ok(receiver) => receiver.recv().await.expect("what was to be done does not panic"),
        Err(f) => blocking::unblock(f).await,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::reactor::{self, Polling};

    /// This process's threads of that kind.
    fn staying() -> usize {
        let threads = fs::read_dir("/proc/self/task").expect("it is there").flatten();
        let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        threads.map(name).filter(|name| name.starts_with("blocking-")).count()
    }

    /// The only test that makes them stay; others of this process may have them at any time.
    #[test]
    fn no_thread_is_left_until_threads_may_stay() {
        reactor::run(Polling::Off, async {
            threads_must_end();
            let before = staying();
            let id = reactor::blocking(|| thread::current().id()).await;
            assert_ne!(id, thread::current().id());
            assert!(staying() <= before);
            threads_may_stay();
            assert_eq!(reactor::blocking(|| 7).await, 7);
        })
        .expect("io_uring works on a test machine");
    }
}
