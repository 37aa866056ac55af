//! `weir throttle`: shows what a disk or a group is held to, or changes it while it runs. The
//! daemon judges the settings, and applies all of a change or nothing.

mod arguments;

pub(crate) use arguments::{EXAMPLES, ThrottleArgs};
use console::figures;
use serde_json::Value;

use crate::{
    client::{
        change::{Change, Name},
        report::{Node, Report, Settings},
    },
    saving::{Common, Setter},
};

impl Setter for ThrottleArgs {
    const EXAMPLE: &'static str = "--iops-total 1000";

    fn common(&self) -> Common<'_> {
        Common { name: &self.name, json: self.json, qmp: &self.qmp, save: &self.save }
    }

    fn find<'a>(&self, report: &'a Report) -> Result<Node<'a>, String> {
        report.find(&self.name).ok_or_else(|| report.no_such(&self.name))
    }

    fn change(&self, before: &Settings) -> Change {
        self.change(before)
    }

    fn show(&self, report: &Report, node: Node<'_>) -> String {
        show(report, &self.name, node)
    }

    fn entry(&self, answer: &Value, node: Node<'_>) -> Value {
        entry(answer, node.kind(), &self.name)
    }
}

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

fn entry(answer: &Value, kind: &str, name: &str) -> Value {
    let list = answer[format!("{kind}s")].as_array();
    let entry = list.into_iter().flatten().find(|entry| entry["name"] == name);
    entry.cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests;
