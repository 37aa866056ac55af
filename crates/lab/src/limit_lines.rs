//! The lines of limits in charts of rates over time.
//!
//! A chart shows a limit only if it is near the drawn rates: a limit far above them would flatten
//! their curves. A note names the limits that are not drawn.

use std::ops::Range;

use policy::{
    throttle::{LimitKind, LimitPart, LimitSetting, Limits},
    watermark::Watermark,
};

use crate::result::ChartSeries;

/// Multiple of the highest rate above which a limit is not drawn.
const FAR: f64 = 3.0;
/// Largest number of limits that a chart draws; more cannot be distinguished.
pub(crate) const MAX_DRAWN: usize = 8;
/// Largest number of limits stored from a recording.
const MAX_KEPT: usize = 256;
/// Largest number of values that the name of a line lists.
const MAX_VALUES: usize = 4;

/// Rates of the limits in force.
#[derive(Debug, Default)]
pub(crate) struct LimitRates {
    pub(crate) iops: Vec<LimitOverTime>,
    pub(crate) bps: Vec<LimitOverTime>,
}

/// One limit of one disk or group.
#[derive(Debug)]
pub(crate) struct LimitOverTime {
    kind: LimitKind,
    /// Name of the disk or group, if the chart has limits of several.
    owner: Option<String>,
    /// Rates by time, in stretches that do not overlap.
    stretches: Vec<LimitStretch>,
}

/// A rate that is in force for some time.
#[derive(Debug)]
struct LimitStretch {
    during_ns: Range<u64>,
    rate: u64,
    watermark: Watermark,
}

impl LimitRates {
    /// Adds limits of a disk or group that are always in force; the name is `None` if the chart has
    /// only one. Limits that were added before are ignored.
    pub(crate) fn add(&mut self, owner: Option<&str>, limits: &Limits) {
        self.add_during(owner, limits, Watermark::ALWAYS, 0..u64::MAX);
    }

    /// Adds limits of a disk or group that are in force during `during_ns`. Periods of one disk or
    /// group must be added in ascending order.
    pub(crate) fn add_during(
        &mut self,
        owner: Option<&str>,
        limits: &Limits,
        watermark: Watermark,
        during_ns: Range<u64>,
    ) {
        // An unnamed disk is the only one of its chart and needs no name in the legend.
        let owner = owner.filter(|name| !name.is_empty());
        for kind in LimitKind::ALL {
            let rate = limits.limit(kind).rate;
            if rate == 0 {
                continue;
            }
            let list = if kind.counts_bytes() { &mut self.bps } else { &mut self.iops };
            let place = list.iter().position(|limit| limit.kind == kind && limit.owner.as_deref() == owner);
            // Bounds the memory for recordings with very many groups.
            if place.is_none() && list.len() == MAX_KEPT {
                continue;
            }
            let place = place.unwrap_or_else(|| {
                list.push(LimitOverTime { kind, owner: owner.map(str::to_owned), stretches: Vec::new() });
                list.len() - 1
            });
            list[place].add(LimitStretch { during_ns: during_ns.clone(), rate, watermark });
        }
    }
}

impl LimitOverTime {
    fn add(&mut self, next: LimitStretch) {
        match self.stretches.last_mut() {
            // Overlaps the last stretch: the same limit was added twice.
            Some(last) if next.during_ns.start < last.during_ns.end => {}
            Some(last)
                if last.during_ns.end == next.during_ns.start
                    && (last.rate, last.watermark) == (next.rate, next.watermark) =>
            {
                last.during_ns.end = next.during_ns.end;
            }
            _ => self.stretches.push(next),
        }
    }

    /// Name of the limit with the rates of these stretches: `iops-total 500 → 1000 of gold`.
    fn name<'a>(&self, stretches: impl Iterator<Item = &'a LimitStretch>) -> String {
        let mut values: Vec<String> = stretches.map(|stretch| stretch.value(self.kind)).collect();
        values.dedup();
        let shown = match &values[..] {
            [first, .., last] if values.len() > MAX_VALUES => {
                format!("{first} … {last} ({} values)", values.len())
            }
            _ => values.join(" → "),
        };
        let owner = self.owner.as_ref().map_or_else(String::new, |name| format!(" of {name}"));
        format!("{} {shown}{owner}", LimitSetting::Limit(self.kind, LimitPart::Rate).name())
    }

    /// A line for each period in which the limit is in force without a gap.
    fn lines(
        &self,
        (first_s, last_s): (f64, f64),
        is_near: impl Fn(&LimitStretch) -> bool,
    ) -> Vec<ChartSeries> {
        let drawn = || self.stretches.iter().filter(|stretch| is_near(stretch));
        let name = if drawn().next().is_some() { self.name(drawn()) } else { return Vec::new() };
        let mut lines: Vec<ChartSeries> = Vec::new();
        let mut end_ns = None;
        for LimitStretch { during_ns, rate, .. } in drawn() {
            let at_s = |ns: u64| (ns as f64 / 1e9).clamp(first_s, last_s);
            if end_ns != Some(during_ns.start) {
                lines.push(ChartSeries { name: name.clone(), points: Vec::new() });
            }
            let points = &mut lines.last_mut().expect("a line has begun").points;
            // The end point of the previous stretch is replaced by the new rate at the same time.
            if end_ns == Some(during_ns.start) {
                points.pop();
            }
            points.extend([(at_s(during_ns.start), *rate as f64), (at_s(during_ns.end), *rate as f64)]);
            end_ns = Some(during_ns.end);
        }
        lines
    }
}

impl LimitStretch {
    fn is_within(&self, (first_s, last_s): (f64, f64)) -> bool {
        self.during_ns.start as f64 / 1e9 <= last_s && self.during_ns.end as f64 / 1e9 > first_s
    }

    fn value(&self, kind: LimitKind) -> String {
        let rate = if kind.counts_bytes() { settings::exact_size(self.rate) } else { self.rate.to_string() };
        match self.watermark {
            Watermark::ALWAYS => rate,
            watermark => format!("{rate} (from {} % utilization)", watermark.percent()),
        }
    }
}

/// Limits to draw in a chart of these rates, and a note on those that are not drawn. A limit with
/// gaps in time has several lines of the same name.
pub(crate) fn lines_of(
    limits: &[LimitOverTime],
    drawn: &[ChartSeries],
) -> (Vec<ChartSeries>, Option<String>) {
    let points = || drawn.iter().flat_map(|series| &series.points);
    let highest = points().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let ends = points().map(|(at, _)| *at);
    // Without points the range stays inverted, which the next line detects.
    let ends = ends.fold((f64::INFINITY, 0.0), |(first, last), at| (at.min(first), at.max(last)));
    if ends.0 > ends.1 {
        return (Vec::new(), None);
    }
    let is_near = |stretch: &LimitStretch| stretch.is_within(ends) && stretch.rate as f64 <= highest * FAR;
    let is_far = |stretch: &&LimitStretch| stretch.is_within(ends) && stretch.rate as f64 > highest * FAR;
    let near: Vec<_> = limits.iter().map(|limit| limit.lines(ends, is_near)).collect();
    let near: Vec<_> = near.into_iter().filter(|lines| !lines.is_empty()).collect();
    let far = limits.iter().filter(|limit| limit.stretches.iter().any(|stretch| is_far(&stretch)));
    let far: Vec<_> = far.map(|limit| limit.name(limit.stretches.iter().filter(is_far))).collect();
    // Counted by limit: the several lines of one limit share its name and colour.
    let hidden = near.len().saturating_sub(MAX_DRAWN);
    let mut notes = Vec::new();
    if !far.is_empty() {
        let more = far.len().saturating_sub(MAX_DRAWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let named = far[..far.len().min(MAX_DRAWN)].join(", ");
        notes.push(format!("Above the range shown: {named}{more}."));
    }
    if hidden > 0 {
        notes.push(format!("The first {MAX_DRAWN} limits are drawn; there are {hidden} more."));
    }
    let lines = near.into_iter().take(MAX_DRAWN).flatten().collect();
    (lines, (!notes.is_empty()).then(|| notes.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = 15;
        limits.limit_mut(LimitKind::IopsRead).rate = 5000;
        limits.limit_mut(LimitKind::BpsWrite).rate = 10 << 20;
        limits
    }

    fn rates() -> [ChartSeries; 1] {
        [ChartSeries { name: "vm1".to_owned(), points: vec![(0.5, 14.0), (1.5, 16.0)] }]
    }

    #[test]
    fn limits_near_the_rates_are_drawn_over_the_full_width() {
        let mut limits = LimitRates::default();
        limits.add(Some("vm1"), &self::limits());
        limits.add(Some("vm1"), &self::limits());
        let (lines, note) = lines_of(&limits.iops, &rates());
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!(line.name, "iops-total 15 of vm1");
        assert_eq!(line.points, [(0.5, 15.0), (1.5, 15.0)]);
        assert_eq!(note.as_deref(), Some("Above the range shown: iops-read 5000 of vm1."));
        let [bps] = &limits.bps[..] else { panic!("{:?}", limits.bps) };
        assert_eq!(bps.name(bps.stretches.iter()), "bps-write 10M of vm1");
        assert_eq!(lines_of(&limits.iops, &[]), (vec![], None));
    }

    #[test]
    fn lifted_limit_has_a_gap() {
        let mut limits = LimitRates::default();
        let watermark = Watermark::new(80).expect("a percentage");
        let ms = |from: u64, to: u64| from * 1_000_000..to * 1_000_000;
        limits.add_during(None, &self::limits(), Watermark::ALWAYS, ms(0, 700));
        limits.add_during(None, &self::limits(), watermark, ms(900, 9000));
        let (lines, _) = lines_of(&limits.iops, &rates());
        let name = "iops-total 15 → 15 (from 80 % utilization)";
        let line = |points: [(f64, f64); 2]| ChartSeries { name: name.to_owned(), points: points.to_vec() };
        assert_eq!(lines, [line([(0.5, 15.0), (0.7, 15.0)]), line([(0.9, 15.0), (1.5, 15.0)])]);
    }

    #[test]
    fn limits_beyond_the_maximum_are_counted() {
        let mut limits = LimitRates::default();
        (0..11).for_each(|disk| limits.add(Some(&format!("vm{disk}")), &self::limits()));
        let (lines, note) = lines_of(&limits.iops, &rates());
        assert_eq!(lines.len(), MAX_DRAWN);
        let note = note.expect("a note");
        assert!(note.contains("iops-read 5000 of vm7 and 3 more."), "{note}");
        assert!(note.ends_with("The first 8 limits are drawn; there are 3 more."), "{note}");
    }
}
