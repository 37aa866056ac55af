//! The timer of a tree: a task that sleeps until something may pass, and lets it pass.
//!
//! It sleeps on the thread that first saw somebody wait. An earlier deadline arms another timer;
//! the later one then finds nothing to do and ends. So only one matters, and nobody has to move it
//! between threads.

use super::arbiter::Alarm;

/// Has the alarm go off in time, if there is one.
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
