//! Limits, shares and the watermark as arguments and results, under the names that QEMU's commands
//! use.
//!
//! | | `iops-total-max-length` is called |
//! | --- | --- |
//! | `limits` of a throttle group, `x-weir-set` | `iops-total-max-length` |
//! | a throttle group's own properties | `x-iops-total-max-length` |
//! | `block_set_io_throttle`, `query-block` | `iops_max_length` |
//!
//! weir's own settings have the prefix `x-weir-` in commands of QEMU. Errors use the names that the
//! client used.

use api::LimitValues;
use block::layer::throttle::{DiskSettings, GroupSettings};
use policy::{
    throttle::{InvalidLimit, LimitKind, LimitPart, LimitSetting, Limits, MAX_VALUE, NodeShare},
    volume_quota::VolumeQuota,
    watermark::Watermark,
};
use serde_json::{Map, Value, json};

use settings::{LatencyConfig, LatencySetting, QuotaSetting, quota};

use super::{arguments::QmpArguments, error::QmpError, json::excerpt};

/// Names of QEMU's nineteen settings in a family of commands. `burst-for` and the rates for each
/// GiB are read with weir's own settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SettingNaming {
    Plain,
    /// Prefix `x-` and the own name.
    Property,
    /// Names of the device properties that predate throttle groups.
    Device,
}

impl SettingNaming {
    pub(super) fn name(self, setting: LimitSetting) -> String {
        match self {
            Self::Plain => setting.name().to_owned(),
            Self::Property => format!("x-{setting}"),
            Self::Device => device_name(setting),
        }
    }
}

fn device_name(setting: LimitSetting) -> String {
    let (kind, part) = match setting {
        LimitSetting::Limit(kind, part) => (kind, part),
        LimitSetting::IopsSize => return "iops_size".to_owned(),
        LimitSetting::BurstFor => return "x-weir-burst-for".to_owned(),
    };
    let kind = match kind {
        LimitKind::BpsTotal => "bps",
        LimitKind::BpsRead => "bps_rd",
        LimitKind::BpsWrite => "bps_wr",
        LimitKind::IopsTotal => "iops",
        LimitKind::IopsRead => "iops_rd",
        LimitKind::IopsWrite => "iops_wr",
    };
    let part = match part {
        LimitPart::Rate => "",
        LimitPart::BurstRate => "_max",
        LimitPart::BurstLength => "_max_length",
        LimitPart::PerGib => "_per_gib",
        LimitPart::PerGibMin => "_per_gib_min",
        LimitPart::PerGibMax => "_per_gib_max",
    };
    format!("{kind}{part}")
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LimitChanges {
    given: Vec<(LimitSetting, u64, String)>,
}

impl LimitChanges {
    pub(super) fn read(arguments: &mut QmpArguments, naming: SettingNaming) -> Result<Self, QmpError> {
        Self::read_all(LimitSetting::of_qemu().map(|setting| (setting, naming.name(setting))), arguments)
    }

    /// Given settings with their values; the last value of a setting applies.
    pub(super) fn values(&self) -> impl Iterator<Item = (LimitSetting, u64)> + '_ {
        self.given.iter().map(|(setting, value, _)| (*setting, *value))
    }

    pub(super) fn contains(&self, setting: LimitSetting) -> bool {
        self.given.iter().any(|(given, ..)| *given == setting)
    }

    /// Reads `burst-for`, under this name.
    pub(super) fn read_burst_for(arguments: &mut QmpArguments, key: &str) -> Result<Self, QmpError> {
        Self::read_all([(LimitSetting::BurstFor, key.to_owned())], arguments)
    }

    /// Reads settings under these names.
    fn read_all(
        settings: impl IntoIterator<Item = (LimitSetting, String)>,
        arguments: &mut QmpArguments,
    ) -> Result<Self, QmpError> {
        let mut given = Vec::new();
        for (setting, key) in settings {
            if let Some(value) = arguments.number(&key, 0..=setting.maximum())? {
                given.push((setting, value, arguments.full_name(&key)));
            }
        }
        Ok(Self { given })
    }

    /// Combines changes; `later` takes precedence.
    pub(super) fn then(mut self, later: Self) -> Self {
        self.given.extend(later.given);
        self
    }

    /// Errors: the first broken rule, with the argument that caused it if there is one.
    pub(super) fn apply_to(&self, limits: Limits) -> Result<Limits, QmpError> {
        let given: Vec<_> = self.values().collect();
        limits.with_settings(&given).map_err(|invalid| self.rule_error(&invalid))
    }

    fn rule_error(&self, invalid: &InvalidLimit) -> QmpError {
        // The last argument for the setting is the one in force.
        match self.given.iter().rfind(|(setting, ..)| *setting == invalid.setting) {
            Some((setting, _, name)) if name == setting.name() => QmpError::generic(invalid.to_string()),
            Some((.., name)) => QmpError::generic(format!("Parameter '{name}': {invalid}")),
            None => QmpError::generic(invalid.to_string()),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SettingChanges {
    limits: LimitChanges,
    weight: Option<u32>,
    iops_reservation: Option<u64>,
    bps_reservation: Option<u64>,
    watermark: Option<Watermark>,
    latency: Vec<(LatencySetting, String)>,
    quota: Vec<(QuotaSetting, String)>,
}

impl SettingChanges {
    #[must_use]
    pub(super) fn with_limits(self, limits: LimitChanges) -> Self {
        Self { limits: limits.then(self.limits.clone()), ..self }
    }

    /// Reads weir's own settings.
    pub(super) fn read_own(arguments: &mut QmpArguments, prefix: &str) -> Result<Self, QmpError> {
        let key = |name: &str| format!("{prefix}{name}");
        let weights = u64::from(*NodeShare::WEIGHTS.start())..=u64::from(*NodeShare::WEIGHTS.end());
        let weight = arguments.number(&key("weight"), weights)?;
        let watermark = arguments.number(&key("watermark"), 0..=100)?;
        let own = LimitSetting::OF_SIZE.into_iter().chain([LimitSetting::BurstFor]);
        let own = own.map(|setting| (setting, key(setting.name())));
        Ok(Self {
            limits: LimitChanges::read_all(own, arguments)?,
            weight: weight.and_then(|weight| u32::try_from(weight).ok()),
            iops_reservation: arguments.number(&key("iops-reservation"), 0..=MAX_VALUE)?,
            bps_reservation: arguments.number(&key("bps-reservation"), 0..=MAX_VALUE)?,
            watermark: watermark.and_then(|percent| Watermark::new(u8::try_from(percent).ok()?)),
            latency: read_latency(arguments, prefix)?,
            quota: read_quota(arguments, prefix)?,
        })
    }

    /// True if they change a reservation.
    pub(super) fn changes_reservation(&self) -> bool {
        self.iops_reservation.is_some() || self.bps_reservation.is_some()
    }

    pub(super) fn apply_to(&self, before: GroupSettings) -> Result<GroupSettings, QmpError> {
        let GroupSettings { limits, share, watermark, latency, quota } = before;
        // Starts from the weight alone, then adds the reservations.
        let weighted = self.weight.map_or(NodeShare::new(share.weight()), NodeShare::new).unwrap_or(share);
        let share = weighted.with_reservation(
            self.iops_reservation.unwrap_or(share.iops_reservation()),
            self.bps_reservation.unwrap_or(share.bps_reservation()),
        );
        let watermark = self.watermark.unwrap_or(watermark);
        let latency = LatencyConfig::from_running(&latency).with_settings(&self.latency);
        let latency = latency.map_err(|(setting, rule)| QmpError::rule(setting.name(), rule))?.to_running();
        let quota = quota::with_settings(quota, &self.quota)
            .and_then(|quota| quota::check(&quota, share.bps_reservation()).map(|()| quota));
        let quota = quota.map_err(|(setting, rule)| QmpError::rule(setting.name(), rule))?;
        Ok(GroupSettings { limits: self.limits.apply_to(limits)?, share, watermark, latency, quota })
    }

    pub(super) fn apply_to_disk(&self, before: DiskSettings) -> Result<DiskSettings, QmpError> {
        Ok(self.apply_to(before.into())?.into())
    }
}

/// Reads the given latency settings.
fn read_latency(
    arguments: &mut QmpArguments,
    prefix: &str,
) -> Result<Vec<(LatencySetting, String)>, QmpError> {
    read_texts(
        arguments,
        prefix,
        LatencySetting::ALL.map(|setting| (setting, setting.name())),
        |setting, text| LatencyConfig::default().read(setting, text),
    )
}

/// Reads the given settings of quotas.
fn read_quota(arguments: &mut QmpArguments, prefix: &str) -> Result<Vec<(QuotaSetting, String)>, QmpError> {
    read_texts(
        arguments,
        prefix,
        QuotaSetting::ALL.map(|setting| (setting, setting.name())),
        |setting, text| setting.read(&mut VolumeQuota::default(), text),
    )
}

/// Reads the given settings of these. Each is a text or a number in the form of the config file,
/// and is checked here, so that errors have the argument's name.
fn read_texts<T: Copy>(
    arguments: &mut QmpArguments,
    prefix: &str,
    settings: impl IntoIterator<Item = (T, &'static str)>,
    check: impl Fn(T, &str) -> Result<(), String>,
) -> Result<Vec<(T, String)>, QmpError> {
    let mut given = Vec::new();
    for (setting, name) in settings {
        let key = format!("{prefix}{name}");
        let name = arguments.full_name(&key);
        let text = match arguments.optional::<Value>(&key)? {
            None => continue,
            Some(Value::String(text)) => text,
            Some(Value::Number(number)) => number.to_string(),
            Some(_) => return Err(QmpError::wrong_type(&name, "string")),
        };
        let rule = |rule| QmpError::rule(&name, format_args!("({}) {rule}", excerpt(&text)));
        check(setting, &text).map_err(rule)?;
        given.push((setting, text));
    }
    Ok(given)
}

/// All nineteen settings, as in the `limits` of QEMU's throttle group.
pub(super) fn all_limits(limits: &Limits) -> Value {
    let entry = |setting: LimitSetting| (setting.name().to_owned(), json!(qemu_value(limits, setting)));
    LimitSetting::of_qemu().map(entry).collect()
}

/// Value of one of QEMU's settings. `burst-for` appears as a burst length with the same capacity,
/// rounded up.
pub(super) fn qemu_value(limits: &Limits, setting: LimitSetting) -> u64 {
    match setting {
        LimitSetting::Limit(kind, LimitPart::BurstLength) => limits.limit(kind).equivalent_length_s(),
        setting => limits.get(setting),
    }
}

/// Settings other than the defaults, by their own names.
pub(super) fn set_limits(limits: &Limits) -> LimitValues {
    let is_set = |setting: &&LimitSetting| match setting {
        LimitSetting::Limit(kind, LimitPart::BurstLength) => limits.limit(*kind).burst_length_s > 1,
        setting => limits.get(**setting) > 0,
    };
    let entry = |setting: &LimitSetting| (setting.name().to_owned(), limits.get(*setting));
    LimitSetting::of_disk().filter(|setting| is_set(&setting)).map(|setting| entry(&setting)).collect()
}

/// Limits of a `BlockDeviceInfo`: all rates, and bursts that are set.
pub(super) fn device_limits(limits: &Limits) -> Map<String, Value> {
    let is_shown = |setting: &LimitSetting| match setting {
        LimitSetting::Limit(_, LimitPart::Rate) => true,
        LimitSetting::Limit(kind, _) => limits.limit(*kind).burst_rate > 0,
        LimitSetting::IopsSize | LimitSetting::BurstFor => limits.get(*setting) > 0,
    };
    let entry =
        |setting: LimitSetting| (SettingNaming::Device.name(setting), json!(qemu_value(limits, setting)));
    LimitSetting::ALL.into_iter().filter(is_shown).map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(naming: SettingNaming, value: Value) -> Result<LimitChanges, String> {
        QmpArguments::read_all(value, |arguments| LimitChanges::read(arguments, naming))
    }

    #[test]
    fn names_are_unique_in_each_naming() {
        for naming in [SettingNaming::Plain, SettingNaming::Property, SettingNaming::Device] {
            for setting in LimitSetting::of_qemu() {
                let key = naming.name(setting);
                let changes = read(naming, json!({ key.as_str(): 7 })).expect("a known key");
                assert_eq!(changes.given, [(setting, 7, key)]);
            }
        }
        assert_eq!(
            SettingNaming::Device.name(LimitSetting::from_name("iops-read-max-length").unwrap()),
            "iops_rd_max_length"
        );
        assert_eq!(SettingNaming::Device.name(LimitSetting::from_name("bps-total").unwrap()), "bps");
    }

    #[test]
    fn rule_error_has_the_clients_argument_name() {
        let changes = read(SettingNaming::Device, json!({"iops": 100, "iops_max": 50})).unwrap();
        assert_eq!(
            changes.apply_to(Limits::default()).unwrap_err().to_string(),
            "Parameter 'iops_max': iops-total-max (50) is below iops-total (100); a burst rate \
             must be at least the rate"
        );
        let changes = read(SettingNaming::Plain, json!({"iops-total-max": 50})).unwrap();
        assert_eq!(
            changes.apply_to(Limits::default()).unwrap_err().to_string(),
            "iops-total-max (50) is set without iops-total; set iops-total too"
        );
        assert_eq!(
            read(SettingNaming::Plain, json!({"bps-read": -1})).unwrap_err(),
            "Parameter 'bps-read' (-1) is out of range; it is from 0 to 1000000000000000"
        );
    }

    #[test]
    fn removing_a_limit_removes_its_burst() {
        let all =
            json!({"iops-total": 100, "iops-total-max": 500, "iops-total-max-length": 5, "iops-size": 4096});
        let before = read(SettingNaming::Plain, all).unwrap().apply_to(Limits::default()).unwrap();
        let after = |change| read(SettingNaming::Plain, change).unwrap().apply_to(before);
        let mut alone = Limits::default();
        alone.limit_mut(LimitKind::IopsTotal).rate = 100;
        alone.iops_size = 4096;
        assert_eq!(after(json!({"iops-total-max": 0})).unwrap(), alone);
        assert_eq!(after(json!({"iops-total": 0})).unwrap(), Limits::default());
        // Settings of the same command are checked together, without adjusting each other.
        let both = after(json!({"iops-total-max": 0, "iops-total-max-length": 5})).unwrap_err().to_string();
        assert!(both.starts_with("iops-total-max-length (5) is set without iops-total-max"), "{both}");
    }

    #[test]
    fn results_have_qemus_form() {
        let changes =
            json!({"iops-total": 100, "iops-total-max": 500, "iops-total-max-length": 10, "iops-size": 4096});
        let limits =
            read(SettingNaming::Plain, changes.clone()).unwrap().apply_to(Limits::default()).unwrap();
        assert_eq!(json!(set_limits(&limits)), changes);
        assert!(set_limits(&Limits::default()).is_empty());
        assert_eq!(all_limits(&limits).as_object().unwrap().len(), 19);
        assert_eq!(all_limits(&Limits::default())["bps-read-max-length"], 1);
        assert_eq!(
            Value::Object(device_limits(&limits)),
            json!({
                "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 100, "iops_rd": 0, "iops_wr": 0,
                "iops_max": 500, "iops_max_length": 10, "iops_size": 4096,
            })
        );
    }

    #[test]
    fn omitted_settings_are_kept() {
        let given = json!({"x-weir-weight": 300, "x-weir-iops-reservation": 50});
        let read = |arguments: &mut QmpArguments| SettingChanges::read_own(arguments, "x-weir-");
        let changes = QmpArguments::read_all(given, read).unwrap();
        let before = NodeShare::default().with_reservation(1, 2);
        let before = GroupSettings { share: before, ..GroupSettings::default() };
        let GroupSettings { share, .. } = changes.apply_to(before).unwrap();
        assert_eq!((share.weight(), share.iops_reservation(), share.bps_reservation()), (300, 50, 2));
    }
}
