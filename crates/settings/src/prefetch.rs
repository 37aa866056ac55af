//! Settings of reading ahead. Names, defaults and ranges are the policy's. Numbers are kept while
//! reading ahead is off.

use policy::prefetch::{Setting, Settings, UnknownMode};

use crate::{
    Rule,
    key::{Change, Field, Given, Key, KeyValue, Literal, Transfer, ValueKind, table},
    place::Mistakes,
    placed::Placed,
};

/// Name of the mode, and prefix of the names of the numbers.
pub const MODE: &str = "prefetch";

/// Rows of the settings, for a config with these settings.
pub(crate) fn prefetch_keys<T: 'static>(
    settings: fn(&T) -> &Settings,
    settings_mut: fn(&mut T) -> &mut Settings,
) -> impl Iterator<Item = Key<T>> {
    let mode = Field::new(
        move |config: &mut T, given| {
            settings_mut(config).mode = KeyValue::read(given)?;
            Ok(())
        },
        move |config| Some(settings(config).mode.write()),
    );
    let mode = table! {
        "Reading ahead" {
            "prefetch", ValueKind::Word(&["on", "off", "auto"]), "MODE", mode, "auto", Live, Moves,
                "Read ahead of sequential readers: on, off, or auto, where it pays";
        }
    };
    let field = move |setting: Setting| {
        let read = move |config: &mut T, given: Given<'_>| {
            // Before `set`, which expects a valid value.
            if !setting.range().contains(&given.number) {
                return Err(out_of_range(setting));
            }
            settings_mut(config).set(setting, given.number);
            Ok(())
        };
        Field::new(read, move |config: &T| Some(Literal::Number(settings(config).get(setting))))
    };
    let number = move |setting: Setting| Key {
        name: setting.name(),
        heading: "Reading ahead",
        value: if is_size(setting) { ValueKind::Size } else { ValueKind::Count },
        placeholder: if is_size(setting) { "SIZE" } else { "N" },
        default: default(setting),
        help: help(setting),
        change: Change::Live,
        transfer: Transfer::Moves,
        field: field(setting),
    };
    mode.into_iter().chain(Setting::ALL.into_iter().map(number))
}

fn default(setting: Setting) -> &'static str {
    match setting {
        Setting::Memory => "4M",
        Setting::LargestRequest => "64K",
        Setting::WindowMin => "128K",
        Setting::WindowMax => "2M",
        Setting::Streams => "256",
    }
}

/// Help of a setting, with its range.
pub fn help(setting: Setting) -> String {
    let what = match setting {
        Setting::Memory => "Memory for what is read ahead",
        Setting::LargestRequest => "Larger reads are neither answered from memory nor read ahead of",
        Setting::WindowMin => "What is read ahead of a stream at first",
        Setting::WindowMax => "Most that is read ahead of a stream, where memory allows",
        Setting::Streams => "Most streams that are read ahead of at a time",
    };
    let (least, most) = range(setting);
    format!("{what}, from {least} to {most}")
}

/// Reports a minimum window above the maximum, at the key that was given: the defaults are
/// consistent.
pub(crate) fn judge<T>(placed: &Placed<T>, settings: &Settings, mistakes: &Mistakes) {
    if let Err(invalid) = settings.check() {
        let [min, max] = [Setting::WindowMin, Setting::WindowMax].map(Setting::name);
        // If only one of both was given, the mistake is there.
        let key = if placed.given(min).is_some() { min } else { max };
        mistakes.tell(placed.wrong(key, invalid.to_string()));
    }
}

/// Name without the prefix: `memory` for `prefetch-memory`.
pub fn short_name(setting: Setting) -> &'static str {
    let name = setting.name();
    name.strip_prefix(MODE).and_then(|rest| rest.strip_prefix('-')).unwrap_or(name)
}

/// True if the value is a number of bytes.
pub fn is_size(setting: Setting) -> bool {
    setting != Setting::Streams
}

/// Value in the user's notation.
pub fn show(setting: Setting, value: u64) -> String {
    if is_size(setting) { crate::exact_size(value) } else { value.to_string() }
}

/// Rule that a value out of range breaks.
pub fn out_of_range(setting: Setting) -> String {
    let (least, most) = range(setting);
    format!("is out of range; it may be from {least} to {most}")
}

/// Least and greatest value, in the user's notation.
pub fn range(setting: Setting) -> (String, String) {
    let range = setting.range();
    (show(setting, *range.start()), show(setting, *range.end()))
}

impl Rule for UnknownMode {
    fn rule(self) -> String {
        self.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{DiskConfig, KeySet as _, Place, Wrong};

    fn set(numbers: &[(Setting, &str)]) -> Result<Placed<DiskConfig>, Wrong> {
        let mut disk = Placed::new(DiskConfig::default(), Place::new("disk"));
        for (setting, text) in numbers {
            let place = Place::option(setting.name(), text);
            disk.set(DiskConfig::key(setting.name()).unwrap(), text, Path::new(""), place)?;
        }
        disk.checked()
    }

    #[track_caller]
    fn check(numbers: &[(Setting, &str)], expect: &str) {
        assert_eq!(set(numbers).unwrap_err().to_string(), expect);
    }

    #[test]
    fn defaults_are_those_of_the_policy() {
        for setting in Setting::ALL {
            assert_eq!(default(setting), show(setting, Settings::default().get(setting)));
        }
    }

    #[test]
    fn a_number_out_of_its_range_is_named_with_it() {
        check(
            &[(Setting::Memory, "4096")],
            "--prefetch-memory 4096: is out of range; it may be from 256K to 1T",
        );
        check(
            &[(Setting::Memory, "1M"), (Setting::Streams, "0")],
            "--prefetch-streams 0: is out of range; it may be from 1 to 4096",
        );
        assert!(set(&[(Setting::Streams, "1099511627776")]).is_err(), "above 32 bits");
    }

    #[test]
    fn windows_that_cross_are_both_named_at_the_place_of_the_given_one() {
        check(
            &[(Setting::WindowMax, "64K")],
            "--prefetch-window-max 64K: prefetch-window-min (131072) is above prefetch-window-max (65536); \
             the smallest window may not be larger than the largest",
        );
    }

    #[test]
    fn short_names_are_the_rest_of_the_long_ones() {
        assert_eq!(
            Setting::ALL.map(short_name),
            ["memory", "largest-request", "window-min", "window-max", "streams"]
        );
    }
}
