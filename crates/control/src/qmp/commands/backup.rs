//! Backups: `x-weir-backup`, and QEMU's `blockdev-backup`.
//!
//! Source: `BackupCommon` and `BlockdevBackup` of QEMU's `qapi/block-core.json`.

use std::rc::Rc;

use api::StartedJob;
use jobs::backup::BackupBitmap;
use serde_json::{Value, json};

use super::{
    block::find_device_name,
    job_arguments::{BlockJobArguments, ImageJobArguments},
};
use crate::{
    backups::{BackupRequest, start_backup},
    job_target::TargetRequest,
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct StartBackup {
    job: ImageJobArguments,
    bitmap: Option<BackupBitmap>,
}

impl QmpCommand for StartBackup {
    const NAME: &'static str = "x-weir-backup";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let mut job = ImageJobArguments::read(arguments)?;
        let is_incremental = arguments.optional("incremental")?.unwrap_or(false);
        let bitmap: Option<String> = arguments.optional("bitmap")?;
        if is_incremental && bitmap.is_none() {
            return Err(QmpError::rule("bitmap", "is missing: an incremental backup copies what it marks"));
        }
        job.target.is_overlay = arguments.optional("overlay")?.unwrap_or(false);
        if job.target.is_overlay && !is_incremental {
            return Err(QmpError::rule("overlay", "needs 'incremental'"));
        }
        Ok(Self { job, bitmap: bitmap.map(|name| BackupBitmap { name, is_incremental }) })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let Self { job: ImageJobArguments { id, disk, target, settings }, bitmap } = self;
        let request = BackupRequest {
            id,
            disk,
            target: TargetRequest::Image(target),
            bitmap,
            may_add_bitmap: true,
            keeps_marks: false,
            is_auto_dismissed: false,
            settings,
        };
        let id = start_backup(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(response(StartedJob { id }))
    }
}

#[derive(Debug)]
pub(super) struct BlockdevBackup {
    job: BlockJobArguments,
    bitmap: Option<BackupBitmap>,
    keeps_marks: bool,
}

impl QmpCommand for BlockdevBackup {
    const NAME: &'static str = "blockdev-backup";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let syncs = ["full", "incremental", "bitmap"];
        let sync = arguments.choice("sync", &syncs)?.ok_or_else(|| QmpError::missing("sync"))?;
        let modes = ["on-success", "never"];
        let mode = arguments.choice("bitmap-mode", &modes)?.map(|index| modes[index]);
        let bitmap: Option<String> = arguments.optional("bitmap")?;
        let is_incremental = syncs[sync] != "full";
        match (syncs[sync], bitmap.is_some(), mode) {
            ("incremental" | "bitmap", false, _) => {
                return Err(QmpError::rule("bitmap", "is missing: this backup copies what it marks"));
            }
            ("incremental", _, Some("never")) => {
                return Err(QmpError::rule("bitmap-mode", "is 'on-success' for 'incremental'"));
            }
            ("full", true, Some("never")) => {
                return Err(QmpError::rule("bitmap-mode", "'never' has no effect for 'full' (leave it out)"));
            }
            ("bitmap", true, None) => return Err(QmpError::missing("bitmap-mode")),
            ("full", true, None) => return Err(QmpError::missing("bitmap-mode")),
            (_, false, Some(_)) => return Err(QmpError::rule("bitmap-mode", "needs a bitmap")),
            _ => {}
        }
        if arguments.optional::<bool>("compress")? == Some(true) {
            return Err(QmpError::rule("compress", "is always false here"));
        }
        Ok(Self {
            job: BlockJobArguments::read(arguments)?,
            bitmap: bitmap.map(|name| BackupBitmap { name, is_incremental }),
            keeps_marks: mode == Some("never"),
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let Self { job, bitmap, keeps_marks } = self;
        let [disk, target] = [&job.disk, &job.target].map(|node| find_device_name(&registry, node));
        let request = BackupRequest {
            id: Some(job.id),
            disk: disk?,
            target: TargetRequest::Disk(target?),
            bitmap,
            may_add_bitmap: false,
            keeps_marks,
            is_auto_dismissed: job.is_auto_dismissed,
            settings: job.settings,
        };
        start_backup(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(json!({}))
    }
}
