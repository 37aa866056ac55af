//! The subcommands of `weir cgroup` by name. Each has its options in an `arguments.rs` beside its
//! code.

use clap::Subcommand;

use crate::{
    explain::arguments::{ExplainArgs, LoadArgs},
    limit::arguments::CgroupLimitArgs,
    run::arguments::{EnterArgs, RunArgs},
    show::arguments::{ShowArgs, CgroupTopArgs},
    watch::arguments::{GuardArgs, WatchArgs},
};

/// Shown below the list of subcommands.
pub const ABOUT: &str = "\
CGROUP is a path below where cgroups are mounted, a systemd unit, a container's id, the number of a process, or self.
DEV is a disk or its number (254:0), or any path on it; limits are for whole disks.";

/// The subcommands of `weir cgroup`.
#[derive(Debug, Subcommand)]
pub enum CgroupCommand {
    /// Limit what a control group does to a disk, or change that
    #[command(after_help = crate::limit::arguments::EXAMPLES)]
    Limit(Box<CgroupLimitArgs>),
    /// Say which I/O a limit covers, which escapes it, why, and what to do about it
    #[command(after_help = crate::explain::arguments::EXAMPLES)]
    Explain(ExplainArgs),
    /// Run bursts, watermarks and the limits of groups, until SIGTERM
    #[command(after_help = crate::watch::arguments::EXAMPLES)]
    Watch(WatchArgs),
    /// Run a command under limits of its own, and tell what it did
    #[command(after_help = crate::run::arguments::EXAMPLES)]
    Run(Box<RunArgs>),
    /// Show what control groups and their tasks read and write, how fast, and how long they wait
    #[command(after_help = crate::show::arguments::EXAMPLES)]
    Show(ShowArgs),
    /// The same as `show`, live on the whole terminal
    #[command(after_help = crate::show::arguments::TOP_EXAMPLES)]
    Top(CgroupTopArgs),
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
