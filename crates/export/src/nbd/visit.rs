//! Clients that have come and that go, for whoever is to be told.
//!
//! Told from the thread that the client lives on, when it has chosen an export and when its
//! connection ends; those that shake hands and leave are nobody's. Never waits for who is told.

use std::{fmt, net::IpAddr, sync::Arc};

use policy::time::Duration;

/// A client that has chosen an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Its number, which no other client of this server has.
    pub number: u64,
    /// The export's name.
    pub export: Arc<str>,
    /// The disk's name.
    pub disk: Arc<str>,
    /// Where it comes from; `None` through a Unix socket.
    pub address: Option<IpAddr>,
    /// The name that TLS has proved.
    pub name: Option<String>,
}

/// Whoever is told of clients.
pub trait Visited: Send + Sync + fmt::Debug {
    /// A client may now send requests.
    fn came(&self, visit: &Visit);
    /// It has gone; it was there for so long.
    fn went(&self, visit: &Visit, lasted: Duration);
}
