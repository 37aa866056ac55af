//! `x-weir-takeover`: sent by `weir serve --takeover`, together with the socket for the transfer.

use std::rc::Rc;

use serde_json::{Value, json};

use crate::{
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError},
    registry::Registry,
    upgrade::{
        UPGRADE_COMMAND,
        old_process::{self, UpgradeRequest},
    },
};

#[derive(Debug)]
pub(super) struct TakeOver(UpgradeRequest);

impl QmpCommand for TakeOver {
    const NAME: &'static str = UPGRADE_COMMAND;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self(UpgradeRequest {
            socket: arguments.descriptors().take_arrived()?.into_owned(),
            format: arguments.required("format")?,
            version: arguments.required("version")?,
        }))
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let result = old_process::begin_upgrade(&registry, self.0).await;
        result.map(|()| json!({})).map_err(|error| QmpError::generic(format!("{error:#}")))
    }
}
