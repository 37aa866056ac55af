//! The process: what it is, what it can do, and its end.

use std::rc::Rc;

use serde_json::{Value, json};

use crate::control::{
    inventory::{End, Inventory},
    qmp::{arguments::Arguments, command::Command, error::Error, session},
};

/// Defines a command without arguments whose answer is computed at once.
macro_rules! query {
    ($type:ident, $name:literal, $answer:expr) => {
        #[doc = concat!("`", $name, "`.")]
        #[derive(Debug)]
        pub(super) struct $type;

        impl Command for $type {
            const NAME: &'static str = $name;

            fn read(_: &mut Arguments) -> Result<Self, Error> {
                Ok(Self)
            }

            async fn run(self, _: Rc<Inventory>) -> Result<Value, Error> {
                Ok($answer)
            }
        }
    };
}

query!(QueryVersion, "query-version", session::version());
query!(QueryName, "query-name", json!({}));
query!(QueryStatus, "query-status", json!({ "running": true, "status": "running" }));
query!(QueryCommands, "query-commands", super::names().map(|name| json!({ "name": name })).collect());

/// The answer is on its way before the end begins, on this thread.
#[derive(Debug)]
pub(super) struct Quit;

impl Command for Quit {
    const NAME: &'static str = "quit";

    fn read(_: &mut Arguments) -> Result<Self, Error> {
        Ok(Self)
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        (inventory.ender())(End::Asked);
        Ok(json!({}))
    }
}
