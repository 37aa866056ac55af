//! Options of `weir simulate`: those of `weir serve` about limits of disks, and the requests to
//! simulate.

use std::{num::NonZeroUsize, path::PathBuf, time::Duration};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, builder::Resettable, parser::ValueSource};
use policy::prefetch;
use settings::{
    ConfigError, ConfigKey, ConfigWithOrigins, DiskConfig, MAX_WORKERS, Origin, ThrottleConfig,
    arguments::{ConfigKeyArgs, OptionSelection, describe_shared_group},
};
use storage::{delay::DelayOptions, rate::RateOptions};

use crate::{
    result::arguments::ResultArgs,
    simulate::{ClusterSpec, DeviceSpec, SweepValues, Workload, generators},
    trace::ReadingArgs,
};

/// Shown below the options.
pub const EXAMPLES: &str = concat!(
    "\
Examples:
  weir simulate vm1.csv.zst --iops-total 1000 --iops-total-max 5000 --iops-total-max-length 5
      The effect of these limits on each disk of the trace separately.
  weir simulate a.csv b.csv --config /etc/weir.toml
      The effect of a daemon with this config file: groups, weights, watermarks and prefetching.
  weir simulate vm1.csv --device /var/lib/images --bps-total 50M --report vm1.html
      On the device below that directory, as `weir probe` measured it; with charts.
  weir simulate vm1.csv --sweep iops-total=500..5000:500 --p99 10ms
      A simulation for each limit, and the smallest that keeps 99 of 100 requests below 10 ms.
  weir simulate day.csv --config weir.toml --sweep iops-total=200..2000:200 \\
      --sweep-of backup --p99 5ms --p99-of db
      The largest limit of backup that keeps 99 of 100 requests of db below 5 ms.
  weir simulate --workload random:iops=5000,size=4K,seconds=10 --iops-total 4000
      Requests of a generator instead of a trace's.
  weir simulate --workload two-streams
      The table of io-throttle v16 (2009), beside its own figures.
  weir simulate --cluster hosts=1000,disks=10 --iops-total 100000 --report cluster.html
      How fast the shares of 1,000 hosts follow their demand, and the load on etcd.

Traces: weir's CSV (time_ns,disk,op,offset,length), fio's iolog 2 and 3, blkparse, MSR Cambridge, Alibaba, CloudPhysics, SPC, MQSim, weir's recordings, and by --columns any other; plain, gz or zst; - is standard input. Requests arrive at the times in the trace, regardless of the latency of earlier ones.
", settings::sizes!(), " Times take ns, us, ms or s.
Exit status: 0 simulated, 1 failed, or a trace was not read to the end, 2 wrong use of the command line."
);

/// Arguments of `weir simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The first field: taking a value removes it from the matches.
    #[command(flatten)]
    pub(crate) given: GivenOptions,
    /// Traces, merged by time; - is standard input
    #[arg(value_name = "TRACE", required_unless_present_any = ["workload", "cluster"])]
    pub(crate) traces: Vec<PathBuf>,
    /// Take disks, groups and limits from this file of `weir serve`; images are not opened
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Hosts that share the limits by etcd, with the daemon's own code: hosts=N,disks=N of each,
    /// busy=PERCENT and idle=PERCENT of them, change=PERCENT and every=TIME, tick=TIME, lease=TIME,
    /// fallback-share=PERCENT, …; see docs/cluster.md for all
    #[arg(long, value_name = "SPEC", value_parser = settings::parse::<ClusterSpec>, conflicts_with_all = ["traces", "config"])]
    pub(crate) cluster: Option<ClusterSpec>,
    #[command(flatten)]
    pub(crate) input: InputArgs,
    #[command(flatten)]
    pub(crate) devices: SimulateDeviceArgs,
    #[command(flatten)]
    disk: ConfigKeyArgs<SimulateDiskOptions>,
    #[command(flatten)]
    pub(crate) sweep: SweepArgs,
    #[command(flatten)]
    pub(crate) output: SimulateOutputArgs,
    #[command(flatten)]
    pub(crate) results: ResultArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Requests")]
pub(crate) struct InputArgs {
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["traces", "format", "columns", "window", "absolute_time"], value_parser = settings::parse::<Workload>,
        help = format!("Requests of a generator instead: {}; with :key=value,…", generators()))]
    pub(crate) workload: Option<Workload>,
    /// Seed of the generator: the same number gives the same requests
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "traces")]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Devices")]
pub(crate) struct SimulateDeviceArgs {
    /// Device shared by all disks: read=TIME,write=TIME,flush=TIME,parallel=N,read-bps=SIZE,… or
    /// a DIR or DEVICE measured by `weir probe`; --delay and --rate of `weir serve` describe a
    /// separate device for each disk [default: no latency]
    #[arg(long, value_name = "SPEC|DIR|DEVICE", value_parser = settings::parse::<DeviceSpec>)]
    pub(crate) device: Option<DeviceSpec>,
    /// Each disk's device, as `weir serve` imitates it, such as read=5ms,write=1ms,parallel=4
    #[arg(long, value_name = "TIMES", value_parser = settings::parse::<DelayOptions>, hide = true, conflicts_with_all = ["config", "device"])]
    pub(crate) delay: Option<DelayOptions>,
    /// Each disk's device, as `weir serve` imitates it, such as bytes=22M; with shared=NAME of all
    /// disks together
    #[arg(long, value_name = "RATES", value_parser = settings::parse::<RateOptions>, hide = true, conflicts_with_all = ["config", "device"])]
    pub(crate) rate: Option<RateOptions>,
    /// Each disk's size, past which a request is an error [default: any]
    #[arg(long, value_name = "SIZE", value_parser = settings::size, conflicts_with = "config")]
    pub(crate) size: Option<u64>,
    /// Directory with results of `weir probe` [default: /var/lib/weir, or ~/.local/state/weir if
    /// not root]
    #[arg(long, value_name = "DIR", requires = "device")]
    pub(crate) state: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Which limit")]
pub(crate) struct SweepArgs {
    /// Simulate each value of one limit, such as iops-total=500..5000:500
    #[arg(long, value_name = "LIMIT=FROM..TO:STEP", value_parser = settings::parse::<SweepValues>, conflicts_with = "events")]
    pub(crate) sweep: Option<SweepValues>,
    /// Disk or group whose limit varies [default: the only group, or all disks]
    #[arg(long, value_name = "NAME", requires = "sweep")]
    pub(crate) sweep_of: Option<String>,
    /// Find the limit that keeps 99 of 100 requests below this latency: the smallest for requests
    /// that it throttles, the largest for those of other disks
    #[arg(long, value_name = "TIME", value_parser = settings::duration, requires = "sweep")]
    pub(crate) p99: Option<Duration>,
    /// Disk or group whose requests --p99 judges [default: that of --sweep-of, or all disks]
    #[arg(long, value_name = "NAME", requires = "p99")]
    pub(crate) p99_of: Option<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct SimulateOutputArgs {
    /// Write the result of each request to this file (CSV); uses one thread
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Threads that simulate, at most 256; results do not depend on it [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Names of the options that were given.
#[derive(Clone, Debug, Default)]
pub(crate) struct GivenOptions(Vec<String>);

impl GivenOptions {
    /// The first given option that is not in `taken`.
    pub(crate) fn first_but(&self, taken: &[&str]) -> Option<&str> {
        self.0.iter().map(String::as_str).find(|given| !taken.contains(given))
    }

    /// The first given option that is in `named`.
    pub(crate) fn first_of(&self, named: &[&str]) -> Option<&str> {
        self.0.iter().map(String::as_str).find(|given| named.contains(given))
    }
}

impl Args for GivenOptions {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for GivenOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        // clap lists argument groups as well, under their type names.
        let is_option = |name: &str| !name.contains(char::is_uppercase);
        let ids = matches.ids().map(clap::Id::as_str).filter(|id| is_option(id));
        // Defaults are no given options.
        let given = ids.filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
        Ok(Self(given.map(|id| id.replace('_', "-")).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Settings of disks that no config file names.
#[derive(Debug)]
pub(crate) struct DefaultDiskSettings {
    /// A group of all disks: its name and settings.
    pub(crate) group: Option<(String, ThrottleConfig)>,
    /// Settings of each disk.
    pub(crate) disk: ThrottleConfig,
    /// Prefetching of each disk.
    pub(crate) prefetch: prefetch::PrefetchConfig,
}

impl SimulateArgs {
    /// Settings that the options give to disks.
    pub(crate) fn terms(&self) -> Result<DefaultDiskSettings, ConfigError> {
        let mut disk = ConfigWithOrigins::new(DiskConfig::default(), Origin::new("disk"));
        let group = self.disk.read_disk(&mut disk, |_| true)?;
        // Reported at the option, with its origin.
        if let Some(group) = group.as_ref().filter(|group| group.name.is_empty()) {
            return Err(group.own_origin().error("the name is empty (give it one)"));
        }
        let group = group.map(ConfigWithOrigins::into_checked).transpose()?;
        let disk = disk.into_checked()?;
        let group = group.map(|group| (group.name.clone(), group.settings));
        Ok(DefaultDiskSettings { group, disk: disk.settings, prefetch: disk.prefetch })
    }
}

/// Keys of disks that no config file names.
#[derive(Clone, Debug)]
pub(crate) struct SimulateDiskOptions;

impl OptionSelection for SimulateDiskOptions {
    type Config = DiskConfig;

    fn is_option(key: &ConfigKey<DiskConfig>) -> bool {
        ["Reading ahead", "Limits", settings::SIZE_HEADING, "Shares"].contains(&key.heading)
            || key.name == "group"
    }

    fn adapt(option: Arg) -> Arg {
        let option = match option.get_id() == "group" {
            true => describe_shared_group(option).help_heading(Resettable::Reset),
            false => option,
        };
        option.conflicts_with("config")
    }
}

/// Parses a number of threads, up to the maximum of a daemon.
fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads = text.parse().ok().filter(|threads: &NonZeroUsize| threads.get() <= MAX_WORKERS);
    threads.ok_or_else(|| format!("is not a number from 1 to {MAX_WORKERS}"))
}
