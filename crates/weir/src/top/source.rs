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

use crate::client::{
    ClientError, ControlAddress, ControlClient, change::SettingsChange, report::DaemonReport,
};

#[derive(Debug)]
pub(super) enum WeirTopEvent {
    Input(TerminalEvent),
    Report(Box<DaemonReport>),
    /// The query failed, with the error; it is retried.
    QueryFailed(String),
    /// Result of the last [`SettingsUpdate`].
    Changed(Result<(), String>),
}

#[derive(Debug)]
pub(super) struct SettingsUpdate {
    pub(super) name: String,
    pub(super) change: SettingsChange,
}

pub(super) struct TopEventSource {
    events: Receiver<WeirTopEvent>,
    requests: Sender<SettingsUpdate>,
}

impl TopEventSource {
    /// Starts the threads, which end with the process.
    pub(super) fn start(client: ControlClient, interval: Duration) -> io::Result<Self> {
        let (events, receiver) = mpsc::channel();
        let (sender, requests) = mpsc::channel();
        // Before any other thread: it blocks signals, and threads inherit the mask.
        let inputs = events.clone();
        input::listen(move |input| inputs.send(WeirTopEvent::Input(input)).is_ok())?;
        let run = move || poll_daemon(client, &requests, &events, interval);
        thread::Builder::new().name("daemon".to_owned()).spawn(run)?;
        Ok(Self { events: receiver, requests: sender })
    }

    pub(super) fn next(&self) -> WeirTopEvent {
        self.events.recv().unwrap_or(WeirTopEvent::Input(TerminalEvent::End))
    }

    pub(super) fn request_change(&self, update: SettingsUpdate) {
        // The thread ends only after this struct is dropped, so the send succeeds.
        let _ = self.requests.send(update);
    }
}

fn poll_daemon(
    client: ControlClient,
    requests: &Receiver<SettingsUpdate>,
    events: &Sender<WeirTopEvent>,
    interval: Duration,
) {
    let mut daemon = DaemonConnection { target: client.target().clone(), client: Some(client) };
    loop {
        let event = match daemon.execute(ControlClient::status_with_latencies) {
            Ok(report) => WeirTopEvent::Report(Box::new(report)),
            Err(error) => WeirTopEvent::QueryFailed(error.to_string()),
        };
        if events.send(event).is_err() {
            return;
        }
        // A change is followed by a query at once, so that the list shows its effect.
        match requests.recv_timeout(interval) {
            Ok(SettingsUpdate { name, change }) => {
                let result = daemon.execute(|client| client.set(&name, change.arguments()));
                if events.send(WeirTopEvent::Changed(result.map_err(|error| error.to_string()))).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Connection to a daemon that may restart.
struct DaemonConnection {
    target: ControlAddress,
    client: Option<ControlClient>,
}

impl DaemonConnection {
    fn execute<T>(
        &mut self,
        command: impl FnOnce(&mut ControlClient) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(ControlClient::connect(&self.target)?),
        };
        let result = command(client);
        // A refused command leaves the connection usable; any other error requires a new one.
        if matches!(result, Err(ClientError::Unreachable(_) | ClientError::Timeout(_))) {
            self.client = None;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::client::fake::{FakeDaemon, GREETING};

    #[test]
    fn daemon_is_polled_and_its_loss_reported() {
        let status = |uptime: u64| json!({ "return": { "uptime-ns": uptime } }).to_string();
        let [latencies, done] = [r#"{"return": []}"#, r#"{"return": {}}"#].map(str::to_owned);
        let responses = vec![status(1), latencies.clone(), done, status(2), latencies];
        let fake = FakeDaemon::start(GREETING, responses);
        let (events, receiver) = mpsc::channel();
        let (sender, requests) = mpsc::channel();
        let change = SettingsChange::default();
        sender.send(SettingsUpdate { name: "vm1".to_owned(), change }).unwrap();
        let client = ControlClient::connect(fake.target()).unwrap();
        let thread = thread::spawn(move || poll_daemon(client, &requests, &events, Duration::from_millis(1)));
        let uptime = |event| match event {
            WeirTopEvent::Report(report) => report.uptime_ns,
            other => panic!("{other:?}"),
        };
        assert_eq!(uptime(receiver.recv().unwrap()), 1);
        assert!(matches!(receiver.recv().unwrap(), WeirTopEvent::Changed(Ok(()))));
        assert_eq!(uptime(receiver.recv().unwrap()), 2);
        let WeirTopEvent::QueryFailed(message) = receiver.recv().unwrap() else {
            panic!("the script has ended")
        };
        assert!(message.contains("closed the connection"), "{message}");
        let commands: Vec<_> = fake.commands().iter().map(|command| command["execute"].clone()).collect();
        let measured = ["x-weir-query-status", "x-weir-query-latencies"];
        assert_eq!(commands[1..], [&measured[..], &["x-weir-set"], &measured].concat());
        drop(sender);
        drop(receiver);
        thread.join().unwrap();
    }
}
