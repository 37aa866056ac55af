//! The process: what it is, what it can do, and its end.

use serde_json::json;

use crate::control::{inventory::End, qmp::session};

query!(QueryVersion, "query-version", |_| session::version());
query!(QueryName, "query-name", |_| json!({}));
query!(QueryStatus, "query-status", |_| json!({ "running": true, "status": "running" }));
query!(QueryCommands, "query-commands", |_| super::names().map(|name| json!({ "name": name })).collect());
// The answer is on its way before the end begins, on this thread.
query!(Quit, "quit", |inventory| {
    (inventory.ender)(End::Asked);
    json!({})
});
