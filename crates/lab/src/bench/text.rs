//! Text output: the lines that `qemu-img bench` prints before and after a run, and additional ones.

use std::fmt::Write as _;

use console::figures;
use policy::time::Duration;

use crate::{
    latencies::{Latencies, percentiles},
    load::{FlushSpec, LoadJob, LoadOutcome, Locality, OffsetPattern, OpenLoop, Spacing},
};

const SECONDS_SHOWN: usize = 60;

pub(super) fn announcement(job: &LoadJob, jobs: u32) -> String {
    let load = &job.load;
    let kind = match (load.write, job.read_percent) {
        (None, _) => "read".to_owned(),
        (Some(_), 0) => "write".to_owned(),
        (Some(_), percent) => format!("read and write ({percent}:{})", 100 - percent),
    };
    let count = if load.count == u64::MAX { String::new() } else { format!("{} ", load.count) };
    let mut text = format!(
        "Sending {count}{kind} requests, {} bytes each, {} in parallel ({})\n",
        load.block_bytes,
        load.depth,
        places(job, jobs)
    );
    if let Some(FlushSpec { interval, drain }) = load.flush {
        let drain = if drain { "" } else { " without draining" };
        let _ = writeln!(text, "Sending flush every {interval} requests{drain}");
    }
    if let Some(OpenLoop { per_second, spacing }) = job.arrivals {
        let how = if spacing == Spacing::Poisson { "at random instants" } else { "at equal distances" };
        let _ = writeln!(text, "Sending {per_second} requests per second, {how}");
    }
    text
}

fn places(job: &LoadJob, jobs: u32) -> String {
    let OffsetPattern { offset, step_bytes, backward, random, run, .. } = job.load.pattern;
    let mut text = match random {
        None => format!("starting at offset {offset}, step size {step_bytes}"),
        Some(seed) => format!("at random multiples of {step_bytes} from offset {offset}, seed {seed}"),
    };
    match job.locality {
        Locality::Even => {}
        Locality::Zipf(theta) => text += &format!(", by Zipf's law with exponent {theta}"),
        Locality::Hot { requests, places } => {
            text += &format!(", {requests} % of them to {places} % of the disk");
        }
    }
    if run > 1 {
        text += &format!(", {run} from each");
    }
    if backward {
        text += ", backward";
    }
    if job.load.readers > 1 {
        text += &format!(", {} readers", job.load.readers);
    }
    if jobs > 1 {
        text += &format!(", {jobs} jobs");
    }
    if let Some(runtime) = job.runtime {
        text += &format!(", for {}", figures::time(nanoseconds(runtime)));
    }
    if !job.ramp.is_zero() {
        text += &format!(", after a warm-up of {}", figures::time(nanoseconds(job.ramp)));
    }
    text
}

pub(super) fn completion(outcome: &LoadOutcome) -> String {
    format!("Run completed in {:.3} seconds.\n", outcome.elapsed.as_secs_f64())
}

/// Rates, latencies and the CPU time of a request, printed after qemu-img's lines. `processor` is
/// the time of all threads of this process.
pub(super) fn summary(job: &LoadJob, outcome: &LoadOutcome, processor: Duration) -> String {
    let measured = &outcome.measured;
    let mut text = String::new();
    for (name, latencies) in [("read", &measured.reads), ("write", &measured.writes)] {
        if !latencies.is_empty() {
            let iops = outcome.iops(latencies.len());
            let rate = iops * job.load.block_bytes as f64;
            let (count, rates) = (latencies.len(), (figures::count(iops), figures::bytes(rate)));
            let _ = writeln!(text, "{name}: {count} requests, {} IOPS, {}/s", rates.0, rates.1);
            text += &latency_line(latencies);
        }
    }
    if !measured.flushes.is_empty() {
        let _ = writeln!(text, "flush: {} of them", measured.flushes.len());
        text += &latency_line(&measured.flushes);
    }
    if let Some(each_ns) = processor_ns(outcome, processor) {
        let _ = writeln!(text, "processor: {} per request", time(each_ns as u64));
    }
    if outcome.unanswered > 0 {
        let _ = writeln!(text, "Requests not completed when the run ended: {}", outcome.unanswered);
    }
    text
}

/// CPU nanoseconds per completed request; `None` without completed requests.
pub(super) fn processor_ns(outcome: &LoadOutcome, processor: Duration) -> Option<f64> {
    let count = outcome.measured.answered();
    (count > 0).then(|| processor.as_nanos() as f64 / count as f64)
}

/// IOPS of each second, and the lag of an open-loop run behind its schedule.
pub(super) fn details(outcome: &LoadOutcome) -> String {
    let measured = &outcome.measured;
    let mut text = String::new();
    if measured.seconds.len() > 1 {
        let iops = |second: &crate::load::SecondCounts| figures::count((second.reads + second.writes) as f64);
        let shown: Vec<_> = measured.seconds.iter().take(SECONDS_SHOWN).map(iops).collect();
        let more = measured.seconds.len() - shown.len();
        let more = if more > 0 { format!(" … and {more} more") } else { String::new() };
        let _ = writeln!(text, "IOPS each second: {}{more}", shown.join(" "));
    }
    if !measured.late.is_empty() {
        let late = &measured.late;
        let [mean, p99, max] =
            [late.mean() as u64, late.value_at_quantile(0.99), late.max()].map(figures::time);
        let _ = write!(text, "Sent later than due: mean {mean}, p99 {p99}, max {max}");
        let behind = figures::time(nanoseconds(measured.behind));
        text += &if measured.behind.is_zero() {
            "\n".to_owned()
        } else {
            format!("; {behind} behind at the end\n")
        };
    }
    text
}

fn latency_line(latencies: &Latencies) -> String {
    let mut text =
        format!("  latency: min {}, mean {}", time(latencies.min()), time(latencies.mean() as u64));
    for (name, value) in percentiles(latencies) {
        let _ = write!(text, ", {name} {}", time(value));
    }
    text + &format!(", max {}\n", time(latencies.max()))
}

fn time(nanoseconds: u64) -> String {
    figures::time(nanoseconds)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{check::job, tests::arguments},
        *,
    };

    fn announced(text: &str) -> String {
        announcement(&job(&arguments(text), 1 << 30).unwrap(), arguments(text).jobs)
    }

    #[test]
    fn defaults_are_those_of_qemu_img() {
        assert_eq!(
            announced("vm.raw"),
            "Sending 75000 read requests, 4096 bytes each, 64 in parallel (starting at offset 0, \
             step size 4096)\n"
        );
    }

    #[test]
    fn summary_has_rates_latencies_and_cpu_per_request() {
        let mut outcome = LoadOutcome { elapsed: Duration::from_secs(2), ..LoadOutcome::default() };
        (1..=1000).for_each(|number| outcome.measured.writes.record(number * 1000).unwrap());
        let job = job(&arguments("a -w -s 1M -c 1000"), 1 << 30).unwrap();
        let text = summary(&job, &outcome, Duration::from_millis(20));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "write: 1000 requests, 500 IOPS, 500M/s");
        for part in ["  latency: min 1.0us, mean 50", ", p50 50", ", p99 99", ", p99.9 99"] {
            assert!(lines[1].contains(part), "{part}: {text}");
        }
        assert_eq!(lines[2..], ["processor: 20us per request"]);
        assert_eq!(summary(&job, &LoadOutcome::default(), Duration::ZERO), "");
    }

    #[test]
    fn announcement_has_additional_options() {
        assert_eq!(
            announced(
                "a -w --rwmixread 70 --zipf 1.2 --seed 3 --jobs 2 --runtime 5s --ramp-time 1s --rate-iops 500"
            ),
            "Sending read and write (70:30) requests, 4096 bytes each, 64 in parallel (at random \
             multiples of 4096 from offset 0, seed 3, by Zipf's law with exponent 1.2, 2 jobs, for \
             5.0s, after a warm-up of 1.0s)\n\
             Sending 500 requests per second, at random instants\n"
        );
        assert!(
            announced("a --hot 90/10 --run 4")
                .contains("seed 1, 90 % of them to 10 % of the disk, 4 from each)")
        );
    }
}
