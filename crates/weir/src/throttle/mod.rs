//! `weir throttle`: shows what a disk or a group is held to, or changes it while it runs.
//!
//! The daemon judges a change and applies all of it or nothing. With `--save` the config file gets it too: everything
//! that can be found out about the file is found out before the daemon is asked, so that a change is not in force and then not
//! saved.

mod edit;
mod save;

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};

use crate::{
    Failure,
    cli::ThrottleArgs,
    client::{
        Client, Error, Target,
        change::{Change, Name},
        report::{Node, Report, Settings},
    },
    figures, print,
};
use save::Saving;

/// Shows or changes settings.
///
/// # Errors
/// If the daemon cannot be asked or refuses, the name is nobody's, or the config file cannot be written.
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
    let saved = apply(&mut client, &report, node, &arguments, &change)?;
    let text = if arguments.json {
        pretty(&changed(&arguments.name, node.settings(), &change, saved.as_deref()))
    } else {
        told(&arguments.name, node.settings(), &change, saved.as_deref())
    };
    Ok(print(&text)?)
}

/// Has the change made, and saved if that is asked for: the file's name then.
fn apply(
    client: &mut Client,
    report: &Report,
    node: Node<'_>,
    arguments: &ThrottleArgs,
    change: &Change,
) -> anyhow::Result<Option<String>> {
    let name = arguments.name.as_str();
    let saving = arguments.save.save.then(|| {
        let named = arguments.save.config.clone();
        let known = named.or_else(|| report.config.as_ref().map(Into::into));
        let path = known.context(
            "--save: the daemon was started without a config file, so there is none to write to (name one with --config FILE)",
        )?;
        Saving::prepare(&path, node.kind(), name, change)
    });
    let saving = saving.transpose()?;
    client.set(name, change.arguments()).map_err(|error| match error {
        Error::Refused(said) if !said.starts_with(&format!("{name}:")) => anyhow!("{name}: {said}"),
        error => error.into(),
    })?;
    let saved = saving.map(Saving::commit).transpose();
    saved.with_context(|| format!("{name}: the change is in force, but not saved"))
}

/// The settings of one for people, and what holds it from above.
fn show(report: &Report, name: &str, node: Node<'_>) -> String {
    let settings = node.settings();
    let mut text = format!("{} {name}\n", node.kind());
    let is_shown = |known: &Name| known.of(settings) != known.default() || *known == Name::Weight;
    let shown: Vec<_> = Name::all().filter(is_shown).collect();
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

/// One disk or group as the daemon describes it.
fn entry(answer: &Value, kind: &str, name: &str) -> String {
    let list = answer[format!("{kind}s")].as_array();
    let entry = list.into_iter().flatten().find(|entry| entry["name"] == name);
    pretty(entry.unwrap_or(&Value::Null))
}

fn changed(name: &str, before: &Settings, change: &Change, saved: Option<&str>) -> Value {
    let value = |(setting, value): (Name, &_)| {
        let both =
            json!({ "before": Value::from(setting.of(before)), "after": Value::from(Clone::clone(value)) });
        (setting.text().to_owned(), both)
    };
    let settings: serde_json::Map<String, Value> = change.iter().map(value).collect();
    let mut changed = json!({ "name": name, "changed": settings });
    if let Some(path) = saved {
        changed["saved"] = path.into();
    }
    changed
}

fn told(name: &str, before: &Settings, change: &Change, saved: Option<&str>) -> String {
    let mut text: String =
        change.describe(before).into_iter().map(|line| format!("{name}: {line}\n")).collect();
    if let Some(path) = saved {
        text += &format!("{name}: saved in {path}\n");
    }
    text
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("JSON of JSON") + "\n"
}

#[cfg(test)]
mod tests;
