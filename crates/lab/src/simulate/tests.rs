//! Complete simulations, from a file to the output.

use std::{fs, path::Path};

use clap::Parser as _;

use super::{drive::SimulationOutcome, *};

static NOT_STOPPED: AtomicBool = AtomicBool::new(false);
const HEADER: &str = "time_ns,disk,op,offset,length\n";

#[derive(Debug, clap::Parser)]
struct Line {
    #[command(flatten)]
    arguments: SimulateArgs,
}

fn arguments(options: &str) -> SimulateArgs {
    let tokens = ["simulate"].into_iter().chain(options.split_whitespace());
    Line::try_parse_from(tokens).unwrap().arguments
}

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn with(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

fn outcome(options: &str, threads: usize) -> anyhow::Result<SimulationOutcome> {
    let arguments = arguments(options);
    let setup = SimulationSetup::new(&arguments).map_err(|failure| match failure {
        CommandFailure::Usage(error) | CommandFailure::Failed(error) => error,
        CommandFailure::Found(_) => unreachable!("it finds nothing"),
    })?;
    simulate(SimulationJob { threads, ..SimulationJob::new(&setup, input(&arguments)?, &NOT_STOPPED) })
}

fn summary_json(options: &str, threads: usize) -> String {
    serde_json::to_string_pretty(&SimulationSummary::new(&outcome(options, threads).unwrap(), &[])).unwrap()
}

fn trace(disks: u64, requests: u64) -> String {
    // Each number of disks has another trace, and the same one in every run.
    let mut random = fastrand::Rng::with_seed(disks);
    let mut text = HEADER.to_owned();
    let mut at = 0;
    for _ in 0..requests {
        at += random.u64(0..200_000);
        let op = ["read", "write", "discard", "write-zeroes", "flush"][random.usize(..5)];
        let length = if op == "flush" { 0 } else { random.u64(1..64) * 512 };
        let offset = if op == "flush" { 0 } else { random.u64(0..10_000) * 4096 };
        text += &format!("{at},vm{},{op},{offset},{length}\n", random.u64(0..disks));
    }
    text
}

const CONFIG: &str = "
[group.gold]
iops-total = 3000
[group.silver]
bps-total = \"30M\"
group = \"gold\"
watermark = 50
[disk.vm0]
image = \"null:1G\"
group = \"gold\"
weight = 300
[disk.vm1]
image = \"null:1G\"
group = \"silver\"
delay = \"read=200us,write=300us,parallel=4\"
[disk.vm2]
image = \"null:1G\"
iops-read = 500
[disk.vm3]
image = \"null:1G\"
iops-total = 400
watermark = 90
rate = \"bytes=20M,shared=slow\"
[disk.vm4]
image = \"null:1G\"
rate = \"bytes=20M,shared=slow\"
prefetch = \"on\"
";

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let files = Files::new();
    let trace = files.with("a.csv", &trace(5, 20_000));
    let config = files.with("weir.toml", CONFIG);
    let options = format!("{trace} --config {config}");
    let single_threaded = summary_json(&options, 1);
    assert!(single_threaded.contains("\"name\": \"silver\""), "{single_threaded}");
    for threads in [1, 2, 3, 8] {
        assert_eq!(summary_json(&options, threads), single_threaded, "with {threads} threads");
    }
    // Without a config file every disk has a separate device.
    let options = format!("{trace} --iops-total 300 --delay read=1ms,parallel=1");
    let single_threaded = summary_json(&options, 1);
    assert_eq!(summary_json(&options, 4), single_threaded);
    // Disks that appear late, on separate devices with a watermark.
    let mut late = HEADER.to_owned();
    let mut random = fastrand::Rng::with_seed(7);
    for number in 0..40_000_u64 {
        let disk = random.u64(0..=number / 5000);
        late += &format!("{},vm{disk},write,0,65536\n", number * 400_000 + random.u64(0..400_000));
    }
    let late = files.with("late.csv", &late);
    let options = format!("{late} --bps-write 4M --watermark 80 --rate bytes=20M --window 1000");
    let single_threaded = summary_json(&options, 1);
    for threads in [2, 3, 8] {
        assert_eq!(summary_json(&options, threads), single_threaded, "with {threads} threads");
    }
}

#[test]
fn disk_result_is_independent_of_other_disks() {
    let files = Files::new();
    let all = trace(3, 9000);
    let only: String = all
        .lines()
        .filter(|line| !line.contains(",vm0,") && !line.contains(",vm2,"))
        .fold(String::new(), |text, line| text + line + "\n");
    // A flush of another disk at the time of the first request keeps time 0 the same.
    let first: u64 = all.lines().nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    let only = only.replacen(HEADER, &format!("{HEADER}{first},other,flush,0,0\n"), 1);
    let (all, only) = (files.with("all.csv", &all), files.with("only.csv", &only));
    let line = |trace: &str| {
        let summary = SimulationSummary::new(
            &outcome(&format!("{trace} --iops-total 500 --iops-total-max 900"), 1).unwrap(),
            &[],
        );
        serde_json::to_string(summary.disks.iter().find(|line| line.name == "vm1").unwrap()).unwrap()
    };
    assert_eq!(line(&all), line(&only));
}

#[test]
fn results_repeat_for_a_seed_and_differ_for_another() {
    let options = "--workload zipf:iops=3000,seconds=2,disks=3,read=60 --iops-total 1500 --seed";
    assert_eq!(summary_json(&format!("{options} 1"), 2), summary_json(&format!("{options} 1"), 2));
    assert_ne!(summary_json(&format!("{options} 1"), 2), summary_json(&format!("{options} 2"), 2));
}

#[test]
fn larger_limits_never_increase_waits() {
    let options = "--workload random:iops=2000,seconds=5 --sweep iops-total=500..4000:500 --p99 10ms";
    let arguments = arguments(options);
    let setup = SimulationSetup::new(&arguments).unwrap();
    let values = arguments.sweep.sweep.clone().unwrap();
    let points: Vec<SweepPoint> = values
        .values
        .iter()
        .map(|&value| {
            let setup = setup.with_limit(None, values.setting, value).unwrap();
            let job = SimulationJob {
                before: false,
                ..SimulationJob::new(&setup, input(&arguments).unwrap(), &NOT_STOPPED)
            };
            let all = SweptNames { limited: None, judged: None };
            SweepPoint::new(value, &simulate(job).unwrap(), all).unwrap()
        })
        .collect();
    assert!(points.is_sorted_by_key(|point| std::cmp::Reverse(point.latency_ns.p99)), "{points:?}");
    assert!(points.is_sorted_by(|one, other| one.throttled >= other.throttled), "{points:?}");
    let swept = SweepResult::new(&values, points, Some((10_000_000, None)), None);
    // 2000 random arrivals per second; the bucket absorbs their fluctuation.
    assert_eq!(swept.p99.unwrap().kept, sweep_result::BestLimit::Smallest(Some(2000)));
}

#[test]
fn without_limits_no_request_waits() {
    let outcome = outcome("--workload random:iops=5000,seconds=2 --delay read=1ms,parallel=8", 1).unwrap();
    let summary = SimulationSummary::new(&outcome, &[]);
    let line = &summary.disks[0];
    assert_eq!((line.throttled, line.longest_queue, line.after.waited_ns.max), (0.0, 0, 0));
    assert!(line.before.is_none(), "it would be the same");
    assert_eq!(summary.text().lines().count(), 2, "no rows of zeroes:\n{}", summary.text());
}

#[test]
fn several_disks_have_a_total() {
    let workload = "--workload random:iops=5000,seconds=2,disks=3";
    for (limits, rows) in [("", 1), (" --iops-total 1000", 2)] {
        let outcome = outcome(&format!("{workload}{limits}"), 1).unwrap();
        let summary = SimulationSummary::new(&outcome, &[]);
        let all = summary.all.as_ref().unwrap();
        let sum: u64 = summary.disks.iter().map(|line| line.after.requests).sum();
        assert_eq!((summary.disks.len(), all.after.requests), (3, sum));
        let text = summary.text();
        assert_eq!(text.lines().filter(|line| line.starts_with("all disks ")).count(), rows, "{text}");
    }
}

#[test]
fn simulated_clients_do_not_wait_for_real_time() {
    let outcome =
        outcome("--workload sequential:op=write,size=1M,seconds=4,depth=2 --bps-write 10M", 1).unwrap();
    let line = &SimulationSummary::new(&outcome, &[]).disks[0];
    assert!((line.after.bps / f64::from(10 << 20) - 1.0).abs() < 0.1, "{}", line.after.bps);
    assert_eq!(line.longest_queue, 2);
}

/// As the daemon does: the reservation is guaranteed, whatever the size of the disk is.
#[test]
fn rate_for_each_gib_is_raised_to_the_reservation() {
    let files = Files::new();
    let disk =
        "[disk.a]\nimage = \"null:4G\"\niops-total-per-gib = 50\niops-reservation = 1000\ngroup = \"g\"\n";
    let config = files.with("weir.toml", &format!("[group.g]\niops-total = 5000\n{disk}"));
    let trace = files.with("trace.csv", &format!("{HEADER}0,a,read,0,4096\n"));
    let rate = |options: &str| {
        let setup = SimulationSetup::new(&arguments(options)).unwrap_or_else(|_| panic!("{options}"));
        let mut world = setup.world.clone();
        let mut known = DiskResolver::new(&setup);
        known.add("a", &mut world).unwrap();
        simulator::engine::SimulationEngine::new(&world, false).expect("limits cover the reservation");
        world.disks[known.known[0]].settings.limits.limit(policy::throttle::LimitKind::IopsTotal).rate
    };
    assert_eq!(rate(&format!("{trace} --config {config}")), 1000);
    let options = "--size 4G --iops-total-per-gib 50 --group g,iops-total=5000";
    assert_eq!(rate(&format!("{trace} {options}")), 200, "without a reservation");
}

#[test]
fn single_disk_of_trace_and_config_are_matched() {
    let files = Files::new();
    let config = files.with("weir.toml", "[disk.only]\nimage = \"null:1G\"\niops-total = 1\n");
    let other = files.with("other.csv", &format!("{HEADER}0,sda,read,0,512\n1,sda,read,0,512\n"));
    let summary = SimulationSummary::new(&outcome(&format!("{other} --config {config}"), 1).unwrap(), &[]);
    assert_eq!(summary.disks[0].name, "only");
    assert_eq!(summary.disks[0].after.requests, 2);
}

#[track_caller]
fn check_error(options: &str, expect: &str) {
    let error = format!("{:#}", outcome(options, 1).map(drop).unwrap_err());
    assert_eq!(error, expect, "{options}");
}

#[test]
fn inapplicable_options_are_named() {
    let files = Files::new();
    let dir = files.path().display().to_string();
    let config = files.with("weir.toml", "[disk.a]\nimage = \"null:1M\"\n[disk.b]\nimage = \"null:1M\"\n");
    let one_disk = files.with("one.toml", "[disk.a]\nimage = \"null:1M\"\n");
    let (c, past_end) = (
        files.with("c.csv", &format!("{HEADER}0,c,read,0,512\n")),
        files.with("past.csv", &format!("{HEADER}5,a,write,1048064,1024\n")),
    );
    let two = files.with("two.csv", &format!("{HEADER}0,c,read,0,512\n1,d,read,0,512\n"));
    let malformed = files.with("odd.csv", "what is this\n");
    check_error(
        &format!("{c} --config {config}"),
        &format!(
            "{dir}/c.csv:2: the disk \"c\" is not in {dir}/weir.toml, which has \"a\", \"b\" (add \
             [disk.\"c\"])"
        ),
    );
    check_error(
        &format!("{past_end} --config {config}"),
        &format!(
            "{dir}/past.csv:2: a write of 1024 bytes at 1048064 goes past the end of the disk \
             \"a\", which has 1048576 bytes"
        ),
    );
    check_error(
        &format!("{past_end} --size 1M"),
        &format!(
            "{dir}/past.csv:2: a write of 1024 bytes at 1048064 goes past the end of the disk \
             \"a\", which has 1048576 bytes"
        ),
    );
    let partial = outcome(&format!("{two} --config {one_disk}"), 1).unwrap().partial.unwrap();
    assert_eq!(
        partial,
        format!(
            "{dir}/two.csv:3: the disk \"d\" is the second of the trace, but {dir}/one.toml has \
             only \"a\", to which \"c\" was mapped (add [disk.\"d\"])"
        )
    );
    check_error(
        &format!("{c} --iops-total 1 --iops-read 1"),
        "--iops-total 1: cannot be set together with iops-read (1); use either the total or read and write",
    );
    check_error(
        &format!("{c} --device {dir}/none"),
        &format!(
            "{dir}/none: is no known device (name a directory or a device, or give read=100us,…): \
             No such file or directory (os error 2)"
        ),
    );
    let error = format!("{:#}", outcome(&malformed, 1).map(drop).unwrap_err());
    assert!(error.starts_with(&format!("{dir}/odd.csv")) && error.contains("what is this"), "{error}");
}

#[test]
fn requests_before_an_invalid_line_are_reported() {
    let files = Files::new();
    let broken = files.with("a.csv", &format!("{HEADER}0,a,read,0,512\n1,a,read,0,512\n2,a,read,zero,512\n"));
    let outcome = outcome(&broken, 1).unwrap();
    assert_eq!(outcome.disks[0].after.requests, 2);
    let summary = SimulationSummary::new(&outcome, &[]);
    assert!(summary.partial.as_deref().unwrap().contains("a.csv:4: "), "{:?}", summary.partial);
    assert!(summary.text().contains("Incomplete: "), "{}", summary.text());
}

fn simulate_with(events: EventsFile, job: SimulationJob<'_>) -> (SimulationOutcome, EventsFile) {
    let events = Arc::new(Mutex::new(events));
    let outcome = simulate(SimulationJob { events: Some(events.clone()), ..job }).unwrap();
    let events = Arc::into_inner(events).expect("the simulation is over");
    (outcome, events.into_inner().unwrap())
}

fn events(files: &Files, options: &str) -> (String, String) {
    let arguments = arguments(options);
    let setup = SimulationSetup::new(&arguments).unwrap();
    let path = files.path().join("events.csv");
    let events = EventsFile::create(&path, &arguments.traces).unwrap();
    let job = SimulationJob::new(&setup, input(&arguments).unwrap(), &NOT_STOPPED);
    simulate_with(events, SimulationJob { threads: 4, ..job }).1.finish().unwrap();
    (path.display().to_string(), fs::read_to_string(&path).unwrap())
}

#[test]
fn events_file_is_a_trace_of_all_requests() {
    let files = Files::new();
    let trace = files.with(
        "a.csv",
        &format!("{HEADER}0,\"8,0\",read,0,512\n5,\"8,0\",write,4096,512\n9,\"8,0\",flush,0,0\n10,\"8,0\",read,0,512\n"),
    );
    let options = "--group g --iops-total 10 --delay read=1us,write=2us,flush=3us";
    let (path, written) = events(&files, &format!("{trace} {options}"));
    // One operation fits into the bucket; the second overfills it.
    let expect = "time_ns,disk,op,offset,length,admitted_ns,completed_ns,bucket\n\
                  0,\"8,0\",read,0,512,0,1000,-\n\
                  5,\"8,0\",write,4096,512,5,2005,-\n\
                  9,\"8,0\",flush,0,0,9,3009,-\n\
                  10,\"8,0\",read,0,512,100000000,100001000,iops-total@g\n";
    assert_eq!(written, expect);
    assert_eq!(summary_json(&format!("{path} {options}"), 1), summary_json(&format!("{trace} {options}"), 1));
    // Several disks wait for different times: rows are not in arrival order.
    let many = files.with("many.csv", &self::trace(5, 5000));
    let options = "--iops-read 200 --bps-write 3M";
    let (path, written) = events(&files, &format!("{many} {options}"));
    let times = written.lines().skip(1).map(|line| line.split(',').next().unwrap().parse::<u64>().unwrap());
    assert!(!times.is_sorted());
    let with_sorted_disks = |path: &str| {
        let mut all: serde_json::Value =
            serde_json::from_str(&summary_json(&format!("{path} {options}"), 1)).unwrap();
        all["disks"].as_array_mut().unwrap().sort_by_key(|disk| disk["name"].to_string());
        all
    };
    assert_eq!(with_sorted_disks(&path), with_sorted_disks(&many));
}

#[test]
fn events_file_is_replaced_atomically_and_never_an_input() {
    let files = Files::new();
    let trace = files.with("a.csv", HEADER);
    let link = files.path().join("link.csv");
    std::os::unix::fs::symlink(&trace, &link).unwrap();
    let error = |path: &Path| EventsFile::create(path, &[trace.clone().into()]).unwrap_err().to_string();
    assert_eq!(
        error(Path::new(&trace)),
        format!("--events: {trace} is {trace}, which is read (name another file)")
    );
    assert!(error(&link).contains("which is read"));
    assert_eq!(fs::read_to_string(&trace).unwrap(), HEADER);
    let old = files.with("old.csv", "old");
    drop(EventsFile::create(Path::new(&old), &[]).unwrap());
    assert_eq!(fs::read_to_string(&old).unwrap(), "old");
    assert_eq!(fs::read_dir(files.path()).unwrap().count(), 3, "nothing is left beside it");
}

#[test]
fn full_disk_ends_the_events_file_only() {
    let events = EventsFile::create(Path::new("/dev/full"), &[]).unwrap();
    let arguments = arguments("--workload random:iops=20000,seconds=1");
    let setup = SimulationSetup::new(&arguments).unwrap();
    let job = SimulationJob::new(&setup, input(&arguments).unwrap(), &NOT_STOPPED);
    let (outcome, events) = simulate_with(events, job);
    assert!(outcome.partial.is_none() && outcome.disks[0].after.requests > 15_000);
    let error = format!("{:#}", events.finish().unwrap_err());
    assert!(error.starts_with("/dev/full: cannot be written: No space left"), "{error}");
}

#[test]
fn overflowing_length_sums_are_simulated() {
    let files = Files::new();
    let half = 1_u64 << 63;
    let trace = files.with(
        "a.csv",
        &format!("{HEADER}0,a,read,0,{half}\n1,a,discard,0,{half}\n{},a,read,0,{half}\n", u64::MAX),
    );
    let outcome = outcome(&format!("{trace} --iops-total 100 --delay read=1ms"), 1).unwrap();
    assert_eq!((outcome.disks[0].after.requests, outcome.disks[0].after.bytes), (3, u64::MAX));
}

#[test]
fn options_unfit_for_a_workload_are_rejected() {
    let refused = |line: &str| match run(arguments(line)) {
        Err(CommandFailure::Usage(error)) => error.to_string(),
        other => panic!("{line}: {other:?}"),
    };
    let options = "config=x iops-total=5 group=g device=/ delay=read=1ms rate=bytes=1M weight=5 prefetch=on \
                   sweep=iops-total=1..2 events=x threads=2 size=1G prefetch-memory=1M watermark=5";
    for option in options.split_whitespace() {
        let name = option.split('=').next().unwrap();
        let error = refused(&format!("--workload burst --{option}"));
        assert!(error.starts_with(&format!("--{name}: this workload brings its own")), "{error}");
    }
    assert!(refused("--workload sequential --seed 5").starts_with("--seed: nothing of the workload"));
    assert!(refused("x --sweep iops-size=1..2 --p99 1ms").starts_with("--p99: iops-size is no rate"));
    for rejected in ["x --seed 1", "--workload burst --window 9", "--workload random --absolute-time"] {
        let command_line = format!("simulate {rejected}");
        assert!(Line::try_parse_from(command_line.split_whitespace()).is_err(), "{command_line}");
    }
}

#[test]
fn interruption_keeps_the_partial_result() {
    let arguments = arguments("--workload sequential:seconds=1000000,size=4K --iops-total 100");
    let setup = SimulationSetup::new(&arguments).unwrap();
    let stop = AtomicBool::new(true);
    let outcome = simulate(SimulationJob::new(&setup, input(&arguments).unwrap(), &stop)).unwrap();
    assert!(outcome.partial.as_deref().unwrap().starts_with("interrupted"));
    assert!(outcome.disks[0].after.requests > 0);
}

#[test]
fn sweep_of_an_unknown_disk_fails() {
    let files = Files::new();
    let config = files.with("weir.toml", CONFIG);
    let error = |options: &str, limited: Option<&str>, value| {
        let arguments = arguments(&format!("x {options} --sweep iops-total=1..2"));
        let setup = SimulationSetup::new(&arguments).unwrap();
        format!(
            "{:#}",
            setup.with_limit(limited, arguments.sweep.sweep.unwrap().setting, value).map(drop).unwrap_err()
        )
    };
    let config = format!("--config {config}");
    assert_eq!(
        error(&config, None, 1),
        "--sweep: there are several disks and groups (choose one with --sweep-of)"
    );
    assert!(error(&config, Some("vm9"), 1).starts_with("vm9: is no disk and no group of "));
    let message = error("", Some("gold"), 1);
    assert!(message.starts_with("--sweep-of gold: without --config a limit is that of --group"), "{message}");
    assert!(message.contains("add --config FILE with this disk or group, or --group gold"), "{message}");
    assert!(error("--iops-read 5", None, 1).starts_with("each disk: iops-total=1: "));
}
