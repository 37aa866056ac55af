//! `weir trace convert`: every written format is read by weir and by the program that defines it.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{Scratch, TestClient, WEIR, assert_contains, text, weir};

const REQUESTS: &str = "time_ns,disk,op,offset,length\n\
                        0,vm1,read,4096,8192\n\
                        2000000000,vm2,write,0,4096\n\
                        3000000000,vm1,write,1048576,65536\n";

fn convert(scratch: &Scratch, from: &str, to: &str) -> TestClient {
    let path = |name: &str| scratch.path(name);
    weir(&["trace", "convert", text(&path(from)), text(&path(to))])
}

#[test]
fn every_format_survives_a_round_trip() {
    let scratch = Scratch::new();
    fs::write(scratch.path("own.csv"), REQUESTS).unwrap();
    let all = ["recording", "fio-v2", "fio-v3", "blkparse", "msr", "alibaba", "spc", "mqsim", "weir"];
    for (format, ending) in all.iter().zip(["", ".gz", ".zst"].iter().cycle()) {
        let converted = format!("made.{format}{ending}");
        convert(&scratch, "own.csv", &converted).succeeds();
        convert(&scratch, &converted, "again.csv").succeeds();
        let reconverted = fs::read_to_string(scratch.path("again.csv")).unwrap();
        // Except names of disks, which blkparse writes as "8,0", and the columns beyond the first
        // five.
        let requests = |csv: &str| -> Vec<[String; 4]> {
            let of_line = |line: &str| {
                let line = line.replace("8,", "8:");
                let fields: Vec<_> = line.split(',').map(str::to_owned).collect();
                [0, 2, 3, 4].map(|at| fields[at].clone())
            };
            csv.lines().skip(1).map(of_line).collect()
        };
        assert_eq!(requests(&reconverted), requests(REQUESTS), "{format}");
    }
}

#[test]
fn options_stand_before_between_and_behind_the_files() {
    let scratch = Scratch::new();
    let from = text(&scratch.file("own.csv", REQUESTS)).to_owned();
    let to = text(&scratch.path("made")).to_owned();
    for arguments in [["--to", "spc", &from, &to], [&from, "--to", "spc", &to], [&from, &to, "--to", "spc"]] {
        weir(&[&["trace", "convert"], &arguments[..]].concat()).succeeds();
        assert_eq!(fs::read_to_string(&to).unwrap().lines().count(), 3, "{arguments:?}");
        fs::remove_file(&to).unwrap();
    }
    let outcome = weir(&["trace", "convert", &from]).run();
    assert_eq!(outcome.code(), 2);
    assert_contains(&outcome.stderr(), &["OUTPUT: missing"]);
}

#[test]
fn unrepresentable_requests_are_counted() {
    let scratch = Scratch::new();
    let requests = format!(
        "{REQUESTS}3000000001,vm1,flush,0,0\n3000000002,vm1,discard,0,512\n3000000003,vm1,read,1,1\n"
    );
    fs::write(scratch.path("own.csv"), requests).unwrap();
    let outcome = convert(&scratch, "own.csv", "out.mqsim").run();
    assert_eq!(outcome.code(), 0);
    assert_contains(
        &outcome.stderr(),
        &[
            "weir: left out: 1 flush request, which mqsim cannot represent",
            "weir: left out: 1 discard request, which mqsim cannot represent",
            "weir: left out: 1 request not of whole sectors of 512 bytes, as mqsim counts them",
            "weir: mqsim identifies disks by number: 0 is vm1, 1 is vm2",
        ],
    );
    for (to, expect) in [
        ("out.blkparse", "weir: blkparse identifies disks by number: 8,0 is vm1, 8,1 is vm2"),
        ("out.cloud-physics", "weir: cloud-physics has whole seconds and one disk: vm1, vm2 are merged"),
    ] {
        let outcome = convert(&scratch, "own.csv", to).run();
        assert_eq!(outcome.code(), 0);
        assert_contains(&outcome.stderr(), &[expect]);
    }
    let timed = "time_ns,disk,op,offset,length,admitted_ns,completed_ns,bucket\n0,a,read,0,512,5,9,\n";
    fs::write(scratch.path("timed.csv"), timed).unwrap();
    let lost = "weir: left out: waiting and service times of 1 request (only weir's CSV and \
                recordings store them)";
    assert_contains(&convert(&scratch, "timed.csv", "out.msr").run().stderr(), &[lost]);
    // No warning about lost columns for a trace that has none.
    let plain = convert(&scratch, "own.csv", "plain.recording").run();
    assert!(!plain.stderr().contains("service times"), "{}", plain.stderr());
    fs::write(scratch.path("flush.csv"), "time_ns,disk,op,offset,length\n0,a,flush,0,0\n").unwrap();
    let stderr = convert(&scratch, "flush.csv", "none.msr").fails();
    assert_contains(&stderr, &["no request was written: left out: 1 flush request"]);
    assert!(!scratch.path("none.msr").exists());
}

#[test]
fn disks_stay_distinct_in_formats_without_names() {
    let scratch = Scratch::new();
    let names = ["a b", "a_b", "\"c,d\"", "c_d", "vm1", "vm1.0", "vm1_2.0"];
    let header = "time_ns,disk,op,offset,length\n".to_owned();
    let requests = names
        .iter()
        .enumerate()
        .fold(header, |text, (number, name)| text + &format!("{0}000000,{name},read,{0},4096\n", number + 1));
    fs::write(scratch.path("own.csv"), requests).unwrap();
    let fio = "renames disks: a_b is a b, a_b_2 is a_b";
    let msr = "renames disks: a b.0 is a b, a_b.0 is a_b, c_d.0 is c,d, c_d_2.0 is c_d, \
               vm1.0 is vm1, vm1_2.0 is vm1.0, vm1_2_2.0 is vm1_2.0";
    for (format, expect) in [("fio-v2", fio), ("fio-v3", fio), ("msr", msr)] {
        let outcome = convert(&scratch, "own.csv", &format!("out.{format}")).run();
        let waits =
            "weir: fio replays waits of fio-v2 differently from its documentation (write fio-v3 instead)\n";
        let waits = if format == "fio-v2" { waits } else { "" };
        assert_eq!((outcome.code(), outcome.stderr()), (0, format!("weir: {format} {expect}\n{waits}")));
        let report = info(&scratch, &format!("out.{format}"));
        let disks = report["disks"].as_object().expect("disks");
        assert_eq!(disks.len(), names.len(), "{format}: {report:#}");
        assert!(disks.values().all(|disk| disk["requests"] == 1), "{format}: {report:#}");
    }
}

#[test]
fn numeric_disk_names_are_kept_in_numeric_formats() {
    let scratch = Scratch::new();
    let volumes = ["2", "419", "0", "vm1", "8,16", "007"];
    let header = "time_ns,disk,op,offset,length\n".to_owned();
    let requests = volumes
        .iter()
        .enumerate()
        .fold(header, |text, (number, name)| text + &format!("{number}000000,\"{name}\",read,4096,4096\n"));
    fs::write(scratch.path("own.csv"), requests).unwrap();
    for (format, expect) in [
        ("alibaba", "identifies disks by number: 1 is vm1, 3 is 8,16, 4 is 007"),
        ("spc", "identifies disks by number: 1 is vm1, 3 is 8,16, 4 is 007"),
        ("blkparse", "identifies disks by number: 8,0 is 2, 8,1 is 419, 8,2 is 0, 8,3 is vm1, 8,4 is 007"),
    ] {
        let outcome = convert(&scratch, "own.csv", &format!("out.{format}")).run();
        assert_eq!((outcome.code(), outcome.stderr()), (0, format!("weir: {format} {expect}\n")));
        // Sizes that are already aligned are unchanged.
        let reconverted = convert(&scratch, &format!("out.{format}"), &format!("again.{format}")).run();
        assert_eq!((reconverted.code(), reconverted.stderr()), (0, String::new()));
    }
}

#[test]
fn discards_and_zeroes_are_summed() {
    let scratch = Scratch::new();
    let requests = "time_ns,disk,op,offset,length\n\
                    0,a,discard,0,1048576\n\
                    500000000,a,write-zeroes,0,65536\n\
                    500000001,a,write-zeroes,65536,65536\n\
                    1000000000,a,write,0,4096\n\
                    2000000000,a,flush,0,0\n";
    fs::write(scratch.path("own.csv"), requests).unwrap();
    let path = scratch.path("own.csv");
    let report = &info(&scratch, "own.csv")["disks"]["a"];
    let number = |name: &str| report[name].as_u64().expect("a number");
    let counts = ["requests", "reads", "writes", "discards", "write-zeroes", "flushes"].map(number);
    assert_eq!(counts, [5, 0, 1, 1, 2, 1], "{report:#}");
    let bytes = ["read-bytes", "written-bytes", "discarded-bytes", "zeroed-bytes"].map(number);
    assert_eq!(bytes, [0, 4096, 1 << 20, 128 << 10], "{report:#}");
    // The simulation counts the same number of bytes.
    let simulated = weir(&["simulate", text(&path), "--iops-total", "1000", "--json"]).json();
    assert_eq!(simulated["disks"][0]["after"]["bytes"].as_u64(), Some(bytes.iter().sum()), "{simulated:#}");
    let printed = weir(&["trace", "info", text(&path)]).succeeds();
    let rows: Vec<Vec<_>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
    let header = "DISK REQUESTS READS WRITES DISCARDS ZEROES READ WRITTEN DISCARDED ZEROED IOPS BYTES/S";
    assert_eq!(rows[0].join(" "), header);
    assert_eq!(rows[1].join(" "), "a 5 0 1 1 2 0 4.0K 1.0M 128K 2.5 578K");
    fs::write(&path, REQUESTS).unwrap();
    let printed = weir(&["trace", "info", text(&path)]).succeeds();
    assert!(!printed.contains("DISCARD") && !printed.contains("ZERO"), "{printed}");
}

#[test]
fn closed_output_ends_quietly() {
    let scratch = Scratch::new();
    let lines = (1..=200_000).fold("time_ns,disk,op,offset,length\n".to_owned(), |text, at_ns| {
        text + &format!("{at_ns},vm1,read,0,4096\n")
    });
    fs::write(scratch.path("long.csv"), lines).unwrap();
    let script = r#"set -o pipefail; "$0" trace convert "$1" - --to "$2" | head -n1 >&2"#;
    for format in ["weir", "recording"] {
        let outcome =
            TestClient::new("bash").args(["-c", script, WEIR, text(&scratch.path("long.csv")), format]).run();
        assert_eq!(outcome.code(), 0, "{format}: {}", outcome.stderr());
        assert!(!outcome.stderr().contains("weir: -"), "{format}: {}", outcome.stderr());
    }
}

#[test]
fn conversion_keeps_absolute_times() {
    let scratch = Scratch::new();
    // Nanoseconds since the epoch: a time in 2023.
    const AT_NS: u64 = 1_700_000_000_123_456_700;
    const INTERVAL_NS: u64 = 12_000_000_000;
    for (name, at_ns) in [("a", AT_NS), ("b", AT_NS + INTERVAL_NS)] {
        let csv = format!("time_ns,disk,op,offset,length\n{at_ns},vm1,read,0,4096\n");
        fs::write(scratch.path(&format!("{name}.csv")), csv).unwrap();
        convert(&scratch, &format!("{name}.csv"), &format!("{name}.recording")).succeeds();
        for ending in ["again.csv", "msr", "alibaba", "again.recording"] {
            convert(&scratch, &format!("{name}.recording"), &format!("{name}.{ending}")).succeeds();
        }
        convert(&scratch, &format!("{name}.msr"), &format!("{name}.msr.recording")).succeeds();
    }
    let endings = ["recording", "again.csv", "msr", "alibaba", "again.recording", "msr.recording"];
    let path = |name: &str, ending: &str| scratch.path(&format!("{name}.{ending}"));
    let times = |paths: [&std::path::Path; 2], absolute: &str| {
        let report = weir(&["trace", "info", "--json", absolute, text(paths[0]), text(paths[1])]).json();
        // Some formats rename the disks.
        let times_of = |name: &str| -> Vec<u64> {
            let disks = report["disks"].as_object().expect("disks").values();
            disks.map(|disk| disk[name].as_u64().expect("a time")).collect()
        };
        [times_of("first-ns").into_iter().min(), times_of("last-ns").into_iter().max()]
            .map(|ns| ns.expect("a disk"))
    };
    for ending in endings {
        for other in endings {
            let paths = [&*path("a", ending), &*path("b", other)];
            let [first_ns, last_ns] = times(paths, "--absolute-time");
            let is_exact = |ns: u64, expected: u64, ending: &str| {
                let unit_ns = if ending == "alibaba" { 1000 } else { 100 };
                ns == expected - expected % unit_ns
            };
            assert!(is_exact(first_ns, AT_NS, ending), "{ending}: {first_ns}");
            assert!(is_exact(last_ns, AT_NS + INTERVAL_NS, other), "{other}: {last_ns}");
        }
        let [first_ns, last_ns] = times([&*path("a", ending), &*path("b", ending)], "--absolute-time=false");
        assert_eq!((first_ns, last_ns), (0, 0), "{ending}");
    }
    let [a, b] = ["a", "b"].map(|name| path(name, "msr"));
    let both = scratch.path("both.csv");
    weir(&["trace", "convert", "--absolute-time", text(&a), text(&b), text(&both)]).succeeds();
    let csv = fs::read_to_string(&both).unwrap();
    let times: Vec<u64> =
        csv.lines().skip(1).map(|line| line.split(',').next().unwrap().parse().unwrap()).collect();
    assert_eq!(times, [AT_NS, AT_NS + INTERVAL_NS]);
    // The option can be switched off.
    weir(&["trace", "convert", "--absolute-time=false", text(&a), text(&both)]).succeeds();
    assert!(fs::read_to_string(&both).unwrap().contains("\n0,vm1.0,read,0,4096\n"));
    // Times relative to the beginning cannot be made absolute.
    let plain = scratch.path("plain.fio-v3");
    fs::write(&plain, "fio version 3 iolog\n5 /f read 0 512\n").unwrap();
    let stderr = weir(&["trace", "info", "--absolute-time", text(&plain)]).fails();
    assert_contains(&stderr, &["plain.fio-v3: times of the format fio-v3 count from the start of the trace"]);
}

const TIMED: &str = "time_ns,disk,op,offset,length,admitted_ns,completed_ns,bucket\n\
                     0,vm1,read,4096,8192,5000000,7000000,iops-total\n\
                     1000000,\"a,b\",write,0,4096,1000000,4000000,\n\
                     3000000,vm1,flush,0,0,,,\n";

fn info(scratch: &Scratch, name: &str) -> Value {
    weir(&["trace", "info", "--json", text(&scratch.path(name))]).json()
}

#[test]
fn empty_requests_are_skipped_and_counted() {
    let scratch = Scratch::new();
    let disk = |length: u64, micros: u64| format!("0,R,0,{length},{micros}\n");
    fs::write(scratch.path("t.csv"), disk(0, 1) + &disk(512, 2) + &disk(0, 3)).unwrap();
    let info_outcome = weir(&["trace", "info", text(&scratch.path("t.csv"))]).run();
    assert_eq!(
        (info_outcome.code(), info_outcome.stderr()),
        (0, "weir: skipped: 2 requests of length 0\n".to_owned())
    );
    let report = info(&scratch, "t.csv");
    assert_eq!((&report["empty"], &report["disks"]["0"]["requests"]), (&json!(2), &json!(1)));
    let outcome = convert(&scratch, "t.csv", "t.spc").run();
    assert_eq!((outcome.code(), outcome.stderr()), (0, "weir: skipped: 2 requests of length 0\n".to_owned()));
}

#[test]
fn wrong_format_is_reported_with_the_right_one() {
    let scratch = Scratch::new();
    fs::write(scratch.path("t.msr"), TIMED).unwrap();
    let path = scratch.path("t.msr");
    weir(&["trace", "info", text(&path)]).succeeds();
    for format in ["msr", "recording"] {
        let stderr = weir(&["trace", "info", "--format", format, text(&path)]).fails();
        let expected = format!("--format is {format}, but the file looks like weir (leave --format out)");
        assert_contains(&stderr, &[&expected]);
    }
}

#[test]
fn waits_and_latencies_are_kept() {
    let scratch = Scratch::new();
    fs::write(scratch.path("timed.csv"), TIMED).unwrap();
    for (from, to) in [("timed.csv", "a.recording"), ("a.recording", "b.recording"), ("b.recording", "c.csv")]
    {
        let outcome = convert(&scratch, from, to).run();
        assert_eq!((outcome.code(), outcome.stderr()), (0, String::new()), "{from} → {to}");
    }
    assert_eq!(fs::read_to_string(scratch.path("c.csv")).unwrap(), TIMED);
    for name in ["timed.csv", "a.recording", "b.recording", "c.csv"] {
        let report = &info(&scratch, name)["disks"];
        let mean =
            |disk: &str, measure: &str| report[disk]["measured"][measure]["mean"].as_f64().expect("a number");
        assert_eq!((mean("vm1", "waited-ns"), mean("vm1", "latency-ns")), (5e6, 7e6), "{name}");
        assert_eq!(mean("a,b", "latency-ns"), 3e6, "{name}");
        assert_eq!(report["vm1"]["measured"]["latency-ns"]["max"], json!(7_000_000), "{name}");
        assert_eq!(report["vm1"]["measured"]["held-by"], json!({ "iops-total": 1 }), "{name}");
        assert_eq!(report["vm1"]["unmeasured"], json!(1), "{name}: {report:#}");
        assert_eq!(report["a,b"]["unmeasured"], Value::Null, "{name}: {report:#}");
    }

    // Several recordings are joined into one.
    let path = |name: &str| scratch.path(name);
    let both = [path("a.recording"), path("b.recording")];
    for to in ["day.recording", "day.csv"] {
        weir(&["trace", "convert", text(&both[0]), text(&both[1]), text(&path(to))]).succeeds();
        let report = info(&scratch, to);
        assert_eq!(report["disks"]["vm1"]["measured"]["held-by"], json!({ "iops-total": 2 }), "{report:#}");
        assert_eq!(report["disks"]["vm1"]["unmeasured"], json!(2), "{report:#}");
    }

    let invalid = TIMED.replace("1000000,4000000", "999999,4000000");
    fs::write(scratch.path("wrong.csv"), invalid).unwrap();
    let stderr = convert(&scratch, "wrong.csv", "out.recording").fails();
    assert_contains(&stderr, &["wrong.csv:3: ", "a request is admitted before its arrival"]);
}

#[test]
fn unmeasured_figures_are_not_shown() {
    let scratch = Scratch::new();
    fs::write(scratch.path("own.csv"), REQUESTS).unwrap();
    convert(&scratch, "own.csv", "plain.recording").succeeds();
    let printed = weir(&["trace", "info", text(&scratch.path("plain.recording"))]).succeeds();
    assert_contains(&printed, &["Waiting and service times of 3 requests are unknown.\n"]);
    assert!(!printed.contains("latency") && !printed.contains("WAITED"), "{printed}");
    let report = info(&scratch, "plain.recording");
    assert_eq!(report["disks"]["vm1"]["measured"], Value::Null, "{report:#}");
    convert(&scratch, "plain.recording", "plain.csv").succeeds();
    let csv = fs::read_to_string(scratch.path("plain.csv")).unwrap();
    assert!(csv.contains("\n0,vm1,read,4096,8192,,,\n"), "{csv}");
}

#[test]
fn output_keeps_records_before_an_error_and_never_replaces_an_input() {
    let scratch = Scratch::new();
    fs::write(scratch.path("own.csv"), format!("{REQUESTS}what is this\n")).unwrap();
    let stderr = convert(&scratch, "own.csv", "out.spc").fails();
    assert_contains(&stderr, &["out.spc ends after 3 requests", "own.csv:5: "]);
    assert_eq!(fs::read_to_string(scratch.path("out.spc")).unwrap().lines().count(), 3);
    let stderr = convert(&scratch, "own.csv", "own.csv").fails();
    assert_contains(&stderr, &["which is read (name another file)"]);
    let outcome = convert(&scratch, "own.csv", "out.unknown").run();
    assert_eq!(outcome.code(), 2);
    assert_contains(&outcome.stderr(), &["does not end in the name of a format (give --to FORMAT)"]);
}

#[test]
fn fio_replays_a_converted_trace() {
    let scratch = Scratch::new();
    let file = scratch.filled("disk.raw", 4 << 20);
    let requests = format!(
        "time_ns,disk,op,offset,length\n0,{0},read,0,4096\n1000000,{0},write,8192,4096\n",
        text(&file)
    );
    fs::write(scratch.path("own.csv"), requests).unwrap();
    convert(&scratch, "own.csv", "own.iolog").succeeds();
    let log = format!("--read_iolog={}", text(&scratch.path("own.iolog")));
    let printed = TestClient::new("fio").args(["--name=replay", "--output-format=json", &log]).succeeds();
    let report: Value = serde_json::from_str(&printed).unwrap();
    let job = &report["jobs"][0];
    assert_eq!((job["read"]["total_ios"].as_u64(), job["write"]["total_ios"].as_u64()), (Some(1), Some(1)));
}
