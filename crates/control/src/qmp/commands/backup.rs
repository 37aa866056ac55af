//! Backups: `x-weir-backup`, and QEMU's `blockdev-backup`.
//!
//! Source: `BackupCommon` and `BlockdevBackup` of QEMU's `qapi/block-core.json`.

use std::rc::Rc;

use api::StartedJob;
use block::layer::throttle::BackgroundSettings;
use jobs::backup::BackupBitmap;
use serde_json::{Value, json};
use settings::ImageLocation;
use storage::ImageFormat;

use super::{
    bitmap::disk_of_node,
    job::{GivenSettings, MAX_RATE},
};
use crate::{
    backups::{BackupRequest, BackupTargetRequest, TargetImage, start_backup},
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct StartBackup {
    id: Option<String>,
    disk: String,
    target: TargetImage,
    bitmap: Option<BackupBitmap>,
    settings: GivenSettings,
}

impl QmpCommand for StartBackup {
    const NAME: &'static str = "x-weir-backup";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let formats = [ImageFormat::Raw, ImageFormat::Qcow2];
        let format = arguments.choice("format", &formats.map(ImageFormat::name))?;
        let target: String = arguments.required("target")?;
        let target: ImageLocation =
            target.parse().map_err(|error| QmpError::rule("target", format_args!("{error}")))?;
        if target.path().is_none() && !target.is_remote() {
            let kinds =
                "is no target (use a file, a block device, the URI of an NBD export, or rbd:POOL/IMAGE)";
            return Err(QmpError::rule("target", format_args!("{kinds}")));
        }
        let is_incremental = arguments.optional("incremental")?.unwrap_or(false);
        let bitmap: Option<String> = arguments.optional("bitmap")?;
        if is_incremental && bitmap.is_none() {
            return Err(QmpError::rule("bitmap", "is missing: an incremental backup copies what it marks"));
        }
        let is_overlay = arguments.optional("overlay")?.unwrap_or(false);
        if is_overlay && !is_incremental {
            return Err(QmpError::rule("overlay", "needs 'incremental'"));
        }
        let name: Option<String> = arguments.optional("fdname")?;
        let descriptor = name.map(|name| arguments.descriptors().require_named(&name)).transpose()?;
        Ok(Self {
            id: arguments.optional("id")?,
            disk: arguments.required("name")?,
            target: TargetImage {
                location: target,
                descriptor,
                format: format.map(|index| formats[index]),
                is_new: arguments.optional("new")?.unwrap_or(false),
                is_overlay,
            },
            bitmap: bitmap.map(|name| BackupBitmap { name, is_incremental }),
            settings: GivenSettings::read(arguments)?,
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let request = BackupRequest {
            id: self.id,
            disk: self.disk,
            target: BackupTargetRequest::Image(self.target),
            bitmap: self.bitmap,
            may_add_bitmap: true,
            keeps_marks: false,
            is_auto_dismissed: false,
            settings: self.settings.over(BackgroundSettings::default()),
        };
        let id = start_backup(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(response(StartedJob { id }))
    }
}

#[derive(Debug)]
pub(super) struct BlockdevBackup {
    id: String,
    disk: String,
    target: String,
    bitmap: Option<BackupBitmap>,
    keeps_marks: bool,
    is_auto_dismissed: bool,
    bps_total: u64,
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
        for (key, fixed) in [("compress", false), ("auto-finalize", true)] {
            if arguments.optional::<bool>(key)?.is_some_and(|value| value != fixed) {
                return Err(QmpError::rule(key, format_args!("is always {fixed} here")));
            }
        }
        for key in ["on-source-error", "on-target-error"] {
            arguments.choice(key, &["report"])?;
        }
        let disk: String = arguments.required("device")?;
        Ok(Self {
            // As in QEMU.
            id: arguments.optional("job-id")?.unwrap_or_else(|| disk.clone()),
            disk,
            target: arguments.required("target")?,
            bitmap: bitmap.map(|name| BackupBitmap { name, is_incremental }),
            keeps_marks: mode == Some("never"),
            is_auto_dismissed: arguments.optional("auto-dismiss")?.unwrap_or(true),
            bps_total: arguments.number("speed", 0..=MAX_RATE)?.unwrap_or(0),
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        for node in [&self.disk, &self.target] {
            disk_of_node(&registry, node)?;
        }
        let request = BackupRequest {
            id: Some(self.id),
            disk: self.disk,
            target: BackupTargetRequest::Disk(self.target),
            bitmap: self.bitmap,
            may_add_bitmap: false,
            keeps_marks: self.keeps_marks,
            is_auto_dismissed: self.is_auto_dismissed,
            settings: BackgroundSettings { bps_total: self.bps_total, ..BackgroundSettings::default() },
        };
        start_backup(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(json!({}))
    }
}
