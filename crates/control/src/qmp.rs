//! The QMP server: QEMU's control protocol, so that what steers QEMU's disks steers weir's.
//!
//! ```text
//!   socket ─► server ─► session ─► stream ─► json        bytes to requests
//!                │         └─► arguments, error          what is asked, and what is wrong with it
//!                ├─► descriptors                         what comes beside the bytes
//!                ├─► command ─► commands/…               what it does
//!                └─► outbox ◄─ event                     answers and news, on their way back
//! ```
//!
//! `stream` and `session` know no sockets, and `server` knows no commands; `control` puts them
//! together. JSON is read and written here alone.
//!
//! Source: QEMU's `docs/interop/qmp-spec.rst` and its QAPI schema; what differs is in
//! `docs/reference/qmp.md`.

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

/// Does what a client could ask for, with arguments as a command line has them: see [`keyval`].
///
/// # Errors
/// The command's, as a client would be told.
pub async fn perform(
    registry: &Rc<Registry>,
    command: &str,
    text: &str,
    implied: Option<&str>,
) -> Result<(), String> {
    let arguments = keyval::arguments(text, implied).map_err(|error| error.to_string())?;
    run(registry, command, arguments).await
}

/// The same with arguments as a client sends them.
///
/// # Errors
/// The command's, as a client would be told.
pub async fn perform_sent(
    registry: &Rc<Registry>,
    command: &str,
    arguments: Map<String, Value>,
) -> Result<(), String> {
    run(registry, command, Arguments::new(arguments)).await
}

/// See [`commands::block::add_again`].
///
/// # Errors
/// As a client would be told.
pub async fn add_again(
    registry: &Rc<Registry>,
    told: &[Map<String, Value>],
    passed: PassedFiles,
) -> Result<(), String> {
    commands::block::add_again(registry, told, passed).await.map_err(|error| error.to_string())
}

/// What settings would be, once these changes were made, which are `x-weir-set`'s: the same rules,
/// and nothing happens.
///
/// # Errors
/// The first rule that is broken.
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
    let commands = command::Commands { table: commands::TABLE, registry: Rc::clone(registry) };
    let result = match commands.execute(command, arguments) {
        Ok(running) => running.await,
        Err(error) => Err(error),
    };
    result.map(drop).map_err(|error| error.to_string())
}
