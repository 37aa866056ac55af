//! One pool or a whole watch on a fake machine, in virtual time.

use std::fs;

use settings::state::whole_file;

use super::*;
use crate::{
    limit::kept::{Change, Kept},
    machine::Machine,
};

const DISK: (Number, &str) = (Number { major: 254, minor: 0 }, "number 254:0, 1048576 bytes");
const MIB: u64 = 1 << 20;

fn at(milliseconds: u64) -> Instant {
    Instant::from_nanos(1_000_000_000 + milliseconds * 1_000_000)
}

/// Steered control groups with a burst from 4 to 20 MiB/s for 5 s, separately or in a group.
fn steered(machine: &Machine, names: &[&str], group: Option<&str>) -> Vec<Steered> {
    let mut kept = Kept::default();
    machine.disk("254:0", "vda");
    for name in names {
        let limited = machine.group(name);
        machine.write(name, "io.max", "");
        machine.write(name, "io.stat", "");
        let burst = [("bps-write", 4 * MIB), ("bps-write-max", 20 * MIB), ("bps-write-max-length", 5)];
        let change = Change { group: group.map(str::to_owned), ..Change::of(&burst) };
        kept.change(&limited, DISK, &change).unwrap();
    }
    let hierarchy = machine.hierarchy();
    Sharing::all(&kept)
        .unwrap()
        .iter()
        .map(|sharing| Steered::new(&hierarchy, sharing, None, at(0)).unwrap())
        .collect()
}

fn written(machine: &Machine, name: &str, bytes: u64) {
    machine.write(
        name,
        "io.stat",
        &format!("254:0 rbytes=0 wbytes={bytes} rios=0 wios={} dbytes=0 dios=0\n", bytes / 4096),
    );
}

fn max(machine: &Machine, name: &str) -> String {
    fs::read_to_string(machine.root().join(name).join("io.max")).unwrap()
}

#[test]
fn a_burst_is_granted_taken_back_and_looked_at_in_time() {
    let machine = Machine::v2("io");
    let [steered] = &mut steered(&machine, &["a"], None)[..] else { panic!("one pool") };
    let mut buffer = Vec::new();
    // Idle buckets are full, so the burst is granted in the first round.
    assert_eq!(steered.round(at(0), 9, &mut buffer).told, 1);
    assert!(max(&machine, "a").contains("wbps=20971520"), "{}", max(&machine, "a"));
    assert_eq!(steered.due(), at(1000), "idle: once a second");
    let mut now = at(1000);
    let mut ended = None;
    while now < at(9000) {
        written(&machine, "a", now.nanos_since(at(0)) / 1000 * 20 * MIB / 1_000_000);
        steered.round(now, 9, &mut buffer);
        if max(&machine, "a").contains("wbps=4194304") {
            ended = Some(now);
            break;
        }
        now = steered.due();
    }
    // 100 MiB at (20 − 4) MiB/s.
    let ended = ended.expect("an end of the burst").nanos_since(at(0)) / 1_000_000;
    assert!((6230..=6270).contains(&ended), "ended after {ended} ms");
    assert!(steered.has_spent());
}

#[test]
fn one_that_is_gone_leaves_the_others_alone_and_is_found_again() {
    let machine = Machine::v2("io");
    let mut steered = steered(&machine, &["a", "b"], Some("tenant"));
    let steered = &mut steered[0];
    let mut buffer = Vec::new();
    steered.round(at(0), 9, &mut buffer);
    // Half of the burst rate each, as both are idle.
    assert!(max(&machine, "a").contains("wbps=10485760"));
    let gone = machine.root().join("a");
    fs::remove_dir_all(&gone).unwrap();
    // A file of a removed cgroup fails, but a plain file does not, so it is closed by hand.
    steered.forget_files();
    steered.round(at(1000), 9, &mut buffer);
    assert!(max(&machine, "b").contains("wbps=20971520"), "the other has its part: {}", max(&machine, "b"));
    assert_eq!(steered.due(), at(2000));
    machine.group("a");
    machine.write("a", "io.max", "");
    machine.write("a", "io.stat", "");
    assert_eq!(steered.round(at(2000), 9, &mut buffer).told, 2);
    assert!(max(&machine, "a").contains("wbps=10485760") && max(&machine, "b").contains("wbps=10485760"));
}

#[test]
fn who_cannot_be_looked_at_now_is_looked_at_next() {
    let machine = Machine::v2("io");
    let mut steered = steered(&machine, &["a", "b", "c"], Some("tenant"));
    let steered = &mut steered[0];
    let mut buffer = Vec::new();
    assert_eq!(steered.round(at(0), 2, &mut buffer).looks, 2);
    assert_eq!(steered.due(), at(0), "the third still is");
    assert_eq!(steered.round(at(10), 2, &mut buffer).looks, 1);
}

#[test]
fn one_that_cannot_be_read_has_no_burst() {
    let machine = Machine::v2("io");
    let mut steered = steered(&machine, &["a"], None);
    let mut buffer = Vec::new();
    steered[0].round(at(0), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=20971520"));
    machine.write("a", "io.stat", "254:0 wbytes=many\n");
    steered[0].round(at(1000), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=4194304"));
    written(&machine, "a", 0);
    steered[0].round(at(2000), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=20971520"));
}

#[test]
fn what_somebody_else_wrote_is_told_again() {
    let machine = Machine::v2("io");
    let mut steered = steered(&machine, &["a"], None);
    let mut buffer = Vec::new();
    steered[0].round(at(0), 9, &mut buffer);
    steered[0].verify();
    assert!(steered[0].due() > at(0));
    machine.write("a", "io.max", "254:0 rbps=max wbps=4194304 riops=max wiops=max\n");
    steered[0].verify();
    steered[0].round(at(10), 9, &mut buffer);
    assert!(max(&machine, "a").contains("wbps=20971520"));
}

#[test]
fn all_have_their_turn() {
    let mut next = 0;
    assert_eq!(in_turn(&mut next, 0, 64).count(), 0);
    assert_eq!(in_turn(&mut next, 3, 64).collect::<Vec<_>>(), [0, 1, 2]);
    let all = 74;
    let turns: Vec<usize> = (0..2).flat_map(|_| in_turn(&mut next, all, 64)).collect();
    assert!((0..all).all(|index| turns.contains(&index)), "{turns:?}");
}

#[test]
fn a_disk_that_has_the_number_of_another_is_told_nothing() {
    let machine = Machine::v2("io");
    let mut steered = steered(&machine, &["a"], None);
    let mut buffer = Vec::new();
    steered[0].round(at(0), 9, &mut buffer);
    // The disk is replaced by another with its number; the kernel's limits vanished with the first.
    fs::write(machine.path("sys/devices/vda/wwid"), "eui.2").unwrap();
    machine.write("a", "io.max", "");
    steered[0].verify();
    steered[0].round(at(10), 9, &mut buffer);
    assert_eq!(max(&machine, "a"), "");
    assert_eq!(steered[0].due(), at(1010), "perhaps it comes back");
}

#[test]
fn one_without_the_controller_has_it_handed_down() {
    let machine = Machine::v2("io memory");
    let mut steered = steered(&machine, &["a"], None);
    fs::remove_file(machine.root().join("a/io.stat")).unwrap();
    machine.write("a", "cgroup.controllers", "");
    machine.write("/", "cgroup.subtree_control", "");
    steered[0].round(at(0), 9, &mut Vec::new());
    let handed_down = fs::read_to_string(machine.root().join("cgroup.subtree_control")).unwrap();
    // The file has the last write: memory is enabled after io.
    assert!(handed_down.contains("+memory"), "{handed_down}");
}

/// A watch of a plain limit of 4 MiB/s, its limits file and the parsed file.
fn of_a_plain_limit(machine: &Machine) -> (Watch, PathBuf, Kept) {
    machine.disk("254:0", "vda");
    fs::create_dir_all(machine.path("run")).unwrap();
    let (path, group) = (machine.path("run/cgroups.json"), machine.group("a"));
    machine.write("a", "io.max", "");
    machine.write("a", "io.stat", "");
    let mut kept = Kept::default();
    kept.change(&group, DISK, &Change::of(&[("bps-write", 4 * MIB)])).unwrap();
    fs::write(&path, serde_json::to_vec(&kept).unwrap()).unwrap();
    let store = Store::new(Some(&machine.path("state")));
    (Watch::over(machine.hierarchy(), &path, store, None).unwrap(), path, kept)
}

#[test]
fn what_the_kernel_keeps_by_itself_is_told_again_if_it_is_lost() {
    let machine = Machine::v2("io");
    let (mut watch, ..) = of_a_plain_limit(&machine);
    assert!(max(&machine, "a").contains("wbps=4194304"));
    // As after a temporary absence of its disk.
    machine.write("a", "io.max", "");
    watch.keep(now());
    assert!(max(&machine, "a").contains("wbps=4194304"));
}

#[test]
fn a_weight_is_told_anew_at_the_start_and_when_its_control_group_is_made_again() {
    let machine = Machine::v2("io");
    machine.write("/", "io.cost.qos", "254:0 enable=1 ctrl=auto rpct=0.00\n");
    let (watch, path, mut kept) = of_a_plain_limit(&machine);
    let change = Change { weight: Some(300), ..Change::default() };
    kept.change(&machine.group("a"), DISK, &change).unwrap();
    whole_file::write(&path, &serde_json::to_vec(&kept).unwrap(), false).unwrap();
    drop(watch);
    let weight = || fs::read_to_string(machine.root().join("a/io.weight")).unwrap();
    machine.write("a", "io.weight", "default 100\n");
    let store = Store::new(Some(&machine.path("state")));
    let mut watch = Watch::over(machine.hierarchy(), &path, store, None).unwrap();
    assert_eq!(weight(), "254:0 300");
    fs::rename(machine.root().join("a"), machine.root().join("old")).unwrap();
    machine.group("a");
    for file in ["io.max", "io.stat", "io.weight"] {
        machine.write("a", file, "");
    }
    watch.keep(now());
    assert_eq!(weight(), "254:0 300");
    machine.write("a", "io.weight", "254:0 200");
    watch.keep(now());
    assert_eq!(weight(), "254:0 200", "whoever changes it meanwhile may");
}

#[test]
fn a_file_that_is_changed_by_hand_is_followed_and_one_that_is_removed_is_not() {
    let machine = Machine::v2("io");
    let (mut watch, path, mut kept) = of_a_plain_limit(&machine);
    kept.change(&machine.group("a"), DISK, &Change::of(&[("bps-write", 5 * MIB)])).unwrap();
    whole_file::write(&path, &serde_json::to_vec(&kept).unwrap(), false).unwrap();
    watch.look_at_file(now(), false);
    assert!(max(&machine, "a").contains("wbps=5242880"));
    fs::remove_file(&path).unwrap();
    watch.look_at_file(now(), false);
    assert_eq!(Kept::load(&path).unwrap(), kept, "it is written again");
    // An entry deleted by hand lifts its limit, unless another program has set one since.
    whole_file::write(&path, b"{}", false).unwrap();
    watch.look_at_file(now(), false);
    assert!(max(&machine, "a").contains("wbps=max"), "{}", max(&machine, "a"));
}

#[test]
fn a_thousand_are_looked_at_once_a_second_and_those_that_write_more_often() {
    const SECONDS: u64 = 20;
    const ALL: usize = 1000;
    const BUSY: usize = 10;
    let machine = Machine::v2("io");
    machine.disk("254:0", "vda");
    let path = machine.path("run/cgroups.json");
    fs::create_dir_all(machine.path("run")).unwrap();
    let mut kept = Kept::default();
    let burst = Change::of(&[("bps-write", MIB), ("bps-write-max", 4 * MIB), ("bps-write-max-length", 10)]);
    let names: Vec<String> = (0..ALL).map(|number| format!("g{number}")).collect();
    for name in &names {
        let group = machine.group(name);
        machine.write(name, "io.max", "");
        machine.write(name, "io.stat", "254:0 \n");
        let mut one = Kept::default();
        one.change(&group, DISK, &burst).unwrap();
        kept.limits.append(&mut one.limits);
    }
    fs::write(&path, serde_json::to_vec(&kept).unwrap()).unwrap();
    let store = Store::new(Some(&machine.path("state")));
    let mut watch = Watch::over(machine.hierarchy(), &path, store, None).unwrap();
    let (began, mut turns) = (now(), 0);
    let mut at = began;
    while at < began + Duration::from_secs(SECONDS) {
        if turns % 10 == 0 {
            // They write as fast as the limit allows.
            for name in &names[..BUSY] {
                written(&machine, name, at.nanos_since(began) / 1000 * 4 * MIB / 1_000_000);
            }
        }
        // Reading costs nothing here, so the result does not depend on the machine.
        watch.pace.look_s = 1e-9;
        at = watch.turn(at);
        turns += 1;
    }
    let (looks, seconds) = (watch.pace.made, SECONDS as usize);
    let idle = ALL - BUSY;
    // About 23,000 readings in 400 turns.
    assert!(turns <= seconds * 40, "{turns}");
    assert!((idle * (seconds - 1)..=idle * (seconds + 1) + BUSY * seconds * 20).contains(&looks), "{looks}");
}

/// A watch with leases for the cluster's group gold, which contains the control group a.
fn of_a_cluster(machine: &Machine) -> (Watch, Lender, PathBuf) {
    let path = machine.path("cgroups.json");
    machine.disk("254:0", "vda");
    let group = machine.group("a");
    machine.write("a", "io.max", "");
    machine.write("a", "io.stat", "");
    let store = Store::new(Some(&machine.path("state")));
    let mut watch = Watch::over(machine.hierarchy(), &path, store, None).unwrap();
    let lending = Lending::new(["gold"]);
    let lender = lending.lender("gold");
    lender.lend(&writes(MIB), &writes(MIB), None);
    watch.begin_to_lend(lending).unwrap();
    watch.turn(now());
    assert!(lender.is_in_force(), "nobody has to be told");
    let mut kept = Kept::load(&path).unwrap();
    let joins = Change { group: Some("gold".to_owned()), cluster: true, ..Change::default() };
    kept.change(&group, DISK, &joins).unwrap();
    whole_file::write(&path, &serde_json::to_vec(&kept).unwrap(), false).unwrap();
    watch.look_at_file(now(), true);
    watch.turn(now());
    assert!(max(machine, "a").contains("wbps=1048576"), "the safe share: {}", max(machine, "a"));
    (watch, lender, path)
}

fn writes(rate: u64) -> Limits {
    let mut limits = Limits::default();
    limits.limit_mut(policy::throttle::LimitKind::BpsWrite).rate = rate;
    limits
}

#[test]
fn what_a_cluster_lends_is_told_and_taken_back_when_its_time_is_over() {
    let machine = Machine::v2("io");
    let (mut watch, lender, path) = of_a_cluster(&machine);
    let lease = Some(now() + Duration::from_secs(5));
    // Small decreases as well: other hosts lease the difference.
    for part in [10 * MIB, 10 * MIB - 1, 9 * MIB, 9 * MIB + MIB / 2] {
        lender.lend(&writes(part), &writes(MIB), lease);
        assert!(!lender.is_in_force(), "the kernel does not know yet");
        watch.turn(now());
        assert!(lender.is_in_force());
        assert!(max(&machine, "a").contains(&format!("wbps={part}")), "{}", max(&machine, "a"));
    }
    let kept = Kept::load(&path).unwrap();
    let settled = settling::settled(&machine.hierarchy(), &kept).unwrap();
    assert_eq!(settled[0].2.bps, [None, Some(MIB)], "what the guard would set");
    let begin = now();
    lender.prolong(&writes(MIB), Some(begin + Duration::from_secs(20)));
    watch.turn(now() + Duration::from_secs(10));
    assert!(max(&machine, "a").contains("wbps=9961472"), "{}", max(&machine, "a"));
    // Earlier than its guard must, which is earlier than the end of the lease.
    let ends = begin + Duration::from_millis(19_250);
    assert!(watch.turn(begin + Duration::from_millis(19_220)) <= ends, "it looks when the time is over");
    watch.turn(ends);
    assert!(max(&machine, "a").contains("wbps=1048576"), "{}", max(&machine, "a"));
}

#[test]
fn the_guard_knows_when_what_the_kernel_has_ends_and_not_only_what_comes() {
    let seconds = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
    let guard = |milliseconds: u64| Some(Instant::from_nanos(milliseconds * 1_000_000));
    let lending = Lending::new(["gold", "silver"]);
    let (gold, silver) = (lending.lender("gold"), lending.lender("silver"));
    let turn = |at: Instant, is_told: bool| {
        let due = lending.due(at);
        let until = lending.guarded_until(&due);
        due.iter().for_each(|due| lending.told(due, is_told, None));
        until
    };
    gold.lend(&writes(MIB), &writes(MIB), None);
    silver.lend(&writes(MIB), &writes(MIB), None);
    assert_eq!(turn(seconds(1), true), None, "safe shares hold for ever");
    gold.lend(&writes(8 * MIB), &writes(MIB), Some(seconds(6)));
    assert_eq!(turn(seconds(1), true), guard(5500), "half a second before the lease ends");
    gold.prolong(&writes(MIB), Some(seconds(9)));
    assert_eq!(turn(seconds(4), true), guard(8500), "the same part for longer");
    gold.lend(&writes(4 * MIB), &writes(MIB), Some(seconds(12)));
    assert_eq!(turn(seconds(7), false), guard(8500), "the kernel has the larger one until it is told");
    assert_eq!(turn(seconds(7), true), guard(8500));
    assert_eq!(turn(seconds(7), true), guard(11_500));
    silver.lend(&writes(8 * MIB), &writes(MIB), Some(seconds(10)));
    assert_eq!(turn(seconds(8), true), guard(9500), "the first of all");
    // For the watch silver's lease is over; the guard keeps it until the kernel has the fallback
    // share.
    assert_eq!(turn(Instant::from_nanos(9_250_000_000), false), guard(9500));
    assert_eq!(turn(Instant::from_nanos(9_300_000_000), true), guard(9500));
    assert_eq!(turn(Instant::from_nanos(9_400_000_000), true), guard(11_500));
}

#[test]
fn a_safe_share_is_in_the_file_before_a_part_is_said_to_be_in_force() {
    let machine = Machine::v2("io");
    let (mut watch, lender, path) = of_a_cluster(&machine);
    let changes = Locked::open(&path).unwrap();
    lender.lend(&writes(8 * MIB), &writes(MIB / 2), Some(now() + Duration::from_secs(5)));
    watch.turn(now());
    assert!(!lender.is_in_force(), "somebody changes the file");
    drop(changes);
    watch.turn(now());
    assert!(lender.is_in_force());
    let kept = Kept::load(&path).unwrap();
    assert_eq!(settling::settled(&machine.hierarchy(), &kept).unwrap()[0].2.bps, [None, Some(MIB / 2)]);
    assert!(max(&machine, "a").contains("wbps=8388608"), "{}", max(&machine, "a"));
}

#[test]
fn a_guard_that_would_end_before_what_is_limited_is_refused() {
    let machine = Machine::v2("io");
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
fn what_the_kernel_refuses_is_not_in_force_and_who_is_gone_needs_nothing() {
    let machine = Machine::v2("io");
    let (mut watch, lender, _) = of_a_cluster(&machine);
    let directory = machine.root().join("a");
    fs::remove_file(directory.join("io.max")).unwrap();
    fs::create_dir(directory.join("io.max")).unwrap();
    lender.lend(&writes(8 * MIB), &writes(MIB), Some(now() + Duration::from_secs(5)));
    watch.turn(now());
    assert!(!lender.is_in_force(), "io.max cannot be written");
    fs::remove_dir_all(&directory).unwrap();
    watch.turn(now() + Duration::from_secs(2));
    assert!(lender.is_in_force(), "it was removed");
}

#[test]
fn what_passes_in_a_clusters_group_is_said() {
    let machine = Machine::v2("io");
    let (mut watch, lender, _) = of_a_cluster(&machine);
    let begin = now() + Duration::from_secs(1);
    for step in 1..=20 {
        // Reading costs nothing here, because the time is virtual. All that the limit allows.
        written(&machine, "a", step * MIB / 10);
        let at = begin + Duration::from_millis(step * 100);
        watch.pace.look_s = 1e-9;
        watch.turn(at);
    }
    let doing = lender.doing().expect("it was looked at");
    assert!(doing.stats.writes.bytes > MIB, "{:?}", doing.stats);
    assert_eq!(doing.weight, 100);
    assert_eq!(doing.stats.binding, Some(policy::throttle::LimitKind::BpsWrite));
    assert!(doing.stats.limited_ns > 1_000_000_000, "{:?}", doing.stats);
}

#[test]
fn a_clusters_group_has_no_other_limits_and_others_are_no_clusters() {
    let machine = Machine::v2("io");
    let (watch, lender, path) = of_a_cluster(&machine);
    let (a, b) = (machine.group("a"), machine.group("b"));
    let mut kept = Kept::load(&path).unwrap();
    let refused = |kept: &mut Kept, group, change: &Change| {
        let before = kept.clone();
        let error = kept.change(group, DISK, change).unwrap_err().to_string();
        assert_eq!(*kept, before);
        error
    };
    let error = refused(&mut kept, &a, &Change::of(&[("bps-write", MIB)]));
    assert!(error.contains("weir throttle gold --cluster"), "{error}");
    let other = Change { group: Some("other".to_owned()), cluster: true, ..Change::default() };
    let error = refused(&mut kept, &b, &other);
    assert!(error.contains("is no cluster's here"), "{error}");
    kept.publish(&BTreeMap::from([("gold".to_owned(), writes(3))]));
    let joins = Change { group: Some("gold".to_owned()), cluster: true, ..Change::default() };
    let error = refused(&mut kept, &b, &joins);
    assert!(error.contains("no less than 4 for 2 control groups"), "{error}");
    assert!(kept.remove(&a, DISK.0), "it leaves");
    kept.publish(&BTreeMap::new());
    assert!(kept.groups.is_empty(), "nobody is in it, and nobody lends");
    drop((watch, lender));
    let own = Change { group: Some("gold".to_owned()), ..Change::of(&[("bps-write", MIB)]) };
    kept.change(&a, DISK, &own).unwrap();
    fs::write(&path, serde_json::to_vec(&kept).unwrap()).unwrap();
    let store = Store::new(Some(&machine.path("state")));
    let mut watch = Watch::over(machine.hierarchy(), &path, store, None).unwrap();
    let error = watch.begin_to_lend(Lending::new(["gold"])).unwrap_err().to_string();
    assert!(error.contains("group gold has limits of its own"), "{error}");
}
