//! `x-weir-add-disk` and `x-weir-add-group`: a disk with all its exports, or a group, described by
//! keys of the config file.

use std::rc::Rc;

use reactor::operation::PassedFd;
use serde_json::{Map, Value, json};

use crate::{
    adding::{self, NewDisk},
    qmp::{arguments::Arguments, command::Command, error::Error},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct AddDisk(NewDisk);

impl Command for AddDisk {
    const NAME: &'static str = "x-weir-add-disk";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        let (name, keys) = (arguments.required("name")?, keys(arguments)?);
        let exports: Option<Vec<Value>> = arguments.optional("exports")?;
        let named =
            exports.iter().flatten().filter_map(|export| export["listen"].as_str()?.strip_prefix("fd:"));
        let passed = arguments.passed();
        // Takes only descriptors that the exports name; later commands may use the rest.
        let socket = |name: &str| Some((name.to_owned(), passed.take(name).map(PassedFd::into_owned)?));
        let sockets = named.filter_map(socket).collect();
        Ok(Self(NewDisk { name, keys, exports, sockets }))
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        Ok(json!({ "uris": self.0.add(&registry).await.map_err(Error::of)? }))
    }
}

#[derive(Debug)]
pub(super) struct AddGroup {
    name: String,
    keys: Map<String, Value>,
}

impl Command for AddGroup {
    const NAME: &'static str = "x-weir-add-group";
    const CHANGES: bool = true;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { name: arguments.required("name")?, keys: keys(arguments)? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        if registry.objects.contains(&self.name) {
            return Err(Error::generic(format!(
                "{}: an object has this name already (choose another)",
                self.name
            )));
        }
        adding::group(&registry, &self.name, &self.keys).await.map_err(Error::of)?;
        Ok(json!({}))
    }
}

fn keys(arguments: &mut Arguments) -> Result<Map<String, Value>, Error> {
    match arguments.required("keys")? {
        Value::Object(keys) => Ok(keys),
        _ => Err(Error::wrong_type("keys", "object")),
    }
}
