//! `weir group add` and `weir group remove`.

use std::path::Path;

use clap::{Arg, Args, Subcommand};
use console::CommandFailure;
use serde_json::json;
use settings::{
    ConfigKey, ConfigWithOrigins, GroupConfig, Origin,
    arguments::{ConfigKeyArgs, OptionSelection},
};

use super::{ControlArgs, ObjectChange, finish};
use crate::{
    added_keys,
    client::ControlClient,
    settings_command::{self, SaveArgs},
};

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir group add gold --iops-total 6000 --iops-total-max 12000 --save
      `weir throttle vm1 --group gold` then moves a disk into it.
  weir group add silver --bps-total 100M --group host
      Inside the group host, whose limits apply as well.
  weir group remove gold --save
      Only if the group is empty.
  weir group remove gold --cluster
      Removes the cluster-wide limits, if no host has the group any more.

",
    settings::sizes!()
);

/// Subcommands of `weir group`.
#[derive(Debug, Subcommand)]
pub(crate) enum GroupCommand {
    /// Add a group, whose disks share its limits
    #[command(after_help = EXAMPLES)]
    Add(Box<GroupAddArgs>),
    /// Remove an empty group
    #[command(after_help = EXAMPLES)]
    Remove(GroupRemoveArgs),
}

/// Options of `weir group add`.
#[derive(Clone, Debug)]
struct GroupAddOptions;

impl OptionSelection for GroupAddOptions {
    type Config = GroupConfig;

    fn is_option(_: &ConfigKey<GroupConfig>) -> bool {
        true
    }

    /// `--cluster` is accepted so that its error can explain how a group joins a cluster.
    fn adapt(option: Arg) -> Arg {
        if option.get_id() == "cluster" { option.hide(true) } else { option }
    }
}

/// Arguments of `weir group add`.
#[derive(Debug, Args)]
pub(crate) struct GroupAddArgs {
    /// Name of the group, as in the config file
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    keys: ConfigKeyArgs<GroupAddOptions>,
    #[command(flatten)]
    save: SaveArgs,
}

/// Arguments of `weir group remove`.
#[derive(Debug, Args)]
pub(crate) struct GroupRemoveArgs {
    /// Name of the group
    #[arg(value_name = "NAME")]
    name: String,
    /// Remove its cluster-wide limits, if no host of the cluster has the group
    #[arg(long, conflicts_with_all = ["save", "config"])]
    cluster: bool,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    save: SaveArgs,
}

pub(crate) fn run(command: GroupCommand) -> Result<(), CommandFailure> {
    match command {
        GroupCommand::Add(arguments) => add(*arguments),
        GroupCommand::Remove(arguments) => remove(arguments),
    }
}

fn add(arguments: GroupAddArgs) -> Result<(), CommandFailure> {
    let GroupAddArgs { name, control: ControlArgs { json, qmp }, keys, save } = arguments;
    if keys.value("cluster").is_some() {
        return Err(CommandFailure::Usage(anyhow::anyhow!(
            "--cluster: a group joins a cluster by the config file of each host (add \
             [group.{name}] with cluster = true and run `weir reload`; `weir throttle {name} \
             --cluster --iops-total N` sets the limits of all hosts)"
        )));
    }
    let config = GroupConfig { name: name.clone(), ..GroupConfig::default() };
    let mut group = ConfigWithOrigins::new(config, Origin::new(&*name));
    let read = keys.read_into(&mut group, Path::new(""), |_| true);
    let group =
        read.and_then(|()| group.into_checked()).map_err(|wrong| CommandFailure::Usage(wrong.into()))?;
    let mut client = ControlClient::reach(qmp)?;
    let report = client.status()?;
    let saving = settings_command::prepare(&report, &save, |text| {
        settings_command::with_table(text, "group", &name, &group)
    })?;
    client.execute("x-weir-add-group", json!({ "name": name, "keys": added_keys::keys(&group) }))?;
    let outcome = ObjectChange { kind: "group", name: &name, change: "added", ..Default::default() };
    finish(outcome, saving, json)
}

fn remove(arguments: GroupRemoveArgs) -> Result<(), CommandFailure> {
    let GroupRemoveArgs { name, cluster, control: ControlArgs { json, qmp }, save } = arguments;
    let mut client = ControlClient::reach(qmp)?;
    let outcome = ObjectChange { kind: "group", name: &name, change: "removed", ..Default::default() };
    // The limits of the cluster are in etcd, not in this host's config file: nothing to save here.
    if cluster {
        client.execute("x-weir-cluster-remove", json!({ "group": name }))?;
        return finish(outcome, None, json);
    }
    let report = client.status()?;
    if !report.groups.iter().any(|group| group.name == name) {
        return Err(anyhow::anyhow!(
            "{name}: no group of this daemon has this name (`weir status` lists them; --cluster \
             removes limits of the cluster)"
        )
        .into());
    }
    let saving = settings_command::prepare(&report, &save, |text| {
        settings_command::without_table(text, "group", &name)
    })?;
    client.execute("object-del", json!({ "id": name }))?;
    finish(outcome, saving, json)
}
