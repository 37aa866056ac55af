//! The options of `weir bench`: those of `qemu-img bench`, by the same letters, and a few of its own.

use block::storage::{CacheMode, Format, delay::DelayOptions, rate::RateOptions};
use clap::{Args, ValueEnum};

use policy::prefetch::Settings;

use super::{CacheArgs, prefetch::LongArgs};
use crate::plan::{self, Image, Qcow2Settings, Wrong};

/// Shown below the options.
pub(super) const EXAMPLES: &str = "\
Examples:
  weir bench -f raw -t none -s 4K --random vm1.raw
      75000 random reads of 4 KiB past the page cache, 64 in flight.
  weir bench -f raw -w -c 10000 -d 32 -s 64K --flush-interval 64 scratch.raw
      10000 writes of 64 KiB one behind the other, with a flush after every 64. What was there is gone.
  weir bench -f raw -t none -d 1 --prefetch on vm1.raw
      One sequential reader with one request in flight, read ahead of. Without --prefetch, nothing is.
  weir bench --json memory:1G
      What the data path costs where the disk costs nothing.

Requests go through the very code that `weir serve` runs, on one thread, without a client and a socket in between.
Sizes take K, M, G or T (powers of 1024).
Exit status: 0 measured, 1 failed, 2 wrong use of the command line.";

/// How `qemu-img bench -i` calls the ways of doing I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Aio {
    /// A pool of threads.
    Threads,
    /// Linux AIO.
    Native,
    /// The one that weir has.
    #[value(name = "io_uring")]
    IoUring,
}

/// What `weir bench` is told.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A file, a block device, memory:SIZE or null:SIZE
    #[arg(value_name = "IMAGE", value_parser = plan::read::<Image>)]
    pub(crate) image: Image,
    /// Requests in all
    #[arg(short = 'c', long, value_name = "COUNT", default_value_t = 75_000, value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) count: u64,
    /// Requests in flight
    #[arg(short = 'd', long, value_name = "DEPTH", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) depth: u32,
    /// How the image's bytes are laid out [default: found by probing, where that is safe]
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = plan::read::<Format>)]
    pub(crate) format: Option<Format>,
    /// Flush after every N writes, once those in flight are done; N is at least DEPTH
    #[arg(long, value_name = "N", requires = "write")]
    pub(crate) flush_interval: Option<u64>,
    /// Send requests on while a flush is under way
    #[arg(long, requires = "flush_interval")]
    pub(crate) no_drain: bool,
    /// How I/O is done; weir has io_uring alone
    #[arg(short = 'i', long, value_name = "AIO")]
    pub(crate) aio: Option<Aio>,
    /// The same as -i native
    #[arg(short = 'n', long, conflicts_with = "aio")]
    pub(crate) native: bool,
    /// Where the first request begins, in bytes
    #[arg(short = 'o', long, value_name = "OFFSET", default_value = "0", value_parser = plan::size)]
    pub(crate) offset: u64,
    /// The byte that is written, from 0 to 255 [default: 0]
    #[arg(long, value_name = "BYTE", requires = "write")]
    pub(crate) pattern: Option<u8>,
    /// Print nothing but errors
    #[arg(short = 'q', long, conflicts_with = "json")]
    pub(crate) quiet: bool,
    /// Bytes of a request
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4K", value_parser = plan::size)]
    pub(crate) buffer_size: u64,
    /// From the beginning of a request to that of the next; past the end it goes on at the beginning [default: SIZE of a request]
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = plan::size)]
    pub(crate) step_size: Option<u64>,
    /// The host's page cache: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value_t, value_parser = plan::read::<CacheMode>)]
    pub(crate) cache: CacheMode,
    /// Write instead of reading, which destroys what is in the image
    #[arg(short = 'w', long)]
    pub(crate) write: bool,
    /// Read an image that somebody else has locked for writing
    #[arg(short = 'U', long, conflicts_with = "write")]
    pub(crate) force_share: bool,
    /// Requests at random multiples of the step behind OFFSET
    #[arg(long)]
    pub(crate) random: bool,
    /// Where the random offsets begin: the same number gives the same offsets
    #[arg(long, value_name = "N", default_value_t = 1, requires = "random")]
    pub(crate) seed: u64,
    /// So many requests one behind the other from each random place
    #[arg(long, value_name = "N", default_value_t = 1, requires = "random", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) run: u64,
    /// From the end to the beginning
    #[arg(long, conflicts_with = "random")]
    pub(crate) backward: bool,
    /// So many go each their own way, from places at equal distances, with DEPTH requests in flight each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) readers: u32,
    /// A slower device: each request takes longer, such as read=5ms,write=1ms,parallel=4
    #[arg(long, value_name = "TIMES", value_parser = plan::read::<DelayOptions>)]
    pub(crate) delay: Option<DelayOptions>,
    /// A narrower device: so much passes per second, such as bytes=22M
    #[arg(long, value_name = "RATES", value_parser = plan::read::<RateOptions>)]
    pub(crate) rate: Option<RateOptions>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    caches: CacheArgs,
    #[command(flatten)]
    prefetch: LongArgs<false>,
}

impl BenchArgs {
    /// What is said of a qcow2 image's caches, once it is known to make sense.
    ///
    /// # Errors
    /// If more is said of them than can be true.
    pub(crate) fn qcow2(&self) -> Result<Qcow2Settings, Wrong> {
        self.caches.draft().check()
    }

    /// What is read ahead.
    ///
    /// # Errors
    /// A number out of its range.
    pub(crate) fn prefetch(&self) -> Result<Settings, Wrong> {
        self.prefetch.draft().check()
    }
}
