//! I/O priority: guests' requests, or background work that the device may delay.
//!
//! The kernel accepts a priority with each request (values in `ioprio_set(2)`). Schedulers with
//! priorities, such as bfq, give a larger part of the device to the higher ones; others ignore
//! them. Background work is best-effort like everything else, at the lowest level. It is not in the
//! idle class, because a client's request may have to wait for it, and idle requests may starve.
//!
//! Code can also check if it runs in the background ([`is_in_background`]), so that its errors are
//! not reported as a client's.

use std::{cell::Cell, future::Future, pin::pin};

/// `IOPRIO_PRIO_VALUE(IOPRIO_CLASS_BE, 7)`.
const BEST_EFFORT_LOWEST: u16 = 2 << 13 | 7;
/// The priority of the process.
const UNCHANGED: u16 = 0;

thread_local! {
    static CURRENT: Cell<u16> = const { Cell::new(UNCHANGED) };
}

/// Runs `future` with the lowest priority for its reads. Does not apply to tasks that it spawns.
pub async fn in_background<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        let before = CURRENT.replace(BEST_EFFORT_LOWEST);
        let result = future.as_mut().poll(context);
        CURRENT.set(before);
        result
    })
    .await
}

/// True if the current task runs within [`in_background`].
pub fn is_in_background() -> bool {
    CURRENT.get() == BEST_EFFORT_LOWEST
}

/// Priority of the current task's I/O.
pub(super) fn current() -> u16 {
    CURRENT.get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{sim, yield_now};

    #[test]
    fn only_background_work_has_lower_priority() {
        sim::run(1, async {
            assert_eq!(current(), UNCHANGED);
            in_background(async {
                assert!(is_in_background());
                yield_now().await;
                assert_eq!(current(), BEST_EFFORT_LOWEST);
            })
            .await;
            assert_eq!(current(), UNCHANGED);
        });
    }
}
