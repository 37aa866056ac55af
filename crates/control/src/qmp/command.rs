//! Commands: their trait, and the dispatch by name.
//!
//! ```text
//!   name ─► Entry ─► Command::read ─► Arguments::finish ─► Command::run
//!                    all wrong input ends here ┘              └ changes the running state
//! ```
//!
//! Reading and running are separate, so that no command acts on partially wrong arguments.

use std::rc::Rc;

use serde_json::{Value, value::RawValue};
use settings::suggest;

use super::{
    arguments::Arguments,
    error::{Class, Error},
    json::shown,
    server::{Execute, Reply, Running},
};
use crate::registry::{Refused, Registry};

/// Command of the protocol, with its arguments as fields.
pub(crate) trait Command: Sized + 'static {
    const NAME: &'static str;
    /// True if the command adds, removes or changes disks, groups, exports, servers or objects. It
    /// then waits for the end of a reload, and no reload begins before it has ended.
    const CHANGES: bool = false;

    /// Reads the arguments. Remaining ones are an error.
    fn read(arguments: &mut Arguments) -> Result<Self, Error>;

    /// Executes the command. A failed command has changed nothing.
    fn run(self, registry: Rc<Registry>) -> impl Future<Output = Result<Value, Error>> + 'static;
}

/// Command that serializes its result itself.
///
/// For results that describe all disks: a tree of [`Value`]s of ten thousand disks costs several
/// times the processor time and the memory of their text.
pub(crate) trait TextCommand: Sized + 'static {
    const NAME: &'static str;

    /// As [`Command::read`].
    fn read(arguments: &mut Arguments) -> Result<Self, Error>;

    /// As [`Command::run`].
    fn run(self, registry: Rc<Registry>) -> impl Future<Output = Result<Box<RawValue>, Error>> + 'static;
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    changes: bool,
    start: fn(&Rc<Registry>, Arguments) -> Result<Running, Error>,
}

impl Entry {
    pub(crate) const fn of<C: Command>() -> Self {
        Self { name: C::NAME, changes: C::CHANGES, start: start::<C> }
    }

    pub(crate) const fn of_text<C: TextCommand>() -> Self {
        Self { name: C::NAME, changes: false, start: start_text::<C> }
    }
}

fn start<C: Command>(registry: &Rc<Registry>, mut arguments: Arguments) -> Result<Running, Error> {
    let command = C::read(&mut arguments)?;
    arguments.finish()?;
    let running = command.run(Rc::clone(registry));
    Ok(Box::pin(async { running.await.map(Reply::Value) }))
}

fn start_text<C: TextCommand>(registry: &Rc<Registry>, mut arguments: Arguments) -> Result<Running, Error> {
    let command = C::read(&mut arguments)?;
    arguments.finish()?;
    let running = command.run(Rc::clone(registry));
    Ok(Box::pin(async { running.await.map(Reply::Text) }))
}

pub(crate) struct Commands {
    pub(crate) table: &'static [Entry],
    pub(crate) registry: Rc<Registry>,
}

impl Execute for Commands {
    fn is_closed(&self) -> bool {
        self.registry.lifecycle.is_control_closed.get()
    }

    fn execute(&self, name: &str, arguments: Arguments) -> Result<Running, Error> {
        if self.registry.lifecycle.leaving.get()
            && !name.starts_with("query-")
            && !name.starts_with("x-weir-query-")
        {
            return Err(Refused::TakenOver.into());
        }
        if let Some(entry) = self.table.iter().find(|entry| entry.name == name) {
            let running = (entry.start)(&self.registry, arguments)?;
            if !entry.changes {
                return Ok(running);
            }
            let registry = Rc::clone(&self.registry);
            return Ok(Box::pin(async move {
                let _turn = registry.change().await?;
                running.await
            }));
        }
        let name = shown(name);
        let near = suggest::nearest(&name, self.table.iter().map(|entry| entry.name));
        let near = near.map(|near| format!(" (did you mean '{near}'?)")).unwrap_or_default();
        Err(Error::new(Class::CommandNotFound, format!("The command {name} has not been found{near}")))
    }
}
