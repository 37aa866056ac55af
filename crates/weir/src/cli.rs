//! The commands by name. What one is told, and what it does, lie where the command does.

use clap::{Arg, ArgAction, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::{prefetch, resume, status, throttle, top};

const ABOUT: &str = "Throttle, prefetch, cache and tune the disks of virtual machines and containers";

#[derive(Debug, Parser)]
#[command(name = "weir", version, about = ABOUT, max_term_width = 100, arg_required_else_help = false)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// What the process's command line says. Behind any command may stand `--version`, which their
    /// help does not repeat.
    pub(crate) fn read() -> Result<Self, clap::Error> {
        with_version(Self::command())
            .try_get_matches()
            .and_then(|mut matches| Self::from_arg_matches_mut(&mut matches))
    }
}

fn with_version(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|command| {
        let version = Arg::new("version").short('V').long("version").action(ArgAction::Version).hide(true);
        with_version(command.version(env!("CARGO_PKG_VERSION")).disable_version_flag(true).arg(version))
    })
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve disks until SIGTERM
    #[command(after_help = daemon::serve::EXAMPLES)]
    Serve(Box<daemon::serve::ServeArgs>),
    /// Show what runs, how fast, and what holds it back
    #[command(after_help = status::EXAMPLES)]
    Status(status::StatusArgs),
    /// Show what a disk or a group is held to, or change it while it runs
    #[command(after_help = throttle::EXAMPLES)]
    Throttle(Box<throttle::ThrottleArgs>),
    /// Show what is read ahead of a disk's readers, or change it while it runs
    #[command(after_help = prefetch::EXAMPLES)]
    Prefetch(prefetch::PrefetchArgs),
    /// Let disks go on that an error of their device has stopped
    #[command(after_help = resume::EXAMPLES)]
    Resume(resume::ResumeArgs),
    /// The same as `status`, live on the whole terminal
    #[command(after_help = top::EXAMPLES)]
    Top(top::TopArgs),
    /// Measure what a device can do, for watermarks to go by
    #[command(after_help = lab::probe::EXAMPLES)]
    Probe(lab::probe::ProbeArgs),
    /// Make, look into, check and change images
    #[command(subcommand, version, propagate_version = true)]
    Image(Box<image_tool::Command>),
    /// Limit control groups, explain what a limit misses, and show who does what
    #[command(subcommand, after_help = cgroup::ABOUT)]
    Cgroup(cgroup::Command),
    /// Send requests to an image, and tell how long they took
    #[command(after_help = lab::bench::EXAMPLES)]
    Bench(Box<lab::bench::BenchArgs>),
    /// Replay a trace through limits, groups and prefetching, in virtual time
    #[command(after_help = lab::simulate::EXAMPLES)]
    Simulate(Box<lab::simulate::SimulateArgs>),
    /// Show what a measurement found, or compare two
    #[command(after_help = lab::report::EXAMPLES)]
    Report(lab::report::ReportArgs),
    /// Measure cache modes, cluster sizes, caches and prefetch, and tell what to choose
    #[command(after_help = lab::tune::EXAMPLES)]
    Tune(Box<lab::tune::TuneArgs>),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn the_command_is_consistent() {
        Cli::command().debug_assert();
    }
}
