//! `x-weir-add-disk` and `x-weir-add-group`: a disk with all its exports, or a group, described by
//! keys of the config file.

use std::rc::Rc;

use api::AddedDisk;
use reactor::operation::PassedFd;
use serde_json::{Map, Value, json};

use crate::{
    add_objects::{self, NewDisk},
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct AddDisk(NewDisk);

impl QmpCommand for AddDisk {
    const NAME: &'static str = "x-weir-add-disk";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let (name, keys) = (arguments.required("name")?, read_keys(arguments)?);
        let exports: Option<Vec<Value>> = arguments.optional("exports")?;
        let named =
            exports.iter().flatten().filter_map(|export| export["listen"].as_str()?.strip_prefix("fd:"));
        let passed = arguments.descriptors();
        // Consumes only the descriptors that the exports name; later commands may use the rest.
        let socket = |name: &str| Some((name.to_owned(), passed.take_named(name).map(PassedFd::into_owned)?));
        let sockets = named.filter_map(socket).collect();
        Ok(Self(NewDisk { name, keys, exports, sockets }))
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let uris = self.0.add(&registry).await.map_err(QmpError::from_daemon_error)?;
        Ok(response(AddedDisk { uris }))
    }
}

#[derive(Debug)]
pub(super) struct AddGroup {
    name: String,
    keys: Map<String, Value>,
}

impl QmpCommand for AddGroup {
    const NAME: &'static str = "x-weir-add-group";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { name: arguments.required("name")?, keys: read_keys(arguments)? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        if registry.objects.contains(&self.name) {
            return Err(QmpError::generic(format!(
                "{}: an object has this name already (choose another)",
                self.name
            )));
        }
        add_objects::add_group(&registry, &self.name, &self.keys)
            .await
            .map_err(QmpError::from_daemon_error)?;
        Ok(json!({}))
    }
}

fn read_keys(arguments: &mut QmpArguments) -> Result<Map<String, Value>, QmpError> {
    match arguments.required("keys")? {
        Value::Object(keys) => Ok(keys),
        _ => Err(QmpError::wrong_type("keys", "object")),
    }
}
