//! Control sockets of a daemon: connects the registry, the commands and the server. Changes of the
//! registry are emitted as QMP events here.

use std::{cell::RefCell, rc::Rc};

use api::JobReport;
use policy::request::Direction;
use reactor::{JoinHandle, operation::Fd};
use serde_json::{Value, json};

use super::{
    command::CommandTable,
    commands::TABLE,
    event::QmpEvents,
    server::{QmpServer, ShutdownCause},
};
use crate::{
    change::RegistryChange,
    listen::{BoundListener, SocketFile},
    registry::Registry,
};

/// Control sockets.
pub struct ControlSockets {
    server: Rc<QmpServer>,
    /// Accepting tasks. Dropping one stops the accepting and removes its socket file.
    accepting: RefCell<Vec<(JoinHandle<()>, Option<SocketFile>)>>,
    registry: Rc<Registry>,
    _telling: JoinHandle<()>,
}

impl ControlSockets {
    /// Accepts clients from now on.
    pub fn start(registry: &Rc<Registry>, listeners: Vec<BoundListener>) -> Self {
        let events = QmpEvents::default();
        let commands = Rc::new(CommandTable { table: TABLE, registry: Rc::clone(registry) });
        let server = QmpServer::new(commands, events.clone());
        let qmp_events = events.clone();
        let subscription =
            registry.events.for_each_later(move |event| qmp_events.emit("X_WEIR_EVENT", event.to_json()));
        registry.listen(move |change| emit_change(&events, change));
        let accept = |BoundListener { socket, authority, file }| {
            let (server, address) = (Rc::clone(&server), authority.to_string());
            let socket = Fd::from(socket);
            let path = file.as_ref().map(|file| file.path().to_owned());
            // An upgrade transfers control sockets with a path.
            registry.lifecycle.control.borrow_mut().extend(path.map(|path| (path, socket.clone())));
            let accepting = reactor::spawn_joinable(async move {
                // Not fatal: the disks stay in service without control sockets.
                if let Err(error) = server.listen(socket).await {
                    tracing::error!(
                        address, %error,
                        "QMP clients cannot be accepted any more (restart weir)"
                    );
                }
            });
            (accepting, file)
        };
        let accepting = RefCell::new(listeners.into_iter().map(accept).collect());
        Self { server, accepting, registry: Rc::clone(registry), _telling: subscription }
    }

    /// Stops accepting, reports the reason to every client, and returns after the last has
    /// disconnected.
    pub async fn stop(&self, ending: ShutdownCause) {
        self.accepting.take();
        self.registry.lifecycle.control.take();
        self.server.stop(ending).await;
    }
}

fn emit_change(events: &QmpEvents, change: &RegistryChange) {
    match change {
        RegistryChange::ExportDeleted { id } => events.emit("BLOCK_EXPORT_DELETED", json!({ "id": id })),
        RegistryChange::Failed { disk, failure } => {
            let nospace = failure.error == reactor::error::Error::NO_SPACE;
            events.emit(
                "BLOCK_IO_ERROR",
                json!({
                    // weir has no guest device; QEMU uses an empty path for a node without one.
                    "qom-path": "",
                    "device": disk,
                    "node-name": disk,
                    "operation": match failure.direction { Direction::Read => "read", Direction::Write => "write" },
                    "action": if failure.stops { "stop" } else { "report" },
                    "nospace": nospace,
                    "reason": failure.error.to_string(),
                }),
            );
        }
        RegistryChange::Stopped => events.emit("STOP", Value::Null),
        RegistryChange::Resumed { all: true } => events.emit("RESUME", Value::Null),
        // QEMU has no event for these.
        RegistryChange::Listed { .. } | RegistryChange::Reloaded | RegistryChange::Resumed { all: false } => {
        }
        RegistryChange::JobChanged { id, state } => {
            events.emit("JOB_STATUS_CHANGE", json!({ "id": id, "status": state }));
        }
        RegistryChange::JobIoFailed { id, direction } => {
            let operation = if *direction == Direction::Read { "read" } else { "write" };
            let data = json!({ "device": id, "operation": operation, "action": "report" });
            events.emit("BLOCK_JOB_ERROR", data);
        }
        RegistryChange::JobReady { job } => events.emit("BLOCK_JOB_READY", block_job(job)),
        RegistryChange::JobEnded { job } => {
            let name = if job.is_cancelled { "BLOCK_JOB_CANCELLED" } else { "BLOCK_JOB_COMPLETED" };
            let mut data = block_job(job);
            if let Some(error) = &job.error {
                data["error"] = error.as_str().into();
            }
            events.emit(name, data);
        }
        RegistryChange::SettingsChanged { name } => {
            events.emit("X_WEIR_SETTINGS_CHANGED", json!({ "name": name }));
        }
    }
}

/// Members of QEMU's events of block jobs.
fn block_job(job: &JobReport) -> Value {
    json!({
        "type": job.kind,
        "device": job.id,
        "len": job.total_bytes,
        "offset": job.done_bytes,
        "speed": job.bps_total.unwrap_or(0),
    })
}
