//! The process: what it is, what it can do, and its end.

use std::rc::Rc;

use policy::time::Duration;
use serde_json::{Value, json};

use crate::{
    qmp::{arguments::Arguments, command::Command, error::Error, session},
    registry::{End, Registry},
};

query!(QueryVersion, "query-version", |_| session::version());
query!(QueryName, "query-name", |_| json!({}));
// Stopped while the errors of any disk stop it, as a guest of QEMU's is by any of its disks.
query!(QueryStatus, "query-status", |registry| match registry.disks.is_stopped() {
    false => json!({ "running": true, "status": "running" }),
    true => json!({ "running": false, "status": "io-error" }),
});
query!(Continue, "cont", |registry| {
    registry.resume();
    json!({})
});
/// How long what was held may take until it is told what came of it.
const TO_BE_TRIED: Duration = Duration::from_secs(2);

/// `cont` that tells what comes of it, for all disks or one: QEMU's guest goes on with all of its
/// own.
#[derive(Debug)]
pub(super) struct Resume {
    name: Option<String>,
}

impl Command for Resume {
    const NAME: &'static str = "x-weir-resume";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { name: arguments.optional("name")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let mut disks = match &self.name {
            Some(name) => vec![registry.disks.get(name)?],
            None => registry.disks.all(),
        };
        disks.retain(|running| running.disk.failures().stopped_by().is_some());
        match &self.name {
            Some(name) => registry.resume_disk(name)?,
            None => registry.resume(),
        }
        let deadline = reactor::now() + TO_BE_TRIED;
        let mut resumed = Vec::new();
        for running in &disks {
            let failures = running.disk.failures();
            let left = deadline - reactor::now();
            let stopped_by = reactor::timeout(left, failures.wait_until_retried()).await.unwrap_or(None);
            let mut told = json!({ "name": &**running.disk.name() });
            if let Some(error) = stopped_by {
                told["stopped-by"] = json!(error.to_string());
            }
            resumed.push(told);
        }
        Ok(Value::Array(resumed))
    }
}

query!(QueryCommands, "query-commands", |_| super::names().map(|name| json!({ "name": name })).collect());
// The answer is on its way before the end begins, on this thread.
query!(Quit, "quit", |registry| {
    (registry.lifecycle.ender)(End::Asked);
    json!({})
});
