//! The timer of a tree: a task that sleeps until a request can be admitted, and admits it.
//!
//! It sleeps on the thread that first saw a request wait. An earlier deadline arms another timer;
//! the later one then finds nothing to do and ends. So only one has an effect, and none moves
//! between threads.

use super::arbiter::Alarm;

/// Arms the timer, if there is one.
pub(super) fn arm(alarm: Option<Alarm>) {
    if let Some(alarm) = alarm {
        reactor::spawn(go_off(alarm));
    }
}

async fn go_off(mut alarm: Alarm) {
    loop {
        reactor::sleep_until(alarm.at).await;
        match alarm.arbiter.fire(alarm.at, reactor::now()) {
            Some(next) => alarm = next,
            None => return,
        }
    }
}
