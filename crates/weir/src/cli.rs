//! The command line. Arguments and work of a command are in the module of that command.

mod summary;

use std::{env, ffi::OsString};

use clap::{Arg, ArgAction, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, error::ErrorKind};
use daemon::serve::{QEMU_HEADING, ServeArgs};
use settings::arguments::limits;

use crate::{
    attach, backup, bitmap, cluster, complete, disks_and_groups, generate, jobs, mirror, mount_helper,
    prefetch, record, reload, resume, snapshot, status, stream, throttle, top, verify,
};

const ABOUT: &str = "Throttle, prefetch, cache and tune the disks of virtual machines and containers";

#[derive(Debug, Parser)]
#[command(name = "weir", version, about = ABOUT, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: WeirCommand,
}

impl Cli {
    /// Parses the process's command line; `None` if there is nothing to do. Every command accepts
    /// `--version`, which its help omits.
    pub(crate) fn read() -> Result<Option<Self>, clap::Error> {
        let command = Self::full_command();
        let mut arguments: Vec<_> = env::args_os().collect();
        if mount_helper::is_called(arguments.first()) {
            let mounts = mount_helper::to_attach(arguments.drain(1..), |name| has_option(&command, name));
            let mounts =
                mounts.map_err(|message| clap::Error::raw(ErrorKind::InvalidValue, message + "\n"))?;
            let Some(attach) = mounts else { return Ok(None) };
            arguments.extend(attach);
            // QEMU's scripts call `qemu-img bench`; `weir image` does not measure.
        }
        // Before parsing: clap has no alias across levels of subcommands.
        alias_image_bench(&mut arguments);
        let command =
            if summary::is_requested(&arguments) { summary::with_summary(command) } else { command };
        let mut matches = command.try_get_matches_from(arguments)?;
        Self::from_arg_matches_mut(&mut matches).map(Some)
    }

    /// Definition of the command line, with everything that is added to derived parts.
    pub(crate) fn full_command() -> clap::Command {
        complete::with_values(with_limits(accept_negative_numbers(with_version(Self::command()))))
    }

    /// Parses the arguments after `weir serve`, with the options of `qemu-storage-daemon` in its
    /// help.
    pub(crate) fn serve(tokens: impl Iterator<Item = OsString>) -> Result<ServeArgs, clap::Error> {
        let tokens = ["weir", "serve"].map(OsString::from).into_iter().chain(tokens);
        let is_of_qemu = |arg: &Arg| arg.get_help_heading() == Some(QEMU_HEADING);
        let show = |arg: Arg| if is_of_qemu(&arg) { arg.hide(false) } else { arg };
        let command = Self::full_command().mut_subcommand("serve", |serve| serve.mut_args(show));
        let mut matches = command.try_get_matches_from(tokens)?;
        match Self::from_arg_matches_mut(&mut matches)?.command {
            WeirCommand::Serve(arguments) => Ok(*arguments),
            _ => unreachable!("the words are those of serve"),
        }
    }
}

/// Makes `weir image bench` an alias of `weir bench`: scripts replace `qemu-img` by `weir image`.
fn alias_image_bench(arguments: &mut Vec<OsString>) {
    let matches_at = |at: usize, token: &str| arguments.get(at).is_some_and(|given| given == token);
    if matches_at(1, "image") && matches_at(2, "bench") {
        arguments.remove(1);
    }
}

/// True if `attach` has this long option.
fn has_option(command: &clap::Command, name: &str) -> bool {
    let attach = command.find_subcommand("attach");
    attach.is_some_and(|attach| attach.get_arguments().any(|argument| argument.get_long() == Some(name)))
}

/// Value names of options that take a number.
const NUMBERS: [&str; 9] = ["SIZE", "N", "TIME", "SECONDS", "PERCENT", "COUNT", "DEPTH", "OFFSET", "BYTE"];

/// Accepts negative numbers as values, so that the option's own parser rejects them with its rule
/// and clap does not report an unknown option.
fn accept_negative_numbers(command: clap::Command) -> clap::Command {
    let is_number = |argument: &Arg| {
        let names = argument.get_value_names().unwrap_or_default();
        !argument.is_positional() && names.iter().any(|name| NUMBERS.contains(&name.as_str()))
    };
    let allow =
        |argument: Arg| if is_number(&argument) { argument.allow_hyphen_values(true) } else { argument };
    command.mut_args(allow).mut_subcommands(accept_negative_numbers)
}

/// Adds the description of the limits to the help of each command that hides them in its list.
fn with_limits(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(with_limits);
    let has_limits = command.get_arguments().any(|argument| argument.get_id() == "iops-total");
    let below = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    match has_limits {
        true => command.after_help(format!("{}\n\n{below}", limits::LIMITS_HELP)),
        // Subcommands do not inherit clap's version flag, and a visible one would lengthen every
        // help.
        false => command,
    }
}

fn with_version(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|command| {
        let version = Arg::new("version").short('V').long("version").action(ArgAction::Version).hide(true);
        with_version(command.version(env!("CARGO_PKG_VERSION")).disable_version_flag(true).arg(version))
    })
}

/// All commands.
#[derive(Debug, Subcommand)]
pub(crate) enum WeirCommand {
    /// Serve disks until SIGTERM
    #[command(
        after_help = daemon::serve::EXAMPLES,
        override_usage = "weir serve [OPTIONS] <IMAGE>...\n       weir serve [OPTIONS] --config <FILE>"
    )]
    Serve(Box<ServeArgs>),
    /// Check if a daemon would start with a config file
    #[command(after_help = daemon::serve::CHECK_EXAMPLES)]
    CheckConfig(daemon::serve::CheckArgs),
    /// Attach a disk as a block device of this host, or mount its file system
    #[command(after_help = attach::ATTACH_EXAMPLES)]
    Attach(Box<attach::AttachArgs>),
    /// Detach a disk that was attached
    #[command(after_help = attach::DETACH_EXAMPLES)]
    Detach(attach::DetachArgs),
    /// Run the commands of `serve --on-event`
    #[command(hide = true)]
    OnEventRunner,
    /// Background process of an attached disk
    #[command(hide = true)]
    AttachKeeper,
    /// Remove an orphaned ublk device
    #[command(hide = true)]
    UblkGuard,
    /// Show disks and groups with their limits, rates and throttle causes
    #[command(after_help = status::EXAMPLES)]
    Status(status::StatusArgs),
    /// Check if limits, reservations, shares and latencies hold
    #[command(after_help = verify::EXAMPLES)]
    Verify(verify::VerifyArgs),
    /// Show or change the limits of a disk or a group at run time
    #[command(after_help = throttle::EXAMPLES)]
    Throttle(Box<throttle::ThrottleArgs>),
    /// Show the hosts that share limits, with their demand and quota
    #[command(subcommand, after_help = cluster::EXAMPLES)]
    Cluster(cluster::ClusterCommand),
    /// Show or change the prefetching of a disk at run time
    #[command(after_help = prefetch::EXAMPLES)]
    Prefetch(prefetch::PrefetchArgs),
    /// Add, remove or move disks of a running daemon
    #[command(subcommand, after_help = disks_and_groups::DISK_EXAMPLES)]
    Disk(disks_and_groups::DiskCommand),
    /// Add or remove groups, whose disks share limits
    #[command(subcommand, after_help = disks_and_groups::GROUP_EXAMPLES)]
    Group(disks_and_groups::GroupCommand),
    /// Show or change the dirty bitmaps of a disk of the daemon
    #[command(after_help = bitmap::EXAMPLES)]
    Bitmap(bitmap::BitmapArgs),
    /// Copy a disk of the daemon to another image while it is used
    #[command(after_help = backup::EXAMPLES)]
    Backup(Box<backup::BackupArgs>),
    /// Keep the content of disks at this instant while they are used
    #[command(after_help = snapshot::EXAMPLES)]
    Snapshot(Box<snapshot::SnapshotArgs>),
    /// Copy a disk of the daemon to another image, and move it there, while it is used
    #[command(after_help = mirror::EXAMPLES)]
    Mirror(Box<mirror::MirrorArgs>),
    /// Shorten the chain of backing files of a disk while it is used
    #[command(after_help = stream::EXAMPLES)]
    Stream(Box<stream::StreamArgs>),
    /// Show the jobs of the daemon: backups, mirrors and streams
    #[command(after_help = jobs::EXAMPLES)]
    Jobs(jobs::JobsArgs),
    /// Pause, resume, complete, cancel, change or dismiss a job
    #[command(subcommand, after_help = jobs::EXAMPLES)]
    Job(jobs::JobCommand),
    /// Reload the daemon's config file
    #[command(after_help = reload::EXAMPLES)]
    Reload(reload::ReloadArgs),
    /// Resume disks that an I/O error has stopped
    #[command(after_help = resume::EXAMPLES)]
    Resume(resume::ResumeArgs),
    /// Show the status live on the whole terminal
    #[command(after_help = top::EXAMPLES)]
    Top(top::TopArgs),
    /// Measure the capacity of a device, for watermarks
    #[command(after_help = lab::probe::EXAMPLES)]
    Probe(lab::probe::ProbeArgs),
    /// Create, inspect, check and change images
    #[command(subcommand, version, propagate_version = true)]
    Image(Box<image_tool::ImageCommand>),
    /// Limit control groups, show their I/O, and explain what a limit does not cover
    #[command(subcommand, after_help = cgroup::ABOUT)]
    Cgroup(cgroup::CgroupCommand),
    /// Run a volume plugin for Docker and Podman, with images as volumes
    #[command(after_help = container::EXAMPLES)]
    DockerPlugin(container::PluginArgs),
    /// Record the requests of disks and their latencies in a file
    #[command(after_help = record::EXAMPLES)]
    Record(record::RecordArgs),
    /// Summarize traces, and convert them to other formats
    #[command(subcommand, long_about = lab::trace::convert::ABOUT)]
    Trace(lab::trace::convert::TraceCommand),
    /// Send requests to an image, and report throughput and latencies
    #[command(after_help = lab::bench::EXAMPLES)]
    Bench(Box<lab::bench::BenchArgs>),
    /// Replay a trace through limits, groups and prefetching, in virtual time
    #[command(after_help = lab::simulate::EXAMPLES)]
    Simulate(Box<lab::simulate::SimulateArgs>),
    /// Recommend limits that meet a target for the disks of a trace with the least capacity
    #[command(after_help = lab::advise::EXAMPLES)]
    Advise(Box<lab::advise::AdviseArgs>),
    /// Show the result of a measurement, or compare two
    #[command(after_help = lab::report::EXAMPLES)]
    Report(lab::report::ReportArgs),
    /// Measure cache modes, cluster sizes, caches and prefetching, and recommend settings
    #[command(after_help = lab::tune::EXAMPLES)]
    Tune(Box<lab::tune::TuneArgs>),
    /// Write the manual pages and the completion scripts of shells
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
}

#[cfg(test)]
mod option_rules;

#[cfg(test)]
mod tests {

    use super::Cli;

    #[test]
    fn the_command_is_consistent() {
        Cli::full_command().debug_assert();
    }

    fn error_text(line: &str) -> String {
        let tokens = std::iter::once("weir").chain(line.split_whitespace());
        let matches = Cli::full_command().try_get_matches_from(tokens);
        let text = matches.expect_err(line).render().to_string();
        text.strip_prefix("error: ").unwrap_or(&text).to_owned()
    }

    #[test]
    fn negative_numbers_are_rejected_by_their_option() {
        for (line, option, rule) in [
            ("serve a --bps-total -5", "'-5' for '--bps-total <SIZE>'", "is not a size"),
            ("serve a --bps-total=-5", "'-5' for '--bps-total <SIZE>'", "is not a size"),
            ("serve a --memory -5G", "'-5G' for '--memory <SIZE>'", "is not a size"),
            ("throttle x --iops-total -1", "'-1' for '--iops-total <N>'", "is not a whole number"),
            ("throttle x --read-iops-sec -1", "'-1' for '--read-iops-sec", "is not a whole number"),
            ("status --interval -1s", "'-1s' for '--interval <TIME>'", "is not a duration"),
            ("cgroup limit / --device sda --bps-total -5", "'-5' for '--bps-total <SIZE>'", "is not a size"),
        ] {
            let text = error_text(line);
            assert!(
                text.starts_with(&format!("invalid value {option}")) && text.contains(rule),
                "{line}: {text}"
            );
        }
    }

    /// All help texts that explain sizes use the same text.
    #[test]
    fn sizes_are_described_in_one_way() {
        fn look(command: &clap::Command, found: &mut usize) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            if help.contains("powers of 10") {
                assert!(help.contains(settings::sizes!()), "{}: {help}", command.get_name());
                *found += 1;
            }
            command.get_subcommands().for_each(|command| look(command, found));
        }
        let mut found = 0;
        look(&Cli::full_command(), &mut found);
        assert!(found > 4, "{found} commands describe sizes");
    }
}
