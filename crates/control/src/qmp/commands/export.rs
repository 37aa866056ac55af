//! Exports. QEMU has one NBD server, weir any number; `x-weir-listen` selects one by its address,
//! unless exactly one is for disks without explicit exports.

use std::{os::fd::OwnedFd, path::Path, rc::Rc};

use export::nbd::Removal;
use policy::access::{AccessRules, NameRules, Network, NetworkRules};
use reactor::operation::PassedFd;
use serde_json::{Value, json};
use settings::ExportTarget;

use super::endpoint;
use crate::openers::DeviceOpeners;
use crate::{
    bitmaps,
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError, identifier, json::excerpt},
    registry::{NewNbdExport, Registry, RegistryError, RunningDisk, RunningEndpoint as Reach},
    running_server::RunningServer,
};

/// Maximum length of a name or description in bytes: the limit of the NBD protocol ("Values",
/// strings).
const MAX_STRING_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct BlockExportAdd {
    id: String,
    node: String,
    writable: bool,
    kind: ExportArguments,
    /// False for a command of the command line.
    is_sent: bool,
}

#[derive(Debug)]
enum ExportArguments {
    Nbd(NbdExportArguments),
    /// With the socket that was passed for it, if there is one.
    Own(ExportTarget, Option<OwnedFd>),
}

#[derive(Debug)]
struct NbdExportArguments {
    name: String,
    description: String,
    access: AccessRules,
    bitmaps: Vec<String>,
    listen: Option<String>,
}

impl QmpCommand for BlockExportAdd {
    const NAME: &'static str = "block-export-add";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let is_sent = arguments.sent_json().is_some();
        let types = ["nbd"].into_iter().chain(endpoint::TYPES).collect::<Vec<_>>();
        let kind = arguments.choice("type", &types)?.ok_or_else(|| QmpError::missing("type"))?;
        let id: String = arguments.required("id")?;
        let node: String = arguments.required("node-name")?;
        // Before the options are read, so that the more specific error wins.
        reject_unsupported(arguments, types[kind])?;
        let kind = match kind {
            0 => ExportArguments::Nbd(NbdExportArguments::read(arguments, &node)?),
            index => {
                let target = endpoint::read_endpoint(endpoint::TYPES[index - 1], arguments)?;
                let socket = target
                    .inherited_name()
                    .and_then(|name| arguments.descriptors().take_named(name))
                    .map(PassedFd::into_owned);
                ExportArguments::Own(target, socket)
            }
        };
        let name = match &kind {
            ExportArguments::Nbd(nbd) => &nbd.name,
            ExportArguments::Own(..) => &node,
        };
        if !identifier::is_well_formed(&id) && !is_generated_id(&id, [&node, name]) {
            return Err(QmpError::generic("Invalid block export id"));
        }
        Ok(Self { id, node, writable: arguments.optional("writable")?.unwrap_or(false), kind, is_sent })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let Self { id, node, writable, kind, is_sent } = self;
        if registry.exports.get(&id).is_ok() {
            return Err(QmpError::generic(format!("Block export id '{id}' is already in use")));
        }
        let disk = registry.disks.find_node(&node).ok_or_else(|| {
            QmpError::generic(format!("Cannot find device='' nor node-name='{}'", excerpt(&node)))
        })?;
        if writable && disk.disk.image().is_read_only() {
            return Err(QmpError::generic("Cannot export read-only node as writable"));
        }
        let address = match kind {
            ExportArguments::Nbd(nbd) => nbd.add(&registry, &disk, &id, writable).await?,
            ExportArguments::Own(target, socket) => {
                if let (Some(name), Some(socket)) = (target.inherited_name(), socket) {
                    let terms = registry
                        .exports
                        .endpoint_parameters()
                        .map_err(|error| QmpError::generic(error.to_string()))?;
                    // `add_endpoint` finds the socket among the passed sockets by its name.
                    terms.inherited.borrow_mut().add(name, socket);
                }
                let added = registry.add_endpoint(id.clone(), disk, !writable, &target, None).await;
                added.map_err(|error| QmpError::generic(format!("{error:#}")))?
            }
        };
        // Exports of the command line belong to the config; a reload or upgrade treats them so.
        registry.exports.get(&id)?.is_added.set(is_sent);
        tracing::info!(export = %id, disk = %node, at = %address, "an export was added");
        Ok(json!({}))
    }
}

/// True for ids that weir assigns to exports of a config file or command line: the disk or the
/// name, with `@` and the address if that is in use.
fn is_generated_id(id: &str, names: [&String; 2]) -> bool {
    let suffix_after = |name: &String| id.strip_prefix(name.as_str());
    let is_called = |suffix: &str| suffix.is_empty() || suffix.len() > 1 && suffix.starts_with('@');
    !id.is_empty()
        && id.len() <= 2 * MAX_STRING_BYTES
        && !id.chars().any(char::is_control)
        && names.into_iter().filter_map(suffix_after).any(is_called)
}

impl NbdExportArguments {
    fn read(arguments: &mut QmpArguments, node: &str) -> Result<Self, QmpError> {
        let bitmaps = read_bitmaps(arguments, node)?;
        let text = |key: &str, label: &str, text: String| {
            if text.len() > MAX_STRING_BYTES {
                return Err(QmpError::generic(format!("{label} '{}' too long", excerpt(&text))));
            }
            if text.chars().any(char::is_control) {
                return Err(QmpError::rule(key, "holds a control character"));
            }
            Ok(text)
        };
        let name = arguments.optional("name")?.unwrap_or_else(|| node.to_owned());
        let description = arguments.optional("description")?.unwrap_or_default();
        Ok(Self {
            name: text("name", "export name", name)?,
            description: text("description", "description", description)?,
            access: read_access(arguments)?,
            bitmaps,
            listen: arguments.optional("x-weir-listen")?,
        })
    }

    /// Adds the export; returns its address.
    async fn add(
        self,
        registry: &Rc<Registry>,
        disk: &Rc<RunningDisk>,
        id: &str,
        writable: bool,
    ) -> Result<String, QmpError> {
        let views = bitmaps::find_bitmaps(disk, &self.bitmaps).await;
        let views = views.map_err(|error| QmpError::generic(error.to_string()))?;
        let serving = self.server(registry, disk.disk.name())?;
        let new = NewNbdExport {
            id: id.to_owned(),
            name: self.name,
            description: self.description,
            access: self.access,
            disk: disk.disk.name().to_string(),
            read_only: !writable,
            bitmaps: views,
        };
        registry.add_export(&serving, new).map_err(|refused| match refused {
            RegistryError::ExportNameTaken { name, .. } => {
                QmpError::generic(format!("NBD server already has export named '{}'", excerpt(&name)))
            }
            other => QmpError::generic(other.to_string()),
        })?;
        Ok(serving.address())
    }

    fn server(&self, registry: &Registry, disk: &str) -> Result<Rc<RunningServer>, QmpError> {
        let servers = registry.exports.servers();
        let addresses = || servers.iter().map(|serving| serving.address()).collect::<Vec<_>>();
        let none = "NBD server not running (start weir with --nbd ADDRESS, or export the disk another way)";
        match (&self.listen, &*servers) {
            (_, []) => Err(QmpError::generic(none)),
            (Some(address), _) => {
                servers.iter().find(|serving| serving.listens_at(address)).cloned().ok_or_else(|| {
                    let addresses = addresses();
                    let known: Vec<_> = addresses.iter().map(String::as_str).collect();
                    QmpError::not_accepted("x-weir-listen", &excerpt(address), &known)
                })
            }
            (None, _) => {
                let standard = registry.exports.default_servers();
                let is_for_all = !standard.is_empty();
                // Without a default server, a server that exports only this disk is unambiguous.
                let candidates =
                    if is_for_all { standard } else { registry.exports.servers_of_disk_only(disk) };
                if let [only] = &*candidates {
                    return Ok(Rc::clone(only));
                }
                let why = if is_for_all { "several servers are" } else { "no server is for all disks" };
                let rule = format!("is missing, and {why} (accepted: {})", addresses().join(", "));
                Err(QmpError::rule("x-weir-listen", rule))
            }
        }
    }
}

/// Access rules; a client that they deny does not see the export.
fn read_access(arguments: &mut QmpArguments) -> Result<AccessRules, QmpError> {
    let networks = |arguments: &mut QmpArguments, key: &str| {
        let texts: Vec<String> = arguments.optional(key)?.unwrap_or_default();
        let read = |text: &String| text.parse().map_err(|rule: String| QmpError::rule(key, rule));
        texts.iter().map(read).collect::<Result<Vec<Network>, _>>()
    };
    let (allow, deny) = (networks(arguments, "x-weir-allow")?, networks(arguments, "x-weir-deny")?);
    let names: Option<Vec<String>> = arguments.optional("x-weir-tls-authz")?;
    Ok(AccessRules { networks: NetworkRules { allow, deny }, names: names.map(NameRules::any_of) })
}

/// Rejects arguments of QEMU that weir does not support, unless they request weir's behaviour.
fn reject_unsupported(arguments: &mut QmpArguments, kind: &str) -> Result<(), QmpError> {
    if !endpoint::WITH_WRITE_CACHE.contains(&kind) && arguments.optional("writethrough")?.unwrap_or(false) {
        return Err(QmpError::rule(
            "writethrough",
            "is a setting of the disk here (serve it with cache = \"writethrough\")",
        ));
    }
    if let Some(thread) = arguments.optional::<String>("iothread")? {
        return Err(QmpError::generic(format!(
            "iothread \"{}\" not found (omit iothread: the daemon's --workers serve the queues)",
            excerpt(&thread)
        )));
    }
    let _: Option<bool> = arguments.optional("fixed-iothread")?;
    // No node of weir is ever inactive.
    let _: Option<bool> = arguments.optional("allow-inactive")?;
    if arguments.optional::<Value>("read-only")?.is_some() {
        return Err(QmpError::rule("read-only", "is given by its inverse here, 'writable' (default false)"));
    }
    // Clients can always request it.
    let _: Option<bool> = arguments.optional("allocation-depth")?;
    Ok(())
}

/// Names of dirty bitmaps of the exported node, also in the form `{"node", "name"}`.
fn read_bitmaps(arguments: &mut QmpArguments, node: &str) -> Result<Vec<String>, QmpError> {
    let bitmaps: Vec<Value> = arguments.optional("bitmaps")?.unwrap_or_default();
    let name = |bitmap: &Value| match bitmap {
        Value::String(name) => Ok(name.clone()),
        Value::Object(members) if members.get("node").is_none_or(|owner| owner == node) => {
            let name = members.get("name").and_then(Value::as_str).map(str::to_owned);
            name.ok_or_else(|| QmpError::missing(&arguments.full_name("bitmaps.name")))
        }
        Value::Object(_) => {
            Err(QmpError::rule(&arguments.full_name("bitmaps.node"), "is another node than the exported one"))
        }
        _ => Err(QmpError::wrong_type(&arguments.full_name("bitmaps"), "BlockDirtyBitmapOrStr")),
    };
    bitmaps.iter().map(name).collect()
}

#[derive(Debug)]
pub(super) struct BlockExportDel {
    id: String,
    removal: Removal,
}

impl QmpCommand for BlockExportDel {
    const NAME: &'static str = "block-export-del";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let removal = match arguments.choice("mode", &["safe", "hard"])? {
            Some(1) => Removal::Hard,
            _ => Removal::IfUnused,
        };
        Ok(Self { id: arguments.required("id")?, removal })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let id = excerpt(&self.id);
        let not_found = |_| QmpError::generic(format!("Export '{id}' is not found"));
        if registry.exports.get(&self.id).map_err(not_found)?.is_ending() {
            return Err(QmpError::generic(format!("Export '{id}' is already shutting down")));
        }
        if self.removal == Removal::IfUnused {
            check_unused(&registry, &self.id).await?;
        }
        match registry.remove_export(&self.id, self.removal) {
            Ok(()) => {
                tracing::info!(export = %self.id, "an export was removed");
                Ok(json!({}))
            }
            Err(RegistryError::HasClients { clients, .. }) => Err(QmpError::generic(format!(
                "export '{id}' still in use: {clients} (use mode 'hard' to remove it all the same)"
            ))),
            Err(other) => Err(QmpError::generic(other.to_string())),
        }
    }
}

/// Fails if a device of this host is mounted, claimed or open.
async fn check_unused(registry: &Registry, id: &str) -> Result<(), QmpError> {
    let export = registry.exports.get(id)?;
    let Reach::Separate(endpoint) = &export.endpoint else { return Ok(()) };
    let Some(device) = endpoint.device().map(Path::to_owned) else { return Ok(()) };
    let users =
        reactor::run_blocking(move || DeviceOpeners::of_device(&device).with_processes().with_claims()).await;
    match users.is_empty() {
        true => Ok(()),
        false => Err(QmpError::generic(format!(
            "export '{}' still in use: {users} (use mode 'hard' to remove it all the same)",
            excerpt(id)
        ))),
    }
}

query!(QueryBlockExports, "query-block-exports", |registry| {
    let exports = registry.exports.all();
    let info = exports.iter().map(|export| {
        json!({
            "id": export.id,
            "type": export.endpoint.kind(),
            "node-name": &**export.disk.disk.name(),
            "shutting-down": export.is_ending(),
        })
    });
    info.collect()
});
