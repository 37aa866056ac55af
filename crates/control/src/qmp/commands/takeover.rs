//! `x-weir-takeover`: sent by `weir serve --takeover`, together with the socket for the transfer.

use std::rc::Rc;

use serde_json::{Value, json};

use crate::{
    qmp::{arguments::Arguments, command::Command, error::Error},
    registry::Registry,
    takeover::{
        COMMAND,
        leaving::{self, Asked},
    },
};

#[derive(Debug)]
pub(super) struct TakeOver(Asked);

impl Command for TakeOver {
    const NAME: &'static str = COMMAND;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self(Asked {
            socket: arguments.passed().next()?.into_owned(),
            format: arguments.required("format")?,
            version: arguments.required("version")?,
        }))
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let begun = leaving::begin(&registry, self.0).await;
        begun.map(|()| json!({})).map_err(|error| Error::generic(format!("{error:#}")))
    }
}
