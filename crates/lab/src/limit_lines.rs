//! The lines of limits in charts of rates over time.
//!
//! A chart shows a limit only if it is near the drawn rates: a limit far above them would flatten
//! their curves.

use policy::throttle::{LimitKind, Limits, Part, Setting};

use crate::result::Series;

/// A limit above this multiple of the highest rate is left out.
const FAR: f64 = 3.0;
/// Largest number of lines; more cannot be distinguished.
const MOST: usize = 8;

/// The rates of limits in force, each with a name.
#[derive(Debug, Default)]
pub(crate) struct LimitRates {
    pub(crate) iops: Vec<(String, f64)>,
    pub(crate) bps: Vec<(String, f64)>,
}

impl LimitRates {
    /// The limits of a disk or group, under its name where there are several; each once.
    pub(crate) fn add(&mut self, of: Option<&str>, limits: &Limits) {
        for kind in LimitKind::ALL {
            let rate = limits.limit(kind).rate;
            if rate == 0 {
                continue;
            }
            let (list, shown) = if kind.counts_bytes() {
                (&mut self.bps, settings::exact_size(rate))
            } else {
                (&mut self.iops, rate.to_string())
            };
            let of =
                of.filter(|name| !name.is_empty()).map_or_else(String::new, |name| format!(" of {name}"));
            let name = format!("{} {shown}{of}", Setting::Limit(kind, Part::Rate).name());
            if list.iter().all(|(known, _)| *known != name) {
                list.push((name, rate as f64));
            }
        }
    }
}

/// Limits to draw in a chart of these rates.
pub(crate) fn lines_of(limits: &[(String, f64)], drawn: &[Series]) -> Vec<Series> {
    let points = || drawn.iter().flat_map(|series| &series.points);
    let highest = points().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let ends = points().map(|(at, _)| *at);
    let (first, last) = ends.fold((f64::INFINITY, 0.0), |(first, last), at| (at.min(first), at.max(last)));
    let near = limits.iter().filter(|(_, rate)| first <= last && *rate <= highest * FAR).take(MOST);
    near.map(|(name, rate)| Series { name: name.clone(), points: vec![(first, *rate), (last, *rate)] })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_near_to_the_rates_are_drawn_from_end_to_end() {
        let mut of = Limits::default();
        of.limit_mut(LimitKind::IopsTotal).rate = 15;
        of.limit_mut(LimitKind::IopsRead).rate = 5000;
        of.limit_mut(LimitKind::BpsWrite).rate = 10 << 20;
        let mut limits = LimitRates::default();
        limits.add(Some("vm1"), &of);
        limits.add(Some("vm1"), &of);
        let rates = [Series { name: "vm1".to_owned(), points: vec![(0.5, 14.0), (1.5, 16.0)] }];
        let lines = lines_of(&limits.iops, &rates);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!(line.name, "iops-total 15 of vm1");
        assert_eq!(line.points, [(0.5, 15.0), (1.5, 15.0)]);
        assert_eq!(limits.bps, [("bps-write 10M of vm1".to_owned(), 10_485_760.0)]);
        assert_eq!(lines_of(&limits.iops, &[]), []);
    }
}
