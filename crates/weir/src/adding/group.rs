//! `weir group add` and `weir group remove`.

use clap::{Args, Subcommand};
use console::Failure;
use serde_json::{Map, Value, json};
use settings::arguments::LimitArgs;

use super::{Asked, finish};
use crate::{
    client::{
        Client,
        change::{Change, Name, Setpoint},
    },
    saving::{self, SaveArgs},
};

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir group add gold --iops-total 6000 --iops-total-max 12000 --save
      `weir throttle vm1 --group gold` moves a disk into it.
  weir group add silver --bps-total 100M --group host
      Within the limits of the group host.
  weir group remove gold --save
      Once nothing is in it.
  weir group remove gold --cluster
      The limits of all hosts, once no host has the group.

",
    settings::sizes!()
);

/// What is done to groups.
#[derive(Debug, Subcommand)]
pub(crate) enum GroupCommand {
    /// Make a group, which disks share the limits of
    #[command(after_help = EXAMPLES)]
    Add(Box<AddArgs>),
    /// Remove a group that nothing is in
    #[command(after_help = EXAMPLES)]
    Remove(RemoveArgs),
}

/// What `weir group add` is told.
#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// The group's name: a letter, then letters, digits, `-`, `.` and `_`
    #[arg(value_name = "NAME")]
    name: String,
    /// The group that it lies in
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Its share of what that group has, from 1 to 10000 against the others' [default: 100]
    #[arg(long, value_name = "N", value_parser = settings::count)]
    weight: Option<u64>,
    /// Operations per second that it is promised
    #[arg(long, value_name = "N", value_parser = settings::count)]
    iops_reservation: Option<u64>,
    /// Bytes per second that it is promised
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    bps_reservation: Option<u64>,
    /// Percent of the device in use below which its limits do not hold [default: 0]
    #[arg(long, value_name = "PERCENT", value_parser = settings::count)]
    watermark: Option<u64>,
    /// Told apart, to say how a group comes to be the cluster's.
    #[arg(long, hide = true)]
    cluster: bool,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    save: SaveArgs,
}

/// What `weir group remove` is told.
#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// The group
    #[arg(value_name = "NAME")]
    name: String,
    /// Its limits of all hosts of the cluster, none of which may have the group
    #[arg(long, conflicts_with_all = ["save", "config"])]
    cluster: bool,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    save: SaveArgs,
}

pub(crate) fn run(command: GroupCommand) -> Result<(), Failure> {
    match command {
        GroupCommand::Add(arguments) => add(*arguments),
        GroupCommand::Remove(arguments) => remove(arguments),
    }
}

impl AddArgs {
    fn change(&self) -> Change {
        let mut change = Change::default();
        for &(setting, value) in self.limits.given() {
            change.set(Name::Limit(setting), Setpoint::Number(value));
        }
        for (name, value) in [
            (Name::Weight, self.weight),
            (Name::IopsReservation, self.iops_reservation),
            (Name::BpsReservation, self.bps_reservation),
            (Name::Watermark, self.watermark),
        ] {
            if let Some(value) = value {
                change.set(name, Setpoint::Number(value));
            }
        }
        if let Some(group) = &self.group {
            change.set(Name::Group, Setpoint::Text(group.clone()));
        }
        change
    }
}

/// The arguments of `object-add`.
fn object(name: &str, change: &Change) -> Value {
    let (mut limits, mut object) = (Map::new(), Map::new());
    object.insert("qom-type".to_owned(), json!("throttle-group"));
    object.insert("id".to_owned(), json!(name));
    for (setting, value) in change.iter() {
        let value = Value::from(value.clone());
        match setting {
            Name::Limit(limit) => drop(limits.insert(limit.name().to_owned(), value)),
            Name::Group => drop(object.insert("x-weir-parent".to_owned(), value)),
            other => drop(object.insert(format!("x-weir-{}", other.text()), value)),
        }
    }
    object.insert("limits".to_owned(), limits.into());
    object.into()
}

fn add(arguments: AddArgs) -> Result<(), Failure> {
    if arguments.cluster {
        let name = &arguments.name;
        return Err(Failure::Usage(anyhow::anyhow!(
            "--cluster: each host has the group by its config file (put [group.{name}] with cluster = true there, and `weir reload`; `weir throttle {name} --cluster --iops-total N` says the limits, once for all hosts)"
        )));
    }
    let change = arguments.change();
    change.judge().map_err(|wrong| Failure::Usage(wrong.into()))?;
    let AddArgs { name, asked: Asked { json, qmp }, save, .. } = arguments;
    let mut client = Client::reach(qmp)?;
    let (_, report) = client.status()?;
    let saving = saving::prepare(&report, &save, |text| {
        let keys = change.iter().filter_map(|(setting, value)| {
            Some((setting.text().to_owned(), saving::written(setting, value)?))
        });
        saving::added(text, "group", &name, keys)
    })?;
    client.execute("object-add", object(&name, &change))?;
    finish(("group", &name, "added"), saving, json)
}

fn remove(arguments: RemoveArgs) -> Result<(), Failure> {
    let RemoveArgs { name, cluster, asked: Asked { json, qmp }, save } = arguments;
    let mut client = Client::reach(qmp)?;
    if cluster {
        client.execute("x-weir-cluster-remove", json!({ "group": name }))?;
        return finish(("group", &name, "removed"), None, json);
    }
    let (_, report) = client.status()?;
    if !report.groups.iter().any(|group| group.name == name) {
        return Err(anyhow::anyhow!(
            "{name}: no group here has this name (`weir status` lists them; with --cluster it is one of the cluster's)"
        )
        .into());
    }
    let saving = saving::prepare(&report, &save, |text| saving::removed(text, "group", &name))?;
    client.execute("object-del", json!({ "id": name }))?;
    finish(("group", &name, "removed"), saving, json)
}
