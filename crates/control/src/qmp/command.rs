//! Commands: their trait, and the dispatch by name.
//!
//! ```text
//!   name ─► table ─► QmpCommand::read ─► QmpArguments::finish ─► QmpCommand::run
//!                    └─ find all errors of the arguments ───┘    └ changes the running state
//! ```
//!
//! Reading and running are separate, so that no command acts on partially wrong arguments.

use std::rc::Rc;

use serde::Serialize;
use serde_json::{Value, value::RawValue};
use settings::suggest;

use super::{
    arguments::QmpArguments,
    error::{QmpError, QmpErrorClass},
    json::excerpt,
    server::{CommandExecutor, RunningCommand},
    session::CommandResult,
};
use crate::registry::{Registry, RegistryError};

/// Command of the protocol, with its arguments as fields.
pub(crate) trait QmpCommand: Sized + 'static {
    const NAME: &'static str;
    /// True if the command adds, removes or changes disks, groups, exports, servers or objects.
    /// Such a command waits for the end of a reload, and a reload waits for the end of the command.
    const CHANGES_STRUCTURE: bool = false;

    /// Reads the arguments. Remaining ones are an error.
    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError>;

    /// Executes the command. A failed command has changed nothing.
    fn run(self, registry: Rc<Registry>) -> impl Future<Output = Result<Value, QmpError>> + 'static;
}

/// Command that serializes its result itself.
///
/// For results that describe all disks: a tree of [`Value`]s of ten thousand disks costs several
/// times the processor time and the memory of their text.
pub(crate) trait QmpTextCommand: Sized + 'static {
    const NAME: &'static str;

    /// As [`QmpCommand::read`].
    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError>;

    /// As [`QmpCommand::run`].
    fn run(self, registry: Rc<Registry>) -> impl Future<Output = Result<Box<RawValue>, QmpError>> + 'static;
}

/// Result of a command, as a value of [`QmpCommand::run`].
pub(crate) fn response(result: impl Serialize) -> Value {
    serde_json::to_value(result).expect("all keys are strings")
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandEntry {
    pub(crate) name: &'static str,
    changes: bool,
    start: fn(&Rc<Registry>, QmpArguments) -> Result<RunningCommand, QmpError>,
}

impl CommandEntry {
    pub(crate) const fn of<C: QmpCommand>() -> Self {
        Self { name: C::NAME, changes: C::CHANGES_STRUCTURE, start: start::<C> }
    }

    pub(crate) const fn of_text<C: QmpTextCommand>() -> Self {
        Self { name: C::NAME, changes: false, start: start_text::<C> }
    }
}

fn start<C: QmpCommand>(
    registry: &Rc<Registry>,
    mut arguments: QmpArguments,
) -> Result<RunningCommand, QmpError> {
    let command = C::read(&mut arguments)?;
    arguments.finish()?;
    let running = command.run(Rc::clone(registry));
    Ok(Box::pin(async { running.await.map(CommandResult::Value) }))
}

fn start_text<C: QmpTextCommand>(
    registry: &Rc<Registry>,
    mut arguments: QmpArguments,
) -> Result<RunningCommand, QmpError> {
    let command = C::read(&mut arguments)?;
    arguments.finish()?;
    let running = command.run(Rc::clone(registry));
    Ok(Box::pin(async { running.await.map(CommandResult::Text) }))
}

pub(crate) struct CommandTable {
    pub(crate) table: &'static [CommandEntry],
    pub(crate) registry: Rc<Registry>,
}

impl CommandExecutor for CommandTable {
    fn is_closed(&self) -> bool {
        self.registry.lifecycle.is_control_closed.get()
    }

    fn execute(&self, name: &str, arguments: QmpArguments) -> Result<RunningCommand, QmpError> {
        if self.registry.lifecycle.is_upgrading.get()
            && !name.starts_with("query-")
            && !name.starts_with("x-weir-query-")
        {
            return Err(RegistryError::TakenOver.into());
        }
        if let Some(entry) = self.table.iter().find(|entry| entry.name == name) {
            let running = (entry.start)(&self.registry, arguments)?;
            if !entry.changes {
                return Ok(running);
            }
            let registry = Rc::clone(&self.registry);
            return Ok(Box::pin(async move {
                let _guard = registry.lock_structure().await?;
                running.await
            }));
        }
        let name = excerpt(name);
        let suggestion = suggest::nearest(&name, self.table.iter().map(|entry| entry.name));
        let suggestion = suggestion.map(|near| format!(" (did you mean '{near}'?)")).unwrap_or_default();
        Err(QmpError::new(
            QmpErrorClass::CommandNotFound,
            format!("The command {name} has not been found{suggestion}"),
        ))
    }
}
