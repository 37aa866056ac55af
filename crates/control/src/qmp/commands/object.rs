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

use ::settings::TlsCredentialFiles;
use block::layer::throttle::GroupSettings;
use image::Secret;
use policy::{
    access::{NameRules, NameRule},
    throttle::LimitSetting,
};
use serde_json::{Map, Value, json};
use tls::TlsServer;

use super::weir;
use crate::{
    adding,
    change::Change,
    qmp::{
        arguments::Arguments,
        command::Command,
        error::{Class, Error},
        identifier,
        json::shown,
        settings::{self, Changes, LimitChanges, Naming},
    },
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
const OWN: [(&str, &str); 5] = [
    ("x-weir-weight", "int"),
    ("x-weir-iops-reservation", "int"),
    ("x-weir-bps-reservation", "int"),
    ("x-weir-watermark", "int"),
    ("x-weir-parent", "string"),
];

#[derive(Debug)]
pub(super) enum ObjectAdd {
    /// `is_sent` is false for a command of the command line.
    Group {
        id: String,
        parent: Option<String>,
        changes: Changes,
        is_sent: bool,
    },
    Secret {
        id: String,
        from: SecretFrom,
    },
    Credentials {
        id: String,
        of: TlsCredentialFiles,
    },
    Names {
        id: String,
        names: NameRules,
    },
}

#[derive(Debug)]
pub(super) enum SecretFrom {
    Data(Secret),
    File(String),
}

impl Command for ObjectAdd {
    const NAME: &'static str = "object-add";
    const CHANGES: bool = true;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        let is_sent = arguments.sent().is_some();
        // In QEMU's order, so that of two mistakes the same one is reported.
        let kind = arguments.choice("qom-type", &TYPES)?.ok_or_else(|| Error::missing("qom-type"))?;
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
            limits = LimitChanges::read(&mut inner, Naming::Plain)?;
            inner.finish()?;
        }
        let properties = LimitChanges::read(arguments, Naming::Property)?;
        let own = Changes::read_own(arguments, "x-weir-")?;
        let parent = arguments.optional("x-weir-parent")?;
        Ok(Self::Group { id, parent, changes: own.with_limits(limits.then(properties)), is_sent })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let (id, parent, changes, is_sent) = match self {
            Self::Group { id, parent, changes, is_sent } => (id, parent, changes, is_sent),
            Self::Secret { id, from } => return add_secret(&registry, &id, from).await,
            Self::Credentials { id, of } => return add_credentials(&registry, &id, of).await,
            Self::Names { id, names } => {
                check_id(&registry, &id)?;
                registry.objects.add(&id, NamedObject::Names(names))?;
                return Ok(json!({}));
            }
        };
        let parent = parent.map(|name| registry.groups.get(&name)).transpose()?;
        let settings = changes.apply_to(GroupSettings::default())?;
        check_id(&registry, &id)?;
        adding::make_group(&registry, &id, settings, parent.as_ref()).await.map_err(Error::of)?;
        if is_sent {
            registry.groups.added.borrow_mut().insert(id);
        }
        Ok(json!({}))
    }
}

fn check_id(registry: &Registry, id: &str) -> Result<(), Error> {
    if registry.groups.get(id).is_ok() || registry.objects.contains(id) { Err(duplicate(id)) } else { Ok(()) }
}

fn duplicate(id: &str) -> Error {
    Error::generic(format!(
        "attempt to add duplicate property '{id}' to object (type 'container'): something of this name is \
         there already (choose another)"
    ))
}

/// Reads a secret, whose type is already read.
fn read_secret(arguments: &mut Arguments) -> Result<ObjectAdd, Error> {
    let id: String = arguments.required("id")?;
    identifier::check("id", &id)?;
    if arguments.choice("format", &["raw", "base64"])? == Some(1) {
        return Err(Error::rule("format", "is always 'raw' here; 'base64' is not supported"));
    }
    let data: Option<String> = arguments.optional("data")?;
    let data = data.map(|text| Secret::new(text.into_bytes()));
    let from = match (data, arguments.optional("file")?) {
        (Some(data), None) => SecretFrom::Data(data),
        (None, Some(file)) => SecretFrom::File(file),
        (Some(_), Some(_)) => return Err(Error::generic("'file' and 'data' are mutually exclusive")),
        (None, None) => return Err(Error::generic("Must provide 'file' or 'data'")),
    };
    Ok(ObjectAdd::Secret { id, from })
}

async fn add_secret(registry: &Registry, id: &str, from: SecretFrom) -> Result<Value, Error> {
    let secret = match from {
        SecretFrom::Data(secret) => secret,
        SecretFrom::File(path) => {
            let read = adding::passphrase(registry, Path::new(&path)).await;
            read.map_err(|why| Error::generic(format!("Unable to read {}: {why}", shown(&path))))?
        }
    };
    check_id(registry, id)?;
    registry.objects.add(id, NamedObject::Secret(secret))?;
    Ok(json!({}))
}

/// Reads QEMU's `TlsCredsX509Properties` and `TlsCredsPskProperties`, for servers only.
fn read_credentials(kind: &str, arguments: &mut Arguments) -> Result<ObjectAdd, Error> {
    let id: String = arguments.required("id")?;
    identifier::check("id", &id)?;
    let ends = ["client", "server"];
    // QEMU's default is `client`.
    if arguments.choice("endpoint", &ends)? != Some(1) {
        return Err(Error::rule("endpoint", "must be 'server' here: these objects are for servers"));
    }
    let directory: String = arguments.required("dir")?;
    let verify_peer = arguments.optional("verify-peer")?.unwrap_or(true);
    // weir always checks the files.
    let _: Option<bool> = arguments.optional("sanity-check")?;
    let of = match kind {
        X509 => TlsCredentialFiles::Certificates { directory: directory.into(), verify_peer },
        _ => TlsCredentialFiles::PreShared(directory.into()),
    };
    Ok(ObjectAdd::Credentials { id, of })
}

/// Reads QEMU's `AuthZSimpleProperties` and `AuthZListProperties`.
fn read_names(kind: &str, arguments: &mut Arguments) -> Result<ObjectAdd, Error> {
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
            None => return Err(Error::missing(&rule.name_of("policy"))),
        };
        let is_glob = rule.choice("format", &["exact", "glob"])? == Some(1);
        rule.finish()?;
        rules.push(NameRule { pattern, is_glob, allow: allows });
    }
    Ok(ObjectAdd::Names { id, names: NameRules { rules, default_allows: otherwise } })
}

async fn add_credentials(registry: &Registry, id: &str, of: TlsCredentialFiles) -> Result<Value, Error> {
    let read = move || match of {
        TlsCredentialFiles::Certificates { directory, verify_peer } => TlsServer::x509(&directory, verify_peer),
        TlsCredentialFiles::PreShared(directory) => TlsServer::psk(&directory),
    };
    let keys = reactor::run_blocking(read).await.map_err(|error| Error::generic(error.to_string()))?;
    check_id(registry, id)?;
    registry.objects.add(id, NamedObject::Credentials(keys))?;
    Ok(json!({}))
}

#[derive(Debug)]
pub(super) struct ObjectDel {
    id: String,
}

impl Command for ObjectDel {
    const NAME: &'static str = "object-del";
    const CHANGES: bool = true;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { id: arguments.required("id")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let id = &self.id;
        if registry.objects.remove(id) {
            return Ok(json!({}));
        }
        let Ok(group) = registry.groups.get(&self.id) else {
            return Err(Error::generic(format!("object '{}' not found", shown(&self.id))));
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
            return Err(Error::generic(why));
        }
        drop(group);
        registry.remove_group(&self.id)?;
        Ok(json!({}))
    }
}

enum Place {
    Root,
    Objects,
    Group(String),
}

/// Resolves an absolute path, or the name of a group alone, as QEMU does.
fn resolve(registry: &Registry, path: &str) -> Result<Place, Error> {
    let not_found = || Error::new(Class::DeviceNotFound, format!("Device '{}' not found", shown(path)));
    let name = match path.strip_prefix('/') {
        Some("") => return Ok(Place::Root),
        Some("objects" | "objects/") => return Ok(Place::Objects),
        Some(inner) => inner.strip_prefix("objects/").ok_or_else(not_found)?,
        None if path == "objects" => return Ok(Place::Objects),
        None => path.strip_prefix("objects/").unwrap_or(path),
    };
    if registry.groups.get(name).is_err() {
        return Err(not_found());
    }
    Ok(Place::Group(name.to_owned()))
}

#[derive(Debug)]
pub(super) struct QomList {
    path: String,
}

impl Command for QomList {
    const NAME: &'static str = "qom-list";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { path: arguments.required("path")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let property = |name: &str, kind: &str| json!({ "name": name, "type": kind });
        let mut list = vec![property("type", "string")];
        match resolve(&registry, &self.path)? {
            Place::Root => list.push(property("objects", "child<container>")),
            Place::Objects => {
                list.extend(
                    registry.groups.all().iter().map(|group| property(group.name(), "child<throttle-group>")),
                );
                list.extend(registry.objects.secrets().iter().map(|id| property(id, "child<secret>")));
            }
            Place::Group(_) => {
                list.push(property("limits", "ThrottleLimits"));
                let settings = LimitSetting::ALL.iter();
                list.extend(settings.map(|setting| property(&Naming::Property.name(*setting), "int")));
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

impl Command for QomGet {
    const NAME: &'static str = "qom-get";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { path: arguments.required("path")?, property: arguments.required("property")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let property = self.property.as_str();
        let group = match resolve(&registry, &self.path)? {
            Place::Root | Place::Objects if property == "type" => return Ok(json!("container")),
            Place::Root | Place::Objects => return Err(no_property("container", property)),
            Place::Group(name) => registry.groups.get(&name)?,
        };
        let GroupSettings { limits, share, watermark } = group.settings();
        Ok(match property {
            "type" => json!(TYPE),
            "limits" => settings::all(&limits),
            "x-weir-weight" => json!(share.weight()),
            "x-weir-iops-reservation" => json!(share.iops_reservation()),
            "x-weir-bps-reservation" => json!(share.bps_reservation()),
            "x-weir-watermark" => json!(watermark.percent()),
            "x-weir-parent" => json!(group.parent().map_or("", |parent| parent.name())),
            _ => match limit_property(property) {
                Some(setting) => json!(limits.get(setting)),
                None => return Err(no_property(TYPE, property)),
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

impl Command for QomSet {
    const NAME: &'static str = "qom-set";
    const CHANGES: bool = true;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self {
            path: arguments.required("path")?,
            property: arguments.required("property")?,
            value: arguments.required("value")?,
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let group = match resolve(&registry, &self.path)? {
            Place::Root | Place::Objects if self.property == "type" => {
                return Err(read_only("container", "type"));
            }
            Place::Root | Place::Objects => return Err(no_property("container", &self.property)),
            Place::Group(name) => registry.groups.get(&name)?,
        };
        let changes = changes(self.property, self.value)?;
        weir::set_group(&registry, &group, changes.apply_to(group.settings())?).await?;
        registry.tell(&Change::SettingsChanged { name: group.name().to_owned() });
        Ok(json!({}))
    }
}

/// Changes of a property. The `x-` limits can only be set at creation, as in QEMU.
fn changes(property: String, value: Value) -> Result<Changes, Error> {
    if property == "type" || property == "x-weir-parent" {
        return Err(read_only(TYPE, &property));
    }
    if limit_property(&property).is_some() {
        return Err(Error::generic("Property cannot be set after initialization"));
    }
    let is_limits = property == "limits";
    if !is_limits && !OWN.iter().any(|(name, _)| *name == property) {
        return Err(no_property(TYPE, &property));
    }
    let mut arguments = Arguments::new(Map::from_iter([(property, value)]));
    let changes = match arguments.object("limits") {
        Ok(Some(mut inner)) => {
            let limits = LimitChanges::read(&mut inner, Naming::Plain)?;
            inner.finish()?;
            Changes::default().with_limits(limits)
        }
        Ok(None) => Changes::read_own(&mut arguments, "x-weir-")?,
        Err(wrong) => return Err(wrong),
    };
    arguments.finish()?;
    Ok(changes)
}

fn limit_property(property: &str) -> Option<LimitSetting> {
    LimitSetting::from_name(property.strip_prefix("x-")?)
}

fn no_property(kind: &str, property: &str) -> Error {
    Error::generic(format!("Property '{kind}.{}' not found", shown(property)))
}

fn read_only(kind: &str, property: &str) -> Error {
    Error::generic(format!("Property '{kind}.{property}' is not writable"))
}
