//! `x-weir-move-disk`: migrates a disk to another host of the cluster.

use std::rc::Rc;

use serde_json::Value;

use crate::{
    migration::{self, MigrationRequest},
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct MoveDisk(MigrationRequest);

impl QmpCommand for MoveDisk {
    const NAME: &'static str = "x-weir-move-disk";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self(MigrationRequest {
            disk: arguments.required("name")?,
            to: arguments.required("to")?,
            listen: arguments.optional("listen")?,
            force: arguments.optional("force")?.unwrap_or(false),
        }))
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let moved = migration::migrate(&registry, self.0).await;
        moved.map(response).map_err(|error| QmpError::generic(format!("{error:#}")))
    }
}
