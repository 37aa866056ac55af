//! `weir disk add`, `weir disk remove` and `weir disk move`.

use std::path::{Path, absolute};

use anyhow::{anyhow, bail};
use api::{MovedDisk, ServerStatus};
use clap::{Args, Subcommand};
use console::{CommandFailure, print, progress::DelayedNotice};
use serde_json::json;
use settings::{
    DiskConfig, ExportConfig, ImageLocation, KeyTable as _, ListenAddress, ListenEndpoint, NbdExportConfig,
    NbdServerConfig, arguments::ConfigKeyArgs,
};

use super::{ControlArgs, DaemonResult, ObjectChange, exports::ExportArgs, finish};
use crate::{
    added_keys::{self, DiskAddOptions},
    client::ControlClient,
    settings_command::{self, SaveArgs},
};

pub(crate) const ADD_EXAMPLES: &str = "\
Examples:
  weir disk add vm3 /srv/images/vm3.qcow2 -f qcow2 --cache none --group gold --iops-total 2000
      Serves the disk at once, at the daemon's own NBD addresses.
  weir disk add vm4 vm4.raw -f raw --vhost-user-blk unix:/run/weir/vm4.sock,queues=4 --save
      For a virtual machine, which can hot-plug it.
  weir disk add vm3 vm3.raw -f raw --save
      Permanently: adds a [disk.vm3] to the config file.
  weir disk remove vm3 --save
      Only if it is not in use. Removes [disk.vm3] from the config file; all other lines stay.
  weir disk move vm3 --to host2
      To another host of the [cluster] with access to the same image. Its buckets keep their levels.

A disk is added completely or not at all. `weir attach` makes devices and mounts them.";

/// Subcommands of `weir disk`.
#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Add a disk to the running daemon
    #[command(after_help = ADD_EXAMPLES)]
    Add(Box<DiskAddArgs>),
    /// Remove a disk that is not in use from the daemon
    #[command(after_help = ADD_EXAMPLES)]
    Remove(DiskRemoveArgs),
    /// Move a disk to another host of the cluster, with its limits and the levels of its buckets
    #[command(after_help = ADD_EXAMPLES)]
    Move(DiskMoveArgs),
}

/// Arguments of `weir disk add`.
#[derive(Debug, Args)]
pub(crate) struct DiskAddArgs {
    /// Name of the disk, and of its export: at most 31 letters, digits, `.`, `_` and `-`
    #[arg(value_name = "NAME")]
    name: String,
    /// A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE or the URI of an NBD export
    #[arg(value_name = "IMAGE", value_parser = settings::parse::<ImageLocation>)]
    image: ImageLocation,
    /// Export it over NBD at this address, at which the daemon already listens; repeatable.
    /// ,read-only after the address rejects writes [default: [daemon] nbd or --nbd of
    /// `weir serve`, unless another export is given]
    #[arg(long, value_name = "ADDRESS[,read-only]", value_parser = parse_nbd_endpoint)]
    nbd: Vec<NbdServerConfig>,
    #[command(flatten)]
    exports: ExportArgs,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    disk: ConfigKeyArgs<DiskAddOptions>,
    #[command(flatten)]
    save: SaveArgs,
}

/// Arguments of `weir disk remove`.
#[derive(Debug, Args)]
pub(crate) struct DiskRemoveArgs {
    /// Name of the disk
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    save: SaveArgs,
}

/// Arguments of `weir disk move`.
#[derive(Debug, Args)]
pub(crate) struct DiskMoveArgs {
    /// Name of the disk
    #[arg(value_name = "NAME")]
    name: String,
    /// The host, by its name in the section `cluster` of its config
    #[arg(long, value_name = "HOST")]
    to: String,
    /// NBD address of that host to serve it at, if it listens at several
    #[arg(long, value_name = "ADDRESS")]
    nbd: Option<ListenAddress>,
    /// Disconnect its clients
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    save: SaveArgs,
}

/// Parses an NBD address at which a running daemon can listen.
fn parse_nbd_endpoint(text: &str) -> Result<NbdServerConfig, String> {
    let nbd: NbdServerConfig = settings::parse(text)?;
    if let ListenEndpoint::Passed(_) = nbd.endpoint { Err(PASSED.to_owned()) } else { Ok(nbd) }
}

/// Error for `fd:NAME`, which names a socket only at the daemon's start.
const PASSED: &str =
    "names a socket that was passed at the daemon's start; give its address, unix:PATH or HOST:PORT";

pub(crate) fn run(command: DiskCommand) -> Result<(), CommandFailure> {
    match command {
        DiskCommand::Add(arguments) => add(*arguments),
        DiskCommand::Remove(arguments) => remove(arguments),
        DiskCommand::Move(arguments) => move_away(arguments),
    }
}

fn add(arguments: DiskAddArgs) -> Result<(), CommandFailure> {
    let DiskAddArgs { name, image, nbd, exports: targets, control: ControlArgs { json, qmp }, disk, save } =
        arguments;
    let here = absolute(".")?;
    let targets: Vec<_> = targets
        .into_exports()
        .into_iter()
        .map(|target| ExportConfig::Target(target).relative_to(&here))
        .collect();
    let is_over_nbd = !nbd.is_empty() || targets.is_empty();
    // Access rules, TLS names and the like are checked by the NBD server alone; without an NBD
    // export they would be silently ineffective.
    let is_of_nbd = |key: &str| DiskConfig::key(key).is_some_and(|key| key.heading == "Access");
    if let Some((key, _)) = disk.given().find(|(key, _)| !is_over_nbd && is_of_nbd(key)) {
        return Err(CommandFailure::Usage(anyhow!(
            "--{key}: is not used, because the disk is not exported over NBD (leave it out, or add \
             --nbd ADDRESS)"
        )));
    }
    let mut config = added_keys::disk(&name, &image, &disk).map_err(CommandFailure::Usage)?;
    let mut client = ControlClient::reach(qmp)?.with_timeout(ControlClient::LONG)?;
    // Only an image in Ceph needs the addresses of the daemon's other images, so only then the full
    // status.
    let report = if image.is_rbd() { client.status()? } else { client.summary()? };
    added_keys::adopt_ceph_access(&mut config, &report.disks).map_err(anyhow::Error::from)?;
    let nbd = match is_over_nbd {
        true => nbd_exports(&name, &nbd, &here, &report.servers, save.save)?,
        false => Vec::new(),
    };
    nbd.into_iter().chain(targets).for_each(|export| added_keys::add_export(&mut config, export));
    // The config file is parsed and edited first: its mistakes surface before the daemon changes.
    let saving = settings_command::prepare(&report, &save, |text| {
        settings_command::with_table(text, "disk", &name, &config)
    })?;
    let added = added_keys::add_to_daemon(&mut client, &config)?;
    let result = Some(DaemonResult::Added(&added));
    let outcome = ObjectChange { kind: "disk", name: &name, change: "added", result, ..Default::default() };
    finish(outcome, saving, json)
}

/// Exports at the named servers. Empty if they are the default ones: the daemon then exports the
/// disk at its default endpoints, like a disk of its config file.
fn nbd_exports(
    name: &str,
    requested: &[NbdServerConfig],
    here: &Path,
    servers: &[ServerStatus],
    is_saved: bool,
) -> anyhow::Result<Vec<ExportConfig>> {
    let placements = nbd_placements(name, requested, here, servers)?;
    if placements.iter().all(|place| place.is_implied) {
        return Ok(Vec::new());
    }
    let export = |NbdExportPlacement { server, read_only, .. }: NbdExportPlacement<'_>| {
        let listen = match &server.listen {
            None if is_saved => bail!(
                "--save: {}: a config file cannot name a socket that was passed without a name \
                 (leave --save out)",
                server.address
            ),
            listen => listen.as_deref().unwrap_or(&server.address),
        };
        let listen = listen.parse().map_err(anyhow::Error::msg)?;
        Ok(ExportConfig::Nbd(NbdExportConfig { listen, name: None, read_only }))
    };
    placements.into_iter().map(export).collect()
}

/// An NBD server that exports the disk.
struct NbdExportPlacement<'a> {
    server: &'a ServerStatus,
    read_only: bool,
    /// True if a config file without `export` for this disk results in this export.
    is_implied: bool,
}

/// NBD servers for the disk: the named ones, or else the daemon's default endpoints. Endpoints that
/// serve only the exports of other disks are excluded, as their clients expect these disks alone.
fn nbd_placements<'a>(
    name: &str,
    requested: &[NbdServerConfig],
    here: &Path,
    servers: &'a [ServerStatus],
) -> anyhow::Result<Vec<NbdExportPlacement<'a>>> {
    let addresses: Vec<_> = servers.iter().map(|server| server.address.as_str()).collect();
    if requested.is_empty() {
        // A disk of a config file is exported at the config's listeners anyway; a listener that a
        // command has added needs an explicit export.
        let standard = servers.iter().filter_map(|server| Some((server, server.default_export?.read_only)));
        let placements: Vec<_> = standard
            .map(|(server, read_only)| NbdExportPlacement { server, read_only, is_implied: !server.added })
            .collect();
        if placements.is_empty() {
            let named = addresses.iter().map(|address| format!("--nbd {address}, or "));
            let named: String = named.collect();
            bail!(
                "{name}: the daemon has no default NBD address (choose an export: \
                 {named}--vhost-user-blk unix:PATH)"
            );
        }
        return Ok(placements);
    }
    let mut placements: Vec<NbdExportPlacement<'_>> = Vec::new();
    for NbdServerConfig { endpoint: at, read_only } in requested {
        let at = match at {
            ListenEndpoint::Address(ListenAddress::Unix(path)) => {
                format!("unix:{}", here.join(path).display())
            }
            other => other.to_string(),
        };
        let matches_address = |server: &&ServerStatus| {
            let mut known = [Some(server.address.as_str()), server.listen.as_deref()].into_iter().flatten();
            // Users may give the address as configured or as clients connect to it.
            known.any(|known| control::listen::is_same_address(known, &at))
        };
        let Some(server) = servers.iter().find(matches_address) else {
            let known = match &*addresses {
                [] => "nor anywhere for NBD".to_owned(),
                addresses => format!("but at {}", addresses.join(", ")),
            };
            bail!(
                "--nbd {at}: the daemon does not listen there, {known} (add a new address in the \
                 config file and run `weir reload`)"
            );
        };
        if placements.iter().any(|place| std::ptr::eq(place.server, server)) {
            bail!("--nbd {at}: is given twice (remove one)");
        }
        placements.push(NbdExportPlacement { server, read_only: *read_only, is_implied: false });
    }
    Ok(placements)
}

fn remove(arguments: DiskRemoveArgs) -> Result<(), CommandFailure> {
    let DiskRemoveArgs { name, control: ControlArgs { json, qmp }, save } = arguments;
    let mut client = ControlClient::reach(qmp)?.with_timeout(ControlClient::LONG)?;
    // A disk that is not open yet (its storage does not answer) can be removed too.
    let report = client.status()?;
    let served = report.disks.iter().map(|disk| (&disk.name, &disk.image));
    let unopened = report.unavailable.iter().map(|disk| (&disk.name, &disk.image));
    let Some((_, image)) = served.chain(unopened).find(|(known, _)| **known == name) else {
        return Err(anyhow!(report.unknown_disk_error(&name)).into());
    };
    let saving = settings_command::prepare(&report, &save, |text| {
        settings_command::without_table(text, "disk", &name)
    })?;
    let unsaved = if saving.is_some() { ", and nothing is saved" } else { "" };
    // Closing an image may wait for its storage: the message explains a delay, and that Ctrl-C does
    // not undo the removal.
    let waiting = DelayedNotice::start(format!(
        "{name}: waiting until {image} is closed (Ctrl-C ends only this command: the daemon \
         continues{unsaved})"
    ));
    let removed = client.execute("x-weir-remove-disk", json!({ "name": name }));
    drop(waiting);
    removed?;
    let outcome = ObjectChange { kind: "disk", name: &name, change: "removed", ..Default::default() };
    finish(outcome, saving, json)
}

fn move_away(arguments: DiskMoveArgs) -> Result<(), CommandFailure> {
    let DiskMoveArgs { name, to, nbd, force, control: ControlArgs { json, qmp }, save } = arguments;
    let mut client = ControlClient::reach(qmp)?.with_timeout(ControlClient::LONG)?;
    let report = client.status()?;
    if !report.disks.iter().any(|disk| disk.name == name) {
        return Err(anyhow!(report.unknown_disk_error(&name)).into());
    }
    let saving = settings_command::prepare(&report, &save, |text| {
        settings_command::without_table(text, "disk", &name)
    })?;
    let is_saved = saving.is_some();
    let mut request = json!({ "name": name, "to": to, "force": force });
    if let Some(address) = &nbd {
        request["listen"] = address.to_string().into();
    }
    let mut moved: MovedDisk = client.execute_typed("x-weir-move-disk", request)?;
    if is_saved {
        // The daemon checked its file before this command edits it.
        moved.listed_here = Some(false);
    }
    let result = Some(DaemonResult::Moved(&moved));
    let outcome = ObjectChange { kind: "disk", name: &name, change: "moved", result, ..Default::default() };
    finish(outcome, saving, json)?;
    if json {
        return Ok(());
    }
    Ok(print(&move_summary(&name, &to, &moved))?)
}

/// The disk's new host, and the edits that the config files of both hosts still need.
fn move_summary(name: &str, to: &str, moved: &MovedDisk) -> String {
    let is_listed_there = moved.listed_there == Some(true);
    let mut left = Vec::new();
    if !is_listed_there {
        left.push(format!("add [disk.{name}] to the config file there"));
    }
    if moved.listed_here == Some(true) {
        left.push(format!("remove [disk.{name}] from the one here, as `weir disk move --save` does"));
    }
    let until = if is_listed_there { "" } else { " until its daemon ends" };
    let left = if left.is_empty() { String::new() } else { format!(" ({})", left.join("; ")) };
    format!("{name}: {to} serves it{until}{left}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn move_summary_names_missing_config_edits_only() {
        let summary = |here: bool, there: bool| {
            let (listed_here, listed_there) = (Some(here), Some(there));
            move_summary("vm", "b", &MovedDisk { listed_here, listed_there, ..MovedDisk::default() })
        };
        assert_eq!(summary(false, true), "vm: b serves it\n");
        assert_eq!(
            summary(false, false),
            "vm: b serves it until its daemon ends (add [disk.vm] to the config file there)\n"
        );
        assert_eq!(
            summary(true, true),
            "vm: b serves it (remove [disk.vm] from the one here, as `weir disk move --save` does)\n"
        );
        assert!(summary(true, false).contains("there; remove [disk.vm] from the one here"));
    }
}
