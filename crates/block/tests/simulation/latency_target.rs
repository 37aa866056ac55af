//! Latency targets through the whole data path: disks on one imitated device, of which one has a
//! target. `policy` tests the controller itself; here are the measurements, the members and the
//! caps.

use std::{cell::Cell, rc::Rc, sync::Arc};

use block::{
    device::{Device, LatencySampler, SharedDevice, SysfsRoots},
    disk::Disk,
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use image::open_raw;
use policy::{
    latency_target::{LatencySettings, PercentileTarget, TargetDirections, TargetState},
    request::Direction,
    throttle::{CauseKind, NodeShare, RequestCost},
    time::{Duration, Instant},
};
use reactor::{buffer::IoBuffer, now, sim, sleep_until, spawn};
use storage::{Durability, ImageFormat, OpenOptions, rate::RateBudgets};

const BLOCK: usize = 4096;
/// Without a target, a client at depth 1 waits behind the queues of the others: 65 ms.
const DEVICE: &str = "iops=2000,shared=sda";
const LOUD_DEPTH: usize = 64;
const MS: u64 = 1_000_000;

struct World {
    budgets: RateBudgets,
    sampler: LatencySampler,
}

fn target(ms: u64, directions: TargetDirections) -> LatencySettings {
    let target = PercentileTarget::new(ms * MS, 9900, directions).expect("valid");
    LatencySettings { target: Some(target), ..LatencySettings::default() }
}

impl World {
    fn new() -> Self {
        Self { budgets: RateBudgets::default(), sampler: LatencySampler::default() }
    }

    fn disk_on(
        &self,
        device: &str,
        name: &str,
        latency: LatencySettings,
        group: Option<&Arc<ThrottleGroup>>,
    ) -> Arc<Disk> {
        let options = OpenOptions {
            format: Some(ImageFormat::Raw),
            rate: Some(device.parse().expect("valid")),
            budgets: self.budgets.clone(),
            ..OpenOptions::default()
        };
        let image = open_raw("null:1G", options).expect("opened");
        let settings = DiskSettings { latency, ..DiskSettings::default() };
        let disk = Arc::new(Disk::new(name, image, settings, group).expect("valid"));
        self.update(&disk);
        disk
    }

    fn disk(&self, name: &str, latency: LatencySettings) -> Arc<Disk> {
        self.disk_on(DEVICE, name, latency, None)
    }

    fn loud(&self, name: &str, until: Instant) -> Arc<Disk> {
        let disk = self.disk(name, LatencySettings::default());
        load(&disk, LOUD_DEPTH, until);
        disk
    }

    /// Tells the sampler of changed settings.
    fn update(&self, disk: &Arc<Disk>) {
        let device = Device::below_disk(disk, &SysfsRoots::default(), |_| None).expect("imitated");
        self.sampler.update_disk(disk, SharedDevice::below_disk(disk, device.as_ref()));
    }
}

fn group(name: &str, latency: LatencySettings, share: NodeShare) -> Arc<ThrottleGroup> {
    let settings = GroupSettings { latency, share, ..GroupSettings::default() };
    ThrottleGroup::new(name, settings, None).expect("valid")
}

/// Reads and writes in turn, `depth` at once; returns the count.
fn load(disk: &Arc<Disk>, depth: usize, until: Instant) -> Rc<Cell<u64>> {
    let count = Rc::new(Cell::new(0));
    for _ in 0..depth {
        let (disk, count) = (Arc::clone(disk), Rc::clone(&count));
        spawn(async move {
            while now() < until {
                let cost = RequestCost::one(BLOCK as u64);
                if sim::random(fastrand::Rng::bool) {
                    let permit = disk.admit(Direction::Read, cost).await;
                    disk.read(permit, 0, BLOCK).await.expect("null");
                } else {
                    let permit = disk.admit(Direction::Write, cost).await;
                    let data = IoBuffer::zeroed(BLOCK).into();
                    disk.write(permit, 0, data, Durability::Cached).await.expect("null");
                }
                count.set(count.get() + 1);
            }
        });
    }
    count
}

async fn pause(seconds: u64) {
    sleep_until(now() + Duration::from_secs(seconds)).await;
}

fn measured_ms(world: &World, name: &str) -> f64 {
    world.sampler.report(name).expect("a target").measured_ns.expect("requests") as f64 / 1e6
}

#[test]
fn target_is_kept_and_the_others_are_released() {
    sim::run(1, async {
        let world = World::new();
        let end = now() + Duration::from_secs(60);
        let db = world.disk("db", LatencySettings::default());
        load(&db, 1, now() + Duration::from_secs(120));
        let loud = [world.loud("a", end), world.loud("b", end)];
        pause(1).await;
        assert!(!world.sampler.has_targets());
        assert_eq!(
            db.latency_meter().take_requests(now(), 1).in_flight.iter().sum::<u64>(),
            0,
            "nothing is measured without a target"
        );

        db.throttle()
            .set(DiskSettings { latency: target(10, TargetDirections::All), ..db.throttle().settings() })
            .expect("valid");
        world.update(&db);
        // The reported percentile covers up to 20 s.
        pause(30).await;
        let report = world.sampler.report("db").expect("a target");
        assert_eq!(report.state, TargetState::Controlling);
        assert!(measured_ms(&world, "db") <= 11.0, "{report:?}");
        for disk in &loud {
            assert!(disk.throttle().cap().is_some());
            assert_eq!(disk.throttle().stats().throttle_cause, Some(CauseKind::LatencyTarget));
        }
        assert_eq!(db.throttle().cap(), None);
        let before: u64 = loud.iter().map(|disk| disk.totals().reads + disk.totals().writes).sum();
        pause(10).await;
        let after: u64 = loud.iter().map(|disk| disk.totals().reads + disk.totals().writes).sum();
        assert!(after - before > 10 * 1200, "the others use what the target leaves: {}", after - before);

        sleep_until(end + Duration::from_secs(10)).await;
        assert_eq!(world.sampler.report("db").expect("a target").state, TargetState::Met);
        assert!(loud.iter().all(|disk| disk.throttle().cap().is_none()), "idle disks have no cap");
    });
}

#[test]
fn removed_target_removes_caps_and_measurement() {
    sim::run(1, async {
        let world = World::new();
        let end = now() + Duration::from_secs(60);
        let db = world.disk("db", target(10, TargetDirections::Reads));
        load(&db, 1, end);
        let loud = world.loud("loud", end);
        pause(5).await;
        assert!(loud.throttle().cap().is_some());
        assert!(loud.latency_meter().take_requests(now(), 1).in_flight.iter().sum::<u64>() > 0);
        db.throttle().set(DiskSettings::default()).expect("valid");
        world.update(&db);
        assert_eq!(loud.throttle().cap(), None, "at once");
        assert_eq!(world.sampler.report("db"), None);
        pause(1).await;
        assert_eq!(
            loud.latency_meter().take_requests(now(), 1).in_flight.iter().sum::<u64>(),
            0,
            "requests are not counted any more"
        );
    });
}

#[test]
fn impossible_target_releases_the_others() {
    sim::run(1, async {
        let world = World::new();
        let end = now() + Duration::from_secs(60);
        // Each request takes 10 ms.
        let [db, loud] = ["db", "loud"].map(|name| {
            let latency =
                if name == "db" { target(5, TargetDirections::All) } else { LatencySettings::default() };
            world.disk_on("iops=100,shared=slow", name, latency, None)
        });
        load(&db, 1, end);
        load(&loud, LOUD_DEPTH, end);
        pause(15).await;
        let TargetState::CannotBeMet { alone_ns, .. } = world.sampler.report("db").expect("a target").state
        else {
            panic!("{:?}", world.sampler.report("db"));
        };
        assert!((9 * MS..40 * MS).contains(&alone_ns), "{alone_ns}");
        assert_eq!(loud.throttle().cap(), None);
    });
}

#[test]
fn other_devices_are_not_throttled() {
    sim::run(1, async {
        let world = World::new();
        let end = now() + Duration::from_secs(10);
        let db = world.disk("db", target(10, TargetDirections::All));
        load(&db, 1, end);
        let loud = world.loud("loud", end);
        let elsewhere = world.disk_on("iops=2000,shared=sdb", "elsewhere", LatencySettings::default(), None);
        load(&elsewhere, LOUD_DEPTH, end);
        pause(5).await;
        assert!(loud.throttle().cap().is_some());
        assert_eq!(elsewhere.throttle().cap(), None);
        assert_eq!(elsewhere.latency_meter().take_requests(now(), 1).in_flight.iter().sum::<u64>(), 0);
    });
}

#[test]
fn group_with_a_target_or_a_reservation_is_one_member() {
    sim::run(1, async {
        let world = World::new();
        let end = now() + Duration::from_secs(60);
        let dbs = group("dbs", target(10, TargetDirections::All), NodeShare::default());
        let reserved =
            group("reserved", LatencySettings::default(), NodeShare::default().with_reservation(600, 0));
        for one in [&dbs, &reserved] {
            world.sampler.update_group(one);
        }
        for name in ["db1", "db2"] {
            load(&world.disk_on(DEVICE, name, LatencySettings::default(), Some(&dbs)), 1, end);
        }
        let members = ["r1", "r2"].map(|name| {
            let disk = world.disk_on(DEVICE, name, LatencySettings::default(), Some(&reserved));
            load(&disk, LOUD_DEPTH, end);
            disk
        });
        let loud = world.loud("loud", end);
        pause(25).await;
        assert!(measured_ms(&world, "dbs") <= 11.0, "{:?}", world.sampler.report("dbs"));
        assert_eq!(world.sampler.report("db1"), None);
        assert!(members.iter().all(|disk| disk.throttle().cap().is_none()), "their group has the cap");
        let cap = reserved.cap().expect("a cap").limit(policy::throttle::LimitKind::IopsTotal).rate;
        assert!(cap >= 600, "below its reservation: {cap}");

        // A move removes the disk's cap, and the next step sets one again.
        assert!(loud.throttle().cap().is_some());
        let other = group("other", LatencySettings::default(), NodeShare::default());
        loud.throttle().move_to(Some(&other)).expect("valid");
        world.update(&loud);
        assert_eq!(loud.throttle().cap(), None);
        pause(1).await;
        assert!(loud.throttle().cap().is_some());

        loud.throttle().lift_limits();
        assert_eq!(loud.throttle().cap(), None);
        pause(1).await;
        assert_eq!(loud.throttle().cap(), None, "lifted limits admit no cap");
    });
}
