//! `weir cgroup`: weir's policy for the control groups of this machine, and what the kernel's own
//! limits do there.
//!
//! ```text
//!   target.rs          what the command line calls a cgroup: a path, a unit, a container, a process
//!   device.rs          what it calls a device: a node, a number, a path on it
//!        │
//!   limit/             what one may do, as asked for, kept and told to the kernel
//!   figures.rs         what those with limits do, for whoever tells of it
//!   watch/             bursts, watermarks and groups, run from outside of the kernel
//!   run/               a command in a cgroup of its own
//!   show/              what cgroups and their tasks do
//!   explain/           which I/O a limit covers, and which escapes it
//!        │
//!   control_group.rs   one cgroup: its files, its processes, its children
//!   hierarchy.rs       where cgroups are mounted, and which version limits block I/O
//!   limit_files.rs     what the kernel holds one to
//!        │
//!   kernel/            what the kernel's files say: text in, values out
//! ```
//!
//! Never caches what the kernel says: another program may change it at any time.

mod command;
pub(crate) mod control_group;
pub(crate) mod device;
pub(crate) mod explain;
pub mod figures;
pub(crate) mod hierarchy;
mod kernel;
pub(crate) mod limit;
mod limit_files;
#[cfg(test)]
pub(crate) mod machine;
mod nature;
mod run;
mod show;
pub(crate) mod target;
pub mod watch;

pub use command::{ABOUT, Command};
use console::Failure;
#[doc(hidden)]
pub use kernel::fuzzing;

/// Does what `weir cgroup` was asked.
///
/// # Errors
/// The subcommand's.
pub fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Limit(arguments) => limit::run(*arguments),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Watch(arguments) => watch::run(arguments),
        Command::Run(arguments) => run::run(*arguments),
        Command::Show(arguments) => show::show(arguments),
        Command::Top(arguments) => show::top(arguments),
        Command::Enter(arguments) => run::enter(arguments),
        Command::Guard(arguments) => watch::guard(&arguments),
        Command::Load(arguments) => explain::run_load(&arguments),
    }
}
