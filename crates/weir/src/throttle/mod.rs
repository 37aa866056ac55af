//! `weir throttle`: shows what a disk or a group is held to, or changes it while it runs.
//!
//! Never judges a setting: the daemon does, and applies all of a change or nothing.

mod arguments;

use anyhow::anyhow;
pub(crate) use arguments::{EXAMPLES, ThrottleArgs};
use console::{Failure, figures, print};
use serde_json::Value;

use crate::{
    client::{
        Client, Target,
        change::Name,
        report::{Node, Report},
    },
    saving,
};

/// Shows or changes settings.
/// Fails if the daemon cannot be asked or refuses, the name is nobody's, or the config file cannot be written.
pub(crate) fn run(arguments: ThrottleArgs) -> Result<(), Failure> {
    let target = Target::choose(arguments.qmp.clone());
    let target = target.map_err(|said| Failure::Usage(anyhow::Error::msg(said)))?;
    let mut client = Client::connect(&target)?;
    let (answer, report) = client.status()?;
    let node = report.find(&arguments.name).ok_or_else(|| anyhow!(report.no_such(&arguments.name)))?;
    let change = arguments.change(node.settings());
    if change.is_empty() {
        if arguments.save.save {
            let said = "--save: there is no setting to save (name one, such as --iops-total 1000)";
            return Err(Failure::Usage(anyhow!(said)));
        }
        let json = arguments.json.then(|| entry(&answer, node.kind(), &arguments.name));
        return Ok(print(&json.unwrap_or_else(|| show(&report, &arguments.name, node)))?);
    }
    let saved = saving::apply(&mut client, &report, (&arguments.name, node), &arguments.save, &change)?;
    Ok(print(&saving::told(&arguments.name, node.settings(), &change, saved.as_deref(), arguments.json))?)
}

/// The settings of one for people, and what holds it from above.
fn show(report: &Report, name: &str, node: Node<'_>) -> String {
    let settings = node.settings();
    let mut text = format!("{} {name}\n", node.kind());
    let is_shown = |known: &Name| known.of(settings) != known.default() || *known == Name::Weight;
    let shown: Vec<_> = Name::of_throttle().filter(is_shown).collect();
    let width = shown.iter().map(|name| name.text().len()).max().unwrap_or(0);
    for name in shown {
        text += &format!("  {:width$}  {}\n", name.text(), name.show(&name.of(settings)));
    }
    if settings.limits.values().all(|&value| value == 0) {
        text += "  no limits of its own\n";
    }
    for group in report.groups_above(settings) {
        let limits = figures::limits(&group.settings.limits);
        text += &format!("  held with others by group {}: {limits}\n", group.name);
    }
    text
}

fn entry(answer: &Value, kind: &str, name: &str) -> String {
    let list = answer[format!("{kind}s")].as_array();
    let entry = list.into_iter().flatten().find(|entry| entry["name"] == name);
    saving::pretty(entry.unwrap_or(&Value::Null))
}

#[cfg(test)]
mod tests;
