//! Settings of reading ahead. Names, defaults and ranges are the policy's. The numeric settings
//! keep their values while reading ahead is off.

use policy::prefetch::{PrefetchConfig, PrefetchSetting, UnknownPrefetchMode};

use crate::{
    RuleError,
    diagnostics::Diagnostics,
    key::{
        ChangePolicy, ConfigKey, ConfigValue, KeyField, KeyInput, KeyLiteral, KeyType, TransferPolicy, table,
    },
    origins::ConfigWithOrigins,
};

/// Name of the mode, and prefix of the names of the numbers.
pub const MODE: &str = "prefetch";

/// Rows of the settings, for a config with these settings.
pub(crate) fn prefetch_keys<T: 'static>(
    settings: fn(&T) -> &PrefetchConfig,
    settings_mut: fn(&mut T) -> &mut PrefetchConfig,
) -> impl Iterator<Item = ConfigKey<T>> {
    let mode = KeyField::new(
        move |config: &mut T, given| {
            settings_mut(config).mode = ConfigValue::read(given)?;
            Ok(())
        },
        move |config| Some(settings(config).mode.write()),
    );
    let mode = table! {
        "Reading ahead" {
            "prefetch", KeyType::Word(&["on", "off", "auto"]), "MODE", mode, "auto", Apply, Transferred,
                "Prefetch for sequential readers: on, off, or auto, which pauses while too little of \
                 the prefetched data is used";
        }
    };
    let field = move |setting: PrefetchSetting| {
        let read = move |config: &mut T, given: KeyInput<'_>| {
            // Before `set`, which expects a valid value.
            if !setting.range().contains(&given.number) {
                return Err(out_of_range(setting));
            }
            settings_mut(config).set(setting, given.number);
            Ok(())
        };
        KeyField::new(read, move |config: &T| Some(KeyLiteral::Number(settings(config).get(setting))))
    };
    let number = move |setting: PrefetchSetting| ConfigKey {
        name: setting.name(),
        heading: "Reading ahead",
        value: if is_size(setting) { KeyType::Size } else { KeyType::Count },
        placeholder: if is_size(setting) { "SIZE" } else { "N" },
        default: default(setting),
        help: help(setting),
        change: ChangePolicy::Apply,
        transfer: TransferPolicy::Transferred,
        field: field(setting),
    };
    mode.into_iter().chain(PrefetchSetting::ALL.into_iter().map(number))
}

fn default(setting: PrefetchSetting) -> &'static str {
    match setting {
        PrefetchSetting::Memory => "4M",
        PrefetchSetting::LargestRequest => "64K",
        PrefetchSetting::WindowMin => "128K",
        PrefetchSetting::WindowMax => "2M",
        PrefetchSetting::Streams => "256",
    }
}

/// Help of a setting, with its range.
pub fn help(setting: PrefetchSetting) -> String {
    let description = match setting {
        PrefetchSetting::Memory => "Memory for prefetched data",
        PrefetchSetting::LargestRequest => "Largest read that is prefetched or served from prefetched data",
        PrefetchSetting::WindowMin => "Bytes prefetched for a new stream",
        PrefetchSetting::WindowMax => "Most bytes prefetched for a stream, if memory allows",
        PrefetchSetting::Streams => "Most streams prefetched for at a time",
    };
    let (min, max) = range(setting);
    format!("{description}, from {min} to {max}")
}

/// Reports a minimum window above the maximum, at the key that was given: the defaults are
/// consistent.
pub(crate) fn check_windows<T>(
    placed: &ConfigWithOrigins<T>,
    settings: &PrefetchConfig,
    diagnostics: &Diagnostics,
) {
    if let Err(invalid) = settings.validate() {
        let [min, max] = [PrefetchSetting::WindowMin, PrefetchSetting::WindowMax].map(PrefetchSetting::name);
        // If only one of both was given, the mistake is there.
        let key = if placed.origin_of_given(min).is_some() { min } else { max };
        diagnostics.report(placed.error(key, invalid.to_string()));
    }
}

/// Name without the prefix: `memory` for `prefetch-memory`.
pub fn short_name(setting: PrefetchSetting) -> &'static str {
    let name = setting.name();
    name.strip_prefix(MODE).and_then(|rest| rest.strip_prefix('-')).unwrap_or(name)
}

/// True if the value is a number of bytes.
pub fn is_size(setting: PrefetchSetting) -> bool {
    setting != PrefetchSetting::Streams
}

/// Value in the user's notation.
pub fn format_value(setting: PrefetchSetting, value: u64) -> String {
    if is_size(setting) { crate::exact_size(value) } else { value.to_string() }
}

/// Rule that a value out of range breaks.
pub fn out_of_range(setting: PrefetchSetting) -> String {
    let (min, max) = range(setting);
    format!("is out of range; it may be from {min} to {max}")
}

/// Minimum and maximum, in the user's notation.
pub fn range(setting: PrefetchSetting) -> (String, String) {
    let range = setting.range();
    (format_value(setting, *range.start()), format_value(setting, *range.end()))
}

impl RuleError for UnknownPrefetchMode {
    fn rule(self) -> String {
        self.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{ConfigError, DiskConfig, KeyTable as _, Origin};

    fn set(numbers: &[(PrefetchSetting, &str)]) -> Result<ConfigWithOrigins<DiskConfig>, ConfigError> {
        let mut disk = ConfigWithOrigins::new(DiskConfig::default(), Origin::new("disk"));
        for (setting, text) in numbers {
            let origin = Origin::option(setting.name(), text);
            disk.set(DiskConfig::key(setting.name()).unwrap(), text, Path::new(""), origin)?;
        }
        disk.into_checked()
    }

    #[track_caller]
    fn check(numbers: &[(PrefetchSetting, &str)], expect: &str) {
        assert_eq!(set(numbers).unwrap_err().to_string(), expect);
    }

    #[test]
    fn defaults_are_those_of_the_policy() {
        for setting in PrefetchSetting::ALL {
            assert_eq!(default(setting), format_value(setting, PrefetchConfig::default().get(setting)));
        }
    }

    #[test]
    fn a_number_out_of_its_range_is_named_with_it() {
        check(
            &[(PrefetchSetting::Memory, "4096")],
            "--prefetch-memory 4096: is out of range; it may be from 256K to 1T",
        );
        check(
            &[(PrefetchSetting::Memory, "1M"), (PrefetchSetting::Streams, "0")],
            "--prefetch-streams 0: is out of range; it may be from 1 to 4096",
        );
        assert!(set(&[(PrefetchSetting::Streams, "1099511627776")]).is_err(), "above 32 bits");
    }

    #[test]
    fn crossed_windows_are_reported_at_the_given_key() {
        check(
            &[(PrefetchSetting::WindowMax, "64K")],
            "--prefetch-window-max 64K: prefetch-window-min (131072) is above prefetch-window-max (65536); \
             the smallest window may not be larger than the largest",
        );
    }

    #[test]
    fn short_names_are_the_rest_of_the_long_ones() {
        assert_eq!(
            PrefetchSetting::ALL.map(short_name),
            ["memory", "largest-request", "window-min", "window-max", "streams"]
        );
    }
}
