//! Logs events, one line each, at target `weir::events`, with a rate limit for each event type.

use std::{cell::RefCell, rc::Rc};

use reactor::JoinHandle;

use super::{
    EventLog, RecordedEvent,
    event_type::{EventSeverity, Kind},
    rate_limit::SharedEventRateLimit,
};

/// Burst for each event type, in which each disk has a share. Consumers that need all events read
/// the event stream instead of the log.
const BURST: u64 = 10;
const PER_SECOND: u64 = 1;

/// Logs each later event. Ends when the handle is dropped.
pub fn log_events(events: &EventLog) -> JoinHandle<()> {
    let rate_limits =
        Rc::new(RefCell::new(vec![SharedEventRateLimit::new(BURST, PER_SECOND); Kind::ALL.len()]));
    events.for_each_later(move |event| {
        if let Some(dropped) =
            rate_limits.borrow_mut()[event.kind as usize].admit(event.disk.as_ref(), reactor::now())
        {
            log_event(event, dropped);
        }
    })
}

fn log_event(event: &RecordedEvent, dropped: u64) {
    // A macro: `tracing` needs the level as a constant of the call site.
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(
                target: "weir::events",
                kind = event.kind.name(),
                id = event.id,
                disk = event.disk.as_deref(),
                group = event.group.as_deref(),
                suppressed = (dropped > 0).then_some(dropped),
                "{}",
                event.message
            )
        };
    }
    match event.kind.severity() {
        EventSeverity::Info => line!(info),
        EventSeverity::Warning => line!(warn),
        EventSeverity::Error => line!(error),
    }
}
