//! JSON output: fio's format for the same load, and an object with weir's own figures.
//!
//! Names and units are those of `fio --output-format=json` (fio's HOWTO, "JSON output"). All jobs
//! are merged. `clat_ns` and `lat_ns` are the latency, from the due time in an open loop; `slat_ns`
//! is empty. Keys are never omitted, because readers index them.

use std::time::{SystemTime, UNIX_EPOCH};

use policy::{prefetch::PrefetchStats, time::Duration};
use serde_json::{Map, Value, json};

use super::text;
use crate::{
    bench::arguments::BenchArgs,
    latencies,
    latencies::{Latencies, Percentiles},
    load::{LoadJob, LoadOutcome, Measured, SecondCounts},
};

const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

/// `processor` is the CPU time, and `partial` the reason why the run is incomplete.
pub(super) fn weir_json(
    arguments: &BenchArgs,
    job: &LoadJob,
    outcome: &LoadOutcome,
    processor: Duration,
    prefetch: Option<PrefetchStats>,
    partial: Option<&'static str>,
) -> Value {
    let (load, measured) = (&job.load, &outcome.measured);
    let count = measured.answered();
    let iops = outcome.iops(count);
    let readers = f64::from(load.readers) * f64::from(arguments.jobs);
    let operation = match (load.write, job.read_percent) {
        (None, _) => "read",
        (Some(_), 0) => "write",
        (Some(_), _) => "mixed",
    };
    // Reads and writes have histograms with equal bounds, so their sum is exact.
    let mut latencies = measured.reads.clone();
    latencies.add(&measured.writes).expect("both have the same bounds");
    let each_second: Vec<u64> = measured.seconds.iter().map(|second| second.reads + second.writes).collect();
    json!({
        "image": arguments.target.to_string(),
        "operation": operation,
        "count": count,
        "depth": load.depth,
        "jobs": arguments.jobs,
        "buffer-size": load.block_bytes,
        "step-size": load.pattern.step_bytes,
        "offset": load.pattern.offset,
        "random-seed": load.pattern.random,
        "run": load.pattern.run,
        "backward": load.pattern.backward,
        "readers": load.readers,
        // Requests of the slowest reader, relative to the average.
        "slowest-reader": outcome.slowest as f64 * readers / count.max(1) as f64,
        "flush-interval": load.flush.map(|flush| flush.interval),
        "seconds": outcome.seconds(),
        "iops": iops,
        "bytes-per-second": iops * load.block_bytes as f64,
        // Reads and writes together; `clat_ns` of `jobs` has each alone.
        "latency-ns": (count > 0).then(|| Percentiles::of(&latencies)),
        // CPU time of all threads of this process.
        "processor-per-request-ns": text::processor_ns(outcome, processor),
        "iops-each-second": each_second,
        // Mean delay after the due time; open loops only.
        "late-ns": (!measured.late.is_empty()).then(|| measured.late.mean()),
        "behind-seconds": measured.behind.as_secs_f64(),
        "hit-rate": prefetch.and_then(|stats| stats.hit_rate()),
        "accuracy": prefetch.and_then(|stats| stats.accuracy()),
        "partial": partial,
    })
}

pub(super) fn report(
    arguments: &BenchArgs,
    job: &LoadJob,
    outcome: &LoadOutcome,
    weir_keys: &Value,
) -> Value {
    let Measured { reads, writes, flushes, .. } = &outcome.measured;
    let direction = |latencies: &Latencies, part: fn(&SecondCounts) -> u64| {
        let each: Vec<u64> = outcome.measured.seconds.iter().map(part).collect();
        direction(latencies, job.load.block_bytes as u64, outcome, &each)
    };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "fio version": concat!("weir-", env!("CARGO_PKG_VERSION")),
        "timestamp": since.as_secs(),
        "timestamp_ms": u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        "jobs": [{
            "jobname": "weir",
            "groupid": 0,
            "error": 0,
            "eta": 0,
            "elapsed": outcome.seconds().ceil() as u64,
            "job options": options(arguments, job),
            "read": direction(reads, |second| second.reads),
            "write": direction(writes, |second| second.writes),
            // Always empty; fio's readers expect the key.
            "trim": direction(&latencies::new(), |_| 0),
            "sync": { "total_ios": flushes.len(), "lat_ns": latency(flushes, true) },
            "job_runtime": milliseconds(outcome),
        }],
        "weir": weir_keys,
    })
}

fn milliseconds(outcome: &LoadOutcome) -> u64 {
    u64::try_from(outcome.elapsed.as_millis()).unwrap_or(u64::MAX)
}

fn options(arguments: &BenchArgs, job: &LoadJob) -> Value {
    let load = &job.load;
    let random = load.pattern.random.is_some();
    let mut options = Map::new();
    let mut put = |name: &str, value: String| options.insert(name.to_owned(), Value::String(value));
    let kind = match (load.write, job.read_percent) {
        (None, _) => "read",
        (Some(_), 0) => "write",
        (Some(_), _) => "rw",
    };
    put("name", "weir".to_owned());
    put("filename", arguments.target.to_string());
    put("rw", if random { format!("rand{kind}") } else { kind.to_owned() });
    put("bs", load.block_bytes.to_string());
    put("iodepth", load.depth.to_string());
    put("numjobs", arguments.jobs.to_string());
    if job.read_percent > 0 {
        put("rwmixread", job.read_percent.to_string());
    }
    // Per job, as in fio.
    if load.count < u64::MAX {
        put("number_ios", load.count.div_ceil(arguments.jobs.into()).to_string());
    }
    if let Some(runtime) = job.runtime {
        put("runtime", format!("{}ms", runtime.as_millis()));
    }
    if let Some(arrivals) = job.arrivals {
        put("rate_iops", (arrivals.per_second / f64::from(arguments.jobs)).to_string());
    }
    Value::Object(options)
}

fn direction(latencies: &Latencies, block_bytes: u64, outcome: &LoadOutcome, each: &[u64]) -> Value {
    let count = latencies.len();
    let bytes = count.saturating_mul(block_bytes);
    // fio's `bw` is in KiB per second, `bw_bytes` in bytes per second.
    let rate = outcome.iops(count) * block_bytes as f64;
    let iops = IopsSpread::of(each.iter().map(|&count| count as f64));
    let kib = block_bytes as f64 / 1024.0;
    json!({
        "io_bytes": bytes,
        "io_kbytes": bytes / 1024,
        "bw_bytes": rate as u64,
        "bw": (rate / 1024.0) as u64,
        "iops": outcome.iops(count),
        "runtime": if count > 0 { milliseconds(outcome) } else { 0 },
        "total_ios": count,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": latency(&latencies::new(), false),
        "clat_ns": latency(latencies, true),
        "lat_ns": latency(latencies, false),
        "bw_min": (iops.min * kib) as u64,
        "bw_max": (iops.max * kib) as u64,
        "bw_agg": if count > 0 { 100.0 } else { 0.0 },
        "bw_mean": iops.mean * kib,
        "bw_dev": iops.deviation * kib,
        "bw_samples": each.len(),
        "iops_min": iops.min as u64,
        "iops_max": iops.max as u64,
        "iops_mean": iops.mean,
        "iops_stddev": iops.deviation,
        "iops_samples": each.len(),
    })
}

fn latency(latencies: &Latencies, with_percentiles: bool) -> Value {
    let mut value = json!({
        "min": latencies.min(),
        "max": latencies.max(),
        "mean": latencies.mean(),
        "stddev": latencies.stdev(),
        "N": latencies.len(),
    });
    if with_percentiles && !latencies.is_empty() {
        let at = |percent: f64| {
            let found = latencies.value_at_percentile(percent);
            (format!("{percent:.6}"), Value::from(found))
        };
        value["percentile"] = Value::Object(PERCENTILES.map(at).into_iter().collect());
    }
    value
}

struct IopsSpread {
    min: f64,
    max: f64,
    mean: f64,
    deviation: f64,
}

impl IopsSpread {
    fn of(samples: impl Iterator<Item = f64> + Clone) -> Self {
        let count = samples.clone().count().max(1) as f64;
        let mean = samples.clone().sum::<f64>() / count;
        let variance = samples.clone().map(|sample| (sample - mean).powi(2)).sum::<f64>() / count;
        let (min, max) = (samples.clone().reduce(f64::min), samples.reduce(f64::max));
        Self { min: min.unwrap_or(0.0), max: max.unwrap_or(0.0), mean, deviation: variance.sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{check::job, tests::arguments},
        *,
    };

    fn outcome() -> LoadOutcome {
        let mut measured = Measured::default();
        (1..=4).for_each(|number| measured.reads.record(number * 1000).unwrap());
        measured.writes.record(5000).unwrap();
        measured.seconds.push(SecondCounts { reads: 3, ..SecondCounts::default() });
        LoadOutcome { elapsed: Duration::from_millis(1500), measured, ..LoadOutcome::default() }
    }

    fn sample_report() -> Value {
        let arguments = arguments("a -w --rwmixread 80 --random --runtime 2s");
        let (job, outcome) = (job(&arguments, 1 << 20).unwrap(), outcome());
        let weir_keys =
            weir_json(&arguments, &job, &outcome, Duration::from_nanos(5000), None, Some("interrupted"));
        report(&arguments, &job, &outcome, &weir_keys)
    }

    #[test]
    fn job_options_are_per_job_as_in_fio() {
        let arguments = arguments("a -c 1001 --jobs 4 --rate-iops 500");
        let reported = options(&arguments, &job(&arguments, 1 << 20).unwrap());
        assert_eq!((&reported["number_ios"], &reported["rate_iops"]), (&json!("251"), &json!("125")));
    }

    #[test]
    fn numbers_are_in_units_of_fio() {
        let report = sample_report();
        let job = &report["jobs"][0];
        let read = &job["read"];
        assert_eq!(read["io_bytes"], 4 * 4096);
        assert_eq!(
            (&read["io_kbytes"], &read["bw"], &read["runtime"]),
            (&json!(16), &json!(10), &json!(1500))
        );
        assert_eq!(read["iops"], 4.0 / 1.5);
        assert_eq!(
            (&read["iops_min"], &read["iops_samples"], &read["bw_max"]),
            (&json!(3), &json!(1), &json!(12))
        );
        assert_eq!((&read["clat_ns"]["N"], &read["clat_ns"]["min"]), (&json!(4), &json!(1000)));
        let p99 = read["clat_ns"]["percentile"]["99.000000"].as_u64().unwrap();
        assert!((4000..4004).contains(&p99), "{p99}");
        assert_eq!(job["write"]["total_ios"], 1);
        assert_eq!(job["job options"]["rw"], "randrw");
    }

    #[test]
    fn weir_keys_are_present() {
        let weir_keys = &sample_report()["weir"];
        assert_eq!((&weir_keys["count"], &weir_keys["operation"]), (&json!(5), &json!("mixed")));
        assert_eq!(weir_keys["iops-each-second"], json!([3]));
        assert_eq!(weir_keys["partial"], "interrupted");
        let keys = "image depth buffer-size seconds iops bytes-per-second slowest-reader hit-rate";
        for key in keys.split(' ') {
            assert!(weir_keys.get(key).is_some(), "{key}");
        }
    }
}
