//! Output of real kernels, parsed; and a check that no input makes a parser panic.

use std::{
    path::{Path, PathBuf},
    sync::LazyLock,
};

use block::device::DeviceNumber;
use policy::steering::IoMaxRates;
use proptest::{collection::vec, prelude::*};

use super::{
    UnknownFormat, blkio, fuzzing, io_latency, io_max, io_stat,
    io_stat::CgroupIoUsage,
    memory_stat, mountinfo, number, pressure,
    pressure::{IoPressure, PressureStall},
    proc_cgroup, proc_io,
    proc_io::TaskIo,
    proc_stat,
    proc_stat::TaskStat,
    weight,
};

macro_rules! sample {
    ($name:literal) => {
        include_str!(concat!("samples/", $name))
    };
}

static SAMPLES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernel/samples");
    let files = std::fs::read_dir(directory).expect("there").map(|entry| entry.expect("read").path());
    let mut files: Vec<PathBuf> = files.filter(|file| !file.ends_with("README.md")).collect();
    files.sort();
    files.iter().map(|file| std::fs::read_to_string(file).expect("text")).collect()
});

fn n(major: u64, minor: u64) -> DeviceNumber {
    DeviceNumber { major, minor }
}

/// Counters in the order of [`CgroupIoUsage`]'s fields.
fn usage([read_bytes, written_bytes, reads, writes, discarded_bytes, discards]: [u64; 6]) -> CgroupIoUsage {
    CgroupIoUsage { read_bytes, written_bytes, reads, writes, discarded_bytes, discards }
}

/// Rates in the order in which the kernel prints them.
fn rates([read_bps, write_bps, read_iops, write_iops]: [Option<u64>; 4]) -> IoMaxRates {
    IoMaxRates { bps: [read_bps, write_bps], iops: [read_iops, write_iops] }
}

#[track_caller]
fn check_stat(text: &str, expect: &[(DeviceNumber, [u64; 6])]) {
    let expect: Vec<_> = expect.iter().map(|(device, totals)| (*device, usage(*totals))).collect();
    assert_eq!(io_stat::parse(text), Ok(expect.clone()));
    for (device, usage) in expect {
        assert_eq!(io_stat::find(text, device), Ok(Some(usage)));
    }
    assert_eq!(io_stat::find(text, n(1, 2)), Ok(None));
}

#[test]
fn io_stat_of_every_kernel_is_read() {
    check_stat(
        sample!("io_stat-4.4"),
        &[
            (n(8, 16), [1_459_200, 314_773_504, 192, 353, 0, 0]),
            (n(8, 0), [90_430_464, 299_008_000, 8_950, 1_252, 0, 0]),
        ],
    );
    check_stat(
        sample!("io_stat-4.19-latency"),
        &[
            (n(8, 0), [586_723_328, 99_248_033_792, 143_243, 331_782, 0, 0]),
            (n(8, 16), [0, 4_096, 0, 1, 0, 0]),
            (n(8, 32), [4_096, 0, 1, 0, 8_192, 2]),
        ],
    );
    check_stat(
        sample!("io_stat-5.4"),
        &[
            (n(259, 0), [3_067_904, 1_048_576, 161, 18, 4_194_304, 2]),
            (n(253, 0), [3_067_904, 1_048_576, 161, 18, 4_194_304, 2]),
            (n(253, 1_048_575), [1, 2, 3, 4, 5, 6]),
        ],
    );
    check_stat(
        sample!("io_stat-5.10-cost"),
        &[
            (n(254, 1), [6_901_432_320, 14_245_535_744, 263_278, 248_603, 14_633_861_120, 3_390]),
            (
                n(259, 0),
                [4_085_926_524_416, 1_036_680_064_512, 185_034_771, 40_358_485, 1_013_982_564_352, 199_959],
            ),
        ],
    );
    check_stat(sample!("io_stat-6.12"), &[(n(254, 0), [87_040, 2_359_296, 25, 33, 55_008_256, 10])]);
    check_stat(sample!("io_stat-6.12-cost"), &[(n(254, 0), [105_472, 2_641_920, 34, 47, 55_008_256, 10])]);
    check_stat("", &[]);
}

#[test]
fn device_without_keys_has_zero_counters() {
    check_stat(
        sample!("io_stat-5.15-joined"),
        &[
            (n(8, 32), [999_678_391_296, 198_034_948_096, 3_100_795, 1_051_435, 0, 0]),
            (n(7, 7), [0; 6]),
            (n(7, 6), [0; 6]),
            (n(7, 5), [0; 6]),
            (n(7, 4), [28_672, 0, 22, 0, 0, 0]),
            (n(253, 10), [0; 6]),
            (n(253, 5), [0, 0, 0, 1, 0, 0]),
            (n(252, 0), [0; 6]),
        ],
    );
    check_stat(
        sample!("io_stat-6.1-bare"),
        &[(n(7, 1), [0; 6]), (n(7, 0), [0; 6]), (n(8, 0), [8_192, 4_096, 2, 1, 0, 0])],
    );
}

#[test]
fn nameless_devices_and_scheduler_counters_are_skipped() {
    check_stat(sample!("io_stat-6.6-nameless"), &[(n(259, 3), [4_096, 8_192, 1, 2, 0, 0])]);
    check_stat(
        sample!("io_stat-android-5.10-deadline"),
        &[(n(11, 2), [0, 0, 3, 0, 0, 0]), (n(8, 32), [2_142_720, 0, 105, 0, 0, 0])],
    );
}

#[test]
fn unknown_io_stat_is_rejected_with_its_line() {
    let broken = "8:0 rbytes=1\n8:16 rbytes=many\n";
    let unknown = io_stat::parse(broken).expect_err("not a number");
    assert_eq!(unknown, UnknownFormat { what: "io.stat", line: "8:16 rbytes=many".to_owned() });
    assert_eq!(
        unknown.to_string(),
        "io.stat: unknown line format: \"8:16 rbytes=many\" (this kernel's io.stat is not \
         supported)"
    );
    assert_eq!(
        io_stat::find(broken, n(8, 0)),
        Ok(Some(usage([1, 0, 0, 0, 0, 0]))),
        "further lines are ignored"
    );
    assert!(io_stat::find(broken, n(8, 16)).is_err());
    for broken in [
        "rbytes=1",
        "8:0 rbytes=",
        "8:0 rbytes=-1",
        "8:0 rbytes=18446744073709551616",
        "sda rbytes=1",
        "8: rbytes=1",
    ] {
        assert!(io_stat::parse(broken).is_err(), "{broken}");
    }
    let long = io_stat::parse(&"x".repeat(1_000_000)).expect_err("no device");
    assert_eq!(long.line.chars().count(), 121);
}

#[test]
fn totals_that_fall_have_no_growth() {
    let (before, after) = (usage([10, 20, 3, 4, 5, 6]), usage([11, 22, 6, 8, 10, 12]));
    assert_eq!(after.since(&before), Some(usage([1, 2, 3, 4, 5, 6])));
    assert_eq!(before.since(&after), None);
    let less_written = usage([11, 19, 6, 8, 10, 12]);
    assert_eq!(less_written.since(&before), None, "nor have the totals beside it");
}

#[test]
fn io_max_of_every_kernel_is_read_and_written() {
    assert_eq!(
        io_max::parse(sample!("io_max-4.5")),
        Ok(vec![
            (n(8, 16), rates([Some(2_097_152), None, None, Some(120)])),
            (n(8, 0), rates([None, Some(u64::MAX), Some(4_294_967_294), None])),
        ])
    );
    assert_eq!(
        io_max::parse(sample!("io_max-4.11-low")),
        Ok(vec![(n(8, 0), rates([Some(1_048_576), None, None, None]))])
    );
    let limits = rates([None, Some(10_485_760), Some(500), None]);
    assert_eq!(io_max::parse(sample!("io_max-6.12")), Ok(vec![(n(254, 0), limits)]));
    assert_eq!(
        io_max::line(limits, n(254, 0)) + "\n",
        sample!("io_max-6.12"),
        "the file returns the written value"
    );
    assert_eq!(io_max::line(IoMaxRates::NONE, n(8, 0)), "8:0 rbps=max wbps=max riops=max wiops=max");
    assert_eq!(io_max::parse(""), Ok(Vec::new()));
    for broken in ["8:0 rbps=none", "8:0 rbps=1.5", "default rbps=1"] {
        assert!(io_max::parse(broken).is_err(), "{broken}");
    }
}

#[test]
fn io_latency_targets_are_parsed() {
    let text = "8:0 target=75000\n254:16 target=100\n";
    assert_eq!(io_latency::targets(text), Ok(vec![(n(8, 0), 75_000), (n(254, 16), 100)]));
    assert!(io_latency::targets("8:0 target=soon\n").is_err());
}

#[test]
fn memory_stat_has_dirty_and_writeback_pages() {
    let of_6_18 = sample!("memory_stat-6.18");
    let waiting = memory_stat::parse(of_6_18).unwrap();
    assert_eq!((waiting.dirty, waiting.writeback), (1_114_112, 40_960));
    assert_eq!(waiting.total(), 1_155_072);
    assert_eq!(
        memory_stat::parse("cache 4096\nrss 0\n"),
        Ok(memory_stat::DirtyBytes::default()),
        "cgroup v1"
    );
    assert_eq!(memory_stat::parse("file_dirty lots\n").unwrap_err().line, "file_dirty lots");
}

#[test]
fn pressure_is_read_with_and_without_full() {
    let some = PressureStall { avg10: 0.0, avg60: 0.31, avg300: 1.2, total_us: 11_182_186_648 };
    let full = Some(PressureStall { avg10: 0.0, avg60: 0.1, avg300: 0.9, total_us: 4_346_621_964 });
    assert_eq!(pressure::parse(sample!("pressure-4.20")), Ok(IoPressure { some, full }));
    let some = PressureStall { avg10: 0.41, avg60: 0.9, avg300: 1.01, total_us: 11_188_070_938 };
    let full = Some(PressureStall { avg10: 0.36, avg60: 0.62, avg300: 0.56, total_us: 4_347_963_221 });
    assert_eq!(pressure::parse(sample!("pressure-6.18")), Ok(IoPressure { some, full }));
    let some = PressureStall { avg10: 12.34, avg60: 99.99, avg300: 100.0, total_us: 1 };
    assert_eq!(pressure::parse(sample!("pressure-5.4-cpu")), Ok(IoPressure { some, full: None }));
}

#[test]
fn unknown_pressure_is_rejected() {
    let full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
    for broken in
        ["", full, "some\n", "some avg10=0.00\n", &full.replace("full", "some").replace("0.00", "nan")]
    {
        assert!(pressure::parse(broken).is_err(), "{broken}");
    }
    let more = format!("{}other x=1\n", full.replace("full", "some").replace(" total", " avg900=1.00 total"));
    assert!(pressure::parse(&more).is_ok(), "keys and lines may be added");
}

#[test]
fn mountinfo_escapes_and_optional_fields_parse() {
    let mounts = mountinfo::parse(sample!("mountinfo-5.15-v2")).expect("known");
    let at = |point: &str| mounts.iter().find(|mount| mount.point == Path::new(point)).expect("mounted");
    let home = at("/home");
    assert_eq!(
        (home.number, home.root.as_path(), home.kind.as_str()),
        (n(0, 44), Path::new("/@home"), "btrfs")
    );
    assert_eq!((home.source.as_str(), home.options.as_str()), ("/dev/mapper/data", "rw,relatime"));
    assert_eq!(home.super_options, "rw,ssd,subvolid=257,subvol=/@home");
    assert_eq!(at("/mnt/with a\ttab\nand\\more#").source, "host:/a b");
    assert_eq!((at("/mnt/odd").source.as_str(), at("/mnt/odd").super_options.as_str()), ("", "rw,size=4k"));
    assert_eq!(at("/run/docker/netns/default").root, Path::new("net:[4026532008]"));
    let overlay = at("/var/lib/docker/overlay2/209d/merged");
    assert_eq!(overlay.option("upperdir"), Some(PathBuf::from("/var/lib/docker/a,b/diff")));
    assert_eq!((overlay.option("rw"), overlay.option("upper")), (Some(PathBuf::new()), None));
    let guest = mountinfo::parse(sample!("mountinfo-6.12")).expect("known");
    assert_eq!((guest[2].number, guest[2].point.as_path()), (n(254, 0), Path::new("/tmp/my mount")));
    for broken in
        ["1 2 8:0 / / rw ext4 /dev/sda rw", "1 2 8:0 / / rw - ext4", "1 2 sda / / rw - ext4 x y", "\n"]
    {
        assert!(mountinfo::parse(broken).is_err(), "{broken}");
    }
}

#[test]
fn path_belongs_to_the_innermost_and_latest_mount() {
    let text = "1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / /srv rw - ext4 b rw\n3 1 8:3 / /srv rw - ext4 c rw\n";
    let mounts = mountinfo::parse(text).expect("known");
    let source =
        |path: &str| mountinfo::mount_containing(&mounts, Path::new(path)).map(|mount| mount.source.as_str());
    assert_eq!((source("/srv/x"), source("/srvx"), source("relative")), (Some("c"), Some("a"), None));
}

#[test]
fn memberships_are_read() {
    #[track_caller]
    fn check(text: &str, expect: &[(u32, &[&str], &str)]) {
        let expect: Vec<_> = expect
            .iter()
            .map(|&(hierarchy, controllers, path)| proc_cgroup::CgroupMembership {
                hierarchy,
                controllers: controllers.iter().map(|&name| name.to_owned()).collect(),
                path: path.into(),
            })
            .collect();
        assert_eq!(proc_cgroup::parse(text), Ok(expect));
    }
    check(
        sample!("proc_cgroup-3.10"),
        &[
            (11, &["hugetlb"], "/"),
            (10, &["perf_event"], "/"),
            (9, &["blkio"], "/system.slice/sshd.service"),
            (8, &["net_prio", "net_cls"], "/"),
            (5, &["cpuacct", "cpu"], "/system.slice/sshd.service"),
            (1, &["name=systemd"], "/system.slice/sshd.service"),
        ],
    );
    let container = "/docker/4426af4f45ae09720a1e50f220d19db5b71cfe897480d860f0bc761d7f4be69d";
    check(
        sample!("proc_cgroup-4.19-hybrid"),
        &[
            (12, &["blkio"], container),
            (7, &["net_cls", "net_prio"], "/"),
            (1, &["name=systemd"], container),
            (0, &[], "/system.slice/containerd.service"),
        ],
    );
    check(
        sample!("proc_cgroup-6.1-colons"),
        &[(0, &[], "/user.slice/user@1000.service/app.slice/a:b=c,d.scope")],
    );
    check(sample!("proc_cgroup-6.1-outside"), &[(0, &[], "/../../system.slice/ssh.service")]);
    check(sample!("proc_cgroup-6.1-deleted"), &[(0, &[], "/system.slice/gone.service (deleted)")]);
    let recorded = proc_cgroup::parse(sample!("proc_cgroup-6.18")).expect("known");
    assert_eq!((recorded.len(), recorded[2].path.as_path()), (10, Path::new("/weir-record")));
    for broken in ["0:", "0::", "x::/", "0::relative", ":/", "\n"] {
        assert!(proc_cgroup::parse(broken).is_err(), "{broken}");
    }
}

#[test]
fn process_io_counters_are_parsed() {
    let expect = TaskIo {
        rchar: 2_444_739,
        wchar: 2_441_576,
        syscr: 71,
        syscw: 65,
        read_bytes: 87_040,
        write_bytes: 2_359_296,
        cancelled_write_bytes: 0,
    };
    assert_eq!(proc_io::parse(sample!("proc_io-6.12")), Ok(expect));
    let expect = TaskIo { rchar: 1, cancelled_write_bytes: 2, ..TaskIo::default() };
    assert_eq!(proc_io::parse("rchar: 1\nnew: what\ncancelled_write_bytes: 2\n"), Ok(expect));
    for broken in ["", "\n", "rchar 1", "rchar: ", "rchar: -1"] {
        assert!(proc_io::parse(broken).is_err(), "{broken}");
    }
}

#[test]
fn task_name_may_resemble_later_fields() {
    let task = |pid, name: &str, state, parent, start_ticks, blkio_delay_ticks| TaskStat {
        pid,
        name: name.to_owned(),
        state,
        parent,
        start_ticks,
        blkio_delay_ticks,
    };
    assert_eq!(proc_stat::parse(sample!("proc_stat-3.10")), Ok(task(1193, "a) (b", 'D', 1, 1_287, 4_711)));
    let worker = task(10_807, "kworker/u16:2+events_unbound", 'I', 2, 7_390_134, 0);
    assert_eq!(proc_stat::parse(sample!("proc_stat-5.15-kworker")), Ok(worker));
    assert_eq!(proc_stat::parse(sample!("proc_stat-6.12")), Ok(task(174, "cat", 'R', 166, 865, 0)));
    let nameless = sample!("proc_stat-6.12").replace("(cat)", "() R 1 ()");
    assert_eq!(proc_stat::parse(&nameless), Ok(task(174, ") R 1 (", 'R', 166, 865, 0)));
    for broken in ["", "174 (cat", "174 (cat) R 166", "x (cat) R 1", "174 (cat) RR 166"] {
        assert!(proc_stat::parse(broken).is_err(), "{broken}");
    }
}

#[test]
fn totals_of_version_1_are_read() {
    assert_eq!(
        blkio::usage(sample!("blkio-3.10-bytes"), "Total 0\n"),
        Ok(vec![
            (n(8, 0), usage([5_246_572_032, 2_361_737_216, 0, 0, 0, 0])),
            (n(8, 16), usage([4_223_325_184, 3_207_528_448, 0, 0, 0, 0])),
        ])
    );
    let (bytes, operations) = (sample!("blkio-6.18-bytes"), sample!("blkio-6.18-operations"));
    let expect = usage([413_696, 4_194_304, 101, 64, 0, 0]);
    assert_eq!(blkio::usage(bytes, operations), Ok(vec![(n(254, 0), expect)]));
    assert_eq!(blkio::find(bytes, operations, n(254, 0)), Ok(Some(expect)));
    assert_eq!(blkio::find(bytes, operations, n(8, 0)), Ok(None));
    let nameless = sample!("blkio-6.8-nameless");
    assert_eq!(blkio::usage(nameless, ""), Ok(vec![(n(259, 1), usage([4_096, 0, 0, 0, 512, 0]))]));
    for broken in ["8:0 Read", "8:0 Read x", "8:0 Read 1 2", "sda Read 1", "Total", "Total x"] {
        assert!(blkio::usage(broken, "").is_err() && blkio::find("", broken, n(8, 0)).is_err(), "{broken}");
    }
}

#[test]
fn limits_of_version_1_are_read() {
    let limits = |file: usize, text| blkio::limits(blkio::LIMITS[file], text);
    let write_bps = rates([None, Some(104_857_600), None, None]);
    assert_eq!(limits(1, sample!("blkio-6.18-limit")), Ok(vec![(n(254, 0), write_bps)]));
    let read_iops = rates([None, None, Some(20_971_520), None]);
    let old = vec![(n(8, 0), read_iops), (n(253, 9), read_iops)];
    assert_eq!(limits(2, sample!("blkio-2.6.32-limit")), Ok(old));
    assert_eq!(limits(0, ""), Ok(Vec::new()));
    for broken in ["8:0", "8:0 max", "8:0 1 2", "default 1"] {
        assert!(limits(0, broken).is_err(), "{broken}");
    }
}

#[test]
fn weights_are_read() {
    let bfq = weight::weights(sample!("weight-4.19-bfq")).expect("known");
    assert_eq!((bfq.default, bfq.on(n(8, 0))), (Some(100), Some(100)));
    let cost = weight::weights(sample!("weight-6.12")).expect("known");
    assert_eq!((cost.on(n(8, 0)), cost.on(n(254, 0))), (Some(200), Some(300)));
    assert_eq!(weight::weights("").expect("known").on(n(8, 0)), None);
    for broken in ["default", "default x", "8:0 x", "x", "8:0", "default 1 2"] {
        assert!(weight::weights(broken).is_err(), "{broken}");
    }
}

#[test]
fn weight_mechanisms_are_parsed() {
    assert_eq!(weight::cost_enabled(sample!("cost_qos-6.12")), Ok(vec![(n(254, 0), true)]));
    assert_eq!(weight::cost_enabled(sample!("cost_qos-5.4-off")), Ok(vec![(n(8, 16), false)]));
    assert_eq!(weight::cost_enabled(""), Ok(Vec::new()));
    assert!(weight::cost_enabled("8:0 enable=auto").is_err());
    assert_eq!(weight::scheduler(sample!("scheduler-3.10")), Ok(Some("cfq")));
    assert_eq!(weight::scheduler(sample!("scheduler-5.4-bypassed")), Ok(Some("none")));
    assert_eq!(weight::scheduler(sample!("scheduler-6.18")), Ok(Some("mq-deadline")));
    assert_eq!(weight::scheduler("\n"), Ok(None));
    assert!(weight::scheduler("none kyber").is_err());
}

#[test]
fn device_number_has_digits_only() {
    assert_eq!(number("259:1048575"), Some(n(259, 1_048_575)));
    for broken in
        ["", ":", "8:", ":0", "8", "8:0:1", "+8:0", "8:-1", " 8:0", "8:0 ", "8:99999999999999999999"]
    {
        assert_eq!(number(broken), None, "{broken:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn parsers_do_not_panic_on_any_text(data in vec(any::<u8>(), 0..300)) {
        fuzzing::kernel_files(&data);
    }

    #[test]
    fn parsers_do_not_panic_on_mutated_samples(
        which in 0..SAMPLES.len(),
        other in 0..SAMPLES.len(),
        cut in any::<prop::sample::Index>(),
        changes in vec((any::<prop::sample::Index>(), prop::sample::select(&b" \n:=0-9()[]/\\,aT\xff"[..])), 0..6),
    ) {
        let mut bytes = SAMPLES[which].as_bytes().to_vec();
        bytes.truncate(cut.index(bytes.len() + 1).max(1));
        bytes.extend_from_slice(SAMPLES[other].as_bytes());
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        fuzzing::kernel_files(&bytes);
    }
}
