//! What a daemon says on standard error, so that a test can wait for a line.

use std::{
    io::{BufRead as _, BufReader, Read},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

#[derive(Default)]
struct Lines {
    text: Vec<String>,
    ended: bool,
}

#[derive(Clone, Default)]
pub(super) struct Log(Arc<(Mutex<Lines>, Condvar)>);

impl Log {
    pub(super) fn gather(source: impl Read + Send + 'static) -> Self {
        let log = Self::default();
        let ours = log.clone();
        thread::spawn(move || {
            for line in BufReader::new(source).split(b'\n') {
                let Ok(line) = line else { break };
                ours.change(|lines| lines.text.push(String::from_utf8_lossy(&line).into_owned()));
            }
            ours.change(|lines| lines.ended = true);
        });
        log
    }

    fn change(&self, change: impl FnOnce(&mut Lines)) {
        let (lines, changed) = &*self.0;
        change(&mut lines.lock().expect("no reader panics while it holds the lines"));
        changed.notify_all();
    }

    /// The first such line, as soon as it is there; `None` if the log ends or time is up before.
    pub(super) fn wait_for(&self, within: Duration, wanted: impl Fn(&str) -> bool) -> Option<String> {
        let (lines, changed) = &*self.0;
        let until = Instant::now() + within;
        let mut lines = lines.lock().expect("no writer panics while it holds the lines");
        let mut seen = 0;
        loop {
            if let Some(line) = lines.text[seen..].iter().find(|line| wanted(line)) {
                return Some(line.clone());
            }
            seen = lines.text.len();
            let left = until.saturating_duration_since(Instant::now());
            if lines.ended || left.is_zero() {
                return None;
            }
            lines = changed.wait_timeout(lines, left).expect("no writer panics while it holds the lines").0;
        }
    }

    pub(super) fn wait_for_end(&self, within: Duration) -> bool {
        let (lines, changed) = &*self.0;
        let lines = lines.lock().expect("no writer panics while it holds the lines");
        let waited = changed.wait_timeout_while(lines, within, |lines| !lines.ended);
        waited.expect("no writer panics while it holds the lines").0.ended
    }

    pub(super) fn text(&self) -> String {
        self.0.0.lock().expect("no writer panics while it holds the lines").text.join("\n")
    }
}
