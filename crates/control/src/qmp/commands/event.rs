//! `x-weir-query-events`: latest events.

use std::rc::Rc;

use serde_json::Value;

use crate::{
    qmp::{arguments::Arguments, command::Command, error::Error},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct QueryEvents {
    since: u64,
}

impl Command for QueryEvents {
    const NAME: &'static str = "x-weir-query-events";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { since: arguments.number("since", 0..=u64::MAX)?.unwrap_or(0) })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        Ok(registry.events.since(self.since).iter().map(|event| event.to_json()).collect())
    }
}
