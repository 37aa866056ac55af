//! QMP server: QEMU's control protocol, so that tools for QEMU's disks work with weir's.
//!
//! ```text
//!   socket ─► server ─► session ─► stream ─► json        bytes to requests
//!                │         └─► arguments, error          parameters, and their mistakes
//!                ├─► descriptors                         descriptors that come with the bytes
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

use arguments::Arguments;
use block::layer::throttle::GroupSettings;
pub use control::Control;
pub use json::whole;
use serde_json::{Map, Value};
pub use server::Ending;
use server::Execute as _;
pub use session::qemu_release;
use settings::{Changes, LimitChanges, Naming};
use storage::PassedFiles;

use super::registry::Registry;

/// Executes a command of the control socket with arguments in the syntax of a command line: see
/// [`keyval`].
///
/// # Errors
/// The error that a client would receive.
pub async fn perform(
    registry: &Rc<Registry>,
    command: &str,
    text: &str,
    implied: Option<&str>,
) -> Result<(), String> {
    let arguments = keyval::arguments(text, implied).map_err(|error| error.to_string())?;
    run(registry, command, arguments).await
}

/// As [`perform`], with arguments in the form that clients send.
///
/// # Errors
/// The error that a client would receive.
pub async fn perform_sent(
    registry: &Rc<Registry>,
    command: &str,
    arguments: Map<String, Value>,
) -> Result<(), String> {
    run(registry, command, Arguments::new(arguments)).await
}

/// Adds a disk in an upgrade: see [`commands::block::add_again`].
///
/// # Errors
/// The error that a client would receive.
pub async fn add_again(
    registry: &Rc<Registry>,
    told: &[Map<String, Value>],
    passed: PassedFiles,
) -> Result<(), String> {
    commands::block::add_again(registry, told, passed).await.map_err(|error| error.to_string())
}

/// Settings after changes in the form of `x-weir-set`, by the same rules. Changes nothing.
///
/// # Errors
/// The first broken rule.
pub fn would_be(before: GroupSettings, changes: Map<String, Value>) -> Result<GroupSettings, String> {
    let mut arguments = Arguments::new(changes);
    let read = |arguments: &mut Arguments| {
        let limits = LimitChanges::read(arguments, Naming::Plain)?;
        Ok(Changes::read_own(arguments, "")?.with_limits(limits))
    };
    let changes = read(&mut arguments).and_then(|changes| arguments.finish().map(|()| changes));
    changes.and_then(|changes| changes.apply_to(before)).map_err(|error: error::Error| error.to_string())
}

async fn run(registry: &Rc<Registry>, command: &str, arguments: Arguments) -> Result<(), String> {
    // The same dispatch as for clients, so that both reject the same input.
    let commands = command::Commands { table: commands::TABLE, registry: Rc::clone(registry) };
    let result = match commands.execute(command, arguments) {
        Ok(running) => running.await,
        Err(error) => Err(error),
    };
    result.map(drop).map_err(|error| error.to_string())
}
