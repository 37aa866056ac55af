//! The timer of a tree: a task that sleeps until a request can be admitted, and admits it.
//!
//! It sleeps on the thread that first saw a request wait. An earlier deadline arms another timer;
//! the later one then finds nothing to do and ends. So only one has an effect, and none moves
//! between threads.

use super::tree::TreeTimer;

/// Arms the timer, if there is one.
pub(super) fn arm(timer: Option<TreeTimer>) {
    if let Some(timer) = timer {
        reactor::spawn(run_timer(timer));
    }
}

async fn run_timer(mut timer: TreeTimer) {
    loop {
        reactor::sleep_until(timer.at).await;
        match timer.shared_tree.fire(timer.at, reactor::now()) {
            Some(next) => timer = next,
            None => return,
        }
    }
}
