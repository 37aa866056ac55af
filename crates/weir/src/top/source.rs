//! All events in one channel, from three threads: keys and signals (`input`), and the daemon's
//! reports.
//!
//! The daemon has its own thread, so that keys work while it is slow or gone. It is queried at each
//! interval, and at once after a change.

use std::{
    io,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use console::input::{self, TerminalEvent};

use crate::client::{Client, Error, Target, change::Change, report::Report};

#[derive(Debug)]
pub(super) enum Event {
    Input(TerminalEvent),
    Report(Box<Report>),
    /// The query failed, with the error; it is retried.
    Unreachable(String),
    /// Result of the last [`Asked`].
    Changed(Result<(), String>),
}

#[derive(Debug)]
pub(super) struct Asked {
    pub(super) name: String,
    pub(super) change: Change,
}

pub(super) struct Source {
    events: Receiver<Event>,
    asked: Sender<Asked>,
}

impl Source {
    /// Starts the threads, which end with the process.
    pub(super) fn start(client: Client, interval: Duration) -> io::Result<Self> {
        let (events, receiver) = mpsc::channel();
        let (asked, requests) = mpsc::channel();
        // Before any other thread: it blocks signals, and threads inherit the mask.
        let inputs = events.clone();
        input::listen(move |input| inputs.send(Event::Input(input)).is_ok())?;
        let run = move || ask(client, &requests, &events, interval);
        thread::Builder::new().name("daemon".to_owned()).spawn(run)?;
        Ok(Self { events: receiver, asked })
    }

    pub(super) fn next(&self) -> Event {
        self.events.recv().unwrap_or(Event::Input(TerminalEvent::End))
    }

    pub(super) fn ask(&self, asked: Asked) {
        // The receiving thread lives as long as `events` is received.
        let _ = self.asked.send(asked);
    }
}

fn ask(client: Client, requests: &Receiver<Asked>, events: &Sender<Event>, interval: Duration) {
    let mut daemon = Daemon { target: client.target().clone(), client: Some(client) };
    loop {
        let event = match daemon.try_with(Client::measured) {
            Ok(report) => Event::Report(Box::new(report)),
            Err(error) => Event::Unreachable(error.to_string()),
        };
        if events.send(event).is_err() {
            return;
        }
        // A change is followed by a query at once, so that the list shows its effect.
        match requests.recv_timeout(interval) {
            Ok(Asked { name, change }) => {
                let result = daemon.try_with(|client| client.set(&name, change.arguments()));
                if events.send(Event::Changed(result.map_err(|error| error.to_string()))).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Connection to a daemon that may restart.
struct Daemon {
    target: Target,
    client: Option<Client>,
}

impl Daemon {
    fn try_with<T>(&mut self, command: impl FnOnce(&mut Client) -> Result<T, Error>) -> Result<T, Error> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(Client::connect(&self.target)?),
        };
        let result = command(client);
        // A refused command leaves the connection usable; any other error requires a new one.
        if matches!(result, Err(Error::Unreachable(_) | Error::Silent(_))) {
            self.client = None;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::client::fake::{Fake, GREETING};

    #[test]
    fn a_daemon_is_asked_again_and_its_loss_reported() {
        let status = |uptime: u64| json!({ "return": { "uptime-ns": uptime } }).to_string();
        let [latencies, done] = [r#"{"return": []}"#, r#"{"return": {}}"#].map(str::to_owned);
        let answers = vec![status(1), latencies.clone(), done, status(2), latencies];
        let fake = Fake::start(GREETING, answers);
        let (events, receiver) = mpsc::channel();
        let (asked, requests) = mpsc::channel();
        let change = Change::default();
        asked.send(Asked { name: "vm1".to_owned(), change }).unwrap();
        let client = Client::connect(fake.target()).unwrap();
        let thread = thread::spawn(move || ask(client, &requests, &events, Duration::from_millis(1)));
        let uptime = |event| match event {
            Event::Report(report) => report.uptime_ns,
            other => panic!("{other:?}"),
        };
        assert_eq!(uptime(receiver.recv().unwrap()), 1);
        assert!(matches!(receiver.recv().unwrap(), Event::Changed(Ok(()))));
        assert_eq!(uptime(receiver.recv().unwrap()), 2);
        let Event::Unreachable(said) = receiver.recv().unwrap() else { panic!("the script has ended") };
        assert!(said.contains("closed the connection"), "{said}");
        let commands: Vec<_> = fake.asked().iter().map(|command| command["execute"].clone()).collect();
        let measured = ["x-weir-query-status", "x-weir-query-latencies"];
        assert_eq!(commands[1..], [&measured[..], &["x-weir-set"], &measured].concat());
        drop(asked);
        drop(receiver);
        thread.join().unwrap();
    }
}
