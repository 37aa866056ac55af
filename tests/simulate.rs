//! `weir simulate` against `weir serve`: the same requests and limits yield the same times; and the
//! command's output and errors.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use crate::harness::{
    RawNbdClient, Scratch, Serve, assert_contains, text, weir,
    wire::{CMD_FLUSH, CMD_READ, CMD_WRITE, RawNbdRequest},
};

#[derive(Clone, Copy)]
struct TimedRequest {
    at: Duration,
    write: bool,
    offset: u64,
    length: u32,
}

/// 300 requests in two seconds, in bursts, with gaps between them, so that none are merged.
fn requests() -> Vec<TimedRequest> {
    let mut random = fastrand::Rng::with_seed(42);
    let mut at = Duration::ZERO;
    let request = |number: u64| {
        at += Duration::from_micros(random.u64(0..13_000));
        let length = [4096, 8192, 16_384, 32_768][random.usize(..4)];
        TimedRequest { at, write: random.bool(), offset: number * (3 << 20), length }
    };
    let mut requests: Vec<TimedRequest> = (0..300).map(request).collect();
    let first = requests[0].at;
    requests.iter_mut().for_each(|request| request.at -= first);
    requests
}

fn csv(requests: &[TimedRequest]) -> String {
    let mut csv = "time_ns,disk,op,offset,length\n".to_owned();
    for TimedRequest { at, write, offset, length } in requests {
        let op = if *write { "write" } else { "read" };
        writeln!(csv, "{},null,{op},{offset},{length}", at.as_nanos()).unwrap();
    }
    csv
}

/// Completion time of each request in the simulation, in the order of the trace.
fn simulated(scratch: &Scratch, requests: &[TimedRequest], limits: &[&str]) -> Vec<Duration> {
    let trace = scratch.file("trace.csv", csv(requests));
    let events = scratch.path("events.csv");
    let arguments = ["simulate", text(&trace), "--size", "1G", "--events", text(&events)];
    weir(&[&arguments[..], limits].concat()).succeeds();
    let events = fs::read_to_string(&events).unwrap();
    let mut done = vec![Duration::ZERO; requests.len()];
    for line in events.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let number = fields[3].parse::<u64>().unwrap() / (3 << 20);
        done[number as usize] = Duration::from_nanos(fields[6].parse().unwrap());
    }
    done
}

/// Sends each request at its time, regardless of earlier completions; returns the completion times.
fn replayed(socket: &Path, requests: &[TimedRequest]) -> Vec<Duration> {
    let mut stream = connected(socket);
    let mut replies = stream.try_clone().unwrap();
    thread::scope(|scope| {
        let clock = Instant::now();
        let reader = scope.spawn(move || {
            let mut done = vec![Duration::ZERO; requests.len()];
            for _ in requests {
                let mut reply = [0; 16];
                replies.read_exact(&mut reply).unwrap();
                let at = clock.elapsed();
                assert_eq!(reply[4..8], [0; 4], "no error");
                let number = u64::from_be_bytes(reply[8..].try_into().unwrap()) as usize;
                done[number] = at;
                if !requests[number].write {
                    replies.read_exact(&mut vec![0; requests[number].length as usize]).unwrap();
                }
            }
            done
        });
        // The first one is exactly on time: the bucket's clock starts with it.
        let began = Instant::now();
        for (number, request) in (0..).zip(requests) {
            let TimedRequest { at, write, offset, length } = *request;
            let header = RawNbdRequest {
                flags: 0,
                kind: if write { CMD_WRITE } else { CMD_READ },
                cookie: number,
                offset,
                length: length.into(),
            };
            let mut bytes = header.compact();
            bytes.resize(bytes.len() + if write { length as usize } else { 0 }, 0);
            // Sleep for most of it, then spin: the time of sending must be exact.
            while let Some(rest) = at.checked_sub(began.elapsed()).filter(|rest| !rest.is_zero()) {
                if rest > Duration::from_millis(1) {
                    thread::sleep(rest - Duration::from_millis(1));
                }
            }
            stream.write_all(&bytes).unwrap();
        }
        let before = began - clock;
        reader.join().unwrap().into_iter().map(|done| done.saturating_sub(before)).collect()
    })
}

/// A connection on which a flush was answered: the daemon is ready, and no limit was charged.
fn connected(socket: &Path) -> UnixStream {
    let (mut wire, _) = RawNbdClient::negotiated(socket, "null");
    wire.request(RawNbdRequest { flags: 0, kind: CMD_FLUSH, cookie: 0, offset: 0, length: 0 }, &[]);
    assert_eq!(wire.simple_reply(), (0, 0));
    wire.into_stream()
}

/// A late request or reply is completed later, never earlier: a daemon on a slow host lags behind
/// the simulation, and on no host is it ahead. The size of the lag is a row of `make bench`,
/// `simulate-agrees`.
#[test]
fn daemon_is_never_faster_than_the_simulation() {
    let scratch = Scratch::new();
    let requests = requests();
    // One limit at a time: with a shared limit the order could depend on a microsecond.
    let limits = [
        ["--iops-read", "60"],
        ["--iops-read-max", "80"],
        ["--iops-size", "8K"],
        ["--bps-write", "500K"],
        ["--bps-write-max", "600K"],
    ]
    .concat();
    let expected = simulated(&scratch, &requests, &limits);
    let waited = requests.iter().zip(&expected).filter(|(request, done)| **done > request.at).count();
    assert!(waited > 100 && waited < 250, "only {waited} of 300 requests waited");
    let weir = Serve::new(&scratch).arg("null:1G").args(&limits).start();
    let done = replayed(weir.socket(), &requests);
    weir.stop();
    let ahead: BTreeMap<usize, _> = expected
        .iter()
        .zip(&done)
        .enumerate()
        .filter(|(_, (expected, done))| done < expected)
        .map(|(number, (expected, done))| (number, format!("{expected:?}, done {done:?}")))
        .collect();
    assert!(ahead.is_empty(), "{ahead:#?}");
}

/// The heading names the settings that only one of the two runs has.
#[test]
fn comparison_names_the_differing_settings() {
    let run = |options: &[&str]| {
        let workload = ["simulate", "--workload", "sequential:seconds=1", "--delay", "read=1ms"];
        weir(&[&workload[..], options].concat()).succeeds()
    };
    let heading = |printed: &str| printed.lines().next().unwrap_or_default().to_owned();
    let both = run(&["--bps-total", "100M", "--prefetch", "on"]);
    assert!(heading(&both).starts_with("DISK   LIMITS AND PREFETCH  REQUESTS "), "{both}");
    let prefetch = run(&["--prefetch", "on"]);
    assert!(heading(&prefetch).starts_with("DISK   PREFETCH  REQUESTS "), "{prefetch}");
    let limits = run(&["--bps-total", "1M", "--prefetch", "off"]);
    assert!(heading(&limits).starts_with("DISK   LIMITS   REQUESTS "), "{limits}");
}

/// Without a config file, disks have no limits of their own that a sweep could change.
#[test]
fn sweep_of_an_unknown_name_suggests_options() {
    let scratch = Scratch::new();
    let trace = scratch.file("trace.csv", csv(&requests()));
    let sweep = ["simulate", text(&trace), "--sweep", "iops-total=50..400:50", "--sweep-of", "backup"];
    let outcome = weir(&sweep).run();
    assert_eq!(outcome.code(), 2);
    let advice = "(add --config FILE with this disk or group, or --group backup, or leave --sweep-of out)";
    assert_contains(&outcome.stderr(), &["--sweep-of backup: without --config", advice]);
    let criterion = ["--group", "backup", "--p99", "5ms", "--p99-of", "vm9"];
    let outcome = weir(&[&sweep[..], &criterion].concat()).run();
    assert_contains(&outcome.stderr(), &["--p99-of vm9: there are no requests"]);
}

#[test]
fn effect_of_limits_is_printed_before_and_after() {
    let scratch = Scratch::new();
    let trace = scratch.file("trace.csv", csv(&requests()));
    let printed =
        weir(&["simulate", text(&trace), "--iops-total", "100", "--delay", "read=1ms,parallel=4"]).succeeds();
    assert_contains(&printed, &["LIMITS", "without", "with", "waited", "served", "THROTTLED", "iops-total "]);
    let printed =
        weir(&["simulate", text(&trace), "--sweep", "iops-total=50..400:50", "--p99", "50ms"]).succeeds();
    assert_contains(
        &printed,
        &["iops-total", "P99.9", "The smallest that keeps 99 of 100 requests below 50ms: iops-total="],
    );
}

/// All limits are keys of the config file.
#[test]
fn limits_in_addition_to_a_config_file_are_rejected() {
    let scratch = Scratch::new();
    let trace = scratch.file("trace.csv", csv(&requests()));
    let config = scratch.file("weir.toml", "[disk.null]\nimage = \"null:1G\"\n");
    for setting in policy::throttle::LimitSetting::ALL {
        let option = format!("--{}", setting.name());
        let outcome = weir(&["simulate", text(&trace), "--config", text(&config), &option, "1"]).run();
        assert_eq!(outcome.code(), 2, "{option}");
        assert_contains(&outcome.stderr(), &["'--config <FILE>' cannot be used with", &option]);
    }
}

/// `backup` writes in bursts to a device that `db` shares.
fn two_disk_config(scratch: &Scratch) -> (String, String) {
    let mut csv = "time_ns,disk,op,offset,length\n".to_owned();
    for tick in 0..400_u64 {
        let at = tick * 5_000_000;
        for number in 0..4 {
            writeln!(csv, "{at},backup,write,{},65536", (tick * 4 + number) * 65536).unwrap();
        }
        writeln!(csv, "{at},db,write,{},4096", tick * 8192).unwrap();
    }
    let trace = scratch.file("neighbours.csv", csv);
    let config = "[disk.db]\nimage = \"null:1G\"\n[disk.backup]\nimage = \"null:1G\"\niops-total = 1000\n";
    let config = scratch.file("neighbours.toml", config);
    (text(&trace).to_owned(), text(&config).to_owned())
}

#[test]
fn sweep_judges_the_named_disk() {
    let scratch = Scratch::new();
    let (trace, config) = two_disk_config(&scratch);
    let sweep = ["simulate", &trace, "--config", &config, "--device", "write=1ms,parallel=1"];
    let sweep = [&sweep[..], &["--sweep", "iops-total=100..900:200", "--sweep-of", "backup"]].concat();
    let printed = weir(&[&sweep[..], &["--p99", "3ms", "--p99-of", "db"]].concat()).succeeds();
    assert_contains(
        &printed,
        &[
            "P99 db",
            "P99 backup",
            "The largest that keeps 99 of 100 requests of db below 3.0ms: iops-total=100",
        ],
    );
    let printed = weir(&[&sweep[..], &["--p99", "1ms"]].concat()).succeeds();
    assert_contains(
        &printed,
        &["None of these keeps 99 of 100 requests of backup below 1.0ms (larger limits do not help: "],
    );
    let outcome = weir(&[&sweep[..], &["--p99", "3ms", "--p99-of", "dbb"]].concat()).run();
    assert_contains(
        &outcome.stderr(),
        &["--p99-of dbb: there are no requests of a disk or group of this name"],
    );
}

#[test]
fn two_streams_of_2009_are_simulated_in_all_eight_cases() {
    let printed = weir(&["simulate", "--workload", "two-streams"]).succeeds();
    assert_contains(&printed, &["STREAM 1", "2009", "4 and 2 MB/s from 90 % on", "writeback"]);
    assert_eq!(printed.lines().filter(|line| line.contains("direct")).count(), 4, "{printed}");
}

#[test]
fn cluster_is_simulated_and_invalid_ones_rejected() {
    let cluster = |arguments: &[&str]| weir(&[&["simulate", "--cluster"], arguments].concat());
    let printed =
        cluster(&["hosts=20,disks=2,seconds=20,leader-deaths=1", "--iops-total", "4000"]).succeeds();
    assert_contains(
        &printed,
        &["ETCD, PER SECOND", "all hosts", "unused while a host waits", "the leader dies"],
    );
    // A missing figure is explained.
    let printed = cluster(&["hosts=5,disks=1,seconds=4,busy=0"]).succeeds();
    assert_contains(
        &printed,
        &["- means that demand was never steady, ", "- means that no host was busy, so none waited"],
    );
    assert!(!printed.contains("coincided with a fault"), "{printed}");
    let report = cluster(&["hosts=20,disks=2,seconds=20", "--seed", "2", "--json"]).json();
    assert_eq!(report["limits"]["iops-total"], 2000, "{report}");
    assert!(report["violation"].is_null() && report["all"]["requests"].as_f64() > Some(0.0), "{report}");
    for (arguments, why) in [
        (&["hosts=0"][..], "hosts=0 is not between 1 and 10000"),
        (&["hosts=3", "--iops-write", "5"], "its clients only read"),
        (&["hosts=3", "--weight", "5"], "--weight: is not for --cluster"),
        (
            &["hosts=100", "--iops-total", "50"],
            "iops-total: 50 is too low: each of up to 100 hosts may use 1 unit per second without \
             etcd (set at least 100, or fewer hosts)",
        ),
        (
            &["hosts=2,reserved=100,reservation=2000", "--iops-total", "100"],
            "reserved in total, more than the limit of 100",
        ),
    ] {
        assert_contains(&cluster(arguments).fails(), &[why]);
    }
}
