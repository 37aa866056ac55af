//! `weir disk add`, `weir disk remove` and `weir disk move`.

use std::path::absolute;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use console::{Failure, print};
use policy::access::Network;
use serde_json::{Value, json};
use settings::{Address, Door, Image};

use super::{
    Asked,
    doors::{self, DoorArgs},
    finish, finish_with,
};
use crate::{
    client::{Client, report::Report},
    described::{self, DiskOptions},
    saving::{self, SaveArgs},
};

pub(crate) const ADD_EXAMPLES: &str = "\
Examples:
  weir disk add vm3 /srv/images/vm3.qcow2 -f qcow2 --cache none --group gold --iops-total 2000
      Serves it at once, where the daemon listens for NBD.
  weir disk add vm4 vm4.raw -f raw --vhost-user-blk unix:/run/weir/vm4.sock,queues=4 --save
      For a virtual machine, to be plugged in while it runs.
  weir disk add vm3 vm3.raw -f raw --save
      Also after the next start: the config file gets a [disk.vm3].
  weir disk remove vm3 --save
      If nobody uses it; the config file's [disk.vm3] goes, all other lines stay.
  weir disk move vm3 --to host2
      To another host of the [cluster], which reaches the same image; its burst does not begin anew.

A disk that is added whole or not at all. What a control socket has no words for (descriptions, bitmaps) is written \
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
    /// A file, a block device, memory:SIZE, null:SIZE or the URI of an NBD export
    #[arg(value_name = "IMAGE", value_parser = settings::read::<Image>)]
    image: Image,
    /// Serve it over NBD at this address, where the daemon listens already [default: the only one
    /// where it does, unless it is served otherwise]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    nbd: Option<Address>,
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
fn address(text: &str) -> Result<Address, String> {
    match text.strip_prefix("fd:").filter(|name| name.parse::<u16>().is_err()) {
        Some(_) => Err(PASSED.to_owned()),
        None => settings::read(text),
    }
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
    let is_over_nbd = nbd.is_some() || doors.is_empty();
    let texts = |networks: &[Network]| networks.iter().map(Network::to_string).collect::<Vec<_>>();
    let access = [("allow", texts(&allow)), ("deny", texts(&deny)), ("tls-authz", tls_authz)];
    if let Some((key, _)) = access.iter().find(|(_, texts)| !is_over_nbd && !texts.is_empty()) {
        return Err(Failure::Usage(anyhow!(
            "--{key}: is not used, because the disk is not exported over NBD (leave it out, or add --nbd ADDRESS)"
        )));
    }
    let here = absolute(".")?;
    // The daemon may be in another directory, and so is the config file.
    let image = image.relative_to(&here).to_string();
    let options = disk.with_whole_paths();
    let described = described::node(&name, &image, &options)?;
    let mut client = Client::reach(qmp)?.with_patience(Client::LONG)?;
    let (_, report) = client.status()?;
    if nbd.is_none() && is_over_nbd && report.servers.len() > 1 {
        let addresses: Vec<_> = report.servers.iter().map(|server| server.address.as_str()).collect();
        let addresses = addresses.join(", ");
        return Err(anyhow!("{name}: the daemon serves at {addresses} (say where with --nbd ADDRESS)").into());
    }
    if nbd.is_none() && is_over_nbd && is_of_disks_alone(&report) {
        let addresses = report.servers.first().map_or("nowhere", |server| server.address.as_str());
        return Err(anyhow!(
            "{name}: the config file has no address for disks that name none, and {addresses} is another \
             disk's own (say where with --nbd ADDRESS, --vhost-user-blk or another export)"
        )
        .into());
    }
    let saving = saving::prepare(&report, &save, |text| {
        let format = ("format", described.node["driver"].as_str().filter(|_| !image.contains(':')));
        let mut keys = keys(&image, format, &options, (nbd.as_ref(), &doors));
        let said = access.iter().filter(|(_, texts)| !texts.is_empty());
        keys.extend(said.map(|(key, texts)| ((*key).to_owned(), toml_edit::Array::from_iter(texts).into())));
        saving::added(text, "disk", &name, keys)
    })?;
    let is_writable = !options.iter().any(|(option, _)| ["read-only", "snapshot"].contains(&option.as_str()));
    let mut exports = Vec::new();
    if is_over_nbd {
        let mut export = json!({ "type": "nbd", "id": name, "name": name, "writable": is_writable });
        if let Some(address) = &nbd {
            export["x-weir-listen"] = json!(address.to_string());
        }
        for (key, texts) in access.iter().filter(|(_, texts)| !texts.is_empty()) {
            export[format!("x-weir-{key}")] = json!(texts);
        }
        exports.push(export);
    }
    for door in &doors {
        let mut export = Value::Object(doors::asked(door, is_writable));
        // As a daemon calls those of its config file.
        let is_first = exports.is_empty();
        export["id"] = json!(if is_first { name.clone() } else { format!("{name}@{}", door.address()) });
        exports.push(export);
    }
    described.add(&mut client, exports)?;
    finish(("disk", &name, "added"), saving, json)
}

/// Whether the daemon listens where disks of its config file have said, and nowhere for all. Not
/// known to who may not read the file.
fn is_of_disks_alone(report: &Report) -> bool {
    let text = report.config.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
    let Some(file) = text.and_then(|text| text.parse::<toml_edit::DocumentMut>().ok()) else { return false };
    let has_address = |disk: &toml_edit::Item| {
        let exports = disk.get("export").and_then(toml_edit::Item::as_array);
        let mut tables = exports.into_iter().flatten().filter_map(toml_edit::Value::as_inline_table);
        tables.any(|export| {
            export.get("type").and_then(toml_edit::Value::as_str) == Some("nbd")
                && export.contains_key("listen")
        })
    };
    let disks = file.get("disk").and_then(toml_edit::Item::as_table_like);
    let is_for_all = file.get("daemon").is_some_and(|daemon| daemon.get("nbd").is_some());
    !is_for_all && disks.is_some_and(|disks| disks.iter().any(|(_, disk)| has_address(disk)))
}

/// As they stand in a config file.
fn keys(
    image: &str,
    (format_key, format): (&str, Option<&str>),
    options: &[(String, Option<String>)],
    (nbd, doors): (Option<&Address>, &[Door]),
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
    let over_nbd = nbd.map(|address| {
        let mut table = toml_edit::InlineTable::new();
        table.insert("type", "nbd".into());
        table.insert("listen", address.to_string().into());
        table
    });
    let exports: Vec<_> = over_nbd.into_iter().chain(doors.iter().map(doors::written)).collect();
    if !exports.is_empty() {
        keys.push(("export".to_owned(), toml_edit::Array::from_iter(exports).into()));
    }
    keys
}

fn remove(arguments: RemoveArgs) -> Result<(), Failure> {
    let RemoveArgs { name, asked: Asked { json, qmp }, save } = arguments;
    let mut client = Client::reach(qmp)?.with_patience(Client::LONG)?;
    let (_, report) = client.status()?;
    if !report.disks.iter().any(|disk| disk.name == name) {
        return Err(anyhow!("{name}: no disk has this name (`weir status` lists them)").into());
    }
    let saving = saving::prepare(&report, &save, |text| saving::removed(text, "disk", &name))?;
    let _: Value = client.execute("x-weir-remove-disk", json!({ "name": name }))?;
    finish(("disk", &name, "removed"), saving, json)
}

fn move_away(arguments: MoveArgs) -> Result<(), Failure> {
    let MoveArgs { name, to, nbd, force, asked: Asked { json, qmp }, save } = arguments;
    let mut client = Client::reach(qmp)?.with_patience(Client::LONG)?;
    let (_, report) = client.status()?;
    if !report.disks.iter().any(|disk| disk.name == name) {
        return Err(anyhow!("{name}: no disk has this name (`weir status` lists them)").into());
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
