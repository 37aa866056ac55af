//! Arguments of `weir throttle`: limits by QEMU's names or those of `virsh blkdeviotune`, and the
//! scheduler's settings.
//!
//! A limit under virsh's name also behaves as in virsh: it clears the other limits of its kind. A
//! script that replaces a limit on reads by one on all requests thus works unchanged.

use std::fmt;

use api::MemberSettings;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use policy::throttle::{LimitKind, LimitPart, LimitSetting};
use settings::{LatencySetting, QuotaSetting, arguments::limits};

use crate::{
    client::{
        ControlAddress,
        change::{SettingName, SettingValue, SettingsChange, latency_text, quota_text},
    },
    settings_command::SaveArgs,
};

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir throttle vm1
      The settings of the disk vm1.
  weir throttle vm1 --iops-total 2000 --iops-total-max 8000 --iops-total-max-length 10
      At once, also for waiting requests. Settings that are not given stay.
  weir throttle vm1 --burst-for 30s
      A full burst at 8000 lasts 30 s, instead of 10 × 8000 ÷ (8000 − 2000) = 13.3 s.
  weir throttle gold --bps-total 0 --watermark 90
      No limit on bytes. The others apply while the device's utilization is above 90%.
  weir throttle vm1 --group gold --weight 200 --save
      Moves the disk into a group, with twice the default weight; saved in the config file.
  weir throttle db --latency-target 5ms
      99% of its requests complete within 5 ms after their admission; other disks on its device are
      throttled to keep that.
  weir throttle vm1 --quota '2T per month' --quota-rate 5M
      After 2 TiB in a calendar month, at most 5 MiB/s until the next one begins.
  weir throttle gold --cluster --iops-total 10000
      A limit for all hosts of the cluster together, kept in etcd.

All settings of one command change together, or none does. A limit of 0 is no limit. ", settings::sizes!(), "

The names of `virsh blkdeviotune` are accepted too: --total-bytes-sec, --read-iops-sec-max, --size-iops-sec, \
--group-name and so on, also with underscores; and those of OpenStack's Cinder: --total-iops-sec-per-gb, \
--read-bytes-sec-per-gb-min and so on, whose GB is a GiB. As in virsh, a limit clears the others of its kind: --read-iops-sec \
clears those on total and write operations."
);

/// Arguments of `weir throttle`.
#[derive(Debug, Args)]
pub(crate) struct ThrottleArgs {
    /// Name of the disk or group
    #[arg(value_name = "DISK|GROUP")]
    pub(crate) name: String,
    /// Print results as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<ControlAddress>,
    #[command(flatten)]
    pub(crate) limits: NamedLimitArgs,
    #[command(flatten)]
    pub(crate) cluster: ClusterLimitArgs,
    #[command(flatten)]
    scheduler: ThrottleShareArgs,
    #[command(flatten)]
    latency: LatencyArgs,
    #[command(flatten)]
    quota: QuotaArgs,
    #[command(flatten)]
    pub(crate) save: SaveArgs,
}

/// Fallback share of each host in millionths of a limit; `None` for the default.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FallbackShareArg(pub(crate) Option<u32>);

impl FallbackShareArg {
    fn read(text: &str) -> Result<Self, String> {
        if text == "default" {
            return Ok(Self(None));
        }
        let part = settings::parse_fallback_share(text).map_err(|rule| format!("{rule}, or default"))?;
        Ok(Self(Some(part)))
    }
}

impl fmt::Display for FallbackShareArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(ppm) => write!(f, "{}%", f64::from(ppm) / 10_000.0),
            None => f.write_str("default"),
        }
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct ClusterLimitArgs {
    /// Change the group's limits for all hosts of the cluster together, kept in etcd (weights,
    /// reservations and watermarks are set on each host)
    #[arg(long, conflicts_with_all = ["weight", "iops_reservation", "bps_reservation", "watermark", "latency_target", "latency_percentile", "latency_of", "latency_floor", "quota", "write_quota", "quota_rate", "group", "no_group"])]
    pub(crate) cluster: bool,
    /// Largest number of hosts; raised automatically as more join [initially: 16]
    #[arg(long, value_name = "N", value_parser = settings::count, requires = "cluster")]
    pub(crate) hosts: Option<u64>,
    /// Fallback share: the part of the limits that each host may use without etcd; `default` is
    /// 20% for all hosts together
    #[arg(long, value_name = "PART%|default", value_parser = FallbackShareArg::read, requires = "cluster")]
    pub(crate) fallback_share: Option<FallbackShareArg>,
    /// The old name of --fallback-share
    #[arg(long, value_name = "PART%|default", value_parser = FallbackShareArg::read, requires = "cluster", hide = true, conflicts_with = "fallback_share")]
    pub(crate) safe_share: Option<FallbackShareArg>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Shares")]
struct ThrottleShareArgs {
    /// Weight under contention, relative to other members of the group: 1 to 10000 [initially: 100]
    #[arg(long, value_name = "N", value_parser = settings::count)]
    weight: Option<u64>,
    /// Guaranteed minimum of operations per second; 0 is none
    #[arg(long, value_name = "N", value_parser = settings::count)]
    iops_reservation: Option<u64>,
    /// Guaranteed minimum of bytes per second; 0 is none
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    bps_reservation: Option<u64>,
    /// Utilization of the device, in percent, below which its limits are not enforced; 0 enforces
    /// them always
    #[arg(long, value_name = "PERCENT", value_parser = settings::count)]
    watermark: Option<u64>,
    /// Move the disk or group into this group
    #[arg(long, value_name = "GROUP", aliases = ["group-name", "group_name"], conflicts_with = "no_group")]
    group: Option<String>,
    /// Remove it from its group
    #[arg(long)]
    no_group: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Latency")]
struct LatencyArgs {
    /// Time within which requests complete after their admission, such as 5ms; other disks on the
    /// device are throttled to keep it. 0 is none
    #[arg(long, value_name = "TIME", value_parser = |text: &str| latency_text(LatencySetting::Target, text))]
    latency_target: Option<String>,
    /// Percentage of the requests that the latency target covers [initially: 99]
    #[arg(long, value_name = "PERCENT", value_parser = |text: &str| latency_text(LatencySetting::Percentile, text))]
    latency_percentile: Option<String>,
    /// Requests that the latency target covers: all, reads or writes [initially: all]
    #[arg(long, value_name = "REQUESTS", value_parser = |text: &str| latency_text(LatencySetting::Directions, text))]
    latency_of: Option<String>,
    /// Percentage of the device's throughput that remains while latency targets of others are
    /// enforced, or `default`: 1, and at most 10 for all disks together
    #[arg(long, value_name = "PERCENT", value_parser = |text: &str| latency_text(LatencySetting::Floor, text))]
    latency_floor: Option<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Quota")]
struct QuotaArgs {
    /// Bytes of reads and writes in each calendar period at full rate, such as "2T per month"; a
    /// period is an hour, day, week or month. 0 is none
    #[arg(long, value_name = "AMOUNT", value_parser = |text: &str| quota_text(QuotaSetting::Total, text))]
    quota: Option<String>,
    /// As --quota, for writes, write-zeroes and discards
    #[arg(long, value_name = "AMOUNT", value_parser = |text: &str| quota_text(QuotaSetting::Writes, text))]
    write_quota: Option<String>,
    /// Bytes per second of reads and writes together while a quota is used up
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| quota_text(QuotaSetting::Rate, text))]
    quota_rate: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct NamedLimitArgs {
    given: Vec<(LimitSetting, u64)>,
    /// Subset of [`NamedLimitArgs::given`] that was given under virsh's name.
    by_virsh_name: Vec<LimitSetting>,
}

impl ThrottleArgs {
    pub(crate) fn change(&self, before: &MemberSettings) -> SettingsChange {
        let mut change = SettingsChange::default();
        for &(setting, value) in &self.limits.given {
            change.set(SettingName::Limit(setting), SettingValue::Number(value));
        }
        // Explicitly given limits are kept; only limits in force are cleared, so that the printed
        // change lists no limit that was not set.
        for &setting in &self.limits.by_virsh_name {
            for other in cleared_by_virsh(setting).map(SettingName::Limit) {
                if other.of(before) != other.default() && !change.iter().any(|(name, _)| name == other) {
                    change.set(other, other.default());
                }
            }
        }
        // `burst-for` replaces the lengths in force. Named in the change, so that it is printed and
        // saved.
        if self.limits.given.iter().any(|&(setting, value)| setting == LimitSetting::BurstFor && value > 0) {
            for kind in LimitKind::ALL {
                let length = SettingName::Limit(LimitSetting::Limit(kind, LimitPart::BurstLength));
                if length.of(before) != length.default() && !change.iter().any(|(name, _)| name == length) {
                    change.set(length, length.default());
                }
            }
        }
        let ThrottleShareArgs { weight, iops_reservation, bps_reservation, watermark, group, no_group } =
            &self.scheduler;
        let numbers = [
            (SettingName::Weight, weight),
            (SettingName::IopsReservation, iops_reservation),
            (SettingName::BpsReservation, bps_reservation),
            (SettingName::Watermark, watermark),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                change.set(name, SettingValue::Number(*value));
            }
        }
        let LatencyArgs { latency_target, latency_percentile, latency_of, latency_floor } = &self.latency;
        let texts = [
            (LatencySetting::Target, latency_target),
            (LatencySetting::Percentile, latency_percentile),
            (LatencySetting::Directions, latency_of),
            (LatencySetting::Floor, latency_floor),
        ];
        for (setting, text) in texts {
            if let Some(text) = text {
                change.set(SettingName::Latency(setting), SettingValue::Text(text.clone()));
            }
        }
        // A removed target takes its percentile and requests along. Named in the change, so that
        // they are printed and saved.
        if latency_target.as_deref() == Some("0") {
            for setting in [LatencySetting::Percentile, LatencySetting::Directions] {
                let name = SettingName::Latency(setting);
                if name.of(before) != name.default() && !change.iter().any(|(changed, _)| changed == name) {
                    change.set(name, name.default());
                }
            }
        }
        self.quota.add_to(&mut change, before);
        // The protocol has an empty name for no group.
        let group = group.clone().or_else(|| no_group.then(String::new));
        if let Some(group) = group {
            change.set(SettingName::Group, SettingValue::Text(group));
        }
        change
    }
}

impl QuotaArgs {
    fn add_to(&self, change: &mut SettingsChange, before: &MemberSettings) {
        let Self { quota, write_quota, quota_rate } = self;
        let texts = [
            (QuotaSetting::Total, quota),
            (QuotaSetting::Writes, write_quota),
            (QuotaSetting::Rate, quota_rate),
        ];
        for (setting, text) in texts {
            if let Some(text) = text {
                change.set(SettingName::Quota(setting), SettingValue::Text(text.clone()));
            }
        }
        // The last quota takes its rate along. Named in the change, to be printed and saved.
        let is_none = |(setting, text): (QuotaSetting, &Option<String>)| {
            let name = SettingName::Quota(setting);
            text.as_ref().map_or(name.of(before) == name.default(), |text| text == "0")
        };
        let rate = SettingName::Quota(QuotaSetting::Rate);
        let is_rate_left = quota_rate.is_none() && rate.of(before) != rate.default();
        if is_rate_left && texts.into_iter().take(2).all(is_none) {
            change.set(rate, rate.default());
        }
    }
}

/// Limits that virsh clears with this one: same part, same unit, other direction. A rate, and a
/// rate for each GiB, clear each other.
fn cleared_by_virsh(setting: LimitSetting) -> impl Iterator<Item = LimitSetting> {
    let of_rate = [LimitPart::Rate, LimitPart::PerGib];
    let is_cleared = move |other: &LimitSetting| match (setting, *other) {
        (LimitSetting::Limit(kind, part), LimitSetting::Limit(other_kind, other_part)) => {
            kind.counts_bytes() == other_kind.counts_bytes()
                && (part == other_part && kind != other_kind
                    || part != other_part && of_rate.contains(&part) && of_rate.contains(&other_part))
        }
        _ => false,
    };
    LimitSetting::of_disk().filter(is_cleared)
}

/// Names in `virsh blkdeviotune` and its older versions, in the order of [`LimitSetting::of_qemu`].
const VIRSH: [(&str, &str); 19] = [
    ("total-bytes-sec", "total_bytes_sec"),
    ("total-bytes-sec-max", "total_bytes_sec_max"),
    ("total-bytes-sec-max-length", "total_bytes_sec_max_length"),
    ("read-bytes-sec", "read_bytes_sec"),
    ("read-bytes-sec-max", "read_bytes_sec_max"),
    ("read-bytes-sec-max-length", "read_bytes_sec_max_length"),
    ("write-bytes-sec", "write_bytes_sec"),
    ("write-bytes-sec-max", "write_bytes_sec_max"),
    ("write-bytes-sec-max-length", "write_bytes_sec_max_length"),
    ("total-iops-sec", "total_iops_sec"),
    ("total-iops-sec-max", "total_iops_sec_max"),
    ("total-iops-sec-max-length", "total_iops_sec_max_length"),
    ("read-iops-sec", "read_iops_sec"),
    ("read-iops-sec-max", "read_iops_sec_max"),
    ("read-iops-sec-max-length", "read_iops_sec_max_length"),
    ("write-iops-sec", "write_iops_sec"),
    ("write-iops-sec-max", "write_iops_sec_max"),
    ("write-iops-sec-max-length", "write_iops_sec_max_length"),
    ("size-iops-sec", "size_iops_sec"),
];

/// Names in the QoS specifications of OpenStack's Cinder, in the order of [`cinder_settings`].
const CINDER: [(&str, &str); 12] = [
    ("total-bytes-sec-per-gb", "total_bytes_sec_per_gb"),
    ("total-bytes-sec-per-gb-min", "total_bytes_sec_per_gb_min"),
    ("read-bytes-sec-per-gb", "read_bytes_sec_per_gb"),
    ("read-bytes-sec-per-gb-min", "read_bytes_sec_per_gb_min"),
    ("write-bytes-sec-per-gb", "write_bytes_sec_per_gb"),
    ("write-bytes-sec-per-gb-min", "write_bytes_sec_per_gb_min"),
    ("total-iops-sec-per-gb", "total_iops_sec_per_gb"),
    ("total-iops-sec-per-gb-min", "total_iops_sec_per_gb_min"),
    ("read-iops-sec-per-gb", "read_iops_sec_per_gb"),
    ("read-iops-sec-per-gb-min", "read_iops_sec_per_gb_min"),
    ("write-iops-sec-per-gb", "write_iops_sec_per_gb"),
    ("write-iops-sec-per-gb-min", "write_iops_sec_per_gb_min"),
];

/// Rates for each GiB with their lower bounds; Cinder has no upper ones. Its volumes have whole
/// GiB, which it calls GB.
fn cinder_settings() -> impl Iterator<Item = LimitSetting> {
    let is_known = |setting: &LimitSetting| !matches!(setting, LimitSetting::Limit(_, LimitPart::PerGibMax));
    LimitSetting::OF_SIZE.into_iter().filter(is_known)
}

/// All settings that have other names, each with both.
fn other_names() -> impl Iterator<Item = (LimitSetting, (&'static str, &'static str))> {
    LimitSetting::of_qemu().zip(VIRSH).chain(cinder_settings().zip(CINDER))
}

/// As [`settings::size`], with the suffix `bytes` too.
fn virsh_size(text: &str) -> Result<u64, String> {
    let number = text.strip_suffix("bytes").filter(|number| number.ends_with(|c: char| c.is_ascii_digit()));
    settings::size(number.unwrap_or(text))
}

fn virsh_option(setting: LimitSetting, name: &'static str, old_name: &'static str) -> Arg {
    let parser = if setting.is_size() { virsh_size } else { settings::limit_parser(setting) };
    Arg::new(name)
        .long(name)
        .alias(old_name)
        .value_parser(parser)
        .value_name(if setting.is_size() { "SIZE" } else { "N" })
        .conflicts_with(setting.name())
        // The text below the options describes them.
        .hide(true)
}

impl Args for NamedLimitArgs {
    fn augment_args(command: Command) -> Command {
        let as_virsh = other_names().map(|(setting, (name, old_name))| virsh_option(setting, name, old_name));
        command.args(LimitSetting::of_disk().map(limits::option)).args(as_virsh)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for NamedLimitArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut limits = Self::default();
        for setting in LimitSetting::of_disk() {
            if let Some(&value) = matches.get_one(setting.name()) {
                limits.given.push((setting, value));
            }
        }
        for (setting, (virsh_name, _)) in other_names() {
            if let Some(&value) = matches.get_one::<u64>(virsh_name) {
                // virsh's length of 0 means the default of one second.
                let is_length = matches!(setting, LimitSetting::Limit(_, LimitPart::BurstLength));
                limits.given.push((setting, if is_length { value.max(1) } else { value }));
                limits.by_virsh_name.push(setting);
            }
        }
        Ok(limits)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::cli::{Cli, WeirCommand};

    fn change(before: Value, line: &str) -> Result<Value, String> {
        let tokens = ["weir", "throttle", "vm1"].into_iter().chain(line.split_whitespace());
        let Cli { command } = Cli::try_parse_from(tokens).map_err(|error| error.render().to_string())?;
        let WeirCommand::Throttle(arguments) = command else { panic!("another command") };
        let before = serde_json::from_value(before).unwrap();
        Ok(Value::Object(arguments.change(&before).arguments()))
    }

    #[test]
    fn names_of_virsh_are_those_of_its_manual() {
        let names = [
            ("bps-total", "total-bytes-sec"),
            ("iops-read-max", "read-iops-sec-max"),
            ("bps-write-max-length", "write-bytes-sec-max-length"),
            ("iops-size", "size-iops-sec"),
        ];
        for (ours, virsh) in names {
            let index = LimitSetting::ALL.iter().position(|setting| setting.name() == ours).unwrap();
            assert_eq!(VIRSH[index].0, virsh);
        }
        for (setting, (cinder, _)) in cinder_settings().zip(CINDER) {
            let words: Vec<_> = setting.name().split('-').collect();
            let unit = if words[0] == "bps" { "bytes" } else { "iops" };
            let tail = if words.contains(&"min") { "-min" } else { "" };
            assert_eq!(cinder, format!("{}-{unit}-sec-per-gb{tail}", words[1]));
        }
        assert!(VIRSH.iter().chain(&CINDER).all(|(name, old)| name.replace('-', "_") == *old));
    }

    #[test]
    fn every_setting_has_both_names() {
        for (setting, (virsh, old_virsh)) in other_names() {
            for name in [setting.name(), virsh, old_virsh] {
                let expect = json!({ setting.name(): 7 });
                assert_eq!(change(json!({}), &format!("--{name} 7")), Ok(expect), "{name}");
            }
        }
    }

    #[test]
    fn virsh_names_clear_other_limits_of_their_kind() {
        let before = json!({ "limits": { "iops-total": 100, "iops-total-max": 200, "bps-total": 5 } });
        assert_eq!(change(before.clone(), "--iops-read 7"), Ok(json!({ "iops-read": 7 })));
        let cleared = json!({ "iops-read": 7, "iops-total": 0 });
        assert_eq!(change(before.clone(), "--read-iops-sec 7"), Ok(cleared));
        let per_gib = json!({ "iops-total-per-gib": 3, "iops-total": 0 });
        assert_eq!(change(before.clone(), "--total-iops-sec-per-gb 3"), Ok(per_gib));
        let follows =
            json!({ "configured-limits": { "iops-total-per-gib": 3 }, "limits": { "iops-total": 30 } });
        assert_eq!(change(follows, "--iops-read 7"), Ok(json!({ "iops-read": 7 })));
        let follows =
            json!({ "configured-limits": { "iops-total-per-gib": 3 }, "limits": { "iops-total": 30 } });
        let cleared = json!({ "iops-read": 7, "iops-total-per-gib": 0 });
        assert_eq!(change(follows, "--read-iops-sec 7"), Ok(cleared));
        let both = json!({ "iops-read": 7, "iops-total": 9 });
        assert_eq!(change(before, "--read-iops-sec 7 --total-iops-sec 9"), Ok(both), "what is given stays");
        assert_eq!(
            change(json!({}), "--total-iops-sec-max-length 0"),
            Ok(json!({ "iops-total-max-length": 1 }))
        );
    }

    #[test]
    fn sharing_is_set_beside_the_limits() {
        let line = "--weight 200 --iops-reservation 50 --bps-reservation 1M --watermark 90 --group-name gold";
        let expect = json!({
            "weight": 200, "iops-reservation": 50, "bps-reservation": 1 << 20, "watermark": 90, "group": "gold"
        });
        assert_eq!(change(json!({}), line), Ok(expect));
        assert_eq!(change(json!({}), "--no-group"), Ok(json!({ "group": "" })));
        assert!(change(json!({}), "--no-group --group g").unwrap_err().contains("cannot be used with"));
        assert!(
            change(json!({}), "--iops-total 1 --total-iops-sec 1").unwrap_err().contains("cannot be used")
        );
        assert!(change(json!({}), "--config f").unwrap_err().contains("required"), "--config is for --save");
    }

    #[test]
    fn virsh_sizes_accept_powers_of_1000() {
        let sizes = ["10", "10b", "10bytes", "10K", "10KiB", "10kb", "2GB", "1.5M"]
            .map(|text| virsh_size(text).unwrap());
        assert_eq!(sizes, [10, 10, 10, 10 << 10, 10 << 10, 10_000, 2_000_000_000, 3 << 19]);
        assert!(virsh_size("99999999999TB").unwrap_err().starts_with("is too large"));
        for wrong in ["", "M", "ib", "bytes", "1xb", "1Kbytes"] {
            assert!(virsh_size(wrong).unwrap_err().starts_with("is not a size"), "{wrong}");
        }
    }
}
