//! Metrics of control groups with limits that this daemon enforces (`--cgroup-limits`).
//!
//! Labels are paths of control groups and device names from the file of limits, which only root can
//! write. That file bounds their number.

use std::{fmt, time::Duration};

use cgroup::cgroup_counters::{CgroupFigures, CgroupIoCounters, CgroupPressure};
use policy::{
    request::Direction,
    throttle::{Enforcement, LimitKind},
};

use super::{
    family_writer::{FamilyWriter, SampleLabels},
    labels::{direction_label, limit_label},
};

#[derive(Debug, Default)]
pub(super) struct CgroupMetrics {
    pub(super) figures: Vec<CgroupFigures>,
    pub(super) stalled: Vec<CgroupPressure>,
}

fn labels(figure: &CgroupFigures) -> SampleLabels<'_, 2> {
    [("cgroup", &*figure.cgroup), ("device", &*figure.device)]
}

impl CgroupMetrics {
    pub(super) fn write(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let infos = self.figures.iter().map(|figure| {
            [("cgroup", &*figure.cgroup), ("device", &*figure.device), ("group", &*figure.group)]
        });
        to.infos(
            "weir_cgroup",
            "A control group with limits on a device, and the group that sets them.",
            infos,
        )?;
        self.limits(to)?;
        self.done(to)?;
        let stalled = self.stalled.iter().flat_map(|pressure| {
            [("some", pressure.some_us), ("all", pressure.full_us)].map(|(tasks, us)| {
                let labels = [("cgroup", &*pressure.cgroup), ("tasks", tasks)];
                (labels, Duration::from_micros(us).as_secs_f64())
            })
        });
        let help = "Time during which tasks of a control group waited for I/O of any device.";
        to.counters("weir_cgroup_stalled_seconds", help, stalled)?;
        let watched = || self.figures.iter().filter(|figure| figure.watermark > 0);
        let rows = watched().map(|figure| (labels(figure), f64::from(figure.watermark) / 100.0));
        to.gauges(
            "weir_cgroup_watermark_ratio",
            "Device utilization above which limits are enforced.",
            rows,
        )?;
        let rows = watched().filter_map(|figure| {
            Some((labels(figure), u64::from(figure.enforcement? != Enforcement::Lifted)))
        });
        to.gauges("weir_cgroup_limits_enforced", "1 while the watermark enforces limits.", rows)?;
        let rows = watched().filter_map(|figure| match figure.enforcement? {
            Enforcement::Scaled(scale) => Some((labels(figure), scale.thousandths() as f64 / 1000.0)),
            Enforcement::Enforced => Some((labels(figure), 1.0)),
            Enforcement::Lifted => None,
        });
        to.gauges("weir_cgroup_limits_scale_ratio", "Factor that the watermark applies to limits.", rows)
    }

    fn limits(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        for (bytes, rates) in [(false, "operations_per_second"), (true, "bytes_per_second")] {
            let kinds = move || LimitKind::ALL.into_iter().filter(move |kind| kind.counts_bytes() == bytes);
            let rows = |get: fn(&CgroupFigures, LimitKind) -> u64| {
                self.figures.iter().flat_map(move |figure| {
                    kinds().filter_map(move |kind| {
                        let [cgroup, device] = labels(figure);
                        let rate = Some(get(figure, kind)).filter(|&rate| rate > 0)?;
                        Some(([cgroup, device, ("limit", limit_label(kind))], rate))
                    })
                })
            };
            let help = "Limit of a control group, or of the group that it belongs to.";
            let rate = rows(|figure, kind| figure.limits.limit(kind).rate);
            to.gauges(&format!("weir_cgroup_limit_{rates}"), help, rate)?;
            let help = "Burst rate of a limit.";
            let burst = rows(|figure, kind| figure.limits.limit(kind).burst_rate);
            to.gauges(&format!("weir_cgroup_burst_limit_{rates}"), help, burst)?;
            let allowed = self.figures.iter().flat_map(|figure| {
                // The kernel's limit may be below the configured one, after division among cgroups.
                let kernel_rates = if bytes { figure.kernel_limits.bps } else { figure.kernel_limits.iops };
                Direction::ALL.into_iter().filter_map(move |direction| {
                    let [cgroup, device] = labels(figure);
                    let labels = [cgroup, device, ("operation", direction_label(direction))];
                    Some((labels, kernel_rates[direction.index()]?))
                })
            });
            let help = "Limit that the kernel enforces now.";
            to.gauges(&format!("weir_cgroup_allowed_{rates}"), help, allowed)?;
        }
        Ok(())
    }

    fn done(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        type Get = fn(&CgroupIoCounters) -> u64;
        let families: [(&str, &str, Get); 6] = [
            ("reads", "Reads of a control group that a device completed.", |counters| counters.reads),
            ("writes", "Writes of a control group that a device completed.", |counters| counters.writes),
            ("read_bytes", "Bytes that a control group read from a device.", |counters| counters.read_bytes),
            ("written_bytes", "Bytes that a control group wrote to a device.", |counters| {
                counters.written_bytes
            }),
            ("discards", "Discards of a control group.", |counters| counters.discards),
            ("discarded_bytes", "Bytes that a control group discarded.", |counters| counters.discarded_bytes),
        ];
        for (name, help, get) in families {
            let rows = self
                .figures
                .iter()
                .filter_map(|figures| Some((labels(figures), get(figures.counters.as_ref()?))));
            to.counters(&format!("weir_cgroup_{name}"), help, rows)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use policy::{
        steering::IoMaxRates,
        throttle::{LimitPart, LimitScale, LimitSetting, Limits},
    };
    use prometheus_client::{
        collector::Collector,
        encoding::{DescriptorEncoder, text},
        registry::Registry,
    };

    use super::*;

    #[derive(Debug)]
    struct CgroupCollector(CgroupMetrics);

    impl Collector for CgroupCollector {
        fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
            self.0.write(&mut FamilyWriter::new(encoder))
        }
    }

    #[test]
    fn names_are_escaped_and_unknown_values_have_no_sample() {
        let mut limits = Limits::default();
        limits.set(LimitSetting::Limit(LimitKind::IopsRead, LimitPart::Rate), 100).unwrap();
        let figure = CgroupFigures {
            cgroup: "/a\"\n".to_owned(),
            device: "/dev/vda".to_owned(),
            group: String::new(),
            limits,
            watermark: 80,
            enforcement: Some(Enforcement::Scaled(LimitScale::from_thousandths(1500))),
            kernel_limits: IoMaxRates { bps: [None; 2], iops: [Some(50), None] },
            counters: None,
        };
        let stalled = CgroupPressure { cgroup: "/b".to_owned(), some_us: 1_500_000, full_us: 0 };
        let mut registry = Registry::default();
        let metrics = CgroupMetrics { figures: vec![figure], stalled: vec![stalled] };
        registry.register_collector(Box::new(CgroupCollector(metrics)));
        let mut page = String::new();
        text::encode(&mut page, &registry).unwrap();
        let samples: Vec<_> = page.lines().filter(|line| !line.starts_with('#')).collect();
        let device_labels = r#"{cgroup="/a\"\n",device="/dev/vda""#;
        assert_eq!(
            samples,
            [
                format!(r#"weir_cgroup_info{device_labels},group=""}} 1"#),
                format!(r#"weir_cgroup_limit_operations_per_second{device_labels},limit="iops-read"}} 100"#),
                format!(r#"weir_cgroup_allowed_operations_per_second{device_labels},operation="read"}} 50"#),
                r#"weir_cgroup_stalled_seconds_total{cgroup="/b",tasks="some"} 1.5"#.to_owned(),
                r#"weir_cgroup_stalled_seconds_total{cgroup="/b",tasks="all"} 0.0"#.to_owned(),
                format!("weir_cgroup_watermark_ratio{device_labels}}} 0.8"),
                format!("weir_cgroup_limits_enforced{device_labels}}} 1"),
                format!("weir_cgroup_limits_scale_ratio{device_labels}}} 1.5"),
            ]
        );
    }
}
