//! systemd's watchdog: it hears of the daemon only while every thread that does I/O takes its
//! turns.
//!
//! Twice in the time that the service manager allows (`WATCHDOG_USEC`, sd_watchdog_enabled(3)),
//! every worker is given a task, and so is the main thread by the timer itself. Once all of them
//! have run, `WATCHDOG=1` is said. A thread that hangs keeps it from being said, and the service
//! manager starts the daemon anew.
//!
//! Never says anything for a thread that has not run, and wakes nobody where no watchdog is set.

use std::rc::Rc;

use policy::time::Duration;
use reactor::{JoinHandle, Worker};
use sd_notify::NotifyState;

/// Starts it, for a service manager that allows so long. Ends when dropped.
pub(super) fn start(allowed: Duration, workers: &Rc<Vec<Worker>>) -> JoinHandle<()> {
    let half = allowed / 2;
    let workers = Rc::clone(workers);
    reactor::spawn_joinable(async move {
        loop {
            reactor::sleep_until(reactor::now() + half).await;
            if !all_turn(&workers).await {
                return;
            }
            control::notify::tell(&[NotifyState::Watchdog]);
        }
    })
}

/// Waits until each of them has run a task; false if one has ended.
async fn all_turn(workers: &[Worker]) -> bool {
    let (turned, heard) = async_channel::bounded(workers.len().max(1));
    for worker in workers {
        let turned = turned.clone();
        // It has room for all, and waits for them below.
        worker.spawn(move || async move {
            let _ = turned.try_send(());
        });
    }
    drop(turned);
    for _ in workers {
        if heard.recv().await.is_err() {
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

    use reactor::Polling;

    use super::*;

    fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
        reactor::run(Polling::Off, future).expect("io_uring works on a test machine")
    }

    #[test]
    fn it_waits_for_a_thread_that_does_not_turn() {
        real(async {
            let start = |name| Worker::start(name, Polling::Off).expect("a thread");
            let workers = Rc::new(vec![start("turns"), start("hangs")]);
            assert!(all_turn(&workers).await);

            // Until the second time that this thread comes there too, the worker is held up.
            let gate = Arc::new(Barrier::new(2));
            let held = Arc::clone(&gate);
            workers[1].spawn(move || async move {
                held.wait();
                held.wait();
            });
            gate.wait();
            let said = Rc::new(Cell::new(false));
            let (seen, asked) = (Rc::clone(&said), Rc::clone(&workers));
            let round = reactor::spawn_joinable(async move {
                assert!(all_turn(&asked).await);
                seen.set(true);
            });
            // The other worker has had its turn, and what it said has come.
            let (turned, heard) = async_channel::bounded(1);
            workers[0].spawn(move || async move { turned.send(()).await.expect("it is waited for") });
            heard.recv().await.expect("the worker turns");
            reactor::yield_now().await;
            assert!(!said.get(), "one thread of two has not turned");
            gate.wait();
            round.await;
            assert!(said.get());
        });
    }
}
