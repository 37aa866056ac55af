//! Options of `weir bench`: those of `qemu-img bench` with the same letters, some of fio's with its
//! names, and additions.

use std::path::Path;

use anyhow::bail;
use clap::{Arg, ArgGroup, Args, ValueEnum};
use policy::{
    prefetch::{PrefetchConfig, PrefetchMode},
    time::Duration,
};
use settings::{
    ConfigError, ConfigKey, ConfigWithOrigins, DiskConfig, ImageDescription, Origin,
    arguments::{ConfigKeyArgs, OptionSelection},
};
use storage::{CacheMode, ImageFormat, delay::DelayOptions, rate::RateOptions};

use crate::{bench::BenchTarget, load::Spacing, result::arguments::ResultArgs};

/// Shown below the options.
pub const EXAMPLES: &str = concat!(
    "\
Examples:
  weir bench -f raw -t none -s 4K --random vm1.raw
      75000 random reads of 4 KiB past the page cache, 64 in flight.
  weir bench -f raw -w -c 10000 -d 32 -s 64K --flush-interval 64 scratch.raw
      10000 sequential writes of 64 KiB, with a flush after every 64. Destroys the previous data.
  weir bench -f raw -t none -d 1 --prefetch on vm1.raw
      One sequential reader with one request in flight, with prefetching, which is off by default.
  weir bench -f raw -t none -w --rwmixread 70 --zipf 0.99 --rate-iops 5000 --runtime 30s scratch.raw
      An open load of 5000 requests a second, 70 % reads, with some offsets much more frequent than others.
  weir bench --jobs 4 -d 16 --runtime 10s --report vm1.html nbd+unix:///vm1?socket=/run/weir.sock
      Performance of four clients of a server, as an HTML page.
  weir bench -d 32 --random --runtime 10s vhost-user:vm1.sock
      Performance of a virtual machine over vhost-user-blk.
  weir bench --json memory:1G
      Cost of the data path alone, on a disk without latency.

Requests go through the code of `weir serve`, on one thread for each job, without a client and a socket; those for an NBD URI through a connection for each job, those for vhost-user:PATH through a queue for each.
", settings::sizes!(), " Times take ns, us, ms or s. With --json, prints the fields of fio's --output-format=json, and \"weir\" with additional ones.
Ctrl-C ends the load; the results until then are printed.
Exit status: 0 measured, 1 failed or interrupted, 2 wrong use of the command line."
);

/// A percentage of the requests goes to a percentage of the disk: `90/10`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HotSpot {
    /// Percent of the requests.
    pub(crate) requests: u8,
    /// Percent of the disk, from its beginning.
    pub(crate) places: u8,
}

impl std::str::FromStr for HotSpot {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = |text: &str| settings::count(text).ok().filter(|value| (1..=99).contains(value));
        let both = text.split_once('/').and_then(|(one, other)| percent(one).zip(percent(other)));
        let (requests, places) = both.ok_or(
            "is not REQUESTS/DISK, two percentages from 1 to 99 (90/10: 90 % of the requests to 10 \
             % of the disk)",
        )?;
        // Both are below 100.
        Ok(Self { requests: requests as u8, places: places as u8 })
    }
}

/// Parses an exponent of Zipf's law.
fn theta(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.01..=100.0).contains(value));
    value.ok_or_else(|| "is not a number from 0.01 to 100; around 1 is usual".to_owned())
}

/// Parses operations per second.
fn iops(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.001..=1e9).contains(value));
    value.ok_or_else(|| "is not a number of requests in a second, from 0.001 to 1000000000".to_owned())
}

/// I/O methods of `qemu-img bench -i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Aio {
    /// A pool of threads.
    Threads,
    /// Linux AIO.
    Native,
    /// The method that weir uses.
    #[value(name = "io_uring")]
    IoUring,
}

/// Arguments of `weir bench`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("anywhere").args(["random", "zipf", "hot"]))]
pub struct BenchArgs {
    /// A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE, nbd://HOST:PORT/EXPORT,
    /// nbd+unix:///EXPORT?socket=PATH or vhost-user:PATH
    #[arg(value_name = "IMAGE|URI", value_parser = settings::parse::<BenchTarget>)]
    pub(crate) target: BenchTarget,
    /// Requests in all [default: 75000, or as many as fit into --runtime]
    #[arg(short = 'c', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) count: Option<u64>,
    /// Requests in flight, of each job
    #[arg(short = 'd', long, value_name = "DEPTH", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) depth: u32,
    /// Image format [default: probed, where that is safe]
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = settings::parse::<ImageFormat>)]
    pub(crate) format: Option<ImageFormat>,
    /// Read IMAGE as options of QEMU's block drivers, such as driver=qcow2,file.filename=PATH
    #[arg(long, conflicts_with = "format")]
    pub(crate) image_opts: bool,
    /// The description of the image, if it was given by such options or by `json:{…}`.
    #[arg(skip)]
    pub(crate) description: Option<ImageDescription>,
    /// Flush after every N writes, once those in flight are done; N is at least DEPTH
    #[arg(long, value_name = "N", requires = "write")]
    pub(crate) flush_interval: Option<u64>,
    /// Continue to submit requests during a flush
    #[arg(long, requires = "flush_interval")]
    pub(crate) no_drain: bool,
    /// I/O method; weir supports only io_uring
    #[arg(short = 'i', long, value_name = "AIO", hide = true)]
    pub(crate) aio: Option<Aio>,
    /// Select -i native
    #[arg(short = 'n', long, conflicts_with = "aio", hide = true)]
    pub(crate) native: bool,
    /// Offset of the first request in bytes
    #[arg(short = 'o', long, value_name = "OFFSET", default_value = "0", value_parser = settings::size)]
    pub(crate) offset: u64,
    /// Byte to write, from 0 to 255 [default: 0]
    #[arg(long, value_name = "BYTE", requires = "write")]
    pub(crate) pattern: Option<u8>,
    /// Print nothing but errors, and the object of --json
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
    /// Bytes of a request
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4K", value_parser = settings::size)]
    pub(crate) buffer_size: u64,
    /// Distance between the offsets of consecutive requests, which wrap around at the end
    /// [default: SIZE of a request]
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = settings::size)]
    pub(crate) step_size: Option<u64>,
    /// The host's page cache: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value_t, value_parser = settings::parse::<CacheMode>)]
    pub(crate) cache: CacheMode,
    /// Write instead of read, which destroys the image's data
    #[arg(short = 'w', long)]
    pub(crate) write: bool,
    /// Read an image that another program has locked for writing
    #[arg(short = 'U', long, conflicts_with = "write")]
    pub(crate) force_share: bool,
    /// Random offsets: multiples of the step after OFFSET
    #[arg(long)]
    pub(crate) random: bool,
    /// Seed of the random offsets: the same number gives the same offsets
    #[arg(long, value_name = "N", default_value_t = 1, requires = "anywhere")]
    pub(crate) seed: u64,
    /// Random offsets by Zipf's law: the k-th most frequent in proportion to 1/k^THETA, scattered
    /// over the disk
    #[arg(long, value_name = "THETA", value_parser = theta)]
    pub(crate) zipf: Option<f64>,
    /// Random offsets, with this percentage of the requests in this first percentage of the disk:
    /// 90/10
    #[arg(long, value_name = "REQUESTS/DISK", value_parser = settings::parse::<HotSpot>)]
    pub(crate) hot: Option<HotSpot>,
    /// Number of sequential requests from each random offset
    #[arg(long, value_name = "N", default_value_t = 1, requires = "anywhere", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) run: u64,
    /// Proceed from the end to the beginning
    #[arg(long, conflicts_with = "anywhere")]
    pub(crate) backward: bool,
    /// Number of readers, which start at equal distances, with DEPTH requests in flight each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) readers: u32,
    /// Percentage of reads in a load that writes
    #[arg(long, value_name = "N", requires = "write", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) rwmixread: Option<u8>,
    /// Number of concurrent jobs, one thread each, which share COUNT and the rate; with a URI each
    /// has a connection, with vhost-user a queue
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) jobs: u32,
    /// Open load: submit requests at this total rate per second, with latencies measured from the
    /// scheduled times
    #[arg(long, value_name = "N", value_parser = iops)]
    pub(crate) rate_iops: Option<f64>,
    /// Spacing of the requests of --rate-iops
    #[arg(long, value_name = "HOW", default_value = "poisson", requires = "rate_iops")]
    pub(crate) arrivals: Spacing,
    /// Warm-up period that does not count, such as 5s
    #[arg(long, value_name = "TIME", value_parser = settings::long_duration)]
    pub(crate) ramp_time: Option<Duration>,
    /// Duration of the load, such as 30s; with -c, the first limit reached ends it
    #[arg(long, value_name = "TIME", value_parser = settings::long_duration)]
    pub(crate) runtime: Option<Duration>,
    /// Also print the IOPS of each second; implied by --rwmixread, --zipf, --hot, --jobs,
    /// --rate-iops, --ramp-time and --runtime
    #[arg(long)]
    pub(crate) stats: bool,
    /// Emulate a slower device with these latencies, such as read=5ms,write=1ms,parallel=4
    #[arg(long, value_name = "TIMES", value_parser = settings::parse::<DelayOptions>)]
    pub(crate) delay: Option<DelayOptions>,
    /// Emulate a device with these maximum rates, such as bytes=22M
    #[arg(long, value_name = "RATES", value_parser = settings::parse::<RateOptions>)]
    pub(crate) rate: Option<RateOptions>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) results: ResultArgs,
    #[command(flatten)]
    disk: ConfigKeyArgs<BenchDiskOptions>,
}

impl BenchArgs {
    /// True if details over time are printed: with `--stats`, or for a load that `qemu-img bench`
    /// does not have and whose course over time matters.
    pub(crate) fn has_details(&self) -> bool {
        let more =
            [self.rwmixread.is_some(), self.zipf.is_some(), self.hot.is_some(), self.rate_iops.is_some()];
        let times = self.ramp_time.is_some() || self.runtime.is_some();
        self.stats || times || self.jobs > 1 || more.contains(&true)
    }

    /// Replaces the name of a described image by its location.
    ///
    /// # Errors
    /// Fails if the description is wrong, or has options that a benchmark does not support.
    pub(crate) fn resolve(&mut self) -> anyhow::Result<()> {
        let text = self.target.to_string();
        let description = match self.image_opts {
            true => ImageDescription::from_options(&text)?,
            false if text.starts_with("json:") => ImageDescription::from_name(&text)?,
            false => return Ok(()),
        };
        if description.key_secret.is_some() {
            bail!(
                "encrypt.key-secret: encrypted images are not supported here (serve the image, and \
                 name its export)"
            );
        }
        if description.read_only && self.write {
            bail!("read-only=on: -w writes to the image (leave one of them out)");
        }
        self.format = description.format.or(self.format);
        // Options in the description take precedence over the separate ones.
        self.cache = description.cache.unwrap_or(self.cache);
        self.force_share |= description.force_share;
        self.target = BenchTarget::Image(description.image.clone());
        self.description = Some(description);
        Ok(())
    }

    /// The cache sizes of a qcow2 image, and the prefetch settings.
    ///
    /// # Errors
    /// Fails on values that contradict each other, or are out of their range.
    pub(crate) fn disk(&self) -> Result<ConfigWithOrigins<DiskConfig>, ConfigError> {
        // Off by default: prefetching would turn a benchmark of the disk into one of memory.
        let prefetch = PrefetchConfig { mode: PrefetchMode::Off, ..PrefetchConfig::default() };
        let mut disk = ConfigWithOrigins::new(
            DiskConfig { prefetch, ..DiskConfig::default() },
            Origin::new(self.target.to_string()),
        );
        self.disk.read_into(&mut disk, Path::new(""), |_| true)?;
        disk.into_checked()
    }
}

/// Config keys of the measured disk.
#[derive(Clone, Debug)]
pub(crate) struct BenchDiskOptions;

impl OptionSelection for BenchDiskOptions {
    type Config = DiskConfig;

    fn is_option(key: &ConfigKey<DiskConfig>) -> bool {
        key.heading == "Reading ahead"
            || key.heading == "qcow2" && key.name.ends_with("cache-size") | key.name.ends_with("entry-size")
    }

    fn adapt(option: Arg) -> Arg {
        match option.get_id() == "prefetch" {
            true => option
                .help("Read ahead of sequential readers: on, off, or auto, where it pays [default: off]"),
            false => option,
        }
    }
}
