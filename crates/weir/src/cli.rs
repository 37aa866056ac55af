//! The commands by name. What one is told, and what it does, lie where the command does.

mod brief;

use std::{env, ffi::OsString};

use clap::{Arg, ArgAction, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, error::ErrorKind};
use daemon::serve::{QEMU_HEADING, ServeArgs};
use settings::arguments::limits;

use crate::{
    adding, attach, cluster, complete, generate, mount_helper, prefetch, record, reload, resume, status,
    throttle, top, verify,
};

const ABOUT: &str = "Throttle, prefetch, cache and tune the disks of virtual machines and containers";

#[derive(Debug, Parser)]
#[command(name = "weir", version, about = ABOUT, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// What the process's command line says; none where it asks for nothing. Behind any command may
    /// stand `--version`, which their help does not repeat.
    pub(crate) fn read() -> Result<Option<Self>, clap::Error> {
        let command = Self::whole();
        let mut words: Vec<_> = env::args_os().collect();
        if mount_helper::is_called(words.first()) {
            let mounts = mount_helper::as_attach(words.drain(1..), |name| has_option(&command, name));
            let mounts = mounts.map_err(|what| clap::Error::raw(ErrorKind::InvalidValue, what + "\n"))?;
            let Some(attach) = mounts else { return Ok(None) };
            words.extend(attach);
        }
        as_bench(&mut words);
        let command = if brief::is_asked_for(&words) { brief::brief(command) } else { command };
        let mut matches = command.try_get_matches_from(words)?;
        Self::from_arg_matches_mut(&mut matches).map(Some)
    }

    /// The command line's definition, with all that is added to the parts of it.
    pub(crate) fn whole() -> clap::Command {
        complete::with_values(with_limits(with_numbers(with_version(Self::command()))))
    }

    /// What follows `weir serve`, with the options of `qemu-storage-daemon` in its help.
    pub(crate) fn serve(words: impl Iterator<Item = OsString>) -> Result<ServeArgs, clap::Error> {
        let words = ["weir", "serve"].map(OsString::from).into_iter().chain(words);
        let is_of_qemu = |arg: &Arg| arg.get_help_heading() == Some(QEMU_HEADING);
        let show = |arg: Arg| if is_of_qemu(&arg) { arg.hide(false) } else { arg };
        let whole = Self::whole().mut_subcommand("serve", |serve| serve.mut_args(show));
        let mut matches = whole.try_get_matches_from(words)?;
        match Self::from_arg_matches_mut(&mut matches)?.command {
            Command::Serve(arguments) => Ok(*arguments),
            _ => unreachable!("the words are those of serve"),
        }
    }
}

/// Makes `weir image bench` an alias of `weir bench`: scripts replace `qemu-img` by `weir image`.
fn as_bench(words: &mut Vec<OsString>) {
    let is = |at: usize, word: &str| words.get(at).is_some_and(|given| given == word);
    if is(1, "image") && is(2, "bench") {
        words.remove(1);
    }
}

/// Whether `attach` has this long option.
fn has_option(command: &clap::Command, name: &str) -> bool {
    let attach = command.find_subcommand("attach");
    attach.is_some_and(|attach| attach.get_arguments().any(|argument| argument.get_long() == Some(name)))
}

/// What numbers are called where an option takes one.
const NUMBERS: [&str; 9] = ["SIZE", "N", "TIME", "SECONDS", "PERCENT", "COUNT", "DEPTH", "OFFSET", "BYTE"];

/// A number below zero reaches the option it is for, which says what it takes, and is not looked
/// for among the options.
fn with_numbers(command: clap::Command) -> clap::Command {
    let is_number = |argument: &Arg| {
        let names = argument.get_value_names().unwrap_or_default();
        !argument.is_positional() && names.iter().any(|name| NUMBERS.contains(&name.as_str()))
    };
    let taking =
        |argument: Arg| if is_number(&argument) { argument.allow_hyphen_values(true) } else { argument };
    command.mut_args(taking).mut_subcommands(with_numbers)
}

/// Describes the limits below the options of each command that has them, where they are hidden.
fn with_limits(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(with_limits);
    let has_limits = command.get_arguments().any(|argument| argument.get_id() == "iops-total");
    let below = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    match has_limits {
        true => command.after_help(format!("{}\n\n{below}", limits::LIMITS_HELP)),
        false => command,
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
    #[command(
        after_help = daemon::serve::EXAMPLES,
        override_usage = "weir serve [OPTIONS] <IMAGE>...\n       weir serve [OPTIONS] --config <FILE>"
    )]
    Serve(Box<ServeArgs>),
    /// Tell whether a daemon would start with a config file
    #[command(after_help = daemon::serve::CHECK_EXAMPLES)]
    CheckConfig(daemon::serve::CheckArgs),
    /// Make a disk a block device of this host, or mount what is on it
    #[command(after_help = attach::ATTACH_EXAMPLES)]
    Attach(Box<attach::AttachArgs>),
    /// Take such a device away
    #[command(after_help = attach::DETACH_EXAMPLES)]
    Detach(attach::DetachArgs),
    /// What hands events on for `serve --on-event`
    #[command(hide = true)]
    OnEventRunner,
    /// What `attach` leaves in the background
    #[command(hide = true)]
    AttachKeeper,
    /// What removes a device by ublk that nobody serves any more
    #[command(hide = true)]
    UblkGuard,
    /// Show what runs, how fast, and what holds it back
    #[command(after_help = status::EXAMPLES)]
    Status(status::StatusArgs),
    /// Tell whether limits, reservations, shares and waits hold
    #[command(after_help = verify::EXAMPLES)]
    Verify(verify::VerifyArgs),
    /// Show what a disk or a group is held to, or change it while it runs
    #[command(after_help = throttle::EXAMPLES)]
    Throttle(Box<throttle::ThrottleArgs>),
    /// Show the hosts that share limits, what they want and what each may use
    #[command(subcommand, after_help = cluster::EXAMPLES)]
    Cluster(cluster::ClusterCommand),
    /// Show what is read ahead of a disk's readers, or change it while it runs
    #[command(after_help = prefetch::EXAMPLES)]
    Prefetch(prefetch::PrefetchArgs),
    /// Have the daemon serve one more disk, or one less
    #[command(subcommand, after_help = adding::DISK_EXAMPLES)]
    Disk(adding::DiskCommand),
    /// Make a group that disks share the limits of, or remove one
    #[command(subcommand, after_help = adding::GROUP_EXAMPLES)]
    Group(adding::GroupCommand),
    /// Have the daemon read its config file again
    #[command(after_help = reload::EXAMPLES)]
    Reload(reload::ReloadArgs),
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
    Image(Box<image_tool::ImageCommand>),
    /// Limit control groups, explain what a limit misses, and show who does what
    #[command(subcommand, after_help = cgroup::ABOUT)]
    Cgroup(cgroup::CgroupCommand),
    /// Be a volume plugin: volumes of Docker and Podman that are images
    #[command(after_help = container::EXAMPLES)]
    DockerPlugin(container::PluginArgs),
    /// Keep what disks are asked, and how long it takes, in a file
    #[command(after_help = record::EXAMPLES)]
    Record(record::RecordArgs),
    /// Tell what is in traces, and write them in another format
    #[command(subcommand, long_about = lab::trace::convert::ABOUT)]
    Trace(lab::trace::convert::TraceCommand),
    /// Send requests to an image, and tell how long they took
    #[command(after_help = lab::bench::EXAMPLES)]
    Bench(Box<lab::bench::BenchArgs>),
    /// Replay a trace through limits, groups and prefetching, in virtual time
    #[command(after_help = lab::simulate::EXAMPLES)]
    Simulate(Box<lab::simulate::SimulateArgs>),
    /// Tell which limits would have kept a target for the disks of a trace, at the least capacity
    #[command(after_help = lab::advise::EXAMPLES)]
    Advise(Box<lab::advise::AdviseArgs>),
    /// Show what a measurement found, or compare two
    #[command(after_help = lab::report::EXAMPLES)]
    Report(lab::report::ReportArgs),
    /// Measure cache modes, cluster sizes, caches and prefetch, and tell what to choose
    #[command(after_help = lab::tune::EXAMPLES)]
    Tune(Box<lab::tune::TuneArgs>),
    /// Write the manual pages, and what shells complete by
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
}

#[cfg(test)]
mod option_rules;

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn the_command_is_consistent() {
        Cli::whole().debug_assert();
    }

    fn said(line: &str) -> String {
        let words = std::iter::once("weir").chain(line.split_whitespace());
        let matches = Cli::whole().try_get_matches_from(words);
        let text = matches.expect_err(line).render().to_string();
        text.strip_prefix("error: ").unwrap_or(&text).to_owned()
    }

    #[test]
    fn a_number_below_zero_is_judged_by_its_option() {
        for (line, option, rule) in [
            ("serve a --bps-total -5", "'-5' for '--bps-total <SIZE>'", "is not a size"),
            ("serve a --bps-total=-5", "'-5' for '--bps-total <SIZE>'", "is not a size"),
            ("serve a --memory -5G", "'-5G' for '--memory <SIZE>'", "is not a size"),
            ("throttle x --iops-total -1", "'-1' for '--iops-total <N>'", "is not a whole number"),
            ("throttle x --read-iops-sec -1", "'-1' for '--read-iops-sec", "is not a whole number"),
            ("status --interval -1s", "'-1s' for '--interval <TIME>'", "is not a duration"),
            ("cgroup limit / --device sda --bps-total -5", "'-5' for '--bps-total <SIZE>'", "is not a size"),
        ] {
            let text = said(line);
            assert!(
                text.starts_with(&format!("invalid value {option}")) && text.contains(rule),
                "{line}: {text}"
            );
        }
    }

    /// Where help tells how sizes are written it does so in the same words.
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
        look(&Cli::command(), &mut found);
        assert!(found > 4, "{found} commands describe sizes");
    }
}
