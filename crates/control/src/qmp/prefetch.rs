//! Prefetch settings as arguments and results. Commands of QEMU have them with the prefix
//! `x-weir-`. A change keeps omitted values.

use api::{PrefetchSettings, PrefetchStatus};
use policy::prefetch::{PrefetchConfig, PrefetchMode, PrefetchSetting, PrefetchStats};
use settings::prefetch::{MODE, short_name};

use super::{arguments::QmpArguments, error::QmpError};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PrefetchChanges {
    mode: Option<PrefetchMode>,
    numbers: Vec<(PrefetchSetting, u64)>,
}

impl PrefetchChanges {
    pub(super) fn read(arguments: &mut QmpArguments, prefix: &str) -> Result<Self, QmpError> {
        let key = |name: &str| format!("{prefix}{name}");
        let mode = arguments
            .choice(&key(MODE), &PrefetchMode::ALL.map(PrefetchMode::name))?
            .map(|index| PrefetchMode::ALL[index]);
        let mut numbers = Vec::new();
        for setting in PrefetchSetting::ALL {
            if let Some(value) = arguments.number(&key(setting.name()), setting.range())? {
                numbers.push((setting, value));
            }
        }
        Ok(Self { mode, numbers })
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn apply_to(&self, mut settings: PrefetchConfig) -> Result<PrefetchConfig, QmpError> {
        settings.mode = self.mode.unwrap_or(settings.mode);
        for &(setting, value) in &self.numbers {
            settings.set(setting, value);
        }
        settings.validate().map(|()| settings).map_err(|invalid| QmpError::generic(invalid.to_string()))
    }
}

pub(super) fn settings(settings: &PrefetchConfig) -> PrefetchSettings {
    let number = |setting| (short_name(setting).to_owned(), settings.get(setting));
    PrefetchSettings {
        mode: settings.mode.name().to_owned(),
        numbers: PrefetchSetting::ALL.into_iter().map(number).collect(),
    }
}

pub(super) fn status(stats: &PrefetchStats) -> PrefetchStatus {
    let PrefetchStats {
        hits,
        partial_hits,
        misses,
        skipped,
        waited,
        hit_bytes,
        read_ahead_bytes,
        used_bytes,
        wasted_bytes,
        memory_bytes,
        streams,
        is_gate_closed: closed,
        ..
    } = *stats;
    PrefetchStatus {
        hits,
        partial_hits,
        misses,
        skipped,
        waited,
        hit_bytes,
        read_ahead_bytes,
        used_bytes,
        wasted_bytes,
        memory: memory_bytes,
        streams: streams as u64,
        suspended: closed,
        hit_rate: stats.hit_rate(),
        accuracy: stats.accuracy(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(prefix: &str, value: Value) -> Result<PrefetchChanges, String> {
        QmpArguments::read_all(value, |arguments| PrefetchChanges::read(arguments, prefix))
    }

    #[test]
    fn omitted_values_are_kept() {
        let before = PrefetchConfig { streams: 7, ..PrefetchConfig::off() };
        let changes = read("", json!({"prefetch": "on", "prefetch-memory": 1 << 20})).unwrap();
        let expect = PrefetchConfig { mode: PrefetchMode::On, memory_bytes: 1 << 20, ..before };
        assert_eq!(changes.apply_to(before), Ok(expect));
        assert!(read("", json!({})).unwrap().is_empty());
        let prefixed = read("x-weir-", json!({"x-weir-prefetch": "on", "x-weir-prefetch-memory": 1 << 20}));
        assert_eq!(prefixed, Ok(changes));
    }

    #[test]
    fn errors_name_the_range() {
        let refused = |value| read("", value).unwrap_err();
        assert_eq!(
            refused(json!({"prefetch": "maybe"})),
            "Parameter 'prefetch' does not accept value 'maybe' (accepted: off, on, auto)"
        );
        assert_eq!(
            refused(json!({"prefetch-streams": 0})),
            "Parameter 'prefetch-streams' (0) is out of range; it is from 1 to 4096"
        );
        assert_eq!(
            refused(json!({"prefetch": true})),
            "Invalid parameter type for 'prefetch', expected: string"
        );
        let changes = read("", json!({"prefetch-window-max": 64 << 10})).unwrap();
        let error = changes.apply_to(PrefetchConfig::default()).unwrap_err().to_string();
        assert!(
            error.starts_with("prefetch-window-min (131072) is above prefetch-window-max (65536)"),
            "{error}"
        );
    }

    #[test]
    fn results_have_all_settings_and_no_ratio_of_zero() {
        let shown = serde_json::to_value(settings(&PrefetchConfig::default())).unwrap();
        let expect = json!({
            "mode": "auto", "memory": 4 << 20, "largest-request": 64 << 10, "window-min": 128 << 10,
            "window-max": 2 << 20, "streams": 256
        });
        assert_eq!(shown, expect);
        let idle = status(&PrefetchStats::default());
        assert_eq!((idle.hit_rate, idle.accuracy), (None, None));
        let stats = PrefetchStats {
            hits: 2,
            partial_hits: 1,
            misses: 1,
            used_bytes: 3,
            wasted_bytes: 1,
            ..PrefetchStats::default()
        };
        let shown = status(&stats);
        assert_eq!((shown.hit_rate, shown.accuracy), (Some(0.75), Some(0.75)));
    }
}
