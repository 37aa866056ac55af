//! The options of `weir cgroup`: a file a subcommand, and what several of them share.

mod explain;
mod limit;
mod run;
mod settings;
mod show;
mod watch;

use clap::Subcommand;

pub(crate) use explain::{ExplainArgs, LoadArgs};
pub(crate) use limit::LimitArgs;
pub(crate) use run::{EnterArgs, RunArgs};
pub(crate) use settings::{KeptArgs, SettingsArgs};
pub(crate) use show::{ShowArgs, TopArgs};
pub(crate) use watch::{GuardArgs, WatchArgs};

/// Shown below the list of subcommands.
pub(super) const ABOUT: &str = "\
CGROUP is a path below where cgroups are mounted, a systemd unit, a container's id, the number of a process, or self.
DEV is a disk or its number (254:0), or any path on it; limits are for whole disks.";

/// What to do with control groups.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Limit what a control group does to a disk, or change that
    #[command(after_help = limit::EXAMPLES)]
    Limit(Box<LimitArgs>),
    /// Say which I/O a limit covers, which escapes it, why, and what to do about it
    #[command(after_help = explain::EXAMPLES)]
    Explain(ExplainArgs),
    /// Run bursts, watermarks and the limits of groups, until SIGTERM
    #[command(after_help = watch::EXAMPLES)]
    Watch(WatchArgs),
    /// Run a command under limits of its own, and tell what it did
    #[command(after_help = run::EXAMPLES)]
    Run(Box<RunArgs>),
    /// Show what control groups and their tasks read and write, how fast, and how long they wait
    #[command(after_help = show::EXAMPLES)]
    Show(ShowArgs),
    /// The same as `show`, live on the whole terminal
    #[command(after_help = show::TOP_EXAMPLES)]
    Top(TopArgs),
    /// Become a command in a control group, which `run` starts
    #[command(hide = true)]
    Enter(EnterArgs),
    /// Leave no burst behind when whoever holds the other end of standard input dies
    #[command(hide = true)]
    Guard(GuardArgs),
    /// Read and write as standard input says, for `explain --measure`
    #[command(hide = true)]
    Load(LoadArgs),
}
