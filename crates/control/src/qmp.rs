//! QMP server: QEMU's control protocol, so that tools for QEMU's disks work with weir's.
//!
//! ```text
//!   socket ─► server ─► session ─► stream ─► json        bytes to requests
//!                │         └─► arguments, error          parameters, and errors about them
//!                ├─► descriptors                         descriptors passed with the bytes
//!                ├─► command ─► commands/…               execution
//!                └─► outbox ◄─ event                     replies and events, to the client
//! ```
//!
//! `stream` and `session` are independent of sockets, and `server` of commands; `control` connects
//! them. JSON is read and written here alone.
//!
//! Source: QEMU's `docs/interop/qmp-spec.rst` and its QAPI schema; `docs/reference/qmp.md` lists
//! the differences.

mod arguments;
mod caches;
mod command;
mod commands;
mod control;
mod descriptors;
mod error;
mod errors;
mod event;
pub mod fuzzing;
#[cfg(test)]
mod growth_tests;
mod identifier;
mod json;
mod keyval;
mod outbox;
mod prefetch;
mod server;
mod session;
mod settings;
mod stream;

use std::rc::Rc;

use arguments::QmpArguments;
use block::layer::throttle::GroupSettings;
pub use control::ControlSockets;
pub use json::whole_number;
use serde_json::{Map, Value};
use server::CommandExecutor as _;
pub use server::ShutdownCause;
pub use session::qemu_release;
use settings::{LimitChanges, SettingChanges, SettingNaming};
use storage::PassedFiles;

use super::registry::Registry;

/// Executes a command of the control socket with arguments in the syntax of a command line: see
/// [`keyval`].
///
/// # Errors
/// The error that a client would receive.
pub async fn execute_text(
    registry: &Rc<Registry>,
    command: &str,
    text: &str,
    implied: Option<&str>,
) -> Result<(), String> {
    let arguments = keyval::parse_arguments(text, implied).map_err(|error| error.to_string())?;
    execute(registry, command, arguments).await
}

/// As [`execute_text`], with arguments in the form that clients send.
///
/// # Errors
/// The error that a client would receive.
pub async fn execute_json(
    registry: &Rc<Registry>,
    command: &str,
    arguments: Map<String, Value>,
) -> Result<(), String> {
    execute(registry, command, QmpArguments::new(arguments)).await
}

/// Adds a disk in an upgrade: see `commands::block`.
///
/// # Errors
/// The error that a client would receive.
pub async fn add_transferred_disk(
    registry: &Rc<Registry>,
    creation_commands: &[Map<String, Value>],
    passed: PassedFiles,
) -> Result<(), String> {
    commands::block::add_transferred(registry, creation_commands, passed)
        .await
        .map_err(|error| error.to_string())
}

/// Settings after changes in the form of `x-weir-set`, by the same rules. Changes nothing.
///
/// # Errors
/// The first broken rule.
pub fn settings_after(before: GroupSettings, changes: Map<String, Value>) -> Result<GroupSettings, String> {
    let mut arguments = QmpArguments::new(changes);
    let read = |arguments: &mut QmpArguments| {
        let limits = LimitChanges::read(arguments, SettingNaming::Plain)?;
        Ok(SettingChanges::read_own(arguments, "")?.with_limits(limits))
    };
    let changes = read(&mut arguments).and_then(|changes| arguments.finish().map(|()| changes));
    changes.and_then(|changes| changes.apply_to(before)).map_err(|error: error::QmpError| error.to_string())
}

async fn execute(registry: &Rc<Registry>, command: &str, arguments: QmpArguments) -> Result<(), String> {
    // The same dispatch as for clients, so that both reject the same input.
    let commands = command::CommandTable { table: commands::TABLE, registry: Rc::clone(registry) };
    let result = match commands.execute(command, arguments) {
        Ok(running) => running.await,
        Err(error) => Err(error),
    };
    result.map(drop).map_err(|error| error.to_string())
}
