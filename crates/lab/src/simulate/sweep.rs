//! The `--sweep` option: a limit and its values.

use std::str::FromStr;

use policy::throttle::{LimitPart, LimitSetting};
use settings::suggest;

/// Bound on values: each is a simulation.
const MAX_VALUES: u64 = 10_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SweepValues {
    pub(crate) setting: LimitSetting,
    pub(crate) values: Vec<u64>,
}

impl FromStr for SweepValues {
    type Err = String;

    /// Parses `iops-total=500..5000:500`: first, last and step; without a step, only these two.
    fn from_str(text: &str) -> Result<Self, String> {
        let form = || "is not of the form LIMIT=FROM..TO:STEP, such as iops-total=500..5000:500".to_owned();
        let (name, range) = text.split_once('=').ok_or_else(form)?;
        let known = LimitSetting::ALL.into_iter().find(|setting| setting.name() == name);
        let Some(setting) = known else {
            let near = suggest::nearest(name, LimitSetting::ALL.map(LimitSetting::name));
            return Err(match near {
                Some(near) => format!("{name:?} is no limit (did you mean {near}?)"),
                None => format!("{name:?} is no limit (weir simulate --help lists them)"),
            });
        };
        let (from, to) = range.split_once("..").ok_or_else(form)?;
        let (to, step) = to.split_once(':').map_or((to, None), |(to, step)| (to, Some(step)));
        let number = |text: &str| {
            let number = if setting.is_size() { settings::size(text) } else { settings::count(text) };
            number.map_err(|rule| format!("{text} {rule}"))
        };
        let (from, to) = (number(from)?, number(to)?);
        // Without a step the two ends are the only values; at least 1, as both may be equal.
        let step = step.map_or(Ok((to.saturating_sub(from)).max(1)), number)?;
        if from > to || step == 0 {
            return Err("does not rise (write the smaller value first, and a step above 0)".to_owned());
        }
        // For a rate, 0 means unlimited, which is the largest value rather than the smallest.
        if from == 0 && matches!(setting, LimitSetting::Limit(_, LimitPart::Rate)) {
            return Err(format!("begins with 0, which means no {name} limit (begin above 0)"));
        }
        let count = (to - from) / step + 1;
        if count > MAX_VALUES {
            return Err(format!("has {count} values; there may be {MAX_VALUES} (take larger steps)"));
        }
        Ok(Self { setting, values: (0..count).map(|index| from + index * step).collect() })
    }
}

impl SweepValues {
    /// True if a higher value is never slower, so that a smallest sufficient value exists.
    pub(crate) fn has_smallest(&self) -> bool {
        matches!(self.setting, LimitSetting::Limit(_, LimitPart::Rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_is_parsed() {
        let sweep: SweepValues = "iops-total=500..2000:500".parse().unwrap();
        assert_eq!(sweep.setting.name(), "iops-total");
        assert_eq!(sweep.values, [500, 1000, 1500, 2000]);
        let bytes: SweepValues = "bps-read=1M..3M:1M".parse().unwrap();
        assert_eq!(bytes.values, [1 << 20, 2 << 20, 3 << 20]);
        assert_eq!("iops-read=1..9".parse::<SweepValues>().unwrap().values, [1, 9]);
    }

    #[test]
    fn invalid_sweep_is_rejected() {
        let error = |text: &str| text.parse::<SweepValues>().unwrap_err();
        assert!(error("iops-total").contains("is not of the form"));
        assert_eq!(error("iops-totl=1..2"), "\"iops-totl\" is no limit (did you mean iops-total?)");
        assert!(error("iops-total=9..1:1").contains("does not rise"));
        assert_eq!(
            error("iops-total=0..9:1"),
            "begins with 0, which means no iops-total limit (begin above 0)"
        );
        assert!("iops-size=0..9:1".parse::<SweepValues>().is_ok_and(|sweep| !sweep.has_smallest()));
        assert!(error("iops-total=1..9:0").contains("does not rise"));
        assert!(error("iops-total=1..1000000:1").contains("has 1000000 values"));
        assert!(error("iops-total=1K..9K:1").contains("is not a plain number"));
    }
}
