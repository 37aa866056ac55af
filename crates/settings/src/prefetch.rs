//! What is read ahead of a disk's readers, as it was said. Names, defaults and ranges are the
//! policy's. Numbers of a disk that reads nothing ahead are kept until that is switched on.

use policy::prefetch::{Invalid, Mode, Setting, Settings, UnknownMode};

use super::{Place, Rule, Said, Wrong};

/// The mode's name among the settings; those of the numbers begin with it.
pub const MODE: &str = "prefetch";

/// The settings as they were said, each with its place.
#[derive(Clone, Debug, Default)]
pub struct PrefetchDraft {
    pub mode: Option<Said<Mode>>,
    pub numbers: Vec<Said<(Setting, u64)>>,
}

impl PrefetchDraft {
    /// What they add up to, with the defaults for what was not said.
    ///
    /// # Errors
    /// The first number that is out of its range, or the windows where they cross.
    pub fn check(&self) -> Result<Settings, Wrong> {
        let mut settings = Settings::default();
        if let Some(mode) = &self.mode {
            settings.mode = mode.value;
        }
        for Said { value: (setting, value), .. } in &self.numbers {
            settings.set(*setting, *value);
        }
        settings.check().map(|()| settings).map_err(|invalid| self.wrong(invalid))
    }

    fn wrong(&self, invalid: Invalid) -> Wrong {
        let place = |setting| self.numbers.iter().rfind(|said| said.value.0 == setting);
        match invalid {
            Invalid::OutOfRange { setting, .. } => {
                let place =
                    place(setting).map_or_else(|| Place::new(setting.name()), |said| said.place.clone());
                out_of_range(setting, &place)
            }
            // Whichever was said is to blame: the defaults do not cross.
            Invalid::WindowsCross { .. } => {
                let said = place(Setting::WindowMin).or_else(|| place(Setting::WindowMax));
                let place = said.map_or_else(|| Place::new(MODE), |said| said.place.clone());
                place.wrong(invalid.to_string())
            }
        }
    }
}

/// A number's name among others about reading ahead: `memory` for `prefetch-memory`.
pub fn short_name(setting: Setting) -> &'static str {
    let name = setting.name();
    name.strip_prefix(MODE).and_then(|rest| rest.strip_prefix('-')).unwrap_or(name)
}

/// Whether it is a number of bytes.
pub fn is_size(setting: Setting) -> bool {
    setting != Setting::Streams
}

/// A value of it as users write it.
pub fn show(setting: Setting, value: u64) -> String {
    if is_size(setting) { crate::exact_size(value) } else { value.to_string() }
}

/// The complaint that what is said there is too little or too much.
pub fn out_of_range(setting: Setting, place: &Place) -> Wrong {
    let (least, most) = range(setting);
    place.wrong(format!("is out of range; it may be from {least} to {most}"))
}

/// The least and the most that it may be, as users write them.
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
    use super::*;

    fn said(numbers: &[(Setting, u64)]) -> PrefetchDraft {
        let said = |&(setting, value): &(Setting, u64)| {
            Said::new((setting, value), Place::option(setting.name(), value))
        };
        PrefetchDraft { mode: None, numbers: numbers.iter().map(said).collect() }
    }

    #[track_caller]
    fn check(numbers: &[(Setting, u64)], expect: &str) {
        assert_eq!(said(numbers).check().unwrap_err().to_string(), expect);
    }

    #[test]
    fn what_is_not_said_is_the_default() {
        assert_eq!(PrefetchDraft::default().check(), Ok(Settings::default()));
        let off = Some(Said::new(Mode::Off, Place::new("--prefetch")));
        let draft = PrefetchDraft { mode: off, ..said(&[(Setting::Memory, 64 << 20)]) };
        assert_eq!(
            draft.check(),
            Ok(Settings { memory_bytes: 64 << 20, ..Settings::off() }),
            "kept for later"
        );
    }

    #[test]
    fn a_number_out_of_its_range_is_named_with_it() {
        check(
            &[(Setting::Memory, 4096)],
            "--prefetch-memory 4096: is out of range; it may be from 256K to 1T",
        );
        check(
            &[(Setting::Memory, 1 << 20), (Setting::Streams, 0)],
            "--prefetch-streams 0: is out of range; it may be from 1 to 4096",
        );
        assert!(
            said(&[(Setting::Streams, 1 << 40)]).check().is_err(),
            "more than there is room to write down"
        );
    }

    #[test]
    fn windows_that_cross_are_both_named_at_the_place_of_what_was_said() {
        check(
            &[(Setting::WindowMax, 64 << 10)],
            "--prefetch-window-max 65536: prefetch-window-min (131072) is above prefetch-window-max (65536); \
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
