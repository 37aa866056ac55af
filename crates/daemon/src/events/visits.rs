//! Clients of NBD, as their server tells of them.

use export::nbd::{Visit, Visited};
use policy::time::Duration;
use serde_json::json;

use super::{Events, Kind, News};

impl Visited for Events {
    fn came(&self, visit: &Visit) {
        let message = format!("{} uses disk {}", shown(visit), visit.disk);
        self.tell(about(Kind::ClientIn, message, visit));
    }

    fn went(&self, visit: &Visit, lasted: Duration) {
        let message = format!("{} has left disk {} after {} s", shown(visit), visit.disk, lasted.as_secs());
        self.tell(about(Kind::ClientOut, message, visit).with("seconds", lasted.as_secs()));
    }
}

fn about(kind: Kind, message: String, visit: &Visit) -> News {
    let news = News::new(kind, message).of_disk(&visit.disk).with("type", "nbd");
    let news = news.with("export", &*visit.export).with("client", visit.number);
    news.with("address", json!(visit.address)).with("name", json!(visit.name))
}

/// `client 7 of 192.0.2.1`.
fn shown(visit: &Visit) -> String {
    let of = match (&visit.name, visit.address) {
        (Some(name), _) => format!(" ({name})"),
        (None, Some(address)) => format!(" of {address}"),
        (None, None) => String::new(),
    };
    format!("client {}{of}", visit.number)
}
