//! Mirrors: `x-weir-mirror`, and QEMU's `blockdev-mirror`.
//!
//! Source: `BlockdevMirror` of QEMU's `qapi/block-core.json`.

use std::rc::Rc;

use api::StartedJob;
use serde_json::{Value, json};

use super::{
    block::find_device_name,
    job_arguments::{BlockJobArguments, ImageJobArguments},
};
use crate::{
    job_target::TargetRequest,
    mirrors::{MirrorRequest, start_mirror},
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct StartMirror(ImageJobArguments);

impl QmpCommand for StartMirror {
    const NAME: &'static str = "x-weir-mirror";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        ImageJobArguments::read(arguments).map(Self)
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let ImageJobArguments { id, disk, target, settings } = self.0;
        let target = TargetRequest::Image(target);
        let request = MirrorRequest { id, disk, target, is_auto_dismissed: false, settings };
        let id = start_mirror(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(response(StartedJob { id }))
    }
}

#[derive(Debug)]
pub(super) struct BlockdevMirror(BlockJobArguments);

impl QmpCommand for BlockdevMirror {
    const NAME: &'static str = "blockdev-mirror";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let syncs = ["full", "top", "none", "incremental", "bitmap"];
        let sync = arguments.choice("sync", &syncs)?.ok_or_else(|| QmpError::missing("sync"))?;
        let refused = match syncs[sync] {
            "full" => None,
            "top" => Some("'top' is not supported: a mirror copies the backing files too (use 'full')"),
            "none" => Some("'none' is not supported: the target would lack the present content (use 'full')"),
            _ => Some("is 'full' for a mirror (use `blockdev-backup` with a bitmap)"),
        };
        if let Some(why) = refused {
            return Err(QmpError::rule("sync", format_args!("{why}")));
        }
        if arguments.choice("copy-mode", &["background", "write-blocking"])? == Some(1) {
            let why = "'write-blocking' is not supported: a target never delays clients (use 'background')";
            return Err(QmpError::rule("copy-mode", format_args!("{why}")));
        }
        BlockJobArguments::read(arguments).map(Self)
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let BlockJobArguments { id, disk, target, is_auto_dismissed, settings } = self.0;
        let [disk, target] = [&disk, &target].map(|node| find_device_name(&registry, node));
        let (disk, target) = (disk?, TargetRequest::Disk(target?));
        let request = MirrorRequest { id: Some(id), disk, target, is_auto_dismissed, settings };
        start_mirror(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(json!({}))
    }
}
