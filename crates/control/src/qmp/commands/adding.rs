//! `x-weir-add-disk`: a disk with its settings and all its exports, whole or not at all.
//!
//! QEMU's commands add one thing each: where a later one fails, the disk has been told of already.

use std::rc::Rc;

use serde_json::{Value, json};

use super::{
    block::BlockdevAdd,
    export::BlockExportAdd,
    object::{self, ObjectAdd},
    weir::{self, Set},
};
use crate::{
    qmp::{arguments::Arguments, command::Command, error::Error, json::shown},
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct AddDisk {
    /// The passphrase, kept until the image is open.
    secret: Option<ObjectAdd>,
    node: BlockdevAdd,
    settings: Option<Set>,
    exports: Vec<BlockExportAdd>,
}

impl Command for AddDisk {
    const NAME: &'static str = "x-weir-add-disk";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        let mut read = None;
        if let Some(mut secret) = arguments.object("secret")? {
            read = Some(object::read_secret(&mut secret)?);
            secret.finish()?;
        }
        let mut node = arguments.object("node")?.ok_or_else(|| Error::missing("node"))?;
        // As in the config file: volumes are often called by 36 digits and hyphens.
        let name: Option<String> = node.optional("node-name")?;
        if let Some(name) = &name {
            settings::check::named(name)
                .map_err(|rule| Error::generic(format!("disk {}: {rule}", shown(name))))?;
        }
        let added = BlockdevAdd::read_as(&mut node, name)?;
        if !added.has_storage() {
            let rule = "is to be described here; what lies on another node is for `blockdev-add`";
            return Err(Error::rule(&node.name_of("file"), rule));
        }
        node.finish()?;
        let mut settings = None;
        if let Some(mut own) = arguments.object("settings")? {
            settings = Some(Set::read_of(&mut own, added.name().to_owned())?);
            own.finish()?;
        }
        let mut exports = Vec::new();
        for mut export in arguments.objects("exports")? {
            let read = BlockExportAdd::read(&mut export)?;
            if read.node() != added.name() {
                return Err(Error::rule(&export.name_of("node-name"), "is another disk than the one to add"));
            }
            export.finish()?;
            exports.push(read);
        }
        Ok(Self { secret: read, node: added, settings, exports })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let Self { secret, node, settings, exports } = self;
        let name = node.name().to_owned();
        // QEMU's words for that are those of `blockdev-add`.
        registry.check_name(&name)?;
        let _arrival = registry.arrival(&name)?;
        let id = secret.as_ref().map(|secret| secret.id().to_owned());
        if let Some(secret) = secret {
            secret.run(Rc::clone(&registry)).await?;
        }
        let opened = node.run(Rc::clone(&registry)).await;
        if let Some(id) = id {
            registry.objects.remove(&id);
        }
        opened?;
        match complete(&registry, settings, exports).await {
            Ok(uris) => Ok(json!({ "uris": uris })),
            Err(error) => {
                if let Err(left) = registry.take_back(&name).await {
                    return Err(Error::generic(format!("{error}; and the disk stays: {left}")));
                }
                weir::unsettle(&registry);
                Err(error)
            }
        }
    }
}

/// How clients call it.
async fn complete(
    registry: &Rc<Registry>,
    settings: Option<Set>,
    exports: Vec<BlockExportAdd>,
) -> Result<Vec<String>, Error> {
    if let Some(settings) = settings {
        settings.set_disk(registry).await?;
    }
    let mut added = Vec::new();
    for export in exports {
        added.push(export.add(registry).await?);
    }
    let mut uris = Vec::new();
    for one in added {
        one.log();
        uris.extend(one.uris(registry)?);
    }
    Ok(uris)
}
