//! The sampler, with targets that record their enforcement.

use std::sync::Mutex;

use policy::throttle::LimitKind;

use super::*;
use reactor::{buffer::Buffer, sim};
use storage::{Storage, null::Null, rate::Budget};

/// A target that records its enforcement.
#[derive(Debug, Default)]
struct Noted {
    watermark: Mutex<Watermark>,
    passed: Mutex<[Counters; 2]>,
    enforcement: Mutex<Enforcement>,
    /// Number of visits of the target, each of which reads the watermark first.
    looks: Mutex<u64>,
}

fn get<T: Copy>(value: &Mutex<T>) -> T {
    *value.lock().expect("nothing panics under it")
}

fn set<T>(place: &Mutex<T>, value: T) {
    *place.lock().expect("nothing panics under it") = value;
}

impl Noted {
    fn new(percent: u8) -> Arc<Self> {
        let noted = Arc::new(Self::default());
        noted.set_watermark(percent);
        noted
    }

    fn set_watermark(&self, percent: u8) {
        set(&self.watermark, Watermark::new(percent).expect("percent"));
    }

    fn enforcement(&self) -> Enforcement {
        get(&self.enforcement)
    }
}

impl Target for Noted {
    fn name(&self) -> &str {
        "noted"
    }

    fn watermark(&self) -> Watermark {
        set(&self.looks, get(&self.looks) + 1);
        get(&self.watermark)
    }

    fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::BpsTotal).rate = 1 << 20;
        limits
    }

    fn passed(&self) -> [Counters; 2] {
        get(&self.passed)
    }

    fn enforce(&self, enforcement: Enforcement) {
        set(&self.enforcement, enforcement);
    }
}

/// An imitated device of 10 MiB a second.
struct Imitated {
    budget: Arc<Budget>,
    device: Arc<Device>,
}

impl Imitated {
    fn new() -> Self {
        let budget = Arc::new(Budget::new("bytes=10M,shared=x".parse().expect("valid")));
        Self { device: Arc::new(Device::imitated(&budget, "disk")), budget }
    }

    fn under(&self, target: &Arc<Noted>) -> Subject {
        Subject { target: weak(target), devices: vec![Arc::clone(&self.device)] }
    }

    /// Keeps the device busy for this time.
    async fn work_for(&self, seconds: u64) {
        let null = Storage::Null(Null::new(1 << 30));
        let rate = null.with_rate(Arc::clone(&self.budget));
        let end = now() + Duration::from_secs(seconds);
        while now() < end {
            rate.read(0, Buffer::new(1 << 18)).await.expect("null");
        }
    }
}

fn weak(target: &Arc<Noted>) -> Weak<dyn Target> {
    let weak: Weak<Noted> = Arc::downgrade(target);
    weak
}

async fn pause(milliseconds: u64) {
    sleep_until(now() + Duration::from_millis(milliseconds)).await;
}

#[test]
fn limits_are_lifted_while_the_device_has_room_and_hold_when_it_has_none() {
    sim::run(1, async {
        let (device, target, sampler) = (Imitated::new(), Noted::new(80), Sampler::default());
        sampler.watch(vec![device.under(&target)]);
        pause(500).await;
        assert_eq!(target.enforcement(), Enforcement::Lifted);
        device.work_for(5).await;
        assert_eq!(
            target.enforcement(),
            Enforcement::Enforced,
            "others have the device, so limits are as set"
        );
        pause(3000).await;
        assert_eq!(target.enforcement(), Enforcement::Lifted);
    });
}

#[test]
fn who_is_watched_no_longer_is_enforced() {
    sim::run(1, async {
        let (device, target, sampler) = (Imitated::new(), Noted::new(80), Sampler::default());
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
fn without_a_device_limits_hold() {
    sim::run(1, async {
        let (target, sampler) = (Noted::new(80), Sampler::default());
        sampler.watch(vec![Subject { target: weak(&target), devices: Vec::new() }]);
        pause(500).await;
        assert_eq!(target.enforcement(), Enforcement::Enforced);
    });
}

#[test]
fn of_two_devices_the_one_with_less_room_decides() {
    sim::run(1, async {
        let (idle, busy) = (Imitated::new(), Imitated::new());
        let (target, sampler) = (Noted::new(80), Sampler::default());
        let devices = vec![Arc::clone(&idle.device), Arc::clone(&busy.device)];
        sampler.watch(vec![Subject { target: weak(&target), devices }]);
        busy.work_for(5).await;
        assert_eq!(target.enforcement(), Enforcement::Enforced);
    });
}

#[test]
fn what_is_consumed_is_told_in_multiples_of_the_limits() {
    let counters = |requests, bytes| Counters { requests, bytes, ..Counters::default() };
    sim::run(1, async move {
        let target = Noted::new(80);
        let subject = Subject { target: weak(&target), devices: Vec::new() };
        let mut watched = Watched { subject, last: None, enforcement: Enforcement::Enforced };
        let mut consumed = Consumed::default();
        assert!(watched.taken(now()).is_none(), "a first look has nothing before it");
        set(&target.passed, [counters(7, 1 << 20), counters(1, 3 << 20)]);
        pause(2000).await;
        consumed.add(&watched.taken(now()).expect("a second look"));
        assert_eq!((consumed.together(), consumed.most()), (2000, 2000), "four seconds' worth in two");
        let nothing = [counters(0, 0), counters(0, 0)];
        let idle = Taken::since(&nothing, &nothing, Duration::from_secs(2), target.limits());
        consumed.add(&idle.expect("no counter fell"));
        set(&target.passed, nothing);
        pause(2000).await;
        assert!(watched.taken(now()).is_none(), "counters fell");
        assert_eq!((consumed.together(), consumed.most()), (1000, 2000), "and another that took nothing");
    });
}

#[test]
fn what_is_gone_is_forgotten() {
    sim::run(1, async {
        let (device, target, sampler) = (Imitated::new(), Noted::new(80), Sampler::default());
        sampler.watch(vec![device.under(&target)]);
        let weak = Arc::downgrade(&target);
        drop(target);
        pause(500).await;
        assert_eq!(weak.strong_count(), 0, "the sampler keeps nothing");
        sampler.watch(vec![Subject { target: weak, devices: vec![Arc::clone(&device.device)] }]);
        assert!(sampler.task.borrow().is_none());
    });
}

#[test]
fn a_change_of_one_target_looks_at_no_other() {
    sim::run(1, async {
        let (device, sampler) = (Imitated::new(), Sampler::default());
        let targets: Vec<_> = (0..100).map(|_| Noted::new(80)).collect();
        for target in &targets {
            sampler.update(device.under(target));
        }
        assert!(targets.iter().all(|target| get(&target.looks) == 1), "once each");
        pause(500).await;
        assert!(targets.iter().all(|target| target.enforcement() == Enforcement::Lifted));
        let looks: Vec<u64> = targets[1..].iter().map(|target| get(&target.looks)).collect();
        sampler.forget(&weak(&targets[0]));
        assert_eq!(targets[0].enforcement(), Enforcement::Enforced);
        assert_eq!(targets[1..].iter().map(|target| get(&target.looks)).collect::<Vec<_>>(), looks);
        for target in &targets[1..] {
            assert!(sampler.task.borrow().is_some(), "a target is still on the device");
            sampler.forget(&weak(target));
        }
        assert!(sampler.task.borrow().is_none(), "nothing runs where nothing is watched");
    });
}
