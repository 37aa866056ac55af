//! Throttle settings of a disk or a group: limits, weight, reservation, watermark. Checks one disk
//! or group at a time; the policy decides if reservations fit.

use block::layer::throttle::{DiskSettings, GroupSettings};
use policy::{
    throttle::{LimitKind, LimitPart, LimitSetting, Limits, MAX_VALUE, NodeShare},
    volume_quota::VolumeQuota,
    watermark::Watermark,
};

use crate::{
    LatencyConfig, LatencySetting, QuotaSetting,
    diagnostics::Diagnostics,
    key::{ChangePolicy, ConfigKey, KeyField, KeyInput, KeyLiteral, KeyType, TransferPolicy, table},
    origins::ConfigWithOrigins,
    quota,
};

pub(crate) const DEFAULT_WEIGHT: u32 = 100;
pub(crate) const MAX_WATERMARK: u8 = 100;

/// Heading of the rows of limits that follow the size of a disk.
pub const SIZE_HEADING: &str = "Limits for each GiB";

/// Throttle settings of one disk or group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleConfig {
    /// Valid limits, possibly none.
    pub limits: Limits,
    /// Weight among the members of its group, from 1 to 10000.
    pub weight: u32,
    /// Reservation in operations per second; 0 is none.
    pub iops_reservation: u64,
    /// Reservation in bytes per second; 0 is none.
    pub bps_reservation: u64,
    /// Utilization of the device in percent below which limits are lifted, 0 (never) to 100.
    pub watermark: u8,
    /// Latency target, and floor beside targets of others.
    pub latency: LatencyConfig,
    /// Quotas by volume, and the limit while one is used up.
    pub quota: VolumeQuota,
}

impl Default for ThrottleConfig {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            weight: DEFAULT_WEIGHT,
            iops_reservation: 0,
            bps_reservation: 0,
            watermark: 0,
            latency: LatencyConfig::default(),
            quota: VolumeQuota::default(),
        }
    }
}

impl ThrottleConfig {
    /// Converts to the settings of a running disk.
    pub fn to_disk_settings(&self) -> DiskSettings {
        self.to_group_settings().into()
    }

    /// Converts to the settings of a running group.
    pub fn to_group_settings(&self) -> GroupSettings {
        let Self { limits, quota, .. } = *self;
        let latency = self.latency.to_running();
        GroupSettings { limits, share: self.share(), watermark: self.watermark(), latency, quota }
    }

    /// Converts from the settings of a running disk or group.
    pub fn from_running(settings: &GroupSettings) -> Self {
        let GroupSettings { limits, share, watermark, latency, quota } = *settings;
        Self {
            limits,
            weight: share.weight(),
            iops_reservation: share.iops_reservation(),
            bps_reservation: share.bps_reservation(),
            watermark: watermark.percent(),
            latency: LatencyConfig::from_running(&latency),
            quota,
        }
    }

    pub(crate) fn share(&self) -> NodeShare {
        // The range was checked when the key was read.
        let share = NodeShare::new(self.weight).expect("checked");
        share.with_reservation(self.iops_reservation, self.bps_reservation)
    }

    fn watermark(&self) -> Watermark {
        Watermark::new(self.watermark).expect("checked")
    }
}

/// Rows of limit settings, for a config with these settings.
pub(crate) fn limit_keys<T: 'static>(
    limits: impl IntoIterator<Item = LimitSetting>,
    settings: fn(&T) -> &ThrottleConfig,
    settings_mut: fn(&mut T) -> &mut ThrottleConfig,
) -> impl Iterator<Item = ConfigKey<T>> {
    let field = move |setting: LimitSetting| {
        let read = move |config: &mut T, given: KeyInput<'_>| {
            // Checks the range of this setting; combinations are checked by `check_limits`.
            let set = settings_mut(config).limits.set(setting, given.number);
            set.map_err(|invalid| invalid.rule.to_string())
        };
        KeyField::new(read, move |config| Some(KeyLiteral::Number(settings(config).limits.get(setting))))
    };
    limits.into_iter().map(move |setting| {
        let heading = if LimitSetting::OF_SIZE.contains(&setting) { SIZE_HEADING } else { "Limits" };
        limit_key(heading, setting, field(setting))
    })
}

/// Row of a limit setting.
pub(crate) fn limit_key<T>(heading: &'static str, setting: LimitSetting, field: KeyField<T>) -> ConfigKey<T> {
    ConfigKey {
        name: setting.name(),
        heading,
        value: value(setting),
        placeholder: placeholder(setting),
        default: "",
        help: help(setting),
        change: ChangePolicy::Apply,
        transfer: TransferPolicy::Transferred,
        field,
    }
}

/// Type of the value of a setting.
pub(crate) fn value(setting: LimitSetting) -> KeyType {
    match setting {
        // Whole seconds, as in QEMU.
        LimitSetting::Limit(_, LimitPart::BurstLength) => KeyType::Seconds,
        LimitSetting::BurstFor => KeyType::Time,
        _ if setting.is_size() => KeyType::Size,
        _ => KeyType::Count,
    }
}

/// Help of a setting.
pub(crate) fn help(setting: LimitSetting) -> String {
    let (kind, part) = match setting {
        LimitSetting::Limit(kind, part) => (kind, part),
        LimitSetting::IopsSize => {
            return "Bytes above which one request counts as more than one operation; 0 is never".to_owned();
        }
        LimitSetting::BurstFor => {
            return "Duration of a full burst at each -max, in whole seconds or as in 30s, 2m; replaces \
                    -max-length. 0 uses -max-length"
                .to_owned();
        }
    };
    let unit = if kind.counts_bytes() { "Bytes" } else { "Operations" };
    let direction = match kind {
        LimitKind::BpsTotal | LimitKind::IopsTotal => "of reads and writes together",
        LimitKind::BpsRead | LimitKind::IopsRead => "of reads",
        LimitKind::BpsWrite | LimitKind::IopsWrite => "of writes and discards",
    };
    let per_gib = LimitSetting::Limit(kind, LimitPart::PerGib).name();
    match part {
        LimitPart::PerGib => format!(
            "{unit} per second {direction} for each GiB of the disk, in place of a fixed limit; follows a \
             resize at once, and never exceeds the burst rate. 0 is no limit"
        ),
        LimitPart::PerGibMin => {
            format!("Lowest limit that follows from --{per_gib}, for small disks; 0 is none")
        }
        LimitPart::PerGibMax => {
            format!("Highest limit that follows from --{per_gib}, for large disks; 0 is none")
        }
        LimitPart::Rate => format!("{unit} per second {direction}; 0 is no limit"),
        LimitPart::BurstRate => format!("{unit} per second {direction} during a burst; 0 is no burst"),
        LimitPart::BurstLength => {
            let rate = LimitSetting::Limit(kind, LimitPart::Rate).name();
            format!(
                "Length L in seconds of a burst at that rate M, saved up while idle; a full burst \
                 over the limit R, --{rate}, lasts L × M ÷ (M − R) seconds, because the bucket \
                 drains at R [default: 1]"
            )
        }
    }
}

/// Placeholder of the value in the help.
pub(crate) fn placeholder(setting: LimitSetting) -> &'static str {
    match setting {
        LimitSetting::Limit(_, LimitPart::BurstLength) => "SECONDS",
        LimitSetting::BurstFor => "TIME",
        _ if setting.is_size() => "SIZE",
        _ => "N",
    }
}

/// Rows of weight, reservations and watermark, for a config with these settings.
pub(crate) fn share_keys<T: 'static>(
    settings: fn(&T) -> &ThrottleConfig,
    settings_mut: fn(&mut T) -> &mut ThrottleConfig,
) -> Vec<ConfigKey<T>> {
    let number = |read: fn(&mut ThrottleConfig, u64) -> Result<(), String>,
                  write: fn(&ThrottleConfig) -> u64| {
        KeyField::new(
            move |config: &mut T, given| read(settings_mut(config), given.number),
            move |config| Some(KeyLiteral::Number(write(settings(config)))),
        )
    };
    let weight =
        number(|to, value| weight(value).map(|value| to.weight = value), |throttle| throttle.weight.into());
    let iops = number(
        |to, value| reservation(value).map(|value| to.iops_reservation = value),
        |throttle| throttle.iops_reservation,
    );
    let bps = number(
        |to, value| reservation(value).map(|value| to.bps_reservation = value),
        |throttle| throttle.bps_reservation,
    );
    let watermark = number(
        |to, value| watermark(value).map(|value| to.watermark = value),
        |throttle| throttle.watermark.into(),
    );
    table! {
        "Shares" {
            "weight", KeyType::Count, "N", weight, "100", Apply, Transferred,
                "Share of each disk in its group, relative to the other weights there, from 1 to 10000";
            "iops-reservation", KeyType::Count, "N", iops, "", Apply, Transferred,
                "Reserved operations per second, independent of the load of others; 0 is none";
            "bps-reservation", KeyType::Size, "SIZE", bps, "", Apply, Transferred,
                "Reserved bytes per second, independent of the load of others; 0 is none. With both \
                 reservations, each request counts against the one of which it uses the larger part";
            "watermark", KeyType::Count, "PERCENT", watermark, "0", Apply, Transferred,
                "Percentage of the device's capacity below which limits are lifted; 0 never lifts them";
        }
    }
}

/// Rows of the latency settings, for a config with these settings.
pub(crate) fn latency_keys<T: 'static>(
    settings: fn(&T) -> &ThrottleConfig,
    settings_mut: fn(&mut T) -> &mut ThrottleConfig,
) -> Vec<ConfigKey<T>> {
    let field = |setting: LatencySetting| {
        KeyField::new(
            move |config: &mut T, given| settings_mut(config).latency.read(setting, given.text),
            move |config| settings(config).latency.literal(setting).map(KeyLiteral::Text),
        )
    };
    table! {
        "Latency" {
            "latency-target", KeyType::Text, "TIME", field(LatencySetting::Target), "", Apply, Transferred,
                "Time within which requests complete after their admission, such as 5ms; other disks on \
                 the device are throttled to keep it. 0 is none";
            "latency-percentile", KeyType::Text, "PERCENT", field(LatencySetting::Percentile), "99", Apply,
                Transferred, "Percentage of the requests that the latency target covers, from 50 to 99.99";
            "latency-of", KeyType::Word(&["all", "reads", "writes"]), "REQUESTS",
                field(LatencySetting::Directions), "all", Apply, Transferred,
                "Requests that the latency target covers";
            "latency-floor", KeyType::Text, "PERCENT", field(LatencySetting::Floor), "", Apply, Transferred,
                "Percentage of the device's throughput that remains while latency targets of others are \
                 enforced, from 0 to 100; by default 1, and at most 10 for all disks together";
        }
    }
}

/// Rows of the quotas by volume, for a config with these settings.
pub(crate) fn quota_keys<T: 'static>(
    settings: fn(&T) -> &ThrottleConfig,
    settings_mut: fn(&mut T) -> &mut ThrottleConfig,
) -> Vec<ConfigKey<T>> {
    let amount = |setting: QuotaSetting| {
        KeyField::new(
            move |config: &mut T, given| setting.read(&mut settings_mut(config).quota, given.text),
            move |config| {
                let text = setting.text(&settings(config).quota);
                (text != "0").then_some(KeyLiteral::Text(text))
            },
        )
    };
    let rate = KeyField::new(
        move |config: &mut T, given: KeyInput<'_>| {
            quota::rate(given.number).map(|rate_bps| settings_mut(config).quota.rate_bps = rate_bps)
        },
        move |config| Some(KeyLiteral::Number(settings(config).quota.rate_bps)),
    );
    table! {
        "Quota" {
            "quota", KeyType::Text, "AMOUNT", amount(QuotaSetting::Total), "", Apply, Transferred,
                "Bytes of reads and writes in each calendar period at full rate, such as \"2T per month\"; \
                 a period is an hour, day, week or month in the time zone of the schedule. 0 is none";
            "write-quota", KeyType::Text, "AMOUNT", amount(QuotaSetting::Writes), "", Apply, Transferred,
                "As quota, for writes, write-zeroes and discards";
            "quota-rate", KeyType::Size, "SIZE", rate, "", Apply, Transferred,
                "Bytes per second of reads and writes together while a quota is used up, beside all other \
                 limits";
        }
    }
}

/// Reports limits that break a rule together.
pub(crate) fn check_limits<T>(
    placed: &ConfigWithOrigins<T>,
    settings: &ThrottleConfig,
    diagnostics: &Diagnostics,
) {
    if let Err(invalid) = settings.limits.validate() {
        diagnostics.report(placed.error(invalid.setting.name(), invalid.rule.to_string()));
    }
    if let Err((setting, rule)) = settings.latency.check() {
        diagnostics.report(placed.error(setting.name(), rule));
    }
    if let Err((setting, rule)) = quota::check(&settings.quota, settings.bps_reservation) {
        diagnostics.report(placed.error(setting.name(), rule));
    }
}

fn weight(value: u64) -> Result<u32, String> {
    let weight = u32::try_from(value).ok().filter(|weight| NodeShare::WEIGHTS.contains(weight));
    weight.ok_or_else(|| {
        let (min, max) = (NodeShare::WEIGHTS.start(), NodeShare::WEIGHTS.end());
        format!("is out of range; a weight is from {min} to {max}")
    })
}

fn reservation(value: u64) -> Result<u64, String> {
    match value {
        0..=MAX_VALUE => Ok(value),
        _ => Err(format!("is too large; it may be {MAX_VALUE} at most")),
    }
}

fn watermark(value: u64) -> Result<u8, String> {
    let percent = u8::try_from(value).ok().filter(|&percent| percent <= MAX_WATERMARK);
    percent.ok_or_else(|| format!("is out of range; a watermark is from 0 to {MAX_WATERMARK} percent"))
}
