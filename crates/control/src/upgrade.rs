//! Upgrade: a new process continues for the running one (`--takeover`), unnoticed by clients.
//!
//! ```text
//!   new_process           `weir serve --takeover`: requests the upgrade, opens everything, serves
//!   old_process           offers, quiesces, ends; or resumes
//!   given_up              ends the new process if the old one gives up first
//!   devices               devices and files of this host, in both processes
//!   identity              comparison of a disk with the one that the old process serves
//!   added_objects         description of objects that are in no config file
//!   add_transferred       the same objects, added by the new process
//!   messages              messages between the processes
//!   counters              transferred counters
//!   transferred_settings  transferred settings, for the log of the new process
//!   channel               framing of messages and descriptors
//! ```
//!
//! The new process requests the upgrade over the control socket. Steps that can fail are done while
//! the old process still serves; then the old one is quiesced for some milliseconds. Until it has
//! sent `Yours`, the old process can resume, even if the new one is killed.
//!
//! Never selects the objects: the new process has its own config, and takes over the objects in it
//! and those that clients of the control socket added.

mod add_transferred;
mod added_objects;
mod channel;
mod counters;
mod devices;
pub mod given_up;
mod identity;
mod messages;
pub mod new_process;
pub(crate) mod old_process;
mod transferred_settings;

use std::sync::Arc;

use block::disk::Disk;
use messages::ObjectOrigin;
pub(crate) use messages::{BucketLevelsState, UPGRADE_FORMAT};
use policy::time::Duration;
use settings::{ListenAddress, ListenEndpoint};

use super::registry::Registry;

/// QMP command that requests an upgrade.
pub(crate) const UPGRADE_COMMAND: &str = "x-weir-takeover";

/// Name by which both processes identify an endpoint; independent of the working directory.
fn endpoint_name(endpoint: &ListenEndpoint) -> String {
    endpoint.absolute().to_string()
}

/// Name of the endpoint of an HTTP service, `metrics` or `http`.
pub fn http_endpoint_name(kind: &str, address: &ListenAddress) -> String {
    format!("{kind} at {address}")
}

/// Text about an object of the old process that is missing here, with the remedy.
fn missing_text<T>(subject: String, origin: &ObjectOrigin<T>, registry: &Registry) -> String {
    let why = match origin {
        ObjectOrigin::NotTransferable(why) => format!("; it cannot be transferred: {why}"),
        ObjectOrigin::Config | ObjectOrigin::Added(_) => String::new(),
    };
    let config = match &registry.config {
        Some(file) => file.display().to_string(),
        None => "this command line".to_owned(),
    };
    format!("{subject}{why} (add it to {config}, or remove it first)")
}

/// Releases a disk with handover that was retained so that its image stayed open during the pause.
/// The delay lets its virtqueues restart and use the disk first; later ones reopen the image.
fn release_later(disk: Arc<Disk>) {
    const VIRTQUEUE_RESTART_TIME: Duration = Duration::from_secs(1);
    reactor::spawn(async move {
        reactor::sleep_until(reactor::now() + VIRTQUEUE_RESTART_TIME).await;
        disk.release().await;
    });
}

/// Nanoseconds of CLOCK_MONOTONIC, which all processes share.
fn clock_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    let now = now.map_or(Duration::ZERO, Into::into);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Encodes and decodes a value, as in a transfer.
#[cfg(test)]
fn round_trip<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    serde_json::from_slice(&serde_json::to_vec(value).unwrap()).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_name_is_independent_of_the_directory() {
        let name_of =
            |path: std::path::PathBuf| endpoint_name(&ListenEndpoint::Address(ListenAddress::Unix(path)));
        let here = std::env::current_dir().unwrap();
        let absolute = name_of(here.join("w.sock"));
        assert_eq!(name_of("w.sock".into()), absolute);
        assert_eq!(name_of("./w.sock".into()), absolute);
        assert_ne!(name_of("v.sock".into()), absolute);
    }
}
