//! Machines with one problem each, and the findings that `explain` must report.

use std::path::Path;

use Cause::*;
use Coverage::{Escapes, Partly, Unlimited};

use super::{
    super::{
        findings::{self, Cause, Coverage, CoverageFinding, Io},
        json, text,
        verdict::Verdict,
    },
    machine::{DATA, DIRECT, ExplainMachine, LIMITS, READ, SYNC, WRITE},
};

/// A machine, and every failure expected for `/app`, in any order.
struct ExplainCase {
    title: &'static str,
    machine: ExplainMachine,
    alarms: Vec<(Coverage, Cause)>,
}

fn case(
    title: &'static str,
    alarms: &[(Coverage, Cause)],
    set_up: impl FnOnce(&mut ExplainMachine) -> &mut ExplainMachine,
) -> ExplainCase {
    on(ExplainMachine::new(), title, alarms, set_up)
}

fn on(
    mut machine: ExplainMachine,
    title: &'static str,
    alarms: &[(Coverage, Cause)],
    set_up: impl FnOnce(&mut ExplainMachine) -> &mut ExplainMachine,
) -> ExplainCase {
    set_up(&mut machine);
    ExplainCase { title, machine, alarms: alarms.to_vec() }
}

/// Limits of `/app` in weir's file; the kernel has none.
const LIFTED: &str = r#"{"limits": [{"cgroup": "/app", "device": "254:0", "device-key": "number 254:0, 1048576 bytes", "own":
    {"limits": {"bps-read": 4000000, "bps-write": 4000000}, "watermark": 90}}]}"#;

fn of_cgroups() -> Vec<ExplainCase> {
    vec![
        case("healthy", &[], |m| {
            m.dd().opens(100, "/data/in", DATA, READ).opens(100, "/data/direct", DATA, 2 | DIRECT)
        }),
        case("a watermark that lifts the limit for now", &[], |m| {
            m.write("cgroup/app/io.max", "").write(LIMITS, LIFTED).watched();
            m.dd().opens(100, "/data/in", DATA, READ)
        }),
        case("the same, and no watch applies it again", &[(Escapes, NoLimit)], |m| {
            m.write("cgroup/app/io.max", "").write(LIMITS, LIFTED).dd()
        }),
        on(
            ExplainMachine::version_one(),
            "a limit of version 1 and a buffered dd",
            &[(Escapes, VersionOne)],
            |m| m.dd(),
        ),
        on(ExplainMachine::version_one(), "version 1, but past the page cache", &[], |m| {
            m.dd_in("/app", WRITE | DIRECT)
        }),
        on(ExplainMachine::version_one(), "version 1, but waiting for each write", &[], |m| {
            m.dd_in("/app", WRITE | SYNC)
        }),
        on(
            ExplainMachine::version_one(),
            "version 1, a cgroup below the limit",
            &[(Escapes, NotInherited)],
            |m| m.group_one("/app/in", "").dd_in("/app/in", WRITE | DIRECT),
        ),
        case("memory in version 1, io in version 2", &[(Escapes, MemoryInVersionOne)], |m| {
            m.group("/", "cpu io", "cpu io").group("/app", "io", "");
            m.write("cgroup/app/io.max", "254:0 wbps=4000000\n").memory_in_version_one().dd()
        }),
        case("no memory controller", &[(Escapes, NoMemoryController)], |m| {
            m.group("/", "cpu io", "cpu io").group("/app", "io", "");
            m.write("cgroup/app/io.max", "254:0 wbps=4000000\n").dd()
        }),
        case("memory not enabled, which the kernel does unseen", &[], |m| {
            m.group("/app", "io", "").write("cgroup/app/io.max", "254:0 wbps=4000000\n").dd()
        }),
        case("io not enabled at a level", &[(Escapes, IoNotEnabled)], |m| {
            m.group("/", "cpu io memory", "cpu memory")
                .group("/app", "memory", "")
                .remove("cgroup/app/io.max")
                .dd()
        }),
        case("io not enabled, but limited above", &[], |m| {
            m.group("/app", "io memory", "memory").group("/app/in", "memory", "");
            m.write("cgroup/app/io.max", "254:0 wbps=4000000\n");
            m.dd_in("/app/in", WRITE)
        }),
        case("a threaded cgroup", &[(Escapes, IoNotEnabled)], |m| {
            m.group("/app", "cpu", "")
                .remove("cgroup/app/io.max")
                .write("cgroup/app/cgroup.type", "threaded\n")
                .dd()
        }),
        case("a kernel without limits", &[(Escapes, NoThrottling)], |m| m.remove("cgroup/app/io.max").dd()),
        case("no limit at all", &[(Escapes, NoLimit)], |m| m.write("cgroup/app/io.max", "").dd()),
        on(
            ExplainMachine::version_one(),
            "no limit, and none would be kept",
            &[(Escapes, VersionOne), (Escapes, NoLimit)],
            |m| m.group_one("/app", "").dd(),
        ),
        case("the limit of a cgroup above", &[], |m| {
            m.group("/app", "io memory", "io memory").group("/app/in", "io memory", "");
            m.write("cgroup/app/io.max", "254:0 wbps=4000000\n");
            m.dd_in("/app/in", WRITE)
        }),
    ]
}

fn of_file_systems() -> Vec<ExplainCase> {
    let mounted = |what,
                   alarms: &[(Coverage, Cause)],
                   kind: &'static str,
                   source: &'static str,
                   number: &'static str| {
        case(what, alarms, move |m| m.mount(DATA, number, "/data", kind, source, "rw").dd())
    };
    vec![
        mounted("vfat", &[(Escapes, NoCgroupWriteback)], "vfat", "/dev/vda", "254:0"),
        mounted("XFS", &[], "xfs", "/dev/vda", "254:0"),
        mounted("f2fs", &[], "f2fs", "/dev/vda", "254:0"),
        mounted("Btrfs, which has no number of its own", &[], "btrfs", "/dev/vda", "0:44"),
        mounted("NFS", &[(Escapes, NetworkFileSystem)], "nfs4", "server:/export", "0:50"),
        mounted("FUSE", &[(Escapes, Fuse)], "fuse.sshfs", "me@server:", "0:51"),
        mounted("a disk behind FUSE", &[(Escapes, Fuse)], "fuseblk", "/dev/vda", "254:0"),
        mounted("ZFS", &[(Escapes, Zfs)], "zfs", "tank/data", "0:52"),
        mounted("tmpfs", &[], "tmpfs", "tmpfs", "0:53"),
        case("XFS before 5.3", &[(Escapes, NoCgroupWriteback)], |m| {
            m.release("4.19.0-8-amd64").mount(DATA, "254:0", "/data", "xfs", "/dev/vda", "rw").dd()
        }),
        case("ext4 that journals data, direct and buffered", &[(Escapes, DataJournal)], |m| {
            m.mount(DATA, "254:0", "/data", "ext4", "/dev/vda", "rw,data=journal").dd().opens(
                100,
                "/data/direct",
                DATA,
                WRITE | DIRECT,
            )
        }),
        case("a file that two cgroups write to", &[(Partly, SeveralCgroups)], |m| {
            m.group("/other", "io memory", "")
                .process(200, "dd", "/other")
                .opens(200, "/data/out", DATA, WRITE)
                .dd()
        }),
        case(
            "a file that was there before, whose writes others are charged with",
            &[(Partly, EarlierOwner)],
            |m| m.dd_to_an_old_file(100 << 20, 2 << 20),
        ),
        case("a file that was there before, and is charged to the cgroup", &[], |m| {
            m.dd_to_an_old_file(100 << 20, 98 << 20)
        }),
        case("a directory that two cgroups see under different names", &[(Partly, SeveralCgroups)], |m| {
            m.mount(41, "254:0", "/volume", "ext4", "/dev/vda", "rw").group("/other", "io memory", "");
            m.process(200, "dd", "/other").opens_inode(200, "/volume/out", 41, WRITE, 77);
            m.process(100, "dd", "/app").opens_inode(100, "/data/out", DATA, WRITE, 77)
        }),
        case("a file that another cgroup reads", &[], |m| {
            m.group("/other", "io memory", "")
                .process(200, "cat", "/other")
                .opens(200, "/data/out", DATA, READ)
                .dd()
        }),
        case("an overlay on vfat", &[(Escapes, NoCgroupWriteback)], |m| {
            m.mount(DATA, "254:0", "/data", "vfat", "/dev/vda", "rw");
            let options = "rw,lowerdir=/data/low,upperdir=/data/up,workdir=/data/work";
            m.mount(41, "0:60", "/merged", "overlay", "overlay", options).process(100, "dd", "/app");
            m.opens(100, "/merged/out", 41, WRITE)
        }),
        case("a mapping that is written to, on vfat", &[(Escapes, NoCgroupWriteback)], |m| {
            m.mount(DATA, "254:0", "/data", "vfat", "/dev/vda", "rw").process(100, "db", "/app");
            m.write("proc/100/maps", "7f00-7f01 rw-s 00000000 fe:00 131 /data/map\n")
        }),
    ]
}

fn of_disks() -> Vec<ExplainCase> {
    vec![
        case("the limit is on another disk", &[(Escapes, OtherDisk)], |m| {
            m.disk("254:16", "vdb").write("cgroup/app/io.max", "254:16 wbps=4000000\n").dd()
        }),
        case("two disks, one of them limited", &[], |m| {
            m.disk("254:16", "vdb").mount(41, "254:16", "/log", "ext4", "/dev/vdb", "rw").dd();
            m.opens(100, "/log/out", 41, WRITE)
        }),
        case("a disk made of the limited one", &[], |m| m.stacked("dm-0", "dm/uuid", "LVM-abc\n").dd()),
        case("the same before it was mended", &[(Escapes, MapperWriteback)], |m| {
            m.release("6.12.74").stacked("dm-0", "dm/uuid", "LVM-abc\n").dd()
        }),
        case("the same before it was broken", &[], |m| {
            m.release("5.15.0-91-generic").stacked("dm-0", "dm/uuid", "LVM-abc\n").dd()
        }),
        case("the same, past the page cache", &[], |m| {
            m.release("6.12.74").stacked("dm-0", "dm/uuid", "LVM-abc\n").process(100, "dd", "/app");
            m.opens(100, "/data/out", DATA, WRITE | DIRECT)
        }),
        case("an encrypted disk on the limited one", &[], |m| {
            m.stacked("dm-0", "dm/uuid", "CRYPT-LUKS2-abc\n").dd()
        }),
        case("the same before Linux 7.0", &[(Escapes, CryptThreads)], |m| {
            m.release("6.19.0").stacked("dm-0", "dm/uuid", "CRYPT-LUKS2-abc\n").dd()
        }),
        case("a RAID 5 of the limited one", &[(Escapes, RaidThreads)], |m| {
            m.stacked("md0", "md/level", "raid5\n").dd()
        }),
        case("LVM's RAID of the limited one", &[(Partly, RaidThreads)], |m| {
            m.disk("253:1", "dm-1").made_of("dm-1", "vda").write("sys/devices/dm-1/dm/uuid", "LVM-b\n");
            m.write("sys/devices/dm-1/dm/name", "vg-lv_rimage_0\n");
            m.disk("253:0", "dm-0").made_of("dm-0", "dm-1").write("sys/devices/dm-0/dm/uuid", "LVM-a\n");
            m.mount(DATA, "253:0", "/data", "ext4", "/dev/mapper/vg-lv", "rw").dd()
        }),
        case("a RAID 1 of the limited one", &[], |m| m.stacked("md0", "md/level", "raid1\n").dd()),
        case("the limit is on a disk above", &[(Escapes, LimitAbove)], |m| {
            m.disk("253:0", "dm-0").made_of("dm-0", "vda").write("sys/devices/dm-0/dm/uuid", "LVM-abc\n");
            m.write("cgroup/app/io.max", "253:0 wbps=4000000\n").dd()
        }),
        case("a loop device on the limited disk", &[(Partly, BufferedLoop)], |m| m.loop_device("0").dd()),
        case("a direct loop device on the limited disk", &[], |m| m.loop_device("1").dd()),
        case("a loop device before 5.14", &[(Escapes, OldLoop)], |m| {
            m.loop_device("0").release("5.10.0").dd()
        }),
        case("a direct loop device before 5.14", &[], |m| m.loop_device("1").release("5.10.0").dd()),
        case("a loop device on vfat", &[(Escapes, BufferedLoop)], |m| {
            m.mount(43, "254:0", "/images", "vfat", "/dev/vda", "rw").loop_device("0").dd()
        }),
        case("a partition of the limited disk", &[], |m| {
            m.disk("254:1", "vda/vda1").mount(DATA, "254:1", "/data", "ext4", "/dev/vda1", "rw").dd()
        }),
        case("the disk itself, through the page cache", &[], |m| {
            m.process(100, "dd", "/app").opens(100, "/dev/vda", 24, WRITE)
        }),
        on(ExplainMachine::version_one(), "the same in version 1", &[(Escapes, VersionOne)], |m| {
            m.process(100, "dd", "/app").opens(100, "/dev/vda", 24, WRITE)
        }),
        case("swapping to the limited disk", &[], |m| m.dd().swaps("/dev/vda")),
        case("swapping to another", &[(Escapes, SwapElsewhere)], |m| {
            m.dd().disk("254:16", "vdb").swaps("/dev/vdb")
        }),
        on(ExplainMachine::version_one(), "swapping in version 1", &[(Escapes, SwapNotCharged)], |m| {
            m.process(100, "db", "/app").opens(100, "/data/db", DATA, 2 | DIRECT).swaps("/dev/vda")
        }),
        case("nothing swapped", &[], |m| {
            m.dd()
                .disk("254:16", "vdb")
                .write("proc/swaps", "Filename Type Size Used Priority\n/dev/vdb partition 9 0 -2\n")
        }),
        case("a limit for writes alone, and reads", &[], |m| {
            m.write("cgroup/app/io.max", "254:0 wbps=4000000\n").dd().opens(100, "/data/in", DATA, READ)
        }),
    ]
}

fn all() -> Vec<ExplainCase> {
    [of_cgroups(), of_file_systems(), of_disks()].into_iter().flatten().collect()
}

#[test]
fn every_case_names_its_cause_and_no_other() {
    let cases = all();
    assert!(cases.iter().filter(|case| !case.alarms.is_empty()).count() >= 15, "too few cases");
    let mut failures = Vec::new();
    for ExplainCase { title, mut machine, alarms } in cases {
        let found = machine.alarms();
        if found != alarms {
            failures.push(format!("{title}: {found:?} instead of {alarms:?}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn every_failure_has_evidence_and_a_remedy() {
    for ExplainCase { title, mut machine, .. } in all() {
        for finding in machine.explain().iter().filter(|finding| finding.coverage.is_failure()) {
            assert!(!finding.evidence.is_empty(), "{title}: {finding:?}");
            for evidence in &finding.evidence {
                assert!(Path::new(&evidence.file).exists(), "{title}: {evidence:?}");
                assert!(!evidence.value.is_empty(), "{title}: {evidence:?}");
            }
            assert!(finding.remedy.is_some(), "{title}: {finding:?}");
        }
    }
}

#[track_caller]
fn only(findings: &[CoverageFinding], cause: Cause) -> &CoverageFinding {
    let found: Vec<&CoverageFinding> = findings.iter().filter(|finding| finding.cause == cause).collect();
    assert_eq!(found.len(), 1, "{cause:?} in {findings:#?}");
    found[0]
}

#[test]
fn healthy_cgroup_is_fully_covered() {
    let mut machine = ExplainMachine::new();
    machine.dd().opens(100, "/data/in", DATA, READ).opens(100, "/data/direct", DATA, 2 | DIRECT);
    let findings = machine.explain();
    let covered = only(&findings, Covered);
    let ios: Vec<Io> = covered.ios().into_iter().collect();
    assert_eq!(ios, [Io::DirectReads, Io::DirectWrites, Io::Reads, Io::BufferedWrites]);
    assert_eq!(covered.location, "ext4 on /data (/dev/vda)");
    assert_eq!(Verdict::of(&findings), Verdict::Covered);
    let limit = &covered.evidence[0];
    assert!(limit.file.ends_with("cgroup/app/io.max"), "{limit:?}");
    assert_eq!(limit.value, "254:0 rbps=4000000 wbps=4000000 riops=max wiops=max");
}

#[test]
fn root_cgroup_is_reported() {
    let mut machine = ExplainMachine::new();
    machine.dd_in("/", WRITE);
    let findings = findings::find(&machine.facts("100"));
    assert_eq!(only(&findings, RootCgroup).coverage, Escapes);
    assert_eq!(Verdict::of(&findings), Verdict::NotLimited);
}

#[test]
fn the_level_that_keeps_a_controller_is_named() {
    let mut machine = ExplainMachine::new();
    machine
        .group("/a", "io memory", "memory")
        .group("/a/b", "memory", "memory")
        .group("/a/b/c", "memory", "");
    machine.dd_in("/a/b/c", WRITE);
    let findings = findings::find(&machine.facts("/a/b/c"));
    let finding = only(&findings, IoNotEnabled);
    assert_eq!(finding.explanation, "/a does not enable the io controller for its children");
    assert!(
        finding.evidence.iter().any(|evidence| evidence.file.ends_with("cgroup/a/cgroup.subtree_control"))
    );
}

#[test]
fn single_process_is_explained() {
    let mut machine = ExplainMachine::new();
    machine.dd().mount(41, "0:50", "/net", "nfs4", "server:/x", "rw");
    machine.process(101, "dd", "/app").opens(101, "/net/out", 41, WRITE);
    assert_eq!(machine.alarms(), [(Escapes, NetworkFileSystem)]);
    let alone = findings::find(&machine.facts("100"));
    assert!(alone.iter().all(|finding| !finding.coverage.is_failure()), "{alone:#?}");
}

#[test]
fn empty_cgroup_has_hypothetical_findings() {
    let mut machine = ExplainMachine::new();
    let findings = machine.explain();
    let covered = only(&findings, Covered);
    assert!(covered.acts.iter().all(|(pid, _)| pid.is_none()));
    assert_eq!(covered.ios().len(), 4);
    machine.mount(DATA, "254:0", "/data", "vfat", "/dev/vda", "rw");
    assert_eq!(machine.alarms(), [(Escapes, NoCgroupWriteback)]);
}

#[test]
fn notes_are_not_failures() {
    let mut machine = ExplainMachine::new();
    machine.disk("254:1", "vda/vda1").mount(DATA, "254:1", "/data", "ext4", "/dev/vda1", "rw");
    machine.write("cgroup/io.cost.qos", "254:0 enable=1 ctrl=auto\n");
    machine.write("cgroup/app/io.latency", "254:0 target=75000\n");
    machine.write("sys/devices/vda/queue/scheduler", "mq-deadline [bfq] none\n");
    machine.group("/app", "io memory", "io memory").group("/app/in", "io", "");
    machine.write("cgroup/app/io.max", "254:0 rbps=1000 wbps=1000\n7:9 wbps=1\n");
    machine.write("cgroup/app/in/io.max", "254:0 wbps=4000000 rbps=max\n");
    machine.dd().opens(100, "/data/in", DATA, READ);
    machine.process(2, "kthreadd", "/app");
    let mut findings = findings::find(&machine.facts("/app"));
    findings.extend(findings::find(&machine.facts("/app/in")));
    for cause in [
        Partition,
        JournalThread,
        PageCache,
        OtherControl,
        LowerAbove,
        DiskGone,
        KernelThread,
        MemoryNotEnabled,
        LatencyTarget,
    ] {
        let found = findings.iter().find(|finding| finding.cause == cause);
        let found = found.unwrap_or_else(|| panic!("{cause:?} in {findings:#?}"));
        assert_eq!(found.coverage, Coverage::Note, "{found:?}");
        assert!(!found.evidence.is_empty(), "{found:?}");
    }
    for control in ["io.cost", "BFQ"] {
        let is_note = |finding: &CoverageFinding| {
            finding.cause == OtherControl && finding.explanation.starts_with(control)
        };
        assert!(findings.iter().any(is_note), "{control} in {findings:#?}");
    }
}

#[test]
fn latency_target_of_a_sibling_is_a_note_without_a_limit() {
    let mut machine = ExplainMachine::new();
    machine.group("/db", "io memory", "").group("/app/in", "io memory", "").write("cgroup/app/io.max", "");
    machine.write("cgroup/db/io.latency", "254:0 target=5000\n");
    machine.write("cgroup/app/in/io.latency", "254:0 target=0\n");
    for subject in ["/app", "/app/in"] {
        let findings = findings::find(&machine.facts(subject));
        let note = only(&findings, SiblingLatencyTarget);
        assert_eq!(note.evidence[0].value, "254:0 target=5000", "{subject}");
        assert!(findings.iter().all(|finding| finding.cause != LatencyTarget), "{findings:#?}");
    }
    let findings = findings::find(&machine.facts("/db"));
    assert!(findings.iter().all(|finding| finding.cause != SiblingLatencyTarget), "{findings:#?}");
    assert_eq!(only(&findings, LatencyTarget).coverage, Coverage::Note);
    // A level is throttled for lower targets than its own only.
    let has_note = |machine: &mut ExplainMachine| {
        let findings = findings::find(&machine.facts("/app/in"));
        findings.iter().any(|finding| finding.cause == SiblingLatencyTarget)
    };
    for (own, is_noted) in [
        ("254:0 target=4000", false),
        ("254:0 target=5000", false),
        ("254:0 target=6000", true),
        ("254:16 target=4000", true),
    ] {
        machine.write("cgroup/app/io.latency", &format!("{own}\n"));
        assert_eq!(has_note(&mut machine), is_noted, "{own}");
    }
}

#[test]
fn dirty_pages_of_an_empty_cgroup_are_reported() {
    let mut machine = ExplainMachine::new();
    machine.write("cgroup/app/memory.stat", "anon 0\nfile_dirty 40960\nfile_writeback 0\n");
    let findings = machine.explain();
    assert_eq!(only(&findings, LeftDirty).evidence[0].value, "file_dirty 40960");
    machine.dd();
    assert!(machine.explain().iter().all(|finding| finding.cause != LeftDirty));
}

#[test]
fn unlimited_direction_is_reported() {
    let mut machine = ExplainMachine::new();
    machine.write("cgroup/app/io.max", "254:0 wbps=4000000\n").dd().opens(100, "/data/in", DATA, READ);
    let findings = machine.explain();
    assert_eq!(only(&findings, OtherDirection).coverage, Unlimited);
    assert_eq!(only(&findings, Covered).coverage, Coverage::Covered);
}

#[test]
fn unreadable_files_are_reported() {
    let mut machine = ExplainMachine::new();
    machine.dd();
    // A directory cannot be read as a file, not even by root.
    let maps = machine.path("proc/100/maps");
    std::fs::remove_file(&maps).unwrap();
    std::fs::create_dir(&maps).unwrap();
    let findings = machine.explain();
    assert!(only(&findings, NotSeen).evidence[0].file.ends_with("proc/100/maps"));
}

#[test]
fn text_begins_with_the_verdict() {
    let mut machine = ExplainMachine::version_one();
    machine.dd();
    let facts = machine.facts("/app");
    let findings = findings::find(&facts);
    let report = text::text(&facts, &findings);
    let lines: Vec<&str> = report.lines().collect();
    assert_eq!(lines[0], "/app (cgroup v1): the limit misses everything that was found");
    assert_eq!(lines[2], "/dev/vda (254:0): write 20M/s in /app");
    assert_eq!(lines[3], "  ESCAPES   buffered writes, ext4 on /data (/dev/vda) [version-1]");
    assert!(report.contains("\n            fix: use cgroup v2"), "{report}");
    assert!(report.contains("blkio.throttle.write_bps_device: 254:0 20971520\n"), "{report}");
    assert!(
        report.contains("100  dd    buffered writes  ext4 on /data (/dev/vda)  escapes: version-1\n"),
        "{report}"
    );
}

#[test]
fn json_has_the_same_findings() {
    let mut machine = ExplainMachine::version_one();
    machine.dd();
    let facts = machine.facts("/app");
    let report = serde_json::to_value(json::report(&facts, &findings::find(&facts))).unwrap();
    assert_eq!((report["verdict"].as_str(), report["version"].as_i64()), (Some("missed"), Some(1)));
    assert_eq!(report["limits"][0]["write-bps"], 20_971_520);
    let finding = &report["findings"][0];
    assert_eq!(
        (finding["cause"].as_str(), finding["coverage"].as_str()),
        (Some("version-1"), Some("escapes"))
    );
    assert_eq!(finding["io"][0]["io"], "buffered-writes");
    assert_eq!(finding["io"][0]["pid"], 100);
    assert!(finding["mend"].is_string() && finding["evidence"][0]["file"].is_string());
}

#[test]
fn a_name_cannot_move_the_cursor() {
    let mut machine = ExplainMachine::new();
    machine.process(100, "x\x1b[2J", "/app").opens(100, "/data/\x1b[2Jout", DATA, WRITE);
    let facts = machine.facts("/app");
    assert!(!text::text(&facts, &findings::find(&facts)).contains('\x1b'));
}
