//! The process: what it is, what it can do, and its end.

use serde_json::json;

use crate::control::{inventory::End, qmp::session};

query!(QueryVersion, "query-version", |_| session::version());
query!(QueryName, "query-name", |_| json!({}));
// Stopped while the errors of any disk stop it, as a guest of QEMU's is by any of its disks.
query!(QueryStatus, "query-status", |inventory| match inventory.is_stopped() {
    false => json!({ "running": true, "status": "running" }),
    true => json!({ "running": false, "status": "io-error" }),
});
query!(Continue, "cont", |inventory| {
    inventory.resume();
    json!({})
});
query!(QueryCommands, "query-commands", |_| super::names().map(|name| json!({ "name": name })).collect());
// The answer is on its way before the end begins, on this thread.
query!(Quit, "quit", |inventory| {
    (inventory.ender)(End::Asked);
    json!({})
});
