//! The sampler, with targets that record their enforcement.

use std::sync::Mutex;

use policy::throttle::LimitKind;

use super::*;
use reactor::{buffer::IoBuffer, sim};
use storage::{Storage, null::NullStorage, rate::RateBudget};

/// A target that records its enforcement.
#[derive(Debug, Default)]
struct RecordingTarget {
    watermark: Mutex<Watermark>,
    passed: Mutex<[AdmissionCounters; 2]>,
    enforcement: Mutex<Enforcement>,
    /// Number of visits of the target, each of which reads the watermark first.
    visits: Mutex<u64>,
}

fn get<T: Copy>(value: &Mutex<T>) -> T {
    *value.lock().expect("nothing panics under it")
}

fn set<T>(mutex: &Mutex<T>, value: T) {
    *mutex.lock().expect("nothing panics under it") = value;
}

impl RecordingTarget {
    fn new(percent: u8) -> Arc<Self> {
        let target = Arc::new(Self::default());
        target.set_watermark(percent);
        target
    }

    fn set_watermark(&self, percent: u8) {
        set(&self.watermark, Watermark::new(percent).expect("percent"));
    }

    fn enforcement(&self) -> Enforcement {
        get(&self.enforcement)
    }
}

impl SamplerTarget for RecordingTarget {
    fn name(&self) -> &str {
        "noted"
    }

    fn watermark(&self) -> Watermark {
        set(&self.visits, get(&self.visits) + 1);
        get(&self.watermark)
    }

    fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::BpsTotal).rate = 1 << 20;
        limits
    }

    fn admitted(&self) -> [AdmissionCounters; 2] {
        get(&self.passed)
    }

    fn enforce(&self, enforcement: Enforcement) {
        set(&self.enforcement, enforcement);
    }
}

/// An imitated device of 10 MiB a second.
struct ImitatedDevice {
    budget: Arc<RateBudget>,
    device: Arc<Device>,
}

impl ImitatedDevice {
    fn new() -> Self {
        let budget = Arc::new(RateBudget::new("bytes=10M,shared=x".parse().expect("valid")));
        Self { device: Arc::new(Device::imitated(&budget, "disk")), budget }
    }

    fn under(&self, target: &Arc<RecordingTarget>) -> SampledTarget {
        SampledTarget { target: weak(target), devices: vec![Arc::clone(&self.device)] }
    }

    /// Keeps the device busy for this time.
    async fn work_for(&self, seconds: u64) {
        let null = Storage::Null(NullStorage::new(1 << 30));
        let rate = null.with_rate(Arc::clone(&self.budget));
        let end = now() + Duration::from_secs(seconds);
        while now() < end {
            rate.read(0, IoBuffer::new(1 << 18)).await.expect("null");
        }
    }
}

fn weak(target: &Arc<RecordingTarget>) -> Weak<dyn SamplerTarget> {
    let weak: Weak<RecordingTarget> = Arc::downgrade(target);
    weak
}

async fn pause(milliseconds: u64) {
    sleep_until(now() + Duration::from_millis(milliseconds)).await;
}

#[test]
fn limits_are_lifted_at_low_utilization_only() {
    sim::run(1, async {
        let (device, target, sampler) = (ImitatedDevice::new(), RecordingTarget::new(80), Sampler::default());
        sampler.watch(vec![device.under(&target)]);
        pause(500).await;
        assert_eq!(target.enforcement(), Enforcement::Lifted);
        device.work_for(5).await;
        assert_eq!(
            target.enforcement(),
            Enforcement::Enforced,
            "other load saturates the device, so the limits apply as set"
        );
        pause(3000).await;
        assert_eq!(target.enforcement(), Enforcement::Lifted);
    });
}

#[test]
fn removed_targets_are_enforced() {
    sim::run(1, async {
        let (device, target, sampler) = (ImitatedDevice::new(), RecordingTarget::new(80), Sampler::default());
        for stop in [true, false] {
            sampler.watch(vec![device.under(&target)]);
            pause(500).await;
            assert_eq!(target.enforcement(), Enforcement::Lifted);
            if stop {
                sampler.watch(Vec::new());
            } else {
                target.set_watermark(0);
                sampler.watch(vec![device.under(&target)]);
            }
            assert_eq!(target.enforcement(), Enforcement::Enforced);
            assert!(sampler.task.borrow().is_none(), "nothing runs where nothing is watched");
            target.set_watermark(80);
        }
    });
}

#[test]
fn limits_without_a_device_are_enforced() {
    sim::run(1, async {
        let (target, sampler) = (RecordingTarget::new(80), Sampler::default());
        sampler.watch(vec![SampledTarget { target: weak(&target), devices: Vec::new() }]);
        pause(500).await;
        assert_eq!(target.enforcement(), Enforcement::Enforced);
    });
}

#[test]
fn the_busier_of_two_devices_decides() {
    sim::run(1, async {
        let (idle, busy) = (ImitatedDevice::new(), ImitatedDevice::new());
        let (target, sampler) = (RecordingTarget::new(80), Sampler::default());
        let devices = vec![Arc::clone(&idle.device), Arc::clone(&busy.device)];
        sampler.watch(vec![SampledTarget { target: weak(&target), devices }]);
        busy.work_for(5).await;
        assert_eq!(target.enforcement(), Enforcement::Enforced);
    });
}

#[test]
fn consumption_is_relative_to_the_limits() {
    let counters = |requests, bytes| AdmissionCounters { requests, bytes, ..AdmissionCounters::default() };
    sim::run(1, async move {
        let target = RecordingTarget::new(80);
        let subject = SampledTarget { target: weak(&target), devices: Vec::new() };
        let mut watched = WatchedTarget { sampled: subject, last: None, enforcement: Enforcement::Enforced };
        let mut consumed = DeviceConsumption::default();
        assert!(watched.consumption(now()).is_none(), "a first look has nothing before it");
        set(&target.passed, [counters(7, 1 << 20), counters(1, 3 << 20)]);
        pause(2000).await;
        consumed.add(&watched.consumption(now()).expect("a second look"));
        assert_eq!(
            (consumed.combined_multiple(), consumed.max_multiple()),
            (2000, 2000),
            "four seconds' worth in two"
        );
        let zeros = [counters(0, 0), counters(0, 0)];
        let idle = GroupConsumption::since(&zeros, &zeros, Duration::from_secs(2), target.limits());
        consumed.add(&idle.expect("no counter fell"));
        set(&target.passed, zeros);
        pause(2000).await;
        assert!(watched.consumption(now()).is_none(), "counters fell");
        assert_eq!(
            (consumed.combined_multiple(), consumed.max_multiple()),
            (1000, 2000),
            "and another that took nothing"
        );
    });
}

#[test]
fn dropped_targets_are_removed() {
    sim::run(1, async {
        let (device, target, sampler) = (ImitatedDevice::new(), RecordingTarget::new(80), Sampler::default());
        sampler.watch(vec![device.under(&target)]);
        let weak = Arc::downgrade(&target);
        drop(target);
        pause(500).await;
        assert_eq!(weak.strong_count(), 0, "the sampler keeps nothing");
        sampler.watch(vec![SampledTarget { target: weak, devices: vec![Arc::clone(&device.device)] }]);
        assert!(sampler.task.borrow().is_none());
    });
}

#[test]
fn changing_one_target_visits_no_other() {
    sim::run(1, async {
        let (device, sampler) = (ImitatedDevice::new(), Sampler::default());
        let targets: Vec<_> = (0..100).map(|_| RecordingTarget::new(80)).collect();
        for target in &targets {
            sampler.update(device.under(target));
        }
        assert!(targets.iter().all(|target| get(&target.visits) == 1), "once each");
        pause(500).await;
        assert!(targets.iter().all(|target| target.enforcement() == Enforcement::Lifted));
        let visits: Vec<u64> = targets[1..].iter().map(|target| get(&target.visits)).collect();
        sampler.forget(&weak(&targets[0]));
        assert_eq!(targets[0].enforcement(), Enforcement::Enforced);
        assert_eq!(targets[1..].iter().map(|target| get(&target.visits)).collect::<Vec<_>>(), visits);
        for target in &targets[1..] {
            assert!(sampler.task.borrow().is_some(), "a target is still on the device");
            sampler.forget(&weak(target));
        }
        assert!(sampler.task.borrow().is_none(), "nothing runs where nothing is watched");
    });
}
