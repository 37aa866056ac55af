//! The subcommands of `weir cgroup` by name. Each has its options in an `arguments.rs` beside its
//! code.

use clap::Subcommand;

use crate::{
    explain::arguments::{ExplainArgs, LoadArgs},
    limit::arguments::CgroupLimitArgs,
    run::arguments::{EnterArgs, RunArgs},
    show::arguments::{CgroupTopArgs, ShowArgs},
    watch::arguments::{GuardArgs, WatchArgs},
};

/// Shown below the list of subcommands.
pub const ABOUT: &str = "\
CGROUP is a path below the cgroup mount, a systemd unit, a container's id, a pid, or self.
DEV is a disk, its number (254:0), or any path on it; limits apply to whole disks.";

/// The subcommands of `weir cgroup`.
#[derive(Debug, Subcommand)]
pub enum CgroupCommand {
    /// Set, change or show a control group's limits on a disk
    #[command(after_help = crate::limit::arguments::EXAMPLES)]
    Limit(Box<CgroupLimitArgs>),
    /// Explain which I/O a limit covers, which escapes it, why, and how to fix it
    #[command(after_help = crate::explain::arguments::EXAMPLES)]
    Explain(ExplainArgs),
    /// Enforce bursts, watermarks and limits of groups until SIGTERM
    #[command(after_help = crate::watch::arguments::EXAMPLES)]
    Watch(WatchArgs),
    /// Run a command under limits, and report its I/O
    #[command(after_help = crate::run::arguments::EXAMPLES)]
    Run(Box<RunArgs>),
    /// Show I/O rates and wait times of control groups and their tasks
    #[command(after_help = crate::show::arguments::EXAMPLES)]
    Show(ShowArgs),
    /// Show control groups and their tasks live on the whole terminal
    #[command(after_help = crate::show::arguments::TOP_EXAMPLES)]
    Top(CgroupTopArgs),
    /// Run a command inside a control group, for `run`
    #[command(hide = true)]
    Enter(EnterArgs),
    /// Restore the configured limits when standard input is closed, for `watch`
    #[command(hide = true)]
    Guard(GuardArgs),
    /// Read and write files as requested on standard input, for `explain --measure`
    #[command(hide = true)]
    Load(LoadArgs),
}
