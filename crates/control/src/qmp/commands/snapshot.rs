//! Snapshots: `x-weir-snapshot`, QEMU's commands for snapshots, and `transaction` with these.
//!
//! A snapshot that is no part of a transaction is one of a single action. A disk keeps its name;
//! the names of the nodes that snapshots have put over it name it too, in these commands.
//!
//! Source: `BlockdevSnapshot`, `BlockdevSnapshotSync`, `TransactionAction` of QEMU's qapi/.

use std::{path::PathBuf, rc::Rc};

use image::qcow2::snapshot::InternalSnapshot;
use nix::time::{ClockId, clock_gettime};
use policy::time::{Duration, Instant};
use reactor::operation::PassedFd;
use serde_json::{Value, json};
use settings::ImageLocation;

use super::block::find_device;
use crate::{
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::QmpError,
        json::excerpt,
    },
    registry::Registry,
    snapshots::{self, CreatedOverlay, SnapshotKind, SnapshotRequest, take_snapshots},
};

/// Actions of `transaction`.
const ACTIONS: [&str; 4] =
    ["abort", "blockdev-snapshot", "blockdev-snapshot-internal-sync", "blockdev-snapshot-sync"];

/// An action of a transaction.
#[derive(Debug)]
enum SnapshotAction {
    Abort,
    /// The disk continues in the image of an existing node.
    Node {
        node: String,
        overlay: String,
    },
    Internal {
        device: String,
        name: String,
    },
    /// The disk continues in a file.
    File {
        device: String,
        path: PathBuf,
        node: Option<String>,
        is_created: bool,
    },
}

impl SnapshotAction {
    fn read(action: &str, arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(match action {
            "blockdev-snapshot" => {
                Self::Node { node: arguments.required("node")?, overlay: arguments.required("overlay")? }
            }
            "blockdev-snapshot-internal-sync" => {
                let device = arguments.required("device")?;
                let name: String = arguments.required("name")?;
                if name.is_empty() {
                    return Err(QmpError::generic("Name is empty"));
                }
                Self::Internal { device, name }
            }
            "blockdev-snapshot-sync" => {
                let (device, node) = (arguments.optional("device")?, arguments.optional("node-name")?);
                let device = device.or(node).ok_or_else(|| QmpError::missing("device"))?;
                if arguments.choice("format", &["qcow2", "raw"])? == Some(1) {
                    return Err(QmpError::rule("format", "must be 'qcow2': an overlay has a backing file"));
                }
                let mode = arguments.choice("mode", &["absolute-paths", "existing"])?;
                Self::File {
                    device,
                    path: arguments.required::<String>("snapshot-file")?.into(),
                    node: arguments.optional("snapshot-node-name")?,
                    is_created: mode != Some(1),
                }
            }
            _ => Self::Abort,
        })
    }
}

/// Performs all actions at one instant, or none.
async fn perform(registry: &Rc<Registry>, actions: Vec<SnapshotAction>) -> Result<(), QmpError> {
    let (mut requests, mut created) = (Vec::new(), Vec::new());
    let is_aborted = actions.iter().any(|action| matches!(action, SnapshotAction::Abort));
    let result = async {
        for action in actions {
            requests.extend(request(registry, action, &mut created).await?);
        }
        if is_aborted {
            return Err(QmpError::generic("Transaction aborted using Abort action"));
        }
        take_snapshots(registry, requests, Instant::MAX).await.map(drop).map_err(QmpError::from_daemon_error)
    };
    let result = result.await;
    for overlay in created {
        if result.is_err() {
            overlay.remove().await;
        }
    }
    result
}

async fn request(
    registry: &Registry,
    action: SnapshotAction,
    created: &mut Vec<CreatedOverlay>,
) -> Result<Option<SnapshotRequest>, QmpError> {
    let (running, kind) = match action {
        SnapshotAction::Abort => return Ok(None),
        SnapshotAction::Node { node, overlay } => {
            let running = find_device(registry, &node)?;
            find_device(registry, &overlay)?;
            (running, SnapshotKind::Node(overlay))
        }
        SnapshotAction::Internal { device, name } => {
            (find_device(registry, &device)?, SnapshotKind::Internal(name))
        }
        SnapshotAction::File { device, path, node, is_created } => {
            let running = find_device(registry, &device)?;
            if let Some(node) = &node {
                registry.check_name(node).map_err(|_| {
                    QmpError::generic(format!("Duplicate nodes with node-name='{}'", excerpt(node)))
                })?;
            }
            let overlay: ImageLocation = format!("file:{}", path.display())
                .parse()
                .map_err(|error| QmpError::rule("snapshot-file", format_args!("{error}")))?;
            if is_created {
                let overlay = CreatedOverlay::create(registry, &running, path).await;
                created.push(overlay.map_err(QmpError::from_daemon_error)?);
            }
            (running, SnapshotKind::External { overlay, descriptor: None, node })
        }
    };
    Ok(Some(SnapshotRequest { disk: running.disk.name().to_string(), kind }))
}

/// Defines a command of one action.
macro_rules! snapshot_command {
    ($type:ident, $name:literal) => {
        #[derive(Debug)]
        pub(super) struct $type(SnapshotAction);

        impl QmpCommand for $type {
            const NAME: &'static str = $name;

            fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
                SnapshotAction::read(Self::NAME, arguments).map(Self)
            }

            async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
                perform(&registry, vec![self.0]).await?;
                Ok(json!({}))
            }
        }
    };
}

snapshot_command!(BlockdevSnapshot, "blockdev-snapshot");
snapshot_command!(BlockdevSnapshotSync, "blockdev-snapshot-sync");
snapshot_command!(BlockdevSnapshotInternalSync, "blockdev-snapshot-internal-sync");

#[derive(Debug)]
pub(super) struct Transaction(Vec<SnapshotAction>);

impl QmpCommand for Transaction {
    const NAME: &'static str = "transaction";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        if let Some(mut properties) = arguments.object("properties")? {
            // Jobs could complete together; no action here starts one.
            if properties.choice("completion-mode", &["individual", "grouped"])? == Some(1) {
                let rule = "cannot be 'grouped': no action of a transaction starts a job here";
                return Err(QmpError::rule("properties.completion-mode", rule));
            }
            properties.finish()?;
        }
        let mut actions = Vec::new();
        for mut action in arguments.objects("actions")? {
            let key = action.full_name("type");
            let kind = action.choice("type", &ACTIONS)?.ok_or_else(|| QmpError::missing(&key))?;
            let key = action.full_name("data");
            let mut data = action.object("data")?.ok_or_else(|| QmpError::missing(&key))?;
            actions.push(SnapshotAction::read(ACTIONS[kind], &mut data)?);
            data.finish()?;
            action.finish()?;
        }
        Ok(Self(actions))
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        perform(&registry, self.0).await?;
        Ok(json!({}))
    }
}

#[derive(Debug)]
pub(super) struct BlockdevSnapshotDeleteInternalSync {
    device: String,
    id: Option<String>,
    name: Option<String>,
}

impl QmpCommand for BlockdevSnapshotDeleteInternalSync {
    const NAME: &'static str = "blockdev-snapshot-delete-internal-sync";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let (id, name) = (arguments.optional("id")?, arguments.optional("name")?);
        if id.is_none() && name.is_none() {
            return Err(QmpError::generic("Name or id must be provided"));
        }
        Ok(Self { device: arguments.required("device")?, id, name })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let Self { device, id, name } = self;
        let disk = find_device(&registry, &device)?.disk.name().to_string();
        let is_wanted = |snapshot: &InternalSnapshot| {
            id.as_ref().is_none_or(|id| snapshot.id() == *id)
                && name.as_ref().is_none_or(|name| snapshot.name() == *name)
        };
        let deleted = snapshots::delete_internal(&registry, &disk, is_wanted).await;
        let deleted = deleted.map_err(QmpError::from_daemon_error)?.ok_or_else(|| {
            let shown = |text: &Option<String>| text.as_deref().map(excerpt).unwrap_or_default();
            QmpError::generic(format!(
                "Snapshot with id '{}' and name '{}' does not exist on device '{}'",
                shown(&id),
                shown(&name),
                excerpt(&device)
            ))
        })?;
        Ok(snapshot_info(&deleted))
    }
}

/// QAPI's `SnapshotInfo`.
fn snapshot_info(snapshot: &InternalSnapshot) -> Value {
    json!({
        "id": snapshot.id(),
        "name": snapshot.name(),
        "vm-state-size": snapshot.vm_state_bytes,
        "date-sec": snapshot.date_s,
        "date-nsec": snapshot.date_ns,
        "vm-clock-sec": snapshot.vm_clock_ns / 1_000_000_000,
        "vm-clock-nsec": snapshot.vm_clock_ns % 1_000_000_000,
    })
}

/// Uptime of this host in milliseconds, as in `/proc/uptime`.
fn uptime_ms() -> u64 {
    let uptime = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Into::into);
    u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX)
}

/// Snapshots of one instant, with overlays that the client has created and opened.
#[derive(Debug)]
pub(super) struct TakeSnapshots {
    requests: Vec<SnapshotRequest>,
    /// After this instant no snapshot is taken.
    deadline: Instant,
}

impl QmpCommand for TakeSnapshots {
    const NAME: &'static str = "x-weir-snapshot";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let mut requests = Vec::new();
        for mut disk in arguments.objects("snapshots")? {
            let name = disk.required("name")?;
            let overlay: Option<String> = disk.optional("overlay")?;
            let internal: Option<String> = disk.optional("internal")?;
            let file: Option<String> = disk.optional("fdname")?;
            let kind = match (overlay, internal) {
                (Some(overlay), None) => {
                    let key = disk.full_name("overlay");
                    let overlay: ImageLocation =
                        overlay.parse().map_err(|error| QmpError::rule(&key, format_args!("{error}")))?;
                    let descriptor: Option<PassedFd> =
                        file.map(|file| disk.descriptors().require_named(&file)).transpose()?;
                    SnapshotKind::External { overlay, descriptor, node: None }
                }
                (None, Some(internal)) if !internal.is_empty() => SnapshotKind::Internal(internal),
                _ => {
                    let rule = "or 'internal' must be given, and not both";
                    return Err(QmpError::rule(&disk.full_name("overlay"), rule));
                }
            };
            disk.finish()?;
            requests.push(SnapshotRequest { disk: name, kind });
        }
        if requests.is_empty() {
            return Err(QmpError::rule("snapshots", "names no disk"));
        }
        let from_now: Option<u64> = arguments.optional("deadline-ms")?;
        let uptime: Option<u64> = arguments.optional("deadline-uptime-ms")?;
        let left = uptime.map(|uptime| uptime.saturating_sub(uptime_ms()));
        let left_ms = from_now.into_iter().chain(left).min();
        let deadline = left_ms.map_or(Instant::MAX, |left| reactor::now() + Duration::from_millis(left));
        Ok(Self { requests, deadline })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let Self { requests, deadline } = self;
        take_snapshots(&registry, requests, deadline).await.map(response).map_err(QmpError::from_daemon_error)
    }
}
