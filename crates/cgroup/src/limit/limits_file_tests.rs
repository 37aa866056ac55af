use super::*;
use crate::{
    control_group::Version,
    limit::locks::{LockedLimitsFile, WatchLock},
};

const DISK: (DeviceNumber, &str) = (DeviceNumber { major: 254, minor: 0 }, "serial x, 1048576 bytes");

fn group(name: &str) -> ControlGroup {
    ControlGroup {
        version: Version::V2,
        directory: format!("/sys/fs/cgroup{name}").into(),
        name: name.into(),
    }
}

fn in_group(name: &str, limits: &[(&str, u64)]) -> LimitsChange {
    LimitsChange { group: Some(name.to_owned()), ..LimitsChange::of(limits) }
}

#[test]
fn unnamed_limits_stay_and_0_removes_a_limit() {
    let mut limits_file = LimitsFile::default();
    limits_file
        .change(&group("/a"), DISK, &LimitsChange::of(&[("bps-write", 100), ("iops-read", 5)]))
        .unwrap();
    limits_file
        .change(&group("/a"), DISK, &LimitsChange::of(&[("bps-write", 200), ("bps-write-max", 400)]))
        .unwrap();
    limits_file.change(&group("/a"), DISK, &LimitsChange::of(&[("iops-read", 0)])).unwrap();
    let limits = limits_file.limits_of(limits_file.entry(&group("/a"), DISK.0).unwrap()).limits().unwrap();
    assert_eq!(limits.limit(LimitKind::BpsWrite).burst_rate, 400);
    assert_eq!(limits.limit(LimitKind::BpsWrite).rate, 200);
    assert_eq!(limits.limit(LimitKind::IopsRead).rate, 0);
}

#[test]
fn removing_a_limit_removes_its_burst() {
    let mut limits_file = LimitsFile::default();
    let burst = [("bps-write", 4), ("bps-write-max", 20), ("bps-write-max-length", 5), ("bps-read", 4)];
    limits_file.change(&group("/a"), DISK, &LimitsChange::of(&burst)).unwrap();
    limits_file.change(&group("/a"), DISK, &LimitsChange::of(&[("bps-write", 0)])).unwrap();
    let limits = limits_file.limits_of(&limits_file.limits[0]).limits().unwrap();
    assert_eq!(limits.limit(LimitKind::BpsWrite), policy::throttle::RateLimit::default());
    assert_eq!(limits.limit(LimitKind::BpsRead).rate, 4);
    limits_file
        .change(&group("/a"), DISK, &LimitsChange::of(&[("bps-write", 0), ("bps-write-max", 20)]))
        .unwrap_err();
}

#[test]
fn invalid_change_leaves_the_file_unchanged() {
    let mut limits_file = LimitsFile::default();
    limits_file.change(&group("/a"), DISK, &LimitsChange::of(&[("bps-write", 100)])).unwrap();
    let before = limits_file.clone();
    let error = limits_file.change(&group("/a"), DISK, &LimitsChange::of(&[("bps-total", 100)])).unwrap_err();
    assert!(format!("{error:#}").contains("/a"), "{error:#}");
    limits_file.change(&group("/a"), DISK, &LimitsChange::of(&[("bps-write-max", 50)])).unwrap_err();
    assert_eq!(limits_file, before);
}

#[test]
fn group_limits_end_with_the_last_member() {
    let mut limits_file = LimitsFile::default();
    limits_file.change(&group("/a"), DISK, &LimitsChange::of(&[("iops-total", 7)])).unwrap();
    limits_file.change(&group("/a"), DISK, &in_group("tenant", &[("bps-write", 100)])).unwrap();
    limits_file.change(&group("/b"), DISK, &in_group("tenant", &[])).unwrap();
    let limits = |limits_file: &LimitsFile, name| {
        limits_file.limits_of(limits_file.entry(&group(name), DISK.0).unwrap()).limits().unwrap()
    };
    assert_eq!(limits(&limits_file, "/a"), limits(&limits_file, "/b"));
    assert_eq!(limits(&limits_file, "/a").limit(LimitKind::IopsTotal).rate, 0, "its own are gone");
    assert!(limits_file.remove(&group("/a"), DISK.0));
    assert!(!limits_file.remove(&group("/a"), DISK.0));
    assert_eq!(limits_file.groups.len(), 1);
    limits_file.change(&group("/b"), DISK, &in_group("", &[("bps-read", 9)])).unwrap();
    assert!(limits_file.groups.is_empty());
    assert_eq!(limits(&limits_file, "/b").limit(LimitKind::BpsRead).rate, 9);
}

#[test]
fn the_file_is_read_as_it_was_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("deeper/cgroups.json");
    assert_eq!(LimitsFile::load(&path).unwrap(), LimitsFile::default());
    let file_version = FileVersion::of(&path);
    let mut locked = LockedLimitsFile::open(&path).unwrap();
    let change = LimitsChange {
        weight: Some(300),
        watermark: Some(90),
        ..in_group("tenant", &[("bps-write", 1 << 40)])
    };
    locked.limits_file.change(&group("/a b.slice"), DISK, &change).unwrap();
    locked.save().unwrap();
    assert_ne!(FileVersion::of(&path), file_version);
    let limits_file = LimitsFile::load(&path).unwrap();
    assert_eq!(limits_file, locked.limits_file);
    let entry = limits_file.entry(&group("/a b.slice"), DISK.0).unwrap();
    assert_eq!((entry.weight(), entry.given_weight()), (300, Some(300)));
    assert_eq!(limits_file.limits_of(entry).watermark().unwrap().percent(), 90);
}

#[test]
fn file_of_another_format_is_not_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cgroups.json");
    for broken in [
        "",
        "3",
        "{\"limits\": [{\"cgroup\": \"/a\"}]}",
        "{\"limits\": [], \"more\": 1}",
        r#"{"limits": [{"cgroup": "/a", "device": "x", "device-key": ""}]}"#,
        r#"{"limits": [{"cgroup": "/a", "device": "8:0", "device-key": "", "weight": 10001}]}"#,
        r#"{"limits": [{"cgroup": "/a", "device": "8:0", "device-key": "", "group": "none"}]}"#,
        r#"{"limits": [{"cgroup": "/a", "device": "8:0", "device-key": "", "own": {"limits": {"bps": 1}}}]}"#,
        r#"{"limits": [{"cgroup": "/a", "device": "8:0", "device-key": "", "own": {"watermark": 101}}]}"#,
    ] {
        fs::write(&path, broken).unwrap();
        let error = format!("{:#}", LockedLimitsFile::open(&path).map(drop).unwrap_err());
        assert!(error.contains("cgroups.json: these limits are invalid"), "{broken}: {error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), broken);
    }
}

#[test]
fn only_one_watch_holds_the_lock() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cgroups.json");
    assert!(!WatchLock::is_taken(&path));
    let watched = WatchLock::take(&path).unwrap().expect("the first");
    assert!(WatchLock::is_taken(&path));
    assert!(WatchLock::take(&path).unwrap().is_none());
    drop(watched);
    assert!(!WatchLock::is_taken(&path));
}
