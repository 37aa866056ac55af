//! One pool or a whole watch on a fake machine, in virtual time.

use std::fs;

use settings::state::atomic_file;

use super::*;
use crate::{
    fake_machine::FakeMachine,
    limit::{
        any_device,
        limits_file::{LimitsChange, LimitsFile},
    },
};

const DISK: (DeviceNumber, &str) = (DeviceNumber { major: 254, minor: 0 }, "number 254:0, 1048576 bytes");
const MIB: u64 = 1 << 20;

fn at(milliseconds: u64) -> Instant {
    Instant::from_nanos(1_000_000_000 + milliseconds * 1_000_000)
}

/// Steered control groups with a burst from 4 to 20 MiB/s for 5 s, separately or in a group.
fn steered(machine: &FakeMachine, names: &[&str], group: Option<&str>) -> Vec<SteeredPool> {
    let mut limits_file = LimitsFile::default();
    machine.disk("254:0", "vda");
    for name in names {
        let limited = machine.group(name);
        machine.write(name, "io.max", "");
        machine.write(name, "io.stat", "");
        let burst = [("bps-write", 4 * MIB), ("bps-write-max", 20 * MIB), ("bps-write-max-length", 5)];
        let change = LimitsChange { group: group.map(str::to_owned), ..LimitsChange::of(&burst) };
        limits_file.change(&limited, DISK, &change).unwrap();
    }
    let hierarchy = machine.hierarchy();
    LimitPool::all(&limits_file)
        .unwrap()
        .iter()
        .map(|pool| SteeredPool::new(&hierarchy, pool, None, at(0)).unwrap())
        .collect()
}

fn written(machine: &FakeMachine, name: &str, bytes: u64) {
    machine.write(
        name,
        "io.stat",
        &format!("254:0 rbytes=0 wbytes={bytes} rios=0 wios={} dbytes=0 dios=0\n", bytes / 4096),
    );
}

fn max(machine: &FakeMachine, name: &str) -> String {
    fs::read_to_string(machine.root().join(name).join("io.max")).unwrap()
}

#[test]
fn burst_is_granted_and_revoked_in_time() {
    let machine = FakeMachine::v2("io");
    let [pool] = &mut steered(&machine, &["a"], None)[..] else { panic!("one pool") };
    let mut buffer = Vec::new();
    // Idle buckets are full, so the burst is granted in the first round.
    assert_eq!(pool.round(at(0), 9, &mut buffer).writes, 1);
    assert!(max(&machine, "a").contains("wbps=20971520"), "{}", max(&machine, "a"));
    assert_eq!(pool.due(), at(1000), "idle: once a second");
    let mut now = at(1000);
    let mut burst_end = None;
    while now < at(9000) {
        written(&machine, "a", now.nanos_since(at(0)) / 1000 * 20 * MIB / 1_000_000);
        pool.round(now, 9, &mut buffer);
        if max(&machine, "a").contains("wbps=4194304") {
            burst_end = Some(now);
            break;
        }
        now = pool.due();
    }
    // 100 MiB at (20 − 4) MiB/s.
    let burst_end_ms = burst_end.expect("an end of the burst").nanos_since(at(0)) / 1_000_000;
    assert!((6230..=6270).contains(&burst_end_ms), "ended after {burst_end_ms} ms");
    assert!(pool.has_spent());
}

#[test]
fn removed_group_is_found_again() {
    let machine = FakeMachine::v2("io");
    let mut pools = steered(&machine, &["a", "b"], Some("tenant"));
    let pool = &mut pools[0];
    let mut buffer = Vec::new();
    pool.round(at(0), 9, &mut buffer);
    // Half of the burst rate each, as both are idle.
    assert!(max(&machine, "a").contains("wbps=10485760"));
    let directory = machine.root().join("a");
    fs::remove_dir_all(&directory).unwrap();
    // A file of a removed cgroup fails, but a plain file does not, so it is closed by hand.
    pool.forget_files();
    pool.round(at(1000), 9, &mut buffer);
    assert!(max(&machine, "b").contains("wbps=20971520"), "the other has its part: {}", max(&machine, "b"));
    assert_eq!(pool.due(), at(2000));
    machine.group("a");
    machine.write("a", "io.max", "");
    machine.write("a", "io.stat", "");
    assert_eq!(pool.round(at(2000), 9, &mut buffer).writes, 2);
    assert!(max(&machine, "a").contains("wbps=10485760") && max(&machine, "b").contains("wbps=10485760"));
}

#[test]
fn overdue_members_are_read_first() {
    let machine = FakeMachine::v2("io");
    let mut pools = steered(&machine, &["a", "b", "c"], Some("tenant"));
    let pool = &mut pools[0];
    let mut buffer = Vec::new();
    assert_eq!(pool.round(at(0), 2, &mut buffer).reads, 2);
    assert_eq!(pool.due(), at(0), "the third still is");
    assert_eq!(pool.round(at(10), 2, &mut buffer).reads, 1);
}

#[test]
fn unreadable_group_has_no_burst() {
    let machine = FakeMachine::v2("io");
    let mut pools = steered(&machine, &["a"], None);
    let mut buffer = Vec::new();
    pools[0].round(at(0), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=20971520"));
    machine.write("a", "io.stat", "254:0 wbytes=many\n");
    pools[0].round(at(1000), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=4194304"));
    written(&machine, "a", 0);
    pools[0].round(at(2000), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=20971520"));
}

#[test]
fn overwritten_limit_is_restored() {
    let machine = FakeMachine::v2("io");
    let mut pools = steered(&machine, &["a"], None);
    let mut buffer = Vec::new();
    pools[0].round(at(0), 9, &mut buffer);
    pools[0].verify();
    assert!(pools[0].due() > at(0));
    machine.write("a", "io.max", "254:0 rbps=max wbps=4194304 riops=max wiops=max\n");
    pools[0].verify();
    pools[0].round(at(10), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=20971520"));
}

#[test]
fn round_robin_visits_all() {
    let mut next = 0;
    assert_eq!(round_robin(&mut next, 0, 64).count(), 0);
    assert_eq!(round_robin(&mut next, 3, 64).collect::<Vec<_>>(), [0, 1, 2]);
    let all = 74;
    let visited: Vec<usize> = (0..2).flat_map(|_| round_robin(&mut next, all, 64)).collect();
    assert!((0..all).all(|index| visited.contains(&index)), "{visited:?}");
}

#[test]
fn replaced_disk_is_not_limited() {
    let machine = FakeMachine::v2("io");
    let mut pools = steered(&machine, &["a"], None);
    let mut buffer = Vec::new();
    pools[0].round(at(0), 9, &mut buffer);
    // The disk is replaced by another with its number; the kernel's limits vanished with the first.
    fs::write(machine.path("sys/devices/vda/wwid"), "eui.2").unwrap();
    machine.write("a", "io.max", "");
    pools[0].verify();
    pools[0].round(at(10), 9, &mut buffer);
    assert_eq!(max(&machine, "a"), "");
    assert_eq!(pools[0].due(), at(1010), "perhaps it comes back");
}

#[test]
fn missing_controller_is_enabled() {
    let machine = FakeMachine::v2("io memory");
    let mut pools = steered(&machine, &["a"], None);
    fs::remove_file(machine.root().join("a/io.stat")).unwrap();
    machine.write("a", "cgroup.controllers", "");
    machine.write("/", "cgroup.subtree_control", "");
    pools[0].round(at(0), 9, &mut Vec::new());
    let enabled = fs::read_to_string(machine.root().join("cgroup.subtree_control")).unwrap();
    // The file has the last write: memory is enabled after io.
    assert!(enabled.contains("+memory"), "{enabled}");
}

/// A watch of a plain limit of 4 MiB/s, its limits file and the parsed file.
fn watch_of_plain_limit(machine: &FakeMachine) -> (CgroupWatch, PathBuf, LimitsFile) {
    machine.disk("254:0", "vda");
    fs::create_dir_all(machine.path("run")).unwrap();
    let (path, group) = (machine.path("run/cgroups.json"), machine.group("a"));
    machine.write("a", "io.max", "");
    machine.write("a", "io.stat", "");
    let mut limits_file = LimitsFile::default();
    limits_file.change(&group, DISK, &LimitsChange::of(&[("bps-write", 4 * MIB)])).unwrap();
    fs::write(&path, serde_json::to_vec(&limits_file).unwrap()).unwrap();
    let store = CapacityStore::new(Some(&machine.path("state")));
    (CgroupWatch::start_with(machine.hierarchy(), &path, store, None).unwrap(), path, limits_file)
}

#[test]
fn lost_plain_limit_is_restored() {
    let machine = FakeMachine::v2("io");
    let (mut watch, ..) = watch_of_plain_limit(&machine);
    assert!(max(&machine, "a").contains("wbps=4194304"));
    // As after a temporary absence of its disk.
    machine.write("a", "io.max", "");
    watch.save_and_verify(now());
    assert!(max(&machine, "a").contains("wbps=4194304"));
}

#[test]
fn weight_is_set_again_at_start_and_for_a_recreated_cgroup() {
    let machine = FakeMachine::v2("io");
    machine.write("/", "io.cost.qos", "254:0 enable=1 ctrl=auto rpct=0.00\n");
    let (watch, path, mut limits_file) = watch_of_plain_limit(&machine);
    let change = LimitsChange { weight: Some(300), ..LimitsChange::default() };
    limits_file.change(&machine.group("a"), DISK, &change).unwrap();
    atomic_file::write(&path, &serde_json::to_vec(&limits_file).unwrap(), false).unwrap();
    drop(watch);
    let weight = || fs::read_to_string(machine.root().join("a/io.weight")).unwrap();
    machine.write("a", "io.weight", "default 100\n");
    let store = CapacityStore::new(Some(&machine.path("state")));
    let mut watch = CgroupWatch::start_with(machine.hierarchy(), &path, store, None).unwrap();
    assert_eq!(weight(), "254:0 300");
    fs::rename(machine.root().join("a"), machine.root().join("old")).unwrap();
    machine.group("a");
    for file in ["io.max", "io.stat", "io.weight"] {
        machine.write("a", file, "");
    }
    watch.save_and_verify(now());
    assert_eq!(weight(), "254:0 300");
    machine.write("a", "io.weight", "254:0 200");
    watch.save_and_verify(now());
    assert_eq!(weight(), "254:0 200", "a change by another process stays");
}

#[test]
fn edited_file_is_adopted_and_removed_file_restored() {
    let machine = FakeMachine::v2("io");
    let (mut watch, path, mut limits_file) = watch_of_plain_limit(&machine);
    limits_file.change(&machine.group("a"), DISK, &LimitsChange::of(&[("bps-write", 5 * MIB)])).unwrap();
    atomic_file::write(&path, &serde_json::to_vec(&limits_file).unwrap(), false).unwrap();
    watch.check_file(now(), false);
    assert!(max(&machine, "a").contains("wbps=5242880"));
    fs::remove_file(&path).unwrap();
    watch.check_file(now(), false);
    assert_eq!(LimitsFile::load(&path).unwrap(), limits_file, "it is written again");
    // An entry deleted by hand lifts its limit, unless another program has set one since.
    atomic_file::write(&path, b"{}", false).unwrap();
    watch.check_file(now(), false);
    assert!(max(&machine, "a").contains("wbps=max"), "{}", max(&machine, "a"));
}

#[test]
fn idle_groups_are_read_once_a_second() {
    const SECONDS: u64 = 20;
    const ALL: usize = 1000;
    const BUSY: usize = 10;
    let machine = FakeMachine::v2("io");
    machine.disk("254:0", "vda");
    let path = machine.path("run/cgroups.json");
    fs::create_dir_all(machine.path("run")).unwrap();
    let mut limits_file = LimitsFile::default();
    let burst =
        LimitsChange::of(&[("bps-write", MIB), ("bps-write-max", 4 * MIB), ("bps-write-max-length", 10)]);
    let names: Vec<String> = (0..ALL).map(|number| format!("g{number}")).collect();
    for name in &names {
        let group = machine.group(name);
        machine.write(name, "io.max", "");
        machine.write(name, "io.stat", "254:0 \n");
        let mut single = LimitsFile::default();
        single.change(&group, DISK, &burst).unwrap();
        limits_file.limits.append(&mut single.limits);
    }
    fs::write(&path, serde_json::to_vec(&limits_file).unwrap()).unwrap();
    let store = CapacityStore::new(Some(&machine.path("state")));
    let mut watch = CgroupWatch::start_with(machine.hierarchy(), &path, store, None).unwrap();
    let (began, mut rounds) = (now(), 0);
    let mut at = began;
    while at < began + Duration::from_secs(SECONDS) {
        if rounds % 10 == 0 {
            // The busy groups write as fast as the limit allows.
            for name in &names[..BUSY] {
                written(&machine, name, at.nanos_since(began) / 1000 * 4 * MIB / 1_000_000);
            }
        }
        // Reading costs nothing here, so the result does not depend on the machine.
        watch.read_budget.read_s = 1e-9;
        at = watch.run_due(at);
        rounds += 1;
    }
    let (reads, seconds) = (watch.read_budget.read_count, SECONDS as usize);
    let idle = ALL - BUSY;
    // About 23,000 readings in 400 turns.
    assert!(rounds <= seconds * 40, "{rounds}");
    assert!((idle * (seconds - 1)..=idle * (seconds + 1) + BUSY * seconds * 20).contains(&reads), "{reads}");
}

/// A watch with leases for the cluster's group gold, which contains the control group a.
fn watch_of_cluster_group(machine: &FakeMachine) -> (CgroupWatch, CgroupLessor, PathBuf) {
    let path = machine.path("cgroups.json");
    machine.disk("254:0", "vda");
    let group = machine.group("a");
    machine.write("a", "io.max", "");
    machine.write("a", "io.stat", "");
    let store = CapacityStore::new(Some(&machine.path("state")));
    let mut watch = CgroupWatch::start_with(machine.hierarchy(), &path, store, None).unwrap();
    let leases = CgroupLeases::new(["gold"]);
    let lessor = leases.lessor("gold");
    lessor.lease(&writes(MIB), &writes(MIB), None);
    watch.begin_leasing(leases).unwrap();
    watch.run_due(now());
    assert!(lessor.is_in_force(), "a notice is not needed");
    let mut limits_file = LimitsFile::load(&path).unwrap();
    let joining = LimitsChange { group: Some("gold".to_owned()), cluster: true, ..LimitsChange::default() };
    limits_file.change(&group, DISK, &joining).unwrap();
    atomic_file::write(&path, &serde_json::to_vec(&limits_file).unwrap(), false).unwrap();
    watch.check_file(now(), true);
    watch.run_due(now());
    assert!(max(machine, "a").contains("wbps=1048576"), "the fallback share: {}", max(machine, "a"));
    (watch, lessor, path)
}

fn writes(rate: u64) -> Limits {
    let mut limits = Limits::default();
    limits.limit_mut(policy::throttle::LimitKind::BpsWrite).rate = rate;
    limits
}

#[test]
fn leased_quota_is_revoked_before_its_end() {
    let machine = FakeMachine::v2("io");
    let (mut watch, lessor, path) = watch_of_cluster_group(&machine);
    let lease = Some(now() + Duration::from_secs(5));
    // Small decreases as well: other hosts lease the difference.
    for quota in [10 * MIB, 10 * MIB - 1, 9 * MIB, 9 * MIB + MIB / 2] {
        lessor.lease(&writes(quota), &writes(MIB), lease);
        assert!(!lessor.is_in_force(), "the kernel does not have the limit yet");
        watch.run_due(now());
        assert!(lessor.is_in_force());
        assert!(max(&machine, "a").contains(&format!("wbps={quota}")), "{}", max(&machine, "a"));
    }
    let limits_file = LimitsFile::load(&path).unwrap();
    let settled = settling::settled_rates(&machine.hierarchy(), &limits_file).unwrap();
    assert_eq!(settled[0].2.bps, [None, Some(MIB)], "what the guard would set");
    let begin = now();
    lessor.renew(&writes(MIB), Some(begin + Duration::from_secs(20)));
    watch.run_due(now() + Duration::from_secs(10));
    assert!(max(&machine, "a").contains("wbps=9961472"), "{}", max(&machine, "a"));
    // The watch revokes before its guard, and the guard before the end of the lease.
    let ends = begin + Duration::from_millis(19_250);
    assert!(watch.run_due(begin + Duration::from_millis(19_220)) <= ends, "it looks when the time is over");
    watch.run_due(ends);
    assert!(max(&machine, "a").contains("wbps=1048576"), "{}", max(&machine, "a"));
}

#[test]
fn guard_deadline_covers_quota_in_the_kernel() {
    let seconds = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
    let guard = |milliseconds: u64| Some(Instant::from_nanos(milliseconds * 1_000_000));
    let leases = CgroupLeases::new(["gold", "silver"]);
    let (gold, silver) = (leases.lessor("gold"), leases.lessor("silver"));
    let step = |at: Instant, is_in_force: bool| {
        let due = leases.due(at);
        let until = leases.guard_deadline(&due);
        due.iter().for_each(|due| leases.acknowledge(due, is_in_force, None));
        until
    };
    gold.lease(&writes(MIB), &writes(MIB), None);
    silver.lease(&writes(MIB), &writes(MIB), None);
    assert_eq!(step(seconds(1), true), None, "fallback shares hold for ever");
    gold.lease(&writes(8 * MIB), &writes(MIB), Some(seconds(6)));
    assert_eq!(step(seconds(1), true), guard(5500), "half a second before the lease ends");
    gold.renew(&writes(MIB), Some(seconds(9)));
    assert_eq!(step(seconds(4), true), guard(8500), "the same part for longer");
    gold.lease(&writes(4 * MIB), &writes(MIB), Some(seconds(12)));
    assert_eq!(
        step(seconds(7), false),
        guard(8500),
        "the kernel keeps the larger limit until the next write"
    );
    assert_eq!(step(seconds(7), true), guard(8500));
    assert_eq!(step(seconds(7), true), guard(11_500));
    silver.lease(&writes(8 * MIB), &writes(MIB), Some(seconds(10)));
    assert_eq!(step(seconds(8), true), guard(9500), "the first of all");
    // The watch revokes silver's quota; the guard's deadline stays until the kernel has the
    // fallback share.
    assert_eq!(step(Instant::from_nanos(9_250_000_000), false), guard(9500));
    assert_eq!(step(Instant::from_nanos(9_300_000_000), true), guard(9500));
    assert_eq!(step(Instant::from_nanos(9_400_000_000), true), guard(11_500));
}

#[test]
fn fallback_share_is_stored_before_acknowledgement() {
    let machine = FakeMachine::v2("io");
    let (mut watch, lessor, path) = watch_of_cluster_group(&machine);
    let changes = LockedLimitsFile::open(&path).unwrap();
    lessor.lease(&writes(8 * MIB), &writes(MIB / 2), Some(now() + Duration::from_secs(5)));
    watch.run_due(now());
    assert!(!lessor.is_in_force(), "another process has changed the file");
    drop(changes);
    watch.run_due(now());
    assert!(lessor.is_in_force());
    let limits_file = LimitsFile::load(&path).unwrap();
    assert_eq!(
        settling::settled_rates(&machine.hierarchy(), &limits_file).unwrap()[0].2.bps,
        [None, Some(MIB / 2)]
    );
    assert!(max(&machine, "a").contains("wbps=8388608"), "{}", max(&machine, "a"));
}

#[test]
fn short_lived_guard_is_rejected() {
    let machine = FakeMachine::v2("io");
    let check = || guard::check(&machine.hierarchy());
    let namespace = machine.path("proc/self/ns/pid");
    fs::create_dir_all(namespace.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("pid:[4026531836]", &namespace).unwrap();
    check().unwrap();
    fs::remove_file(&namespace).unwrap();
    std::os::unix::fs::symlink("pid:[4026532000]", &namespace).unwrap();
    assert!(check().unwrap_err().to_string().contains("--pid=host"), "the machine's control groups");
    machine.write("/", "cgroup.type", "domain\n");
    check().unwrap();
}

#[test]
fn refused_quota_is_not_in_force() {
    let machine = FakeMachine::v2("io");
    let (mut watch, lessor, _) = watch_of_cluster_group(&machine);
    let directory = machine.root().join("a");
    fs::remove_file(directory.join("io.max")).unwrap();
    fs::create_dir(directory.join("io.max")).unwrap();
    lessor.lease(&writes(8 * MIB), &writes(MIB), Some(now() + Duration::from_secs(5)));
    watch.run_due(now());
    assert!(!lessor.is_in_force(), "io.max cannot be written");
    fs::remove_dir_all(&directory).unwrap();
    watch.run_due(now() + Duration::from_secs(2));
    assert!(lessor.is_in_force(), "it was removed");
}

#[test]
fn demand_of_a_cluster_group_is_reported() {
    let machine = FakeMachine::v2("io");
    let (mut watch, lessor, _) = watch_of_cluster_group(&machine);
    let begin = now() + Duration::from_secs(1);
    for step in 1..=20 {
        // Writes at the rate of the limit. Reading costs no CPU time, because the time is virtual.
        written(&machine, "a", step * MIB / 10);
        let at = begin + Duration::from_millis(step * 100);
        watch.read_budget.read_s = 1e-9;
        watch.run_due(at);
    }
    let demand = lessor.demand().expect("it was looked at");
    assert!(demand.stats.writes.bytes > MIB, "{:?}", demand.stats);
    assert_eq!(demand.weight, 100);
    let bps_write = policy::throttle::CauseKind::Limit(policy::throttle::LimitKind::BpsWrite);
    assert_eq!(demand.stats.throttle_cause, Some(bps_write));
    assert!(demand.stats.throttled_ns > 1_000_000_000, "{:?}", demand.stats);
}

#[test]
fn cluster_groups_exclude_local_limits() {
    let machine = FakeMachine::v2("io");
    let (watch, lessor, path) = watch_of_cluster_group(&machine);
    let (a, b) = (machine.group("a"), machine.group("b"));
    let mut limits_file = LimitsFile::load(&path).unwrap();
    let refused = |limits_file: &mut LimitsFile, group, change: &LimitsChange| {
        let before = limits_file.clone();
        let error = limits_file.change(group, DISK, change).unwrap_err().to_string();
        assert_eq!(*limits_file, before);
        error
    };
    let error = refused(&mut limits_file, &a, &LimitsChange::of(&[("bps-write", MIB)]));
    assert!(error.contains("weir throttle gold --cluster"), "{error}");
    let other = LimitsChange { group: Some("other".to_owned()), cluster: true, ..LimitsChange::default() };
    let error = refused(&mut limits_file, &b, &other);
    assert!(error.contains("belongs to no cluster here"), "{error}");
    limits_file.replace_cluster_groups(&BTreeMap::from([("gold".to_owned(), writes(3))]));
    let joining = LimitsChange { group: Some("gold".to_owned()), cluster: true, ..LimitsChange::default() };
    let error = refused(&mut limits_file, &b, &joining);
    assert!(error.contains("at least 4 for 2 control groups"), "{error}");
    assert!(limits_file.remove(&a, DISK.0), "it leaves");
    limits_file.replace_cluster_groups(&BTreeMap::new());
    assert!(limits_file.groups.is_empty(), "a group without members is removed");
    drop((watch, lessor));
    let own_limits =
        LimitsChange { group: Some("gold".to_owned()), ..LimitsChange::of(&[("bps-write", MIB)]) };
    limits_file.change(&a, DISK, &own_limits).unwrap();
    fs::write(&path, serde_json::to_vec(&limits_file).unwrap()).unwrap();
    let store = CapacityStore::new(Some(&machine.path("state")));
    let mut watch = CgroupWatch::start_with(machine.hierarchy(), &path, store, None).unwrap();
    let error = watch.begin_leasing(CgroupLeases::new(["gold"])).unwrap_err().to_string();
    assert!(error.contains("group gold has limits of its own"), "{error}");
}

#[test]
fn disks_that_appear_are_limited() {
    let machine = FakeMachine::v2("io");
    let group = machine.group("/a");
    machine.write("/a", "io.max", "");
    machine.write("/a", "cgroup.controllers", "io\n");
    machine.disk("254:0", "vda");
    let file = machine.path("run/weir/cgroups.json");
    let change = LimitsChange::of(&[("bps-write", 4 * MIB)]);
    any_device::set(&machine.hierarchy(), &file, &group, &change).unwrap();
    // While no watch runs.
    machine.disk("254:16", "vdb");
    let store = CapacityStore::new(Some(&machine.path("state")));
    let mut watch = CgroupWatch::start_with(machine.hierarchy(), &file, store, None).unwrap();
    let limits_of = |watch: &mut CgroupWatch| {
        watch.run_due(watch.file_at);
        watch.appearing_disks.finish();
        LimitsFile::load(&file).unwrap().limits.len()
    };
    assert_eq!(limits_of(&mut watch), 2);
    machine.disk("254:32", "vdc");
    watch.appearing_disks.announce();
    assert_eq!(limits_of(&mut watch), 3);
    // The watch adopts what was stored.
    watch.run_due(watch.file_at);
    assert_eq!(watch.limits_file, LimitsFile::load(&file).unwrap());
    assert!(max(&machine, "a").contains("254:32"), "{}", max(&machine, "a"));
}
