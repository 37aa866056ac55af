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

pub(crate) use control::Control;
pub(crate) use server::Ending;
use server::Execute as _;
pub use session::qemu_release;

use super::inventory::Inventory;

/// Does what a client could ask for, with arguments as a command line has them: see [`keyval`].
///
/// # Errors
/// The command's, as a client would be told.
pub(crate) async fn perform(
    inventory: &Rc<Inventory>,
    command: &str,
    text: &str,
    implied: Option<&str>,
) -> Result<(), String> {
    let commands = command::Commands { table: commands::TABLE, inventory: Rc::clone(inventory) };
    let result = match keyval::arguments(text, implied) {
        Ok(arguments) => match commands.execute(command, arguments) {
            Ok(running) => running.await,
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    result.map(drop).map_err(|error| error.to_string())
}
