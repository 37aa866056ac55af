//! Notifications about clients that connect and disconnect.
//!
//! Made on the client's thread when it has chosen an export and when its connection ends. Clients
//! that leave during the handshake are not reported. Never waits for the observer.

use std::{fmt, net::IpAddr, sync::Arc};

use policy::time::Duration;

/// A client that has chosen an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdClientInfo {
    /// Number of the client, unique in its server.
    pub number: u64,
    /// The export's name.
    pub export: Arc<str>,
    /// The disk's name.
    pub disk: Arc<str>,
    /// Address of the client; `None` for a Unix socket.
    pub address: Option<IpAddr>,
    /// Name that TLS has proved.
    pub name: Option<String>,
}

/// Receives the connection and disconnection of each client.
pub trait ClientObserver: Send + Sync + fmt::Debug {
    /// Called when a client may send requests.
    fn connected(&self, client: &NbdClientInfo);
    /// Called when a client has disconnected, with the time since it connected.
    fn disconnected(&self, client: &NbdClientInfo, duration: Duration);
}
