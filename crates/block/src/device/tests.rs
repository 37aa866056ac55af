//! Utilization, and the device of a disk.

use policy::{request::Direction, throttle::RequestCost};

use super::*;
use image::{Image, open_raw};
use reactor::{buffer::IoBuffer, now, sim, sleep_until};
use storage::{Durability, OpenOptions, rate::RateBudgets};

use crate::layer::throttle::DiskSettings;

const CAPACITY: MeasuredCapacity =
    MeasuredCapacity { read_iops: 1000, write_iops: 500, read_bps: 100 << 20, write_bps: 50 << 20 };

fn done(reads: u64, read_bytes: u64, writes: u64, written_bytes: u64) -> DeviceStatistics {
    DeviceStatistics { reads, read_bytes, writes, written_bytes, busy_ms: 30, queued_ms: 30 }
}

#[track_caller]
fn check(capacity: Option<&MeasuredCapacity>, done: DeviceStatistics, expect: u32) {
    let zero = DeviceReading::Statistics(DeviceStatistics::default());
    let elapsed = Duration::from_millis(100);
    assert_eq!(utilization_between(capacity, zero, DeviceReading::Statistics(done), elapsed), Some(expect));
}

#[test]
fn totals_that_fall_have_no_utilization() {
    let [before, after] =
        [done(50, 4096 * 50, 25, 0), done(49, 4096 * 49, 26, 0)].map(DeviceReading::Statistics);
    assert_eq!(utilization_between(Some(&CAPACITY), before, after, Duration::from_millis(100)), None);
}

#[test]
fn utilization_is_the_larger_of_operations_and_bytes() {
    check(Some(&CAPACITY), done(50, 4096 * 50, 0, 0), 500);
    check(Some(&CAPACITY), done(5, 8 << 20, 0, 0), 800);
    check(Some(&CAPACITY), done(0, 0, 0, 0), 0);
}

#[test]
fn reads_and_writes_add_up() {
    check(Some(&CAPACITY), done(50, 0, 25, 0), 1000);
    check(Some(&CAPACITY), done(1, 4 << 20, 1, 2 << 20), 800);
}

#[test]
fn unmeasured_devices_use_busy_time() {
    check(None, done(50, 4096 * 50, 0, 0), 300);
    let reads_only = MeasuredCapacity { write_iops: 0, write_bps: 0, ..CAPACITY };
    check(Some(&reads_only), done(50, 4096 * 50, 1, 4096), 300);
    check(Some(&reads_only), done(50, 4096 * 50, 0, 0), 500);
}

#[test]
fn invalid_kernel_statistics_do_not_overflow() {
    check(Some(&CAPACITY), done(u64::MAX, u64::MAX, u64::MAX, u64::MAX), MAX_UTILIZATION);
    let busy = DeviceStatistics { busy_ms: u64::MAX, ..DeviceStatistics::default() };
    check(None, busy, 1000);
}

/// A disk over `image`, optionally with an imitated rate.
fn disk(name: &str, image: &str, rate: Option<&str>, budgets: &RateBudgets) -> Disk {
    let options = OpenOptions {
        rate: rate.map(|text| text.parse().expect("valid")),
        budgets: budgets.clone(),
        format: Some(storage::ImageFormat::Raw),
        ..OpenOptions::default()
    };
    let image = open_raw(image, options).expect("opened");
    test_disk(name, image)
}

fn test_disk(name: &str, image: Image) -> Disk {
    Disk::new(name, image, DiskSettings::default(), None).expect("no reservations")
}

#[test]
fn disks_that_share_a_rate_are_on_one_device_and_memory_on_none() {
    sim::run(1, async {
        let budgets = RateBudgets::default();
        let roots = SysfsRoots::default();
        let one = disk("a", "null:1G", Some("bytes=22M,read=10M,shared=slow"), &budgets);
        let two = disk("b", "memory:1M", Some("bytes=22M,read=10M,shared=slow"), &budgets);
        let unshared = disk("c", "null:1G", Some("iops=5"), &budgets);
        let none = disk("d", "memory:1M", None, &budgets);
        let id = |disk: &Disk| id_of(disk, &roots).expect("nothing is read");
        assert_eq!(id(&one), id(&two));
        assert_ne!(id(&one), id(&unshared));
        assert_eq!(id(&none), None);
        let device = |disk: &Disk| Device::below_disk(disk, &roots, |_| None).expect("nothing is read");
        assert!(device(&none).is_none());
        let (slow, unshared) = (device(&one).expect("imitated"), device(&unshared).expect("imitated"));
        assert_eq!((slow.name(), unshared.name()), ("rate:slow", "rate of c"));
        assert_eq!(slow.capacity_source(), CapacitySource::Rate);
        let expect =
            MeasuredCapacity { read_iops: 0, write_iops: 0, read_bps: 10 << 20, write_bps: 22 << 20 };
        assert_eq!(slow.capacity(), Some(expect));
    });
}

#[test]
fn utilization_of_an_imitated_device_is_its_busy_time() {
    sim::run(1, async {
        let disk = disk("a", "null:1G", Some("bytes=10M"), &RateBudgets::default());
        let device = Device::below_disk(&disk, &SysfsRoots::default(), |_| None)
            .expect("nothing is read")
            .expect("imitated");
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        sleep_until(at(1000)).await;
        assert_eq!(device.utilization(now()).expect("readable"), 0);
        let permit = disk.admit(Direction::Read, RequestCost::one(1 << 20)).await;
        disk.read(permit, 0, 1 << 20).await.expect("null");
        sleep_until(at(1200)).await;
        // Busy for 0.1 s of 0.2 s.
        assert_eq!(device.utilization(now()).expect("readable"), 500);
        assert_eq!(
            device.utilization(now()).expect("readable"),
            500,
            "a second reading at once returns the same"
        );
        // Each reader gets an average over about a second, however often others read.
        for ms in (1300..=2000).step_by(100) {
            sleep_until(at(ms)).await;
            assert_eq!(device.utilization(now()).expect("readable"), 100_000 / (ms as u32 - 1000));
        }
        for (ms, expect) in [(2900, 52), (3100, 47), (9000, 0)] {
            sleep_until(at(ms)).await;
            assert_eq!(device.utilization(now()).expect("readable"), expect, "{ms}");
        }
    });
}

#[test]
fn imitated_device_counts_like_the_kernel() {
    sim::run(1, async {
        let disk = disk("a", "null:1G", Some("bytes=10M"), &RateBudgets::default());
        let device = Device::below_disk(&disk, &SysfsRoots::default(), |_| None)
            .expect("nothing is read")
            .expect("imitated");
        sleep_until(Instant::ZERO + Duration::from_secs(1)).await;
        assert_eq!(device.statistics(now()).expect("readable"), DeviceStatistics::default());
        for (direction, bytes) in [(Direction::Read, 1 << 20), (Direction::Write, 2 << 20)] {
            let permit = disk.admit(direction, RequestCost::one(bytes)).await;
            match direction {
                Direction::Read => drop(disk.read(permit, 0, 1 << 20).await.expect("null")),
                Direction::Write => {
                    let data = IoBuffer::zeroed(2 << 20);
                    disk.write(permit, 0, data.into(), Durability::Cached).await.expect("null");
                }
            }
        }
        sleep_until(Instant::ZERO + Duration::from_secs(9)).await;
        // The device's work begins 10 ms before the request, since an idle line may start in the
        // past (`IDLE_CREDIT_NS` of `policy::device`).
        let expect = DeviceStatistics {
            reads: 1,
            read_bytes: 1 << 20,
            writes: 1,
            written_bytes: 2 << 20,
            busy_ms: 300,
            queued_ms: 290,
        };
        assert_eq!(device.statistics(now()).expect("readable"), expect);
    });
}

#[test]
fn a_file_is_on_the_disk_of_its_file_system() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
    file.as_file().set_len(1 << 20).expect("grown");
    let path = file.path().to_str().expect("UTF-8").to_owned();
    sim::run(1, async move {
        let disk = disk("a", &path, None, &RateBudgets::default());
        // On a machine whose root file system is an overlay there is no disk to find, and that is
        // an error.
        let Ok(Some(id)) = id_of(&disk, &SysfsRoots::default()) else { return };
        let measured = |identity: &DeviceIdentity| {
            assert_eq!(DeviceId::Physical(identity.number()), id);
            Some((CAPACITY, 7))
        };
        let device =
            Device::below_disk(&disk, &SysfsRoots::default(), measured).expect("readable").expect("a disk");
        assert_eq!((device.capacity(), device.capacity_source()), (Some(CAPACITY), CapacitySource::Probe));
        assert_eq!(device.reservable().probed_at_s, Some(7));
        assert!(device.name().starts_with("/dev/"));
        assert!(device.reading(now()).is_ok());
    });
}
