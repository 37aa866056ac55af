//! The log of a daemon on standard error; tests wait for lines of it.

use std::{
    io::{BufRead as _, BufReader, Read},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

const UNPOISONED: &str = "no holder panics";

#[derive(Default)]
struct LogLines {
    text: Vec<String>,
    ended: bool,
}

#[derive(Clone, Default)]
pub(super) struct LogCollector(Arc<(Mutex<LogLines>, Condvar)>);

impl LogCollector {
    pub(super) fn gather(source: impl Read + Send + 'static) -> Self {
        let log = Self::default();
        let collector = log.clone();
        thread::spawn(move || {
            for line in BufReader::new(source).split(b'\n') {
                let Ok(line) = line else { break };
                collector.change(|lines| lines.text.push(String::from_utf8_lossy(&line).into_owned()));
            }
            collector.change(|lines| lines.ended = true);
        });
        log
    }

    fn change(&self, change: impl FnOnce(&mut LogLines)) {
        change(&mut self.lock());
        self.0.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, LogLines> {
        self.0.0.lock().expect(UNPOISONED)
    }

    /// The first matching line, including earlier ones; `None` if the log ends or the time is up.
    pub(super) fn wait_for(&self, within: Duration, matches: impl Fn(&str) -> bool) -> Option<String> {
        let until = Instant::now() + within;
        let mut lines = self.lock();
        let mut seen = 0;
        loop {
            if let Some(line) = lines.text[seen..].iter().find(|line| matches(line)) {
                return Some(line.clone());
            }
            seen = lines.text.len();
            let left = until.saturating_duration_since(Instant::now());
            if lines.ended || left.is_zero() {
                return None;
            }
            lines = self.0.1.wait_timeout(lines, left).expect(UNPOISONED).0;
        }
    }

    pub(super) fn wait_for_end(&self, within: Duration) -> bool {
        let waited = self.0.1.wait_timeout_while(self.lock(), within, |lines| !lines.ended);
        waited.expect(UNPOISONED).0.ended
    }

    pub(super) fn text(&self) -> String {
        self.lock().text.join("\n")
    }
}
