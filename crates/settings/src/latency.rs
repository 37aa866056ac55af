//! Latency settings of a disk or a group as text: the target, its percentile and requests, and the
//! floor beside the targets of others.
//!
//! All interfaces read and write the values in this form, so that each rule is stated once. Never
//! knows the device: whether a target can be met is observed at run time.

use std::time::Duration;

use policy::latency_target::{LatencySettings, PercentileTarget, TargetDirections};
use storage::show_duration;

/// Default percentile, in ten-thousandths.
const DEFAULT_PERMYRIAD: u16 = 9900;
/// Words of `latency-of`.
pub(crate) const DIRECTIONS: [(&str, TargetDirections); 3] = [
    ("all", TargetDirections::All),
    ("reads", TargetDirections::Reads),
    ("writes", TargetDirections::Writes),
];

/// One of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatencySetting {
    /// Bound of the percentile; 0 is no target.
    Target,
    /// The percentile.
    Percentile,
    /// The requests that count.
    Directions,
    /// Minimum rate beside targets of others, as a percentage of the device.
    Floor,
}

impl LatencySetting {
    /// All settings, in the order of the help.
    pub const ALL: [Self; 4] = [Self::Target, Self::Percentile, Self::Directions, Self::Floor];

    /// Name of the key.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Target => "latency-target",
            Self::Percentile => "latency-percentile",
            Self::Directions => "latency-of",
            Self::Floor => "latency-floor",
        }
    }

    /// The setting with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|setting| setting.name() == name)
    }
}

/// Latency settings of one disk or group. The default is no target, and the default floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatencyConfig {
    /// Bound of the percentile in nanoseconds; 0 is no target.
    pub target_ns: u64,
    /// Percentile in ten-thousandths.
    pub permyriad: u16,
    /// The requests that count.
    pub directions: TargetDirections,
    /// Floor in hundredths of a percent; `None` for the default of the controller.
    pub floor_permyriad: Option<u16>,
}

impl Default for LatencyConfig {
    fn default() -> Self {
        Self {
            target_ns: 0,
            permyriad: DEFAULT_PERMYRIAD,
            directions: TargetDirections::default(),
            floor_permyriad: None,
        }
    }
}

impl LatencyConfig {
    /// The settings of a running disk or group.
    pub fn from_running(settings: &LatencySettings) -> Self {
        let LatencySettings { target, floor_permyriad } = *settings;
        let none = Self { floor_permyriad, ..Self::default() };
        target.map_or(none, |target| Self {
            target_ns: target.bound_ns(),
            permyriad: target.permyriad(),
            directions: target.directions(),
            floor_permyriad,
        })
    }

    /// The settings for a running disk or group.
    pub fn to_running(&self) -> LatencySettings {
        // The ranges were checked when the values were read; 0 is out of range.
        let target = PercentileTarget::new(self.target_ns, self.permyriad, self.directions);
        LatencySettings { target, floor_permyriad: self.floor_permyriad }
    }

    /// Sets a value from its text.
    ///
    /// # Errors
    /// Returns the rule that the text breaks.
    pub fn read(&mut self, setting: LatencySetting, text: &str) -> Result<(), String> {
        match setting {
            LatencySetting::Target => self.target_ns = target_ns(text)?,
            LatencySetting::Percentile => self.permyriad = percentile(text)?,
            LatencySetting::Directions => {
                let word = DIRECTIONS.into_iter().find(|(word, _)| *word == text);
                let rule = || "is none of all, reads, writes".to_owned();
                self.directions = word.ok_or_else(rule)?.1;
            }
            LatencySetting::Floor => self.floor_permyriad = floor(text)?,
        }
        Ok(())
    }

    /// Text that [`LatencyConfig::read`] reads as the present value.
    pub fn text(&self, setting: LatencySetting) -> String {
        match setting {
            LatencySetting::Target if self.target_ns == 0 => "0".to_owned(),
            LatencySetting::Target => show_duration(Duration::from_nanos(self.target_ns)),
            LatencySetting::Percentile => percent_text(self.permyriad),
            LatencySetting::Directions => {
                let word = DIRECTIONS.into_iter().find(|(_, directions)| *directions == self.directions);
                word.expect("each has a word").0.to_owned()
            }
            LatencySetting::Floor => self.floor_permyriad.map_or_else(|| "default".to_owned(), percent_text),
        }
    }

    /// As [`LatencyConfig::text`]; `None` without a target, and for the default floor.
    pub(crate) fn literal(&self, setting: LatencySetting) -> Option<String> {
        let is_none = match setting {
            LatencySetting::Target => self.target_ns == 0,
            LatencySetting::Floor => self.floor_permyriad.is_none(),
            LatencySetting::Percentile | LatencySetting::Directions => false,
        };
        (!is_none).then(|| self.text(setting))
    }

    /// Applies changes in order. Removing the target removes its percentile and requests, unless
    /// the changes set them.
    ///
    /// # Errors
    /// Returns the setting that breaks a rule, with the rule.
    pub fn with_settings(
        mut self,
        changes: &[(LatencySetting, String)],
    ) -> Result<Self, (LatencySetting, String)> {
        for (setting, text) in changes {
            self.read(*setting, text).map_err(|rule| (*setting, rule))?;
        }
        if self.target_ns == 0 {
            let is_set = |setting| changes.iter().any(|(changed, _)| *changed == setting);
            let Self { permyriad, directions, .. } = Self::default();
            if !is_set(LatencySetting::Percentile) {
                self.permyriad = permyriad;
            }
            if !is_set(LatencySetting::Directions) {
                self.directions = directions;
            }
        }
        self.check()?;
        Ok(self)
    }

    /// Checks the settings together.
    ///
    /// # Errors
    /// Returns the setting that breaks a rule, with the rule.
    pub fn check(&self) -> Result<(), (LatencySetting, String)> {
        let defaults =
            Self { target_ns: self.target_ns, floor_permyriad: self.floor_permyriad, ..Self::default() };
        let dependent = [LatencySetting::Percentile, LatencySetting::Directions];
        let changed = dependent.into_iter().find(|setting| self.text(*setting) != defaults.text(*setting));
        match changed.filter(|_| self.target_ns == 0) {
            Some(setting) => {
                Err((setting, "has no effect without latency-target (set latency-target too)".to_owned()))
            }
            None => Ok(()),
        }
    }
}

fn target_ns(text: &str) -> Result<u64, String> {
    // As other limits are removed.
    if text == "0" {
        return Ok(0);
    }
    let time = crate::duration(text)?;
    let target_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    match PercentileTarget::BOUNDS_NS.contains(&target_ns) {
        true => Ok(target_ns),
        false => Err("is out of range; a latency target is from 10us to 100s (0 is none)".to_owned()),
    }
}

fn percentile(text: &str) -> Result<u16, String> {
    let permyriad = permyriad(text).filter(|permyriad| PercentileTarget::PERMYRIADS.contains(permyriad));
    permyriad.ok_or_else(|| {
        "is no percentile from 50 to 99.99 with at most two decimals (write 99 or 99.9)".to_owned()
    })
}

fn floor(text: &str) -> Result<Option<u16>, String> {
    if text == "default" {
        return Ok(None);
    }
    let permyriad = permyriad(text).filter(|permyriad| *permyriad <= LatencySettings::MAX_FLOOR_PERMYRIAD);
    permyriad.map(Some).ok_or_else(|| {
        "is no percentage of the device from 0 to 100 with at most two decimals (write 5, or default)"
            .to_owned()
    })
}

/// Hundredths of a number with at most two decimals, optionally with a percent sign.
fn permyriad(text: &str) -> Option<u16> {
    let number = text.strip_suffix('%').unwrap_or(text);
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty()
        || decimals.len() > 2
        || number.ends_with('.')
        || !is_digits(whole)
        || !is_digits(decimals)
    {
        return None;
    }
    let hundredths: u16 = format!("{decimals:0<2}").parse().ok()?;
    whole.parse::<u16>().ok()?.checked_mul(100)?.checked_add(hundredths)
}

fn percent_text(permyriad: u16) -> String {
    let text = format!("{}.{:02}", permyriad / 100, permyriad % 100);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: &[(&str, &str)]) -> Result<LatencyConfig, String> {
        let named = |(name, text): &(&str, &str)| {
            (LatencySetting::from_name(name).expect("a setting"), (*text).to_owned())
        };
        let changes: Vec<_> = changes.iter().map(named).collect();
        let rule = |(setting, rule): (LatencySetting, String)| format!("{} {rule}", setting.name());
        LatencyConfig::default().with_settings(&changes).map_err(rule)
    }

    #[test]
    fn values_are_written_as_they_are_read() {
        for (name, texts) in [
            ("latency-target", vec!["5ms", "10us", "100s", "1500us", "0"]),
            ("latency-percentile", vec!["50", "99", "99.9", "99.99", "95.5"]),
            ("latency-of", vec!["all", "reads", "writes"]),
            ("latency-floor", vec!["0", "1", "0.5", "12.25", "100", "default"]),
        ] {
            let setting = LatencySetting::from_name(name).expect("a setting");
            for text in texts {
                let mut config = LatencyConfig::default();
                config.read(setting, text).expect("valid");
                assert_eq!(config.text(setting), text, "{name}");
            }
        }
        let mut config = LatencyConfig::default();
        config.read(LatencySetting::Floor, "5%").expect("valid");
        assert_eq!(config.floor_permyriad, Some(500));
    }

    #[test]
    fn invalid_values_name_the_range() {
        for (name, texts, rule) in [
            ("latency-target", vec!["9us", "101s"], "is out of range; a latency target is from 10us to 100s"),
            ("latency-target", vec!["5"], "has no unit (write 5s for seconds, or 5ms)"),
            ("latency-target", vec!["soon", "-5ms", ""], "is not a duration"),
            (
                "latency-percentile",
                vec!["49", "100", "99.999", "p99", "99.", ".9", "-99"],
                "is no percentile",
            ),
            ("latency-of", vec!["read", ""], "is none of all, reads, writes"),
            ("latency-floor", vec!["101", "100.01", "-1", "1.234"], "is no percentage of the device"),
        ] {
            for text in texts {
                let broken = changed(&[(name, text)]).expect_err("invalid");
                assert!(broken.starts_with(&format!("{name} {rule}")), "{name} {text}: {broken}");
            }
        }
    }

    #[test]
    fn settings_of_a_target_need_it() {
        for change in [("latency-percentile", "95"), ("latency-of", "reads")] {
            let rule = "has no effect without latency-target (set latency-target too)";
            assert_eq!(changed(&[change]), Err(format!("{} {rule}", change.0)));
            assert_eq!(changed(&[("latency-target", "0"), change]), Err(format!("{} {rule}", change.0)));
            let with_target = changed(&[change, ("latency-target", "5ms")]).expect("valid");
            let removed = with_target.with_settings(&[(LatencySetting::Target, "0".to_owned())]);
            assert_eq!(removed, Ok(LatencyConfig::default()));
        }
        assert!(changed(&[("latency-floor", "5")]).is_ok());
    }

    #[test]
    fn running_settings_are_the_same() {
        for changes in
            [&[][..], &[("latency-floor", "5")], &[("latency-target", "5ms"), ("latency-of", "reads")]]
        {
            let config = changed(changes).expect("valid");
            assert_eq!(LatencyConfig::from_running(&config.to_running()), config);
        }
    }
}
