//! Descriptors passed with a command: `getfd`, `closefd`, `add-fd`, `remove-fd`, `query-fdsets`.
//!
//! Source: QEMU's `qapi/misc.json`.

use std::{
    os::fd::{AsFd as _, AsRawFd as _},
    rc::Rc,
};

use reactor::operation::PassedFd;
use serde_json::{Value, json};

use crate::{
    qmp::{arguments::QmpArguments, command::QmpCommand, descriptors::ClientDescriptors, error::QmpError},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct GetFd {
    name: String,
    descriptor: PassedFd,
    passed: Rc<ClientDescriptors>,
}

impl QmpCommand for GetFd {
    const NAME: &'static str = "getfd";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let passed = arguments.descriptors();
        Ok(Self { descriptor: passed.take_arrived()?, name: arguments.required("fdname")?, passed })
    }

    async fn run(self, _: Rc<Registry>) -> Result<Value, QmpError> {
        self.passed.insert_named(&self.name, self.descriptor)?;
        Ok(json!({}))
    }
}

#[derive(Debug)]
pub(super) struct CloseFd {
    name: String,
    passed: Rc<ClientDescriptors>,
}

impl QmpCommand for CloseFd {
    const NAME: &'static str = "closefd";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { name: arguments.required("fdname")?, passed: arguments.descriptors() })
    }

    async fn run(self, _: Rc<Registry>) -> Result<Value, QmpError> {
        drop(self.passed.require_named(&self.name)?);
        Ok(json!({}))
    }
}

#[derive(Debug)]
pub(super) struct AddFd {
    set: Option<u64>,
    opaque: Option<String>,
    descriptor: PassedFd,
}

impl QmpCommand for AddFd {
    const NAME: &'static str = "add-fd";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let descriptor = arguments.descriptors().take_arrived()?;
        let set = arguments.number("fdset-id", 0..=i64::MAX as u64)?;
        Ok(Self { set, opaque: arguments.optional("opaque")?, descriptor })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let number = self.descriptor.as_fd().as_raw_fd();
        let set = registry.objects.descriptors.add(self.set, self.descriptor, self.opaque);
        let set = set.map_err(QmpError::generic)?;
        Ok(json!({ "fdset-id": set, "fd": number }))
    }
}

#[derive(Debug)]
pub(super) struct RemoveFd {
    set: u64,
    descriptor: Option<i64>,
}

impl QmpCommand for RemoveFd {
    const NAME: &'static str = "remove-fd";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let descriptor = arguments.number("fd", 0..=i64::MAX as u64)?;
        // At most `i64::MAX` by the range above.
        let descriptor = descriptor.map(|number| number as i64);
        Ok(Self { set: arguments.required("fdset-id")?, descriptor })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        if registry.objects.descriptors.remove(self.set, self.descriptor) {
            return Ok(json!({}));
        }
        let name = match self.descriptor {
            Some(number) => format!("fdset-id:{}, fd:{number}", self.set),
            None => format!("fdset-id:{}", self.set),
        };
        Err(QmpError::generic(format!("File descriptor named '{name}' not found")))
    }
}

query!(QueryFdSets, "query-fdsets", |registry| {
    let sets = registry.objects.descriptors.list(|(set, members)| {
        let members = members.iter().map(|member| {
            let mut info = json!({ "fd": member.number() });
            if let Some(opaque) = &member.opaque {
                info["opaque"] = json!(opaque);
            }
            info
        });
        json!({ "fdset-id": set, "fds": members.collect::<Value>() })
    });
    Value::Array(sets)
});
