//! systemd's watchdog: it is notified only while every thread that does I/O makes progress.
//!
//! Twice in the interval of the service manager (`WATCHDOG_USEC`, sd_watchdog_enabled(3)) every
//! worker gets a task; the timer itself runs on the main thread. Once all tasks have run,
//! `WATCHDOG=1` is sent. A thread that hangs prevents that, and the service manager restarts the
//! daemon.
//!
//! Never reports progress of a thread that has not run, and wakes no thread if no watchdog is set.

use std::rc::Rc;

use policy::time::Duration;
use reactor::{JoinHandle, ReactorWorker};
use sd_notify::NotifyState;

/// Starts the watchdog for an interval of the service manager; ends when the handle is dropped.
pub(super) fn start(allowed: Duration, workers: &Rc<Vec<ReactorWorker>>) -> JoinHandle<()> {
    let half = allowed / 2;
    let workers = Rc::clone(workers);
    reactor::spawn_joinable(async move {
        loop {
            reactor::sleep_until(reactor::now() + half).await;
            if !all_make_progress(&workers).await {
                // A worker has ended: the daemon is ending, or has failed.
                return;
            }
            control::notify::send(&[NotifyState::Watchdog]);
        }
    })
}

/// Waits until each worker has run a task; false if one has ended.
async fn all_make_progress(workers: &[ReactorWorker]) -> bool {
    let (sender, receiver) = async_channel::bounded(workers.len().max(1));
    for worker in workers {
        let sender = sender.clone();
        // Cannot fail: the channel has room for all workers.
        worker.spawn(move || async move {
            let _ = sender.try_send(());
        });
    }
    drop(sender);
    for _ in workers {
        if receiver.recv().await.is_err() {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        sync::{Arc, Barrier},
    };

    use reactor::PollingMode;

    use super::*;

    fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
        reactor::run(PollingMode::Off, future).expect("io_uring works on a test machine")
    }

    #[test]
    fn check_waits_for_a_blocked_worker() {
        real(async {
            let start = |name| ReactorWorker::start(name, PollingMode::Off).expect("a thread");
            let workers = Rc::new(vec![start("turns"), start("hangs")]);
            assert!(all_make_progress(&workers).await);

            // The worker is blocked until this thread reaches the barrier a second time.
            let gate = Arc::new(Barrier::new(2));
            let held = Arc::clone(&gate);
            workers[1].spawn(move || async move {
                held.wait();
                held.wait();
            });
            gate.wait();
            let reported = Rc::new(Cell::new(false));
            let (flag, watched) = (Rc::clone(&reported), Rc::clone(&workers));
            let round = reactor::spawn_joinable(async move {
                assert!(all_make_progress(&watched).await);
                flag.set(true);
            });
            // The first worker has run its task, and its message has arrived.
            let (sender, receiver) = async_channel::bounded(1);
            workers[0].spawn(move || async move { sender.send(()).await.expect("it is waited for") });
            receiver.recv().await.expect("the worker turns");
            reactor::yield_now().await;
            assert!(!reported.get(), "one thread of two has not turned");
            gate.wait();
            round.await;
            assert!(reported.get());
        });
    }
}
