//! Adds disks and groups for clients of the control socket, described by the keys of a config file.
//!
//! ```text
//!   keys, exports ─► CheckedDisk ─► image ─► disk ─► exports
//! ```
//!
//! The code that serves the config file reads, checks, opens and exports the disk. The operation is
//! atomic: if a step fails, the steps before it are rolled back, and no event reports them.

use std::{os::fd::OwnedFd, path::Path, rc::Rc, sync::Arc};

use anyhow::{anyhow, bail, ensure};
use block::layer::throttle::{GroupSettings, ThrottleGroup};
use image::{Image, Secret};
use reactor::regular_file;
use serde_json::{Map, Value};
use settings::{
    CheckedDisk, ConfigError, Diagnostics, DiskWithOrigins, ExportConfig, SecretSource, TlsConfig, config,
};
use storage::PassedFiles;

use super::{
    assemble::{self, DiskAssembly},
    image_opening::{ImageOpenAttempt, UnavailableImage, UnavailableImageState},
    latency_targets,
    planned_export::{self, PlannedExport},
    registry::{Registry, RegistryError, RunningExport},
};

/// Maximum number of groups that contain a group; every request is charged at each level.
const MAX_LEVELS: usize = 8;
/// Maximum length in bytes of an error that quotes a client's input.
const MAX_ERROR_BYTES: usize = 2048;

/// Description of a disk by a client.
#[derive(Debug)]
pub(crate) struct NewDisk {
    pub(crate) name: String,
    /// Keys of its table in a config file, without `export`.
    pub(crate) keys: Map<String, Value>,
    /// Values of the key `export`; `None` selects the default NBD servers, as in a config file.
    pub(crate) exports: Option<Vec<Value>>,
    /// Sockets that the client passed for the exports, by their names.
    pub(crate) sockets: Vec<(String, OwnedFd)>,
}

impl NewDisk {
    /// Adds the disk with its exports. Returns the URIs of the exports.
    ///
    /// # Errors
    /// All mistakes of the description, or the first step that fails.
    pub(crate) async fn add(mut self, registry: &Rc<Registry>) -> anyhow::Result<Vec<String>> {
        let (name, sockets) = (self.name.clone(), std::mem::take(&mut self.sockets));
        registry.check_name(&name)?;
        // The first export gets the disk's name as id.
        ensure!(!registry.exports.has_id(&name), RegistryError::IdTaken(name));
        let planned = self.checked(registry)?;
        // Withholds the event `disk_added` until the disk is complete, so that a rolled-back disk
        // never appears in events.
        let _arrival = registry.begin_adding(&name)?;
        // Without the lock: the answer of a storage server may take any time.
        let image = open_image(registry, &planned.disk, None).await?;
        let _guard = registry.lock_structure().await?;
        list_disk(registry, &planned.disk, image)?;
        match book_and_export(registry, &planned, sockets).await {
            Ok(exports) => export_uris(registry, &exports),
            Err(error) => {
                if let Err(left) = registry.remove_incomplete(&name).await {
                    bail!("{error:#}; and the disk stays: {left}");
                }
                // The reservation of the disk is released: publishes the lower sum, so that other
                // hosts can book the capacity.
                if let Some(cluster) = registry.cluster() {
                    cluster.record_lowered_reservations(&**registry);
                }
                Err(error)
            }
        }
    }

    /// Adds the disk without exports, from files that the old process of an upgrade passed.
    ///
    /// # Errors
    /// As for [`NewDisk::add`].
    pub(crate) async fn add_transferred(
        self,
        registry: &Rc<Registry>,
        passed: PassedFiles,
    ) -> anyhow::Result<()> {
        registry.check_name(&self.name)?;
        let planned = self.checked(registry)?;
        let image = open_image(registry, &planned.disk, Some(passed)).await?;
        list_disk(registry, &planned.disk, image)
    }

    fn checked(self, registry: &Registry) -> anyhow::Result<CheckedDisk> {
        let Self { name, mut keys, exports, sockets: _ } = self;
        ensure!(!keys.contains_key("export"), "export: belongs in `exports`, not in `keys` (move it there)");
        let default_servers = match &exports {
            None => registry.exports.default_servers(),
            Some(_) => Vec::new(),
        };
        if let Some(exports) = exports.filter(|exports| !exports.is_empty()) {
            // The parser of the config file expects exports as a key of the disk's table.
            keys.insert("export".to_owned(), exports.into());
        }
        let diagnostics = Diagnostics::default();
        let Some(mut disk) = config::disk_from_json(&name, &keys, Path::new(""), &diagnostics) else {
            return Err(diagnostics
                .finish(())
                .map_or_else(|all| joined_errors(&all), |()| anyhow!("no disk")));
        };
        resolve_servers(registry, &mut disk, &diagnostics);
        // The default servers are for disks without `exports`, as in a config file.
        let default_endpoints: Vec<_> = default_servers
            .iter()
            .filter_map(|serving| Some((serving.endpoint.clone(), serving.default_for_disks.get()?)))
            .collect();
        let tls = registry.exports.endpoint_parameters().map_or(TlsConfig::Off, |terms| terms.tls.clone());
        let planned = CheckedDisk::new(disk, &default_endpoints, &tls, diagnostics)
            .map_err(|all| joined_errors(&all))?;
        if planned.disk.rate.as_ref().is_some_and(|rate| rate.shared.is_some()) {
            let rule = "shared=NAME is for disks of the config file (leave it out, or write the \
                        disk there and `weir reload`)";
            return Err(planned.disk.error("rate", rule).into());
        }
        // A config file may define the group together with the disk; here it must already run.
        let group = planned.disk.group.as_deref().filter(|group| registry.groups.get(group).is_err());
        if let Some(group) = group {
            let remedy = "`weir status` lists them; `weir group add` makes one";
            return Err(planned
                .disk
                .error("group", format!("there is no group {group:?} ({remedy})"))
                .into());
        }
        Ok(planned)
    }
}

/// Replaces addresses of NBD servers, which have several spellings, by the endpoints of the running
/// servers.
fn resolve_servers(registry: &Registry, disk: &mut DiskWithOrigins, diagnostics: &Diagnostics) {
    let servers = registry.exports.servers();
    for index in 0..disk.exports.len() {
        let ExportConfig::Nbd(export) = &disk.exports[index] else { continue };
        let listen = export.listen.clone();
        let found = registry.exports.server_at(&listen);
        // By spelling first, which is a map lookup; comparing paths reads the file system.
        let found =
            found.or_else(|| servers.iter().find(|server| server.listens_at(&listen.to_string())).cloned());
        let Some(serving) = found else {
            let known: Vec<_> = servers.iter().map(|serving| serving.address()).collect();
            let known =
                if known.is_empty() { "nowhere".to_owned() } else { format!("at {}", known.join(", ")) };
            let origin = disk.item_origin("export", index, "").unwrap_or(disk.own_origin());
            diagnostics.report(origin.error(format!(
                "the daemon does not listen there for NBD, but {known} (a new address is for the \
                 config file and `weir reload`)"
            )));
            continue;
        };
        if let ExportConfig::Nbd(export) = &mut disk.exports[index] {
            export.listen = serving.endpoint.clone();
        }
    }
}

/// Opens the image of a disk that is not in the config file.
async fn open_image(
    registry: &Registry,
    disk: &DiskWithOrigins,
    passed: Option<PassedFiles>,
) -> anyhow::Result<Image> {
    registry.check_image(&disk.image).await?;
    let mut secrets = Vec::new();
    for source in &disk.qcow2.secrets {
        if let SecretSource::File(path) = source {
            secrets.push(passphrase(registry, path).await.map_err(|why| disk.error("secret-file", why))?);
        }
    }
    let mut request =
        DiskAssembly::for_registry(registry).with_passed_files(passed).open_request_with(disk, secrets)?;
    if let Some(path) = disk.image.path() {
        // A path in `/dev/fdset` is opened by its passed descriptor, not by name.
        let descriptor = registry.objects.descriptors.descriptor_at(path, disk.read_only);
        request.options.storage.descriptor = descriptor.map_err(anyhow::Error::msg)?;
    }
    // The time limit covers files only: the timeouts of an NBD server are set by the disk's keys.
    let attempt = ImageOpenAttempt::begin(request, disk.image.path().is_none());
    match attempt.outcome().await {
        Ok(opened) => opened.map_err(|error| registry.with_holder_if_lock_error(error, [])),
        Err(UnavailableImage { state: UnavailableImageState::Failed(error), .. }) => {
            Err(registry.with_holder_if_lock_error(error, []))
        }
        Err(unavailable) => {
            bail!("{}: {unavailable} (restore its file system, and add the disk again)", disk.image)
        }
    }
}

/// Reads a passphrase from a file that a client names. If images are confined to a directory, the
/// file must be inside it as well; otherwise a client could probe the contents of other files.
///
/// # Errors
/// Reason why the file cannot be read.
pub(crate) async fn passphrase(registry: &Registry, path: &Path) -> Result<Secret, String> {
    let (path, root) = (path.to_owned(), registry.image_root().cloned());
    let read = move || {
        // Pipes are rejected: a pipe may never get a writer, and this call has no timeout.
        let file = match root {
            Some(root) => root.read(&path).map_err(|error| error.why)?,
            None => regular_file::open(&path).map_err(|error| error.to_string())?,
        };
        Secret::read(file).map_err(|error| error.to_string())
    };
    reactor::run_blocking(read).await
}

fn list_disk(registry: &Rc<Registry>, disk: &DiskWithOrigins, image: Image) -> anyhow::Result<()> {
    let group = disk.group.as_deref().map(|group| registry.groups.get(group)).transpose()?;
    latency_targets::check_above(&disk.settings.latency.to_running(), group.as_ref())
        .map_err(|rule| disk.error("latency-target", rule))?;
    let mut running = assemble::build_disk(disk, group.as_ref(), image)?;
    running.is_added = true;
    // Filled by `blockdev-add` commands that put nodes above it.
    running.creation_commands = Some(Vec::new());
    Ok(registry.add_disk(running)?)
}

/// Completes a disk after its image is open: books reservations and adds exports.
async fn book_and_export(
    registry: &Rc<Registry>,
    planned: &CheckedDisk,
    mut sockets: Vec<(String, OwnedFd)>,
) -> anyhow::Result<Vec<Rc<RunningExport>>> {
    let name = &planned.disk.name;
    // Synchronously, as a failure must roll the disk back; later changes are checked in the
    // background.
    registry.check_device_of(name)?;
    if let Some(cluster) = registry.cluster() {
        cluster.record_reservations_now(&**registry).await.map_err(anyhow::Error::msg)?;
        // The disk may have been migrated away before; it belongs to this host again.
        cluster.forget_moved(name);
    }
    let mut exports = Vec::new();
    for planned_export in PlannedExport::of_new_disk(planned) {
        // The daemon keeps one socket passed at run time, for the next export that is added.
        if let Some(at) = sockets.iter().position(|(name, _)| planned_export.uses_passed_socket(name)) {
            let (name, socket) = sockets.swap_remove(at);
            registry.exports.endpoint_parameters()?.inherited.borrow_mut().add(&name, socket);
        }
        let export = planned_export.add(registry).await?;
        export.is_added.set(true);
        exports.push(export);
    }
    for export in &exports {
        tracing::info!(
            export = export.id,
            disk = name,
            at = export.endpoint.address(),
            "an export was added"
        );
    }
    Ok(exports)
}

fn export_uris(registry: &Registry, exports: &[Rc<RunningExport>]) -> anyhow::Result<Vec<String>> {
    let mut all = Vec::new();
    for export in exports {
        all.extend(planned_export::export_uris(export, &registry.exports.endpoint_parameters()?.tls));
    }
    Ok(all)
}

/// Adds a group with these keys of its table in a config file.
///
/// # Errors
/// All mistakes of the keys; a reservation that exceeds the available capacity.
pub(crate) async fn add_group(
    registry: &Rc<Registry>,
    name: &str,
    keys: &Map<String, Value>,
) -> anyhow::Result<()> {
    let diagnostics = Diagnostics::default();
    let Some(group) = config::group_from_json(name, keys, &diagnostics) else {
        return Err(diagnostics.finish(()).map_or_else(|all| joined_errors(&all), |()| anyhow!("no group")));
    };
    if group.cluster {
        let rule = "is a key of the config file: each host of the cluster has the group there";
        return Err(group
            .error("cluster", format!("{rule} (write [group.{name}], and `weir reload`)"))
            .into());
    }
    if !group.schedule.entries.is_empty() {
        let rule = format!("is for groups of the config file (write [group.{name}], and `weir reload`)");
        return Err(group.error("schedule", rule).into());
    }
    let parent = group.group.as_deref().map(|parent| registry.groups.get(parent)).transpose()?;
    add_group_object(registry, name, group.settings.to_group_settings(), parent.as_ref()).await?;
    registry.groups.added_by_clients.borrow_mut().insert(name.to_owned());
    Ok(())
}

/// Adds a group if its reservation fits.
///
/// # Errors
/// The name is in use; the group is nested too deep; the reservation does not fit.
pub(crate) async fn add_group_object(
    registry: &Rc<Registry>,
    name: &str,
    settings: GroupSettings,
    parent: Option<&Arc<ThrottleGroup>>,
) -> anyhow::Result<()> {
    let above = std::iter::successors(parent, |group| group.parent()).count();
    ensure!(
        above < MAX_LEVELS,
        "group {name}: {above} groups contain it; groups nest {MAX_LEVELS} deep at most (leave some out)"
    );
    latency_targets::check_above(&settings.latency, parent)
        .map_err(|rule| anyhow!("group {name}: latency-target {rule}"))?;
    // Checked first: `ThrottleGroup::new` books the reservation at the parent.
    registry.check_name(name)?;
    let group = ThrottleGroup::new(name, settings, parent)?;
    registry.add_group(&group)?;
    let Some(cluster) = registry.cluster().cloned() else { return Ok(()) };
    if let Err(why) = cluster.record_reservations_now(&**registry).await {
        registry.remove_group(name)?;
        // The last reference: its drop frees the reservation, so that the next line publishes
        // the lower sum.
        drop(group);
        cluster.record_lowered_reservations(&**registry);
        bail!("{why}");
    }
    Ok(())
}

/// Joins all mistakes into one error, truncated to [`MAX_ERROR_BYTES`].
fn joined_errors(all: &[ConfigError]) -> anyhow::Error {
    let mut text = all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    // At a character boundary; `truncate` panics elsewhere.
    if let Some((end, _)) = text.char_indices().find(|(at, _)| *at >= MAX_ERROR_BYTES) {
        text.truncate(end);
        text.push('…');
    }
    anyhow!(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn new_disk(name: &str, keys: &Value, exports: Option<Vec<Value>>) -> NewDisk {
        let keys = keys.as_object().expect("an object").clone();
        NewDisk { name: name.to_owned(), keys, exports, sockets: Vec::new() }
    }

    fn with_registry(test: impl AsyncFn(Rc<Registry>) + 'static) {
        reactor::sim::run(1, async move { test(Registry::new(None, Rc::new(|_| ()))).await });
    }

    #[test]
    fn added_disk_has_the_config_of_its_keys() {
        with_registry(async |registry| {
            let keys = json!({ "iops-total": 1000, "group": "g" });
            add_group(&registry, "g", json!({ "weight": 50 }).as_object().expect("keys"))
                .await
                .expect("a group");
            let refused = add_group(&registry, "h", keys.as_object().expect("keys")).await;
            refused.expect("a group in a group");
            assert_eq!(
                registry.groups.get("h").expect("a group").parent().map(|parent| parent.name()),
                Some("g")
            );
            let keys = json!({
                "image": "null:1M", "format": "raw", "group": "g", "weight": 200, "iops-total": "70", "discard": "ignore",
                "delay": "read=1ms", "description": "a disk",
            });
            assert!(new_disk("d", &keys, None).add(&registry).await.expect("a disk").is_empty());
            let running = registry.disks.get("d").expect("it was added");
            assert!(running.is_added && running.config.description == "a disk");
            assert_eq!(running.disk.throttle().settings().share.weight(), 200);
            assert_eq!(
                running.disk.throttle().group().map(|group| group.name().to_owned()).as_deref(),
                Some("g")
            );
            // The new process of an upgrade builds an equal disk from the transferred keys.
            let transferred = Value::Object(running.transferred_keys());
            new_disk("again", &transferred, Some(Vec::new())).add(&registry).await.expect("a disk");
            let mut rebuilt = registry.disks.get("again").expect("it was added").current_config();
            rebuilt.name = "d".to_owned();
            assert_eq!(rebuilt, running.current_config());
        });
    }

    #[test]
    fn failed_addition_leaves_nothing() {
        with_registry(async |registry| {
            let unserved_exports = Some(vec![json!({ "type": "nbd", "listen": "unix:/nowhere" })]);
            for (keys, exports, expect) in [
                (json!({ "image": "null:1M", "cach": "none", "weight": 0 }), None, "cach: unknown key"),
                (
                    json!({ "image": "null:1M", "cach": "none", "weight": 0 }),
                    None,
                    "weight = 0: is out of range",
                ),
                (json!({ "image": "null:1M", "group": "g" }), None, "there is no group \"g\""),
                (json!({ "image": "null:1M", "handover": true }), None, "is for images in files"),
                (json!({ "image": "null:1M", "tls-authz": ["a"] }), None, "because tls is off"),
                (
                    json!({ "image": "null:1M" }),
                    unserved_exports,
                    "the daemon does not listen there for NBD, but nowhere",
                ),
                (json!({ "image": "null:1M", "export": [] }), None, "belongs in `exports`"),
                (json!({ "format": "raw" }), None, "no image"),
                (
                    json!({ "image": "null:1M", "rate": "bytes=1M,shared=a" }),
                    None,
                    "is for disks of the config file",
                ),
            ] {
                let error =
                    new_disk("d", &keys, exports).add(&registry).await.expect_err("a mistake").to_string();
                assert!(error.contains(expect), "{error}");
                assert!(registry.disks.all().is_empty() && registry.check_name("d").is_ok());
                assert!(registry.disks.unlisted_operation().is_none());
            }
            // The error quotes the unknown key, which a client chose.
            let long = json!({ "image": "null:1M", "x".repeat(1 << 16): 1 });
            let error = new_disk("d", &long, None).add(&registry).await.expect_err("a mistake").to_string();
            assert!(error.len() <= MAX_ERROR_BYTES + 4);
            let cluster = json!({ "cluster": true });
            let refused = add_group(&registry, "g", cluster.as_object().expect("keys")).await;
            assert!(refused.is_err() && registry.groups.all().is_empty());
        });
    }
}
