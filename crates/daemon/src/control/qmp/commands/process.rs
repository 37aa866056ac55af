//! The process: what it is, what it can do, and its end.

use std::rc::Rc;

use serde_json::{Value, json};

use crate::control::{
    inventory::{End, Inventory},
    qmp::{arguments::Arguments, command::Command, error::Error, session},
};

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
/// `cont` for one disk: QEMU's guest goes on with all of its own.
#[derive(Debug)]
pub(super) struct Resume {
    name: String,
}

impl Command for Resume {
    const NAME: &'static str = "x-weir-resume";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { name: arguments.required("name")? })
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        Ok(json!({ "was-stopped": inventory.resume_disk(&self.name)? }))
    }
}

query!(QueryCommands, "query-commands", |_| super::names().map(|name| json!({ "name": name })).collect());
// The answer is on its way before the end begins, on this thread.
query!(Quit, "quit", |inventory| {
    (inventory.ender)(End::Asked);
    json!({})
});
