//! A change of settings: parsed, sent to the daemon, and described.
//!
//! A setting has the same name on the command line, in the config file and in the protocol. Values
//! are checked individually here; the daemon checks rules between settings.

use std::path::Path;

use api::MemberSettings;
use policy::{
    prefetch::{self, PrefetchMode},
    throttle::{LimitPart, LimitSetting},
    volume_quota::VolumeQuota,
};
use serde_json::{Map, Value};
use settings::{
    ConfigError, DiskConfig, KeyTable as _, LatencyConfig, LatencySetting, Origin, QuotaSetting,
    key::ValueError, suggest,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettingName {
    Limit(LimitSetting),
    Weight,
    IopsReservation,
    BpsReservation,
    Watermark,
    Latency(LatencySetting),
    Quota(QuotaSetting),
    Group,
    Prefetch,
    PrefetchNumber(prefetch::PrefetchSetting),
}

impl SettingName {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::of_throttle().chain(Self::of_prefetch())
    }

    pub(crate) fn of_throttle() -> impl Iterator<Item = Self> {
        let scheduler = [Self::Weight, Self::IopsReservation, Self::BpsReservation, Self::Watermark];
        let latency = LatencySetting::ALL.map(Self::Latency);
        let quota = QuotaSetting::ALL.map(Self::Quota);
        LimitSetting::of_disk()
            .map(Self::Limit)
            .chain(scheduler)
            .chain(latency)
            .chain(quota)
            .chain([Self::Group])
    }

    pub(crate) fn of_prefetch() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Prefetch)
            .chain(prefetch::PrefetchSetting::ALL.into_iter().map(Self::PrefetchNumber))
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Limit(setting) => setting.name(),
            Self::Weight => "weight",
            Self::IopsReservation => "iops-reservation",
            Self::BpsReservation => "bps-reservation",
            Self::Watermark => "watermark",
            Self::Latency(setting) => setting.name(),
            Self::Quota(setting) => setting.name(),
            Self::Group => "group",
            Self::Prefetch => settings::prefetch::MODE,
            Self::PrefetchNumber(setting) => setting.name(),
        }
    }

    /// Finds a setting; the error suggests the nearest name.
    pub(crate) fn find(text: &str) -> Result<Self, String> {
        Self::all().find(|name| name.text() == text).ok_or_else(|| {
            match suggest::nearest(text, Self::all().map(Self::text)) {
                Some(near) => format!("{text}: no such setting (did you mean {near:?}?)"),
                None => {
                    format!("{text}: no such setting (the names are those of the options of `weir serve`)")
                }
            }
        })
    }

    /// True for texts that are "0" without a value.
    fn is_removed_by_zero(self) -> bool {
        self == Self::Latency(LatencySetting::Target) || matches!(self, Self::Quota(_))
    }

    fn is_size(self) -> bool {
        match self {
            Self::Limit(setting) => setting.is_size(),
            Self::PrefetchNumber(setting) => settings::prefetch::is_size(setting),
            name => name == Self::BpsReservation,
        }
    }

    pub(crate) fn default(self) -> SettingValue {
        match self {
            Self::Group => SettingValue::Text(String::new()),
            Self::Latency(setting) => SettingValue::Text(LatencyConfig::default().text(setting)),
            Self::Quota(setting) => SettingValue::Text(setting.text(&VolumeQuota::default())),
            Self::Weight => SettingValue::Number(100),
            Self::Limit(LimitSetting::Limit(_, LimitPart::BurstLength)) => SettingValue::Number(1),
            Self::Prefetch => SettingValue::Text(PrefetchMode::default().to_string()),
            Self::PrefetchNumber(setting) => {
                SettingValue::Number(prefetch::PrefetchConfig::default().get(setting))
            }
            _ => SettingValue::Number(0),
        }
    }

    pub(crate) fn of(self, settings: &MemberSettings) -> SettingValue {
        let number = match self {
            Self::Limit(setting) => settings.configured_limits().get(setting.name()).copied(),
            Self::Weight => settings.weight,
            Self::IopsReservation => settings.iops_reservation,
            Self::BpsReservation => settings.bps_reservation,
            Self::Watermark => settings.watermark,
            Self::Latency(setting) => {
                let text = match setting {
                    LatencySetting::Target => &settings.latency_target,
                    LatencySetting::Percentile => &settings.latency_percentile,
                    LatencySetting::Directions => &settings.latency_of,
                    LatencySetting::Floor => &settings.latency_floor,
                };
                return text.clone().map_or_else(|| self.default(), SettingValue::Text);
            }
            Self::Quota(setting) => {
                let text = match setting {
                    QuotaSetting::Total => settings.quota.clone(),
                    QuotaSetting::Writes => settings.write_quota.clone(),
                    QuotaSetting::Rate => settings.quota_rate.map(settings::exact_size),
                };
                return text.map_or_else(|| self.default(), SettingValue::Text);
            }
            Self::Group => return SettingValue::Text(settings.group.clone().unwrap_or_default()),
            Self::Prefetch => {
                let mode =
                    settings.prefetch.as_ref().map(|prefetch| SettingValue::Text(prefetch.mode.clone()));
                return mode.unwrap_or_else(|| self.default());
            }
            Self::PrefetchNumber(setting) => {
                let name = settings::prefetch::short_name(setting);
                settings.prefetch.as_ref().and_then(|prefetch| prefetch.numbers.get(name).copied())
            }
        };
        number.map_or_else(|| self.default(), SettingValue::Number)
    }

    pub(crate) fn read(self, text: &str) -> Result<SettingValue, String> {
        let value = match self {
            Self::Group => Ok(SettingValue::Text(text.to_owned())),
            Self::Latency(setting) => latency_text(setting, text).map(SettingValue::Text),
            Self::Quota(setting) => quota_text(setting, text).map(SettingValue::Text),
            Self::Prefetch => {
                settings::parse::<PrefetchMode>(text).map(|mode| SettingValue::Text(mode.to_string()))
            }
            Self::Limit(setting) => settings::limit_parser(setting)(text).map(SettingValue::Number),
            _ if self.is_size() => settings::size(text).map(SettingValue::Number),
            _ => settings::count(text).map(SettingValue::Number),
        };
        value.map_err(|rule| format!("{} = {text}: {rule}", self.text()))
    }

    /// Checks a value without regard to other settings.
    fn check(self, value: &SettingValue) -> Result<(), ConfigError> {
        let &SettingValue::Number(number) = value else { return Ok(()) };
        // The parser of the config file has the ranges; the value is read into a scratch config.
        let key = DiskConfig::key(self.text()).expect("a key of the table");
        let place = match self {
            Self::PrefetchNumber(setting) => {
                Origin::option(settings::prefetch::short_name(setting), self.format(value))
            }
            _ => Origin::option(self.text(), number),
        };
        match key.read(&mut DiskConfig::default(), &number.to_string(), Path::new("")) {
            Ok(()) => Ok(()),
            Err(ValueError::Malformed(rule) | ValueError::OutOfRange(rule)) => Err(place.error(rule)),
        }
    }

    /// Formats a value for users: `none` if it is not set.
    pub(crate) fn format(self, value: &SettingValue) -> String {
        match value {
            SettingValue::Text(text) if text.is_empty() => "none".to_owned(),
            SettingValue::Text(text) if self.is_removed_by_zero() && text == "0" => "none".to_owned(),
            SettingValue::Text(text) => text.clone(),
            SettingValue::Number(0) => "none".to_owned(),
            SettingValue::Number(seconds) if self == Self::Limit(LimitSetting::BurstFor) => {
                format!("{seconds}s")
            }
            SettingValue::Number(number) if self.is_size() => settings::exact_size(*number),
            SettingValue::Number(number) => number.to_string(),
        }
    }
}

/// Checks a value of a latency setting, and returns it in the form that the daemon reports.
///
/// # Errors
/// Returns the rule that the text breaks.
pub(crate) fn latency_text(setting: LatencySetting, text: &str) -> Result<String, String> {
    let mut config = LatencyConfig::default();
    config.read(setting, text)?;
    Ok(config.text(setting))
}

/// As [`latency_text`], for a setting of quotas.
///
/// # Errors
/// Returns the rule that the text breaks.
pub(crate) fn quota_text(setting: QuotaSetting, text: &str) -> Result<String, String> {
    let mut quota = VolumeQuota::default();
    setting.read(&mut quota, text)?;
    Ok(setting.text(&quota))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SettingValue {
    Number(u64),
    /// Name of a group (empty for none), or a mode.
    Text(String),
}

impl From<SettingValue> for Value {
    fn from(value: SettingValue) -> Self {
        match value {
            SettingValue::Number(number) => number.into(),
            SettingValue::Text(text) => text.into(),
        }
    }
}

/// Settings to change, each once, in the given order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SettingsChange(Vec<(SettingName, SettingValue)>);

impl SettingsChange {
    pub(crate) fn set(&mut self, name: SettingName, value: SettingValue) {
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.0.push((name, value)),
        }
    }

    /// Checks each value individually, before the change is sent to the daemon.
    ///
    /// # Errors
    /// The first invalid value, with its option.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.iter().try_for_each(|(name, value)| name.check(value))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SettingName, &SettingValue)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }

    pub(crate) fn arguments(&self) -> Map<String, Value> {
        self.iter().map(|(name, value)| (name.text().to_owned(), value.clone().into())).collect()
    }

    /// One line for each setting: old and new value, or that it is unchanged.
    pub(crate) fn describe(&self, before: &MemberSettings) -> Vec<String> {
        let line = |(name, value): (SettingName, &SettingValue)| {
            let (old, new) = (name.format(&name.of(before)), name.format(value));
            let name = name.text();
            if old == new { format!("{name}: {new} (unchanged)") } else { format!("{name}: {old} → {new}") }
        };
        self.iter().map(line).collect()
    }

    /// The change from `before` to the `name=value` list in `text`; settings not in the list get
    /// their defaults.
    pub(crate) fn from_listing(before: &MemberSettings, text: &str) -> Result<Self, String> {
        let mut requested = Self::default();
        for item in text.split_whitespace() {
            let Some((name, value)) = item.split_once('=') else {
                return Err(format!("{item}: is not of the form name=value"));
            };
            let name = SettingName::find(name)?;
            if requested.iter().any(|(known, _)| known == name) {
                return Err(format!("{}: is given twice", name.text()));
            }
            requested.set(name, name.read(value)?);
        }
        let mut change = Self::default();
        for name in SettingName::all() {
            let value =
                requested.iter().find(|(known, _)| *known == name).map_or(name.default(), |(_, v)| v.clone());
            // An editor's list mostly repeats the values in force: send only what differs.
            if value != name.of(before) {
                change.set(name, value);
            }
        }
        Ok(change)
    }
}

/// Settings that differ from their defaults, in the form that [`SettingsChange::from_listing`]
/// parses.
pub(crate) fn listing(settings: &MemberSettings) -> String {
    let set = SettingName::all().filter(|name| name.of(settings) != name.default());
    let items: Vec<String> =
        set.map(|name| format!("{}={}", name.text(), name.format(&name.of(settings)))).collect();
    items.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settings() -> MemberSettings {
        let limits = json!({ "iops-total": 1000, "bps-read": 10 << 20 });
        serde_json::from_value(json!({ "group": "gold", "weight": 100, "limits": limits })).unwrap()
    }

    #[test]
    fn listing_of_current_settings_is_no_change() {
        let listed = listing(&settings());
        assert_eq!(listed, "bps-read=10M iops-total=1000 group=gold");
        assert!(SettingsChange::from_listing(&settings(), &listed).unwrap().is_empty());
    }

    #[test]
    fn settings_missing_from_a_listing_get_defaults() {
        let change = SettingsChange::from_listing(&settings(), "iops-total=2000 weight=300").unwrap();
        let arguments = json!({ "iops-total": 2000, "bps-read": 0, "weight": 300, "group": "" });
        assert_eq!(Value::Object(change.arguments()), arguments);
        let lines =
            ["bps-read: 10M → none", "iops-total: 1000 → 2000", "weight: 100 → 300", "group: gold → none"];
        assert_eq!(change.describe(&settings()), lines);
    }

    #[test]
    fn burst_length_of_one_second_is_the_default() {
        let change =
            SettingsChange::from_listing(&settings(), &(listing(&settings()) + " iops-total-max-length=1"));
        assert!(change.unwrap().is_empty());
    }

    #[test]
    fn invalid_listing_names_the_word() {
        let check = |text: &str, expect: &str| {
            assert_eq!(SettingsChange::from_listing(&settings(), text).unwrap_err(), expect, "{text}");
        };
        check("iops", "iops: is not of the form name=value");
        check("iops-totl=1", "iops-totl: no such setting (did you mean \"iops-total\"?)");
        check("zzz=1", "zzz: no such setting (the names are those of the options of `weir serve`)");
        check("iops-total=1 iops-total=2", "iops-total: is given twice");
        check("iops-total=-1", "iops-total = -1: is not a whole number of 0 or more");
    }
}
