//! `x-weir-reload`: what SIGHUP does, with an answer.

use std::rc::Rc;

use serde_json::Value;

use crate::control::{
    inventory::Inventory,
    qmp::{arguments::Arguments, command::Command, error::Error},
    reload::reload,
};

#[derive(Debug)]
pub(super) struct Reload;

impl Command for Reload {
    const NAME: &'static str = "x-weir-reload";

    fn read(_: &mut Arguments) -> Result<Self, Error> {
        Ok(Self)
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        let changes = reload(&inventory).await;
        changes.map(Value::Array).map_err(|error| Error::generic(format!("{error:#}")))
    }
}
