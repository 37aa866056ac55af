//! Adds disks and groups for clients of the control socket, described by the keys of a config file.
//!
//! ```text
//!   keys, exports ─► desired state of one object ─► difference ─► reconcile
//! ```
//!
//! The code that serves the config file reads, checks, opens and exports the disk. The operation is
//! atomic: if a step fails, the steps before it are rolled back, and no event reports them.
//!
//! Never reads a passphrase from a file outside the image directory, if there is one, or from a
//! pipe: see [`client_passphrase`](assemble::client_passphrase).

use std::{os::fd::OwnedFd, path::Path, rc::Rc};

use anyhow::{anyhow, ensure};
use block::layer::throttle::GroupSettings;
use serde_json::{Map, Value};
use settings::{
    ConfigError, DesiredState, Diagnostics, DiskWithOrigins, ExportConfig, GroupConfig, GroupWithOrigins,
    Origin, ThrottleConfig, TlsConfig, config,
};
use storage::PassedFiles;

use super::{
    assemble,
    planned_export::PlannedExport,
    reconcile::{
        CompletedStep, PlanDifference, ReconcileReason, Reconciliation,
        source::{FreshStart, StartSource},
    },
    registry::{Registry, RegistryError},
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
        let mut source =
            ClientSource { sockets: std::mem::take(&mut self.sockets), ..ClientSource::default() };
        let name = self.name.clone();
        registry.check_name(&name)?;
        // The first export gets the disk's name as id.
        ensure!(!registry.exports.has_id(&name), RegistryError::IdTaken(name));
        let plan = self.checked(registry)?;
        // Withholds the event `disk_added` until the disk is complete, so that a rolled-back disk
        // never appears in events.
        let _arrival = registry.begin_adding(&name)?;
        let difference = PlanDifference::of_all(&plan);
        let mut work = new_reconciliation(ReconcileReason::Add, registry, &plan);
        // Without the lock: the answer of a storage server may take any time.
        let images = work.open(&difference, &source).await?;
        let _guard = registry.lock_structure().await?;
        work.apply_or_roll_back(&difference, images, &mut source).await?;
        for done in &work.completed {
            if let CompletedStep::ExportAdded { export, .. } = done {
                let (id, address) = (&export.id, export.endpoint.address());
                tracing::info!(export = id, disk = name, at = address, "an export was added");
            }
        }
        Ok(work.take_uris())
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
        let plan = self.checked(registry)?;
        let mut source = ClientSource { passed: Some(passed), ..ClientSource::default() };
        let difference = PlanDifference::of_all(&plan);
        let mut work =
            new_reconciliation(ReconcileReason::Transfer, registry, &plan).with_source_files(&source);
        let images = work.open(&difference, &source).await?;
        // Boxed, because the compiler limits the nesting of the start's future.
        Box::pin(work.apply(&difference, images, &mut source)).await
    }

    /// Desired state that consists of this disk.
    fn checked(self, registry: &Registry) -> anyhow::Result<DesiredState> {
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
        let plan = DesiredState::of_disk(disk, &default_endpoints, &tls, diagnostics)
            .map_err(|all| joined_errors(&all))?;
        let disk = &plan.disks[0];
        if disk.rate.as_ref().is_some_and(|rate| rate.shared.is_some()) {
            let rule = "shared=NAME is for disks of the config file (leave it out, or write the \
                        disk there and `weir reload`)";
            return Err(disk.error("rate", rule).into());
        }
        // A config file may define the group together with the disk; here it must already run.
        if let Some(group) = disk.group.as_deref().filter(|group| registry.groups.get(group).is_err()) {
            let remedy = "`weir status` lists them; `weir group add` makes one";
            return Err(disk.error("group", format!("there is no group {group:?} ({remedy})")).into());
        }
        Ok(plan)
    }
}

/// Sockets and files that a client, or the old process of an upgrade, passed with a disk.
#[derive(Default)]
struct ClientSource {
    sockets: Vec<(String, OwnedFd)>,
    passed: Option<PassedFiles>,
}

impl StartSource for ClientSource {
    fn passed(&self) -> Option<&PassedFiles> {
        self.passed.as_ref()
    }

    fn passed_socket(&mut self, planned: &PlannedExport) -> Option<(String, OwnedFd)> {
        let at = self.sockets.iter().position(|(name, _)| planned.passed_socket() == Some(name))?;
        Some(self.sockets.swap_remove(at))
    }
}

fn new_reconciliation<'a>(
    occasion: ReconcileReason,
    registry: &'a Rc<Registry>,
    plan: &'a DesiredState,
) -> Reconciliation<'a> {
    Reconciliation::new(occasion, registry, plan, None, assemble::rate_budgets(registry))
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
    // The new process of an upgrade would not receive them.
    let of_file =
        [("schedule", !group.schedule.entries.is_empty()), ("time-zone", group.schedule.time_zone.is_some())];
    if let Some((key, _)) = of_file.into_iter().find(|(_, is_given)| *is_given) {
        let rule = format!("is for groups of the config file (write [group.{name}], and `weir reload`)");
        return Err(group.error(key, rule).into());
    }
    add_group_object(registry, ReconcileReason::Add, group).await?;
    registry.groups.added_by_clients.borrow_mut().insert(name.to_owned());
    Ok(())
}

/// Config of a group with these settings, in the group `parent`.
pub(crate) fn group_config(name: &str, settings: &GroupSettings, parent: Option<String>) -> GroupWithOrigins {
    let config = GroupConfig {
        name: name.to_owned(),
        settings: ThrottleConfig::from_running(settings),
        group: parent,
        ..GroupConfig::default()
    };
    let mut group = GroupWithOrigins::new(config, Origin::new(format!("group {name}")));
    group.record_origin("latency-target", Origin::new(format!("group {name}: latency-target")));
    group
}

/// Adds a group if its reservation fits.
///
/// # Errors
/// The name is in use; the group is nested too deep; the reservation does not fit.
pub(crate) async fn add_group_object(
    registry: &Rc<Registry>,
    reason: ReconcileReason,
    group: GroupWithOrigins,
) -> anyhow::Result<()> {
    let name = group.name.clone();
    let parent = group.group.as_deref().map(|parent| registry.groups.get(parent)).transpose()?;
    let above = std::iter::successors(parent.as_ref(), |group| group.parent()).count();
    ensure!(
        above < MAX_LEVELS,
        "group {name}: {above} groups contain it; groups nest {MAX_LEVELS} deep at most (leave some out)"
    );
    registry.check_name(&name)?;
    // Withholds the event `group_added` until the reservation is booked.
    let _arrival = registry.begin_adding(&name)?;
    let plan = DesiredState::of_group(group);
    let mut work = new_reconciliation(reason, registry, &plan);
    // Boxed, because the compiler limits the nesting of the start's future.
    Box::pin(work.reconcile(&PlanDifference::of_all(&plan), &mut FreshStart)).await
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
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::{events::Kind, watch};

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
            assert!(running.is_added && running.config().description == "a disk");
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

    #[test]
    fn failed_group_leaves_nothing() {
        with_registry(async |registry| {
            let _watch = watch::watch_registry(&registry, BTreeSet::new());
            let keys = json!({ "iops-total": 100, "latency-target": "5ms" });
            add_group(&registry, "g", keys.as_object().expect("keys")).await.expect("a new name");
            for (keys, expect) in [
                (json!({ "group": "g", "iops-reservation": 500 }), "iops-reservation"),
                (json!({ "group": "g", "latency-target": "1ms" }), "cannot be set inside group \"g\""),
                (json!({ "group": "absent" }), "absent"),
            ] {
                let refused = add_group(&registry, "h", keys.as_object().expect("keys")).await;
                let error = format!("{:#}", refused.expect_err("a mistake"));
                assert!(error.contains(expect), "{error}");
                assert_eq!(registry.groups.all().len(), 1);
            }
            // All of the parent's capacity is free again.
            let keys = json!({ "group": "g", "iops-reservation": 100 });
            add_group(&registry, "h", keys.as_object().expect("keys")).await.expect("it fits");
            let kinds: Vec<_> = registry.events.since(0).iter().map(|event| event.kind).collect();
            assert_eq!(kinds, [Kind::GroupAdded; 2]);
        });
    }

    #[test]
    fn group_added_again_books_its_reservation() {
        with_registry(async |registry| {
            let outer = json!({ "iops-total": 1000 });
            add_group(&registry, "g", outer.as_object().expect("keys")).await.expect("a new name");
            let inner = json!({ "group": "g" });
            add_group(&registry, "h", inner.as_object().expect("keys")).await.expect("a new name");
            registry.book_later("h", [2000, 0]);
            assert_eq!(registry.groups.unmet.borrow().len(), 1);
            registry.remove_group("h").expect("it has no members");
            let reserving = json!({ "group": "g", "iops-reservation": 2000 });
            let refused = add_group(&registry, "h", reserving.as_object().expect("keys")).await;
            refused.expect_err("more than the limit");
        });
    }
}
