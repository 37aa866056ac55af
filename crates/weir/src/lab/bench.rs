//! `weir bench`: so many requests through weir's data path, and how long they took. Options and output are those of `qemu-img bench`.
//!
//! Never measures the opening and the closing of the image, as qemu-img does not either; but a load that writes is not done before a last flush
//! has told that the writes arrived.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use block::{
    disk::Disk,
    image::{
        Image,
        open::{ImageOptions, open},
    },
    layer::throttle::DiskSettings,
    storage::OpenOptions,
};
use policy::prefetch::Stats;
use serde::Serialize;

use super::load::{Flush, Load, Outcome, Places, put};
use crate::{
    Failure,
    cli::{Aio, BenchArgs},
    on_reactor,
    plan::Qcow2Settings,
    print,
};

/// The largest request: the most that one system call moves, rounded to something even.
const LARGEST_REQUEST: u64 = 1 << 30;
/// The most memory that requests in flight may take together.
const MOST_IN_FLIGHT: u64 = 4 << 30;

/// Measures, and prints how long it took.
///
/// # Errors
/// Where the options make no sense, or the first request that fails.
pub(crate) fn run(arguments: BenchArgs) -> Result<(), Failure> {
    check(&arguments).map_err(Failure::Usage)?;
    let spec = arguments.image.spec()?;
    let Qcow2Settings { caches, said, .. } =
        arguments.qcow2().map_err(|wrong| Failure::Usage(wrong.into()))?;
    let prefetch = arguments.prefetch().map_err(|wrong| Failure::Usage(wrong.into()))?;
    let options = ImageOptions {
        storage: OpenOptions {
            cache: arguments.cache,
            format: arguments.format,
            read_only: !arguments.write,
            force_share: arguments.force_share,
            delay: arguments.delay,
            rate: arguments.rate.clone(),
            ..OpenOptions::default()
        },
        caches,
        ..ImageOptions::default()
    };
    let name = arguments.image.to_string();
    let measuring = async move {
        let image = open(&spec, options).await?;
        if let (Image::Raw(_), Some(option)) = (&image, said) {
            bail!("{option} is for qcow2 images, and this one is raw (leave it away)");
        }
        let disk = Arc::new(Disk::new("bench", image, DiskSettings::default(), None)?);
        disk.prefetch().set(prefetch)?;
        measure(disk, &arguments).await
    };
    on_reactor(async move { Ok(measuring.await.context(name)?) })
}

async fn measure(disk: Arc<Disk>, arguments: &BenchArgs) -> anyhow::Result<()> {
    let load = load(arguments, disk.size_bytes())?;
    if !arguments.quiet && !arguments.json {
        print(&announcement(&load))?;
    }
    let outcome = put(load.clone(), Arc::clone(&disk)).await.context("a request failed")?;
    if arguments.write {
        disk.flush().await.context("the last flush failed")?;
    }
    let prefetch = disk.prefetch().stats();
    disk.close().await.context("the image could not be completed")?;
    if arguments.json {
        print(&Report::new(arguments.image.to_string(), &load, outcome, prefetch).json())?;
    } else if !arguments.quiet {
        print(&format!("Run completed in {:.3} seconds.\n", outcome.elapsed.as_secs_f64()))?;
    }
    Ok(())
}

/// What can be said without the image.
fn check(arguments: &BenchArgs) -> anyhow::Result<()> {
    let aio = arguments.aio.or(arguments.native.then_some(Aio::Native));
    if let Some(aio @ (Aio::Threads | Aio::Native)) = aio {
        let name = if aio == Aio::Threads { "threads" } else { "native" };
        bail!("-i {name}: weir does its I/O through io_uring alone (leave it away)");
    }
    if !(1..=LARGEST_REQUEST).contains(&arguments.buffer_size) {
        bail!("-s {}: a request has from 1 byte to {LARGEST_REQUEST}", arguments.buffer_size);
    }
    let in_flight = u64::from(arguments.depth) * u64::from(arguments.readers);
    if arguments.buffer_size.saturating_mul(in_flight) > MOST_IN_FLIGHT {
        bail!(
            "-d {}: with requests of {} bytes more than {MOST_IN_FLIGHT} bytes would be in flight (choose one of them smaller)",
            arguments.depth,
            arguments.buffer_size
        );
    }
    if arguments.step_size == Some(0) && arguments.random {
        bail!("-S 0: random places are multiples of it (choose one larger than 0)");
    }
    if u64::from(arguments.readers) > arguments.count {
        bail!(
            "--readers {}: are more than requests, {} (send more with -c)",
            arguments.readers,
            arguments.count
        );
    }
    if arguments.flush_interval == Some(0) {
        bail!("--flush-interval 0: that is never (leave it away)");
    }
    // QEMU's rule, too: what is in flight has to be drained first, so more cannot have been sent.
    if let Some(interval) = arguments.flush_interval.filter(|&interval| interval < arguments.depth.into()) {
        bail!("--flush-interval {interval}: is below the depth, {} (let it be as large)", arguments.depth);
    }
    Ok(())
}

/// What the options ask for, of an image of this size.
fn load(arguments: &BenchArgs, size_bytes: u64) -> anyhow::Result<Load> {
    let block = arguments.buffer_size;
    let Some(last) = size_bytes.checked_sub(block) else {
        bail!("has {size_bytes} bytes, and a request {block} (choose a smaller one with -s)");
    };
    if arguments.offset > last {
        bail!("a request at {} does not fit into {size_bytes} bytes (choose another -o)", arguments.offset);
    }
    let step = arguments.step_size.unwrap_or(0);
    let flush = |interval| Flush { interval, drain: !arguments.no_drain };
    Ok(Load {
        count: arguments.count,
        depth: arguments.depth,
        readers: arguments.readers,
        block_bytes: usize::try_from(block).context("that is too large for this machine")?,
        places: Places {
            offset: arguments.offset,
            // As with qemu-img, 0 is the default.
            step_bytes: if step == 0 { block } else { step },
            last,
            backward: arguments.backward,
            random: arguments.random.then_some(arguments.seed),
            run: arguments.run,
        },
        write: arguments.write.then_some(arguments.pattern.unwrap_or(0)),
        flush: arguments.flush_interval.map(flush),
    })
}

/// What qemu-img says before it begins.
fn announcement(load: &Load) -> String {
    let Places { offset, step_bytes, backward, random, run, .. } = load.places;
    let kind = if load.write.is_some() { "write" } else { "read" };
    let mut places = match random {
        None => format!("starting at offset {offset}, step size {step_bytes}"),
        Some(seed) => format!("at random multiples of {step_bytes} from offset {offset}, seed {seed}"),
    };
    if run > 1 {
        places += &format!(", {run} from each");
    }
    if backward {
        places += ", backward";
    }
    if load.readers > 1 {
        places += &format!(", {} readers", load.readers);
    }
    let mut text = format!(
        "Sending {} {kind} requests, {} bytes each, {} in parallel ({places})\n",
        load.count, load.block_bytes, load.depth
    );
    if let Some(flush) = load.flush {
        let drain = if flush.drain { "" } else { " without draining" };
        text += &format!("Sending flush every {} requests{drain}\n", flush.interval);
    }
    text
}

/// What a program is told.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    image: String,
    operation: &'static str,
    count: u64,
    depth: u32,
    buffer_size: u64,
    step_size: u64,
    offset: u64,
    random_seed: Option<u64>,
    run: u64,
    backward: bool,
    readers: u32,
    /// How many requests of the slowest reader were answered, of what each had on average.
    slowest_reader: f64,
    flush_interval: Option<u64>,
    seconds: f64,
    iops: f64,
    bytes_per_second: f64,
    hit_rate: Option<f64>,
    accuracy: Option<f64>,
}

impl Report {
    fn new(image: String, load: &Load, outcome: Outcome, prefetch: Stats) -> Self {
        // A load that took no time on the clock took some all the same.
        let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
        let iops = load.count as f64 / seconds;
        Self {
            image,
            operation: if load.write.is_some() { "write" } else { "read" },
            count: load.count,
            depth: load.depth,
            buffer_size: load.block_bytes as u64,
            step_size: load.places.step_bytes,
            offset: load.places.offset,
            random_seed: load.places.random,
            run: load.places.run,
            backward: load.places.backward,
            readers: load.readers,
            slowest_reader: outcome.slowest as f64 * f64::from(load.readers) / load.count as f64,
            flush_interval: load.flush.map(|flush| flush.interval),
            seconds,
            iops,
            bytes_per_second: iops * load.block_bytes as f64,
            hit_rate: prefetch.hit_rate(),
            accuracy: prefetch.accuracy(),
        }
    }

    fn json(&self) -> String {
        // Numbers and texts: nothing that JSON lacks a form for.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn arguments(text: &str) -> BenchArgs {
        let words = ["weir", "bench"].into_iter().chain(text.split_whitespace());
        match Cli::try_parse_from(words) {
            Ok(Cli { command: Command::Bench(arguments) }) => *arguments,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn defaults_are_those_of_qemu_img() {
        let load = load(&arguments("vm.raw"), 1 << 30).unwrap();
        assert_eq!(
            announcement(&load),
            "Sending 75000 read requests, 4096 bytes each, 64 in parallel (starting at offset 0, step size 4096)\n"
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, why) in [
            ("a -i threads", "-i threads: weir does its I/O through io_uring alone"),
            ("a -n", "-i native: "),
            ("a -s 0", "-s 0: a request has"),
            ("a -s 1G -d 8", "-d 8: with requests of"),
            ("a -S 0 --random", "-S 0: "),
            ("a -w --flush-interval 0", "--flush-interval 0: "),
            ("a -w -d 8 --flush-interval 7", "--flush-interval 7: is below the depth, 8"),
        ] {
            let error = check(&arguments(text)).expect_err(text).to_string();
            assert!(error.starts_with(why), "{text}: {error}");
        }
        for text in ["a -i io_uring", "a -w -d 8 --flush-interval 8 --no-drain", "a -s 1G -d 4"] {
            check(&arguments(text)).expect(text);
        }
        for text in ["a --flush-interval 64", "a --pattern 3", "a -w --no-drain", "a -w -U", "a --seed 3"] {
            let words = ["weir", "bench"].into_iter().chain(text.split_whitespace());
            assert!(Cli::try_parse_from(words).is_err(), "{text}");
        }
    }

    #[test]
    fn a_request_must_fit_into_the_image() {
        let options = arguments("a -s 8K -o 4K");
        assert_eq!(load(&options, 12 << 10).unwrap().places.last, 4 << 10);
        assert!(load(&options, 11 << 10).unwrap_err().to_string().contains("does not fit"));
        assert!(load(&options, 7 << 10).unwrap_err().to_string().contains("choose a smaller one"));
    }
}
