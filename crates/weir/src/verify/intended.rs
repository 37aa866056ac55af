//! What a config file says is to be in force.

use std::path::Path;

use policy::throttle::{Limits, Setting, Share};
use settings::{Plan, config};

use super::judge::{Finding, Verdict};
use crate::client::report::{Node, Report};

/// Of disks and groups what can be changed while they run: what they may, and whose members they
/// are. How an image was opened is another matter.
pub(super) struct Intended(Vec<Of>);

struct Of {
    kind: &'static str,
    name: String,
    limits: Limits,
    share: Share,
    group: Option<String>,
}

/// # Errors
/// What a daemon would say of the file.
pub(super) fn load(path: &Path) -> anyhow::Result<Intended> {
    let plan = Plan::new(config::load(path)?, 0)?;
    let named = |index: usize| plan.groups[index].name.clone();
    let of = |kind, name: &String, settings: &settings::Settings, group: Option<usize>| {
        let hold = settings.of_disk();
        Of { kind, name: name.clone(), limits: hold.limits, share: hold.share, group: group.map(named) }
    };
    let groups = plan.groups.iter().map(|group| of("group", &group.name, &group.settings, group.parent));
    let disks = plan.disks.iter().map(|disk| of("disk", &disk.name, &disk.settings, disk.group));
    Ok(Intended(groups.chain(disks).collect()))
}

impl Intended {
    /// A line for each disk and group: whether the daemon has all that the file says.
    pub(super) fn compare(&self, report: &Report) -> Vec<Finding> {
        let line = |of: &Of| {
            let wrong = match report.find(&of.name).filter(|node| node.kind() == of.kind) {
                None => Some("there is none".to_owned()),
                Some(node) => difference(node, of),
            };
            Finding {
                kind: of.kind,
                name: of.name.clone(),
                promise: "config".to_owned(),
                asked: "limits, shares, group".to_owned(),
                figures: Vec::new(),
                verdict: if wrong.is_none() { Verdict::Held } else { Verdict::Broken },
                measured: wrong.unwrap_or_else(|| "in force".to_owned()),
            }
        };
        self.0.iter().map(line).collect()
    }
}

/// The first that is another.
fn difference(node: Node<'_>, of: &Of) -> Option<String> {
    let Of { limits, share, group, .. } = of;
    let settings = node.settings();
    if settings.group != *group {
        let shown = |group: &Option<String>| group.clone().unwrap_or_else(|| "none".to_owned());
        return Some(format!("group is {}, not {}", shown(&settings.group), shown(group)));
    }
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
