//! `weir disk add`, `weir disk remove` and `weir disk move`.

use std::path::{Path, absolute};

use anyhow::{anyhow, bail};
use api::ServerStatus;
use clap::{Args, Subcommand};
use console::{Failure, print, progress::IfLong};
use policy::access::Network;
use serde_json::{Value, json};
use settings::{Address, Endpoint, Image, Nbd};

use super::{
    Asked,
    doors::{self, DoorArgs},
    finish, finish_with,
};
use crate::{
    client::Client,
    described::{self, DiskOptions},
    saving::{self, SaveArgs},
};

pub(crate) const ADD_EXAMPLES: &str = "\
Examples:
  weir disk add vm3 /srv/images/vm3.qcow2 -f qcow2 --cache none --group gold --iops-total 2000
      Serves it at once, at the daemon's own addresses for NBD.
  weir disk add vm4 vm4.raw -f raw --vhost-user-blk unix:/run/weir/vm4.sock,queues=4 --save
      For a virtual machine, to be plugged in while it runs.
  weir disk add vm3 vm3.raw -f raw --save
      Also after the next start: the config file gets a [disk.vm3].
  weir disk remove vm3 --save
      If nobody uses it; the config file's [disk.vm3] goes, all other lines stay.
  weir disk move vm3 --to host2
      To another host of the [cluster], which reaches the same image; its burst does not begin anew.

A disk is added whole or not at all. What a control socket has no words for (descriptions, bitmaps) is written \
into the config file, which `weir reload` applies; `weir attach` makes devices with mounts and all.";

/// What is done to disks.
#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Have the daemon serve one more disk
    #[command(after_help = ADD_EXAMPLES)]
    Add(Box<AddArgs>),
    /// Have the daemon serve a disk no longer, if nobody uses it
    #[command(after_help = ADD_EXAMPLES)]
    Remove(RemoveArgs),
    /// Have another host of the cluster serve a disk, with its limits and what is in its buckets
    #[command(after_help = ADD_EXAMPLES)]
    Move(MoveArgs),
}

/// What `weir disk add` is told.
#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// The disk's name, which clients ask for: at most 31 letters, digits, `.`, `_` and `-`
    #[arg(value_name = "NAME")]
    name: String,
    /// A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE or the URI of an NBD export
    #[arg(value_name = "IMAGE", value_parser = settings::read::<Image>)]
    image: Image,
    /// Serve it over NBD at this address, where the daemon listens already; repeatable. With
    /// ,read-only behind it, nobody writes there [default: [daemon] nbd or --nbd of `weir serve`,
    /// unless it is served otherwise; never where only other disks' exports are]
    #[arg(long, value_name = "ADDRESS[,read-only]", value_parser = nbd)]
    nbd: Vec<Nbd>,
    /// Let clients have it from this network and no other; repeatable
    #[arg(long, value_name = "NETWORK", value_parser = settings::read::<Network>)]
    allow: Vec<Network>,
    /// Let no client have it from this network; repeatable
    #[arg(long, value_name = "NETWORK", value_parser = settings::read::<Network>)]
    deny: Vec<Network>,
    /// Let clients with this name have it, as --tls-authz of `weir serve`; repeatable
    #[arg(long, value_name = "NAME", value_parser = settings::tls_name)]
    tls_authz: Vec<String>,
    #[command(flatten)]
    doors: DoorArgs,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    disk: DiskOptions,
    #[command(flatten)]
    save: SaveArgs,
}

/// What `weir disk remove` is told.
#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// The disk
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    save: SaveArgs,
}

/// What `weir disk move` is told.
#[derive(Debug, Args)]
pub(crate) struct MoveArgs {
    /// The disk
    #[arg(value_name = "NAME")]
    name: String,
    /// The host, as its section `cluster` calls it
    #[arg(long, value_name = "HOST")]
    to: String,
    /// Where that host is to serve it, if it listens at several addresses for NBD
    #[arg(long, value_name = "ADDRESS")]
    nbd: Option<Address>,
    /// Disconnect its clients
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    save: SaveArgs,
}

/// Where a daemon listens that runs.
fn nbd(text: &str) -> Result<Nbd, String> {
    let nbd: Nbd = settings::read(text)?;
    if let Endpoint::Passed(_) = nbd.at { Err(PASSED.to_owned()) } else { Ok(nbd) }
}

/// What is wrong with `fd:NAME` there.
const PASSED: &str = "names a socket as it was passed when the daemon started; write where that listens, as `weir \
status` shows it: unix:PATH or HOST:PORT";

pub(crate) fn run(command: DiskCommand) -> Result<(), Failure> {
    match command {
        DiskCommand::Add(arguments) => add(*arguments),
        DiskCommand::Remove(arguments) => remove(arguments),
        DiskCommand::Move(arguments) => move_away(arguments),
    }
}

fn add(arguments: AddArgs) -> Result<(), Failure> {
    let AddArgs { name, image, nbd, allow, deny, tls_authz, doors, asked: Asked { json, qmp }, disk, save } =
        arguments;
    let doors = doors.all()?;
    let is_over_nbd = !nbd.is_empty() || doors.is_empty();
    let texts = |networks: &[Network]| networks.iter().map(Network::to_string).collect::<Vec<_>>();
    let access = [("allow", texts(&allow)), ("deny", texts(&deny)), ("tls-authz", tls_authz)];
    if let Some((key, _)) = access.iter().find(|(_, texts)| !is_over_nbd && !texts.is_empty()) {
        return Err(Failure::Usage(anyhow!(
            "--{key}: is not used, because the disk is not exported over NBD (leave it out, or add --nbd ADDRESS)"
        )));
    }
    let here = absolute(".")?;
    // The daemon may be in another directory, and so is the config file.
    let (is_snapshot, is_in_cluster) = (image.is_snapshot(), image.is_rbd());
    let image = image.relative_to(&here).to_string();
    let options = described::with_whole_paths(&disk);
    // What is wrong with it whatever a daemon has.
    described::node(&name, &image, &options)?;
    let mut client = Client::reach(qmp)?.with_patience(Client::LONG)?;
    // How the daemon reaches its other images is of interest only for one in a Ceph cluster.
    let report = if is_in_cluster { client.status()?.1 } else { client.summary()? };
    let options = described::reached_alike(&image, options, &report.disks);
    let described = described::node(&name, &image, &options)?;
    let places = match is_over_nbd {
        true => places(&name, &nbd, &here, &report.servers)?,
        false => Vec::new(),
    };
    let saving = saving::prepare(&report, &save, |text| {
        let format = ("format", described.node["driver"].as_str().filter(|_| !image.contains(':')));
        let mut keys = keys(&image, format, &options);
        let exports = places.iter().filter(|place| !place.is_implied).map(Place::written);
        let exports = exports.chain(doors.iter().map(|door| Ok(doors::written(door))));
        let exports = exports.collect::<Result<Vec<_>, _>>()?;
        if !exports.is_empty() {
            keys.push(("export".to_owned(), toml_edit::Array::from_iter(exports).into()));
        }
        let said = access.iter().filter(|(_, texts)| !texts.is_empty());
        keys.extend(said.map(|(key, texts)| ((*key).to_owned(), toml_edit::Array::from_iter(texts).into())));
        saving::added(text, "disk", &name, keys)
    })?;
    let is_read = |(option, _): &(String, _)| ["read-only", "snapshot"].contains(&option.as_str());
    let is_writable = !is_snapshot && !options.iter().any(is_read);
    let mut exports = Vec::new();
    // As a daemon calls those of its config file.
    let id = |exports: &[Value], address: &str| {
        json!(if exports.is_empty() { name.clone() } else { format!("{name}@{address}") })
    };
    for Place { server, read_only, .. } in &places {
        let mut export = json!({ "type": "nbd", "name": name, "writable": is_writable && !read_only });
        export["x-weir-listen"] = json!(server.address);
        for (key, texts) in access.iter().filter(|(_, texts)| !texts.is_empty()) {
            export[format!("x-weir-{key}")] = json!(texts);
        }
        export["id"] = id(&exports, &server.address);
        exports.push(export);
    }
    for door in &doors {
        let mut export = Value::Object(doors::asked(door, is_writable));
        export["id"] = id(&exports, &door.address());
        exports.push(export);
    }
    let answer = described.add(&mut client, exports)?;
    finish_with(("disk", &name, "added"), saving, json, &answer)
}

/// A server that is to have it, and how.
struct Place<'a> {
    server: &'a ServerStatus,
    read_only: bool,
    /// A config file that says nothing means this.
    is_implied: bool,
}

impl Place<'_> {
    /// As an export of a config file.
    fn written(&self) -> Result<toml_edit::InlineTable, String> {
        let listen = self.server.listen.as_deref().ok_or_else(|| {
            let address = &self.server.address;
            format!("has no words for {address}, a socket that was passed without a name (leave --save out)")
        })?;
        let mut table = toml_edit::InlineTable::new();
        table.insert("type", "nbd".into());
        table.insert("listen", listen.into());
        if self.read_only {
            table.insert("read-only", true.into());
        }
        Ok(table)
    }
}

/// Where the disk is to be over NBD: where it is said, or else at the daemon's own addresses. At
/// those that are there for exports of other disks, others expect those disks alone.
fn places<'a>(
    name: &str,
    said: &[Nbd],
    here: &Path,
    servers: &'a [ServerStatus],
) -> anyhow::Result<Vec<Place<'a>>> {
    let addresses: Vec<_> = servers.iter().map(|server| server.address.as_str()).collect();
    if said.is_empty() {
        let standard = servers.iter().filter_map(|server| Some((server, server.default_export?.read_only)));
        let places: Vec<_> = standard
            .map(|(server, read_only)| Place { server, read_only, is_implied: !server.added })
            .collect();
        if places.is_empty() {
            let named = addresses.iter().map(|address| format!("--nbd {address}, or "));
            let named: String = named.collect();
            bail!(
                "{name}: the daemon has no address for all disks (say where: {named}--vhost-user-blk unix:PATH)"
            );
        }
        return Ok(places);
    }
    let mut places: Vec<Place<'_>> = Vec::new();
    for Nbd { at, read_only } in said {
        let at = match at {
            Endpoint::Address(Address::Unix(path)) => format!("unix:{}", here.join(path).display()),
            other => other.to_string(),
        };
        let is_there = |server: &&ServerStatus| {
            let mut known = [Some(server.address.as_str()), server.listen.as_deref()].into_iter().flatten();
            known.any(|known| control::listen::is_same_place(known, &at))
        };
        let Some(server) = servers.iter().find(is_there) else {
            let known = match &*addresses {
                [] => "nor anywhere for NBD".to_owned(),
                addresses => format!("but at {}", addresses.join(", ")),
            };
            bail!(
                "--nbd {at}: the daemon does not listen there, {known} (a new address is for the config file and `weir reload`)"
            );
        };
        if places.iter().any(|place| std::ptr::eq(place.server, server)) {
            bail!("--nbd {at}: is given twice (remove one)");
        }
        places.push(Place { server, read_only: *read_only, is_implied: false });
    }
    Ok(places)
}

/// As they stand in a config file.
fn keys(
    image: &str,
    (format_key, format): (&str, Option<&str>),
    options: &[(String, Option<String>)],
) -> Vec<(String, toml_edit::Value)> {
    let mut keys = vec![("image".to_owned(), image.into())];
    if !options.iter().any(|(option, _)| option == format_key)
        && let Some(format) = format
    {
        keys.push((format_key.to_owned(), format.into()));
    }
    keys.extend(options.iter().map(|(option, value)| {
        let value = match value.as_deref() {
            None => true.into(),
            Some(text) => text.parse::<i64>().map_or_else(|_| text.into(), toml_edit::Value::from),
        };
        (option.clone(), value)
    }));
    keys
}

fn remove(arguments: RemoveArgs) -> Result<(), Failure> {
    let RemoveArgs { name, asked: Asked { json, qmp }, save } = arguments;
    let mut client = Client::reach(qmp)?.with_patience(Client::LONG)?;
    let (_, report) = client.status()?;
    let served = report.disks.iter().map(|disk| (&disk.name, &disk.image));
    let unopened = report.unopened.iter().map(|disk| (&disk.name, &disk.image));
    let Some((_, image)) = served.chain(unopened).find(|(known, _)| **known == name) else {
        return Err(anyhow!(report.no_such_disk(&name)).into());
    };
    let saving = saving::prepare(&report, &save, |text| saving::removed(text, "disk", &name))?;
    let unsaved = if saving.is_some() { ", and nothing is saved" } else { "" };
    let waiting = IfLong::say(format!(
        "{name}: waits for {image}, to close it (Ctrl-C ends this command alone: the daemon goes on with it{unsaved})"
    ));
    let removed = client.execute("x-weir-remove-disk", json!({ "name": name }));
    drop(waiting);
    removed?;
    finish(("disk", &name, "removed"), saving, json)
}

fn move_away(arguments: MoveArgs) -> Result<(), Failure> {
    let MoveArgs { name, to, nbd, force, asked: Asked { json, qmp }, save } = arguments;
    let mut client = Client::reach(qmp)?.with_patience(Client::LONG)?;
    let (_, report) = client.status()?;
    if !report.disks.iter().any(|disk| disk.name == name) {
        return Err(anyhow!(report.no_such_disk(&name)).into());
    }
    let saving = saving::prepare(&report, &save, |text| saving::removed(text, "disk", &name))?;
    let is_saved = saving.is_some();
    let mut wish = json!({ "name": name, "to": to, "force": force });
    if let Some(address) = &nbd {
        wish["listen"] = json!(address.to_string());
    }
    let mut done: Value = client.execute("x-weir-move-disk", wish)?;
    if is_saved {
        done["listed-here"] = json!(false);
    }
    finish_with(("disk", &name, "moved"), saving, json, &done)?;
    if json {
        return Ok(());
    }
    Ok(print(&moved(&name, &to, &done))?)
}

/// Where the disk is from now on, and what config files do not say yet.
fn moved(name: &str, to: &str, done: &Value) -> String {
    let is_there = done["listed-there"] == true;
    let mut left = Vec::new();
    if !is_there {
        left.push(format!("put a [disk.{name}] in the config file there"));
    }
    if done["listed-here"] == true {
        left.push(format!("take [disk.{name}] out of the one here, as `weir disk move --save` does"));
    }
    let until = if is_there { "" } else { " until it ends" };
    let left = if left.is_empty() { String::new() } else { format!(" ({})", left.join("; ")) };
    format!("{name}: {to} has it{until}{left}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_config_files_lack_after_a_move_is_said_and_nothing_else() {
        let told = |here: bool, there: bool| {
            moved("vm", "b", &json!({ "listed-here": here, "listed-there": there }))
        };
        assert_eq!(told(false, true), "vm: b has it\n");
        assert_eq!(
            told(false, false),
            "vm: b has it until it ends (put a [disk.vm] in the config file there)\n"
        );
        assert_eq!(
            told(true, true),
            "vm: b has it (take [disk.vm] out of the one here, as `weir disk move --save` does)\n"
        );
        assert!(told(true, false).contains("there; take [disk.vm] out of the one here"));
    }
}
