//! What a config file says is to be in force.

use std::path::Path;

use policy::throttle::{Limits, Setting, Share};
use settings::{Plan, config};

use super::judge::{Finding, Verdict};
use crate::client::report::{Node, Report};

/// Of disks and groups, by their names.
pub(super) struct Intended(Vec<(&'static str, String, Limits, Share)>);

/// # Errors
/// What a daemon would say of the file.
pub(super) fn load(path: &Path) -> anyhow::Result<Intended> {
    let plan = Plan::new(config::load(path)?, 0)?;
    let groups = plan.groups.iter().map(|group| ("group", &group.name, group.settings.of_disk()));
    let disks = plan.disks.iter().map(|disk| ("disk", &disk.name, disk.settings.of_disk()));
    let all = groups.chain(disks);
    Ok(Intended(all.map(|(kind, name, hold)| (kind, name.clone(), hold.limits, hold.share)).collect()))
}

impl Intended {
    /// A line for each disk and group: whether the daemon has all that the file says.
    pub(super) fn compare(&self, report: &Report) -> Vec<Finding> {
        let line = |(kind, name, limits, share): &(&'static str, String, Limits, Share)| {
            let wrong = match report.find(name).filter(|node| node.kind() == *kind) {
                None => Some("there is none".to_owned()),
                Some(node) => difference(node, limits, *share),
            };
            Finding {
                kind,
                name: name.clone(),
                promise: "config".to_owned(),
                asked: "as in the file".to_owned(),
                figures: Vec::new(),
                verdict: if wrong.is_none() { Verdict::Held } else { Verdict::Broken },
                measured: wrong.unwrap_or_else(|| "in force".to_owned()),
            }
        };
        self.0.iter().map(line).collect()
    }
}

/// The first that is another.
fn difference(node: Node<'_>, limits: &Limits, share: Share) -> Option<String> {
    let settings = node.settings();
    let limits = Setting::ALL.into_iter().map(|setting| {
        let in_force = settings.limits.get(setting.name()).copied();
        // What is not set is not told.
        (setting.name(), limits.get(setting), in_force.unwrap_or_else(|| Limits::default().get(setting)))
    });
    let shares = [
        ("weight", share.weight().into(), settings.weight.unwrap_or_default()),
        ("iops-reservation", share.iops_reservation(), settings.iops_reservation.unwrap_or_default()),
        ("bps-reservation", share.bps_reservation(), settings.bps_reservation.unwrap_or_default()),
    ];
    let (name, intended, in_force) =
        limits.chain(shares).find(|(_, intended, in_force)| intended != in_force)?;
    Some(format!("{name} is {in_force}, not {intended}"))
}
