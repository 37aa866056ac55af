//! `weir cgroup`: limits for the control groups of this machine, and reports on their effect.
//!
//! ```text
//!   target.rs          resolves a cgroup named on the command line: a path, a unit, a container, a process
//!   device.rs          resolves a device: a node, a number, a path on it
//!        │
//!   limit/             limits: stored in a file and written to the kernel
//!   cgroup_counters.rs counters of control groups with limits, for metrics and status
//!   watch/             bursts, watermarks and groups, enforced from user space
//!   run/               a command in a temporary cgroup
//!   show/              I/O of cgroups and their tasks
//!   explain/           which I/O a limit covers, and which escapes it
//!        │
//!   control_group.rs   one cgroup: its files, its processes, its children
//!   hierarchy.rs       mounts of the hierarchies, and the version that limits block I/O
//!   limit_files.rs     limits in force in the kernel
//!        │
//!   kernel/            parsers of the kernel's files: text in, values out
//! ```
//!
//! Never caches the kernel's values: another program may change them at any time.

pub mod cgroup_counters;
mod command;
pub(crate) mod control_group;
pub(crate) mod device;
pub(crate) mod explain;
#[cfg(test)]
pub(crate) mod fake_machine;
mod file_system_class;
pub(crate) mod hierarchy;
mod kernel;
pub(crate) mod limit;
mod limit_files;
mod run;
mod show;
pub(crate) mod target;
pub mod watch;

pub use command::{ABOUT, CgroupCommand};
use console::CommandFailure;
#[doc(hidden)]
pub use kernel::fuzzing;

/// Runs a subcommand of `weir cgroup`.
///
/// # Errors
/// Returns the error of the subcommand.
pub fn run(command: CgroupCommand) -> Result<(), CommandFailure> {
    match command {
        CgroupCommand::Limit(arguments) => limit::run(*arguments),
        CgroupCommand::Explain(arguments) => explain::run(&arguments),
        CgroupCommand::Watch(arguments) => watch::run(arguments),
        CgroupCommand::Run(arguments) => run::run(*arguments),
        CgroupCommand::Show(arguments) => show::show(arguments),
        CgroupCommand::Top(arguments) => show::top(arguments),
        CgroupCommand::Enter(arguments) => run::enter(arguments),
        CgroupCommand::Guard(arguments) => watch::guard(&arguments),
        CgroupCommand::Load(arguments) => explain::run_load(&arguments),
    }
}
