//! The process: its version, its commands, its state and its end.

use std::rc::Rc;

use api::ResumedDisk;
use policy::time::Duration;
use serde_json::{Value, json};

use crate::{
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError, session},
    registry::{DaemonEnd, Registry},
};

query!(QueryVersion, "query-version", |_| session::version());
query!(QueryName, "query-name", |_| json!({}));
// Stopped while any disk is stopped at an error, as a guest in QEMU is.
query!(QueryStatus, "query-status", |registry| match registry.disks.is_stopped() {
    false => json!({ "running": true, "status": "running" }),
    true => json!({ "running": false, "status": "io-error" }),
});
query!(Continue, "cont", |registry| {
    registry.resume();
    json!({})
});
/// Time for held requests to be retried before the result is reported.
const RETRY_TIMEOUT: Duration = Duration::from_secs(2);

/// As `cont`, for all disks or one, and reports whether they stopped again.
#[derive(Debug)]
pub(super) struct ResumeDisks {
    name: Option<String>,
}

impl QmpCommand for ResumeDisks {
    const NAME: &'static str = "x-weir-resume";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { name: arguments.optional("name")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let mut disks = match &self.name {
            Some(name) => vec![registry.disks.get(name)?],
            None => registry.disks.all(),
        };
        // Collected before the resume, which clears the state.
        disks.retain(|running| running.disk.failures().stopped_by().is_some());
        match &self.name {
            Some(name) => registry.resume_disk(name)?,
            None => registry.resume(),
        }
        let deadline = reactor::now() + RETRY_TIMEOUT;
        let mut resumed = Vec::new();
        for running in &disks {
            let failures = running.disk.failures();
            let left = deadline - reactor::now();
            let stopped_by = reactor::timeout(left, failures.wait_until_retried()).await.unwrap_or(None);
            let name = running.disk.name().to_string();
            resumed.push(ResumedDisk { name, stopped_by: stopped_by.map(|error| error.to_string()) });
        }
        Ok(json!(resumed))
    }
}

query!(QueryCommands, "query-commands", |_| super::names().map(|name| json!({ "name": name })).collect());
// Runs on this thread, so the reply is queued before the end begins.
query!(Quit, "quit", |registry| {
    (registry.lifecycle.request_end)(DaemonEnd::Quit);
    json!({})
});
