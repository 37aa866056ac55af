//! Writer of metric families, independent of the format: name, help and samples.
//!
//! The formats are the library's. A family without samples is written too, so that every daemon
//! lists all metrics.

use std::{fmt, time::Duration};

use block::measures::{HistogramSnapshot, ROUND_BOUNDS_NS, SCHEMA};
use prometheus_client::{
    encoding::{
        DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NativeHistogram,
        NativeHistogramBuckets, NoLabelSet,
    },
    metrics::MetricType,
    registry::Unit,
};

/// Labels of a sample.
pub(super) type SampleLabels<'a, const N: usize> = [(&'static str, &'a str); N];

pub(super) struct FamilyWriter<'a>(DescriptorEncoder<'a>);

impl<'a> FamilyWriter<'a> {
    pub(super) fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    pub(super) fn counters<'r, const N: usize, V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (SampleLabels<'r, N>, V)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Counter, rows, |sample, value| {
            sample.encode_counter::<NoLabelSet, _, u64>(&value, None)
        })
    }

    pub(super) fn gauges<'r, const N: usize, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (SampleLabels<'r, N>, V)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, rows, |sample, value| sample.encode_gauge(&value))
    }

    pub(super) fn infos<'r, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = SampleLabels<'r, N>>,
    ) -> fmt::Result {
        let rows = rows.into_iter().map(|labels| ([], labels));
        self.family(name, help, MetricType::Info, rows, |sample, labels| sample.encode_info(&labels))
    }

    pub(super) fn histograms<'r, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (SampleLabels<'r, N>, HistogramSnapshot)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Histogram, rows, |sample, spread| histogram(sample, &spread))
    }

    /// Writes a family. All samples have the same label names; without labels there is one sample.
    fn family<'r, const N: usize, V>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        rows: impl IntoIterator<Item = (SampleLabels<'r, N>, V)>,
        encode_value: impl Fn(&mut MetricEncoder<'_>, V) -> fmt::Result,
    ) -> fmt::Result {
        let (stem, unit) = with_unit(name);
        let mut family = self.0.encode_descriptor(stem, help, unit.as_ref(), kind)?;
        for (labels, value) in rows {
            match N {
                0 => encode_value(&mut family, value)?,
                _ => encode_value(&mut family.encode_family(&labels)?, value)?,
            }
        }
        Ok(())
    }
}

/// Splits a unit off the end of a name.
fn with_unit(name: &str) -> (&str, Option<Unit>) {
    let unit = match name.rsplit_once('_') {
        Some((_, "bytes")) => Unit::Bytes,
        Some((_, "seconds")) => Unit::Seconds,
        Some((_, "ratio")) => Unit::Other("ratio".to_owned()),
        _ => return (name, None),
    };
    (&name[..name.len() - unit.as_str().len() - 1], Some(unit))
}

fn histogram(sample: &mut MetricEncoder<'_>, spread: &HistogramSnapshot) -> fmt::Result {
    // The last bucket has no bound.
    let bounds = ROUND_BOUNDS_NS.into_iter().map(seconds).chain([f64::INFINITY]);
    let buckets: Vec<_> = bounds.zip(spread.round_counts()).collect();
    let native = spread.native_counts();
    // Native histograms encode runs of used buckets as (gap, length), and counts as differences.
    let mut spans: Vec<(i32, u32)> = Vec::new();
    let mut deltas = Vec::new();
    let (mut next, mut last) = (0, 0);
    for (index, count) in native {
        match spans.last_mut() {
            Some((_, length)) if index == next => *length += 1,
            _ => spans.push((index - next, 1)),
        }
        deltas.push(count as i64 - last);
        (next, last) = (index + 1, count as i64);
    }
    let positive = NativeHistogramBuckets { spans: &spans, deltas: &deltas };
    let negative = NativeHistogramBuckets { spans: &[], deltas: &[] };
    // Requests faster than the clock's resolution are in the first bucket.
    let native = NativeHistogram {
        schema: SCHEMA,
        zero_threshold: 0.0,
        zero_count: 0,
        negative,
        positive,
        created: None,
    };
    sample.encode_histogram_with_native::<NoLabelSet>(
        seconds(spread.sum_ns),
        spread.count(),
        &buckets,
        None,
        native,
    )
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}
