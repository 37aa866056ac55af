//! `x-weir-query-events`: latest events.

use std::rc::Rc;

use serde_json::Value;

use crate::{
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct QueryEvents {
    since: u64,
}

impl QmpCommand for QueryEvents {
    const NAME: &'static str = "x-weir-query-events";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { since: arguments.number("since", 0..=u64::MAX)?.unwrap_or(0) })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        Ok(registry.events.since(self.since).iter().map(|event| event.to_json()).collect())
    }
}
