//! Throttle groups in QEMU's object model: `object-add`, `object-del`, `qom-list`, `qom-get`,
//! `qom-set`.
//!
//! ```text
//!   /                    container
//!   └─ objects           container
//!      └─ NAME           throttle-group: limits, x-…, x-weir-…; or secret, tls-creds-…, authz-…
//! ```
//!
//! Every group is an object, including groups of the config file. There are also passphrases
//! (`secret`), TLS credentials of servers (`tls-creds-x509`, `tls-creds-psk`) and rules for names
//! of clients (`authz-simple`, `authz-list`), which can be added and deleted, but not read.

use std::{path::Path, rc::Rc};

use ::settings::{LatencyConfig, LatencySetting, QuotaSetting, TlsCredentialFiles};
use block::layer::throttle::GroupSettings;
use image::Secret;
use policy::{
    access::{NameRule, NameRules},
    throttle::LimitSetting,
};
use serde_json::{Map, Value, json};
use tls::TlsServer;

use super::set;
use crate::{
    add_objects, assemble,
    change::RegistryChange,
    qmp::{
        arguments::QmpArguments,
        command::QmpCommand,
        error::{QmpError, QmpErrorClass},
        identifier,
        json::excerpt,
        settings::{self, LimitChanges, SettingChanges, SettingNaming},
    },
    reconcile::ReconcileReason,
    registry::{NamedObject, Registry},
};

const TYPE: &str = "throttle-group";
const SECRET: &str = "secret";
const X509: &str = "tls-creds-x509";
const PSK: &str = "tls-creds-psk";
const SIMPLE: &str = "authz-simple";
const LIST: &str = "authz-list";
const TYPES: [&str; 6] = [LIST, SIMPLE, SECRET, TYPE, PSK, X509];
/// weir's own properties, with their types.
const OWN: [(&str, &str); 10] = [
    ("x-weir-burst-for", "int"),
    ("x-weir-weight", "int"),
    ("x-weir-iops-reservation", "int"),
    ("x-weir-bps-reservation", "int"),
    ("x-weir-watermark", "int"),
    ("x-weir-latency-target", "string"),
    ("x-weir-latency-percentile", "string"),
    ("x-weir-latency-of", "string"),
    ("x-weir-latency-floor", "string"),
    ("x-weir-parent", "string"),
];

#[derive(Debug)]
pub(super) enum ObjectAdd {
    /// `is_sent` is false for a command of the command line.
    Group {
        id: String,
        parent: Option<String>,
        changes: SettingChanges,
        is_sent: bool,
    },
    Secret {
        id: String,
        from: SecretInput,
    },
    Credentials {
        id: String,
        files: TlsCredentialFiles,
    },
    Names {
        id: String,
        names: NameRules,
    },
}

#[derive(Debug)]
pub(super) enum SecretInput {
    Data(Secret),
    File(String),
}

impl QmpCommand for ObjectAdd {
    const NAME: &'static str = "object-add";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let is_sent = arguments.sent_json().is_some();
        // In QEMU's order, so that the same one of two wrong arguments is reported.
        let kind = arguments.choice("qom-type", &TYPES)?.ok_or_else(|| QmpError::missing("qom-type"))?;
        match TYPES[kind] {
            SECRET => return read_secret(arguments),
            kind @ (X509 | PSK) => return read_credentials(kind, arguments),
            kind @ (SIMPLE | LIST) => return read_names(kind, arguments),
            _ => {}
        }
        let id: String = arguments.required("id")?;
        identifier::check("id", &id)?;
        let mut limits = LimitChanges::default();
        if let Some(mut inner) = arguments.object("limits")? {
            limits = LimitChanges::read(&mut inner, SettingNaming::Plain)?;
            inner.finish()?;
        }
        let properties = LimitChanges::read(arguments, SettingNaming::Property)?;
        let changes = SettingChanges::read_own(arguments, "x-weir-")?;
        let parent: Option<String> = arguments.optional("x-weir-parent")?;
        Ok(Self::Group { id, parent, changes: changes.with_limits(limits.then(properties)), is_sent })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let (id, parent, changes, is_sent) = match self {
            Self::Group { id, parent, changes, is_sent } => (id, parent, changes, is_sent),
            Self::Secret { id, from } => return add_secret(&registry, &id, from).await,
            Self::Credentials { id, files: credential_files } => {
                return add_credentials(&registry, &id, credential_files).await;
            }
            Self::Names { id, names } => {
                check_id(&registry, &id)?;
                registry.objects.add(&id, NamedObject::Names(names))?;
                return Ok(json!({}));
            }
        };
        if let Some(parent) = &parent {
            registry.groups.get(parent)?;
        }
        let settings = changes.apply_to(GroupSettings::default())?;
        check_id(&registry, &id)?;
        let group = add_objects::group_config(&id, &settings, parent);
        add_objects::add_group_object(&registry, ReconcileReason::Add, group)
            .await
            .map_err(QmpError::from_daemon_error)?;
        if is_sent {
            registry.groups.added_by_clients.borrow_mut().insert(id);
        }
        Ok(json!({}))
    }
}

fn check_id(registry: &Registry, id: &str) -> Result<(), QmpError> {
    if registry.groups.get(id).is_ok() || registry.objects.contains(id) {
        Err(duplicate_error(id))
    } else {
        Ok(())
    }
}

fn duplicate_error(id: &str) -> QmpError {
    QmpError::generic(format!(
        "attempt to add duplicate property '{id}' to object (type 'container'): something of this name is \
         there already (choose another)"
    ))
}

/// Reads the arguments of a secret except its type, which the caller has read.
fn read_secret(arguments: &mut QmpArguments) -> Result<ObjectAdd, QmpError> {
    let id: String = arguments.required("id")?;
    identifier::check("id", &id)?;
    if arguments.choice("format", &["raw", "base64"])? == Some(1) {
        return Err(QmpError::rule("format", "is always 'raw' here; 'base64' is not supported"));
    }
    let data: Option<String> = arguments.optional("data")?;
    let data = data.map(|text| Secret::new(text.into_bytes()));
    let from = match (data, arguments.optional("file")?) {
        (Some(data), None) => SecretInput::Data(data),
        (None, Some(file)) => SecretInput::File(file),
        (Some(_), Some(_)) => return Err(QmpError::generic("'file' and 'data' are mutually exclusive")),
        (None, None) => return Err(QmpError::generic("Must provide 'file' or 'data'")),
    };
    Ok(ObjectAdd::Secret { id, from })
}

async fn add_secret(registry: &Registry, id: &str, from: SecretInput) -> Result<Value, QmpError> {
    let secret = match from {
        SecretInput::Data(secret) => secret,
        SecretInput::File(path) => {
            let read = assemble::client_passphrase(registry, Path::new(&path)).await;
            read.map_err(|why| QmpError::generic(format!("Unable to read {}: {why}", excerpt(&path))))?
        }
    };
    check_id(registry, id)?;
    registry.objects.add(id, NamedObject::Secret(secret))?;
    Ok(json!({}))
}

/// Reads QEMU's `TlsCredsX509Properties` and `TlsCredsPskProperties`, for servers only.
fn read_credentials(kind: &str, arguments: &mut QmpArguments) -> Result<ObjectAdd, QmpError> {
    let id: String = arguments.required("id")?;
    identifier::check("id", &id)?;
    let ends = ["client", "server"];
    // QEMU's default is `client`.
    if arguments.choice("endpoint", &ends)? != Some(1) {
        return Err(QmpError::rule("endpoint", "must be 'server' here: these objects are for servers"));
    }
    let directory: String = arguments.required("dir")?;
    let verify_peer = arguments.optional("verify-peer")?.unwrap_or(true);
    // weir always checks the files.
    let _: Option<bool> = arguments.optional("sanity-check")?;
    let credential_files = match kind {
        X509 => TlsCredentialFiles::Certificates { directory: directory.into(), verify_peer },
        _ => TlsCredentialFiles::PreShared(directory.into()),
    };
    Ok(ObjectAdd::Credentials { id, files: credential_files })
}

/// Reads QEMU's `AuthZSimpleProperties` and `AuthZListProperties`.
fn read_names(kind: &str, arguments: &mut QmpArguments) -> Result<ObjectAdd, QmpError> {
    let id: String = arguments.required("id")?;
    identifier::check("id", &id)?;
    if kind == SIMPLE {
        let rule = NameRule { pattern: arguments.required("identity")?, is_glob: false, allow: true };
        return Ok(ObjectAdd::Names { id, names: NameRules { rules: vec![rule], default_allows: false } });
    }
    let otherwise = arguments.choice("policy", &["deny", "allow"])? == Some(1);
    let mut rules = Vec::new();
    for mut rule in arguments.objects("rules")? {
        let pattern = rule.required("match")?;
        let allows = match rule.choice("policy", &["deny", "allow"])? {
            Some(policy) => policy == 1,
            None => return Err(QmpError::missing(&rule.full_name("policy"))),
        };
        let is_glob = rule.choice("format", &["exact", "glob"])? == Some(1);
        rule.finish()?;
        rules.push(NameRule { pattern, is_glob, allow: allows });
    }
    Ok(ObjectAdd::Names { id, names: NameRules { rules, default_allows: otherwise } })
}

async fn add_credentials(
    registry: &Registry,
    id: &str,
    credential_files: TlsCredentialFiles,
) -> Result<Value, QmpError> {
    let read = move || match credential_files {
        TlsCredentialFiles::Certificates { directory, verify_peer } => {
            TlsServer::x509(&directory, verify_peer)
        }
        TlsCredentialFiles::PreShared(directory) => TlsServer::psk(&directory),
    };
    let keys = reactor::run_blocking(read).await.map_err(|error| QmpError::generic(error.to_string()))?;
    check_id(registry, id)?;
    registry.objects.add(id, NamedObject::Credentials(keys))?;
    Ok(json!({}))
}

#[derive(Debug)]
pub(super) struct ObjectDel {
    id: String,
}

impl QmpCommand for ObjectDel {
    const NAME: &'static str = "object-del";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { id: arguments.required("id")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let id = &self.id;
        if registry.objects.remove(id) {
            return Ok(json!({}));
        }
        let Ok(group) = registry.groups.get(&self.id) else {
            return Err(QmpError::generic(format!("object '{}' not found", excerpt(&self.id))));
        };
        // The counter is exact even while members are not listed, such as disks being closed.
        if group.members() > 0 {
            let members = match registry.members_of(&group) {
                names if names.is_empty() => group.members().to_string(),
                names => names.join(", "),
            };
            let why = format!(
                "object '{}' is in use, can not be deleted: {members} in it (give them another group first, \
                 or none)",
                self.id
            );
            return Err(QmpError::generic(why));
        }
        drop(group);
        registry.remove_group(&self.id)?;
        Ok(json!({}))
    }
}

enum ObjectPath {
    Root,
    Objects,
    Group(String),
}

/// Resolves an absolute path, or the name of a group alone, as QEMU does.
fn resolve_path(registry: &Registry, path: &str) -> Result<ObjectPath, QmpError> {
    let not_found =
        || QmpError::new(QmpErrorClass::DeviceNotFound, format!("Device '{}' not found", excerpt(path)));
    let name = match path.strip_prefix('/') {
        Some("") => return Ok(ObjectPath::Root),
        Some("objects" | "objects/") => return Ok(ObjectPath::Objects),
        Some(inner) => inner.strip_prefix("objects/").ok_or_else(not_found)?,
        None if path == "objects" => return Ok(ObjectPath::Objects),
        None => path.strip_prefix("objects/").unwrap_or(path),
    };
    if registry.groups.get(name).is_err() {
        return Err(not_found());
    }
    Ok(ObjectPath::Group(name.to_owned()))
}

#[derive(Debug)]
pub(super) struct QomList {
    path: String,
}

impl QmpCommand for QomList {
    const NAME: &'static str = "qom-list";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { path: arguments.required("path")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let property = |name: &str, kind: &str| json!({ "name": name, "type": kind });
        let mut list = vec![property("type", "string")];
        match resolve_path(&registry, &self.path)? {
            ObjectPath::Root => list.push(property("objects", "child<container>")),
            ObjectPath::Objects => {
                list.extend(
                    registry.groups.all().iter().map(|group| property(group.name(), "child<throttle-group>")),
                );
                list.extend(registry.objects.secrets().iter().map(|id| property(id, "child<secret>")));
            }
            ObjectPath::Group(_) => {
                list.push(property("limits", "ThrottleLimits"));
                let settings = LimitSetting::of_qemu();
                list.extend(settings.map(|setting| property(&SettingNaming::Property.name(setting), "int")));
                list.extend(OWN.iter().map(|(name, kind)| property(name, kind)));
            }
        }
        Ok(Value::Array(list))
    }
}

#[derive(Debug)]
pub(super) struct QomGet {
    path: String,
    property: String,
}

impl QmpCommand for QomGet {
    const NAME: &'static str = "qom-get";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { path: arguments.required("path")?, property: arguments.required("property")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let property = self.property.as_str();
        let group = match resolve_path(&registry, &self.path)? {
            ObjectPath::Root | ObjectPath::Objects if property == "type" => return Ok(json!("container")),
            ObjectPath::Root | ObjectPath::Objects => return Err(no_property_error("container", property)),
            ObjectPath::Group(name) => registry.groups.get(&name)?,
        };
        let GroupSettings { limits, share, watermark, latency, quota } = group.settings();
        Ok(match property {
            "type" => json!(TYPE),
            "limits" => settings::all_limits(&limits),
            "x-weir-burst-for" => json!(limits.get(LimitSetting::BurstFor)),
            "x-weir-weight" => json!(share.weight()),
            "x-weir-iops-reservation" => json!(share.iops_reservation()),
            "x-weir-bps-reservation" => json!(share.bps_reservation()),
            "x-weir-watermark" => json!(watermark.percent()),
            "x-weir-parent" => json!(group.parent().map_or("", |parent| parent.name())),
            "x-weir-quota" => json!(QuotaSetting::Total.text(&quota)),
            "x-weir-write-quota" => json!(QuotaSetting::Writes.text(&quota)),
            "x-weir-quota-rate" => json!(quota.rate_bps),
            _ => match (latency_property(property), limit_property(property)) {
                (Some(setting), _) => json!(LatencyConfig::from_running(&latency).text(setting)),
                (None, Some(setting)) => json!(settings::qemu_value(&limits, setting)),
                (None, None) => return Err(no_property_error(TYPE, property)),
            },
        })
    }
}

#[derive(Debug)]
pub(super) struct QomSet {
    path: String,
    property: String,
    value: Value,
}

impl QmpCommand for QomSet {
    const NAME: &'static str = "qom-set";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self {
            path: arguments.required("path")?,
            property: arguments.required("property")?,
            value: arguments.required("value")?,
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let group = match resolve_path(&registry, &self.path)? {
            ObjectPath::Root | ObjectPath::Objects if self.property == "type" => {
                return Err(read_only_error("container", "type"));
            }
            ObjectPath::Root | ObjectPath::Objects => {
                return Err(no_property_error("container", &self.property));
            }
            ObjectPath::Group(name) => registry.groups.get(&name)?,
        };
        let changes = read_changes(self.property, self.value)?;
        set::set_group(&registry, &group, changes.apply_to(group.settings())?).await?;
        registry.notify(&RegistryChange::SettingsChanged { name: group.name().to_owned() });
        Ok(json!({}))
    }
}

/// Changes of a property. The `x-` limits can only be set at creation, as in QEMU.
fn read_changes(property: String, value: Value) -> Result<SettingChanges, QmpError> {
    if property == "type" || property == "x-weir-parent" {
        return Err(read_only_error(TYPE, &property));
    }
    if limit_property(&property).is_some() {
        return Err(QmpError::generic("Property cannot be set after initialization"));
    }
    let is_limits = property == "limits";
    if !is_limits && !OWN.iter().any(|(name, _)| *name == property) {
        return Err(no_property_error(TYPE, &property));
    }
    let mut arguments = QmpArguments::new(Map::from_iter([(property, value)]));
    let changes = match arguments.object("limits") {
        Ok(Some(mut inner)) => {
            let limits = LimitChanges::read(&mut inner, SettingNaming::Plain)?;
            inner.finish()?;
            SettingChanges::default().with_limits(limits)
        }
        Ok(None) => SettingChanges::read_own(&mut arguments, "x-weir-")?,
        Err(wrong) => return Err(wrong),
    };
    arguments.finish()?;
    Ok(changes)
}

fn limit_property(property: &str) -> Option<LimitSetting> {
    let setting = LimitSetting::from_name(property.strip_prefix("x-")?)?;
    LimitSetting::of_qemu().find(|known| *known == setting)
}

fn latency_property(property: &str) -> Option<LatencySetting> {
    LatencySetting::from_name(property.strip_prefix("x-weir-")?)
}

fn no_property_error(kind: &str, property: &str) -> QmpError {
    QmpError::generic(format!("Property '{kind}.{}' not found", excerpt(property)))
}

fn read_only_error(kind: &str, property: &str) -> QmpError {
    QmpError::generic(format!("Property '{kind}.{property}' is not writable"))
}
