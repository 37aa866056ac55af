//! A disk as the command line describes it to a daemon that runs: the options of `weir serve`, and
//! what they are at its control socket.
//!
//! Not all of them can be said there: those are refused by name. Never asks the daemon.

use std::{
    fs,
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, absolute},
};

use anyhow::{anyhow, bail};
use api::DiskStatus;
use clap::{Arg, builder::Resettable};
use nbd::uri::Uri;
use serde_json::{Map, Value, json};
use settings::{
    DiskConfig, Key, KeySet as _,
    arguments::{KeyArgs, KeyOptions},
    key::ValueKind,
};
use storage::{Part, Spec, rbd::Address};

use crate::client::{self, Client};

/// Keys of a disk as options of a command that adds it to a running daemon.
pub(crate) type DiskOptions = KeyArgs<AddedDisk>;

/// What is an option there.
#[derive(Clone, Debug)]
pub(crate) struct AddedDisk;

/// Keys that a control socket has no arguments for, or that are options of the command itself.
const OTHERS: [&str; 5] = ["image", "description", "handover", "bitmap", "export"];

/// A running daemon probes nothing.
const FORMAT_HELP: &str = "How the image's bytes are laid out: raw or qcow2 [default: found by probing, \
     where that is safe; a daemon that runs finds qcow2 alone]";

/// A running daemon may have images of clusters.
const RBD_HELP: [(&str, &str); 2] = [
    (
        "rbd-config",
        "Ceph's config file, for images rbd:POOL/IMAGE [default: as the daemon has it for all others, \
         else the one that Ceph finds]",
    ),
    (
        "rbd-user",
        "Who asks the Ceph cluster, without `client.` [default: as the daemon has it for all others, \
         else admin]",
    ),
];

impl KeyOptions for AddedDisk {
    type Config = DiskConfig;

    fn has(key: &Key<DiskConfig>) -> bool {
        !["Access", "Devices to imitate"].contains(&key.heading) && !OTHERS.contains(&key.name)
    }

    fn adapt(option: Arg) -> Arg {
        let mut help = [("format", FORMAT_HELP)].into_iter().chain(RBD_HELP);
        let option = match help.find(|(id, _)| option.get_id() == id) {
            Some((_, help)) => option.help(help),
            None => option,
        };
        // Here `-o` is mount's.
        if option.get_short() == Some('o') { option.short(Resettable::Reset) } else { option }
    }
}

/// The options that were given, with whole paths; a flag has no value.
pub(crate) fn with_whole_paths(options: &DiskOptions) -> Vec<(String, Option<String>)> {
    let whole = |(name, text): (&str, &str)| {
        let key = DiskConfig::key(name).expect("an option is a key");
        let path = (key.value == ValueKind::Path).then_some(text);
        let path = path.and_then(|path| absolute(path).ok()?.into_os_string().into_string().ok());
        let text = path.unwrap_or_else(|| text.to_owned());
        (name.to_owned(), (key.value != ValueKind::Flag).then_some(text))
    };
    options.given().map(whole).collect()
}

/// The options of an image, with how a daemon reaches its own images of a Ceph cluster, where all
/// are reached in one way, and nothing else is said of this one.
pub(crate) fn reached_alike(
    image: &str,
    mut options: Vec<(String, Option<String>)>,
    disks: &[DiskStatus],
) -> Vec<(String, Option<String>)> {
    let mut ways = disks.iter().filter_map(|disk| way(&disk.image));
    let (Some(own), Some((config, user))) = (way(image), ways.next()) else { return options };
    if !ways.all(|other| other == (config.clone(), user.clone())) {
        return options;
    }
    let said = |key: &str, own: Option<String>| {
        own.or_else(|| options.iter().find(|(name, _)| name == key)?.1.clone())
    };
    let (own_config, own_user) = (said("rbd-config", own.0), said("rbd-user", own.1));
    // Who is known to another cluster need not be to this one.
    if own_config.is_some() && own_config != config {
        return options;
    }
    let more = [
        ("rbd-config", config.filter(|_| own_config.is_none())),
        ("rbd-user", user.filter(|_| own_user.is_none())),
    ];
    options.extend(more.into_iter().filter_map(|(key, value)| Some((key.to_owned(), Some(value?)))));
    options
}

/// Ceph's config file and user, as far as they are named; `None` for what is in no cluster.
fn way(image: &str) -> Option<(Option<String>, Option<String>)> {
    let image: settings::Image = image.parse().ok()?;
    let Ok(Spec::Rbd(address)) = image.spec().ok()?.parse() else { return None };
    Some((address.config.map(|path| path.to_string_lossy().into_owned()), address.user))
}

/// Options that are said where the node is made; all others are settings of the disk.
const OF_NODES: [&str; 8] =
    ["format", "cache", "discard", "detect-zeroes", "read-only", "force-share", "rbd-config", "rbd-user"];
/// What is said of its node alone.
const OF_FORMATS: [&str; 5] = ["options", "snapshot", "secret-file", "reconnect-delay", "open-timeout"];

/// A disk as a daemon is told of it.
pub(crate) struct Described {
    /// Of `blockdev-add`.
    pub(crate) node: Value,
    /// Its passphrase, which the daemon reads and needs only to open the image.
    secret: Option<Value>,
    /// What is set of the disk then.
    settings: Map<String, Value>,
}

impl Described {
    /// Has a daemon serve it by these exports, each with the arguments of `block-export-add` but
    /// for its node; returns the daemon's answer, which has their `uris`. Where it fails, the
    /// daemon has nothing of it.
    pub(crate) fn add(self, client: &mut Client, mut exports: Vec<Value>) -> Result<Value, client::Error> {
        let Self { node, secret, settings } = self;
        for export in &mut exports {
            export["node-name"] = node["node-name"].clone();
        }
        let mut asked = json!({ "node": node, "settings": settings, "exports": exports });
        if let Some(secret) = secret {
            asked["secret"] = secret;
        }
        client.execute("x-weir-add-disk", asked)
    }
}

/// Fails at what only a file or a command line can say.
pub(crate) fn node(
    name: &str,
    image: &str,
    options: &[(String, Option<String>)],
) -> anyhow::Result<Described> {
    let option = |name: &str| options.iter().find(|(known, _)| known == name);
    let value = |name: &str| option(name).and_then(|(_, value)| value.as_deref());
    let file = match image.split_once(':') {
        Some(("memory", size)) => {
            json!({ "driver": "x-weir-memory", "size": settings::size(size).map_err(anyhow::Error::msg)? })
        }
        Some(("null", size)) => {
            json!({ "driver": "null-co", "size": settings::size(size).map_err(anyhow::Error::msg)? })
        }
        Some(("rbd", _)) => rbd(image, value("rbd-config"), value("rbd-user"))?,
        _ if Uri::is_meant(image) => json!({ "driver": "nbd", "x-weir-uri": image }),
        _ => json!({ "driver": file_driver(image), "filename": image }),
    };
    if let Some(option) = ["rbd-config", "rbd-user"].into_iter().find(|name| option(name).is_some())
        && file["driver"] != "rbd"
    {
        bail!("--{option}: is for images of a Ceph cluster, rbd:POOL/IMAGE (leave it out)");
    }
    let format = match value("format") {
        Some(format) => format,
        // As for `weir serve`, they are the raw format's.
        None if value("options").is_some() => "raw",
        None if is_qcow2(image) => "qcow2",
        None if file["driver"] == "nbd" => {
            bail!("{image}: {NO_FORMAT}")
        }
        None if file["filename"].is_null() => "raw",
        None => {
            check_is_image(image)?;
            bail!("{image}: {NO_FORMAT}")
        }
    };
    let mut file = file;
    for option in ["reconnect-delay", "open-timeout"] {
        let Some(time) = value(option) else { continue };
        if file["driver"] != "nbd" {
            bail!("--{option} {time}: is for images at NBD servers, and {image} is at none (leave it out)");
        }
        let time = settings::long_duration(time).map_err(anyhow::Error::msg)?;
        // QEMU's arguments have whole seconds.
        file[option] = json!(time.as_secs() + u64::from(time.subsec_nanos() > 0));
    }
    let mut node = json!({ "driver": format, "node-name": name, "file": file });
    match value("cache") {
        None | Some("writeback") => {}
        Some("none") => node["cache"] = json!({ "direct": true }),
        Some("unsafe") => node["cache"] = json!({ "no-flush": true }),
        Some(mode) => bail!(
            "--cache {mode}: is not to be had by a daemon's control socket (write the disk into the daemon's config file and `weir reload`; `weir attach` has --alone)"
        ),
    }
    for key in ["discard", "detect-zeroes"] {
        if let Some(mode) = value(key) {
            node[key] = json!(mode);
        }
    }
    for flag in ["read-only", "force-share"] {
        if option(flag).is_some() {
            node[flag] = json!(true);
        }
    }
    if let Some(part) = value("options") {
        let Part { offset, size } = settings::read(part).map_err(anyhow::Error::msg)?;
        node["offset"] = json!(offset);
        if let Some(size) = size {
            node["size"] = json!(size);
        }
    }
    if let Some(snapshot) = value("snapshot") {
        node["x-weir-snapshot"] = json!(snapshot);
        node["read-only"] = json!(true);
    }
    let mut files = options.iter().filter(|(name, _)| name == "secret-file").map(|(_, file)| file);
    let secret = files.next().map(|file| {
        let id = format!("secret-of-{name}");
        node["encrypt"] = json!({ "format": "luks", "key-secret": id });
        json!({ "id": id, "file": file })
    });
    if files.next().is_some() {
        bail!(
            "--secret-file: one alone is to be had by a daemon's control socket (write the disk into the daemon's config file and `weir reload`; `weir attach` has --alone)"
        );
    }
    let mut settings = Map::new();
    let is_of_node = |name: &str| OF_NODES.contains(&name) || OF_FORMATS.contains(&name);
    for (name, value) in options.iter().filter(|(name, _)| !is_of_node(name)) {
        let text = value.as_deref().unwrap_or("on");
        let number = settings::size(text).ok().filter(|_| name != "group");
        let value = number.map_or_else(|| json!(text), |number| json!(number));
        settings.insert(name.clone(), value);
    }
    Ok(Described { node, secret, settings })
}

/// What a daemon finds out by itself is qcow2 alone.
const NO_FORMAT: &str = "a daemon is to be told how it is laid out (add --format raw)";

/// Fails where there is no image whatever its format is, as far as this process sees it.
fn check_is_image(path: &str) -> anyhow::Result<()> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("{path}: no such file (create it first, or check the path)")
        }
        Ok(file) if file.is_dir() => {
            bail!("{path}: is a directory (an image is a regular file or a block device)")
        }
        _ => Ok(()),
    }
}

/// The node of an image of a Ceph cluster.
fn rbd(image: &str, config: Option<&str>, user: Option<&str>) -> anyhow::Result<Value> {
    let image: settings::Image = image.parse()?;
    let image =
        image.reached_by(config.map(Path::new), None).map_err(|rule| anyhow!("--rbd-config: {rule}"))?;
    let image = image.reached_by(None, user).map_err(|rule| anyhow!("--rbd-user: {rule}"))?;
    let Spec::Rbd(address) = image.spec()?.parse()? else { bail!("{image}: is no image of a Ceph cluster") };
    let Address { pool, namespace, image, snapshot, config, user, keyring, monitors } = *address;
    if keyring.is_some() || monitors.is_some() {
        bail!(
            "keyring= and mon_host=: are not to be had by a daemon's control socket (write them into Ceph's config file)"
        );
    }
    let mut node = json!({ "driver": "rbd", "pool": pool, "image": image });
    let config = config.map(|path| path.to_string_lossy().into_owned());
    let others = [("namespace", namespace), ("snapshot", snapshot), ("conf", config), ("user", user)];
    for (key, value) in others {
        if let Some(value) = value {
            node[key] = json!(value);
        }
    }
    Ok(node)
}

fn file_driver(image: &str) -> &'static str {
    use std::os::unix::fs::FileTypeExt as _;
    match fs::metadata(image).is_ok_and(|file| file.file_type().is_block_device()) {
        true => "host_device",
        false => "file",
    }
}

fn is_qcow2(image: &str) -> bool {
    let mut magic = [0; 4];
    let mut file = fs::OpenOptions::new();
    // Opening a named pipe, which is never an image, would wait for a writer.
    file.read(true).custom_flags(nix::libc::O_NONBLOCK);
    file.open(image).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"QFI\xfb"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_a_cluster_are_reached_as_all_others_are() {
        let with = |image: &str, said: &[(&str, &str)], others: &[&str]| {
            let disk = |image: &&str| DiskStatus { image: (*image).to_owned(), ..DiskStatus::default() };
            let disks: Vec<_> = others.iter().map(disk).collect();
            let said = said.iter().map(|(key, value)| ((*key).to_owned(), Some((*value).to_owned())));
            let options = reached_alike(image, said.collect(), &disks);
            let shown = |(key, value): (String, Option<String>)| format!("{key}={}", value.unwrap());
            options.into_iter().map(shown).collect::<Vec<_>>().join(" ")
        };
        let others = ["vm.raw", "rbd:p/a:conf=/c:id=weir", "rbd:p/b@one:conf=/c:id=weir"];
        assert_eq!(with("rbd:p/x", &[], &others), "rbd-config=/c rbd-user=weir");
        assert_eq!(with("rbd:p/x", &[("rbd-user", "me")], &others), "rbd-user=me rbd-config=/c");
        assert_eq!(with("rbd:p/x:id=me", &[], &others), "rbd-config=/c");
        assert_eq!(with("rbd:p/x:conf=/c", &[], &others), "rbd-user=weir");
        // Of another cluster.
        assert_eq!(with("rbd:p/x:conf=/d", &[], &others), "");
        assert_eq!(with("rbd:p/x", &[("rbd-config", "/d")], &others), "rbd-config=/d");
        // Nobody can tell which, or there is nothing to tell.
        assert_eq!(with("rbd:p/x", &[], &["rbd:p/a:conf=/c", "rbd:p/b:conf=/d"]), "");
        assert_eq!(with("rbd:p/x", &[], &["rbd:p/a"]), "");
        assert_eq!(with("vm.raw", &[], &others), "");
    }
}
