//! Events about NBD clients and virtual machines, as reported by their servers.
//!
//! A virtual machine counts as a client from the start of its first virtqueue, when firmware or a
//! driver starts, until its connection ends. Programs that only test the socket or read the
//! configuration are not clients, and neither is a front end that connects days before its driver
//! starts. A machine that arrives by an upgrade is not reported again. Events that one guest or
//! process can cause at any rate (a rejected connection, a broken ring) are reported once per
//! second and disk, with a count of the rest.

use export::{
    nbd::{NbdClientInfo, ClientObserver},
    vhost_user_blk::{FrontEndEvent, PeerProcess, ExportObserver},
};
use policy::time::Duration;
use serde_json::{Value, json};

use super::{Events, Kind, News};

impl ClientObserver for Events {
    fn connected(&self, visit: &NbdClientInfo) {
        let message = format!("{} uses disk {}", shown(visit), visit.disk);
        self.tell(about(Kind::ClientIn, message, visit));
    }

    fn disconnected(&self, visit: &NbdClientInfo, lasted: Duration) {
        let message = format!("{} has left disk {} after {} s", shown(visit), visit.disk, lasted.as_secs());
        self.tell(about(Kind::ClientOut, message, visit).with("seconds", lasted.as_secs()));
    }
}

fn about(kind: Kind, message: String, visit: &NbdClientInfo) -> News {
    let news = News::new(kind, message).of_disk(&visit.disk).with("type", "nbd");
    let news = news.with("export", &*visit.export).with("client", visit.number);
    news.with("address", json!(visit.address)).with("name", json!(visit.name))
}

/// Text for messages: `client 7 of 192.0.2.1`.
fn shown(visit: &NbdClientInfo) -> String {
    // Verified by TLS, so it identifies a client better than its address.
    let of = match (&visit.name, visit.address) {
        (Some(name), _) => format!(" ({name})"),
        (None, Some(address)) => format!(" of {address}"),
        (None, None) => String::new(),
    };
    format!("client {}{of}", visit.number)
}

impl ExportObserver for Events {
    fn observe(&self, export: &str, disk: &str, happening: &FrontEndEvent<'_>, left_out: u64) {
        let news = of_machine(disk, happening).of_disk(disk).with("type", "vhost-user-blk");
        self.tell(news.with("export", export).after(left_out));
    }
}

fn of_machine(disk: &str, happening: &FrontEndEvent<'_>) -> News {
    match *happening {
        FrontEndEvent::Connected { process } => {
            let message = format!("{} uses disk {disk}", named(process));
            News::new(Kind::ClientIn, message).with("front-end", told(process))
        }
        FrontEndEvent::Disconnected { process, lasted } => {
            let seconds = lasted.as_secs();
            let message = format!("{} has left disk {disk} after {seconds} s", named(process));
            News::new(Kind::ClientOut, message).with("front-end", told(process)).with("seconds", seconds)
        }
        FrontEndEvent::ProtocolError { process, why } => {
            let message = format!("{} was disconnected from disk {disk}: {why}", named(process));
            let news = News::new(Kind::ClientDisconnected, message).with("front-end", told(process));
            news.with("reason", why.to_string())
        }
        FrontEndEvent::Rejected { process, connected } => {
            let message = format!(
                "{} was turned away from disk {disk}: {} is connected (stop that one, or give each a disk)",
                named(process),
                named(connected)
            );
            let news = News::new(Kind::ClientTurnedAway, message).with("front-end", told(process));
            news.with("connected", told(connected))
        }
        FrontEndEvent::RingBroken { ring, why } => {
            let message = format!(
                "ring {ring} of disk {disk} cannot be served, until its driver is set up again: {why}"
            );
            News::new(Kind::RingBroken, message).with("ring", ring).with("reason", why.to_string())
        }
        FrontEndEvent::RingServed { ring, after } => {
            let seconds = after.as_secs();
            let message = format!("ring {ring} of disk {disk} is served again, after {seconds} s");
            News::new(Kind::RingServed, message).with("ring", ring).with("seconds", seconds)
        }
    }
}

fn named(process: Option<&PeerProcess>) -> String {
    process.map_or_else(|| "a virtual machine".to_owned(), PeerProcess::to_string)
}

fn told(process: Option<&PeerProcess>) -> Value {
    process.map_or(Value::Null, |PeerProcess { pid, name }| json!({ "pid": pid, "name": &**name }))
}
