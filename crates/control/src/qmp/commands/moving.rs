//! `x-weir-move-disk`: migrates a disk to another host of the cluster.

use std::rc::Rc;

use serde_json::Value;

use crate::{
    moving::{self, Wish},
    qmp::{arguments::Arguments, command::Command, error::Error},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct MoveDisk(Wish);

impl Command for MoveDisk {
    const NAME: &'static str = "x-weir-move-disk";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self(Wish {
            disk: arguments.required("name")?,
            to: arguments.required("to")?,
            listen: arguments.optional("listen")?,
            force: arguments.optional("force")?.unwrap_or(false),
        }))
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        moving::away(&registry, self.0).await.map_err(|error| Error::generic(format!("{error:#}")))
    }
}
