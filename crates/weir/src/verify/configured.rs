//! Compares the running state with a config file.

use std::path::{self, Path};

use api::{DiskStatus, MemberSettings, PrefetchSettings};
use settings::{DesiredState, LatencySetting, QuotaSetting, config, prefetch::short_name};

use super::checker::{GuaranteeFinding, GuaranteeVerdict};
use crate::client::{
    change::SettingName,
    report::{DaemonReport, StatusNode},
};

/// Desired state of disks and groups: settings that can be changed at run time, and how disks are
/// opened.
pub(super) struct ConfiguredState(Vec<ConfiguredNode>);

struct ConfiguredNode {
    name: String,
    settings: MemberSettings,
    as_what: ConfiguredKind,
}

enum ConfiguredKind {
    Group {
        /// True if its limits come from the cluster and not from the file.
        is_cluster: bool,
    },
    Disk(Box<settings::DiskConfig>),
}

/// Loads the desired state.
///
/// # Errors
/// Those of a daemon that loads the file.
pub(super) fn load(path: &Path) -> anyhow::Result<ConfiguredState> {
    Ok(ConfiguredState::of(DesiredState::new(config::load(path)?, 0)?))
}

impl ConfiguredState {
    fn of(plan: DesiredState) -> Self {
        let groups = plan.groups.iter().map(|group| ConfiguredNode {
            name: group.name.clone(),
            settings: reported_form(&group.settings, group.group.clone(), None),
            as_what: ConfiguredKind::Group { is_cluster: group.cluster },
        });
        let disks = plan.disks.iter().map(|disk| ConfiguredNode {
            name: disk.name.clone(),
            settings: reported_form(&disk.settings, disk.group.clone(), Some(&disk.prefetch)),
            as_what: ConfiguredKind::Disk(Box::new(disk.clone().into_config())),
        });
        Self(groups.chain(disks).collect())
    }

    /// Findings for each disk and group: one for each difference, or one that there is none.
    pub(super) fn compare(&self, report: &DaemonReport) -> Vec<GuaranteeFinding> {
        self.0.iter().flat_map(|item| item.compare(report)).collect()
    }
}

impl ConfiguredNode {
    fn compare(&self, report: &DaemonReport) -> Vec<GuaranteeFinding> {
        let line = |expected: String, measured: String, verdict| GuaranteeFinding {
            kind: self.kind(),
            name: self.name.clone(),
            guarantee: "config".to_owned(),
            expected,
            figures: Vec::new(),
            verdict,
            measured,
        };
        let Some(node) = report.find(&self.name).filter(|node| node.kind() == self.kind()) else {
            return vec![line(format!("a {}", self.kind()), "missing".to_owned(), GuaranteeVerdict::Broken)];
        };
        let differs = |SettingDifference { key, running: runs, configured: said }| {
            let measured = format!("{key} is {runs}, in the file {said}");
            line(format!("{key} {said}"), measured, GuaranteeVerdict::Broken)
        };
        let lines: Vec<_> = self.differences(node).into_iter().map(differs).collect();
        if lines.is_empty() {
            return vec![line("as in the file".to_owned(), "in force".to_owned(), GuaranteeVerdict::Held)];
        }
        lines
    }

    fn kind(&self) -> &'static str {
        match self.as_what {
            ConfiguredKind::Group { .. } => "group",
            ConfiguredKind::Disk(_) => "disk",
        }
    }

    fn differences(&self, node: StatusNode<'_>) -> Vec<SettingDifference> {
        let opened = match (&self.as_what, node) {
            (ConfiguredKind::Disk(config), StatusNode::Disk(status)) => open_differences(status, config),
            _ => Vec::new(),
        };
        let is_cluster = matches!(self.as_what, ConfiguredKind::Group { is_cluster: true });
        // Limits of a cluster-wide group are in etcd and not in the file.
        let names = SettingName::all().filter(|name| !(is_cluster && matches!(name, SettingName::Limit(_))));
        let set = names.filter_map(|name| {
            let [running, configured] = [node.settings(), &self.settings].map(|settings| name.of(settings));
            let differs = running != configured;
            differs.then(|| SettingDifference {
                key: name.text(),
                running: name.format(&running),
                configured: name.format(&configured),
            })
        });
        opened.into_iter().chain(set).collect()
    }
}

struct SettingDifference {
    key: &'static str,
    running: String,
    configured: String,
}

/// The settings in the form of a daemon's report.
fn reported_form(
    settings: &settings::ThrottleConfig,
    group: Option<String>,
    prefetch: Option<&policy::prefetch::PrefetchConfig>,
) -> MemberSettings {
    let hold = settings.to_group_settings();
    let limit =
        |setting: policy::throttle::LimitSetting| (setting.name().to_owned(), hold.limits.get(setting));
    let number = |prefetch: &policy::prefetch::PrefetchConfig, setting| {
        (short_name(setting).to_owned(), prefetch.get(setting))
    };
    let quota = |setting: QuotaSetting| Some(setting.text(&settings.quota)).filter(|text| text != "0");
    let latency = |setting| Some(settings.latency.text(setting));
    MemberSettings {
        group,
        latency_target: latency(LatencySetting::Target),
        latency_percentile: latency(LatencySetting::Percentile),
        latency_of: latency(LatencySetting::Directions),
        latency_floor: latency(LatencySetting::Floor),
        weight: Some(hold.share.weight().into()),
        iops_reservation: Some(hold.share.iops_reservation()),
        bps_reservation: Some(hold.share.bps_reservation()),
        unmet_reservation: None,
        watermark: Some(hold.watermark.percent().into()),
        limits: policy::throttle::LimitSetting::of_disk().map(limit).collect(),
        configured_limits: None,
        schedule: None,
        quota: quota(QuotaSetting::Total),
        write_quota: quota(QuotaSetting::Writes),
        quota_rate: Some(settings.quota.rate_bps).filter(|rate_bps| *rate_bps > 0),
        quota_status: None,
        prefetch: prefetch.map(|prefetch| PrefetchSettings {
            mode: prefetch.mode.to_string(),
            numbers: policy::prefetch::PrefetchSetting::ALL.map(|setting| number(prefetch, setting)).into(),
        }),
    }
}

/// Differences in how a disk was opened and in its error policy, as far as a daemon reports them.
fn open_differences(status: &DiskStatus, config: &settings::DiskConfig) -> Vec<SettingDifference> {
    let image = config.image.path().and_then(|path| path::absolute(path).ok());
    // The daemon reports absolute paths.
    let image = image.map_or_else(|| config.image.to_string(), |path| path.display().to_string());
    let runs_image = status.path.as_ref().unwrap_or(&status.image);
    let read_only = |flag: bool| if flag { "true" } else { "false" };
    let pairs = [
        ("image", Some(runs_image.as_str()), Some(image.as_str())),
        ("format", Some(&*status.format), config.format.map(storage::ImageFormat::name)),
        ("cache", status.cache.as_deref(), Some(config.cache.name())),
        ("read-only", Some(read_only(status.read_only)), Some(read_only(config.read_only))),
        (settings::error_keys::READ, status.on_read_error.as_deref(), Some(config.on_error.read.name())),
        (settings::error_keys::WRITE, status.on_write_error.as_deref(), Some(config.on_error.write.name())),
    ];
    // Values that are probed or not reported are not compared.
    let pairs = pairs.into_iter().filter_map(|(key, running, said)| Some((key, running?, said?)));
    let differing =
        pairs.filter(|(key, running, said)| running != said && !(*key == "image" && is_same(running, said)));
    let difference = |(key, running, said): (_, &str, &str)| SettingDifference {
        key,
        running: running.to_owned(),
        configured: said.to_owned(),
    };
    differing.map(difference).collect()
}

/// True if two paths lead to the same file.
fn is_same(one: &str, other: &str) -> bool {
    let [one, other] = [one, other].map(|path| Path::new(path).canonicalize().ok());
    one.is_some() && one == other
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cluster_limits_are_not_compared_with_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("weir.toml");
        let text = "[cluster]\n\
                    name = \"lab\"\n\
                    host = \"a\"\n\
                    etcd = [\"http://127.0.0.1:2379\"]\n\
                    [group.all]\n\
                    cluster = true\n\
                    [group.own]\n\
                    weight = 50\n\
                    [disk.vm1]\n\
                    image = \"memory:1M\"\n";
        std::fs::write(&file, text).unwrap();
        let intended = load(&file).unwrap();
        let group = |name: &str, weight: u64| json!({ "name": name, "weight": weight, "limits": { "iops-total": 500 } });
        let report =
            DaemonReport::read(&json!({ "groups": [group("all", 100), group("own", 100)] }).to_string())
                .unwrap();
        let measured: Vec<_> =
            intended.compare(&report).into_iter().map(|finding| finding.measured).collect();
        let expect =
            ["in force", "iops-total is 500, in the file none", "weight is 100, in the file 50", "missing"];
        assert_eq!(measured, expect);
    }
}
