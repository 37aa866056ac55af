//! `x-weir-reload`: reloads the config as SIGHUP does and returns the changes, or only returns
//! them.

use std::rc::Rc;

use serde_json::Value;

use crate::{
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    registry::Registry,
    reload::{dry_run, reload},
};

#[derive(Debug)]
pub(super) struct ReloadConfig {
    is_dry_run: bool,
}

impl QmpCommand for ReloadConfig {
    const NAME: &'static str = "x-weir-reload";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { is_dry_run: arguments.optional("dry-run")?.unwrap_or(false) })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let changes = if self.is_dry_run { dry_run(&registry).await } else { reload(&registry).await };
        changes.map(response).map_err(|error| QmpError::generic(format!("{error:#}")))
    }
}
