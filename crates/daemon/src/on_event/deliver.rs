//! The daemon's side: passes recent events singly to the process that delivers them.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    os::fd::OwnedFd,
    rc::Rc,
    sync::Arc,
};

use control::{
    events::{DeliveryCounters, EventLog, RecordedEvent},
    registry::Registry,
};
use policy::time::{Duration, Instant};
use reactor::{
    JoinHandle,
    operation::{self, Fd},
};

use super::{EventRunner, MAX_LINE_BYTES, TARGET_TIMEOUT, encode_event, shown};

/// Number of events that may wait for delivery; older ones are skipped.
const MAX_WAITING_EVENTS: usize = 64;
/// Interval between two deliveries: ten a second.
const DELIVERY_INTERVAL: Duration = Duration::from_millis(100);
/// Time beyond the target's for the answer of the process.
const GRACE: Duration = Duration::from_secs(5);
/// Interval at which a persistent failure is logged again.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

impl EventRunner {
    /// Delivers all events from now on; ends when the handle is dropped.
    pub(crate) fn deliver(self, registry: &Registry) -> Option<JoinHandle<()>> {
        let fd = self.socket.set_nonblocking(true).and_then(|()| self.socket.try_clone());
        let fd = match fd {
            Ok(fd) => Fd::from(OwnedFd::from(fd)),
            Err(error) => {
                tracing::error!(%error, "on-event: no events are delivered (restart weir)");
                return None;
            }
        };
        let counts = Rc::clone(registry.deliveries.get_or_init(Rc::default));
        let delivery =
            Delivery { runner: self, fd, received: Vec::new(), counts, failing: FailureLog::default() };
        let events = registry.events.clone();
        let last = events.last();
        Some(reactor::spawn_joinable(delivery.run(events, last)))
    }
}

struct Delivery {
    runner: EventRunner,
    fd: Fd,
    /// Received bytes of an incomplete answer.
    received: Vec<u8>,
    counts: Rc<DeliveryCounters>,
    failing: FailureLog,
}

impl Delivery {
    async fn run(mut self, events: EventLog, mut last: u64) {
        loop {
            // Before reading the ring, so that an event in between is not missed.
            let woken = events.listen();
            let mut waiting = events.since(last);
            // Events that the ring has already dropped count as skipped too.
            let first = waiting.first().map_or(last + 1, |event| event.id);
            let too_many = waiting.len().saturating_sub(MAX_WAITING_EVENTS);
            // The newest events are worth more than complete ones: old ones are skipped and
            // counted.
            waiting.drain(..too_many);
            let Some(event) = waiting.first().map(Arc::clone) else {
                woken.await;
                continue;
            };
            let skipped = first - last - 1 + too_many as u64;
            DeliveryCounters::add_saturating(&self.counts.skipped, skipped);
            last = event.id;
            let next = reactor::now() + DELIVERY_INTERVAL;
            match self.send_event(&event, skipped).await {
                Ok(Ok(())) => {
                    DeliveryCounters::add_saturating(&self.counts.delivered, 1);
                    if let Some(lost) = self.failing.ends() {
                        tracing::info!(target = %shown(&self.runner.target), lost, "on-event: events are delivered again");
                    }
                }
                Ok(Err(why)) => {
                    DeliveryCounters::add_saturating(&self.counts.failed, 1);
                    if let Some(lost) = self.failing.line(reactor::now()) {
                        let target = shown(&self.runner.target);
                        tracing::warn!(%target, lost, "on-event: an event was not delivered: {why}");
                    }
                }
                Err(error) => {
                    let target = shown(&self.runner.target);
                    tracing::error!(
                        %target, %error,
                        "on-event: its process has ended; no events are delivered (restart weir)"
                    );
                    return;
                }
            }
            reactor::sleep_until(next).await;
        }
    }

    /// Result of one delivery; fails if the process has ended.
    async fn send_event(&mut self, event: &RecordedEvent, skipped: u64) -> io::Result<Result<(), String>> {
        let line = encode_event(event.to_json(), skipped) + "\n";
        let mut left = line.as_bytes();
        while !left.is_empty() {
            match (&self.runner.socket).write(left) {
                Ok(count) => left = &left[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The socket is full although the previous event was answered: the process is
                // stopped.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    reactor::sleep_until(reactor::now() + DELIVERY_INTERVAL).await;
                }
                Err(error) => return Err(error),
            }
        }
        let mut was_logged = false;
        loop {
            match reactor::timeout(TARGET_TIMEOUT + GRACE, self.answer()).await {
                Ok(answer) => {
                    let answer = answer?;
                    return Ok(if answer.is_empty() { Ok(()) } else { Err(answer) });
                }
                Err(_) if was_logged => {}
                Err(_) => {
                    was_logged = true;
                    tracing::warn!("on-event: its process does not answer (is it stopped?)");
                }
            }
        }
    }

    /// Waits for an answer. Cancel safe: received bytes are kept.
    async fn answer(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if self.received.len() as u64 > MAX_LINE_BYTES {
                return Err(io::Error::other("its answer is too long"));
            }
            let mut buffer = [0; 1024];
            match (&self.runner.socket).read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => operation::readable(&self.fd).await?,
                Err(error) => return Err(error),
            }
        }
    }
}

/// State of a failing target: logged at once, then once a minute.
#[derive(Debug, Default)]
struct FailureLog {
    /// Time of the next log line; `None` while deliveries succeed.
    next_log: Option<Instant>,
    /// Failed events since the last success.
    lost: u64,
}

impl FailureLog {
    /// Counts a failure; returns the count if it is to be logged.
    fn line(&mut self, now: Instant) -> Option<u64> {
        self.lost += 1;
        if self.next_log.is_some_and(|next| now < next) {
            return None;
        }
        self.next_log = Some(now + LOG_INTERVAL);
        Some(self.lost)
    }

    /// Records a success; returns the number of failures before it, if any.
    fn ends(&mut self) -> Option<u64> {
        let Self { next_log: again, lost } = std::mem::take(self);
        again.map(|_| lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn persistent_failure_is_logged_once_a_minute() {
        let mut failing = FailureLog::default();
        let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
        let lines: Vec<_> = (0..3600).filter_map(|second| failing.line(at(second))).collect();
        assert_eq!((lines.len(), lines[0], lines[1]), (60, 1, 61));
        assert_eq!((failing.ends(), failing.ends()), (Some(3600), None));
    }
}
