//! Arguments that the commands which start jobs share.
//!
//! Source: `BackupCommon` and `BlockdevMirror` of QEMU's `qapi/block-core.json`.

use std::path::absolute;

use block::layer::throttle::BackgroundSettings;
use settings::ImageLocation;
use storage::ImageFormat;

use super::job::{GivenSettings, MAX_RATE};
use crate::{
    job_target::TargetImage,
    qmp::{arguments::QmpArguments, error::QmpError},
};

/// Arguments of `x-weir-backup` and `x-weir-mirror`.
#[derive(Debug)]
pub(super) struct ImageJobArguments {
    pub(super) id: Option<String>,
    pub(super) disk: String,
    pub(super) target: TargetImage,
    pub(super) settings: BackgroundSettings,
}

impl ImageJobArguments {
    pub(super) fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
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
        // A reader of the job's status has another working directory.
        let location = match absolute(".") {
            Ok(here) => target.relative_to(&here),
            Err(_) => target,
        };
        let name: Option<String> = arguments.optional("fdname")?;
        let descriptor = name.map(|name| arguments.descriptors().require_named(&name)).transpose()?;
        Ok(Self {
            id: arguments.optional("id")?,
            disk: arguments.required("name")?,
            target: TargetImage {
                location,
                descriptor,
                format: format.map(|index| formats[index]),
                is_new: arguments.optional("new")?.unwrap_or(false),
                is_overlay: false,
            },
            settings: GivenSettings::read(arguments)?.over(BackgroundSettings::default()),
        })
    }
}

/// Arguments of `blockdev-backup` and `blockdev-mirror`.
#[derive(Debug)]
pub(super) struct BlockJobArguments {
    pub(super) id: String,
    pub(super) disk: String,
    pub(super) target: String,
    pub(super) is_auto_dismissed: bool,
    pub(super) settings: BackgroundSettings,
}

impl BlockJobArguments {
    pub(super) fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        if arguments.optional::<bool>("auto-finalize")? == Some(false) {
            return Err(QmpError::rule("auto-finalize", "is always true here"));
        }
        for key in ["on-source-error", "on-target-error"] {
            arguments.choice(key, &["report"])?;
        }
        let disk: String = arguments.required("device")?;
        let bps_total = arguments.number("speed", 0..=MAX_RATE)?.unwrap_or(0);
        Ok(Self {
            // As in QEMU.
            id: arguments.optional("job-id")?.unwrap_or_else(|| disk.clone()),
            disk,
            target: arguments.required("target")?,
            is_auto_dismissed: arguments.optional("auto-dismiss")?.unwrap_or(true),
            settings: BackgroundSettings { bps_total, ..BackgroundSettings::default() },
        })
    }
}
