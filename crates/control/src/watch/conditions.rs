//! Conditions of disks, groups and devices: limit hit, reservation missed, watermark exceeded,
//! device slow. Takes the measurements; `events::hysteresis` decides.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use block::{
    device::{CapacitySource, Device, DeviceStatistics, TargetReport},
    layer::throttle::ThrottleGroup,
};
use policy::{
    latency_target::PercentileTarget,
    throttle::{Enforcement, ThrottleSummary},
    time::{Duration, Instant},
};
use serde_json::Value;

use super::MemberKind;
use crate::{
    events::{
        EventLog, Kind, NewEvent,
        hysteresis::{self, Condition, ConditionChange, ConditionSample, DeviceThroughput},
    },
    latency_targets,
    registry::Registry,
};

/// Interval between samples of devices.
const DEVICE_INTERVAL: Duration = Duration::from_secs(10);

/// Conditions of disks and groups, by name.
#[derive(Default)]
pub(super) struct WatchedConditions(HashMap<String, WatchedMember>);

struct WatchedMember {
    kind: MemberKind,
    /// Time of the last sample. Objects missing in the current sample are removed.
    at: Instant,
    brief: ThrottleSummary,
    limit: Condition,
    reservation: Condition,
    watermark: Condition,
    /// Holds while the latency target cannot be met.
    latency: Condition,
    latency_target: Option<PercentileTarget>,
    /// Limit that was hit.
    binding: Option<&'static str>,
    /// True if the state may change by other users' load on its device.
    has_watermark: bool,
}

/// Measurements of a disk or group.
struct MemberMeasurement {
    brief: ThrottleSummary,
    enforcement: Enforcement,
    has_watermark: bool,
    latency: Option<TargetReport>,
}

impl WatchedConditions {
    pub(super) fn sample(&mut self, registry: &Registry, now: Instant) {
        let has_targets = registry.has_latency_targets();
        let latency = |name: &str| has_targets.then(|| registry.latency_report(name)).flatten();
        for running in registry.disks.all() {
            let member = running.disk.throttle();
            let measured = MemberMeasurement {
                brief: member.brief_stats(),
                enforcement: member.watermark_enforcement(),
                has_watermark: member.watermark().percent() > 0,
                latency: latency(running.disk.name()),
            };
            self.sample_member(MemberKind::Disk, running.disk.name(), measured, now, &registry.events);
        }
        for group in registry.groups.all() {
            let group: &ThrottleGroup = &group;
            let measured = MemberMeasurement {
                brief: group.brief_stats(),
                enforcement: group.watermark_enforcement(),
                has_watermark: group.watermark().percent() > 0,
                latency: latency(group.name()),
            };
            self.sample_member(MemberKind::Group, group.name(), measured, now, &registry.events);
        }
        self.0.retain(|_, subject| subject.at == now);
    }

    /// True if no condition can change by time alone.
    pub(super) fn is_idle(&self) -> bool {
        self.0.values().all(|member| {
            let conditions = [&member.limit, &member.reservation, &member.watermark, &member.latency];
            let waits = member.brief.waiting != [0; 2];
            let may_change = member.has_watermark || member.latency_target.is_some();
            !waits && !may_change && conditions.into_iter().all(Condition::is_idle)
        })
    }

    /// Total time limited of all disks and groups.
    pub(super) fn limited_ns(&self) -> u64 {
        self.0.values().fold(0, |sum, member| sum.saturating_add(member.brief.throttled_ns))
    }

    fn sample_member(
        &mut self,
        member_kind: MemberKind,
        name: &str,
        measured: MemberMeasurement,
        now: Instant,
        events: &EventLog,
    ) {
        let member = match self.0.get_mut(name) {
            Some(member) if member.kind == member_kind => member,
            _ => {
                let member = WatchedMember::new(member_kind, &measured, now);
                // The first sample of a new object is only a baseline.
                self.0.insert(name.to_owned(), member);
                return;
            }
        };
        member.update(name, measured, now, events);
    }
}

impl WatchedMember {
    fn new(member_kind: MemberKind, measured: &MemberMeasurement, now: Instant) -> Self {
        let (limit, reservation, watermark, latency) = Default::default();
        let has_watermark = measured.has_watermark;
        Self {
            kind: member_kind,
            at: now,
            brief: measured.brief,
            limit,
            reservation,
            watermark,
            latency,
            latency_target: None,
            binding: None,
            has_watermark,
        }
    }

    fn update(&mut self, name: &str, measured: MemberMeasurement, now: Instant, events: &EventLog) {
        let MemberMeasurement { brief, enforcement, has_watermark, latency } = measured;
        self.has_watermark = has_watermark;
        self.update_latency(name, latency, now, events);
        let before = std::mem::replace(&mut self.brief, brief);
        let elapsed = now - std::mem::replace(&mut self.at, now);
        let record = |event: NewEvent| events.record(self.kind.with_subject(name, event));
        let subject = format!("{} {name}", self.kind.name());

        let percent = hysteresis::limited_percent(&before, &brief, elapsed);
        if let Some(kind) = brief.throttle_cause {
            self.binding = Some(kind.name());
        }
        // The last known cause: the sample itself may fall into a pause.
        let limit = self.binding.unwrap_or("a limit");
        match self.limit.observe(hysteresis::limit_sample(percent), hysteresis::LIMIT_DELAYS, now) {
            Some(ConditionChange::Began) => {
                let message =
                    format!("{subject} is at its limit: {limit} throttles requests {percent} % of the time");
                let event =
                    NewEvent::new(Kind::LimitHit, message).with("limit", limit).with("percent", percent);
                record(event.with("waiting", brief.waiting.iter().sum::<usize>()));
            }
            Some(ConditionChange::Ended(lasted)) => {
                let message = format!("{subject} is below its limit again, after {} s", lasted.as_secs());
                record(
                    NewEvent::new(Kind::LimitReleased, message)
                        .with("limit", limit)
                        .with("seconds", seconds(lasted)),
                );
            }
            None => {}
        }

        let sample = hysteresis::reservation_sample(&before, &brief);
        match sample.and_then(|sample| self.reservation.observe(sample, hysteresis::RESERVATION_DELAYS, now))
        {
            Some(ConditionChange::Began) => {
                let message = format!("{subject} gets less than its reservation");
                record(NewEvent::new(Kind::ReservationMissed, message));
            }
            Some(ConditionChange::Ended(lasted)) => {
                let message = format!("{subject} gets its reservation again, after {} s", lasted.as_secs());
                record(NewEvent::new(Kind::ReservationMet, message).with("seconds", seconds(lasted)));
            }
            None => {}
        }

        let sample = match enforcement {
            _ if !has_watermark => ConditionSample::Between,
            Enforcement::Lifted => ConditionSample::Under,
            Enforcement::Enforced | Enforcement::Scaled(_) => ConditionSample::Over,
        };
        match self.watermark.observe(sample, hysteresis::WATERMARK_DELAYS, now) {
            Some(ConditionChange::Began) => {
                let message =
                    format!("the device of {subject} is used above its watermark: limits are enforced");
                record(NewEvent::new(Kind::WatermarkReached, message));
            }
            Some(ConditionChange::Ended(lasted)) => {
                let message =
                    format!("the device of {subject} is used below its watermark: limits are lifted");
                record(NewEvent::new(Kind::WatermarkLeft, message).with("seconds", seconds(lasted)));
            }
            None => {}
        }
    }

    fn update_latency(&mut self, name: &str, report: Option<TargetReport>, now: Instant, events: &EventLog) {
        let target = report.map(|report| report.target);
        if self.latency_target != target {
            // Another target, or none: what was reported of the earlier one is out of date.
            (self.latency, self.latency_target) = (Condition::default(), target);
        }
        let Some(report) = report else { return };
        let alone_ns = latency_targets::alone_ns(&report);
        let sample = if alone_ns.is_some() { ConditionSample::Over } else { ConditionSample::Under };
        let bound_ns = report.target.bound_ns();
        let (bound, percentile) = (milliseconds(bound_ns), f64::from(report.target.permyriad()) / 100.0);
        let event = match self.latency.observe(sample, hysteresis::LATENCY_DELAYS, now) {
            Some(ConditionChange::Began) => {
                let alone_ns = alone_ns.unwrap_or_default();
                let alone = milliseconds(alone_ns);
                let answer = match alone_ns {
                    0 => format!("the device answers no request of {name}"),
                    _ => format!("the device answers {name} alone in {alone} ms at p{percentile}"),
                };
                let message = format!("{name}: latency target {bound} ms cannot be met: {answer}");
                NewEvent::new(Kind::LatencyTargetMissed, message).with("alone-ns", alone_ns)
            }
            Some(ConditionChange::Ended(lasted)) => {
                let after = lasted.as_secs();
                let message = format!("{name}: latency target {bound} ms can be met again, after {after} s");
                NewEvent::new(Kind::LatencyTargetMet, message).with("seconds", seconds(lasted))
            }
            None => return,
        };
        let event = event.with("target-ns", bound_ns).with("percentile", percentile);
        events.record(self.kind.with_subject(name, event));
    }
}

/// Rounded to two decimals.
fn milliseconds(nanoseconds: u64) -> f64 {
    (nanoseconds as f64 / 1e4).round() / 1e2
}

fn seconds(lasted: Duration) -> Value {
    lasted.as_secs().into()
}

/// Compares devices with their measured capacity.
#[derive(Default)]
pub(super) struct WatchedDevices {
    looked: Option<Instant>,
    known: HashMap<String, (Instant, DeviceStatistics, Condition)>,
}

impl WatchedDevices {
    /// True if no device has a measured capacity, so that nothing is sampled.
    pub(super) fn is_idle(&self) -> bool {
        self.known.is_empty()
    }

    pub(super) fn sample(&mut self, registry: &Registry, now: Instant) {
        if self.looked.is_some_and(|sampled_at| now - sampled_at < DEVICE_INTERVAL) {
            return;
        }
        self.looked = Some(now);
        for listed in registry.devices() {
            self.sample_device(&listed.device, &registry.events, now);
        }
        self.known.retain(|_, (at, ..)| *at == now);
    }

    fn sample_device(&mut self, device: &Arc<Device>, events: &EventLog, now: Instant) {
        // The capacity of an emulated device is configured, not measured.
        let capacity = device.capacity().filter(|_| device.capacity_source() == CapacitySource::Probe);
        let (Some(capacity), Ok(statistics)) = (capacity, device.statistics(now)) else { return };
        let known = match self.known.entry(device.name().to_owned()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                new.insert((now, statistics, Condition::default()));
                return;
            }
        };
        let (at, before, condition) = known;
        let elapsed = now - std::mem::replace(at, now);
        let Some(done) = throughput(&std::mem::replace(before, statistics), &statistics, elapsed) else {
            return;
        };
        let Some(percent) = hysteresis::capacity_percent(&capacity, &done) else { return };
        let (name, queue) = (device.name(), done.queue);
        let kind = match condition.observe(
            hysteresis::device_sample(percent, queue),
            hysteresis::DEVICE_DELAYS,
            now,
        ) {
            Some(ConditionChange::Began) => Kind::DeviceSlow,
            Some(ConditionChange::Ended(_)) => Kind::DeviceRecovered,
            None => return,
        };
        let message = match kind {
            Kind::DeviceSlow => format!(
                "device {name} is slow: {percent} % of its measured capacity with {queue:.0} \
                 requests in flight"
            ),
            _ => format!("device {name} is as fast as measured again"),
        };
        let event = NewEvent::new(kind, message).with("device", name).with("percent", percent);
        events.record(event.with("queue", (queue * 10.0).round() / 10.0));
    }
}

/// Rates between two samples; `None` if a counter decreased.
fn throughput(
    before: &DeviceStatistics,
    after: &DeviceStatistics,
    elapsed: Duration,
) -> Option<DeviceThroughput> {
    let done = after.since(before)?;
    let a_second = |amount: u64| {
        u64::try_from(u128::from(amount) * 1_000_000_000 / elapsed.as_nanos().max(1)).unwrap_or(u64::MAX)
    };
    Some(DeviceThroughput {
        iops: [a_second(done.reads), a_second(done.writes)],
        bps: [a_second(done.read_bytes), a_second(done.written_bytes)],
        // Little's law: queued time per elapsed time is the average queue length.
        queue: done.queued_ms as f64 / 1000.0 / elapsed.as_secs_f64().max(1e-9),
    })
}
