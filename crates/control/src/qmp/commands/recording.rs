//! `weir record`: recordings of disks, to a descriptor that the client passed with `getfd`.

use std::{os::fd::OwnedFd, rc::Rc};

use api::{RecordingStatus, StartedRecording};
use serde_json::Value;

use crate::{
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
    },
    recording::RunningRecording,
    registry::Registry,
};

#[derive(Debug)]
pub(super) struct RecordStart {
    names: Vec<String>,
    file: OwnedFd,
}

impl QmpCommand for RecordStart {
    const NAME: &'static str = "x-weir-record-start";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let name: String = arguments.required("fdname")?;
        let selected = arguments.optional("of")?.unwrap_or_default();
        Ok(Self { names: selected, file: arguments.descriptors().require_named(&name)?.into_owned() })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        for name in &self.names {
            if registry.disks.get(name).is_err() && registry.groups.get(name).is_err() {
                let rule = "no disk and no group has this name (`weir status` lists them)";
                return Err(QmpError::generic(format!("{name}: {rule}")));
            }
        }
        let id = registry.recordings.begin(self.names, self.file).await;
        let id = id.map_err(|error| QmpError::generic(format!("{error:#}")))?;
        Ok(response(StartedRecording { id }))
    }
}

#[derive(Debug)]
pub(super) struct RecordStop {
    id: u64,
}

impl QmpCommand for RecordStop {
    const NAME: &'static str = "x-weir-record-stop";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { id: arguments.number("id", 0..=u64::MAX)?.ok_or_else(|| QmpError::missing("id"))? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let running = registry.recordings.running();
        let is_own =
            |(id, running): &(u64, Rc<RunningRecording>)| *id == self.id && running.directory.is_some();
        if running.iter().any(is_own) {
            let rule =
                "belongs to the daemon (remove `record` from its config or command line, and restart it)";
            return Err(QmpError::generic(format!("recording {} {rule}", self.id)));
        }
        let recording = registry.recordings.end(self.id).await;
        let recording =
            recording.ok_or_else(|| QmpError::generic(format!("there is no recording {}", self.id)))?;
        Ok(response(recording_status(self.id, &recording)))
    }
}

query!(QueryRecordings, "x-weir-query-recordings", |registry| {
    let running = registry.recordings.running();
    response(running.iter().map(|(id, running)| recording_status(*id, running)).collect::<Vec<_>>())
});

fn recording_status(id: u64, running: &RunningRecording) -> RecordingStatus {
    let progress = &running.progress;
    RecordingStatus {
        id,
        of: running.names.clone(),
        requests: progress.requests(),
        lost: progress.dropped(),
        bytes: progress.bytes(),
        directory: running.directory.as_ref().map(|path| path.display().to_string()),
        error: progress.error(),
    }
}
