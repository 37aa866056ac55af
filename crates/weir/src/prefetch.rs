//! `weir prefetch`: shows or changes a disk's prefetching at run time. The daemon checks the
//! settings and applies all of a change or none.

mod arguments;

use api::{DiskStatus, MemberSettings, PrefetchStatus};
pub(crate) use arguments::{EXAMPLES, PrefetchArgs};
use console::figures;
use serde_json::{Value, json};

use crate::{
    client::{
        change::{SettingName, SettingsChange},
        report::{DaemonReport, StatusNode},
    },
    settings_command::{SettingsCommand, SettingsCommandArgs},
};

impl SettingsCommand for PrefetchArgs {
    const EXAMPLE: &'static str = "off or --memory 64M";

    fn common(&self) -> SettingsCommandArgs<'_> {
        SettingsCommandArgs { name: &self.name, json: self.json, qmp: &self.qmp, save: &self.save }
    }

    fn find<'a>(&self, report: &'a DaemonReport) -> Result<StatusNode<'a>, String> {
        find(report, &self.name).map(StatusNode::Disk)
    }

    fn change(&self, _: &MemberSettings) -> SettingsChange {
        self.change()
    }

    fn show(&self, _: &DaemonReport, node: StatusNode<'_>) -> String {
        let StatusNode::Disk(disk) = node else { unreachable!("only disks are found") };
        show(disk)
    }

    fn to_json(&self, node: StatusNode<'_>) -> Value {
        entry(node)
    }
}

fn find<'a>(report: &'a DaemonReport, name: &str) -> Result<&'a DiskStatus, String> {
    match report.find(name) {
        Some(StatusNode::Disk(disk)) => Ok(disk),
        Some(StatusNode::Group(_)) => {
            Err(format!("{name}: is a group, and only disks have prefetching (name one of its disks)"))
        }
        None => Err(report.unknown_name_error(name)),
    }
}

fn show(disk: &DiskStatus) -> String {
    let mut text = format!("disk {}\n", disk.name);
    let settings =
        SettingName::of_prefetch().map(|name| (name.text(), name.format(&name.of(&disk.settings))));
    let settings: Vec<_> = settings.collect();
    let width = settings.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in settings.into_iter().chain(figures(&disk.read_ahead)) {
        text += &format!("  {name:width$}  {value}\n");
    }
    text
}

fn figures(read_ahead: &PrefetchStatus) -> Vec<(&'static str, String)> {
    let PrefetchStatus { hits, partial_hits, misses, skipped, waited, memory, streams, .. } = *read_ahead;
    let [ahead, used, wasted] = [read_ahead.read_ahead_bytes, read_ahead.used_bytes, read_ahead.wasted_bytes]
        .map(|bytes| figures::bytes(bytes as f64));
    let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), figures::share);
    let suspended = if read_ahead.suspended { "; suspended, because too little of it is used" } else { "" };
    vec![
        (
            "reads",
            format!(
                "{hits} hits ({waited} waited for data), {partial_hits} partial, {misses} misses, \
                 {skipped} too large"
            ),
        ),
        ("hit rate", share(read_ahead.hit_rate)),
        ("prefetched", format!("{ahead}, {used} used, {wasted} wasted{suspended}")),
        ("accuracy", share(read_ahead.accuracy)),
        ("in memory", figures::bytes(memory as f64)),
        ("streams", streams.to_string()),
    ]
}

fn entry(node: StatusNode<'_>) -> Value {
    let StatusNode::Disk(DiskStatus { name, settings, read_ahead, .. }) = node else { return Value::Null };
    json!({ "name": name, "prefetch": settings.prefetch, "read-ahead": read_ahead })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> (Value, DaemonReport) {
        let response = json!({
            "disks": [{
                "name": "vm1", "limits": {},
                "prefetch": {
                    "mode": "on", "memory": 64 << 20, "largest-request": 64 << 10, "window-min": 128 << 10,
                    "window-max": 2 << 20, "streams": 256
                },
                "read-ahead": {
                    "hits": 960, "partial-hits": 10, "misses": 30, "skipped": 2, "waited": 7, "hit-bytes": 9,
                    "read-ahead-bytes": 5 << 20, "used-bytes": 4 << 20, "wasted-bytes": 512 << 10,
                    "memory": 512 << 10, "streams": 3, "suspended": true, "hit-rate": 0.97, "accuracy": 0.89
                }
            }],
            "groups": [{ "name": "gold" }]
        });
        let report = DaemonReport::read(&response.to_string()).unwrap();
        (response, report)
    }

    #[test]
    fn settings_and_counters_are_shown() {
        let (response, report) = report();
        let expect = "\
disk vm1
  prefetch                  on
  prefetch-memory           64M
  prefetch-largest-request  64K
  prefetch-window-min       128K
  prefetch-window-max       2M
  prefetch-streams          256
  reads                     960 hits (7 waited for data), 10 partial, 30 misses, 2 too large
  hit rate                  97%
  prefetched                5.0M, 4.0M used, 512K wasted; suspended, because too little of it is used
  accuracy                  89%
  in memory                 512K
  streams                   3
";
        assert_eq!(show(find(&report, "vm1").unwrap()), expect);
        let printed = entry(report.find("vm1").unwrap());
        let disk = &response["disks"][0];
        assert_eq!((&printed["prefetch"], &printed["name"]), (&disk["prefetch"], &disk["name"]));
        let counters = disk["read-ahead"].as_object().unwrap();
        assert!(counters.iter().all(|(key, value)| printed["read-ahead"][key] == *value), "{printed}");
    }

    #[test]
    fn groups_have_no_prefetching() {
        let (_, report) = report();
        assert_eq!(
            find(&report, "gold").unwrap_err(),
            "gold: is a group, and only disks have prefetching (name one of its disks)"
        );
        assert!(find(&report, "vm2").unwrap_err().contains("did you mean \"vm1\"?"));
    }
}
