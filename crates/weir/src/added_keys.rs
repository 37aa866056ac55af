//! Disks and groups that a command adds to a running daemon, as options, as arguments of the
//! daemon's command, and as values in a config file. All three use the keys of the table.

use std::path::{Path, absolute};

use anyhow::Context as _;
use api::{AddedDisk, DiskStatus};
use clap::{Arg, builder::Resettable};
use serde_json::{Map, Value, json};
use settings::{
    ConfigError, ConfigKey, ConfigWithOrigins, DiskConfig, ExportConfig, ImageLocation, KeyTable, Origin,
    arguments::{ConfigKeyArgs, OptionSelection},
};
use storage::{StorageSpec, rbd::RbdAddress};

use crate::client::{self, ControlClient};

/// Options of `weir disk add`.
#[derive(Clone, Debug)]
pub(crate) struct DiskAddOptions;

/// Options of `weir attach`, which exports a disk as a device and not over NBD.
#[derive(Clone, Debug)]
pub(crate) struct DiskAttachOptions;

/// Help texts that differ from those of `weir serve`: a running daemon may already have images in
/// Ceph.
const RBD_HELP: [(&str, &str); 2] = [
    (
        "rbd-config",
        "Config file of Ceph, for images rbd:POOL/IMAGE [default: that of the daemon's other images, \
         else the default of Ceph]",
    ),
    (
        "rbd-user",
        "User of the Ceph cluster, without `client.` [default: that of the daemon's other images, \
         else admin]",
    ),
];

impl OptionSelection for DiskAddOptions {
    type Config = DiskConfig;

    fn is_option(key: &ConfigKey<DiskConfig>) -> bool {
        !["image", "export"].contains(&key.name)
    }

    fn adapt(option: Arg) -> Arg {
        let option = match RBD_HELP.into_iter().find(|(id, _)| option.get_id() == id) {
            Some((_, help)) => option.help(help),
            None => option,
        };
        // `-o` is the option of mount(8) in `weir attach`; omitted in both commands so that they
        // agree.
        if option.get_short() == Some('o') { option.short(Resettable::Reset) } else { option }
    }
}

impl OptionSelection for DiskAttachOptions {
    type Config = DiskConfig;

    fn is_option(key: &ConfigKey<DiskConfig>) -> bool {
        // Access rules, the description and dirty bitmaps are visible to NBD clients only; a device
        // has none.
        let of_nbd = key.heading == "Access" || ["description", "bitmap", "handover"].contains(&key.name);
        DiskAddOptions::is_option(key) && !of_nbd
    }

    fn adapt(option: Arg) -> Arg {
        DiskAddOptions::adapt(option)
    }
}

/// Config of a disk with the given options. Relative paths start at the current directory.
///
/// # Errors
/// If a value is malformed or out of range, or if values contradict each other.
pub(crate) fn disk<O: OptionSelection<Config = DiskConfig>>(
    name: &str,
    image: &ImageLocation,
    options: &ConfigKeyArgs<O>,
) -> anyhow::Result<ConfigWithOrigins<DiskConfig>> {
    let here = absolute(".").context("the current directory")?;
    // The daemon has another working directory: only absolute paths mean the same to it.
    let mut disk = with_image(name, image.clone().relative_to(&here));
    options.read_into(&mut disk, &here, |_| true)?;
    Ok(disk.into_checked()?)
}

/// Config of a disk from options in the form that [`options`] returns.
///
/// # Errors
/// If an option is unknown or its value is invalid.
pub(crate) fn disk_from_options(
    name: &str,
    image: &str,
    options: &[(String, Option<String>)],
) -> anyhow::Result<ConfigWithOrigins<DiskConfig>> {
    let mut disk = with_image(name, image.parse()?);
    for (option, text) in options {
        let key = DiskConfig::key(option).with_context(|| format!("--{option}: no such option"))?;
        let text = text.as_deref().unwrap_or("true");
        disk.set(key, text, Path::new("/"), Origin::option(option, text))?;
    }
    Ok(disk.into_checked()?)
}

fn with_image(name: &str, image: ImageLocation) -> ConfigWithOrigins<DiskConfig> {
    let place = Origin::new(image.to_string());
    let config = DiskConfig { name: name.to_owned(), image, ..DiskConfig::default() };
    let mut disk = ConfigWithOrigins::new(config, Origin::new(name));
    disk.record_origin("image", place);
    disk
}

/// All keys except the image as options of `weir serve`, with absolute paths; a flag has no value.
pub(crate) fn options(disk: &ConfigWithOrigins<DiskConfig>) -> Vec<(String, Option<String>)> {
    let keys = disk.given_keys().filter(|key| key.name != "image");
    let texts = keys.flat_map(|key| {
        let texts = key.write(disk).map(|literal| literal.texts()).unwrap_or_default();
        let is_flag = key.value == settings::key::KeyType::Flag;
        texts.into_iter().map(move |text| (key.name.to_owned(), (!is_flag).then_some(text)))
    });
    texts.collect()
}

/// The keys that were given, as a JSON object.
pub(crate) fn keys<T: KeyTable>(config: &ConfigWithOrigins<T>) -> Map<String, Value> {
    let value = |key: &ConfigKey<T>| Some((key.name.to_owned(), Value::from(&key.write(config)?)));
    config.given_keys().filter_map(value).collect()
}

/// Adds an export to those of the disk.
pub(crate) fn add_export(disk: &mut ConfigWithOrigins<DiskConfig>, export: ExportConfig) {
    let key = format!("export[{}]", disk.exports.len());
    disk.record_origin(key, disk.own_origin().clone());
    disk.exports.push(export);
}

/// Adds the disk to the daemon, with its exports; without any, at the daemon's default endpoints.
/// A failure leaves nothing added.
///
/// # Errors
/// Errors of the connection and error responses of the daemon.
pub(crate) fn add_to_daemon(
    client: &mut ControlClient,
    disk: &ConfigWithOrigins<DiskConfig>,
) -> Result<AddedDisk, client::ClientError> {
    let mut keys = keys(disk);
    // The protocol passes exports beside the keys, as they have types of their own.
    let exports = keys.remove("export");
    let mut parameters = json!({ "name": disk.name, "keys": keys });
    if let Some(exports) = exports {
        parameters["exports"] = exports;
    }
    client.execute_typed("x-weir-add-disk", parameters)
}

/// Sets Ceph's config file and user to those of the daemon's images in Ceph, if these images agree
/// and the disk does not set its own.
///
/// # Errors
/// If a value is malformed.
pub(crate) fn adopt_ceph_access(
    disk: &mut ConfigWithOrigins<DiskConfig>,
    disks: &[DiskStatus],
) -> Result<(), ConfigError> {
    let mut others = disks.iter().filter_map(|disk| cluster_access(&disk.image));
    // Values that differ between the daemon's images cannot be guessed for the new one.
    let (Some(own_access), Some((config, user))) = (cluster_access(&disk.image.to_string()), others.next())
    else {
        return Ok(());
    };
    if !others.all(|other| other == (config.clone(), user.clone())) {
        return Ok(());
    }
    let given = disk.rbd_config.as_ref().map(|path| path.to_string_lossy().into_owned());
    let (own_config, own_user) = (own_access.0.or(given), own_access.1.or(disk.rbd_user.clone()));
    // The daemon's user may not exist in another cluster.
    if own_config.is_some() && own_config != config {
        return Ok(());
    }
    let more = [
        ("rbd-config", config.filter(|_| own_config.is_none())),
        ("rbd-user", user.filter(|_| own_user.is_none())),
    ];
    for (key, text) in more.into_iter().filter_map(|(name, text)| Some((DiskConfig::key(name)?, text?))) {
        disk.set(key, &text, Path::new("/"), Origin::new(format!("{} of the daemon's images", key.name)))?;
    }
    Ok(())
}

/// Ceph's config file and user from the image's address; `None` for an image outside Ceph.
fn cluster_access(image: &str) -> Option<(Option<String>, Option<String>)> {
    let image: ImageLocation = image.parse().ok()?;
    let Ok(StorageSpec::Rbd(address)) = image.to_spec().ok()?.parse() else { return None };
    let RbdAddress { config, user, .. } = *address;
    Some((config.map(|path| path.to_string_lossy().into_owned()), user))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_back_with_absolute_paths() {
        let options = [
            ("format".to_owned(), Some("qcow2".to_owned())),
            ("read-only".to_owned(), None),
            ("secret-file".to_owned(), Some("/key".to_owned())),
            ("iops-total".to_owned(), Some("70".to_owned())),
        ];
        let disk = disk_from_options("a", "/a.qcow2", &options).unwrap();
        assert_eq!(super::options(&disk), options);
        let keys = json!({
            "image": "/a.qcow2", "format": "qcow2", "read-only": true, "secret-file": ["/key"], "iops-total": 70,
        });
        assert_eq!(Value::Object(super::keys(&disk)), keys);
        let wrong = [("weight".to_owned(), Some("0".to_owned()))];
        let wrong = disk_from_options("a", "/a", &wrong).unwrap_err().to_string();
        assert!(wrong.starts_with("--weight 0: is out of range"), "{wrong}");
    }

    #[test]
    fn ceph_access_is_copied_from_images_that_agree() {
        let with = |image: &str, given: &[(&str, &str)], others: &[&str]| {
            let status = |image: &&str| DiskStatus { image: (*image).to_owned(), ..DiskStatus::default() };
            let others: Vec<_> = others.iter().map(status).collect();
            let given = given.iter().map(|(key, value)| ((*key).to_owned(), Some((*value).to_owned())));
            let mut disk = disk_from_options("a", image, &given.collect::<Vec<_>>()).unwrap();
            adopt_ceph_access(&mut disk, &others).unwrap();
            let shown = |(key, value): (String, Option<String>)| format!("{key}={}", value.unwrap());
            options(&disk).into_iter().map(shown).collect::<Vec<_>>().join(" ")
        };
        let others = ["vm.raw", "rbd:p/a:conf=/c:id=weir", "rbd:p/b@one:conf=/c:id=weir"];
        assert_eq!(with("rbd:p/x", &[], &others), "rbd-config=/c rbd-user=weir");
        assert_eq!(with("rbd:p/x", &[("rbd-user", "me")], &others), "rbd-config=/c rbd-user=me");
        assert_eq!(with("rbd:p/x:id=me", &[], &others), "rbd-config=/c");
        assert_eq!(with("rbd:p/x:conf=/c", &[], &others), "rbd-user=weir");
        // Images of another cluster.
        assert_eq!(with("rbd:p/x:conf=/d", &[], &others), "");
        assert_eq!(with("rbd:p/x", &[("rbd-config", "/d")], &others), "rbd-config=/d");
        // The daemon's images disagree, or none names both values.
        assert_eq!(with("rbd:p/x", &[], &["rbd:p/a:conf=/c", "rbd:p/b:conf=/d"]), "");
        assert_eq!(with("rbd:p/x", &[], &["rbd:p/a"]), "");
        assert_eq!(with("vm.raw", &[], &others), "");
    }
}
