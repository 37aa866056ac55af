//! Streams: `x-weir-stream`, and QEMU's `block-stream`.
//!
//! Source: `block-stream` of QEMU's `qapi/block-core.json`.

use std::rc::Rc;

use api::StartedJob;
use block::layer::throttle::BackgroundSettings;
use serde_json::{Value, json};

use super::{
    block::find_device_name,
    job::{GivenSettings, MAX_RATE},
};
use crate::{
    chains::{StreamRequest, start_stream},
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct StartStream {
    id: Option<String>,
    disk: String,
    base: Option<String>,
    settings: GivenSettings,
}

impl QmpCommand for StartStream {
    const NAME: &'static str = "x-weir-stream";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self {
            id: arguments.optional("id")?,
            disk: arguments.required("name")?,
            base: arguments.optional("base")?,
            settings: GivenSettings::read(arguments)?,
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let request = StreamRequest {
            id: self.id,
            disk: self.disk,
            base: self.base,
            is_auto_dismissed: false,
            settings: self.settings.over(BackgroundSettings::default()),
        };
        let id = start_stream(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(response(StartedJob { id }))
    }
}

#[derive(Debug)]
pub(super) struct BlockStream {
    id: Option<String>,
    device: String,
    base: Option<String>,
    is_auto_dismissed: bool,
    bps_total: u64,
}

impl QmpCommand for BlockStream {
    const NAME: &'static str = "block-stream";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        for key in ["base-node", "bottom"] {
            if arguments.optional::<String>(key)?.is_some() {
                let why = "backing files have no node names here (give the file as 'base')";
                return Err(QmpError::rule(key, why));
            }
        }
        for key in ["backing-file", "filter-node-name"] {
            if arguments.optional::<String>(key)?.is_some() {
                return Err(QmpError::rule(key, "is not supported (leave it out)"));
            }
        }
        for (key, fixed) in [("backing-mask-protocol", false), ("auto-finalize", true)] {
            if arguments.optional::<bool>(key)?.is_some_and(|value| value != fixed) {
                return Err(QmpError::rule(key, format_args!("is always {fixed} here")));
            }
        }
        arguments.choice("on-error", &["report"])?;
        Ok(Self {
            id: arguments.optional("job-id")?,
            device: arguments.required("device")?,
            base: arguments.optional("base")?,
            is_auto_dismissed: arguments.optional("auto-dismiss")?.unwrap_or(true),
            bps_total: arguments.number("speed", 0..=MAX_RATE)?.unwrap_or(0),
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let disk = find_device_name(&registry, &self.device)?;
        let request = StreamRequest {
            // As in QEMU.
            id: Some(self.id.unwrap_or(self.device)),
            disk,
            base: self.base,
            is_auto_dismissed: self.is_auto_dismissed,
            settings: BackgroundSettings { bps_total: self.bps_total, ..BackgroundSettings::default() },
        };
        start_stream(&registry, request).await.map_err(QmpError::from_daemon_error)?;
        Ok(json!({}))
    }
}
