//! Events about NBD clients and virtual machines, as reported by their servers.
//!
//! A virtual machine counts as a client from the start of its first virtqueue, when firmware or a
//! driver starts, until its connection ends. Programs that only test the socket or read the
//! configuration are not clients, and neither is a front end that connects days before its driver
//! starts. A front end that an upgrade transfers is not reported again. Events that one guest or
//! process can cause at any rate (a rejected connection, a broken ring) are reported once per
//! second and disk, with a count of the rest.

use export::{
    nbd::{ClientObserver, NbdClientInfo},
    vhost_user_blk::{ExportObserver, FrontEndEvent, PeerProcess},
};
use policy::time::Duration;
use serde_json::{Value, json};

use super::{EventLog, Kind, NewEvent};

impl ClientObserver for EventLog {
    fn connected(&self, client: &NbdClientInfo) {
        let message = format!("{} uses disk {}", client_text(client), client.disk);
        self.record(nbd_client_event(Kind::SessionStarted, message, client));
    }

    fn disconnected(&self, client: &NbdClientInfo, duration: Duration) {
        let message =
            format!("{} has left disk {} after {} s", client_text(client), client.disk, duration.as_secs());
        self.record(
            nbd_client_event(Kind::SessionEnded, message, client).with("seconds", duration.as_secs()),
        );
    }
}

fn nbd_client_event(kind: Kind, message: String, client: &NbdClientInfo) -> NewEvent {
    let event = NewEvent::new(kind, message).of_disk(&client.disk).with("type", "nbd");
    let event = event.with("export", &*client.export).with("client", client.number);
    event.with("address", client.address.map(|address| address.to_string())).with("name", client.name.clone())
}

/// Text for messages: `client 7 of 192.0.2.1`.
fn client_text(client: &NbdClientInfo) -> String {
    // Verified by TLS, so it identifies a client better than its address.
    let identity = match (&client.name, client.address) {
        (Some(name), _) => format!(" ({name})"),
        (None, Some(address)) => format!(" of {address}"),
        (None, None) => String::new(),
    };
    format!("client {}{identity}", client.number)
}

impl ExportObserver for EventLog {
    fn observe(&self, export: &str, disk: &str, event: &FrontEndEvent<'_>, dropped: u64) {
        let new_event = front_end_event(disk, event).of_disk(disk).with("type", "vhost-user-blk");
        self.record(new_event.with("export", export).with_dropped(dropped));
    }
}

fn front_end_event(disk: &str, event: &FrontEndEvent<'_>) -> NewEvent {
    match *event {
        FrontEndEvent::Connected { process } => {
            let message = format!("{} uses disk {disk}", front_end_text(process));
            NewEvent::new(Kind::SessionStarted, message).with("front-end", front_end_json(process))
        }
        FrontEndEvent::Disconnected { process, duration: lasted } => {
            let seconds = lasted.as_secs();
            let message = format!("{} has left disk {disk} after {seconds} s", front_end_text(process));
            NewEvent::new(Kind::SessionEnded, message)
                .with("front-end", front_end_json(process))
                .with("seconds", seconds)
        }
        FrontEndEvent::ProtocolError { process, why } => {
            let message = format!("{} was disconnected from disk {disk}: {why}", front_end_text(process));
            let new_event =
                NewEvent::new(Kind::ClientDisconnected, message).with("front-end", front_end_json(process));
            new_event.with("reason", why.to_string())
        }
        FrontEndEvent::Rejected { process, connected } => {
            let message = format!(
                "{} was rejected at disk {disk}: {} is connected (stop it, or use a disk for each)",
                front_end_text(process),
                front_end_text(connected)
            );
            let new_event =
                NewEvent::new(Kind::ClientRejected, message).with("front-end", front_end_json(process));
            new_event.with("connected", front_end_json(connected))
        }
        FrontEndEvent::RingBroken { ring, why } => {
            let message = format!(
                "ring {ring} of disk {disk} cannot be served, until its driver is set up again: {why}"
            );
            NewEvent::new(Kind::RingBroken, message).with("ring", ring).with("reason", why.to_string())
        }
        FrontEndEvent::RingRecovered { ring, broken_for: after } => {
            let seconds = after.as_secs();
            let message = format!("ring {ring} of disk {disk} is served again, after {seconds} s");
            NewEvent::new(Kind::RingServed, message).with("ring", ring).with("seconds", seconds)
        }
    }
}

fn front_end_text(process: Option<&PeerProcess>) -> String {
    process.map_or_else(|| "a virtual machine".to_owned(), PeerProcess::to_string)
}

fn front_end_json(process: Option<&PeerProcess>) -> Value {
    process.map_or(Value::Null, |PeerProcess { pid, name }| json!({ "pid": pid, "name": &**name }))
}
