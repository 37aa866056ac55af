//! `x-weir-reload`: reloads the config as SIGHUP does and returns the changes, or only returns
//! them.

use std::rc::Rc;

use serde_json::Value;

use crate::{
    qmp::{arguments::Arguments, command::Command, error::Error},
    registry::Registry,
    reload::{foresee, reload},
};

#[derive(Debug)]
pub(super) struct Reload {
    is_dry_run: bool,
}

impl Command for Reload {
    const NAME: &'static str = "x-weir-reload";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { is_dry_run: arguments.optional("dry-run")?.unwrap_or(false) })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let changes = if self.is_dry_run { foresee(&registry).await } else { reload(&registry).await };
        changes.map(Value::Array).map_err(|error| Error::generic(format!("{error:#}")))
    }
}
