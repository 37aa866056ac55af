//! The timer of a tree: a task that sleeps until a request can be admitted, and admits it.
//!
//! It sleeps on the thread that first saw a request wait. An earlier deadline arms another timer;
//! the later one then finds nothing to do and ends. So only one has an effect, and none moves
//! between threads.

use super::tree::TreeTimer;

/// Arms the timer, if there is one.
pub(super) fn arm(alarm: Option<TreeTimer>) {
    if let Some(alarm) = alarm {
        reactor::spawn(run_timer(alarm));
    }
}

async fn run_timer(mut alarm: TreeTimer) {
    loop {
        reactor::sleep_until(alarm.at).await;
        match alarm.arbiter.fire(alarm.at, reactor::now()) {
            Some(next) => alarm = next,
            None => return,
        }
    }
}
