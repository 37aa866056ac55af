//! Validates the options, and converts them to a load for an image of a given size.

use anyhow::{Context as _, bail};
use policy::{
    prefetch::{PrefetchConfig, PrefetchMode},
    time::Duration,
};

use super::target::BenchTarget;
use crate::{
    bench::arguments::{Aio, BenchArgs},
    load::{FlushSpec, LoadJob, LoadSpec, Locality, OffsetPattern, OpenLoop},
};

/// About the maximum that a system call moves.
const LARGEST_REQUEST: u64 = 1 << 30;
/// Bound on the bytes of all requests in flight.
const MAX_IN_FLIGHT: u64 = 4 << 30;
/// Bound on requests in flight: each is a task with its memory.
const MAX_TASKS: u64 = 1 << 20;
const COUNT: u64 = 75_000;
/// Bound on the run time: a count is stored for each second.
const MAX_RUNTIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// Checks that need no image.
pub(super) fn check(arguments: &BenchArgs) -> anyhow::Result<()> {
    let aio = arguments.aio.or(arguments.native.then_some(Aio::Native));
    if let Some(aio @ (Aio::Threads | Aio::Native)) = aio {
        let name = if aio == Aio::Threads { "threads" } else { "native" };
        bail!("-i {name}: weir supports only io_uring (leave it out)");
    }
    check_requests(arguments)?;
    check_times(arguments)?;
    arguments.disk()?;
    if arguments.flush_interval == Some(0) {
        bail!("--flush-interval 0: must be at least 1 (leave it out for no flushes)");
    }
    // QEMU's rule: requests in flight are drained before a flush, so the interval cannot be
    // smaller.
    if let Some(interval) = arguments.flush_interval.filter(|&interval| interval < arguments.depth.into()) {
        bail!(
            "--flush-interval {interval}: is below the depth, {} (raise it to the depth or more)",
            arguments.depth
        );
    }
    if !matches!(arguments.target, BenchTarget::Image(_)) {
        check_remote(arguments)?;
    }
    Ok(())
}

fn check_requests(arguments: &BenchArgs) -> anyhow::Result<()> {
    let BenchArgs { buffer_size, depth, readers, jobs, .. } = *arguments;
    if !(1..=LARGEST_REQUEST).contains(&buffer_size) {
        bail!("-s {buffer_size}: a request has from 1 byte to {LARGEST_REQUEST}");
    }
    // Saturating: the product of valid options can exceed 64 bits.
    let in_flight = u64::from(depth).saturating_mul(readers.into()).saturating_mul(jobs.into());
    if in_flight > MAX_TASKS {
        bail!(
            "-d {depth}: with {readers} readers of each of {jobs} jobs more than {MAX_TASKS} \
             requests would be in flight (choose one of them smaller)"
        );
    }
    if buffer_size.saturating_mul(in_flight) > MAX_IN_FLIGHT {
        bail!(
            "-d {depth}: with requests of {buffer_size} bytes more than {MAX_IN_FLIGHT} bytes \
             would be in flight (choose one of them smaller)"
        );
    }
    // Zipf and hot spots imply random offsets.
    let random = arguments.random || arguments.zipf.is_some() || arguments.hot.is_some();
    if arguments.step_size == Some(0) && random {
        bail!("-S 0: random offsets are multiples of the step (choose a step above 0)");
    }
    let count = count(arguments);
    // Each reader needs at least one request, or its rate would be meaningless.
    let all_readers = u64::from(readers) * u64::from(jobs);
    if all_readers > count {
        let option = if readers > jobs { format!("--readers {readers}") } else { format!("--jobs {jobs}") };
        bail!("{option}: gives {all_readers} readers, more than the {count} requests (raise -c)");
    }
    Ok(())
}

fn check_times(arguments: &BenchArgs) -> anyhow::Result<()> {
    let times = [("--runtime", arguments.runtime), ("--ramp-time", arguments.ramp_time)];
    for (option, time) in times {
        if time.is_some_and(|time| time > MAX_RUNTIME) {
            bail!("{option}: is longer than a week");
        }
    }
    if arguments.runtime == Some(Duration::ZERO) {
        bail!("--runtime 0: no request would be measured (leave it out, or choose a longer time)");
    }
    Ok(())
}

/// Rejects options that only a server could honour.
fn check_remote(arguments: &BenchArgs) -> anyhow::Result<()> {
    let disk = arguments.disk()?;
    let options = [
        ("-f", arguments.format.is_some_and(|format| format != storage::ImageFormat::Raw)),
        ("-t", arguments.cache != storage::CacheMode::default()),
        ("-U", arguments.force_share),
        ("--delay", arguments.delay.is_some()),
        ("--rate", arguments.rate.is_some()),
        (
            "--prefetch",
            disk.prefetch != PrefetchConfig { mode: PrefetchMode::Off, ..PrefetchConfig::default() },
        ),
    ];
    if let Some((option, _)) = options.iter().find(|(_, is_given)| *is_given) {
        bail!("{option}: applies to images only; a server decides about its own image (leave it out)");
    }
    if let Some(option) = disk.first_qcow2_key() {
        bail!("{option}: applies to images only; a server decides about its own image (leave it out)");
    }
    Ok(())
}

fn count(arguments: &BenchArgs) -> u64 {
    // A run time alone bounds the load, so the count is unlimited.
    arguments.count.unwrap_or(if arguments.runtime.is_some() { u64::MAX } else { COUNT })
}

pub(super) fn job(arguments: &BenchArgs, size_bytes: u64) -> anyhow::Result<LoadJob> {
    let block = arguments.buffer_size;
    // The last offset at which a request fits.
    let Some(last) = size_bytes.checked_sub(block) else {
        bail!("has {size_bytes} bytes, fewer than one request of {block} bytes (choose a smaller -s)");
    };
    if arguments.offset > last {
        bail!("a request at {} does not fit into {size_bytes} bytes (choose another -o)", arguments.offset);
    }
    let step = arguments.step_size.unwrap_or(0);
    let flush = |interval| FlushSpec { interval, drain: !arguments.no_drain };
    let locality = locality(arguments);
    let load = LoadSpec {
        count: count(arguments),
        depth: arguments.depth,
        readers: arguments.readers,
        block_bytes: usize::try_from(block).context("that is too large for this machine")?,
        pattern: OffsetPattern {
            offset: arguments.offset,
            // As with qemu-img, 0 is the default.
            step_bytes: if step == 0 { block } else { step },
            last,
            backward: arguments.backward,
            // A locality implies random places.
            random: (arguments.random || locality != Locality::Even).then_some(arguments.seed),
            run: arguments.run,
        },
        write: arguments.write.then_some(arguments.pattern.unwrap_or(0)),
        flush: arguments.flush_interval.map(flush),
    };
    Ok(LoadJob {
        read_percent: arguments.rwmixread.unwrap_or(0),
        locality,
        arrivals: arguments.rate_iops.map(|per_second| OpenLoop { per_second, spacing: arguments.arrivals }),
        ramp: arguments.ramp_time.unwrap_or_default(),
        runtime: arguments.runtime,
        ..load.into()
    })
}

fn locality(arguments: &BenchArgs) -> Locality {
    match (arguments.zipf, arguments.hot) {
        (Some(theta), _) => Locality::Zipf(theta),
        (None, Some(hot)) => Locality::Hot { requests: hot.requests, places: hot.places },
        (None, None) => Locality::Even,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::{
        super::tests::{BenchLine, arguments},
        *,
    };
    use crate::load::Spacing;

    #[test]
    fn invalid_options_are_rejected() {
        for (text, why) in [
            ("a -i threads", "-i threads: weir supports only io_uring"),
            ("a -n", "-i native: "),
            ("a -s 0", "-s 0: a request has"),
            ("a -s 1G -d 8", "-d 8: with requests of"),
            ("a -s 1G -d 1 --jobs 8", "-d 1: with requests of"),
            ("a -s 1 -d 65536 --readers 65536", "-d 65536: with 65536 readers of each of 1 jobs"),
            ("a -s 1 -d 1024 --readers 2 --jobs 1024", "-d 1024: with 2 readers"),
            ("a -S 0 --random", "-S 0: "),
            ("a -S 0 --zipf 1", "-S 0: "),
            ("a -c 3 --jobs 4", "--jobs 4: gives 4 readers, more than the 3 requests"),
            ("a -c 3 --readers 4", "--readers 4: gives 4 readers, more than the 3 requests"),
            ("a -w --flush-interval 0", "--flush-interval 0: "),
            ("a -w -d 8 --flush-interval 7", "--flush-interval 7: is below the depth, 8"),
            ("a --runtime 0", "--runtime 0: "),
            ("a --runtime 900000s", "--runtime: is longer than a week"),
            ("a --ramp-time 900000s", "--ramp-time: is longer than a week"),
            ("nbd://h/a -t none", "-t: applies to images only"),
            ("nbd://h/a -f qcow2", "-f: applies to images only"),
            ("nbd://h/a --prefetch on", "--prefetch: applies to images only"),
            ("nbd://h/a --prefetch-memory 64M", "--prefetch: applies to images only"),
            ("nbd://h/a --l2-cache-size 1M", "--l2-cache-size 1M: applies to images only"),
            ("nbd://h/a --delay read=1ms", "--delay: applies to images only"),
            ("vhost-user:a -t none", "-t: applies to images only"),
            ("vhost-user:a --l2-cache-size 1M", "--l2-cache-size 1M: applies to images only"),
        ] {
            let error = check(&arguments(text)).expect_err(text).to_string();
            assert!(error.starts_with(why), "{text}: {error}");
        }
        for text in [
            "a -i io_uring",
            "a -w -d 8 --flush-interval 8 --no-drain",
            "a -s 1G -d 4",
            "nbd://h/a -f raw -w",
            "vhost-user:a -f raw -w --jobs 2",
        ] {
            check(&arguments(text)).expect(text);
        }
    }

    #[test]
    fn invalid_option_combinations_are_rejected_by_clap() {
        let lines = "a --flush-interval 64; a --pattern 3; a -w --no-drain; a -w -U; a --seed 3; \
             a --run 3; a --rwmixread 50; a -w --rwmixread 101; a --zipf 0; a --zipf inf; \
             a --zipf 1 --hot 90/10; a --zipf 1 --random; a --hot 90/10 --backward; a --hot 90; \
             a --hot 0/10; a --hot 90/100; a --jobs 0; a --rate-iops 0; a --rate-iops -1; \
             a --rate-iops nan; a --arrivals fixed; a --runtime 30; nbds://h/a";
        for text in lines.split("; ") {
            let tokens = ["weir", "bench"].into_iter().chain(text.split_whitespace());
            assert!(BenchLine::try_parse_from(tokens).is_err(), "{text}");
        }
    }

    #[test]
    fn options_become_a_load() {
        let job_of = |text| job(&arguments(text), 1 << 30).unwrap();
        assert_eq!((job_of("a").load.count, job_of("a -c 7").load.count), (75_000, 7));
        assert_eq!(
            (job_of("a --runtime 3s").load.count, job_of("a --runtime 3s -c 7").load.count),
            (u64::MAX, 7)
        );
        assert_eq!(job_of("a --zipf 1.1 --seed 4").locality, Locality::Zipf(1.1));
        assert_eq!(job_of("a --zipf 1.1 --seed 4").load.pattern.random, Some(4));
        assert_eq!(job_of("a --hot 90/10").locality, Locality::Hot { requests: 90, places: 10 });
        assert_eq!(
            (job_of("a").load.pattern.random, job_of("a --random").load.pattern.random),
            (None, Some(1))
        );
        let arrivals = |text| job_of(text).arrivals.unwrap();
        assert_eq!(arrivals("a --rate-iops 1.5"), OpenLoop { per_second: 1.5, spacing: Spacing::Poisson });
        assert_eq!(arrivals("a --rate-iops 9 --arrivals fixed").spacing, Spacing::Fixed);
        assert_eq!(job_of("a -w --rwmixread 70").read_percent, 70);
    }

    #[test]
    fn request_larger_than_the_image_is_rejected() {
        let options = arguments("a -s 8K -o 4K");
        assert_eq!(job(&options, 12 << 10).unwrap().load.pattern.last, 4 << 10);
        assert!(job(&options, 11 << 10).unwrap_err().to_string().contains("does not fit"));
        assert!(job(&options, 7 << 10).unwrap_err().to_string().contains("choose a smaller -s"));
    }
}
